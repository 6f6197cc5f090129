"""IRM, invariant risk minimization (Arjovsky et al., 2019), inside every client."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import ArrayLike

from fedjax_dg import penalties
from fedjax_dg.algorithms.common import classify, gradient_method, momentum
from fedjax_dg.types import Algorithm


class IRMHparams(NamedTuple):
    client_lr: ArrayLike = 0.05
    penalty: ArrayLike = 1.0  # the paper's lambda (DomainBed: 100 with Adam, after 500 steps at 1)
    anneal_rounds: ArrayLike = 0.0  # server rounds with a weight of at most 1


def irm(hparams: IRMHparams = IRMHparams(), optimizer: Callable = momentum, unbiased: bool = True) -> Algorithm:
    """A classifier whose best scale is 1 in every domain: loss + lambda mean_d (d/dw CE_d(w s, y) at w = 1)^2.

    Domains are those in the batch, so of the client; with one domain a client, each client is an environment.
    ``unbiased`` takes the square over pairs of different examples (DomainBed and WILDS: two halves of the batch), false
    the plain square (the paper). As in the authors' code everything is divided by lambda where that is above 1.
    lambda = 0 is FedAvg. Upload: the model.

    Deviation: the loss is the mean over examples, not over domains. Source: Arjovsky, Bottou, Gulrajani, Lopez-Paz, 2019,
    https://arxiv.org/abs/1907.02893.
    """

    def loss(backbone, params, received, local, batch, key):
        value, forward = classify(backbone, params, local, batch, key)
        penalty = penalties.irm(forward.logits, batch.labels, penalties.rows_of(batch), unbiased)
        weight = penalties.annealed(hparams.penalty, hparams.anneal_rounds, received.round)
        return (value + weight * penalty) / jnp.maximum(weight, 1.0), (forward, {"penalty": penalty})

    return gradient_method(loss, optimizer(hparams.client_lr))
