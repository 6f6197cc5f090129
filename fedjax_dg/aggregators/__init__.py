"""Aggregators: how models become one, at the station tier or the server tier. One rule, one file."""

from fedjax_dg.aggregators.feddg_ga import feddg_ga
from fedjax_dg.aggregators.fedgma import fedgma, masked
from fedjax_dg.aggregators.fedrc import fedrc
from fedjax_dg.aggregators.fisher import fisher, measure_fisher
from fedjax_dg.aggregators.grams import Gram, GramForm, LowRankGram, grams_of, measure_grams
from fedjax_dg.aggregators.hfedatm import hfedatm, hfedatm_literal
from fedjax_dg.aggregators.importance import importance
from fedjax_dg.aggregators.mean import BN_POOLS, WEIGHTINGS, fedadam, fedavgm, mean, pool, server_optimizer
from fedjax_dg.aggregators.otfusion import otfusion
from fedjax_dg.aggregators.regmean import Merged, regmean, shrink
from fedjax_dg.aggregators.robust import median, trimmed_mean
from fedjax_dg.aggregators.weighted import merge_by

AGGREGATORS = {
    "mean": mean,
    "hfedatm": hfedatm,
    "hfedatm_literal": hfedatm_literal,
    "fedavgm": fedavgm,
    "fedadam": fedadam,
    "fedgma": fedgma,
    "importance": importance,
    "feddg_ga": feddg_ga,
    "fedrc": fedrc,
    "fisher": fisher,
    "otfusion": otfusion,
    "trimmed_mean": trimmed_mean,
    "median": median,
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
    "feddg_ga",
    "fedgma",
    "fedrc",
    "fisher",
    "grams_of",
    "hfedatm",
    "hfedatm_literal",
    "importance",
    "masked",
    "mean",
    "measure_fisher",
    "measure_grams",
    "median",
    "merge_by",
    "otfusion",
    "pool",
    "regmean",
    "server_optimizer",
    "shrink",
    "trimmed_mean",
]
