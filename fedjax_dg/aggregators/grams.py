"""Input statistics of dense layers: what RegMean needs from a client, whole or in a smaller form."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from fedjax_dg.alignment.groups import Order, take_units
from fedjax_dg.backbones.backbone import first_readers
from fedjax_dg.local import sum_over_batches
from fedjax_dg.types import Examples

GRAMS = ("sum", "mean")
OVERSIZE = ("block", "channel", "lowrank", "diag")
SCOPES = ("head", "all_dense")


class Gram(NamedTuple):
    """What a dense layer's inputs X [m, d] looked like: sums over rows, so those of several clients simply add up.

    ``gram`` is X^T X [d, d], or k blocks [k, c, c] of its diagonal: d = k c (one a spatial position, or one an input),
    or one block that serves all d / c positions alike.
    """

    gram: Float[Array, "*e d d"] | Float[Array, "*e k c c"]
    total: Float[Array, "*e d"]  # sum of rows
    rows: Float[Array, "*e"]  # m

    def permute(self, order: Order, positions: int) -> Gram:
        """The statistics of the same inputs with their units in another order (see ``alignment.take_units``)."""
        total = take_units(self.total, order, 0, positions)
        if self.gram.ndim == 3 and self.gram.shape[-1] == 1:  # one block an input
            return Gram(take_units(self.gram, order, 0, positions), total, self.rows)
        row, inside = self.gram.ndim - 2, self.gram.shape[-1] // len(order)
        gram = take_units(take_units(self.gram, order, row, inside), order, row + 1, inside)
        return Gram(gram, total, self.rows)


class LowRankGram(NamedTuple):
    """A Gram by its leading part and its exact diagonal: F^T F + diag(diagonal - diag(F^T F)), F [r, d]."""

    factor: Float[Array, "*e r d"]
    diagonal: Float[Array, "*e d"]
    total: Float[Array, "*e d"]
    rows: Float[Array, "*e"]

    def permute(self, order: Order, positions: int) -> LowRankGram:
        """As ``Gram.permute``."""
        vector = lambda x: take_units(x, order, 0, positions)
        factor = take_units(self.factor, order, 1, positions)
        return LowRankGram(factor, vector(self.diagonal), vector(self.total), self.rows)


class GramForm(NamedTuple):
    """How wide Grams are kept: layers with more than ``largest`` inputs take the ``oversize`` form, others are whole."""

    largest: int = 4096
    oversize: str = "block"
    rank: int = 64  # of ``lowrank``


def statistics(
    x: Float[Array, "B *t d"], mask: Bool[Array, "B *s"], form: str = "whole", positions: int = 1, rank: int = 64
) -> Gram | LowRankGram:
    """A layer's statistics on one batch of its inputs; rows where ``mask`` is False do not count, whatever they hold.

    ``mask`` marks examples, or tokens of text; of what a layer reads once an example, those count that have a token.

    Forms: ``whole``; ``block``, one block for each of ``positions`` of a flattened feature map, exact within a position;
    ``channel``, their mean for all positions; ``diag``, squares only; ``lowrank``, the ``rank`` leading directions and
    the exact diagonal.
    """
    width = x.shape[-1]
    if mask.ndim >= x.ndim:
        mask = mask.any(tuple(range(x.ndim - 1, mask.ndim)))
    real = mask.reshape(*mask.shape, *[1] * (x.ndim - mask.ndim))
    x = jnp.where(real, x.astype(jnp.float32), 0.0).reshape(-1, width)
    rows, total = mask.sum().astype(jnp.float32) * (len(x) // mask.size), x.sum(0)
    if form == "lowrank":
        return LowRankGram(leading(x, rank), (x**2).sum(0), total, rows)
    if form == "whole":
        return Gram(jnp.matmul(x.T, x, precision="highest"), total, rows)
    if form == "diag":
        return Gram((x**2).sum(0)[:, None, None], total, rows)
    parts = x.reshape(len(x), positions, width // positions)
    blocks = jnp.einsum("bkc,bke->kce", parts, parts, precision="highest")
    return Gram(blocks.mean(0, keepdims=True) if form == "channel" else blocks, total, rows)


def leading(x: Float[Array, "n d"], rank: int) -> Float[Array, "r d"]:
    """F with F^T F the best approximation of x^T x of that rank: the leading singular directions, scaled."""
    if len(x) <= rank:
        return jnp.pad(x, ((0, rank - len(x)), (0, 0)))
    _, directions = jnp.linalg.eigh(jnp.matmul(x, x.T, precision="highest"))  # ascending
    return jnp.matmul(directions[:, -rank:].T, x, precision="highest")


def add(one: Any, other: Any) -> Any:
    """Statistics of the rows of both."""
    if not isinstance(one, LowRankGram):
        return jax.tree.map(jnp.add, one, other)
    factor = leading(jnp.concatenate([one.factor, other.factor]), len(one.factor))
    return LowRankGram(factor, *jax.tree.map(jnp.add, tuple(one[1:]), tuple(other[1:])))


def add_all(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """``add``, layer by layer."""
    return {layer: add(one[layer], other[layer]) for layer in one}


def form_of(layer: str, width: int, backbone, form: GramForm) -> tuple[str, int]:
    """The form in which a layer's statistics are kept, and the positions of its input.

    Raises ``ValueError`` where the asked form cannot be had.
    """
    if width <= form.largest:
        return "whole", 1
    positions = max((n for group in backbone.groups for name, n in group.grams if name == layer), default=1)
    if form.oversize in ("block", "channel") and (positions == 1 or width // positions > form.largest):
        raise ValueError(
            f"The Gram of {layer} has {width} inputs, more than max_gram={form.largest}, and no blocks that small: "
            f"raise max_gram to {width}, or choose oversize=lowrank or diag."
        )
    return form.oversize, positions


def in_scope(backbone, layer: str, scope: str | None) -> bool:
    """Whether RegMean merges a dense layer: ``all_dense``, or in ``head`` those of the classifier, which is what published
    weights may lack; None: the network's own scope."""
    return (scope or backbone.regmean_scope) == "all_dense" or layer.split("/")[0] in backbone.drawn


def statistics_of(
    backbone, seen: dict[str, Float[Array, "B *t d"]], mask: Bool[Array, "B *s"], form: GramForm = GramForm()
) -> dict[str, Any]:
    """Statistics of what the dense layers read, ``seen``; layers that read the same array share one entry, the first's."""
    return {
        layer: statistics(seen[layer], mask, *form_of(layer, seen[layer].shape[-1], backbone, form), form.rank)
        for layer in dict.fromkeys(first_readers(seen).values())
    }


def measure_grams(
    backbone, variables, examples: Examples, form: GramForm = GramForm(), scope: str | None = "all_dense"
) -> dict[str, Any]:
    """One evaluation-mode pass of a model over a client's examples: statistics of what every dense layer in scope reads."""

    def of_batch(batch):
        rows = backbone.real_rows(batch.inputs, batch.mask)
        seen = backbone.dense_inputs(variables, batch.inputs)
        return statistics_of(backbone, {k: x for k, x in seen.items() if in_scope(backbone, k, scope)}, rows, form)

    return sum_over_batches(of_batch, examples, add_all)


def grams_of(backbone, variables, inputs: Array, form: GramForm = GramForm()) -> dict[str, Any]:
    """``measure_grams`` for plain inputs [N, ...]: what ``regmean`` wants of a model and its data, outside a federation.

    >>> import jax, fedjax_dg as fdg
    >>> backbone = fdg.backbones.lenet5(num_classes=6)
    >>> images = jax.random.normal(jax.random.key(0), (2, 8, 32, 32, 3))
    >>> models = [jax.jit(backbone.init)(jax.random.key(i)) for i in range(2)]
    >>> measure = jax.jit(lambda model, x: grams_of(backbone, model, x))
    >>> grams = [measure(model, x) for model, x in zip(models, images)]
    >>> merged = jax.jit(fdg.aggregators.regmean)(models, grams)
    >>> backbone.apply(merged.variables, images[0]).shape
    (8, 6)
    """
    count = len(inputs)
    nothing = jnp.zeros(count, jnp.int32)
    examples = Examples(jnp.asarray(inputs), nothing, jnp.ones(count, bool), nothing)
    measured = measure_grams(backbone, variables, examples, form)
    return {layer: measured[first] for layer, first in backbone.dense_layers(variables).items()}


def per_row(grams: dict[str, Any]) -> dict[str, Any]:
    """Statistics divided by their number of rows: every client then counts the same."""

    def divide(stats):
        rows = jnp.maximum(stats.rows, 1.0)
        mean = jax.tree.map(lambda x: x / rows, stats)
        return mean._replace(factor=stats.factor / jnp.sqrt(rows)) if isinstance(stats, LowRankGram) else mean

    return {layer: divide(stats) for layer, stats in grams.items()}


def add_grams(grams: dict[str, Any], weights: Float[Array, " n"]) -> dict[str, Any]:
    """Sum over the leading axis [n], leaving out models of weight zero."""
    present = (weights > 0).astype(jnp.float32)

    def summed(stats):
        total = jax.tree.map(lambda x: jnp.tensordot(present, x, axes=1, precision="highest"), stats)
        if not isinstance(stats, LowRankGram):
            return total
        rank, width = stats.factor.shape[-2:]
        return total._replace(factor=leading((stats.factor * present[:, None, None]).reshape(-1, width), rank))

    return {layer: summed(stats) for layer, stats in grams.items()}
