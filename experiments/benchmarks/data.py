"""Images a second: read, decoded, prepared and fed to rounds, beside a plain loop with Pillow; and memory over many rounds.

command:  python experiments/benchmarks/data.py [--images 1200] [--workers 2] [--repeats 3] [--rounds 200] [--json FILE]
cost:     some five minutes on two cores
data:     pictures made for it, 640 x 480 JPEG of smooth noise, in a temporary folder

Every repeat measures each way once, in turn, so that a busy machine slows all of them; printed are medians, and their ratios
to the plain loop. ``fed`` counts the images of a federation's rounds, read and trained on (LeNet-5 at 32 x 32, one pass a
round), from the second round on.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from PIL import Image

import fedjax_dg as fdg
from fedjax_dg.datasets.prepare import prepare
from fedjax_dg.datasets.reading import read

DOMAINS, CLASSES, BLOCK = ("ink", "oil", "pencil"), ("cat", "dog"), 64


def grow(root: Path, images: int) -> None:
    """Pictures with as much detail as a photograph has, so that JPEG has as much to decode."""
    rng = np.random.default_rng(0)
    for number in range(images):
        coarse = Image.fromarray(rng.integers(0, 256, (60, 80, 3), np.uint8)).resize((640, 480))
        noise = rng.integers(-12, 13, (480, 640, 3))
        pixels = np.clip(np.asarray(coarse, np.int64) + noise, 0, 255).astype(np.uint8)
        place = root / DOMAINS[number % 3] / CLASSES[number // 3 % 2]
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(place / f"{number:05d}.jpg", quality=85)


def plain(images: Any, order: np.ndarray) -> None:
    """What a loop without any of this does."""
    for row in order:
        with Image.open(Path(images.root) / images.files[row]) as image:
            np.asarray(image.convert("RGB").resize((images.size, images.size), Image.Resampling.BILINEAR))


def through(inputs: Any, order: np.ndarray, workers: int) -> None:
    for _ in read(inputs, [order[i : i + BLOCK] for i in range(0, len(order), BLOCK)], workers):
        pass


def fed(domains: Any, stream: bool, workers: int, rounds: int = 6) -> float:
    """Images a second of the rounds after the first, which compiles and starts the workers."""
    federation = fdg.federate(domains, "oil", 2, 2, batch_size=32, stream=stream, workers=workers)
    backbone = fdg.backbones.lenet5(len(domains.class_names))
    round_fn = fdg.make_round(backbone, fdg.algorithms.fedavg(), federation.topology)
    key, begun = jax.random.key(0), 0.0
    blocks = fdg.run_blocks(round_fn, round_fn.init(key), federation, rounds, key, workers=workers)
    for number, _ in enumerate(blocks):
        begun = begun if number else time.perf_counter()
    read_in_a_round = int(federation.mask.sum()) + len(federation.evaluation.unseen)
    return read_in_a_round * (rounds - 1) / (time.perf_counter() - begun)


def memory(domains: Any, rounds: int, workers: int) -> dict[int, float]:
    """MiB that this process holds, by the round reached (Linux)."""
    federation = fdg.federate(domains, domains.domain_names[0], 2, 2, batch_size=16, local_steps=1, stream=True)
    round_fn = fdg.make_round(
        fdg.backbones.lenet5(len(domains.class_names)), fdg.algorithms.fedavg(), federation.topology
    )
    key, told = jax.random.key(0), {}
    for block in fdg.run_blocks(round_fn, round_fn.init(key), federation, rounds, key, workers=workers):
        done = block.record["round"]
        if done % max(1, rounds // 10) == 0:
            told[done] = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
    return told


def main(images: int, workers: int, repeats: int, rounds: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        grow(root / "raw", images)
        raw, small = (fdg.datasets.load("folder", data_dir=str(root / "raw"), image_size=size) for size in (224, 32))
        made = {}
        for name, size in (("uint8", 224), ("array_record", 224), ("uint8", 32)):
            begun = time.perf_counter()
            prepare("folder", str(root / "raw"), root / f"{name}{size}", name, size)
            made[f"{name} {size}"] = images / (time.perf_counter() - begun)
        cached, records, tiny = (
            fdg.datasets.load("folder", data_dir=str(root / out)) for out in ("uint8224", "array_record224", "uint832")
        )
        order = np.random.default_rng(1).permutation(images)
        ways: dict[str, Callable[[], float]] = {
            "plain loop with Pillow": lambda: rate(plain, raw.inputs, order),
            "files, threads": lambda: rate(through, raw.inputs, order, 0),
            f"files, {workers} processes (with their start)": lambda: rate(through, raw.inputs, order, workers),
            "prepared, uint8": lambda: rate(through, cached.inputs, order, 0),
            "prepared, array_record": lambda: rate(through, records.inputs, order, 0),
            "fed from files at 32 x 32, threads": lambda: fed(small, True, 0),
            "fed from prepared at 32 x 32": lambda: fed(tiny, True, 0),
            "fed resident at 32 x 32": lambda: fed(tiny, False, 0),
        }
        found: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(repeats):
            for name, way in ways.items():
                found[name].append(way())
        base = found["plain loop with Pillow"]
        table = {
            name: {
                "images a second": statistics.median(rates),
                "ratio": statistics.median(r / b for r, b in zip(rates, base)),
            }
            for name, rates in found.items()
        }
        return {"rates": table, "prepared at": made, "MiB by round": memory(small, rounds, 0)}


def rate(call: Callable, inputs: Any, order: np.ndarray, *rest: int) -> float:
    begun = time.perf_counter()
    call(inputs, order, *rest)
    return len(order) / (time.perf_counter() - begun)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--images", type=int, default=1200)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    result = main(arguments.images, arguments.workers, arguments.repeats, arguments.rounds)
    for name, line in result["rates"].items():
        print(f"{name:45} {line['images a second']:8.0f} images/s {line['ratio']:6.2f} x")
    for name, made in result["prepared at"].items():
        print(f"prepare, {name:36} {made:8.0f} images/s")
    print("MiB held, by round:", {r: round(m) for r, m in result["MiB by round"].items()})
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")
