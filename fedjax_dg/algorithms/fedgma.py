"""FedGMA, gradient masked averaging (Tenison et al., TMLR 2023), as an algorithm."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

from jaxtyping import ArrayLike

from fedjax_dg.aggregators.fedgma import masked
from fedjax_dg.algorithms.common import classification_loss, gradient_method, momentum
from fedjax_dg.types import Algorithm


class FedGMAHparams(NamedTuple):
    client_lr: ArrayLike = 0.05
    threshold: ArrayLike = 0.4  # the paper's tau


def fedgma(hparams: FedGMAHparams = FedGMAHparams(), optimizer: Callable = momentum) -> Algorithm:
    """FedAvg's clients; both tiers' rules, whichever they are, step only as far as their models agree on the direction.

    See ``aggregators.fedgma.masked``; ``aggregators.fedgma`` is the same as a rule, for other algorithms and one tier.
    threshold = 0 is FedAvg. Upload: the model.
    Source: Tenison et al., TMLR 2023, https://arxiv.org/abs/2201.11986.
    """
    rule = functools.partial(masked, threshold=hparams.threshold)
    return gradient_method(classification_loss, optimizer(hparams.client_lr), merging=rule)
