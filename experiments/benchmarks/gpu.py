"""What a round costs on one GPU: forms of laying out clients, use of the chip, a plain PyTorch loop, a sweep in one program.

command:  python experiments/benchmarks/gpu.py --json gpu.json
          python experiments/benchmarks/gpu.py --smoke           (toy sizes, on any machine)
cost:     at most --budget seconds (230) on one GPU; 3 minutes with --smoke on 2 CPU cores

Work: FedAvg and averaging, one local epoch, random uint8 images, 7 classes. LeNet-5 and ResNet-18 at 32 x 32: 10 x 10
clients, 128 examples, batch 32; ResNet-18 at 224 x 224: 2 x 4 clients, 32 examples, batch 16. Seconds are medians of calls
after one that does not count, without compilation.

Utilisation = FLOPs of the local steps / seconds / peak. FLOPs: what XLA's cost analysis counts in one step of one client,
before optimisation and with XLA's own convolutions, times the steps; merges and shuffles count nothing. The peak is the
chip's dense one for bfloat16, or for TF32, which is what a GPU multiplies JAX's float32 in by default.

Parts come most telling first. One that would not fit in the time left, judged by its network's last one, is skipped and
named; --json is written anew after every part; a program that will not end is ended with the budget.
"""

from __future__ import annotations

import argparse
import faulthandler
import functools
import importlib
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import fedjax_dg as fdg
from fedjax_dg.backbones import convolution

CLASSES = 7
REPEATS = 5
LONGEST = 4.0  # seconds of repeats after which no further one starts
FIRST_GUESS = 25.0  # seconds of a part about whose network nothing is known yet
RATES = np.geomspace(0.001, 0.2, 16).astype(np.float32)
# part of a device's name (the first that occurs counts) -> dense peak FLOP/s of TF32 and bfloat16, from data sheets
PEAKS = {
    "H100 PCIe": (378e12, 756e12),
    "H100": (494e12, 989e12),
    "H200": (494e12, 989e12),
    "A100": (156e12, 312e12),
}


class Work(NamedTuple):
    """A network and the sizes of its federation."""

    build: Callable[..., Any]
    image_size: int
    stations: int
    clients: int
    examples: int
    batch: int

    @property
    def topology(self) -> fdg.Topology:
        return fdg.Topology(self.stations, self.clients, batch_size=self.batch)

    @property
    def images(self) -> int:
        return self.stations * self.clients * self.examples


WORKS = {
    "lenet5": Work(fdg.backbones.lenet5, 32, 10, 10, 128, 32),
    "resnet18_cifar": Work(fdg.backbones.resnet18_cifar, 32, 10, 10, 128, 32),
    "resnet18 at 224": Work(fdg.backbones.resnet18, 224, 2, 4, 32, 16),
}
TOYS = {
    "lenet5": Work(fdg.backbones.lenet5, 32, 2, 3, 16, 8),
    "resnet18_cifar": Work(fdg.backbones.resnet18_cifar, 16, 1, 2, 4, 2),
    "resnet18 at 64": Work(fdg.backbones.resnet18, 64, 1, 2, 4, 2),
}
Row = dict[str, Any]


def main() -> None:
    begun = time.perf_counter()
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", metavar="FILE", help="write every number")
    parser.add_argument("--budget", type=float, default=230, help="seconds of the whole")
    parser.add_argument(
        "--peak", nargs=2, type=float, metavar=("TF32", "BF16"), help="FLOP/s, if the table lacks the chip"
    )
    parser.add_argument("--smoke", action="store_true", help="toy sizes")
    options = parser.parse_args()
    faulthandler.dump_traceback_later(options.budget, exit=True)  # even inside a compilation, which no exception ends
    jax.devices("cpu")  # FLOPs are counted there: fail now rather than later
    device = jax.devices()[0]
    tf32, bf16 = options.peak or next((PEAKS[name] for name in PEAKS if name in device.device_kind), (None, None))
    peaks = {"float32": tf32, "bfloat16": bf16}
    facts = {
        "device": device.device_kind,
        "memory": (device.memory_stats() or {}).get("bytes_limit"),
        "cores": os.cpu_count(),
        "jax": jax.__version__,
        "peaks": peaks,
        "smoke": options.smoke,
    }
    meant = f"TF32 {tf32 / 1e12:g}, bfloat16 {bf16 / 1e12:g} TFLOP/s, dense" if tf32 and bf16 else "none known"
    print(f"{device.device_kind}, jax {jax.__version__}; peaks meant: {meant}")
    rows, skipped, took = [], [], {}
    for name, network, measure in parts(TOYS if options.smoke else WORKS, peaks, options.smoke):
        started = time.perf_counter()
        left, needs = options.budget - (started - begun), took.get(network, FIRST_GUESS)
        if needs > left:
            print(f"{name}: skipped, may need {needs:.0f} s of {left:.0f} s left", flush=True)
            skipped.append(name)
        else:
            rows += run_part(name, measure)
            took[network] = time.perf_counter() - started
        if options.json:
            found = {"facts": facts, "rows": rows, "skipped": skipped, "seconds": time.perf_counter() - begun}
            Path(options.json).write_text(json.dumps(found, indent=1) + "\n")
    print(f"{time.perf_counter() - begun:.0f} s in all; skipped: {'; '.join(skipped) or 'nothing'}")


def parts(
    works: dict[str, Work], peaks: Mapping[str, float | None], smoke: bool
) -> Iterator[tuple[str, str, Callable]]:
    """(name, what its duration is like, function to its rows), most telling first."""
    small = works["lenet5"]
    yield "lenet5, default chunk", "lenet5", functools.partial(round_rows, small, None, "float32", peaks)
    yield "lenet5, plain PyTorch", "torch", functools.partial(torch_rows, small, smoke)
    yield "lenet5, 16 learning rates", "sweep", functools.partial(sweep_rows, small)
    for dtype in ("float32", "bfloat16"):
        for form in ("all at once", "one after another", "a station at once"):
            for name, work in works.items():
                chunk = {"all at once": 0, "one after another": 1}.get(form, work.clients)
                measure = functools.partial(round_rows, work, chunk, dtype, peaks)
                yield f"{name}, {dtype}, {form} (chunk {chunk})", f"{name} {dtype}", measure


def run_part(name: str, measure: Callable[[], list[Row]]) -> list[Row]:
    """The rows of a part, printed; where it fails, as for lack of memory, one row that says so."""
    try:
        rows = [{"part": name} | row for row in measure()]
    except (ImportError, RuntimeError) as error:
        rows = [{"part": name, "error": str(error).split("\n")[0][:300]}]
    for row in rows:
        print(told(row), flush=True)
    return rows


def told(row: Row) -> str:
    """A row as a line."""
    if "error" in row:
        return f"{row['part']}: {row['error']}"
    text = f"{row['part']}{row.get('form', '')}: {row['seconds']:.4f} s ({row['lowest']:.4f}-{row['highest']:.4f})"
    text += f", {row['images'] / row['seconds']:,.0f} images/s"
    if "flops" in row:
        text += f", {row['flops'] / row['seconds'] / 1e12:.3f} TFLOP/s, loss {row['loss']:.4f}"
    if "utilisation" in row:
        text += f", utilisation {100 * row['utilisation']:.2f} %"
    if "temporary" in row:
        text += f", temporary {row['temporary'] / 2**20:,.0f} MiB"
    return text + (f", compiled in {row['compiled']:.1f} s" if "compiled" in row else "")


def timed(call: Callable[[], Any], images: int) -> tuple[Any, Row]:
    """A call that waits for its result: the result, and median and range of the seconds of further ones."""
    result = call()
    times = []
    while len(times) < REPEATS and sum(times) < LONGEST:
        begun = time.perf_counter()
        call()
        times.append(time.perf_counter() - begun)
    return result, {
        "seconds": statistics.median(times),
        "lowest": min(times),
        "highest": max(times),
        "repeats": len(times),
        "images": images,
    }


def compiled(function: Callable, *arguments) -> tuple[Callable, Row]:
    """A call of the function's program that waits for its result, and what compiling it took and planned."""
    begun = time.perf_counter()
    program = jax.jit(function).lower(*arguments).compile()
    row = {"compiled": time.perf_counter() - begun}
    if planned := program.memory_analysis():
        row["temporary"] = planned.temp_size_in_bytes
    return lambda *arguments: jax.block_until_ready(program(*arguments)), row


def random_data(work: Work):
    """What a round reads."""
    places = (work.stations, work.clients, work.examples)
    inputs = jax.random.bits(jax.random.key(0), (*places, work.image_size, work.image_size, 3), jnp.uint8)
    labels = jax.random.randint(jax.random.key(1), places, 0, CLASSES)
    data = fdg.Examples(inputs, labels, jnp.ones(places, bool), jnp.zeros(places, jnp.int32))
    return data, jnp.arange(work.stations * work.clients).reshape(work.stations, work.clients)


def round_rows(work: Work, chunk: int | None, dtype: str, peaks: Mapping[str, float | None]) -> list[Row]:
    """A round. Its mean loss is noted because every form must agree on it."""
    backbone = fdg.backbones.in_precision(work.build(CLASSES, image_size=work.image_size), dtype)
    round_fn = fdg.make_round(backbone, fdg.algorithms.fedavg(), work.topology, chunk=chunk)
    data, key = random_data(work), jax.random.key(2)
    state = round_fn.init(key)
    call, row = compiled(round_fn.step, state, data, key)
    (_, info), times = timed(lambda: call(state, data, key), work.images)
    row |= times | {"dtype": dtype, "chunk": chunk, "loss": float(info.metrics["loss"].mean())}
    row["flops"] = work.stations * work.clients * -(-work.examples // work.batch) * flops_of_step(work)
    if peak := peaks[dtype]:
        row["utilisation"] = row["flops"] / row["seconds"] / peak
    return [row]


@functools.cache
def flops_of_step(work: Work) -> float:
    """FLOPs of one local step of one client, as XLA counts them before optimisation."""
    algorithm, backbone = fdg.algorithms.fedavg(), work.build(CLASSES, image_size=work.image_size)

    def step(variables, batch, key):
        received = fdg.Received(variables, (), (), ())
        optimizer, tally = algorithm.begin(backbone, received, ())
        local, _ = algorithm.step(backbone, received, fdg.Local(variables, optimizer, (), tally), batch, key)
        return local.variables

    def arguments():
        inputs, labels = jnp.zeros((work.batch, *backbone.input_shape), jnp.uint8), jnp.zeros(work.batch, jnp.int32)
        key = jax.random.key(0)
        return backbone.init(key), fdg.Examples(inputs, labels, labels == 0, labels), key

    here = jax.sharding.SingleDeviceSharding(jax.devices("cpu")[0])  # not every backend counts
    most = convolution.MOST_FILTERS
    convolution.MOST_FILTERS = 0  # the tiles of CPU count their zeros
    try:
        cost = jax.jit(step, in_shardings=here).lower(*jax.eval_shape(arguments)).cost_analysis()
    finally:
        convolution.MOST_FILTERS = most
    return cost["flops"] if cost else float("nan")


def sweep_rows(work: Work) -> list[Row]:
    """A round at 16 client learning rates: 16 calls of one program, one program vmapped over them, one looping over them."""
    backbone, data, key = work.build(CLASSES), random_data(work), jax.random.key(2)
    rates = jnp.asarray(RATES)
    state = fdg.make_round(backbone, fdg.algorithms.fedavg(), work.topology).init(key)

    def one(rate, state, data, key):
        algorithm = fdg.algorithms.fedavg(fdg.algorithms.FedAvgHparams(client_lr=rate))
        state, info = fdg.make_round(backbone, algorithm, work.topology).step(state, data, key)
        return state.variables, info.metrics["loss"].mean()

    together = jax.vmap(one, in_axes=(0, None, None, None))
    looped = lambda rates, *rest: jax.lax.map(lambda rate: one(rate, *rest), rates)
    rows = []
    for form, function in {"16 calls": one, "one program, vmap": together, "one program, lax.map": looped}.items():
        first = rates[0] if form == "16 calls" else rates
        call, row = compiled(function, first, state, data, key)
        if form == "16 calls":
            whole = lambda call=call: [call(rate, state, data, key)[1] for rate in rates]
        else:
            whole = lambda call=call: call(rates, state, data, key)[1]
        losses, times = timed(whole, len(rates) * work.images)
        rows.append({"form": f", {form}"} | row | times | {"losses": np.asarray(losses).tolist()})
    return rows


def torch_rows(work: Work, smoke: bool) -> list[Row]:
    """The same round of LeNet-5 as one would write it in PyTorch, data and models on the device."""
    torch = importlib.import_module("torch")
    if not (torch.cuda.is_available() or smoke):
        raise RuntimeError("not measured, PyTorch sees no GPU")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = torch.backends.cudnn.benchmark = True
    nn = torch.nn
    model = nn.Sequential(
        *(nn.Conv2d(3, 6, 5), nn.MaxPool2d(2), nn.ReLU(), nn.Conv2d(6, 16, 5), nn.MaxPool2d(2), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, CLASSES)),
    ).to(device)
    places = (work.stations, work.clients, work.examples)
    images = torch.randint(0, 256, (*places, 3, work.image_size, work.image_size), dtype=torch.uint8, device=device)
    labels = torch.randint(0, CLASSES, places, device=device)
    start = {name: value.clone() for name, value in model.state_dict().items()}

    def mean(models):
        return {name: torch.stack([model[name] for model in models]).mean(0) for name in models[0]}

    def client(images, labels):
        model.load_state_dict(start)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        for picked in torch.randperm(work.examples, device=device).split(work.batch):
            logits = model(images[picked].float() / 127.5 - 1)
            optimizer.zero_grad(set_to_none=True)
            nn.functional.cross_entropy(logits, labels[picked]).backward()
            optimizer.step()
        return {name: value.clone() for name, value in model.state_dict().items()}

    def whole():
        server = mean([mean([client(*c) for c in zip(*station)]) for station in zip(images, labels)])
        return {name: value.cpu() for name, value in server.items()}  # waits for the device

    return [timed(whole, work.images)[1] | {"torch": torch.__version__, "on": device}]


if __name__ == "__main__":
    main()
