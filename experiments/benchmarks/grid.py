"""How to run a small grid of cells: one after another, side by side, or as one vmapped program over seeds.

command:  python experiments/benchmarks/grid.py
cost:     about 2 minutes on 2 CPU cores

Work: the demo's round (emoji styles, 10 x 10 clients, 5 station rounds, batch 7) for --seeds cells. The three forms are
timed in turn, --repeats times; what is printed is the median and the range of seconds a server round of one cell, and of the
ratio to "one after another" within a repeat. Compilation is not counted.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp

import fedjax_dg as fdg


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--aggregator", default="mean")
    options = parser.parse_args()

    domains = fdg.datasets.load("emoji_styles")
    backbone = fdg.backbones.lenet5(num_classes=len(domains.class_names))
    seeds = range(options.seeds)
    federations = [fdg.federate(domains, "fluent_mono", seed=s, station_rounds=5, batch_size=7) for s in seeds]
    to_server = fdg.aggregators.AGGREGATORS[options.aggregator]()
    round_fn = fdg.make_round(backbone, fdg.algorithms.fedavg(), federations[0].topology, to_server)
    step = jax.jit(round_fn.step)
    keys = jax.random.split(jax.random.key(0), options.seeds)
    states = [round_fn.init(k) for k in keys]

    def stack(trees):
        return jax.tree.map(lambda *x: jnp.stack(x), *trees)

    together = jax.jit(jax.vmap(round_fn.step))
    stacked = (stack(states), stack([f.data for f in federations]), keys)
    pool = ThreadPoolExecutor(os.cpu_count())

    def cell(s):
        return jax.block_until_ready(step(states[s], federations[s].data, keys[s]))

    forms = {
        "one after another": lambda: [cell(s) for s in seeds],
        "side by side": lambda: list(pool.map(cell, seeds)),
        "one vmapped program": lambda: jax.block_until_ready(together(*stacked)),
    }
    seconds = {name: [] for name in forms}
    for repeat in range(options.repeats + 1):
        for name, form in forms.items():
            start = time.perf_counter()
            form()
            if repeat:  # the first one compiles
                seconds[name].append((time.perf_counter() - start) / options.seeds)
    print(
        f"{options.seeds} x {options.aggregator}; {os.cpu_count()} cores, {jax.default_backend()}, jax {jax.__version__}"
    )
    for name, times in seconds.items():
        ratios = [t / base for t, base in zip(times, seconds["one after another"])]
        print(
            f"{name:20s} {statistics.median(times):.2f} s ({min(times):.2f}-{max(times):.2f}) a round, "
            f"ratio {statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"
        )


if __name__ == "__main__":
    main()
