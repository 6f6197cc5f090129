"""LSI, latent space inversion (Palakkadavath et al., ICDM 2025)."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jaxtyping import Array, ArrayLike, Float, Int

from fedjax_dg import inversion, local, sharding, translation, tree
from fedjax_dg.aggregators.mean import mean
from fedjax_dg.algorithms.common import classification_loss, classify, gradient_method, masked_mean, momentum
from fedjax_dg.alignment.groups import read_by
from fedjax_dg.errors import unknown
from fedjax_dg.types import Algorithm, Before, Disclosure, PyTree, Received, Start

REDUCTIONS = ("sum", "mean")
OUTPUTS = ("linear", "tanh")
LATENT_STARTS = ("matched", "normal")
LATENT_BATCH = 32
PART = 500  # steps between two saves of a stage
PREPARING = 2**30  # keeps what is drawn before round 1 apart from the rounds


DISCLOSURES = (
    Disclosure("head, and mean and variance of the features it reads", "server", "once"),
    Disclosure("number of examples of each domain", "server", "once"),
    Disclosure("translator made from all clients' heads", "all clients", "once"),
)


class LSIHparams(NamedTuple):
    client_lr: ArrayLike = 0.05
    lambda_di: ArrayLike = 1.0
    lambda_bn: ArrayLike = 1e-3
    lambda_norm: ArrayLike = 1e-4
    latent_lr: ArrayLike = 1e-4
    lambda_cls: ArrayLike = 1.0
    lambda_rec: ArrayLike = 10.0
    lambda_gp: ArrayLike = 10.0
    lambda_y: ArrayLike = 0.1
    translator_lr: ArrayLike = 1e-4


class Translation(NamedTuple):
    """What the server has made before round 1, and every client reads: G, frozen."""

    translator: PyTree
    sources: Int[Array, " M"]  # ids of the source domains, in order: a domain's number is its place here


class Bottleneck(nn.Module):
    """A network whose features z are a dense layer's, of another width, and whose head starts with a batch norm of z.

    The layers of ``base`` keep their names, so its permutation groups still hold.
    """

    base: nn.Module
    width: int

    def setup(self):
        nn.share_scope(self, self.base)
        self.bottleneck = nn.Dense(self.width)
        # a difference of squares would lose the variance of a batch of two or three rows
        self.head_norm = nn.BatchNorm(
            momentum=0.9,
            epsilon=inversion.NORM_EPSILON,
            use_scale=False,
            use_bias=False,
            use_fast_variance=False,
        )

    def features(self, x, train: bool, mask=None) -> Float[Array, "B n"]:
        return self.bottleneck(self.base.features(x, train, mask))

    def classify(self, z: Float[Array, "B n"]) -> Float[Array, "B K"]:
        return self.base.classify(self.head_norm(z, use_running_average=True))

    def classify_training(self, z: Float[Array, "B n"], mask) -> Float[Array, "B K"]:
        rows = (mask | ~mask.any())[:, None]
        return self.base.classify(self.head_norm(z, use_running_average=False, mask=rows))

    def __call__(self, x, train: bool):
        return self.classify(self.features(x, train))


def with_bottleneck(backbone, width: int = 0):
    """The network of LSI: features of ``width`` (0: 512 where they are wider and a mean over places, as ResNet-50's; else
    as they are: 4096 for AlexNet, 84 for LeNet-5), and a batch norm before the head. A fair baseline has it too."""
    width = width or (512 if backbone.num_features == 2048 else backbone.num_features)
    groups = read_by(backbone.groups, "head", "bottleneck")
    module = Bottleneck(backbone.module, width)
    return dataclasses.replace(backbone, module=module, num_features=width, groups=groups)


def lsi(
    hparams: LSIHparams = LSIHparams(),
    optimizer: Callable = momentum,
    num_sources: int = 3,
    width: int = 0,
    hidden: int = 1024,
    head_epochs: int = 10,
    bank: int = 200,
    inversion_steps: int = 10_000,
    translator_steps: int = 10_000,
    latent_start: str = "matched",
    output: str = "linear",
    reduction: str = "sum",
    sg_target: bool = False,
) -> Algorithm:
    """Features that do not change when a translator moves them to another domain, which is learnt without any data.

    Once, before round 1 (``prepare``):

    1. Every client trains for ``head_epochs`` from the common start, and uploads h_theta: its head and the running
       statistics of the batch norm before it; and how many examples of each domain it holds.
    2. The server inverts the heads (``inversion.invert``): ``bank`` batches of 32 latents for each of the M source domains,
       ``inversion_steps`` steps of Adam from N(m_d, v_d) (``latent_start="matched"``) or N(0, I) (``normal``, as theirs).
    3. On these it trains a translator G(z, d, d') against a discriminator (``translation.play``), ``translator_steps`` of
       the latter, a fifth as many of the former. G goes to the clients; bank and discriminator are freed.

    In every round: 4. loss = CE + lambda_di E_x E_d' || z - G(z, d, d') ||^2, d' uniform over the M domains, d itself among
    them, G in evaluation mode; the gradient reaches z on both sides, unless ``sg_target``. ``reduction="mean"`` takes the
    mean over z's entries instead of their sum (their code, there with weight 10). 5. ``--aggregator importance``.

    ``num_sources`` is M, the number of source domains (the command line knows it); ``width`` n: see ``with_bottleneck``;
    ``hidden`` H (2048 in the paper for AlexNet); ``output="tanh"`` bounds G's as their code does. lambda_di = 0 is FedAvg on
    the same network. Raises ``ValueError`` for unknown options, and before round 1 when clients hold examples of another
    number of domains.

    Upload: the model; once before, n K + K + 2 n floats and M counts. Download once: G. Server state: G.

    Deviations: a domain is a domain, not a client: where several clients hold one, its latents are made from all of their
    heads, as often as each holds its examples, and d is the example's. One common start, so that the clients' features
    live in one basis; latents, labels and optimizer of every batch are its own; the discriminator's loss is WGAN-GP's, as
    in the code, its penalty row by row. Source: Palakkadavath et al., ICDM 2025,
    https://arxiv.org/abs/2512.10224.
    """
    for kind, given, allowed in (
        ("reduction", reduction, REDUCTIONS),
        ("output", output, OUTPUTS),
        ("latent_start", latent_start, LATENT_STARTS),
    ):
        if given not in allowed:
            raise unknown(kind, given, allowed)
    sizes = {"num_sources": num_sources, "hidden": hidden, "head_epochs": head_epochs, "bank": bank}
    for name, number in {**sizes, "inversion_steps": inversion_steps, "translator_steps": translator_steps}.items():
        if number < 1:
            raise ValueError(f"{name}={number} is not positive: give 1 or more.")
    latent_weights = inversion.InversionWeights(bn=hparams.lambda_bn, norm=hparams.lambda_norm)
    weights = translation.TranslationWeights(
        hparams.lambda_cls, hparams.lambda_rec, hparams.lambda_gp, hparams.lambda_y
    )

    def networks(backbone):
        n = backbone.num_features
        return translation.Networks(
            translation.Translator(n, hidden, output == "tanh"), translation.Discriminator(hidden, num_sources)
        )

    def init(backbone, variables, key):
        return Start(variables, shared=Translation(networks(backbone).init(key).translator, jnp.arange(num_sources)))

    def prepare(backbone, state, data, key, workshop):
        keys = jax.random.split(jax.random.fold_in(key, PREPARING), 3)
        sources = jnp.asarray(sources_of(data[0], num_sources))
        heads, counts = local_heads(backbone, state.variables, sources, data, keys[0], workshop)
        rows = latents_of(heads, counts, keys[1], workshop)
        say = inversion.shares_of(counts)
        translator = translator_of(networks(backbone), heads, say, rows, keys[2], workshop)
        shared = Translation(translator, sources)
        placed = jax.tree.map(lambda new, old: jax.device_put(new, old.sharding), shared, state.shared)
        return state._replace(shared=placed)

    def local_heads(backbone, variables, sources, data, key, workshop):
        """Stage 1."""
        topology = workshop.topology._replace(local_epochs=head_epochs, local_steps=None)
        plain = gradient_method(classification_loss, optimizer(hparams.client_lr))
        train = jax.jit(functools.partial(train_heads, backbone, plain, topology, workshop.chunk))
        given = (variables, sources, *data, key)
        nothing = tree.zeros(jax.eval_shape(train, *given))
        return workshop.stage("heads", nothing, lambda *_: train(*given), 1)

    def latents_of(heads, counts, key, workshop):
        """Stage 2: rows for stage 3. Adam's moments are let go of."""

        @jax.jit
        def invert(bank, heads, block):
            steps = inversion.steps_in(block, inversion_steps, PART)
            return inversion.invert(bank, heads, latent_weights, hparams.latent_lr, steps)

        choice = inversion.choose_heads(counts, bank)
        start = inversion.start_bank(heads, choice, LATENT_BATCH, latent_start == "matched", key)
        made = workshop.stage(
            "latents",
            start,
            lambda latents, block: invert(latents, heads, block),
            inversion.blocks_of(inversion_steps, PART),
            lambda latents: {"class_accuracy": inversion.accuracy(latents, heads)},
        )
        domain = jnp.broadcast_to(jnp.arange(num_sources)[:, None, None], made.labels.shape)
        return translation.Latents(made.z.reshape(-1, made.z.shape[-1]), made.labels.reshape(-1), domain.reshape(-1))

    def translator_of(nets, heads, say, rows, key, workshop):
        """Stage 3."""
        start_key, play_key, told_key = jax.random.split(key, 3)

        @jax.jit
        def play(players, heads, say, rows, block, key):  # the key is no constant of the program, which seeds share
            steps = inversion.steps_in(block, translator_steps, PART)
            first, lr = block * PART, hparams.translator_lr
            return translation.play(players, nets, heads, say, rows, weights, lr, first, steps, key)

        players = workshop.stage(
            "translator",
            nets.init(start_key),
            lambda players, block: play(players, heads, say, rows, block, play_key),
            inversion.blocks_of(translator_steps, PART),
            lambda players: translation.quality(players, nets, heads, say, rows, told_key),
        )
        return players.translator

    def loss(backbone, params, received, local, batch, key):
        value, forward = classify(backbone, params, local, batch, key)
        frozen = received.shared
        source = jnp.searchsorted(frozen.sources, batch.domain)
        target = jax.random.randint(jax.random.fold_in(key, 1), source.shape, 0, num_sources)
        moved = networks(backbone).translate(frozen.translator, forward.z, source, target)
        gap = (forward.z - (jax.lax.stop_gradient(moved) if sg_target else moved)) ** 2
        invariance = masked_mean(gap.sum(-1) if reduction == "sum" else gap.mean(-1), batch.mask)
        return value + hparams.lambda_di * invariance, (forward, {"cross_entropy": value, "invariance": invariance})

    def before(backbone):
        n, classes = backbone.num_features, backbone.num_classes
        shapes = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.float32)
        players = jax.eval_shape(networks(backbone).init, jax.random.key(0))
        return Before(
            up={
                "head of stage 1": [shapes(n, classes), shapes(classes)],
                "its batch norm's statistics": [shapes(n), shapes(n)],
                "examples by domain": shapes(num_sources),
            },
            down={"translator": players.translator},
            server={"discriminator": players.discriminator, "latents": shapes(num_sources, bank * LATENT_BATCH, n)},
        )

    return gradient_method(
        loss,
        optimizer(hparams.client_lr),
        adapt=functools.partial(with_bottleneck, width=width),
        init=init,
        prepare=prepare,
        resident=True,
        before=before,
        discloses=DISCLOSURES,
    )


def sources_of(examples, num_sources: int) -> Int[np.ndarray, " M"]:
    """The ids of the domains that clients hold, in order; ``ValueError`` when there are not ``num_sources``."""
    held = np.unique(sharding.fetch(jnp.where(examples.mask, examples.domain, -1)))
    held = held[held >= 0].astype(np.int32)
    if len(held) != num_sources:
        raise ValueError(
            f"num_sources={num_sources}, but clients hold examples of {len(held)} domains: give num_sources={len(held)}."
        )
    return held


def train_heads(backbone, algorithm, topology, chunk, variables, sources, examples, ids, key):
    """Stage 1 at every client: its head [J, ...], and how many examples of each source domain it holds [J, M]."""

    def one(common, station, client):
        (variables, sources, key), (held, i) = common, client
        received, rules = Received(variables, (), (), ()), (mean(), mean())
        trained = local.train(backbone, algorithm, topology, rules, received, (), held, jax.random.fold_in(key, i))
        params, statistics = trained.local.variables
        norm = statistics["head_norm"]
        head = inversion.Head(params["head"]["kernel"], params["head"]["bias"], norm["mean"], norm["var"])
        return head, ((held.domain[:, None] == sources) & held.mask[:, None]).sum(0)

    nothing = jnp.zeros(topology.stations)
    heads = local.map_clients(one, (variables, sources, key), nothing, (examples, ids), chunk)
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), sharding.whole(heads, sharding.AXES))
