"""Accuracy per domain from confusion matrices, and the rules that select a round's model."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float, Int

from fedjax_dg import sharding
from fedjax_dg.local import PASS_SIZE, take_batch
from fedjax_dg.types import Examples, Key, Variables

SELECTIONS = ("source-validation", "last", "oracle", "leave-one-domain-out")


class EvaluationSet(NamedTuple):
    """What a model is judged on: validation examples of the source domains and all examples of the held-out one."""

    examples: Examples  # [M, ...]
    unseen: Bool[Array, " M"]  # its identity (the depicted item) is in no client's training set


class Evaluation(NamedTuple):
    """Counts [domain, true class, predicted class], over all examples and over unseen identities; loss sums [domain]."""

    confusion: Float[Array, "G K K"]
    confusion_unseen: Float[Array, "G K K"]
    loss: Float[Array, " G"]


def evaluate(
    predict: Callable,
    num_domains: int,
    num_classes: int,
    variables: Variables,
    data: EvaluationSet,
    key: Key,
    start: Int[Array, ""] | int = 0,
) -> Evaluation:
    """Confusion counts of ``predict(variables, inputs, key)`` over ``data``, ``PASS_SIZE`` examples at a time.

    ``start``: where ``data`` begins, if it is a part of a larger set.
    """
    square, total = (num_domains, num_classes, num_classes), data.examples.mask.shape[0]
    if total == 0:  # no validation split and no held-out domain
        return Evaluation(jnp.zeros(square), jnp.zeros(square), jnp.zeros(num_domains))
    size = min(PASS_SIZE, total)
    batches = -(-total // size)
    batches = -(-batches // sharding.num_devices()) * sharding.num_devices()
    positions = jnp.arange(batches * size).reshape(batches, size)

    def of_batch(common, position):
        variables, data, key, start = common
        index = jnp.minimum(position, total - 1)
        batch = take_batch(data.examples, index, data.examples.mask[index] & (position < total))
        logits = predict(variables, batch.inputs, jax.random.fold_in(key, start + position[0]))
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch.labels)
        cell = (batch.domain, batch.labels, jnp.argmax(logits, axis=-1))
        real = batch.mask.astype(jnp.float32)
        return Evaluation(
            jnp.zeros(square).at[cell].add(real),
            jnp.zeros(square).at[cell].add(real * data.unseen[index]),
            jnp.zeros(num_domains).at[batch.domain].add(jnp.where(batch.mask, losses, 0.0)),
        )

    return sharding.total(of_batch, (variables, data, key, start), positions, sharding.AXES)


def scores(evaluation: Evaluation, domain_names: tuple[str, ...], held_out: str | None) -> dict[str, float | None]:
    """Plain numbers of an evaluation: held-out ``accuracy`` (all examples), ``balanced_accuracy`` (mean recall of the
    classes present), ``accuracy_unseen``, ``loss``, and ``source_accuracy`` (mean over source domains' validation).
    ``held_out``: a domain, or two as ``a+b``.

    What cannot be computed (no held-out domain, no such examples) is None. Also ``accuracy/<domain>`` of each domain.
    """
    confusion, unseen, losses = (np.asarray(x, np.float64) for x in evaluation)

    def accuracy(counts):
        return float(np.trace(counts) / counts.sum()) if counts.sum() else None

    by_domain = {name: accuracy(confusion[i]) for i, name in enumerate(domain_names)}
    left_out = domains_left_out(held_out)
    sources = [value for name, value in by_domain.items() if name not in left_out and value is not None]
    out = {"source_accuracy": float(np.mean(sources)) if sources else None}
    if left_out:
        these = [domain_names.index(name) for name in left_out]
        counts = confusion[these].sum(0)
        support = counts.sum(1)
        recall = np.diagonal(counts)[support > 0] / support[support > 0]
        out |= {
            "accuracy": accuracy(counts),
            "balanced_accuracy": float(recall.mean()) if len(recall) else None,
            "accuracy_unseen": accuracy(unseen[these].sum(0)),
            "loss": float(losses[these].sum() / counts.sum()) if counts.sum() else None,
        }
    return out | {f"accuracy/{name}": value for name, value in by_domain.items()}


def domains_left_out(held_out: str | None) -> list[str]:
    """The domains that ``held_out`` names: none, one, or those joined by +."""
    return [] if held_out is None else held_out.split("+")


def is_better(selection: str, new: dict, best: dict | None) -> bool:
    """Whether the model with scores ``new`` replaces that with ``best``. Ties keep the earlier round, but for ``last``.

    ``source-validation``: mean validation accuracy of the source domains. ``oracle``: held-out accuracy, which no one
    has in practice. ``last``: always. ``leave-one-domain-out``: likewise, as it takes other cells to tell (``tables``).
    """
    if not best or selection in ("last", "leave-one-domain-out"):
        return True
    name = "accuracy" if selection == "oracle" else "source_accuracy"
    return (new[name] if new[name] is not None else -1.0) > (best[name] if best[name] is not None else -1.0)
