"""StableNet's sample reweighting (Zhang et al., CVPR 2021) on FedAvg's clients."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import optax
from jaxtyping import ArrayLike

from fedjax_dg import reweighting
from fedjax_dg.algorithms.common import classify_rows, momentum
from fedjax_dg.alignment.groups import OfFeatures
from fedjax_dg.types import Algorithm, Start, Variables


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

    Metrics: the largest and smallest B q_i (1 = even), the dependence before and after.

    Deviations from the authors' code: features are standardised, not scaled per example; all n x n pairs of functions; the
    functions are drawn once a batch, not in every inner step; the objective does not depend on M and B (``solve``). From
    the paper: the true weighted covariance, where the printed one has the weights squared.
    Source: Zhang et al., CVPR 2021, https://arxiv.org/abs/2104.07876 (code: github.com/xxgege/StableNet).
    """
    descent = optimizer(hparams.client_lr)
    weigh = weigher(hparams.lambda_p, hparams.weight_lr, fourier, inner_steps)
    memory = memory_of(memory_rows, persist_memory)

    def begin(backbone, received, client):
        return descent.init(received.variables.params), memory.recall(backbone, client)

    def step(backbone, received, local, batch, key):
        def objective(params):
            _, forward, losses = classify_rows(backbone, params, local, batch, key)
            q, tally, told = weigh(local.tally, forward.z, batch.mask, jax.random.fold_in(key, 1))
            return (q * losses).sum(), (forward, tally, told)

        params = local.variables.params
        (value, (forward, tally, told)), gradient = jax.value_and_grad(objective, has_aux=True)(params)
        updates, state = descent.update(gradient, local.optimizer, params)
        variables = Variables(optax.apply_updates(params, updates), forward.batch_stats)
        local = local._replace(variables=variables, optimizer=state, tally=tally, seen=forward.dense_inputs)
        return local, {"loss": value, **told}

    def init(backbone, variables, key):
        return Start(variables, client=memory.first(backbone))

    def report(backbone, received, local, steps, examples, key):
        return memory.keep(local.client, local.tally), ()

    return Algorithm(step=step, init=init, begin=begin, report=report)


def even(memory, z, mask, key):
    """Every real row weighs the same."""
    return mask / mask.sum().clip(1), memory, {}


def weigher(lambda_p: ArrayLike, lr: ArrayLike, fourier: int, steps: int) -> Callable:
    """``weigh(memory, z, mask, key) -> (q, memory, metrics)``: ``reweighting.solve``, then the batch is remembered."""

    def weigh(memory, z, mask, key):
        past = memory if isinstance(memory, reweighting.Memory) else None
        q, logits, told = reweighting.solve(z, mask, key, lambda_p, lr, fourier, steps, past)
        if past is not None:
            memory = reweighting.remember(past, jax.lax.stop_gradient(z), logits, mask)
        return q, memory, told

    return weigh


class Keeping(NamedTuple):
    """Where a memory of features lives: on the client between rounds, or only while it trains."""

    first: Callable  # backbone -> the client's state before round 1
    recall: Callable  # (backbone, client) -> the tally that local training starts with
    keep: Callable  # (client, tally) -> the client's state afterwards


def memory_of(rows: int, persist: bool) -> Keeping:
    """A memory of ``rows`` rows (0: none), kept on the client if ``persist``. ``ValueError`` for what cannot be."""
    if rows < 0:
        raise ValueError(f"memory_rows={rows} is negative: give the batch size, or 0 for no memory.")
    if not rows and persist:
        raise ValueError("persist_memory=true, but there is no memory: give memory_rows, such as the batch size.")
    if not rows:
        return Keeping(lambda backbone: (), lambda backbone, client: (), lambda client, tally: client)
    empty = lambda backbone: reweighting.empty_memory(rows, backbone.num_features)
    if not persist:
        return Keeping(lambda backbone: (), lambda backbone, client: empty(backbone), lambda client, tally: client)
    box = lambda memory: memory._replace(z=OfFeatures(memory.z, axis=1))  # features may change their order
    return Keeping(
        lambda backbone: box(empty(backbone)),
        lambda backbone, client: client._replace(z=client.z.value),
        lambda client, tally: box(tally),
    )
