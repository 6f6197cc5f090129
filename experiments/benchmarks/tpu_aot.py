"""What a round becomes on TPU pods, without a TPU: compiled ahead of time, on any machine, by the TPU's own compiler.

command:  python experiments/benchmarks/tpu_aot.py --json tpu.json   (needs pip install 'fedjax-dg[tpu-aot]')
          python experiments/benchmarks/tpu_aot.py --quick           (4 and 8 devices, clients one by one)
          python experiments/benchmarks/tpu_aot.py --resnet          (and a round of ResNet-18)
          python experiments/benchmarks/tpu_aot.py --export FILE     (one program for GPU, TPU and CPU, by jax.export)
cost:     9 minutes of one CPU core, about 5 on 2 idle ones; 1 with --quick or --export; more with --resnet

Work: a whole round of FedAvg on LeNet-5 (32 x 32 x 3 uint8, 7 classes, 128 examples a client, batch 32, one epoch), its
stations' means, the server's merge; 10 clients a device. The table has a line per program, printed when it is compiled:

- mesh: devices over stations x devices over the clients of a station.
- MFLOP: what the compiler counts for one device, the body of every loop once. So clients all at once count ten times as
  much as one by one, where only one of ten trips is counted; how often loops run is in "trips" of --json.
- MiB args, temp: memory of a device: its own clients' data and the state, and what the program needs besides.
- seconds: tracing and compiling; no program is run.

Then what must hold, and whether it does (exit code 1 if not): devices talk by all-reduces only; a device of a larger mesh of
the same chips does the same work, in FLOPs (within 1 %) and in trips of loops; every row is one program, divided among all
devices of its mesh.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import re
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

# JAX itself runs on the CPU; the TPU's compiler must not look for chips
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-8")
os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies

import fedjax_dg as fdg
from fedjax_dg import sharding

CLASSES = 7
EXAMPLES = 128
RATES = (0.01, 0.02, 0.05, 0.1)
PLATFORMS = ("cuda", "tpu", "cpu")
RULES = {
    "mean": fdg.aggregators.mean(),
    "hfedatm": fdg.aggregators.hfedatm(gram_at="training"),
    "hfedatm, own pass": fdg.aggregators.hfedatm(gram_at="client"),  # a pass of its own for the Grams
}
FORMS = {"all at once": 0, "two at a time": 2, "one by one": 1}  # of clients: chunk
SWEEP = "4 rates in one"  # a vmap over client learning rates, clients two at a time
# rules and forms of the two pods that are compared
WHOLE = [(rule, form) for rule in ("mean", "hfedatm") for form in (*FORMS, SWEEP)]
WHOLE = [*WHOLE, ("hfedatm, own pass", "one by one")]


class Pod(NamedTuple):
    """A slice of TPUs, by its name, and the federation on it."""

    name: str
    stations: int
    clients: int


SMALL, LARGE, SHARED = Pod("v5e:2x4", 8, 10), Pod("v5e:16x16", 256, 10), Pod("v5e:16x16", 32, 80)
QUICK, OTHER = Pod("v5e:2x2", 4, 10), Pod("v5p:2x2x2", 8, 10)
Row = dict[str, Any]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", metavar="FILE", help="write every number")
    parser.add_argument("--quick", action="store_true", help="4 and 8 devices, clients one by one")
    parser.add_argument("--resnet", action="store_true", help="a round of ResNet-18 too")
    parser.add_argument("--export", metavar="FILE", help="instead: write a round's program for GPU, TPU and CPU")
    options = parser.parse_args()
    needed = "flatbuffers" if options.export else "libtpu"
    if importlib.util.find_spec(needed) is None:
        print(f"{needed} is not installed: pip install 'fedjax-dg[tpu-aot]'.", file=sys.stderr)
        return 2
    if options.export:
        export(options.export)
        return 0
    versions = {name: importlib.metadata.version(name) for name in ("jax", "libtpu")}
    print(", ".join(f"{name} {version}" for name, version in versions.items()))
    print(f"\n{'pod':9s}  {'clients':8s}  {'mesh':7s}  {'rule':17s}  {'form':14s}", end="")
    print("    MFLOP  MiB args    temp  seconds  collectives")
    rows = [compiled(*case) for case in cases(options.quick, options.resnet)]
    held = verdicts(rows)
    print("", *(f"{'yes' if holds else 'NO'}: {claim}" for claim, holds in held.items()), sep="\n")
    if options.json:
        Path(options.json).write_text(json.dumps({"versions": versions, "rows": rows, "verdicts": held}, indent=1))
    return 0 if all(held.values()) else 1


def cases(quick: bool, resnet: bool) -> list[tuple[Pod, str, str, str]]:
    """(pod, network, rule, form) of every row."""
    if quick:
        found = [(pod, "lenet5", rule, "one by one") for pod in (QUICK, SMALL) for rule in ("mean", "hfedatm")]
    else:
        found = [(pod, "lenet5", rule, form) for pod in (SMALL, LARGE) for rule, form in WHOLE]
        found += [(pod, "lenet5", rule, "one by one") for pod in (SHARED, OTHER) for rule in ("mean", "hfedatm")]
    return found + ([(SMALL, "resnet18_cifar", "mean", "one by one")] if resnet else [])


def arguments(round_fn: fdg.Round) -> tuple[fdg.ServerState, Any, Any]:
    """Shapes of what a round reads (state, data, key), placed on its mesh."""
    places = (round_fn.topology.stations, round_fn.topology.clients_per_station, EXAMPLES)

    def make():
        labels, key = jnp.zeros(places, jnp.int32), jax.random.key(0)
        images = jnp.zeros((*places, *round_fn.backbone.input_shape), jnp.uint8)
        return round_fn.init(key), (fdg.Examples(images, labels, labels == 0, labels), labels[..., 0]), key

    shapes, mesh = jax.eval_shape(make), round_fn.mesh
    if mesh is None:
        return shapes
    place = lambda where, part: jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), part)
    return jax.tree.map(place, (sharding.of_state(mesh), sharding.of_clients(mesh), sharding.everywhere(mesh)), shapes)


def compiled(pod: Pod, network: str, rule: str, form: str) -> Row:
    """A row of the table, printed."""
    devices = topologies.get_topology_desc(platform="tpu", topology_name=pod.name).devices
    topology = fdg.Topology(pod.stations, pod.clients)
    mesh = sharding.mesh_for(topology, devices)
    backbone = fdg.backbones.BACKBONES[network](CLASSES, image_size=32)

    def round_of(algorithm):
        return fdg.make_round(backbone, algorithm, topology, RULES[rule], chunk=FORMS.get(form, 2), mesh=mesh)

    def at_rate(rate, state, data, key):
        hparams = fdg.algorithms.FedAvgHparams(client_lr=rate)
        return round_of(fdg.algorithms.fedavg(hparams)).step(state, data, key)

    round_fn = round_of(fdg.algorithms.fedavg())
    given = arguments(round_fn)
    begun = time.perf_counter()
    if form == SWEEP:
        lowered = jax.jit(jax.vmap(at_rate, (0, None, None, None))).lower(jnp.array(RATES), *given)
    else:
        lowered = round_fn.block.lower(*given, length=1)
    program: Any = lowered.compile()
    seconds = time.perf_counter() - begun
    text, cost, memory = program.as_text(), program.cost_analysis(), program.memory_analysis()
    divided = [int(n) for n in re.findall(r"^HloModule .*\bnum_partitions=(\d+)", text, re.MULTILINE)]
    row = pod._asdict() | {
        "devices": len(devices),
        "mesh": list(mesh.devices.shape),
        "network": network,
        "rule": rule,
        "form": form,
        "flops": cost["flops"],
        "trips": trips(text),
        "arguments": memory.argument_size_in_bytes,
        "temporary": memory.temp_size_in_bytes,
        "collectives": sharding.collectives(program),
        "programs": len(divided),
        "divided among": divided[0],
        "seconds": seconds,
    }
    print(told(row), flush=True)
    return row


def trips(text: str) -> list[int]:
    """How often the loops of a program run, where a constant says so (the search in an assignment ends as it finds)."""
    constants = dict(re.findall(r"(%\S+) = s32\[\]\S* constant\((\d+)\)", text))
    limits = re.findall(r"ROOT %\S+ = pred\[\]\S* compare\(%\S+, (%\S+)\), direction=LT", text)
    return sorted(int(constants[limit]) for limit in limits if limit in constants)


def told(row: Row) -> str:
    """A row as a line."""
    where = f"{row['name']:9s}  {row['stations']:3d} x {row['clients']:2d}  {row['mesh'][0]:3d} x {row['mesh'][1]}"
    what = row["rule"] if row["network"] == "lenet5" else f"{row['rule']}, ResNet-18"
    sizes = f"{row['flops'] / 1e6:9,.1f}  {row['arguments'] / 2**20:8.1f}  {row['temporary'] / 2**20:6.1f}"
    spoken = ", ".join(f"{count} {kind}" for kind, count in row["collectives"].items())
    return f"{where}  {what:17s}  {row['form']:14s}{sizes}  {row['seconds']:7.1f}  {spoken}"


def verdicts(rows: list[Row]) -> dict[str, bool]:
    """What must hold of all rows, in words, and whether it does."""
    kind = lambda row: (row["name"].split(":")[0], row["network"], row["rule"], row["form"])
    first = {kind(row): row for row in reversed(rows)}
    pairs: dict[str, list[tuple[Row, Row]]] = {}
    for row, other in ((row, first[kind(row)]) for row in rows):
        if row is not other:
            mesh = " x ".join(map(str, row["mesh"]))
            pairs.setdefault(f"a device of {mesh} does the work of one of {other['devices']}", []).append((row, other))
    held = {"devices talk by all-reduces only": all(set(row["collectives"]) == {"all-reduce"} for row in rows)}
    for claim, compared in pairs.items():
        ratios = [row["flops"] / other["flops"] for row, other in compared]
        same = all(row["trips"] == other["trips"] for row, other in compared)
        told = f"FLOPs x {min(ratios):.4f} to {max(ratios):.4f}, trips of loops {'equal' if same else 'unequal'}"
        held[f"{claim}: {told}"] = same and np.allclose(ratios, 1.0, rtol=0.0, atol=0.01)
    one = all(row["programs"] == 1 and row["divided among"] == np.prod(row["mesh"]) for row in rows)
    held["every row is one program, divided among its mesh"] = bool(one)
    return held


def export(path: str) -> None:
    """Write a round without a mesh as one program for all ``PLATFORMS``; read it back and run it here, beside the round."""
    topology = fdg.Topology(SMALL.stations, SMALL.clients)
    backbone, rule = fdg.backbones.lenet5(CLASSES), RULES["hfedatm"]
    round_fn = fdg.make_round(backbone, fdg.algorithms.fedavg(), topology, rule, chunk=1)
    shapes, structure = jax.tree.flatten(arguments(round_fn))  # a file holds arrays, not the library's records
    step = jax.jit(lambda *leaves: jax.tree.leaves(round_fn.step(*structure.unflatten(leaves))))
    program = jax.export.export(step, platforms=PLATFORMS)(*shapes)
    Path(path).write_bytes(program.serialize())
    read = jax.export.deserialize(bytearray(Path(path).read_bytes()))

    key = jax.random.key(0)
    _, (examples, _), _ = structure.unflatten(shapes)
    images = jax.random.bits(key, examples.inputs.shape, jnp.uint8)
    labels = jax.random.randint(key, examples.labels.shape, 0, CLASSES)
    ids = jnp.arange(topology.stations * topology.clients_per_station).reshape(topology.stations, -1)
    data = fdg.Examples(images, labels, jnp.ones(labels.shape, bool), labels), ids
    leaves = jax.tree.leaves((round_fn.init(key), data, key))
    apart = [np.abs(np.subtract(a, b, dtype=np.float64)).max() for a, b in zip(read.call(*leaves), step(*leaves))]
    calls = sorted(set(re.findall(r"custom_call @(\w+)", read.mlir_module())))
    print(
        f"{path}: {Path(path).stat().st_size / 2**10:,.0f} KiB for {', '.join(read.platforms)}; calls {', '.join(calls)}"
    )
    print(f"read back and run on {jax.default_backend()}: at most {max(apart):.2g} from the round itself")


if __name__ == "__main__":
    sys.exit(main())
