"""Merging with a weight of its own for every parameter, as rules that score parameters want it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float

from fedjax_dg import tree
from fedjax_dg.types import PyTree

# No smaller than this, whatever the scores are: the sums of scores above it are normal numbers of float32.
FLOOR = 1e-30


def merge_by(models: PyTree, scores: PyTree, weights: Float[Array, " n"], eps_rel: ArrayLike) -> PyTree:
    """Parameters [n] into one, each averaged with the models' ``scores`` omega >= 0 [n] of it: sum_k w_k theta_k, where

    w_k = (omega_k + eps p_k) / (sum_k omega_k + eps), p the shares of ``weights``, and eps = ``eps_rel`` * (mean over the
    leaf of sum_k omega_k), at least 1e-30. So the weights sum to 1; parameters that nobody scores take the weighted mean
    exactly; a larger ``eps_rel`` draws those of small scores towards it. Models of weight 0 do not count. Only the ratios
    of scores within a leaf matter. For parameters alone: batch statistics are pooled by ``mean.pool``.
    """
    present = weights > 0

    def merge(mean, model, score):
        score = jnp.where(present.reshape(-1, *[1] * (score.ndim - 1)), score, 0.0)
        total = score.sum(0)
        eps = jnp.maximum(eps_rel * total.mean(), FLOOR)
        # as a move from the mean: equal models and zero scores leave it as it is
        return mean + (score * (model - mean)).sum(0) / (total + eps)

    return jax.tree.map(merge, tree.weighted_mean(models, weights), models, scores)
