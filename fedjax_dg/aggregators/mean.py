"""Plain averaging, the weightings of either tier, and server optimizers on top of any rule."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, ArrayLike, Float

from fedjax_dg import tree
from fedjax_dg.errors import unknown
from fedjax_dg.types import Aggregator, Variables

WEIGHTINGS: dict[str, Callable] = {
    "samples": lambda num_examples, num_clients: num_examples.astype(jnp.float32),
    "clients": lambda num_examples, num_clients: num_clients.astype(jnp.float32),  # HFedATM's gamma_e = |S_e|
    "uniform": lambda num_examples, num_clients: (num_clients > 0).astype(jnp.float32),
}


def weighting_of(name: str) -> Callable:
    """The weighting of that name; ``ValueError`` with the nearest name otherwise."""
    if name not in WEIGHTINGS:
        raise unknown("weighting", name, WEIGHTINGS)
    return WEIGHTINGS[name]


BN_POOLS = ("naive", "exact")


def pool(models: Variables, weights: Float[Array, " n"], bn_pool: str = "naive") -> Variables:
    """Weighted mean of models; their batch statistics as ``bn_pool`` says.

    ``naive``: the mean of variances too. ``exact``: the variance of the mixture of what the models saw,
    sum_e w_e (var_e + mu_e^2) - mu^2 with mu = sum_e w_e mu_e. ``ValueError`` for another name.
    """
    if bn_pool not in BN_POOLS:
        raise unknown("pooling of batch statistics", bn_pool, BN_POOLS)
    merged = tree.weighted_mean(models, weights)
    if bn_pool == "naive" or not merged.batch_stats:
        return merged

    def spread(means, each):
        if not isinstance(means, dict):
            return means
        if not {"mean", "var"} <= set(means):
            return {name: spread(means[name], each[name]) for name in means}
        # as a spread about the mean: no difference of large numbers
        variances = each["var"] + (each["mean"] - means["mean"]) ** 2
        return {**means, "var": tree.weighted_mean(variances, weights)}

    return merged._replace(batch_stats=spread(merged.batch_stats, models.batch_stats))


def mean(weighting: str = "samples", bn_pool: str = "naive") -> Aggregator:
    """Weighted mean of models, theta = sum_e w_e theta_e / sum_e w_e: FedAvg's rule, HierFAVG's at both tiers.

    ``weighting``: ``samples`` (w = examples held), ``clients`` (w = clients that took part; 1 for a client itself) or
    ``uniform``. ``bn_pool``: see ``pool``. With no weight at all (a station none of whose clients holds data) the start
    is kept.

    Upload: the model, nothing more. Source: McMahan et al., AISTATS 2017, https://arxiv.org/abs/1602.05629; Liu et al.,
    ICC 2020, https://arxiv.org/abs/1905.06641.
    """

    def merge(backbone, state, start, models, weights, messages):
        return tree.where(weights.sum() > 0, pool(models, weights, bn_pool), start), state, {}

    return Aggregator(weigh=weighting_of(weighting), merge=merge)


def server_optimizer(aggregator: Aggregator, optimizer: optax.GradientTransformation) -> Aggregator:
    """Any aggregator, followed by an optimizer step: its merged model minus the start is the negative gradient.

    ``optax.sgd(1.0)`` changes nothing. Batch statistics take the merged value. Source: Reddi et al., ICLR 2021,
    https://arxiv.org/abs/2003.00295.
    """

    def init(variables, num_models):
        return aggregator.init(variables, num_models), optimizer.init(variables.params)

    def merge(backbone, state, start, models, weights, messages):
        inner, moments = state
        merged, inner, info = aggregator.merge(backbone, inner, start, models, weights, messages)
        gradient = jax.tree.map(jnp.subtract, start.params, merged.params)
        updates, moments = optimizer.update(gradient, moments, start.params)
        return merged._replace(params=optax.apply_updates(start.params, updates)), (inner, moments), info

    return aggregator._replace(init=init, merge=merge)


def fedavgm(
    server_lr: ArrayLike = 1.0, server_momentum: ArrayLike = 0.9, weighting: str = "samples", bn_pool: str = "naive"
) -> Aggregator:
    """Averaging with server momentum. Source: Hsu, Qi, Brown 2019, https://arxiv.org/abs/1909.06335.

    Client and server state: a momentum the size of the model, at the server. Upload: the model.
    """
    return server_optimizer(mean(weighting, bn_pool), optax.sgd(jnp.asarray(server_lr), momentum=server_momentum))


def fedadam(
    server_lr: ArrayLike = 0.01,
    server_b1: ArrayLike = 0.9,
    server_b2: ArrayLike = 0.99,
    server_eps: ArrayLike = 1e-3,
    weighting: str = "samples",
    bn_pool: str = "naive",
) -> Aggregator:
    """Averaging with Adam at the server. Source: Reddi et al., ICLR 2021, https://arxiv.org/abs/2003.00295.

    Upload: the model. Deviation: bias-corrected moments (optax's Adam), which the paper's FedAdam leaves out.
    """
    return server_optimizer(
        mean(weighting, bn_pool), optax.adam(jnp.asarray(server_lr), b1=server_b1, b2=server_b2, eps=server_eps)
    )
