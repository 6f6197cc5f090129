"""RSC, representation self-challenging (Huang et al., ECCV 2020), inside every client."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Bool, Float, Int

from fedjax_dg.algorithms.common import cross_entropy, gradient_method, momentum
from fedjax_dg.errors import unknown
from fedjax_dg.penalties import ranks
from fedjax_dg.types import Algorithm, Variables

MUTES = ("features", "spatial", "channel", "either")
SCORES = ("gradient", "activation")


class RSCHparams(NamedTuple):
    client_lr: ArrayLike = 0.05
    drop: ArrayLike = 1 / 3  # p_f: share of the features, or of the places of a map, that a challenged example loses
    drop_channels: ArrayLike = 1 / 3.2  # and of the channels of a map
    batch: ArrayLike = 1 / 3  # p_b: share of a batch that is challenged (the authors: 0.3, growing)
    growth: ArrayLike = 0.0  # what ``batch`` gains every ``growth_rounds`` server rounds, up to 1 (the authors: 0.2)
    growth_rounds: ArrayLike = 10.0


def challenged_share(hparams: RSCHparams, number: ArrayLike) -> Array:
    """p_b in server round ``number``, counted from 0."""
    periods = jnp.floor(number / jnp.asarray(hparams.growth_rounds, jnp.float32))
    return jnp.minimum(hparams.batch + hparams.growth * periods, 1.0)


def without_top(scores: Float[Array, "B n"], num: ArrayLike) -> Float[Array, "B n"]:
    """1, but 0 at the ``num`` largest entries of every row; of equal ones the first count as larger."""
    return (ranks(scores) >= num).astype(scores.dtype)


def ceil(share: ArrayLike, size: int) -> Array:
    """The smallest whole number that is not below share x size; what rounding adds to a whole number does not count."""
    return jnp.ceil(jnp.asarray(share) * size - 1e-4)


def mute_features(z: Float[Array, "B D"], gradient: Float[Array, "B D"], drop: ArrayLike, score: str) -> Array:
    """Which features to keep: without the round(drop D) of largest score."""
    scores = gradient if score == "gradient" else z * gradient
    return without_top(scores, jnp.round(jnp.asarray(drop) * z.shape[-1]))


def mute_places(maps: Float[Array, "B H W C"], gradient: Float[Array, "B H W C"], drop: ArrayLike) -> Array:
    """Which places of a map to keep: without the ceil(drop H W) of largest sum_c z_c g_c, g averaged over places."""
    batch, height, width, _ = maps.shape
    scores = (maps * gradient.mean((1, 2), keepdims=True)).sum(-1).reshape(batch, -1)
    kept = without_top(scores, ceil(drop, height * width))
    return kept.reshape(batch, height, width, 1)


def mute_channels(maps: Float[Array, "B H W C"], gradient: Float[Array, "B H W C"], drop: ArrayLike) -> Array:
    """Which channels of a map to keep: without the ceil(drop C) of largest gradient, averaged over places."""
    scores = gradient.mean((1, 2))
    return without_top(scores, ceil(drop, maps.shape[-1]))[:, None, None]


def challenge(
    logits: Float[Array, "B K"],
    muted: Float[Array, "B K"],
    labels: Int[Array, " B"],
    mask: Bool[Array, " B"],
    share: ArrayLike,
) -> Bool[Array, " B"]:
    """The round(share n) of n real rows that lose most confidence in their class when muted."""
    confidence = lambda x: jnp.take_along_axis(jax.nn.softmax(x), labels[:, None], axis=-1)[:, 0]
    loss = jnp.where(mask, confidence(logits) - confidence(muted), -jnp.inf)
    return (ranks(loss) < jnp.round(jnp.asarray(share) * mask.sum())) & mask


def rsc(
    hparams: RSCHparams = RSCHparams(), optimizer: Callable = momentum, mute: str = "features", score: str = "gradient"
) -> Algorithm:
    """Learn with what matters most switched off: CE of h(z o m), m = 0 at the features with the largest gradient.

    g = d h(z)_y / dz is the gradient of the true class's logit. Every example would lose the round(p_f D) features with the
    largest g; the share p_b of the batch whose confidence in the true class then falls most is challenged so, the
    others keep all. Masks are constants, nothing is rescaled, and the test uses the whole z. p_f = 0 or p_b = 0 is FedAvg.

    ``mute``: ``features`` (z itself: the paper, DomainBed), or of the last feature map of an image network ``spatial``
    (places), ``channel``, or ``either``, one of the two by a coin for every batch (the authors' code). ``score`` of
    ``features``: ``gradient``, or ``activation`` times gradient; under a linear head g is the class's weights for every
    example. p_b may grow with the server round (``growth``). Exactly that many are muted: ties go to the first.

    Raises ``ValueError`` for other names, and for a network without feature maps where ``mute`` needs one.
    Upload: the model. Gram statistics gathered in training are of the features that are not muted.

    Deviations from the authors' code: the masks come from the training pass itself, not from one in evaluation mode; the
    gate is exact, without their margin of 1e-4; batches are not doubled by flips; the schedule goes by round, not epoch,
    and is capped at 1. Source: Huang, Wang, Xing, Huang, ECCV 2020, https://arxiv.org/abs/2007.02454.
    """
    if mute not in MUTES:
        raise unknown("mute", mute, MUTES)
    if score not in SCORES:
        raise unknown("score", score, SCORES)

    def adapt(backbone):
        if mute != "features" and not hasattr(backbone.module, "maps"):
            raise ValueError(
                f"mute={mute} needs a feature map, which this network does not have: choose mute=features."
            )
        return backbone

    def keep(z, gradient, key):
        if mute == "features":
            return mute_features(z, gradient, hparams.drop, score)
        places, channels = mute_places(z, gradient, hparams.drop), mute_channels(z, gradient, hparams.drop_channels)
        if mute == "either":
            return jnp.where(
                jax.random.bernoulli(key), places * jnp.ones_like(channels), channels * jnp.ones_like(places)
            )
        return places if mute == "spatial" else channels

    def loss(backbone, params, received, local, batch, key):
        variables = Variables(params, local.variables.batch_stats)
        if mute == "features":
            forward = backbone.forward(variables, batch.inputs, batch.mask, key)
            z, rest = forward.z, lambda z: backbone.head(variables, z)
        else:
            z, stats = backbone.maps(variables, batch.inputs, batch.mask, key)
            forward = backbone.from_maps(variables, z, key)._replace(batch_stats=stats)
            rest = lambda z: backbone.from_maps(variables, z, key).logits
        fixed = jax.lax.stop_gradient(z)

        def true_logits(z):
            return jnp.take_along_axis(rest(z), batch.labels[:, None], axis=-1).sum()

        kept = keep(fixed, jax.grad(true_logits)(fixed), jax.random.fold_in(key, 1))
        share = challenged_share(hparams, received.round)
        chosen = challenge(forward.logits, rest(fixed * kept), batch.labels, batch.mask, share)
        shape = (-1, *[1] * (z.ndim - 1))
        kept = jax.lax.stop_gradient(jnp.where(chosen.reshape(shape), kept, 1.0))
        value = cross_entropy(rest(z * kept), batch.labels, batch.mask)
        before = cross_entropy(forward.logits, batch.labels, batch.mask)
        return value, (forward, {"unchallenged": before, "challenged": chosen.sum() / jnp.maximum(batch.mask.sum(), 1)})

    return gradient_method(loss, optimizer(hparams.client_lr), adapt=adapt)
