"""Training steps of text networks against the same networks in PyTorch: tokens a second.

command:  python experiments/benchmarks/text.py [--nets roberta_tiny,minilm] [--variants sgd,adam]    (``pip install torch``)
cost:     about 5 minutes on 2 CPU cores; with ``roberta_base`` among the nets about 3 more a variant, and 6 GB of memory

Work: a client's local training (``local.train``: one pass over its examples in batches, FedAvg) of ``roberta_tiny`` (batches
of 32), a BERT of MiniLM's size (8) and ``roberta_base`` (4), on random texts of 32 to 64 tokens, padded to 64. Variants: SGD
and Adam without dropout, SGD with dropout of 0.1, SGD with layers computed anew in the backward pass (``remat``; PyTorch's
``checkpoint``). PyTorch's side is ``torch_text.py``, with the same weights: first the largest difference of logits is
checked and printed, of random weights larger than fresh ones, so that it shows. Ours takes all cores that it may
(``taskset`` limits them), PyTorch one or all of them, whichever is faster in a repeat: static shares of work suffer where
others compute too. All take turns, --repeats times after a first one; printed are medians and ranges, ratios being taken
within a repeat. Padding counts as tokens: both sides compute it.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import fedjax_dg as fdg
from fedjax_dg import local
from fedjax_dg.algorithms.common import OPTIMIZERS
from fedjax_dg.alignment.groups import from_leaves, leaves_of
from fedjax_dg.backbones import ROBERTA_BASE, ROBERTA_TINY, EncoderConfig
from fedjax_dg.types import Examples, Received, Topology, Variables

CLASSES, LENGTH, SHORTEST, RATE, DEVIATION, SAME = 4, 64, 32, 1e-3, 0.1, 1e-4
MINILM = EncoderConfig("bert", 30522, 384, 6, 12, 1536, 512, 2, 1e-12)
NETS = {"roberta_tiny": (ROBERTA_TINY, 32), "minilm": (MINILM, 8), "roberta_base": (ROBERTA_BASE, 4)}


class Variant(NamedTuple):
    """How to train."""

    optimizer: str = "sgd"
    dropout: float = 0.0
    remat: bool = False


VARIANTS = {"sgd": Variant(), "adam": Variant("adam"), "dropout": Variant(dropout=0.1), "remat": Variant(remat=True)}


class Work(NamedTuple):
    """One network and its examples, on both sides."""

    ours: Callable[[], Any]
    theirs: dict[int, Callable[[], Any]]  # by the number of threads
    logits_apart: float | None  # largest difference


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--nets", metavar="A,B", default="roberta_tiny,minilm", help=f"of: {', '.join(NETS)}")
    parser.add_argument("--variants", metavar="A,B", default=",".join(VARIANTS), help=f"of: {', '.join(VARIANTS)}")
    parser.add_argument("--steps", type=int, default=6, help="of a pass")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the numbers there")
    options = parser.parse_args()
    for given, known in ((options.nets, NETS), (options.variants, VARIANTS)):
        if unknown := [name for name in given.split(",") if name not in known]:
            parser.error(f"no such name: {', '.join(unknown)}; choose among {', '.join(known)}")
    torch_side = importlib.util.find_spec("torch") is not None
    print(f"{cores()} cores, {jax.default_backend()}, jax {jax.__version__}", "" if torch_side else "; no torch")
    print(f"{'':24s} {'tokens/s':>24s} {'of torch':>24s} {'times torch':>20s}  largest difference of logits")
    told = {}
    for net in options.nets.split(","):
        for variant in options.variants.split(","):
            config, batch = NETS[net]
            work = prepare(config, batch, VARIANTS[variant], options.steps, torch_side)
            rates = measure(work, options.repeats, options.steps * batch * LENGTH)
            told[f"{net} {variant}"] = show(f"{net} {variant}", rates, work.logits_apart)
    if options.json:
        options.json.write_text(json.dumps(told, indent=2) + "\n")


def texts(config: EncoderConfig, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Stored ids [count, LENGTH], -1 behind a text's end, and labels."""
    rng = np.random.default_rng(0)
    ids = rng.integers(3, config.vocab_size, (count, LENGTH)).astype(np.int32)
    ends = rng.integers(SHORTEST, LENGTH + 1, count)
    return np.where(np.arange(LENGTH) < ends[:, None], ids, -1), rng.integers(0, CLASSES, count).astype(np.int32)


def prepare(config: EncoderConfig, batch: int, variant: Variant, steps: int, torch_side: bool) -> Work:
    """The same pass on both sides; ``ValueError`` if the networks are not the same function."""
    stored, labels = texts(config, steps * batch)
    backbone = fdg.backbones.roberta(config, CLASSES, LENGTH, dropout=variant.dropout, remat=variant.remat)
    variables = drawn(backbone)
    ours = functools.partial(ours_of(backbone, variant, batch), variables, examples_of(stored, labels))
    if not torch_side:
        return Work(ours, {}, None)
    import torch_text

    leaves = {name: np.asarray(x) for name, x in leaves_of(variables).items()}
    net = torch_text.network(config, CLASSES, variant.dropout, variant.remat, leaves)
    ids, there = (np.asarray(x) for x in backbone.transform(stored))
    own = np.asarray(jax.jit(backbone.apply)(variables, stored[:batch]))
    apart = float(np.abs(own - torch_text.logits(net, ids[:batch], there[:batch])).max())
    if apart > SAME:
        raise ValueError(f"The logits of both sides differ by {apart:.1e}: there is no use in comparing their speed.")
    theirs = torch_text.training(net, variant.optimizer, RATE, batch, ids, there, labels)
    return Work(ours, {n: functools.partial(theirs, n) for n in sorted({1, cores()})}, apart)


def cores() -> int:
    """How many this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def drawn(backbone) -> Variables:
    """Random weights, with no bias at 0 and no scale at 1."""
    rng = np.random.default_rng(0)
    shapes = leaves_of(jax.eval_shape(backbone.init, jax.random.key(0)))
    draw = lambda leaf, shape: leaf.endswith("/scale") + DEVIATION * rng.standard_normal(shape, np.float32)
    return from_leaves({leaf: jnp.asarray(draw(leaf, x.shape), jnp.float32) for leaf, x in shapes.items()})


def examples_of(stored: np.ndarray, labels: np.ndarray) -> Examples:
    return Examples(*map(jnp.asarray, (stored, labels, np.ones(len(labels), bool), np.zeros_like(labels))))


def ours_of(backbone, variant: Variant, batch: int) -> Callable:
    """(variables, examples) -> a client's ``local.Trained`` after one pass, compiled."""
    algorithm = fdg.algorithms.fedavg(fdg.algorithms.FedAvgHparams(RATE), OPTIMIZERS[variant.optimizer])
    rules = (fdg.aggregators.mean(), fdg.aggregators.mean())

    @jax.jit
    def run(variables, examples):
        received = Received(variables, (), (), ())
        return local.train(
            backbone, algorithm, Topology(1, 1, batch_size=batch), rules, received, (), examples, jax.random.key(1)
        )

    return run


def measure(work: Work, repeats: int, tokens: int) -> dict[str, list[float]]:
    """Tokens a second of either side, in turn; PyTorch's with its better number of threads."""
    sides = {"ours": lambda: jax.block_until_ready(work.ours()), **work.theirs}
    rates = {name: [] for name in sides}
    for repeat in range(repeats + 1):
        for name, side in sides.items():
            begun = time.perf_counter()
            side()
            if repeat:  # the first one compiles
                rates[name].append(tokens / (time.perf_counter() - begun))
    theirs = [max(turn) for turn in zip(*(rates[name] for name in work.theirs))]
    return {"ours": rates["ours"]} | ({"torch": theirs} if theirs else {})


def show(name: str, rates: dict[str, list[float]], apart: float | None) -> dict[str, Any]:
    """A line; the numbers of it."""
    told: dict[str, Any] = {f"{side}_tokens_per_second": spread(values) for side, values in rates.items()}
    line = f"{name:24s} {in_words(rates['ours'], 0):>24s}"
    if "torch" in rates:
        ratios = [ours / theirs for ours, theirs in zip(rates["ours"], rates["torch"])]
        told |= {"times_torch": spread(ratios), "logits_apart": apart}
        line += f" {in_words(rates['torch'], 0):>24s} {in_words(ratios, 2):>20s}  {apart:.1e}"
    print(line, flush=True)
    return told


def spread(values: list[float]) -> dict[str, float]:
    """Median and range."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def in_words(values: list[float], digits: int) -> str:
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f}-{max(values):.{digits}f})"


if __name__ == "__main__":
    main()
