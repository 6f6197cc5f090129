"""What every client method costs beside FedAvg: seconds a round, and floats up a round.

command:  python experiments/benchmarks/methods.py
cost:     about 6 minutes on 2 CPU cores, most of it compilation

Work: LeNet-5 at six classes, one station of 4 clients with 128 images of 32 x 32 each, of two domains in turn, batch 32,
two local passes (FedADG's and Stable-FedADG's first is warm-up), plain averaging. Methods are timed in turn, --repeats
times; printed are the median and range of the ratio to FedAvg's round within a repeat, and the floats a client uploads a
server round (model and messages) over those of FedAvg. CCST is left out: its
round is FedAvg's, and it needs files.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import fedjax_dg as fdg
from fedjax_dg.algorithms import ALGORITHMS
from fedjax_dg.traffic import traffic_of
from fedjax_dg.types import Examples

CLIENTS, EXAMPLES, CLASSES = 4, 128, 6
OPTIONS: dict[str, dict[str, Any]] = {name: {"warmup_epochs": 1} for name in ("fedadg", "stable_fedadg")}
#: Variants worth a row of their own.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "rsc, mute=either": ("rsc", {"mute": "either"}),
    "stablenet, memory": ("stablenet", {"memory_rows": 32}),
    "mtgc, z_init=grad": ("mtgc", {"z_init": "grad"}),
}


def data_of() -> tuple[Examples, jax.Array]:
    """Random images; clients hold two domains in turn."""
    rng = np.random.default_rng(0)
    shape = (1, CLIENTS, EXAMPLES)
    inputs = rng.integers(0, 256, (*shape, 32, 32, 3), dtype=np.uint8)
    labels = rng.integers(0, CLASSES, shape).astype(np.int32)
    domain = np.broadcast_to(np.arange(EXAMPLES) % 2, shape).astype(np.int32)
    examples = Examples(*(jnp.asarray(x) for x in (inputs, labels, np.ones(shape, bool), domain)))
    return examples, jnp.arange(CLIENTS)[None]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    data, key = data_of(), jax.random.key(0)
    topology = fdg.Topology(1, CLIENTS, local_epochs=2, batch_size=32)
    # gPerXAN needs batch norm, which LeNet-5 has not
    methods = {k: (k, OPTIONS.get(k, {})) for k in ALGORITHMS if k not in ("ccst", "gperxan")} | VARIANTS
    rounds, floats = {}, {}
    for row, (name, more) in methods.items():
        round_fn = fdg.make_round(fdg.backbones.lenet5(CLASSES), ALGORITHMS[name](**more), topology)
        state = round_fn.init(key)
        rounds[row] = (jax.jit(round_fn.step), state)
        floats[row] = traffic_of(
            fdg.backbones.lenet5(CLASSES), ALGORITHMS[name](**more), topology, 1
        ).per_round.up.floats
    seconds = {row: [] for row in rounds}
    for repeat in range(options.repeats + 1):
        for row, (step, state) in rounds.items():
            start = time.perf_counter()
            jax.block_until_ready(step(state, data, key))
            if repeat:  # the first one compiles
                seconds[row].append(time.perf_counter() - start)
    print(
        f"{os.cpu_count()} cores, {jax.default_backend()}, jax {jax.__version__}; FedAvg uploads {floats['fedavg']:,} floats"
    )
    print("| method | seconds a round / FedAvg's | floats up / FedAvg's |\n| --- | --- | --- |")
    for row, times in seconds.items():
        ratios = [t / base for t, base in zip(times, seconds["fedavg"])]
        time_ratio = f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"
        print(f"| {row} | {time_ratio} | {floats[row] / floats['fedavg']:.2f} |")


if __name__ == "__main__":
    main()
