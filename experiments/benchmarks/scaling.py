"""What a round costs as a federation grows: seconds and memory by clients, local steps and rounds.

command:  python experiments/benchmarks/scaling.py --plot experiments/benchmarks/scaling.png
          python experiments/benchmarks/scaling.py --many        (10,000 clients)
          python experiments/benchmarks/scaling.py --long        (200 rounds)
cost:     about 6 minutes and 5 GB of memory on 2 idle CPU cores; 1 minute each with --many (3 GB) and --long

Work: LeNet-5, 128 random uint8 images a client, batch 32, FedAvg and --aggregator. Every point is a process of its own, so
that its peak of memory is its own (read from /proc: Linux only). The points of a sweep are timed in turn, --repeats times;
printed are medians and ranges, without compilation and a first call. The line seconds = a + b n minimises relative errors,
since the points span three decades; R^2 is that of the seconds themselves.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import fedjax_dg as fdg
from fedjax_dg.run import check_finite

CLASSES = 7
CLIENTS = ((1, 1), (1, 10), (3, 10), (10, 10), (10, 30), (10, 100))  # stations x clients of each
STEPS = (1, 2, 4, 8, 16, 32)
ROUNDS = (1, 5, 20, 50, 200)
# sweep -> points: (n, stations, clients of each, local steps, rounds)
SWEEPS = {
    "clients": [(s * c, s, c, 4, 1) for s, c in CLIENTS],
    "local steps": [(k, 5, 10, k, 1) for k in STEPS],
    "rounds": [(r, 10, 1, 4, r) for r in ROUNDS],
}
MARKS = (10, 50, 100, 200)  # rounds after which --long looks at its memory
BLUE, RED, GREEN = "#0072B2", "#D55E00", "#009E73"  # Okabe and Ito's: told apart by any eye


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--aggregator", default="mean")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--plot", metavar="FILE", help="draw the sweeps")
    parser.add_argument("--many", action="store_true", help="10,000 clients instead of the sweeps")
    parser.add_argument("--long", action="store_true", help="200 rounds instead of the sweeps")
    parser.add_argument("--point", nargs=4, type=int, help=argparse.SUPPRESS)  # what a point's process is told
    options = parser.parse_args()
    if options.point:
        point(options.aggregator, *options.point)
        return
    print(f"fedavg + {options.aggregator}; {os.cpu_count()} cores, {jax.default_backend()}, jax {jax.__version__}")
    if options.many:
        many(options.aggregator)
    if options.long:
        long(options.aggregator)
    if not (options.many or options.long):
        measured = {name: sweep(name, options.aggregator, options.repeats) for name in SWEEPS}
        if options.plot:
            draw(measured, options.plot)


def memory(field: str) -> int:
    """Bytes of this process: ``VmRSS`` now, ``VmHWM`` at its peak. getrusage's peak may be that of the parent process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


def random_data(stations: int, clients: int, examples: int, shape: tuple[int, ...]):
    """What a round reads; clients are drawn one after another, so that making the data is not the memory's peak."""

    def images(key):
        return jax.random.bits(key, (examples, *shape), jnp.uint8)

    places = (stations, clients, examples)
    keys = jax.random.split(jax.random.key(0), stations * clients)
    inputs = jax.jit(lambda keys: jax.lax.map(images, keys).reshape(*places, *shape))(keys)
    labels = jax.random.randint(jax.random.key(1), places, 0, CLASSES)
    data = fdg.Examples(inputs, labels, jnp.ones(places, bool), jnp.zeros(places, jnp.int32))
    return data, jnp.arange(stations * clients).reshape(stations, clients)


def size_of(tree) -> int:
    """Bytes of a tree's arrays."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


def round_of(aggregator: str, topology: fdg.Topology) -> fdg.Round:
    """The round of every measurement."""
    rule = fdg.aggregators.AGGREGATORS[aggregator]()
    return fdg.make_round(fdg.backbones.lenet5(CLASSES), fdg.algorithms.fedavg(), topology, rule)


def point(aggregator: str, stations: int, clients: int, steps: int, rounds: int) -> None:
    """The process of a point: for every line it reads, it runs a block of ``rounds`` rounds and prints what that took."""
    sys.stdin.readline()  # one process compiles at a time
    round_fn = round_of(aggregator, fdg.Topology(stations, clients, local_steps=steps))
    data, key = random_data(stations, clients, 128, round_fn.backbone.input_shape), jax.random.key(2)
    program = round_fn.block.lower(round_fn.init(key), data, key, length=rounds).compile()
    planned = program.memory_analysis()
    while True:
        state = jax.block_until_ready(round_fn.init(key))  # a block consumes its state
        begun = time.perf_counter()
        _, info = jax.block_until_ready(program(state, data, key))
        seconds = time.perf_counter() - begun
        check_finite(info, 0)
        record = {"seconds": seconds, "peak": memory("VmHWM"), "data": size_of(data)}
        record["temporary"] = planned.temp_size_in_bytes if planned else float("nan")
        print(json.dumps(record), flush=True)
        if not sys.stdin.readline():
            return


def ask(process: subprocess.Popen[str]) -> dict[str, float]:
    """One more measurement of a point."""
    assert process.stdin and process.stdout
    process.stdin.write("\n")
    process.stdin.flush()
    return json.loads(process.stdout.readline())


def sweep(name: str, aggregator: str, repeats: int) -> dict[str, np.ndarray]:
    """All points of a sweep, each in a process of its own, and the line through their seconds."""
    print(f"\n{name:>11s}  {'seconds (range)':24s}  peak MiB  without data  temporary as planned by XLA")
    command = [sys.executable, __file__, "--aggregator", aggregator, "--point"]
    processes = []
    for _, *sizes in SWEEPS[name]:
        told = [*command, *map(str, sizes)]
        processes.append(subprocess.Popen(told, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        ask(processes[-1])  # compiles and warms up
    records = [[ask(process) for process in processes] for _ in range(repeats)]
    for process in processes:
        process.communicate()
    points = []
    for (n, *_), times in zip(SWEEPS[name], zip(*([at["seconds"] for at in turn] for turn in records))):
        at = records[-1][len(points)] | {"n": n, "seconds": statistics.median(times)}
        points.append(at)
        seconds = f"{at['seconds']:.4f} ({min(times):.4f}-{max(times):.4f})"
        sizes = (at["peak"] / 2**20, (at["peak"] - at["data"]) / 2**20, at["temporary"] / 2**20)
        print(f"{n:11,d}  {seconds:24s}  {sizes[0]:8.0f}  {sizes[1]:12.0f}  {sizes[2]:9.1f}", flush=True)
    columns = {field: np.array([at[field] for at in points]) for field in points[0]}
    n, seconds = columns["n"], columns["seconds"]
    a, b = line = fit(n, seconds)
    off = (a + b * n) / seconds - 1
    r2 = 1 - np.sum((off * seconds) ** 2) / np.sum((seconds - seconds.mean()) ** 2)
    worst = np.abs(off).argmax()
    print(f"seconds = {a:.4f} + {b:.6f} n; R^2 {r2:.5f}; off by at most {100 * off[worst]:+.1f} %, at {n[worst]:,d}")
    return columns | {"line": line}


def fit(n: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """(a, b) of the line a + b n that minimises the sum of squares of (a + b n) / seconds - 1."""
    return np.linalg.lstsq(np.stack([1 / seconds, n / seconds], 1), np.ones(len(n)))[0]


def draw(measured: dict[str, dict[str, np.ndarray]], path: str) -> None:
    """A column a sweep: seconds with the fitted line above, memory below."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import StrMethodFormatter

    figure = Figure(figsize=(10, 5.6), layout="constrained")
    grid = figure.subplots(2, len(measured), sharex="col", sharey="row")
    for (name, points), (top, bottom) in zip(measured.items(), grid.T):
        n, (a, b) = points["n"], points["line"]
        dense = np.geomspace(n[0], n[-1], 200)
        top.plot(dense, a + b * dense, color="black", linewidth=1, label=f"{a:.2g} + {b:.2g} n")
        top.plot(n, points["seconds"], "o", color=BLUE, label="measured")
        top.set(xscale="log", yscale="log")
        bottom.plot(n, points["peak"] / 2**20, "s-", color=RED, label="peak of the process")
        bottom.plot(n, (points["peak"] - points["data"]) / 2**20, "^--", color=GREEN, label="peak without the data")
        bottom.plot(n, points["temporary"] / 2**20, "v:", color="black", label="temporary, as XLA plans it")
        bottom.set(xlabel=f"n: {name}", ylim=0)
        bottom.set_xticks(n, [f"{i:,d}" for i in n], minor=False)
        bottom.xaxis.minorticks_off()
        for axes in (top, bottom):
            axes.grid(alpha=0.3)
        top.legend(fontsize=8)
    grid[1, 0].legend(fontsize=8)
    grid[0, 0].set_ylabel("seconds")
    grid[0, 0].yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    grid[1, 0].set_ylabel("memory, MiB")
    figure.savefig(path, dpi=120)
    print(f"\ndrawn: {path}")


def many(aggregator: str) -> None:
    """Three rounds of 10,000 clients, a tenth of them at a time."""
    round_fn = round_of(aggregator, fdg.Topology(100, 100, participants=10))
    key = jax.random.key(2)
    data, state = random_data(100, 100, 32, round_fn.backbone.input_shape), round_fn.init(key)
    begun = time.perf_counter()
    program = round_fn.block.lower(state, data, key, length=1).compile()
    seconds = time.perf_counter() - begun
    print(f"100 x 100 clients of 32 examples, 10 of each station's a round; compiled in {seconds:.1f} s")
    before = memory("VmHWM")
    for number in range(3):
        begun = time.perf_counter()
        state, info = jax.block_until_ready(program(state, data, key))
        print(f"round {number + 1}: {time.perf_counter() - begun:.2f} s", flush=True)
        check_finite(info, number)
    peak, size = memory("VmHWM"), size_of(data)
    print(
        f"peak {peak / 2**20:,.0f} MiB ({before / 2**20:,.0f} before round 1), data {size / 2**20:,.0f} MiB, "
        f"without them {(peak - size) / 2**20:,.0f} MiB"
    )


def long(aggregator: str) -> None:
    """200 rounds of emoji styles, 10 stations of a client, judged every 10: memory and compilations must stay put."""
    compiled = []

    def listen(event: str, duration_secs: float, **_):
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(duration_secs)

    jax.monitoring.register_event_duration_secs_listener(listen)
    domains = fdg.datasets.load("emoji_styles")
    backbone = fdg.backbones.lenet5(len(domains.class_names))
    federation = fdg.federate(domains, "noto", clients_per_station=1)
    rule, key = fdg.aggregators.AGGREGATORS[aggregator](), jax.random.key(2)
    round_fn = fdg.make_round(backbone, fdg.algorithms.fedavg(), federation.topology, rule)
    begun = time.perf_counter()
    for reached in fdg.run_blocks(round_fn, round_fn.init(key), federation, MARKS[-1], key, eval_every=MARKS[0]):
        if (done := reached.record["round"]) in MARKS:
            print(
                f"after {done:3d} rounds: {memory('VmRSS') / 2**20:.1f} MiB, {len(compiled)} compilations, "
                f"{time.perf_counter() - begun:.1f} s, accuracy {reached.record['accuracy']:.3f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
