"""Algorithms: what a client optimises and reports. One method, one file, one line in ``ALGORITHMS``."""

from fedjax_dg.algorithms.afl import AFLHparams, afl
from fedjax_dg.algorithms.ccst import CCSTHparams, Codec, ccst
from fedjax_dg.algorithms.common import (
    OPTIMIZERS,
    augmenting,
    gradient_method,
    gradient_step,
    keep_batch_stats,
    keep_optimizer,
)
from fedjax_dg.algorithms.coral import CoralHparams, coral
from fedjax_dg.algorithms.elcfs import ELCFSHparams, elcfs
from fedjax_dg.algorithms.fedadg import FEDADG_CODE, FEDADG_PAPER, FedADGHparams, fedadg
from fedjax_dg.algorithms.fedavg import FedAvgHparams, fedavg
from fedjax_dg.algorithms.fedgma import FedGMAHparams, fedgma
from fedjax_dg.algorithms.fediir import FedIIRHparams, fediir
from fedjax_dg.algorithms.fedprox import FedProxHparams, fedprox
from fedjax_dg.algorithms.fedsr import FedSRHparams, fedsr
from fedjax_dg.algorithms.fish import FishHparams, fish
from fedjax_dg.algorithms.gperxan import GPerXANHparams, gperxan
from fedjax_dg.algorithms.groupdro import GroupDROHparams, groupdro
from fedjax_dg.algorithms.irm import IRMHparams, irm
from fedjax_dg.algorithms.lsi import LSIHparams, lsi, with_bottleneck
from fedjax_dg.algorithms.mcgdm import MCGDMHparams, mcgdm
from fedjax_dg.algorithms.mixup import MixupHparams, mixup
from fedjax_dg.algorithms.mmd import MMDHparams, mmd
from fedjax_dg.algorithms.mtgc import MTGCHparams, mtgc
from fedjax_dg.algorithms.rsc import RSCHparams, rsc
from fedjax_dg.algorithms.scaffold import ScaffoldHparams, scaffold
from fedjax_dg.algorithms.stable_fedadg import STABLE_FEDADG_PAPER, StableFedADGHparams, stable_fedadg
from fedjax_dg.algorithms.stablefdg import StableFDGHparams, stablefdg
from fedjax_dg.algorithms.stablenet import StableNetHparams, stablenet
from fedjax_dg.algorithms.vrex import VRExHparams, vrex

ALGORITHMS = {
    "fedavg": fedavg,
    "fedprox": fedprox,
    "scaffold": scaffold,
    "fediir": fediir,
    "mtgc": mtgc,
    "fedsr": fedsr,
    "fedadg": fedadg,
    "stable_fedadg": stable_fedadg,
    "stablenet": stablenet,
    "rsc": rsc,
    "irm": irm,
    "vrex": vrex,
    "fish": fish,
    "mmd": mmd,
    "coral": coral,
    "groupdro": groupdro,
    "mixup": mixup,
    "afl": afl,
    "fedgma": fedgma,
    "lsi": lsi,
    "elcfs": elcfs,
    "ccst": ccst,
    "gperxan": gperxan,
    "mcgdm": mcgdm,
    "stablefdg": stablefdg,
}

__all__ = [
    "ALGORITHMS",
    "FEDADG_CODE",
    "FEDADG_PAPER",
    "STABLE_FEDADG_PAPER",
    "AFLHparams",
    "afl",
    "CCSTHparams",
    "Codec",
    "ccst",
    "CoralHparams",
    "coral",
    "ELCFSHparams",
    "elcfs",
    "FedADGHparams",
    "fedadg",
    "FedGMAHparams",
    "fedgma",
    "FishHparams",
    "fish",
    "GPerXANHparams",
    "gperxan",
    "GroupDROHparams",
    "groupdro",
    "IRMHparams",
    "irm",
    "MCGDMHparams",
    "mcgdm",
    "MixupHparams",
    "mixup",
    "LSIHparams",
    "lsi",
    "with_bottleneck",
    "MMDHparams",
    "mmd",
    "RSCHparams",
    "rsc",
    "StableFedADGHparams",
    "stable_fedadg",
    "StableFDGHparams",
    "stablefdg",
    "StableNetHparams",
    "stablenet",
    "VRExHparams",
    "vrex",
    "OPTIMIZERS",
    "augmenting",
    "FedAvgHparams",
    "FedIIRHparams",
    "FedProxHparams",
    "FedSRHparams",
    "MTGCHparams",
    "ScaffoldHparams",
    "fedavg",
    "fediir",
    "fedprox",
    "fedsr",
    "gradient_method",
    "gradient_step",
    "keep_batch_stats",
    "keep_optimizer",
    "mtgc",
    "scaffold",
]
