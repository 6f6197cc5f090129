"""Merging with a weight of its own for every parameter, as rules that score parameters want it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float

from fedjax_dg import tree
from fedjax_dg.types import PyTree

# No smaller than this, whatever the scores are: the sums of scores above it are normal numbers of float32.
FLOOR = 1e-30


def shares(scores: Float[Array, "n *p"], weights: Float[Array, " n"], eps_rel: ArrayLike) -> Float[Array, "n *p"]:
    """The weights w_k of ``merge_by`` for one leaf; they sum to 1 over the models."""
    spread = lambda x: x.reshape(-1, *[1] * (scores.ndim - 1))
    scores, total, eps = guarded(scores, weights, eps_rel)
    return (scores + eps * spread(weights / jnp.maximum(weights.sum(), 1e-12))) / (total + eps)


def guarded(scores: Array, weights: Array, eps_rel: ArrayLike) -> tuple[Array, Array, Array]:
    """Scores of the models that count, their sum over the models, and eps."""
    scores = jnp.where((weights > 0).reshape(-1, *[1] * (scores.ndim - 1)), scores, 0.0)
    total = scores.sum(0)
    return scores, total, jnp.maximum(eps_rel * total.mean(), FLOOR)


def merge_by(models: PyTree, scores: PyTree, weights: Float[Array, " n"], eps_rel: ArrayLike) -> PyTree:
    """Parameters [n] into one, each averaged with the models' ``scores`` omega >= 0 [n] of it: sum_k w_k theta_k, where

    w_k = (omega_k + eps p_k) / (sum_k omega_k + eps), p the shares of ``weights``, and eps = ``eps_rel`` * (mean over the
    leaf of sum_k omega_k), at least 1e-30. So the weights sum to 1; parameters that nobody scores take the weighted mean
    exactly; a larger ``eps_rel`` draws those of small scores towards it. Models of weight 0 do not count. Only the ratios
    of scores within a leaf matter. For parameters alone: batch statistics are pooled by ``mean.pool``.
    """

    def merge(mean, model, score):
        score, total, eps = guarded(score, weights, eps_rel)
        # as a move from the mean: equal models and zero scores leave it as it is
        return mean + (score * (model - mean)).sum(0) / (total + eps)

    return jax.tree.map(merge, tree.weighted_mean(models, weights), models, scores)
