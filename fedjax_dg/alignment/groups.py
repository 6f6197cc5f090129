"""Permutation groups: which axes of which leaves share one hidden-unit order.

Reordering a layer's outputs leaves a network's function unchanged only when everything that lives in that order moves
along: the layer's bias, the norm after it, the next layer's input axis, a Gram matrix of that input. A ``Group`` names
all of it, once, beside the architecture.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from flax import traverse_util
from jaxtyping import Array, Int

from fedjax_dg.types import Variables


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
    norm_groups: int = 1  # a group norm reads these units: only whole norm groups, and units within one, may change places


def leaves_of(variables: Variables) -> dict[str, Any]:
    """Leaves by the names that ``Axis`` uses."""
    return dict(traverse_util.flatten_dict(variables._asdict(), sep="/"))


def take_units(x: Array, order: Int[Array, " c"], axis: int, positions: int = 1) -> Array:
    """``x`` with unit ``order[a]`` at place a of ``axis``; within each of ``positions`` blocks after a flatten."""
    shape = x.shape
    x = x.reshape(*shape[:axis], positions, -1, *shape[axis + 1 :])
    return jnp.take(x, order, axis=axis + 1).reshape(shape)


def permute(variables: Variables, group: Group, order: Int[Array, " c"]) -> Variables:
    """Reorder one group's units throughout a model: same function, another basis.

    ``order[a]`` is the old unit that comes to place a. Raises ``KeyError`` for a leaf that the model does not have.
    """
    leaves = leaves_of(variables)
    for axis in (*group.producers, *group.followers, *group.consumers):
        leaves[axis.leaf] = take_units(leaves[axis.leaf], order, axis.axis, axis.positions)
    # an empty batch_stats leaves no path behind in the flat form
    return Variables(**{"batch_stats": variables.batch_stats, **traverse_util.unflatten_dict(leaves, sep="/")})
