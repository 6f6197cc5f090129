"""Algorithms: what a client optimises and reports. One method, one file, one line in ``ALGORITHMS``."""

from fedjax_dg.algorithms.common import OPTIMIZERS, gradient_method, gradient_step, keep_batch_stats, keep_optimizer
from fedjax_dg.algorithms.fedavg import FedAvgHparams, fedavg
from fedjax_dg.algorithms.fediir import FedIIRHparams, fediir
from fedjax_dg.algorithms.fedprox import FedProxHparams, fedprox
from fedjax_dg.algorithms.fedsr import FedSRHparams, fedsr
from fedjax_dg.algorithms.mtgc import MTGCHparams, mtgc
from fedjax_dg.algorithms.scaffold import ScaffoldHparams, scaffold

ALGORITHMS = {
    "fedavg": fedavg,
    "fedprox": fedprox,
    "scaffold": scaffold,
    "fediir": fediir,
    "mtgc": mtgc,
    "fedsr": fedsr,
}

__all__ = [
    "ALGORITHMS",
    "OPTIMIZERS",
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
