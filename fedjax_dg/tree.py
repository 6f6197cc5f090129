"""The few tree verbs that ``jax.tree`` and ``optax.tree`` lack."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from fedjax_dg.types import PyTree


def weighted_mean(trees: PyTree, weights: Float[Array, " n"]) -> PyTree:
    """Mean over the leading axis [n] with ``weights`` of any scale; zeros when every weight is zero; integers rounded."""
    shares = weights / jnp.where(weights.sum() > 0, weights.sum(), 1.0)

    def mean(x):
        value = jnp.tensordot(shares, x, axes=1, precision="highest")
        return (value if jnp.issubdtype(x.dtype, jnp.inexact) else jnp.round(value)).astype(x.dtype)

    return jax.tree.map(mean, trees)


def weighted_sum(trees: PyTree, weights: Float[Array, "*axes"]) -> PyTree:
    """Sum over all the leading axes that ``weights`` has."""
    return jax.tree.map(lambda x: jnp.tensordot(weights, x, axes=weights.ndim, precision="highest"), trees)


def where(condition: Bool[Array, ""], yes: PyTree, no: PyTree) -> PyTree:
    """Leafwise ``jnp.where`` on one scalar condition."""
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), yes, no)


def all_finite(tree: PyTree) -> Bool[Array, ""]:
    """True when no floating leaf holds NaN or an infinity."""
    leaves = [jnp.isfinite(x).all() for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.inexact)]
    return jnp.stack(leaves).all() if leaves else jnp.array(True)


def take(tree: PyTree, index: int | Array | tuple[int | Array, ...]) -> PyTree:
    """``leaf[index]`` of every leaf."""
    return jax.tree.map(lambda x: x[index], tree)


def zeros(shapes: PyTree) -> PyTree:
    """Zeros of the shapes and dtypes of ``shapes`` (arrays or ``jax.eval_shape``'s answer)."""
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
