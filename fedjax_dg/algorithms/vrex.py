"""V-REx, risk extrapolation (Krueger et al., ICML 2021), inside every client."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from jaxtyping import ArrayLike

from fedjax_dg import penalties
from fedjax_dg.algorithms.common import classify_rows, gradient_method, momentum
from fedjax_dg.types import Algorithm


class VRExHparams(NamedTuple):
    client_lr: ArrayLike = 0.05
    penalty: ArrayLike = 1.0  # the paper's beta (DomainBed: 10 with Adam, after 500 steps at 1)
    anneal_rounds: ArrayLike = 0.0  # server rounds with a weight of at most 1


def vrex(hparams: VRExHparams = VRExHparams(), optimizer: Callable = momentum) -> Algorithm:
    """Equal risks: loss + beta times the variance over the batch's domains of their mean losses.

    beta = 0 is FedAvg, and so is any beta where clients hold one domain each. Upload: the model.

    Deviation: the loss is the mean over examples, not over domains. Source: Krueger et al., ICML 2021,
    https://arxiv.org/abs/2003.00688.
    """

    def loss(backbone, params, received, local, batch, key):
        value, forward, losses = classify_rows(backbone, params, local, batch, key)
        penalty = penalties.vrex(losses, penalties.rows_of(batch))
        weight = penalties.annealed(hparams.penalty, hparams.anneal_rounds, received.round)
        return value + weight * penalty, (forward, {"penalty": penalty})

    return gradient_method(loss, optimizer(hparams.client_lr))
