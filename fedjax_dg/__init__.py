"""Federated domain generalization in JAX: train across clients that never share data, for a domain nobody trained on."""

from fedjax_dg import aggregators, algorithms, alignment, backbones, datasets
from fedjax_dg.federation import Federation, federate
from fedjax_dg.run import NotFinite, Round, make_round, run, run_blocks
from fedjax_dg.types import (
    Aggregator,
    Algorithm,
    Examples,
    Local,
    Received,
    RoundInfo,
    ServerState,
    Start,
    Topology,
    Variables,
)

__version__ = "0.1.0"

__all__ = [
    "Aggregator",
    "Algorithm",
    "Examples",
    "Federation",
    "Local",
    "NotFinite",
    "Received",
    "Round",
    "RoundInfo",
    "ServerState",
    "Start",
    "Topology",
    "Variables",
    "aggregators",
    "algorithms",
    "alignment",
    "backbones",
    "datasets",
    "federate",
    "make_round",
    "run",
    "run_blocks",
]
