"""Aggregators: how models become one, at the station tier or the server tier. One rule, one file."""

from fedjax_dg.aggregators.hfedatm import hfedatm
from fedjax_dg.aggregators.mean import WEIGHTINGS, fedadam, fedavgm, mean, server_optimizer
from fedjax_dg.aggregators.regmean import Gram, Merged, regmean, shrink

AGGREGATORS = {"mean": mean, "hfedatm": hfedatm, "fedavgm": fedavgm, "fedadam": fedadam}

__all__ = [
    "AGGREGATORS",
    "WEIGHTINGS",
    "Gram",
    "Merged",
    "fedadam",
    "fedavgm",
    "hfedatm",
    "mean",
    "regmean",
    "server_optimizer",
    "shrink",
]
