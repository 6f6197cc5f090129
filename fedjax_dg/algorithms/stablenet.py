"""StableNet's sample reweighting (Zhang et al., CVPR 2021) on FedAvg's clients."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
from jaxtyping import ArrayLike

from fedjax_dg import reweighting
from fedjax_dg.algorithms.common import classify_rows, gradient_step, momentum
from fedjax_dg.types import Algorithm, Start


class StableNetHparams(NamedTuple):
    client_lr: ArrayLike = 0.05
    lambda_p: ArrayLike = 0.5  # larger: more even weights
    weight_lr: ArrayLike = 1.0  # of the inner descent; 0: even weights


def stablenet(
    hparams: StableNetHparams = StableNetHparams(),
    optimizer: Callable = momentum,
    fourier: int = 5,
    inner_steps: int = reweighting.STEPS,
    memory_rows: int = 0,
    persist_memory: bool = False,
) -> Algorithm:
    """Cross-entropy whose rows are weighted so that the features look independent: sum_i q_i CE_i, q from the batch.

    q is solved anew in every step (``reweighting.solve``: ``fourier`` random functions of every feature, ``inner_steps``
    of descent) and constant in the gradient. ``memory_rows`` > 0 (the batch size, say) also lets it see a running mean of
    earlier batches' features, row by row; that starts empty in every station round, or is kept on the client between rounds
    (``persist_memory``). It holds features, and never leaves. weight_lr = 0 is FedAvg to rounding. Upload: the model.

    Raises ``ValueError`` for ``fourier`` below 1, negative ``memory_rows``, and ``persist_memory`` without any.
    Metrics: the largest and smallest B q_i (1 = even), the dependence before and after.

    Deviations from the authors' code: features are standardised, not scaled per example; all n x n pairs of functions; the
    functions are drawn once a batch, not in every inner step; the objective does not depend on M and B (``solve``). From
    the paper: the true weighted covariance, where the printed one has the weights squared.
    Source: Zhang et al., CVPR 2021, https://arxiv.org/abs/2104.07876 (code: github.com/xxgege/StableNet).
    """
    weigh = reweighting.weigher(hparams.lambda_p, hparams.weight_lr, fourier, inner_steps)
    memory = reweighting.memory_of(memory_rows, persist_memory)
    descent = optimizer(hparams.client_lr)

    def init(backbone, variables, key):
        return Start(variables, client=memory.first(backbone))

    def begin(backbone, received, client):
        return descent.init(received.variables.params), memory.recall(backbone, client)

    def loss(backbone, params, received, local, batch, key):
        _, forward, losses = classify_rows(backbone, params, local, batch, key)
        q, tally, told = weigh(local.tally, forward.z, batch.mask, jax.random.fold_in(key, 1))
        return (q * losses).sum(), (forward, told, {"tally": tally})

    def report(backbone, received, local, steps, examples, key):
        return memory.keep(local.client, local.tally), ()

    return Algorithm(step=gradient_step(loss, descent), init=init, begin=begin, report=report)
