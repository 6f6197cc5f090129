"""Fisher-weighted merging: every parameter averaged by how much each model's predictions depend on it."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float

from fedjax_dg import tree
from fedjax_dg.aggregators.mean import pool, weighting_of
from fedjax_dg.aggregators.weighted import merge_by
from fedjax_dg.errors import unknown
from fedjax_dg.local import sum_over_batches
from fedjax_dg.types import Aggregator, Disclosure, Examples, Variables

LABELS = ("model", "data")


class Fisher(NamedTuple):
    """Sums over examples, so those of several clients add up."""

    squares: Any  # of the gradients of log p(y | x), shaped like the parameters
    count: Float[Array, "*n"]


def measure_fisher(
    backbone, variables: Variables, examples: Examples, key, labels: str = "model", rows: int = 4
) -> Fisher:
    """The diagonal of a model's Fisher information on a client's examples, in evaluation mode, ``rows`` examples at a time.

    ``labels``: ``model``, y drawn from the model's own p(y | x), one an example (the Fisher information, by Monte Carlo);
    ``data``, the client's labels (the empirical one).
    """
    place = jnp.arange(examples.mask.shape[0], dtype=examples.domain.dtype)

    def square(inputs, label, place):
        def log_p(params):
            logits = backbone.apply(variables._replace(params=params), inputs[None])[0]
            drawn = jax.random.categorical(jax.random.fold_in(key, place), logits) if labels == "model" else label
            return jax.nn.log_softmax(logits)[drawn]

        return jax.tree.map(jnp.square, jax.grad(log_p)(variables.params))

    def of_batch(batch):
        each = jax.vmap(square)(batch.inputs, batch.labels, batch.domain)
        add = lambda x: jnp.where(batch.mask.reshape(-1, *[1] * (x.ndim - 1)), x, 0.0).sum(0)
        return Fisher(jax.tree.map(add, each), batch.mask.sum().astype(jnp.float32))

    # the place of an example rides along as its domain: what is drawn for it must not depend on the padding
    return sum_over_batches(of_batch, examples._replace(domain=place), size=rows)


def fisher(
    eps_rel: ArrayLike = 1e-6,
    labels: str = "model",
    rows: int = 4,
    weighting: str = "samples",
    bn_pool: str = "naive",
) -> Aggregator:
    """Fisher-weighted average of every parameter j: theta^j = sum_e w_e F_e^j theta_e^j / sum_e w_e F_e^j.

    F_e^j = mean over the examples of (d log p(y | x) / d theta^j)^2, with the model theta_e in evaluation mode. ``labels``:
    y is drawn from the ``model``'s own prediction, or the ``data``'s (see ``measure_fisher``). w_e: ``weighting``. Where no
    F is positive the weighted mean is kept, and ``eps_rel`` (traced, relative to a leaf's mean F) draws parameters of
    little information towards it: see ``merge_by``. Equal F give the weighted mean. Batch statistics, which have no
    gradient, are pooled: ``bn_pool``, see ``mean``.

    At the server the model whose F is taken is the station's merged one, on its clients' examples (``at_station``); at the
    station tier it is the client's trained one. ``rows`` per-example gradients, each the size of the model, are in memory at
    a time.

    State: none. Upload: the model, and as many floats again, plus the number of examples; the server sees squared gradients
    summed over a station's clients, a station those of its clients. One forward and backward pass over every example. Info:
    ``fisher`` [n], the mean of F over all parameters. Raises ``ValueError`` for unknown ``labels`` or weighting.

    Deviations: one drawn label an example, in place of the expectation over all classes; the floor on F is relative to its
    leaf, as an absolute one would be far above the F of small gradients.
    Source: Matena & Raffel, NeurIPS 2022, https://arxiv.org/abs/2111.09832.
    """
    if labels not in LABELS:
        raise unknown("labels of the Fisher information", labels, LABELS)

    def measure(backbone, start, variables, examples, key, seen):
        return measure_fisher(backbone, variables, examples, key, labels, rows)

    def merge(backbone, state, start, models, weights, messages: Fisher):
        per_example = 1.0 / jnp.maximum(messages.count, 1.0)
        scaled = lambda factor: lambda x: x * factor.reshape(-1, *[1] * (x.ndim - 1))
        scores = jax.tree.map(scaled(weights * per_example), messages.squares)
        merged = pool(models, weights, bn_pool)
        merged = merged._replace(params=merge_by(models.params, scores, weights, eps_rel))
        leaves = jax.tree.leaves(messages.squares)
        total = sum(x.reshape(len(weights), -1).sum(1) for x in leaves) * per_example
        size = sum(x[0].size for x in leaves)
        return tree.where(weights.sum() > 0, merged, start), state, {"fisher": total / size}

    return Aggregator(
        weigh=weighting_of(weighting),
        merge=merge,
        measure=measure,
        combine=lambda messages, weights: jax.tree.map(lambda x: x.sum(0), messages),
        at_station=True,
        discloses=(
            Disclosure("mean squared gradient of log p(y | x) for every parameter", "station; their sums: server"),
        ),
    )
