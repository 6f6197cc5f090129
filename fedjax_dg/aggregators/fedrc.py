"""FedRC: weights that fall with the distance between a model's data and everybody's, both taken as Gaussians."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Bool, Float

from fedjax_dg import sharding, tree
from fedjax_dg.aggregators.mean import pool, weighting_of
from fedjax_dg.errors import unknown
from fedjax_dg.local import sum_over_batches
from fedjax_dg.types import Aggregator, Disclosure, Examples

OF = ("inputs", "features")
# A channel that never varies would be infinitely far from any other.
LEAST_VARIANCE = 1e-6


class Gaussian(NamedTuple):
    """Independent channels."""

    mean: Float[Array, "*n c"]
    variance: Float[Array, "*n c"]


def moment_match(parts: Gaussian, weights: Float[Array, " n"]) -> Gaussian:
    """The mixture's moments: mean = sum_i w_i mu_i, variance = sum_i w_i (v_i + (mu_i - mean)^2), w summing to 1."""
    mean = tree.weighted_mean(parts.mean, weights)
    return Gaussian(mean, tree.weighted_mean(parts.variance + (parts.mean - mean) ** 2, weights))


def bhattacharyya(one: Gaussian, other: Gaussian) -> Float[Array, "*n"]:
    """D = sum_c (mu_a - mu_b)^2 / (8 v) + (ln v - (ln v_a + ln v_b) / 2) / 2 with v = (v_a + v_b) / 2; variances at
    least 1e-6."""
    a, b = jnp.maximum(one.variance, LEAST_VARIANCE), jnp.maximum(other.variance, LEAST_VARIANCE)
    middle = (a + b) / 2.0
    # ln v - (ln v_a + ln v_b) / 2 = -ln(1 - ((v_a - v_b) / (2 v))^2) / 2: no difference of logarithms, and never negative
    spread = -jnp.log1p(-(((a - b) / (2.0 * middle)) ** 2))
    return ((one.mean - other.mean) ** 2 / (8.0 * middle) + spread / 4.0).sum(-1)


def closeness(
    parts: Gaussian, weights: Float[Array, " n"], tau: ArrayLike
) -> tuple[Float[Array, " n"], Float[Array, " n"]]:
    """(n_i exp(-D_i / tau) up to a factor, D_i), D_i the distance to the barycentre by the weights n_i."""
    distances, present = bhattacharyya(parts, moment_match(parts, weights)), weights > 0
    nearest = jnp.where(present, distances, jnp.inf).min()  # its exponential is 1: never do all vanish
    return jnp.where(present, weights * jnp.exp(-(distances - nearest) / tau), 0.0), distances


def gaussian_of(x: Float[Array, "B *d c"], mask: Bool[Array, " B"]) -> tuple[Gaussian, Float[Array, ""]]:
    """Moments of every channel over all positions of the real rows, row by row first; and the number of rows."""
    rows = x.reshape(len(x), -1, x.shape[-1])
    real = mask.astype(jnp.float32)
    return moment_match(Gaussian(rows.mean(1), rows.var(1)), real), real.sum()


def join(one: tuple[Gaussian, Array], other: tuple[Gaussian, Array]) -> tuple[Gaussian, Array]:
    """Moments of the rows of both, and their number: deviations from the common mean, no difference of large squares."""
    both = Gaussian(*(jnp.stack(x) for x in zip(one[0], other[0])))
    return moment_match(both, jnp.stack([one[1], other[1]])), one[1] + other[1]


def fedrc(tau: ArrayLike = 1.0, of: str = "inputs", weighting: str = "samples", bn_pool: str = "naive") -> Aggregator:
    """Averaging weighted by how close a model's data is to the data of all: theta = sum_i w_i theta_i.

    Each client's data is a Gaussian with independent channels; the barycentre is the moment match (``moment_match``) of the
    models' Gaussians by their weights n_i (``weighting``), and w_i = n_i exp(-D_i / tau) / sum, D_i the Bhattacharyya
    distance to it (``bhattacharyya``). A station's Gaussian is the moment match of its clients' with their w, whichever rule
    merged their models; so the rule at both tiers (``to_station`` and ``to_server``) is the hierarchical one.

    ``of``: ``inputs``, every channel of the network's input (of images, three numbers over all pixels; the last axis);
    ``features``, every feature of the model that came down to the tier, in evaluation mode: one model for all clients, as
    features of models trained apart are no common coordinates. ``tau`` is traced; towards infinity, and with equal
    Gaussians, this is the weighted mean. Sums over channels make D grow with their number, so features want a larger tau.
    ``bn_pool``: see ``mean``, with the weights w.

    State: none. Upload: the model, and mean and variance of each channel: a statistic of the raw data, seen by station and
    server. No extra pass for ``inputs``, one for ``features``. Info: ``shares`` w and ``distance`` D [n]. Raises
    ``ValueError`` for an unknown ``of``, and for inputs that are no numbers to average (token ids).

    Deviations: the paper's exact weights could not be read; these are those of a public re-implementation, which looks at a
    client's first batch only, and n_i may be any weighting. Variances below 1e-6 count as that.
    Source: Kou et al., IROS 2024, https://arxiv.org/abs/2407.01103 (not the FedRC of ICML 2024).
    """
    if of not in OF:
        raise unknown("side of a client's data", of, OF)

    def measure(backbone, start, variables, examples: Examples, key, seen):
        def of_batch(batch):
            if of == "features":
                x = backbone.features(start, batch.inputs)
            else:
                x = jax.tree.leaves(backbone.transform(batch.inputs))[0]  # of text, the token ids
            if not jnp.issubdtype(x.dtype, jnp.floating):
                raise ValueError(f"Inputs of type {x.dtype} have no mean to compare: choose of=features.")
            return gaussian_of(x, batch.mask)

        return sum_over_batches(of_batch, examples, join)[0]

    def combine(messages: Gaussian, weights):
        return moment_match(messages, closeness(messages, weights, tau)[0])

    def merge(backbone, state, start, models, weights, messages: Gaussian):
        messages, weights = sharding.whole((messages, weights))
        close, distances = closeness(messages, weights, tau)
        merged = tree.where(weights.sum() > 0, pool(models, close, bn_pool), start)
        shares = close / jnp.maximum(close.sum(), 1e-30)
        return merged, state, {"shares": shares, "distance": jnp.where(weights > 0, distances, 0.0)}

    told = Disclosure(f"mean and variance of every channel of its {of}", "station; of all its clients together: server")
    return Aggregator(weigh=weighting_of(weighting), merge=merge, measure=measure, combine=combine, discloses=(told,))
