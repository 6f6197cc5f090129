"""A whole round against the same work in PyTorch: seconds, CPU, memory, compilation; what HFedATM adds to it.

command:  python experiments/benchmarks/round.py                (``pip install torch`` for the comparison)
cost:     about 5 minutes and 9 GB of memory on 2 idle CPU cores

Work: LeNet-5 on 32 x 32 images of 7 classes; 10 stations x 10 clients, 128 random examples each as float32 in memory; one
epoch in batches of 32 by SGD with momentum 0.9, a fresh optimizer per client; the mean at stations; at the server (a) the
mean or (b) HFedATM: Grams of dense layers by one pass of the trained model, filters matched by cosine, RegMean. PyTorch's
side is ``torch_round.py``, with 1 thread, 2 threads, and 2 processes of 1 thread; ours takes all cores it finds, as one
device or as two, and keeps LAPACK to one thread, as ``fedjax-dg run`` does. HFedATM's Grams are those of training
(``gram_at=training``, the default) or, as on PyTorch's side, of one more pass (``client``).

Every variant is a process of its own, idle while another computes. Each is asked for one round in turn, --repeats times
after a first one; printed are medians and ranges, ratios being taken within a repeat: to the fastest PyTorch variant of that
repeat and that work. ``--json`` gives as speed-up that of the fastest of ours, so both sides have their best form. CPU
seconds are of all threads and processes, the peak of memory is the sum over a variant's processes. ``start``: until imports,
data and the first state are there. ``first call``: compilation and one round, with an empty compilation cache (cold) and, in
another process, with the cache that the first one left (warm).
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.metadata
import importlib.util
import json
import os
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

# JAX, fedjax_dg and torch are imported where a process needs them: its peak of memory begins with that of its parent.

CLASSES, BATCH, MATMUL = 7, 32, 2048
# multiply-adds of an example's forward pass
CONV1, CONV2, DENSE = 28 * 28 * 6 * 25 * 3, 10 * 10 * 16 * 25 * 6, 400 * 120 + 120 * 84 + 84 * CLASSES
MACHINE = "machine"  # the process that finds out what the machine can do


class Sizes(NamedTuple):
    """How much work a round is."""

    stations: int = 10
    clients: int = 10  # of each station
    examples: int = 128  # of each client


class Variant(NamedTuple):
    """One way to do a round."""

    side: str
    rule: str
    gram_at: str | None = None  # None: the rule's default
    devices: int = 1
    threads: int = 1
    processes: int = 1


class Measured(NamedTuple):
    """What the processes of a variant answered."""

    seconds: list[float]
    cpu_seconds: list[float]
    peak_rss_mib: float
    start_seconds: float
    compile_seconds: float | None  # these two of ours only
    warm_seconds: float | None


FORMS = {"1 thread": {}, "2 threads": {"threads": 2}, "2 processes": {"processes": 2}}
VARIANTS = {
    "ours mean": Variant("ours", "mean"),
    "ours mean 2 devices": Variant("ours", "mean", devices=2),
    "ours hfedatm": Variant("ours", "hfedatm"),
    "ours hfedatm 2 devices": Variant("ours", "hfedatm", devices=2),
    "ours hfedatm client": Variant("ours", "hfedatm", "client"),
    **{f"torch mean {name}": Variant("torch", "mean", **form) for name, form in FORMS.items()},
    **{f"torch hfedatm {name}": Variant("torch", "hfedatm", **form) for name, form in FORMS.items()},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--stations", type=int, default=Sizes().stations)
    parser.add_argument("--clients", type=int, default=Sizes().clients, help="of each station")
    parser.add_argument("--examples", type=int, default=Sizes().examples, help="of each client")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--variants", metavar="A,B", default=",".join(VARIANTS), help=f"of: {', '.join(VARIANTS)}")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the numbers there")
    parser.add_argument("--worker", help=argparse.SUPPRESS)  # what a variant's process is told
    options = parser.parse_args()
    sizes = Sizes(options.stations, options.clients, options.examples)
    if options.worker:
        serve(options.worker, sizes)
        return
    names = options.variants.split(",")
    if unknown := [name for name in names if name not in VARIANTS]:
        parser.error(f"no such variants: {', '.join(unknown)}; choose among {', '.join(VARIANTS)}")
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        launch = functools.partial(start, sizes, folder, stack)
        machine = about_machine(launch)
        obstacles = {name: obstacle(VARIANTS[name], machine) for name in names}
        measured = measure([name for name in names if not obstacles[name]], options.repeats, launch)
        machine["matmul_gflops"] = max(
            machine["matmul_gflops"], launch(MACHINE)[1]["matmul_gflops"]
        )  # others may work too
    show(measured, sizes, machine)
    for name, reason in obstacles.items():
        if reason:
            print(f"{name}: not measured, {reason}")
    if options.json:
        options.json.write_text(json.dumps(summary(measured, machine), indent=2) + "\n")


def obstacle(variant: Variant, machine: dict[str, Any]) -> str | None:
    """Why a variant cannot run here."""
    if variant.side == "torch" and machine["torch"] is None:
        return "torch is not installed (pip install torch)"
    if variant.devices > 1 and machine["backend"] != "cpu":
        return "only a CPU can be taken for several devices"
    return None


# --- a variant's process --------------------------------------------------------------------------------------------


def serve(name: str, sizes: Sizes) -> None:
    """For every line read, one round; answers in lines of JSON: when ready, after each round, at the end of input."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer

    def tell(**answer):
        print(json.dumps(answer), file=answers, flush=True)

    if name == MACHINE:
        tell(**matmul_speed())
        return
    step, end = prepare(VARIANTS[name], sizes)
    tell()
    for _ in sys.stdin:
        cpu, begun = time.process_time(), time.perf_counter()
        elsewhere = step()
        tell(seconds=time.perf_counter() - begun, cpu_seconds=time.process_time() - cpu + elsewhere)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss + end()
    tell(peak_rss_mib=peak / 2 ** (20 if sys.platform == "darwin" else 10))


def prepare(variant: Variant, sizes: Sizes) -> tuple[Callable[[], float], Callable[[], float]]:
    """A round, which returns the CPU seconds of other processes, and an end, which returns their peak of memory."""
    if variant.side == "ours":
        return ours(variant, sizes), lambda: 0.0
    from torch_round import work

    draw = functools.partial(examples, sizes)
    return work(draw, CLASSES, variant.rule, sizes.stations, sizes.clients, variant.threads, variant.processes)


def examples(sizes: Sizes, stations: range) -> tuple[np.ndarray, np.ndarray]:
    """Images [s, C, N, 32, 32, 3] and labels of some stations, drawn one after another into place."""
    places = (len(stations), sizes.clients, sizes.examples)
    images, labels = np.empty((*places, 32, 32, 3), np.float32), np.empty(places, np.int64)
    for here, station in enumerate(stations):
        rng = np.random.default_rng(station)
        rng.standard_normal(out=images[here], dtype=np.float32)
        labels[here] = rng.integers(0, CLASSES, places[1:])
    return images, labels


def ours(variant: Variant, sizes: Sizes) -> Callable[[], float]:
    """A round of the library, in this process alone."""
    import jax
    import jax.numpy as jnp
    from threadpoolctl import threadpool_limits

    import fedjax_dg as fdg
    from fedjax_dg.run import check_finite

    threadpool_limits(1, user_api="blas")
    topology = fdg.Topology(sizes.stations, sizes.clients, batch_size=BATCH)
    mesh = fdg.sharding.mesh_for(topology) if variant.devices > 1 else None
    rule = fdg.aggregators.AGGREGATORS[variant.rule](**({"gram_at": variant.gram_at} if variant.gram_at else {}))
    round_fn = fdg.make_round(fdg.backbones.lenet5(CLASSES), fdg.algorithms.fedavg(), topology, rule, mesh=mesh)
    images, labels = map(jnp.asarray, examples(sizes, range(sizes.stations)))
    whole = fdg.Examples(images, labels, jnp.ones(labels.shape, bool), jnp.zeros_like(labels))
    ids = jnp.arange(sizes.stations * sizes.clients).reshape(sizes.stations, -1)
    data, key = fdg.sharding.place_data((whole, ids), mesh), jax.random.key(0)
    state = jax.block_until_ready(round_fn.init(key))

    def step() -> float:
        nonlocal state
        state, info = jax.block_until_ready(round_fn.block(state, data, key, length=1))
        check_finite(info, 0)
        return 0.0

    return step


def matmul_speed() -> dict[str, Any]:
    """The backend, and GF/s of the fastest of some float32 products of two large matrices, by NumPy or JAX."""
    import jax

    matrix = np.random.default_rng(0).standard_normal((MATMUL, MATMUL), np.float32)
    there, product = jax.numpy.asarray(matrix), jax.jit(lambda x: jax.numpy.matmul(x, x, precision="highest"))
    times = []
    for multiply in (lambda: matrix @ matrix, lambda: product(there).block_until_ready()):
        for _ in range(8):
            begun = time.perf_counter()
            multiply()
            times.append(time.perf_counter() - begun)
    return {"backend": jax.default_backend(), "matmul_gflops": 2e-9 * MATMUL**3 / min(times)}


# --- all of them ----------------------------------------------------------------------------------------------------


def start(sizes: Sizes, folder: str, stack: contextlib.ExitStack, name: str) -> tuple[subprocess.Popen[str], dict]:
    """A variant's process and its first answer, once it is ready; its cache of compiled programs is in ``folder``."""
    environment = os.environ | {
        "JAX_COMPILATION_CACHE_DIR": f"{folder}/{name}",
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "0",
    }
    if name != MACHINE and (devices := VARIANTS[name].devices) > 1:
        flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}"
        environment["XLA_FLAGS"] = flags
    told = [part for field, n in sizes._asdict().items() for part in (f"--{field}", str(n))]
    begun = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, __file__, "--worker", name, *told],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    stack.enter_context(process)  # waited for in the end, and
    stack.callback(process.kill)  # not forever if something breaks before
    return process, answer(process) | {"seconds": time.perf_counter() - begun}


def answer(process: subprocess.Popen[str]) -> dict[str, Any]:
    """The next answer of a variant's process."""
    assert process.stdout
    if not (line := process.stdout.readline()):
        raise RuntimeError("The process of a variant broke off; what it said is above.")
    return json.loads(line)


def ask(process: subprocess.Popen[str]) -> dict[str, float]:
    """One more round of a variant."""
    print(file=process.stdin, flush=True)
    return answer(process)


def end(process: subprocess.Popen[str]) -> float:
    """The peak of memory of a variant in MiB, and the end of its process."""
    assert process.stdin
    process.stdin.close()
    peak = answer(process)["peak_rss_mib"]
    process.wait()
    return peak


def about_machine(launch: Callable[[str], tuple[subprocess.Popen[str], dict]]) -> dict[str, Any]:
    """Cores, versions, and how fast a large matrix product is."""
    _, speed = launch(MACHINE)
    told = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    model = re.search(r"model name\s*: (.*)", told)
    return {
        "cores": os.cpu_count(),
        "cpu": model and model[1],
        "jax": importlib.metadata.version("jax"),
        "torch": importlib.metadata.version("torch") if importlib.util.find_spec("torch") else None,
        "backend": speed["backend"],
        "matmul_gflops": speed["matmul_gflops"],
    }


def measure(
    names: list[str], repeats: int, launch: Callable[[str], tuple[subprocess.Popen[str], dict]]
) -> dict[str, Measured]:
    """All variants in turn; ours then once more in a new process."""
    started = {name: launch(name) for name in names}
    first = {name: ask(process)["seconds"] for name, (process, _) in started.items()}
    turns = [{name: ask(process) for name, (process, _) in started.items()} for _ in range(repeats)]
    peaks = {name: end(process) for name, (process, _) in started.items()}
    measured = {}
    for name, (_, ready) in started.items():
        cold = warm = None
        if VARIANTS[name].side == "ours":
            again, _ = launch(name)
            cold, warm = first[name], ask(again)["seconds"]
            end(again)
        seconds, cpu_seconds = ([turn[name][field] for turn in turns] for field in ("seconds", "cpu_seconds"))
        measured[name] = Measured(seconds, cpu_seconds, peaks[name], ready["seconds"], cold, warm)
    return measured


# --- what comes of it -----------------------------------------------------------------------------------------------


def spread(values: list[float] | None) -> dict[str, float] | None:
    """Median and range."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)} if values else None


def in_words(values: list[float], digits: int) -> str:
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f}-{max(values):.{digits}f})"


def ratios(measured: dict[str, Measured], name: str, others: list[str]) -> list[float] | None:
    """Seconds of a variant over those of the fastest of ``others``, within each repeat; None if any is missing."""
    times = [measured[other].seconds for other in others if other in measured]
    if name not in measured or not times:
        return None
    return [own / min(turn) for own, turn in zip(measured[name].seconds, zip(*times))]


def to_best_torch(measured: dict[str, Measured], name: str) -> list[float] | None:
    return ratios(measured, name, [f"torch {VARIANTS[name].rule} {form}" for form in FORMS])


def speedup(measured: dict[str, Measured], name: str) -> list[float] | None:
    return (slower := to_best_torch(measured, name)) and [1 / ratio for ratio in slower]


def best_speedup(measured: dict[str, Measured], rule: str) -> list[float] | None:
    """Of the fastest of ours in each repeat: as one device or as two, as PyTorch has threads or processes to choose from."""
    ours = [name for name, v in VARIANTS.items() if (v.side, v.rule, v.gram_at) == ("ours", rule, None)]
    found = [times for name in ours if (times := speedup(measured, name))]
    return [max(turn) for turn in zip(*found)] if found else None


def extra_share(measured: dict[str, Measured], name: str) -> list[float] | None:
    """By how much a round is longer than with the mean on as many devices, as a share of that."""
    mean = next(other for other, v in VARIANTS.items() if v == Variant("ours", "mean", devices=VARIANTS[name].devices))
    return (longer := ratios(measured, name, [mean])) and [ratio - 1 for ratio in longer]


def summary(measured: dict[str, Measured], machine: dict[str, Any]) -> dict[str, Any]:
    """What --json writes."""
    mean, fields = measured.get("ours mean"), ("peak_rss_mib", "compile_seconds", "warm_seconds")
    return {
        "speedup_over_best_torch": spread(best_speedup(measured, "mean")),
        "hfedatm_extra_share": spread(extra_share(measured, "ours hfedatm")),
        "compile_seconds": mean and mean.compile_seconds,
        "peak_rss_mib": mean and mean.peak_rss_mib,
        "variants": {
            name: {"seconds": spread(m.seconds), "cpu_seconds": spread(m.cpu_seconds)}
            | {field: getattr(m, field) for field in fields}
            for name, m in measured.items()
        },
        "machine": machine,
    }


def show(measured: dict[str, Measured], sizes: Sizes, machine: dict[str, Any]) -> None:
    """The table, and what follows from it."""
    versions = f"{machine['backend']}, jax {machine['jax']}, torch {machine['torch'] or 'not installed'}"
    print(f"{machine['cores']} cores, {machine['cpu']}; {versions}")
    print(f"{sizes.stations} x {sizes.clients} clients, {sizes.examples} examples each\n")
    titles = ("seconds a round", "CPU s", "ratio to best torch", "peak MiB", "start s", "first call s: cold", "warm")
    row = "{:27s} {:22s} {:>6s}  {:22s} {:>8s} {:>8s} {:>19s} {:>6s}".format
    print(row("", *titles))
    for name, m in measured.items():
        ratio = to_best_torch(measured, name)
        calls = ("-" if x is None else f"{x:.2f}" for x in (m.compile_seconds, m.warm_seconds))
        middle = (f"{statistics.median(m.cpu_seconds):.2f}", in_words(ratio, 2) if ratio else "-")
        print(row(name, in_words(m.seconds, 3), *middle, f"{m.peak_rss_mib:.0f}", f"{m.start_seconds:.1f}", *calls))
    print()
    for name in (name for name in measured if name.startswith("ours")):
        if (times := speedup(measured, name)) is not None:
            print(f"{name}: {in_words(times, 2)} times as fast as the best of PyTorch")
        if VARIANTS[name].rule == "hfedatm" and (share := extra_share(measured, name)) is not None:
            print(f"{name}: {in_words([100 * x for x in share], 1)} % longer than with the mean")
    for rule in ("mean", "hfedatm"):
        if (times := best_speedup(measured, rule)) is not None:
            print(f"the best of ours, {rule}: {in_words(times, 2)} times as fast as the best of PyTorch")
    print(roofline(measured, sizes, machine["matmul_gflops"]))


def roofline(measured: dict[str, Measured], sizes: Sizes, peak: float) -> str:
    """How near to the machine's peak a round comes. By formula, since XLA counts the body of a loop once: forward pass,
    gradients of kernels, and of inputs but for the images, 3 (conv1 + conv2 + dense) - conv1 multiply-adds an example."""
    gflop = 2e-9 * (2 * CONV1 + 3 * (CONV2 + DENSE)) * sizes.stations * sizes.clients * sizes.examples
    parts = [f"training: {gflop:.3g} GFLOP by formula (convolutions and dense layers, forward and backward)"]
    for name, m in measured.items():
        if VARIANTS[name].rule == "mean":
            speed = gflop / statistics.median(m.seconds)
            parts.append(f"{name} {speed:.1f} GF/s, {100 * speed / peak:.0f} % of the peak")
    return "; ".join([*parts, f"peak, of float32 products of {MATMUL} x {MATMUL} matrices: {peak:.0f} GF/s"])


if __name__ == "__main__":
    main()
