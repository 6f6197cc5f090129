"""Digits with a cue that lies in the held-out domain, and rotated digits: which client methods beat FedAvg there?

command:  python experiments/spurious.py            (needs scikit-learn: pip install 'fedjax-dg[digits]')
cost:     about 20 minutes on one core
data:     the 1,797 digits of 8 x 8 pixels that come with scikit-learn
written:  experiments/results/spurious.md and .json

colour:  two classes, digits below five and the others, a quarter of the labels wrong. A digit is in one of two channels; the
         channel is the label but for a share e of the examples: e = 0.05 and 0.35 in the two source domains, 0.9 in the
         held-out one. So the channel predicts the label better than the shape can (75 %), and misleads when held out.
rotated: ten classes, source domains turned by 0, 15, 30 and 45 degrees, held out 75.

Clients are ``mixed`` (each holds all source domains alike) or ``apart`` (one source domain each; of the four angles two,
as a station has two). 2 stations x 5 clients, plain averaging at both tiers, a network of two dense layers, five seeds side
by side in one program. Numbers are of the last round; the held-out domain selects nothing, and every value of a method's
setting that was tried has its own row.
"""

from __future__ import annotations

import argparse
import functools
import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jaxtyping import Array, Float
from scipy import ndimage

import fedjax_dg as fdg
from fedjax_dg.algorithms import ALGORITHMS
from fedjax_dg.algorithms.common import OPTIMIZERS
from fedjax_dg.backbones import Backbone
from fedjax_dg.datasets import Domains
from fedjax_dg.evaluate import evaluate
from fedjax_dg.tables import interval

RESULTS = Path(__file__).parent / "results"
SHARES = {"source 0.05": 0.05, "source 0.35": 0.35, "held out 0.9": 0.9}  # of misleading channels
NOISE = 0.25  # of the labels
ANGLES = (0, 15, 30, 45, 75)
CLIENTS = {"mixed": 1.0, "apart": 0.0}
STATIONS, CLIENTS_PER_STATION, BATCH, EPOCHS = 2, 5, 32, 5
ROUNDS = {"colour": 60, "rotated": 30}
LR = {"colour": 0.01, "rotated": 0.01}
#: Method -> what was tried: a dict of settings a row. All others at their defaults.
TRIED: dict[str, list[dict[str, Any]]] = {
    "fedavg": [{}],
    "fedprox": [{"mu": 0.01}, {"mu": 1.0}],
    "scaffold": [{}],
    "mtgc": [{}],
    "fediir": [{"gamma": 1e-3}, {"gamma": 1.0}],
    "fedsr": [{}, {"l2": 0.1, "cmi": 0.01}],
    "fedadg": [{"warmup_epochs": 2}, {"warmup_epochs": 2, "lambda_adv": 0.85, "lambda_cls": 0.15}],
    "stablenet": [{}, {"lambda_p": 0.1}],
    "stable_fedadg": [{"warmup_epochs": 2}],
    "rsc": [{}, {"drop": 0.5, "batch": 0.5}],
    "irm": [{"penalty": 1.0}, {"penalty": 100.0, "anneal_rounds": 10.0}, {"penalty": 1000.0, "anneal_rounds": 10.0}],
    "vrex": [{"penalty": 1.0}, {"penalty": 10.0, "anneal_rounds": 10.0}, {"penalty": 100.0, "anneal_rounds": 10.0}],
    "fish": [{}],
    "mmd": [{"penalty": 0.1}, {"penalty": 1.0}],
    "coral": [{"penalty": 1.0}, {"penalty": 10.0}],
    "groupdro": [{"eta": 0.01}, {"eta": 1.0}],
    "mixup": [{}, {"mix_alpha": 1.0}],
    "afl": [{"lambda_lr": 0.1}, {"lambda_lr": 1.0}],
    "fedgma": [{"threshold": 0.4}, {"threshold": 0.8}],
}


class Net(nn.Module):
    """Dense 64 and 32 with ReLU, a linear head."""

    num_classes: int

    def setup(self):
        self.dense1, self.dense2, self.head = nn.Dense(64), nn.Dense(32), nn.Dense(self.num_classes)

    def features(self, x: Float[Array, "B 8 8 c"], train: bool, mask=None) -> Float[Array, "B 32"]:
        return nn.relu(self.dense2(nn.relu(self.dense1(x.reshape(x.shape[0], -1)))))

    def classify(self, z: Float[Array, "B 32"]) -> Float[Array, "B K"]:
        return self.head(z)

    def __call__(self, x, train: bool):
        return self.classify(self.features(x, train))


def digits() -> tuple[np.ndarray, np.ndarray]:
    """Images [1797, 8, 8] in [0, 1] and labels."""
    from sklearn.datasets import load_digits

    pixels, target = load_digits(return_X_y=True)
    return (pixels.reshape(-1, 8, 8) / 16).astype(np.float32), target.astype(np.int32)


def coloured(seed: int) -> Domains:
    """Digits whose channel predicts the label in the source domains and misleads in the held-out one."""
    rng = np.random.default_rng(seed)
    images, target = digits()
    domain = rng.permutation(np.arange(len(target)) % len(SHARES)).astype(np.int32)
    labels = (target < 5) ^ (rng.random(len(target)) < NOISE)
    misleads = rng.random(len(target)) < np.array(list(SHARES.values()))[domain]
    channel = (labels ^ misleads).astype(int)
    inputs = np.zeros((*images.shape, 2), np.float32)
    inputs[np.arange(len(target)), :, :, channel] = images
    return Domains("colour", inputs, labels.astype(np.int32), domain, None, None, tuple(SHARES), ("high", "low"))


def rotated(seed: int) -> Domains:
    """Every digit at one of the angles."""
    rng = np.random.default_rng(seed)
    images, target = digits()
    domain = rng.permutation(np.arange(len(target)) % len(ANGLES)).astype(np.int32)
    turned = [ndimage.rotate(x, ANGLES[d], reshape=False, order=1) for x, d in zip(images, domain)]
    names = tuple(f"{angle} degrees" for angle in ANGLES)
    return Domains("rotated", np.stack(turned)[..., None], target, domain, None, None, names, tuple("0123456789"))


PROBLEMS = {"colour": coloured, "rotated": rotated}


def federations(problem: str, clients: str, seeds: int) -> list[fdg.Federation]:
    """One for every seed, all padded alike: sizes do not depend on the seed."""
    out = []
    for seed in range(seeds):
        domains = PROBLEMS[problem](seed)
        out.append(
            fdg.federate(
                domains,
                domains.domain_names[-1],
                STATIONS,
                CLIENTS_PER_STATION,
                CLIENTS[clients],
                seed,
                local_epochs=EPOCHS,
                batch_size=BATCH,
            )
        )
    return out


@functools.cache
def program(name: str, static: tuple[tuple[str, Any], ...], problem: str) -> Callable:
    """(hparams, data, evaluation sets, keys), the last three of every seed -> confusion counts of all seeds. Compiled once
    for all hyper-parameters, and for both kinds of clients where they are padded alike."""
    num_domains, num_classes = (len(SHARES), 2) if problem == "colour" else (len(ANGLES), 10)
    shape = (8, 8, 2) if problem == "colour" else (8, 8, 1)
    backbone = Backbone(Net(num_classes), shape, num_features=32, num_classes=num_classes)
    topology = fdg.Topology(STATIONS, CLIENTS_PER_STATION, local_epochs=EPOCHS, batch_size=BATCH)
    factory, options = ALGORITHMS[name], dict(static)
    if "num_domains" in inspect.signature(factory).parameters:
        options["num_domains"] = num_domains

    def run(hparams, rounds, data, judged, key):
        algorithm = factory(hparams, OPTIMIZERS["momentum"], **options)
        round_fn = fdg.make_round(backbone, algorithm, topology)
        step = lambda _, state: round_fn.step(state, data, key)[0]
        state = jax.lax.fori_loop(0, rounds, step, round_fn.init(key))
        predict = functools.partial(algorithm.predict, round_fn.backbone)
        return evaluate(predict, num_domains, num_classes, state.variables, judged, key).confusion

    return jax.jit(jax.vmap(run, (None, None, 0, 0, 0)))


def accuracies(
    name: str, settings: dict[str, Any], problem: str, clients: str, seeds: int = 5, rounds: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Accuracy on the held-out domain, and mean over the source domains' validation, of every seed after the last round."""
    held = federations(problem, clients, seeds)
    hparams = inspect.signature(ALGORITHMS[name]).parameters["hparams"].default._replace(client_lr=LR[problem])
    if "adversary_lr" in hparams._fields:
        hparams = hparams._replace(adversary_lr=0.7 * LR[problem])
    hparams = hparams._replace(**{key: value for key, value in settings.items() if key in hparams._fields})
    static = tuple((key, value) for key, value in settings.items() if key not in hparams._fields)
    data, judged = (
        jax.tree.map(lambda *x: jnp.stack(x), *parts)
        for parts in ([f.data for f in held], [f.evaluation for f in held])
    )
    keys = jax.vmap(jax.random.key)(jnp.arange(seeds))
    hparams = jax.tree.map(jnp.float32, hparams)
    confusion = np.asarray(program(name, static, problem)(hparams, rounds or ROUNDS[problem], data, judged, keys))
    right = np.trace(confusion, axis1=2, axis2=3) / confusion.sum((2, 3))
    return right[:, -1], right[:, :-1].mean(1)


def text(values: np.ndarray, sign: str = "") -> str:
    found = interval(values)
    written = f"{100 * found['mean']:{sign}.1f} ± {100 * found['ci95']:.1f}"
    return f"**{written}**" if sign and abs(found["mean"]) > found["ci95"] else written


def report(found: list[dict[str, Any]]) -> str:
    """A table for every problem and kind of clients."""
    lines = [
        "Which client methods beat FedAvg where a cue misleads (`colour`) or a view was never seen (`rotated`)? Made by "
        "`python experiments/spurious.py`, whose head says what the problems are.",
        "",
        f"Accuracy (%) after the last round, mean ± 95 % t interval over {len(found[0]['held_out'])} seeds; differences to "
        "FedAvg are paired by seed, and bold where the interval leaves out zero (one in twenty does by chance). Every "
        "setting that was tried has a row; nothing was selected.",
    ]
    for problem in PROBLEMS:
        for clients in CLIENTS:
            rows = [row for row in found if (row["problem"], row["clients"]) == (problem, clients)]
            if not rows:
                continue
            base = np.array(rows[0]["held_out"])
            lines += ["", f"## {problem}, clients {clients}", ""]
            lines += [
                "| method | settings | held out | held out - FedAvg | source |",
                "| --- | --- | --- | --- | --- |",
            ]
            for row in rows:
                settings = ", ".join(f"{k}={v:g}" for k, v in row["settings"].items())
                held_out = np.array(row["held_out"])
                gain = "" if row["method"] == "fedavg" else text(held_out - base, "+")
                cells = [row["method"], settings, text(held_out), gain, text(np.array(row["source"]))]
                lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--methods", nargs="+", choices=TRIED, default=list(TRIED))
    parser.add_argument("--problems", nargs="+", choices=PROBLEMS, default=list(PROBLEMS))
    parser.add_argument("--smoke", action="store_true", help="one round, two seeds; prints the tables only")
    arguments = parser.parse_args()
    found = []
    for problem in arguments.problems:
        for name in arguments.methods:  # so that a method's rows share their program
            for settings in TRIED[name][: 1 if arguments.smoke else None]:
                for clients in CLIENTS:
                    size = {"seeds": 2, "rounds": 1} if arguments.smoke else {}
                    held_out, source = accuracies(name, settings, problem, clients, **size)
                    row = {"problem": problem, "clients": clients, "method": name, "settings": settings}
                    found.append(row | {"held_out": held_out.tolist(), "source": source.tolist()})
                    print(problem, clients, name, settings, text(held_out), text(source), flush=True)
    if arguments.smoke or len(arguments.methods) < len(TRIED) or len(arguments.problems) < len(PROBLEMS):
        print(report(found))
        return
    RESULTS.mkdir(exist_ok=True)
    rows = ",\n".join(json.dumps(row) for row in found)
    (RESULTS / "spurious.json").write_text(f"[\n{rows}\n]\n")
    (RESULTS / "spurious.md").write_text(report(found))


if __name__ == "__main__":
    main()
