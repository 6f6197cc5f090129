"""Importance-weighted averaging, LSI's stage 5 (Palakkadavath et al., ICDM 2025): see ``importance``."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float

from fedjax_dg import tree
from fedjax_dg.aggregators.mean import BN_POOLS, pool, weighting_of
from fedjax_dg.aggregators.weighted import merge_by, shares
from fedjax_dg.errors import unknown
from fedjax_dg.local import sum_over_batches
from fedjax_dg.types import Aggregator, Disclosure, Examples, PyTree, Variables

FORMS = ("paper", "code")
SCALES = ("none", "model", "leaf")


class Importance(NamedTuple):
    """Sums over examples, which add up over clients."""

    omega: PyTree  # shaped like the parameters
    examples: Float[Array, ""]


def importance(
    form: str = "paper",
    squared: bool = True,
    microbatch: int = 1,
    rows: int = 4,
    omega_scale: str = "none",
    eps_rel: ArrayLike = 1e-6,
    weighting: str = "samples",
    bn_pool: str = "naive",
) -> Aggregator:
    """Every parameter averaged by how much it matters to each model's outputs: phi^j = sum_d w_d^j phi_d^j.

    omega_d^j = E_x | d f(x) / d phi_d^j |, over a client's examples, of its trained model in evaluation mode, in float32.
    ``form="paper"``: f = || g(x) ||^2 for the parameters of the features, || h(g(x)) ||^2 for the head's (``squared=False``:
    the norms themselves); ``code``: that of the logits for all. Absolute values are taken of the gradient summed over
    ``microbatch`` examples: 1 is exact; with more, opposite signs cancel (their code: a batch of 32), which is quicker.
    ``rows`` such gradients, each the size of the model, are in memory at a time.

    w_d^j = (omega_d^j + eps p_d) / (sum_k omega_k^j + eps), see ``weighted.merge_by``: parameters that matter to nobody are
    averaged by p_d (``weighting``), as batch statistics are (``bn_pool``). A large ``eps_rel`` is plain averaging. Equal
    omegas are the *uniform* mean. A model with twice the logits has four times the omegas: ``omega_scale`` divides them by
    their mean over the ``model`` or each ``leaf`` first.

    A station's omega is that of its clients, each at its own model, over all their examples; the rule works at either tier.
    Upload: the model, and omega, as many floats again as it has parameters. Info: ``share`` [n], the mean over parameters
    of each model's weight. Raises ``ValueError`` for unknown options.

    Deviations: the absolute value (the paper prints none; its source, MAS, has it) and the normaliser, which neither the
    release nor the part of the paper that we have shows. Source: https://arxiv.org/abs/2512.10224; Aljundi et al., ECCV
    2018, https://arxiv.org/abs/1711.09601.
    """
    for kind, given, allowed in (
        ("form", form, FORMS),
        ("omega_scale", omega_scale, SCALES),
        ("bn_pool", bn_pool, BN_POOLS),
    ):
        if given not in allowed:
            raise unknown(kind, given, allowed)
    for name, number in (("microbatch", microbatch), ("rows", rows)):
        if number < 1:
            raise ValueError(f"{name}={number} is not positive: give 1 or more.")
    length = (lambda x: (x**2).sum(-1)) if squared else (lambda x: jnp.sqrt((x**2).sum(-1) + 1e-12))

    def measured(backbone, variables: Variables, inputs, mask):
        """The gradient of f summed over the real rows [B]."""

        def total(params):
            here = variables._replace(params=params)
            z = backbone.features(here, inputs)
            if form == "code":
                return jnp.where(mask, length(backbone.head(here, z)), 0.0).sum()
            of_head = length(backbone.head(here, jax.lax.stop_gradient(z)))
            return jnp.where(mask, length(z) + of_head, 0.0).sum()

        return jax.grad(total)(variables.params)

    def measure(backbone, start, variables, examples, key, seen):
        def of_batch(batch: Examples):
            missing = -len(batch.mask) % microbatch  # where a client has fewer places
            fill = lambda x: jnp.pad(x, [(0, missing), *[(0, 0)] * (x.ndim - 1)])
            parts = jax.tree.map(lambda x: fill(x).reshape(-1, microbatch, *x.shape[1:]), (batch.inputs, batch.mask))
            gradients = jax.vmap(lambda part: measured(backbone, variables, *part))(parts)
            return Importance(
                jax.tree.map(lambda g: jnp.abs(g).sum(0), gradients), batch.mask.sum().astype(jnp.float32)
            )

        return sum_over_batches(of_batch, examples, size=rows * microbatch)

    def combine(messages, weights):
        return jax.tree.map(lambda x: x.sum(0), messages)

    def merge(backbone, state, start, models, weights, messages: Importance):
        spread = lambda x, like: x.reshape(-1, *[1] * (like.ndim - 1))
        omega = jax.tree.map(lambda x: x / spread(jnp.maximum(messages.examples, 1.0), x), messages.omega)
        if omega_scale != "none":
            omega = in_units(omega, omega_scale == "leaf")
        merged = pool(models, weights, bn_pool)
        merged = merged._replace(params=merge_by(models.params, omega, weights, eps_rel))
        return tree.where(weights.sum() > 0, merged, start), state, {"share": mean_share(omega, weights, eps_rel)}

    return Aggregator(
        weigh=weighting_of(weighting),
        merge=merge,
        measure=measure,
        combine=combine,
        discloses=(Disclosure("mean absolute gradient of its outputs' norms", "station; their sums: server"),),
    )


def in_units(omega: PyTree, by_leaf: bool) -> PyTree:
    """Importances [n] of each model over their mean, of the model or of each leaf."""
    sums = [x.reshape(len(x), -1).sum(1) for x in jax.tree.leaves(omega)]
    sizes = [x[0].size for x in jax.tree.leaves(omega)]
    means = [s / n for s, n in zip(sums, sizes)] if by_leaf else [sum(sums) / sum(sizes)] * len(sums)
    leaves = [
        x / jnp.maximum(mean, 1e-30).reshape(-1, *[1] * (x.ndim - 1)) for x, mean in zip(jax.tree.leaves(omega), means)
    ]
    return jax.tree.unflatten(jax.tree.structure(omega), leaves)


def mean_share(omega: PyTree, weights: Float[Array, " n"], eps_rel: ArrayLike) -> Float[Array, " n"]:
    """Mean over all parameters of every model's weight w_d^j."""
    leaves = jax.tree.leaves(omega)
    sums = [shares(x, weights, eps_rel).reshape(len(x), -1).sum(1) for x in leaves]
    return jnp.asarray(sum(sums)) / sum(x[0].size for x in leaves)
