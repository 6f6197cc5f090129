"""FedProx (Li et al., MLSys 2020)."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import optax
from jaxtyping import ArrayLike

from fedjax_dg.algorithms.common import classify, gradient_method, momentum
from fedjax_dg.types import Algorithm


class FedProxHparams(NamedTuple):
    client_lr: ArrayLike = 0.05
    mu: ArrayLike = 0.01  # the paper's mu, weight of the proximal term


def fedprox(hparams: FedProxHparams = FedProxHparams(), optimizer: Callable = momentum) -> Algorithm:
    """FedAvg with a pull towards the received model: loss + (mu / 2) || theta - theta_received ||^2 over ``params``.

    The pull enters momentum; mu = 0 is FedAvg exactly. Upload: the model.
    Deviation: several public ports sum unsquared norms per layer, a pull of constant size with no gradient at the start;
    this is the paper's squared one. Source: Li et al., MLSys 2020, https://arxiv.org/abs/1812.06127.
    """

    def loss(backbone, params, received, local, batch, key):
        value, forward = classify(backbone, params, local, batch, key)
        distance = optax.tree.norm(optax.tree.sub(params, received.variables.params), squared=True)
        return value + 0.5 * hparams.mu * distance, (forward, {"distance": distance})

    return gradient_method(loss, optimizer(hparams.client_lr))
