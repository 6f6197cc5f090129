"""Merging that no single model can steer: coordinate-wise trimmed mean and median."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float, Int

from fedjax_dg import sharding, tree
from fedjax_dg.aggregators.mean import weighting_of
from fedjax_dg.types import Aggregator, PyTree

# What a share of n models may fall short of a whole number by, in float32: 0.1 of 30 is 3.
ROUNDING = 1e-4


def inner_mean(models: PyTree, weights: Float[Array, " n"], cut: Int[Array, ""]) -> PyTree:
    """Leafwise mean over the models [n] of weight > 0, without the ``cut`` lowest and ``cut`` highest of every coordinate.

    Their number may be traced, as those of weight 0 are sorted behind all others, NaN included.
    """
    present = weights > 0
    count, place = present.sum(), jnp.arange(len(weights))
    kept = (place >= cut) & (place < count - cut)
    column = lambda x, like: x.reshape(-1, *[1] * (like.ndim - 1))

    def one(x):
        values = jnp.sort(jnp.where(column(present, x), x.astype(jnp.float32), jnp.nan), axis=0)  # NaN comes last
        mean = jnp.where(column(kept, x), values, 0.0).sum(0) / jnp.maximum(kept.sum(), 1)
        return (mean if jnp.issubdtype(x.dtype, jnp.inexact) else jnp.round(mean)).astype(x.dtype)

    return jax.tree.map(one, models)


def trimmed_mean(trim: ArrayLike = 0.1, weighting: str = "uniform", bn_pool: str = "naive") -> Aggregator:
    """Coordinate-wise trimmed mean: of m models, the floor(trim m) lowest and highest values of every parameter are dropped,
    and the rest averaged.

    Withstands as many arbitrary models as are dropped at one end. ``trim`` in [0, 0.5) is traced; 0 is the plain mean, and
    from where nothing would be left on it is the median. Unweighted by design, as a large model would otherwise outvote
    the others: ``weighting`` (see ``mean``) only tells which models count, those of weight > 0; m is their number. Batch
    statistics are parameters like any other here, so ``bn_pool`` must be ``naive``. With no model that counts the start is
    kept.

    A model with NaN sorts last, as if it were the largest: it is dropped like one outlier, and where there are more of them
    than are dropped, the round reports that the merge is not finite.

    State: none. Upload: the model; its values are compared with the other models', one by one, at whoever merges. On a mesh,
    at the server tier, every device holds the models of all stations while it sorts. Raises ``ValueError`` for another
    ``bn_pool`` or an unknown weighting.
    Deviation: the paper trims gradients of a step; here, models after local training.
    Source: Yin et al., ICML 2018, https://arxiv.org/abs/1803.01498.
    """
    return _robust(lambda count: jnp.floor(trim * count + ROUNDING).astype(jnp.int32), weighting, bn_pool)


def median(weighting: str = "uniform", bn_pool: str = "naive") -> Aggregator:
    """Coordinate-wise median: of m models, the middle value of every parameter, or the mean of the two in the middle.

    The trimmed mean that drops the most; all else as there (``trimmed_mean``): unweighted, batch statistics alike, NaN last.
    Source: Yin et al., ICML 2018, https://arxiv.org/abs/1803.01498.
    """
    return _robust(lambda count: count, weighting, bn_pool)


def _robust(wanted, weighting: str, bn_pool: str) -> Aggregator:
    """``inner_mean`` without as many models at either end as ``wanted`` of their number, as long as one or two remain."""
    if bn_pool != "naive":
        raise ValueError(
            f"bn_pool={bn_pool} is given, but medians and trimmed means treat batch statistics as any other leaf: leave it "
            "out, or choose naive."
        )

    def merge(backbone, state, start, models, weights, messages):
        models, weights = sharding.whole((models, weights))
        count = (weights > 0).sum()
        cut = jnp.clip(wanted(count), 0, jnp.maximum(count - 1, 0) // 2)
        return tree.where(count > 0, inner_mean(models, weights, cut), start), state, {}

    return Aggregator(weigh=weighting_of(weighting), merge=merge)
