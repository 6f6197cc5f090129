"""Aggregators: how models become one, at the station tier or the server tier. One rule, one file."""

from fedjax_dg.aggregators.fedgma import fedgma, masked
from fedjax_dg.aggregators.grams import Gram, GramForm, LowRankGram, grams_of, measure_grams
from fedjax_dg.aggregators.hfedatm import hfedatm, hfedatm_literal
from fedjax_dg.aggregators.importance import importance
from fedjax_dg.aggregators.mean import BN_POOLS, WEIGHTINGS, fedadam, fedavgm, mean, pool, server_optimizer
from fedjax_dg.aggregators.regmean import Merged, regmean, shrink

AGGREGATORS = {
    "mean": mean,
    "hfedatm": hfedatm,
    "hfedatm_literal": hfedatm_literal,
    "fedavgm": fedavgm,
    "fedadam": fedadam,
    "fedgma": fedgma,
    "importance": importance,
}

__all__ = [
    "AGGREGATORS",
    "BN_POOLS",
    "WEIGHTINGS",
    "Gram",
    "GramForm",
    "LowRankGram",
    "Merged",
    "fedadam",
    "fedavgm",
    "fedgma",
    "grams_of",
    "hfedatm",
    "hfedatm_literal",
    "importance",
    "masked",
    "mean",
    "measure_grams",
    "pool",
    "regmean",
    "server_optimizer",
    "shrink",
]
