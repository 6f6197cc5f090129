"""FedAvg (McMahan et al., AISTATS 2017)."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from jaxtyping import ArrayLike

from fedjax_dg.algorithms.common import classification_loss, gradient_method, momentum
from fedjax_dg.types import Algorithm


class FedAvgHparams(NamedTuple):
    client_lr: ArrayLike = 0.05  # the local optimizer's step size


def fedavg(hparams: FedAvgHparams = FedAvgHparams(), optimizer: Callable = momentum) -> Algorithm:
    """Local descent of the cross-entropy; everything else is the aggregator's.

    ``optimizer``: learning rate -> optax optimizer, started afresh in every station round (``keep_optimizer`` keeps it).
    Upload: the model. Source: McMahan et al., AISTATS 2017, https://arxiv.org/abs/1602.05629.
    """

    return gradient_method(classification_loss, optimizer(hparams.client_lr))
