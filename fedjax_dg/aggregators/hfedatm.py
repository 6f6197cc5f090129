"""HFedATM: align convolution filters by optimal transport, merge linear layers by shrinkage-aware RegMean."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float

from fedjax_dg import tree
from fedjax_dg.aggregators.grams import (
    GRAMS,
    OVERSIZE,
    SCOPES,
    GramForm,
    add_grams,
    in_scope,
    measure_grams,
    per_row,
    statistics_of,
)
from fedjax_dg.aggregators.mean import BN_POOLS, pool, weighting_of
from fedjax_dg.aggregators.regmean import BIASES, merge_layers
from fedjax_dg.alignment.fot import ASSIGNMENTS, COSTS, MATCHINGS, Matching, align_all
from fedjax_dg.errors import unknown
from fedjax_dg.types import Aggregator, Disclosure, Variables

REFERENCES = ("previous_global", "first")
GRAM_PLACES = ("training", "client", "station")
PROBES = 4  # random inputs by which an alignment shows that it kept the function


def hfedatm(
    alpha: ArrayLike = 0.75,
    ridge: ArrayLike = 1e-6,
    epsilon: ArrayLike = 0.05,
    fot: bool = True,
    regmean: bool = True,
    regmean_scope: str | None = None,
    matching: str = "sequential",
    propagate: bool = True,
    cost: str = "squared",
    assignment: str = "sinkhorn",
    soft: bool = False,
    reference: str = "previous_global",
    align_dense: bool = False,
    bias: str = "corrected",
    gram: str = "sum",
    gram_at: str = "training",
    max_gram: int = 4096,
    oversize: str = "block",
    rank: int = 64,
    weighting: str = "clients",
    bn_pool: str = "naive",
) -> Aggregator:
    """Hierarchical aggregation with aligned filters (FOT) and RegMean on dense layers; replaces averaging at the server.

    1. Every station's model is put into the filter order of the reference (``alignment.align``); its Grams, and the states
       of its clients that are shaped like parameters, move along.
    2. All leaves are averaged with weights gamma_e, by default the number of station e's active clients.
    3. The kernels and biases of the dense layers are replaced by ``regmean.regmean`` of the aligned models.

    ``alpha`` is the shrinkage of the Grams, ``ridge`` the pull towards the mean, ``epsilon`` Sinkhorn's regularisation in
    standard deviations of the cost; all three are traced. ``fot=False`` or ``regmean=False`` leaves a part out (both: a
    weighted mean). ``regmean_scope``: which dense layers RegMean merges: ``head``, those of the classifier; ``all_dense``;
    ``none``; None leaves it to the network, of texts ``head`` (all Grams of RoBERTa-base are 518 MiB a client),
    of images ``all_dense``. All other leaves, embeddings and norms among them, are averaged. Networks without convolutions
    have nothing that FOT could align.
    ``matching``, ``propagate``, ``cost``, ``assignment``, ``soft``, ``align_dense``: see ``align``.
    ``reference``: ``previous_global`` (keeps the coordinates of the server, so states shaped like parameters stay valid) or
    ``first`` (the paper's station 1). ``bias``: see ``regmean``. ``bn_pool``: see ``mean.pool``.

    Grams: ``gram``: ``sum`` or ``mean`` over a client's rows. ``gram_at``: ``training``, from the forward passes of the last
    local pass, as the paper has it, at the cost of the products alone, but of weights that were still moving; ``client``,
    by one more pass, in evaluation mode, of the client's trained model over its own examples; ``station``, by a pass of
    the station's merged model (the authors' release). Layers with more than ``max_gram`` inputs take the ``oversize``
    form: ``block``, ``channel``, ``lowrank`` (of that ``rank``) or ``diag`` (``grams.statistics``).

    Upload of a client besides its model, with ``regmean``: per dense layer in scope, of width d, d^2 + d + 1 floats, less in
    an oversize form (LeNet-5: 182,063 floats; no example leaves); ``bytes`` says it.
    Info: ``fot``: per group ``identity_fraction``, ``cost_before``, ``cost_after`` [e]; ``outputs_moved`` [e]: the largest
    change of a logit by alignment on random inputs, over the largest logit; ``regmean``: per dense layer ``residual``,
    ``condition``, ``fallback``, ``raised`` (see ``regmean``) and the ``bytes`` that a client uploads for it.

    Deviations: permutations reach the next layer and the Grams, and Sinkhorn's plan is rounded to a permutation, so
    alignment never changes a model's function (the paper's summary and the authors' release do neither); the bias is
    corrected and the solve ridged (see ``regmean``). ``hfedatm_literal`` does without these.
    Source: HFedATM (CVPR 2026), https://arxiv.org/abs/2508.05135.
    """
    for kind, given, allowed in (
        ("regmean_scope", regmean_scope or SCOPES[0], (*SCOPES, "none")),
        ("reference", reference, REFERENCES),
        ("gram", gram, GRAMS),
        ("gram_at", gram_at, GRAM_PLACES),
        ("matching", matching, MATCHINGS),
        ("cost", cost, COSTS),
        ("assignment", assignment, ASSIGNMENTS),
        ("oversize form", oversize, OVERSIZE),
        ("bias rule", bias, BIASES),
        ("bn_pool", bn_pool, BN_POOLS),
    ):
        if given not in allowed:
            raise unknown(kind, given, allowed)
    matched = Matching(epsilon, matching, cost, assignment, soft, propagate, align_dense)
    form = GramForm(max_gram, oversize, rank)
    regmean = regmean and regmean_scope != "none"
    merges = lambda backbone, layer: in_scope(backbone, layer, regmean_scope)

    def align(backbone, target, models, grams):
        if not backbone.groups:
            return models, grams, {}, {"fot": {}, "outputs_moved": jnp.zeros(jax.tree.leaves(models)[0].shape[0])}
        aligned = align_all(models, target, backbone.groups, grams or None, matched)
        moved = outputs_moved(backbone, models, aligned.variables)
        info = {"fot": aligned.info, "outputs_moved": moved}
        return aligned.variables, aligned.grams, aligned.orders if propagate else {}, info

    def merge(backbone, state, start, models, weights, grams):
        merged = pool(models, weights, bn_pool)
        info = {}
        if regmean:
            holders = {layer: first for layer, first in backbone.dense_layers(start).items() if first in grams}
            layers = {layer: grams[first] for layer, first in holders.items()}
            merged, solved = merge_layers(merged, models, layers, weights, alpha, ridge, bias)
            for layer, first in holders.items():
                sizes = [x[0].nbytes for x in jax.tree.leaves(grams[first]) if layer == first]
                solved[layer]["bytes"] = jnp.float32(sum(sizes))
            info = {"regmean": solved}
        return tree.where(weights.sum() > 0, merged, start), state, info

    rule = Aggregator(weigh=weighting_of(weighting), merge=merge, align=align if fot else None)
    if reference == "first":
        rule = rule._replace(target=lambda start, models: tree.take(models, 0))
    if not regmean:
        return rule._replace(combine=lambda messages, weights: {}, measure=lambda *_: {})
    finish = per_row if gram == "mean" else lambda grams: grams

    def measure(backbone, start, variables, examples, key, seen):
        if gram_at == "training":
            # the other tier's rule may watch more
            mine = {layer: x for layer, x in seen.inputs.items() if merges(backbone, layer)}
            return finish(statistics_of(backbone, mine, seen.mask, form))
        return finish(measure_grams(backbone, variables, examples, form, regmean_scope))

    return rule._replace(
        measure=measure,
        combine=add_grams,
        at_station=gram_at == "station",
        watches=merges if gram_at == "training" else None,
        discloses=(
            Disclosure(
                "Gram matrix of what every dense layer reads, and its sum", "station; its station's sum: server"
            ),
        ),
    )


def hfedatm_literal(weighting: str = "clients", bn_pool: str = "naive") -> Aggregator:
    """HFedATM word for word as the paper's summary has it, for ablation: alignment here does change the network.

    Every convolution is matched to station 1's alone and only its outputs (kernel and bias) are reordered, neither the
    next layer's inputs nor norms nor Grams; alpha = 0.75, a station's Gram is the mean of its clients', no ridge, biases
    averaged. Upload and info: as ``hfedatm``. Source: HFedATM (CVPR 2026), https://arxiv.org/abs/2508.05135.
    """
    rule = hfedatm(
        ridge=0.0,
        matching="independent",
        propagate=False,
        reference="first",
        bias="mean",
        weighting=weighting,
        bn_pool=bn_pool,
    )

    def combine(grams, weights):
        count = jnp.maximum((weights > 0).sum(), 1)
        return jax.tree.map(lambda x: x / count, add_grams(grams, weights))

    return rule._replace(combine=combine)


def outputs_moved(backbone, models: Variables, aligned: Variables) -> Float[Array, " e"]:
    """Largest change of a logit on random inputs, over the largest logit, per model; 0 up to rounding if all is right."""
    inputs = jax.random.normal(jax.random.key(0), (PROBES, *backbone.input_shape))

    @functools.partial(jax.jit, inline=True)  # traced once, though its shape is asked for
    def change():
        before, after = (jax.lax.map(lambda m: backbone.apply(m, inputs), x) for x in (models, aligned))
        return jnp.abs(after - before).max((1, 2)) / jnp.maximum(jnp.abs(before).max((1, 2)), 1e-12)

    same = jnp.stack([(a == b).all() for a, b in zip(jax.tree.leaves(models), jax.tree.leaves(aligned))]).all()
    return jax.lax.cond(same, lambda: jnp.zeros(jax.eval_shape(change).shape), change)
