"""HFedATM: align convolution filters by optimal transport, merge linear layers by shrinkage-aware RegMean."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import traverse_util
from jaxtyping import ArrayLike

from fedjax_dg import tree
from fedjax_dg.aggregators.mean import weighting_of
from fedjax_dg.aggregators.regmean import BIASES, GRAMS, add_grams, measure_grams
from fedjax_dg.aggregators.regmean import regmean as merge_dense
from fedjax_dg.alignment.fot import align
from fedjax_dg.errors import unknown
from fedjax_dg.types import Aggregator

REFERENCES = ("previous_global", "first")


def hfedatm(
    alpha: ArrayLike = 0.75,
    ridge: ArrayLike = 1e-6,
    epsilon: ArrayLike = 0.05,
    fot: bool = True,
    regmean: bool = True,
    reference: str = "previous_global",
    bias: str = "corrected",
    gram: str = "sum",
    weighting: str = "clients",
) -> Aggregator:
    """Hierarchical aggregation with aligned filters (FOT) and RegMean on dense layers; replaces averaging at the server.

    1. Every station's model is put into the filter order of the reference (``alignment.align``), Grams included.
    2. All leaves are averaged with weights gamma_e, by default the number of station e's active clients.
    3. The kernels and biases of the dense layers are replaced by ``regmean.regmean`` of the aligned models.

    ``alpha`` is the shrinkage of the Grams, ``ridge`` the pull towards the mean, ``epsilon`` Sinkhorn's regularisation in
    standard deviations of the cost; all three are traced. ``fot=False`` or ``regmean=False`` leaves a part out (both: a
    weighted mean). ``reference``: ``previous_global`` (keeps the coordinates of the server, so states shaped like
    parameters stay valid) or ``first`` (the paper's station 1). ``gram``: ``sum`` or ``mean`` over a client's rows.

    Upload of a client besides its model, with ``regmean``: per dense layer of width d, d^2 + d + 1 floats (LeNet-5:
    182,063 floats; no example leaves). They are measured in one pass of its trained model over its own examples.
    Info: per group ``identity_fraction``, ``cost_before``, ``cost_after`` [S]; per dense layer ``residual``,
    ``fallback``, ``raised`` (see ``regmean``).

    Deviations: permutations reach the next layer and the Grams, and Sinkhorn's plan is rounded to a permutation, so
    alignment never changes a model's function (the paper's summary and the authors' release do neither); the bias is
    corrected and the solve ridged (see ``regmean``). Source: HFedATM (CVPR 2026), https://arxiv.org/abs/2508.05135.
    """
    for kind, given, allowed in (
        ("reference", reference, REFERENCES),
        ("bias rule", bias, BIASES),
        ("gram", gram, GRAMS),
    ):
        if given not in allowed:
            raise unknown(kind, given, allowed)

    def merge(backbone, state, start, models, weights, grams):
        info = {}
        if fot:
            target = start if reference == "previous_global" else tree.take(models, 0)
            models, grams, info["fot"] = jax.vmap(lambda m, g: align(m, target, backbone.groups, g, epsilon))(
                models, grams
            )
        merged = tree.weighted_mean(models, weights)
        if regmean:
            stacked = dict[str, Any](traverse_util.flatten_dict(models.params, sep="/"))
            leaves = dict[str, Any](traverse_util.flatten_dict(merged.params, sep="/"))
            info["regmean"] = {}
            for layer, statistics in grams.items():
                kernel, offset = f"{layer}/kernel", f"{layer}/bias"
                biases = stacked.get(offset, jnp.zeros_like(stacked[kernel][:, 0]))  # a layer may have none
                solved = merge_dense(stacked[kernel], biases, statistics, weights, alpha, ridge, bias)
                leaves[kernel] = solved.kernel
                if offset in leaves:
                    leaves[offset] = solved.bias
                info["regmean"][layer] = solved.info
            merged = merged._replace(params=traverse_util.unflatten_dict(leaves, sep="/"))
        return tree.where(weights.sum() > 0, merged, start), state, info

    rule = Aggregator(weigh=weighting_of(weighting), merge=merge)
    if not regmean:
        return rule._replace(combine=lambda messages, weights: {}, measure=lambda *_: {})
    return rule._replace(measure=functools.partial(measure_grams, gram=gram), combine=add_grams)
