"""Deep CORAL, features matched in mean and covariance (Sun, Saenko, ECCV 2016), inside every client."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from jaxtyping import ArrayLike

from fedjax_dg import penalties
from fedjax_dg.algorithms.common import classify, gradient_method, momentum
from fedjax_dg.types import Algorithm


class CoralHparams(NamedTuple):
    client_lr: ArrayLike = 0.05
    penalty: ArrayLike = 1.0  # DomainBed's gamma


def coral(hparams: CoralHparams = CoralHparams(), optimizer: Callable = momentum) -> Algorithm:
    """Features alike in mean and covariance, over pairs of the batch's domains.

    loss + gamma (|| mu_a - mu_b ||^2 / D + || C_a - C_b ||_F^2 / D^2), the mean over pairs a, b, as in DomainBed; no D x D
    covariance is formed (``penalties.coral``). gamma = 0 is FedAvg, and so is any gamma where clients hold one domain
    each. Upload: the model.

    Deviation: the paper matches covariances only, divided by 4 D^2. Source: Sun, Saenko, ECCV 2016 workshops,
    https://arxiv.org/abs/1607.01719.
    """

    def loss(backbone, params, received, local, batch, key):
        value, forward = classify(backbone, params, local, batch, key)
        penalty = penalties.coral(forward.z, penalties.rows_of(batch))
        return value + hparams.penalty * penalty, (forward, {"penalty": penalty})

    return gradient_method(loss, optimizer(hparams.client_lr))
