"""Federated domain generalization in JAX: train across clients that never share data, for a domain nobody trained on.

>>> import jax
>>> import fedjax_dg as fdg
>>> key = jax.random.key(0)
>>> domains = fdg.datasets.load("emoji_styles")  # images, labels, domain ids; host arrays
>>> federation = fdg.federate(domains, held_out="noto", stations=10, clients_per_station=10, domain_mix=0.0, seed=0)
>>> backbone = fdg.backbones.lenet5(num_classes=6)
>>> algorithm = fdg.algorithms.fedsr(fdg.algorithms.FedSRHparams(l2=0.01))
>>> round_fn = fdg.make_round(backbone, algorithm, federation.topology, to_server=fdg.aggregators.hfedatm(alpha=0.75))
>>> state = round_fn.init(key)
>>> state, history = fdg.run(round_fn, state, federation, rounds=2, key=key)
>>> len(history), sorted(history[-1])[:4]
(2, ['accuracy', 'accuracy/fluent_flat', 'accuracy/fluent_mono', 'accuracy/noto'])
"""

from fedjax_dg import aggregators, algorithms, alignment, backbones, datasets, sharding, weights
from fedjax_dg.config import RunConfig
from fedjax_dg.federation import Federation, federate
from fedjax_dg.models import Model, load_model
from fedjax_dg.run import NotFinite, Round, make_round, run, run_blocks
from fedjax_dg.sweep import Sweep, sweep
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
    "Model",
    "NotFinite",
    "Received",
    "Round",
    "RoundInfo",
    "RunConfig",
    "ServerState",
    "Start",
    "Sweep",
    "Topology",
    "Variables",
    "aggregators",
    "algorithms",
    "alignment",
    "backbones",
    "datasets",
    "federate",
    "load_model",
    "make_round",
    "run",
    "run_blocks",
    "sharding",
    "sweep",
    "weights",
]
