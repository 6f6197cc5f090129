"""Permutation groups: which axes of which leaves share one hidden-unit order.

Reordering a layer's outputs leaves a network's function unchanged only when everything that lives in that order moves
along: the layer's bias, the norm after it, the next layer's input axis, a Gram matrix of that input, a control variate
or a moment shaped like the parameters. A ``Group`` names all of it, once, beside the architecture.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import traverse_util
from jaxtyping import Array

from fedjax_dg.types import PyTree, Variables

Order = Array  # old unit per place [c], or a plan [c, c] whose rows mix old units


class Axis(NamedTuple):
    """One axis of one leaf. After a flatten, the axis holds ``positions`` blocks of the group's size (NHWC order)."""

    leaf: str  # "params/conv1/kernel"
    axis: int
    positions: int = 1


class Group(NamedTuple):
    """All that one permutation of ``size`` hidden units moves."""

    name: str
    size: int
    producers: tuple[Axis, ...]  # kernels whose output axis this is: they are what gets matched
    followers: tuple[Axis, ...]  # biases and norm leaves of the same units
    consumers: tuple[Axis, ...]  # kernels whose input axis this is
    grams: tuple[tuple[str, int], ...] = ()  # (dense layer, positions): Gram matrices of that layer's input
    norm_groups: int = (
        1  # a group norm reads these units: only whole norm groups, and units within one, may change places
    )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class OfFeatures:
    """An array of a method's state one of whose axes lists the features z, those that the head reads: see ``carry``."""

    value: Any  # an array, or what stands for one in a tree (a shape, a sharding)
    axis: int = dataclasses.field(metadata={"static": True})


HEAD = "params/head/kernel"


def made_with_features(groups: tuple[Group, ...], *axes: Axis) -> tuple[Group, ...]:
    """The groups of a network with further leaves one of whose axes lists the features z."""

    def gain(group):
        reads = [consumer.positions for consumer in group.consumers if consumer.leaf == HEAD]
        return group._replace(
            followers=(*group.followers, *(axis._replace(positions=n) for n in reads for axis in axes))
        )

    return tuple(gain(group) for group in groups)


def leaves_of(variables: Variables) -> dict[str, Any]:
    """Leaves by the names that ``Axis`` uses."""
    return dict(traverse_util.flatten_dict(variables._asdict(), sep="/"))


def from_leaves(leaves: Mapping[str, Any]) -> Variables:
    """The model of those leaves; where there are no ``batch_stats``, or no ``params``, no path says so."""
    return Variables(**{"params": {}, "batch_stats": {}, **traverse_util.unflatten_dict(dict(leaves), sep="/")})


def take_units(x: Array, order: Order, axis: int, positions: int = 1) -> Array:
    """``x`` with unit ``order[a]`` at place a of ``axis``; within each of ``positions`` blocks after a flatten.

    A plan [c, c] in place of an order puts the mixture sum_b plan[a, b] unit_b there.
    """
    shape = x.shape
    x = x.reshape(*shape[:axis], positions, -1, *shape[axis + 1 :])
    if order.ndim == 1:
        return jnp.take(x, order, axis=axis + 1).reshape(shape)
    mixed = jnp.tensordot(order.astype(x.dtype), x, axes=(1, axis + 1), precision="highest")
    return jnp.moveaxis(mixed, 0, axis + 1).reshape(shape)


def permute(variables: Variables, group: Group, order: Order) -> Variables:
    """Reorder one group's units throughout a model: same function, another basis.

    ``order[a]`` is the old unit that comes to place a. Raises ``KeyError`` for a leaf that the model does not have.
    """
    leaves = leaves_of(variables)
    for axis in (*group.producers, *group.followers, *group.consumers):
        leaves[axis.leaf] = take_units(leaves[axis.leaf], order, axis.axis, axis.positions)
    return from_leaves(leaves)


def permute_grams(grams: PyTree, group: Group, order: Order) -> PyTree:
    """Gram statistics ``{layer: Gram}`` of the same inputs in the group's new order."""
    moved = {layer: grams[layer].permute(order, positions) for layer, positions in group.grams if layer in grams}
    return {**grams, **moved}


def carry(state: PyTree, variables: Variables, groups: tuple[Group, ...], orders: Mapping[str, Order]) -> PyTree:
    """``state`` with everything in it that lives in the coordinates of ``variables`` put into the new order.

    That is: every subtree with the structure and shapes of the parameters, or of those under some of their first names
    (control variates, mean gradients, optimizer moments), all ``Variables`` with any of the model's leaves, every
    ``{layer: Gram}``, and every ``OfFeatures``. Other leaves stay.
    """

    def shapes(tree):
        return jax.tree.structure(tree), [x.shape for x in jax.tree.leaves(tree)]

    params, leaves = variables.params, leaves_of(variables)
    sizes = {name: x.shape for name, x in leaves.items()}

    def model_of(node):
        """The model that has what is in ``node`` in place of its own; None if ``node`` is no part of one."""
        if isinstance(node, Variables):
            own = leaves_of(node)
            fits = bool(own) and all(sizes.get(name) == getattr(x, "shape", ()) for name, x in own.items())
            return from_leaves(leaves | own) if fits else None
        part = isinstance(node, dict) and bool(node) and set(node) <= set(params)
        if part and shapes(node) == shapes({name: params[name] for name in node}):
            return variables._replace(params={**params, **node})
        return None

    def moves(node):
        return isinstance(node, OfFeatures) or is_grams(node) or model_of(node) is not None

    def is_grams(node):
        return isinstance(node, dict) and bool(node) and all(hasattr(x, "permute") for x in node.values())

    def move(node) -> Any:
        if isinstance(node, OfFeatures):
            value = node.value
            for group in groups:
                for consumer in group.consumers:
                    if consumer.leaf == HEAD and group.name in orders:
                        value = take_units(value, orders[group.name], node.axis, consumer.positions)
            return dataclasses.replace(node, value=value)
        if is_grams(node):
            for group in groups:
                if group.name in orders:
                    node = permute_grams(node, group, orders[group.name])
            return node
        whole = model_of(node)
        if whole is None:
            return node
        for group in groups:
            if group.name in orders:
                whole = permute(whole, group, orders[group.name])
        if isinstance(node, Variables):
            moved = leaves_of(whole)
            return from_leaves({name: moved[name] for name in leaves_of(node)})
        return {name: whole.params[name] for name in node}

    return jax.tree.map(move, state, is_leaf=moves)


def read_by(groups: tuple[Group, ...], old: str, new: str) -> tuple[Group, ...]:
    """The groups of a network in which the dense layer ``new`` reads what ``old`` used to read."""

    def renamed(axis):
        return axis._replace(leaf=f"params/{new}/kernel") if axis.leaf == f"params/{old}/kernel" else axis

    return tuple(
        group._replace(
            consumers=tuple(renamed(axis) for axis in group.consumers),
            grams=tuple((new if layer == old else layer, positions) for layer, positions in group.grams),
        )
        for group in groups
    )
