"""A tiny network and tiny federations, for tests that must run in milliseconds."""

import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from fedjax_dg.algorithms import ALGORITHMS, Codec
from fedjax_dg.algorithms.common import momentum
from fedjax_dg.alignment import Axis, Group
from fedjax_dg.backbones import Backbone
from fedjax_dg.backbones.backbone import max_pool
from fedjax_dg.backbones.layers import Stage, normalise
from fedjax_dg.datasets import Domains
from fedjax_dg.evaluate import EvaluationSet
from fedjax_dg.federation import Federation
from fedjax_dg.types import Algorithm, Examples, Topology

CLASSES = 3


class TinyNet(nn.Module):
    """One 3 x 3 convolution (4 filters), a 2 x 2 pool, dense 5, a linear head; for 6 x 6 x 2 images."""

    norm: str | None = None  # after the convolution

    def setup(self):
        self.conv = nn.Conv(4, (3, 3), padding="VALID")
        self.stage = Stage()
        self.dense = nn.Dense(5)
        self.head = nn.Dense(CLASSES)

    @nn.compact
    def maps(self, x, train, mask=None):
        maps = max_pool(normalise(self.conv(x), self.norm, not train, mask, name="norm"))
        # its end before the activation: a style of a channel that is almost off would enlarge rounding a thousandfold
        return nn.relu(self.stage(maps, mask)[0])

    def reduce(self, maps, train):
        return nn.tanh(self.dense(maps.reshape(maps.shape[0], -1)))

    def features(self, x, train, mask=None):
        return self.reduce(self.maps(x, train, mask), train)

    def classify(self, z):
        return self.head(z)

    def __call__(self, x, train):
        return self.classify(self.features(x, train))


def tiny_backbone(norm: str | None = None) -> Backbone:
    """83 + ... parameters: small enough to check by hand, with a convolution, a flatten and two dense layers.

    ``norm``: None or ``batch``.
    """
    of_norm = [f"params/norm/{leaf}" for leaf in ("scale", "bias")] + [f"batch_stats/norm/{s}" for s in ("mean", "var")]
    group = Group(
        name="conv",
        size=4,
        producers=(Axis("params/conv/kernel", 3),),
        followers=(Axis("params/conv/bias", 0), *(Axis(leaf, 0) for leaf in of_norm if norm)),
        consumers=(Axis("params/dense/kernel", 0, 4),),
        grams=(("dense", 4),),
    )
    return Backbone(TinyNet(norm), input_shape=(6, 6, 2), num_features=5, num_classes=CLASSES, groups=(group,))


def tiny_domains(per_domain=30, domains=3, seed=0) -> Domains:
    """Float images of three classes (a bright corner each), shifted by domain."""
    rng = np.random.default_rng(seed)
    total = per_domain * domains
    labels = rng.integers(0, CLASSES, total).astype(np.int32)
    domain = np.repeat(np.arange(domains, dtype=np.int32), per_domain)
    inputs = rng.normal(size=(total, 6, 6, 2)).astype(np.float32) * 0.3 + domain[:, None, None, None] * 0.2
    for label, (row, column) in enumerate(((0, 0), (0, 3), (3, 0))):
        inputs[labels == label, row : row + 3, column : column + 3] += 1.0
    names = tuple(f"domain{i}" for i in range(domains))
    return Domains("tiny", inputs, labels, domain, None, None, names, tuple("abc"))


def tiny_federation(sizes, seed=0, padding=0, fill=0.0, domains=1, **topology) -> Federation:
    """A federation with ``sizes`` [S, C] examples per client, ``padding`` extra places whose values are ``fill``.

    A client's examples are of its station's domain, or of ``domains`` in turn, from that one on.
    """
    sizes = np.asarray(sizes)
    stations, clients = sizes.shape
    rng = np.random.default_rng(seed)
    places = int(sizes.max()) + padding
    mask = np.arange(places) < sizes[..., None]
    # a client's draws do not depend on the padding
    inputs = np.full((stations, clients, places, 6, 6, 2), fill, np.float32)
    labels = np.zeros((stations, clients, places), np.int32)
    for s in range(stations):
        for c in range(clients):
            n = sizes[s, c]
            labels[s, c, :n] = rng.integers(0, CLASSES, n)
            inputs[s, c, :n] = rng.normal(size=(n, 6, 6, 2)) + labels[s, c, :n, None, None, None]
    turn = np.arange(stations)[:, None, None] + np.arange(places) % domains
    domain = np.broadcast_to(turn % (stations + 1), mask.shape).astype(np.int32)
    judged = Examples(
        jnp.asarray(rng.normal(size=(12, 6, 6, 2)), jnp.float32),
        jnp.asarray(rng.integers(0, CLASSES, 12), jnp.int32),
        jnp.ones(12, bool),
        jnp.asarray(np.arange(12) % (stations + 1), jnp.int32),
    )
    return Federation(
        clients=Examples(*(jnp.asarray(x) for x in (inputs, labels, mask, domain))),
        ids=jnp.arange(stations * clients, dtype=jnp.int32).reshape(stations, clients),
        evaluation=EvaluationSet(judged, jnp.ones(12, bool)),
        topology=Topology(stations, clients, **topology),
        domain_names=tuple(f"domain{i}" for i in range(stations + 1)),
        class_names=tuple("abc"),
        held_out=f"domain{stations}",
    )


#: What is not a method's default in tests, so that few passes reach all of it, on features of both signs.
OPTIONS: dict[str, dict] = {name: {"warmup_epochs": 1, "rectify": False} for name in ("fedadg", "stable_fedadg")}
#: The sharp ones of MMD's kernels enlarge rounding (its docstring) past the tolerances of sums in another order.
OPTIONS["mmd"] = {"gammas": (0.001, 0.01, 0.1, 1.0)}

#: Two channels mixed, and back: features without a network's files.
TINY_CODEC = Codec(
    encode=lambda params, image: image @ params["mix"],
    decode=lambda params, features: features @ params["back"],
    params={"mix": np.float32([[1.0, 1.0], [-1.0, 1.0]]), "back": np.float32([[0.5, -0.5], [0.5, 0.5]])},
)
OPTIONS["ccst"] = {"codec": TINY_CODEC, "mixing_level": 2}


#: Which norm the tiny network has, for methods that change a network's norms.
NORMS = {"gperxan": "batch"}


def backbone_for(name: str) -> Backbone:
    """The tiny network that a method of the table can train."""
    return tiny_backbone(NORMS.get(name))


# The batch norm before its head divides by how far two or three rows lie apart: at the usual rate rounding takes over.
OPTIONS["lsi"] = {"hidden": 8, "optimizer": lambda client_lr: momentum(0.02 * client_lr)}


def tiny_method(name, hparams=None, **options) -> Algorithm:
    """A method of the table for the tiny network."""
    return ALGORITHMS[name](*(() if hparams is None else (hparams,)), **{**OPTIONS.get(name, {}), **options})


def contract_federation() -> Federation:
    """Unequal clients, one of them empty, most with examples of two domains."""
    return tiny_federation([[3, 5, 2, 4], [4, 0, 6, 1]], station_rounds=2, batch_size=3, domains=2)
