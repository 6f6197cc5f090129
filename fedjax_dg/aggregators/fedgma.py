"""FedGMA, gradient masked averaging (Tenison et al., TMLR 2023), on top of any rule."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, ArrayLike, Float

from fedjax_dg import tree
from fedjax_dg.aggregators.mean import mean
from fedjax_dg.types import Aggregator, PyTree, Variables

# A move below this share of the parameter (of 0.01, for smaller ones) is a rounding of the tier below: no direction.
STILL = 1e-6


def agreement(start: PyTree, models: PyTree, weights: Float[Array, " n"]) -> PyTree:
    """A = | sum_e w_e sign(theta_e - theta) |, w summing to 1: 1 where all models moved a parameter in one direction."""

    def direction(new, old):
        move = new - old
        return jnp.where(jnp.abs(move) > STILL * jnp.maximum(jnp.abs(old), 0.01), jnp.sign(move), 0.0)

    return jax.tree.map(jnp.abs, tree.weighted_mean(jax.tree.map(direction, models, start), weights))


def masked(aggregator: Aggregator, threshold: ArrayLike = 0.4) -> Aggregator:
    """Any rule, whose step from the start is multiplied by 1 where A >= threshold and by A elsewhere (``agreement``).

    So a parameter on whose direction the models disagree hardly moves; threshold = 0 changes nothing, and a lone model
    agrees with itself. Batch statistics take the merged value. ``info`` adds the mean ``agreement``.
    """

    def merge(backbone, state, start: Variables, models: Variables, weights, messages):
        merged, state, info = aggregator.merge(backbone, state, start, models, weights, messages)
        agreed = agreement(start.params, models.params, weights)
        params = jax.tree.map(
            lambda old, new, a: old + jnp.where(a >= threshold, 1.0, a) * (new - old),
            start.params,
            merged.params,
            agreed,
        )
        mean_agreement = optax.tree.sum(agreed) / optax.tree.size(agreed)
        return merged._replace(params=params), state, {**info, "agreement": mean_agreement}

    return aggregator._replace(merge=merge)


def fedgma(threshold: ArrayLike = 0.4, weighting: str = "samples", bn_pool: str = "naive") -> Aggregator:
    """Averaging whose step counts fully only where the signs of at least ``threshold`` of the models agree: see ``masked``.

    Upload: the model. Source: Tenison et al., TMLR 2023, https://arxiv.org/abs/2201.11986.
    """
    return masked(mean(weighting, bn_pool), threshold)
