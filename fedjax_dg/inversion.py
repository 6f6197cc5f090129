"""Latent space inversion: features that a client's head would have seen, made from the head alone (LSI, stage 2)."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, ArrayLike, Float, Int

NORM_EPSILON = 1e-5  # of the batch norm before the head


class Head(NamedTuple):
    """h_theta of one client, or of several [J, ...]: a batch norm without scale and bias, then a dense layer."""

    kernel: Float[Array, "*J n K"]
    bias: Float[Array, "*J K"]
    mean: Float[Array, "*J n"]  # m_d, the running mean of the features
    var: Float[Array, "*J n"]  # v_d


class InversionWeights(NamedTuple):
    """The weights of the inversion's losses; a loss left out (the paper's Fig. 3) has weight 0."""

    clsz: ArrayLike = 1.0
    bn: ArrayLike = 1e-3  # lambda_bn
    norm: ArrayLike = 1e-4  # lambda_norm


class Bank(NamedTuple):
    """Latents under way: M domains, s batches of B each."""

    z: Float[Array, "M s B n"]
    labels: Int[Array, "M s B"]
    head: Int[Array, "M s"]  # whose head a batch is made from, of the J clients
    moments: Any  # Adam's


def logits_of(head: Head, z: Float[Array, "B n"]) -> Float[Array, "B K"]:
    """The head's logits in evaluation mode."""
    normed = (z - head.mean) * jax.lax.rsqrt(head.var + NORM_EPSILON)
    return jnp.matmul(normed, head.kernel, precision="highest") + head.bias


def inversion_loss(
    z: Float[Array, "B n"], labels: Int[Array, " B"], head: Head, weights: InversionWeights, squared: bool = True
) -> Float[Array, ""]:
    """L_inv = L_clsz + lambda_bn L_bn + lambda_norm L_norm of one batch of latents.

    L_clsz = mean cross-entropy of the frozen head at the labels; L_bn = || mean(z) - m ||^2 + || var(z) - v ||^2 with the
    biased variance over the batch; L_norm = mean || z ||^2. ``squared=False`` takes the norms themselves, as the authors'
    release does.
    """
    length = (lambda total: total) if squared else (lambda total: jnp.sqrt(total + 1e-12))
    error = optax.softmax_cross_entropy_with_integer_labels(logits_of(head, z), labels).mean()
    statistics = length(((z.mean(0) - head.mean) ** 2).sum()) + length(((z.var(0) - head.var) ** 2).sum())
    return jnp.asarray(weights.clsz * error + weights.bn * statistics + weights.norm * length((z**2).sum(-1)).mean())


def choose_heads(counts: Int[Array, "J M"], batches: int) -> Int[Array, "M s"]:
    """Which client's head each of a domain's ``batches`` batches is made from: as often as it holds the domain's examples.

    With one client a domain, the paper's setting, always that one.

    >>> choose_heads(jnp.array([[30, 0], [0, 5], [10, 0]]), 4).tolist()
    [[0, 0, 0, 2], [1, 1, 1, 1]]
    """
    up_to = jnp.cumsum(counts, 0).astype(jnp.float32)  # [J, M]
    points = (jnp.arange(batches) + 0.5) / batches
    of_domain = lambda column: jnp.searchsorted(column, points * column[-1], side="right")
    return jax.vmap(of_domain, in_axes=1)(up_to).astype(jnp.int32)


def shares_of(counts: Int[Array, "J M"]) -> Float[Array, " J"]:
    """How much each client's head has a say: every domain as much as any other, its clients by the examples they hold.

    >>> shares_of(jnp.array([[30, 0], [0, 5], [10, 0], [0, 0]])).tolist()
    [0.375, 0.5, 0.125, 0.0]
    """
    return (counts / jnp.maximum(counts.sum(0), 1)).mean(1)


def adam(learning_rate: ArrayLike) -> optax.GradientTransformation:
    """The inversion's optimizer."""
    return optax.adam(jnp.asarray(learning_rate), b1=0.5, b2=0.9)


def start_bank(heads: Head, head: Int[Array, "M s"], batch_size: int, matched: bool, key) -> Bank:
    """Random labels, and latents drawn from N(m_d, v_d) (``matched``) or from N(0, I), before the first step."""
    label_key, z_key = jax.random.split(key)
    shape = (*head.shape, batch_size)
    labels = jax.random.randint(label_key, shape, 0, heads.bias.shape[-1], jnp.int32)
    z = jax.random.normal(z_key, (*shape, heads.mean.shape[-1]))
    if matched:
        z = heads.mean[head][..., None, :] + jnp.sqrt(heads.var[head])[..., None, :] * z
    return Bank(z, labels, head, adam(1.0).init(z))


def invert(
    bank: Bank,
    heads: Head,
    weights: InversionWeights,
    learning_rate: ArrayLike,
    steps: Int[Array, ""] | int,
    squared: bool = True,
) -> Bank:
    """``steps`` steps of Adam on every batch of the bank, each by itself, the heads frozen."""
    own = jax.tree.map(lambda x: x[bank.head], heads)  # [M, s, ...]
    optimizer = adam(learning_rate)

    def objective(z):
        one = lambda z, labels, head: inversion_loss(z, labels, head, weights, squared)
        return jax.vmap(jax.vmap(one))(z, bank.labels, own).sum()

    def step(_, carried):
        z, moments = carried
        updates, moments = optimizer.update(jax.grad(objective)(z), moments)
        return optax.apply_updates(z, updates), moments

    z, moments = jax.lax.fori_loop(0, steps, step, (bank.z, bank.moments))
    return bank._replace(z=z, moments=moments)


def accuracy(bank: Bank, heads: Head) -> Float[Array, ""]:
    """Share of the latents that their own head gives the label they were made for."""
    own = jax.tree.map(lambda x: x[bank.head], heads)
    found = jax.vmap(jax.vmap(logits_of))(own, bank.z).argmax(-1)
    return (found == bank.labels).mean()


def blocks_of(steps: int, size: int) -> int:
    """Blocks of at most ``size`` steps."""
    return -(-steps // size)


def steps_in(block: Int[Array, ""], steps: int, size: int) -> Int[Array, ""]:
    """Steps of a block: ``size``, fewer in the last."""
    return jnp.minimum(np.int32(size), steps - block * size)
