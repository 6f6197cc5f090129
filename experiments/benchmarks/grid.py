"""How to run cells of a grid: one after another, side by side, or as one program over seeds and client learning rates.

command:  python experiments/benchmarks/grid.py                 (``--cells 16``: a sweep)
cost:     about 2 minutes on 2 CPU cores

Work: the demo's round (emoji styles, 10 x 10 clients, 5 station rounds, batch 7) for --cells cells, each of its own seed and
learning rate. One program holds all cells, either all at once (vmap) or one after another (lax.map). The forms are timed in
turn, --repeats times; what is printed is the median and the range of seconds a server round of one cell, and of the ratio to
"one after another" within a repeat. Compilation is not counted.
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
    parser.add_argument("--cells", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--aggregator", default="mean")
    options = parser.parse_args()

    domains = fdg.datasets.load("emoji_styles")
    backbone = fdg.backbones.lenet5(num_classes=len(domains.class_names))
    cells = range(options.cells)
    federations = [fdg.federate(domains, "fluent_mono", seed=s, station_rounds=5, batch_size=7) for s in cells]
    to_server = fdg.aggregators.AGGREGATORS[options.aggregator]()

    def round_of(client_lr):
        algorithm = fdg.algorithms.fedavg(fdg.algorithms.FedAvgHparams(client_lr=client_lr))
        return fdg.make_round(backbone, algorithm, federations[0].topology, to_server)

    step = lambda client_lr, *rest: round_of(client_lr).step(*rest)
    rates, keys = jnp.geomspace(0.01, 0.1, options.cells), jax.random.split(jax.random.key(0), options.cells)
    states = [round_of(0.05).init(k) for k in keys]

    def stack(trees):
        return jax.tree.map(lambda *x: jnp.stack(x), *trees)

    stacked = (rates, stack(states), stack([f.data for f in federations]), keys)
    alone, at_once = jax.jit(step), jax.jit(jax.vmap(step))
    in_turn = jax.jit(lambda *stacked: jax.lax.map(lambda cell: step(*cell), stacked))
    pool = ThreadPoolExecutor(os.cpu_count())

    def cell(s):
        return jax.block_until_ready(alone(rates[s], states[s], federations[s].data, keys[s]))

    forms = {
        "one after another": lambda: [cell(s) for s in cells],
        "side by side": lambda: list(pool.map(cell, cells)),
        "one program, vmap": lambda: jax.block_until_ready(at_once(*stacked)),
        "one program, lax.map": lambda: jax.block_until_ready(in_turn(*stacked)),
    }
    seconds = {name: [] for name in forms}
    for repeat in range(options.repeats + 1):
        for name, form in forms.items():
            start = time.perf_counter()
            form()
            if repeat:  # the first one compiles
                seconds[name].append((time.perf_counter() - start) / options.cells)
    print(
        f"{options.cells} x {options.aggregator}; {os.cpu_count()} cores, {jax.default_backend()}, jax {jax.__version__}"
    )
    for name, times in seconds.items():
        ratios = [t / base for t, base in zip(times, seconds["one after another"])]
        print(
            f"{name:20s} {statistics.median(times):.2f} s ({min(times):.2f}-{max(times):.2f}) a round, "
            f"ratio {statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"
        )


if __name__ == "__main__":
    main()
