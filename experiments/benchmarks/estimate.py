"""What ``fedjax-dg run --dry-run`` foresees of time and memory, against what a round then takes.

command:  python experiments/benchmarks/estimate.py
cost:     about 3 minutes on 2 idle CPU cores

Work: rounds of FedAvg on random images of 7 classes, with the mean and with HFedATM at the server: LeNet-5 with the clients
of ``round.py``, ResNet-18 for 32 x 32 images with a few. Foreseen are the seconds of a round, from timing one client's part
(``estimate.duration``), and the memory of the compiled program by XLA's plan; measured are the median of --repeats rounds,
and what the program is given plus by how much the process's memory grows at its peak while they run (Linux only; what
compilation took is given back to the system, after a first round). Each line is a process of its own.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import statistics
import subprocess
import sys
import time
from pathlib import Path

# JAX and fedjax_dg are imported in a work's own process.

WORKS = {  # network -> stations, clients of each, examples of each
    "lenet5": (10, 10, 128),
    "resnet18_cifar": (2, 2, 64),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--work", help=argparse.SUPPRESS)  # what a process is told
    options = parser.parse_args()
    if options.work:
        net, rule = options.work.split(",")
        measure(net, rule, options.repeats)
        return
    print(f"{'network, server rule':30s} {'seconds a round: foreseen':>25s} {'measured':>9s} {'ratio':>6s}", end="")
    print(f" {'MiB: foreseen':>14s} {'measured':>9s} {'ratio':>6s}", flush=True)
    for net in WORKS:
        for rule in ("mean", "hfedatm"):
            own = [sys.executable, __file__, "--work", f"{net},{rule}", "--repeats", str(options.repeats)]
            subprocess.run(own, check=True)


def measure(net: str, rule: str, repeats: int) -> None:
    """Foresee, then run; one line."""
    import jax
    import numpy as np

    import fedjax_dg as fdg
    from fedjax_dg import estimate
    from fedjax_dg.cells import compile_block
    from fedjax_dg.run import over_numbers

    stations, clients, examples = WORKS[net]
    rng = np.random.default_rng(0)
    domains = fdg.datasets.Domains(
        name="random",
        inputs=rng.integers(0, 256, (stations * clients * examples, 32, 32, 3), dtype=np.uint8),
        labels=rng.integers(0, 7, stations * clients * examples).astype(np.int32),
        domain=np.zeros(stations * clients * examples, np.int32),
        identity=None,
        validation=None,
        domain_names=("only",),
        class_names=tuple("abcdefg"),
    )
    federation = fdg.federate(domains, None, stations, clients, batch_size=32)
    backbone = fdg.backbones.BACKBONES[net](7)
    to_server = fdg.aggregators.AGGREGATORS[rule]()
    round_fn = fdg.make_round(backbone, fdg.algorithms.fedavg(), federation.topology, to_server)
    program = compile_block(over_numbers(lambda numbers, like: round_fn, ()), (), federation, 1)
    compiled = program.rounds.at(()).block
    block = lambda state: jax.block_until_ready(compiled(state, federation.data, jax.random.key(0), length=1))[0]
    state, seconds = block(round_fn.init(jax.random.key(0))), []
    given = estimate.num_bytes((federation.data, state)) / 2**20
    before = memory_before()  # after a first round: XLA's own buffers and threads are there by then
    for _ in range(repeats):
        begun = time.perf_counter()
        state = block(state)
        seconds.append(time.perf_counter() - begun)
    foreseen = estimate.duration(round_fn, federation, 1).round
    took, grew = statistics.median(seconds), given + status("VmHWM") - before
    print(f"{net + ', ' + rule:30s} {foreseen:25.3f} {took:9.3f} {foreseen / took:6.2f}", end="")
    print(f" {program.memory / 2**20:14.0f} {grew:9.0f} {program.memory / 2**20 / grew:6.2f}", flush=True)


def memory_before() -> float:
    """MiB of this process now, with what it does not need given back and its peak forgotten."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return status("VmRSS")


def status(field: str) -> float:
    """MiB, as the kernel counts."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[field].split()[0]) / 1024


if __name__ == "__main__":
    main()
