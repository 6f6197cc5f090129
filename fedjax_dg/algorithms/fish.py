"""Fish, gradient matching between domains (Shi et al., ICLR 2022), inside every client."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import ArrayLike

from fedjax_dg import tree
from fedjax_dg.algorithms.common import check_domains, classification_loss, gradient_step, momentum
from fedjax_dg.types import Algorithm


class FishHparams(NamedTuple):
    client_lr: ArrayLike = 0.05  # of the inner steps
    meta_lr: ArrayLike = 0.5  # the paper's epsilon (DomainBed's value)


def fish(hparams: FishHparams = FishHparams(), optimizer: Callable = momentum, num_domains: int = 16) -> Algorithm:
    """Gradients that point alike in all domains: theta <- theta + epsilon (theta' - theta).

    theta' is where one step for each domain in the batch leads from theta, in random order: to first order that also
    raises the inner products of the domains' gradients. The inner optimizer's state lives on across steps. With one domain
    in the batch and epsilon = 1 it is FedAvg. Upload: the model.

    Computes one pass over the batch for every domain that is in it. ``num_domains``: how many ids there are (the command
    line takes the data set's); ``ValueError`` before round 1 when the federation has more.
    Source: Shi et al., ICLR 2022, https://arxiv.org/abs/2104.09937.
    """
    descent = optimizer(hparams.client_lr)
    inner = gradient_step(classification_loss, descent)

    def begin(backbone, received, client):
        return descent.init(received.variables.params), ()

    def step(backbone, received, local, batch, key):
        order_key, key = jax.random.split(key)

        def one(carry, domain):
            rows = batch._replace(mask=batch.mask & (batch.domain == domain))
            go = lambda now: inner(backbone, received, now, rows, jax.random.fold_in(key, domain))
            stay = lambda now: (now, tree.zeros(jax.eval_shape(go, now)[1]))
            present = rows.mask.any()
            now, metrics = jax.lax.cond(present, go, stay, carry)
            return now, (metrics, present)

        shapes = jax.eval_shape(lambda now: inner(backbone, received, now, batch, key)[0].seen, local)
        start = local._replace(seen=tree.zeros(shapes))
        domains = jax.random.permutation(order_key, num_domains)
        moved, (metrics, present) = jax.lax.scan(one, start, domains)
        params = jax.tree.map(
            lambda old, new: old + hparams.meta_lr * (new - old), local.variables.params, moved.variables.params
        )
        means = jax.tree.map(lambda x: x.sum(0) / jnp.maximum(present.sum(), 1), metrics)
        return moved._replace(variables=moved.variables._replace(params=params)), means

    return Algorithm(step=step, begin=begin, prepare=check_domains(num_domains))
