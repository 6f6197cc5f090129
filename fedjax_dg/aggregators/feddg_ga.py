"""FedDG-GA: weights that follow how much worse the merged model is for each than its own (generalisation adjustment)."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import optax
from jaxtyping import Array, ArrayLike, Bool, Float, Int

from fedjax_dg import sharding, tree
from fedjax_dg.aggregators.mean import pool, weighting_of
from fedjax_dg.errors import unknown
from fedjax_dg.local import sum_over_batches
from fedjax_dg.types import Aggregator, Disclosure, Examples

FORMS = ("paper", "code")
METRICS = ("accuracy", "loss")
# Gaps this much smaller than the metrics themselves are their rounding, which must not be scaled up to a whole step.
STILL = 1e-6


class Weights(NamedTuple):
    """What the merging side remembers of its n models."""

    a: Float[Array, " n"]
    local: Float[Array, " n"]  # metric of the model that each brought to the last merge
    known: Bool[Array, " n"]  # whether it brought one
    merges: Int[Array, ""]


class Told(NamedTuple):
    """Sums of a metric over examples: those of several clients add up."""

    received: Float[Array, "*n"]  # of the model that came down
    trained: Float[Array, "*n"]  # of the model that goes up
    count: Float[Array, "*n"]


def adjust(
    a: Float[Array, " n"],
    gaps: Float[Array, " n"],
    counts: Bool[Array, " n"],
    step: ArrayLike,
    form: str,
    least: ArrayLike,
) -> Float[Array, " n"]:
    """a moved by at most ``step`` towards models with a large gap, of those that ``counts``; at least 0, sum 1.

    Unchanged where no gap is above ``least``; see ``feddg_ga`` for the ``form``.
    """
    number = jnp.maximum(counts.sum(), 1)
    moves = gaps - jnp.where(counts, gaps, 0.0).sum() / number if form == "paper" else gaps
    moves = jnp.where(counts, moves, 0.0)
    largest, size = jnp.abs(moves).max(), step if form == "paper" else step / number
    moved = jnp.clip(a + size * moves / jnp.where(largest > least, largest, 1.0), 0.0, 1.0)
    return jnp.where(largest > least, moved / jnp.maximum(moved.sum(), 1e-12), a)


def feddg_ga(
    step: ArrayLike = 0.2,
    decay_rounds: ArrayLike = 40,
    metric: str = "accuracy",
    form: str = "paper",
    weighting: str = "samples",
    bn_pool: str = "naive",
) -> Aggregator:
    """Averaging with weights a, theta = sum_k a_k theta_k, that grow where the merged model generalises worst.

    Gap of model k: G_k = s_k^glob - s_k^loc, its metric with the model that the last merge gave it and with the model it
    had brought there, on the same examples. Before a merge, with s = +1 for ``loss`` and -1 for ``accuracy``,
    ``paper``: a_k <- a_k + s step_r (G_k - mean G) / max_j |G_j - mean G|;
    ``code``: a_k <- a_k + (s step_r / n) G_k / max_j |G_j|, not centred, so equal gaps do move unequal a;
    then a is clipped to [0, 1] and divided by its sum. step_r = (1 - r / R) ``step``, R = ``decay_rounds`` merges, 0 later;
    both are traced. The first merge takes a = 1/n, as do merges for which nothing is left after clipping; where all gaps
    are the same (``code``: zero) a stays.

    At the server the local model of a station is its merged one, measured on its clients' examples (``at_station``), for
    however many station rounds; so n is the number of stations. At the station tier it is each client's trained one; there
    a merge happens every station round, so R counts those, and the model that came down in the first of a server
    round is the server's. ``weighting`` only tells which models count, those of weight > 0 (and gives the ``shares`` that
    algorithms see); ``bn_pool``: see ``mean``, with the weights a.

    State, where it merges: a, last metrics [n]. Upload: the model and 3 numbers (sums of both metrics, count). Two passes
    over the examples in evaluation mode. Info: ``a``. Raises ``ValueError`` for an unknown metric, form or weighting.

    Deviations: the metrics are those of the training examples, as clients here have no split for validation; the paper and
    the release use one. 1/n in ``code`` is 1/3 in the release, for its three clients, whose steps lie one r earlier. At the
    station tier all clients must take part in every round: a belongs to places among the participants.
    Source: Zhang et al., CVPR 2023, https://openaccess.thecvf.com/content/CVPR2023/html/Zhang_Federated_Domain_Generalization_With_Generalization_Adjustment_CVPR_2023_paper.html.
    """
    for kind, given, allowed in (("metric", metric, METRICS), ("form", form, FORMS)):
        if given not in allowed:
            raise unknown(kind, given, allowed)
    sign = 1.0 if metric == "loss" else -1.0

    def measure(backbone, start, variables, examples: Examples, key, seen):
        def of_model(model, batch):
            logits = backbone.apply(model, batch.inputs)
            if metric == "loss":
                values = optax.softmax_cross_entropy_with_integer_labels(logits, batch.labels)
            else:
                values = (logits.argmax(-1) == batch.labels).astype(jnp.float32)
            return jnp.where(batch.mask, values, 0.0).sum()

        def of_batch(batch):
            return Told(of_model(start, batch), of_model(variables, batch), batch.mask.sum().astype(jnp.float32))

        return sum_over_batches(of_batch, examples)

    def init(variables, num_models):
        nothing = jnp.zeros(num_models)
        return Weights(jnp.full_like(nothing, 1.0 / num_models), nothing, nothing > 0, jnp.int32(0))

    def update(numbers, state: Weights, told: Told, weights) -> Weights:
        (step, decay_rounds), present, count = numbers, weights > 0, jnp.maximum(told.count, 1.0)
        received, trained = told.received / count, told.trained / count
        compared = present & state.known
        least = STILL * jnp.where(compared, jnp.abs(received) + jnp.abs(state.local), 0.0).max()
        size = step * jnp.maximum(1.0 - (state.merges - 1) / decay_rounds, 0.0)  # r of the merge that is judged
        a = adjust(state.a, sign * (received - state.local), compared, size, form, least)
        a = jnp.where(present, a, 0.0)
        a = jnp.where(a.sum() > 0, a, present.astype(a.dtype))
        return Weights(a / jnp.maximum(a.sum(), 1e-12), trained, present, state.merges + 1)

    def merge(backbone, state: Weights, start, models, weights, messages: Told):
        known = sharding.whole((messages, weights))
        state = sharding.alike(update, (step, decay_rounds), state, *known)
        merged = tree.where(weights.sum() > 0, pool(models, state.a, bn_pool), start)
        return merged, state, {"a": state.a}

    return Aggregator(
        weigh=weighting_of(weighting),
        merge=merge,
        init=init,
        measure=measure,
        combine=lambda messages, weights: Told(*(x.sum(0) for x in messages)),
        at_station=True,
        discloses=(Disclosure(f"{metric} of the received and of the trained model on its examples", "who merges"),),
    )
