"""Styles of feature maps: the mean and standard deviation of every channel of an image's map, and what methods do with them.

A style is a vector [2C], means first. Functions act on whole batches, whose real rows a ``mask`` marks: no other row is
ever chosen, counted or averaged.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, ArrayLike, Bool, Float, Int

from fedjax_dg.backbones.layers import Stage
from fedjax_dg.local import sum_over_batches, take_batch
from fedjax_dg.penalties import group_rows, squared_distances
from fedjax_dg.types import Examples

VARIANCE_FLOOR = 1e-6  # added to variances, so that a dead channel can be normalised
ROWS, CENTRES = KEPT = ("rows", "centres")


class Summary(NamedTuple):
    """Mean and standard deviation of the styles of several images."""

    mean: Float[Array, "*n d"]
    std: Float[Array, "*n d"]


def _hand_on(place, maps, mask):
    return maps, mask


@contextlib.contextmanager
def at_stages(change: Callable = _hand_on) -> Iterator[list[tuple[Array, Any]]]:
    """Context: ``change(place, maps, mask) -> (maps, mask)`` at the end of every stage of a network's pass while it lasts.

    ``place`` counts stages from 0, so it is for one pass; ``mask`` is None in evaluation mode. Yields the list of what the
    stages handed on.
    """
    places, passed = itertools.count(), []

    def intercept(next_method, args, kwargs, context):
        if not (isinstance(context.module, Stage) and context.method_name == "__call__"):
            return next_method(*args, **kwargs)
        passed.append(change(next(places), *args))
        return passed[-1]

    with nn.intercept_methods(intercept):
        yield passed


# --- styles ---------------------------------------------------------------------------------------------------------


def style_of(maps: Float[Array, "B H W C"]) -> Float[Array, "B d"]:
    """The style of every row: means and standard deviations over places, sqrt(unbiased variance + 1e-6)."""
    places = maps.reshape(len(maps), -1, maps.shape[-1]).astype(jnp.float32)
    mean = places.mean(1)
    variance = ((places - mean[:, None]) ** 2).sum(1) / max(places.shape[1] - 1, 1)
    return jnp.concatenate([mean, jnp.sqrt(variance + VARIANCE_FLOOR)], axis=-1)


def restyle(
    maps: Float[Array, "B H W C"], style: Float[Array, "B d"], new: Float[Array, "B d"]
) -> Float[Array, "B H W C"]:
    """Maps of one ``style`` in the ``new`` one: (x - mean) / std * new std + new mean."""
    (mean, std), (new_mean, new_std) = (jnp.split(x[:, None, None], 2, axis=-1) for x in (style, new))
    return ((maps - mean) / std * new_std + new_mean).astype(maps.dtype)


def extrapolate(style: Float[Array, "B d"], mask: Bool[Array, " B"], alpha: ArrayLike) -> Float[Array, "B d"]:
    """Every style further from the mean of the real rows': s + alpha (s - mean). Standard deviations may become negative."""
    mean = jnp.where(mask[:, None], style, 0.0).sum(0) / jnp.maximum(mask.sum(), 1)
    return style + alpha * (style - mean)


def mix(style: Float[Array, "B d"], mask: Bool[Array, " B"], alpha: ArrayLike, key: Array) -> Float[Array, "B d"]:
    """MixStyle: every row's style mixed with another's, lambda s_i + (1 - lambda) s_pi(i).

    lambda ~ Beta(alpha, alpha) for every row, 1 where alpha = 0; pi is a random permutation of the real rows.
    """
    share_key, order_key = jax.random.split(key)
    alpha = jnp.asarray(alpha, jnp.float32)
    concentration = jnp.maximum(alpha, 1e-3)
    drawn = jax.random.beta(share_key, concentration, concentration, (len(mask), 1))
    share = jnp.where(alpha > 0, drawn, 1.0)
    return share * style + (1 - share) * style[permutation(mask, order_key)]


def permutation(mask: Bool[Array, " B"], key: Array) -> Int[Array, " B"]:
    """A random permutation of the real rows; the others keep their places."""
    order = jnp.argsort(jnp.where(mask, jax.random.uniform(key, mask.shape), jnp.inf))  # the real ones first
    return jnp.where(mask, order[jnp.cumsum(mask) - 1], jnp.arange(len(mask)))


def summarise(styles: Callable[[Examples], Array], examples: Examples) -> tuple[Summary, Float[Array, ""]]:
    """The summary of ``styles(batch) -> [B, d]`` over a client's examples, and their number. Zeros without any.

    Sums are of differences from the first example's style: sums of plain squares would lose a small spread in rounding.
    """
    first = jnp.argmax(examples.mask)[None]
    origin = styles(take_batch(examples, first, examples.mask[first]))[0]

    def of_batch(batch):
        away = jnp.where(batch.mask[:, None], styles(batch) - origin, 0.0)
        return away.sum(0), (away**2).sum(0), batch.mask.sum().astype(jnp.float32)

    total, squares, count = sum_over_batches(of_batch, examples)
    away = total / jnp.maximum(count, 1.0)
    spread = jnp.sqrt(jnp.maximum(squares / jnp.maximum(count, 1.0) - away**2, 0.0))
    return Summary(jnp.where(count > 0, origin + away, 0.0), spread), count


# --- style shifting -------------------------------------------------------------------------------------------------


def sample(summary: Summary, rows: int, key: Array) -> Float[Array, "B d"]:
    """Styles drawn from N(mean, std^2), with their standard deviations not below 0."""
    drawn = summary.mean + summary.std * jax.random.normal(key, (rows, *summary.mean.shape))
    mean, std = jnp.split(drawn, 2, axis=-1)
    return jnp.concatenate([mean, jnp.maximum(std, 0.0)], axis=-1)


def seed(points: Float[Array, "B d"], mask: Bool[Array, " B"], number: int, key: Array) -> Int[Array, " k"]:
    """k-means++: ``number`` different real rows as first centres, in the order of choice (any row, once all are chosen).

    The first is drawn uniformly; each other is, of 2 + ln k rows drawn with chances proportional to the squared distance
    from the chosen ones, that which leaves the smallest sum of those distances (the greedy form).
    """
    distances, trials = squared_distances(points), 2 + int(math.log(max(number, 1)))

    def drawn(weights, free, key, times):
        chances = jnp.where(free, jnp.log(jnp.maximum(weights, 1e-30)), -jnp.inf)  # equal rows can be drawn at last
        return jax.random.categorical(key, chances, shape=(times,))

    def choose(carry, key):
        nearest, free = carry
        tried = drawn(nearest, free, key, trials)
        left = jnp.where(mask, jnp.minimum(nearest, distances[tried]), 0.0).sum(1)
        chosen = tried[jnp.argmin(left)]
        return (jnp.minimum(nearest, distances[chosen]), free.at[chosen].set(False)), chosen

    first_key, *keys = jax.random.split(key, max(number, 1))
    first = drawn(jnp.ones(len(mask)), mask, first_key, 1)[0]
    if not keys:
        return first[None][:number]
    _, others = jax.lax.scan(choose, (distances[first], mask.at[first].set(False)), jnp.stack(keys))
    return jnp.concatenate([first[None], others])


def centres_of(
    points: Float[Array, "B d"], mask: Bool[Array, " B"], seeds: Int[Array, " k"], used: Bool[Array, " k"]
) -> Float[Array, "k d"]:
    """One step of Lloyd's: the mean of the real rows that are nearest to each of the ``used`` seeds."""
    distances = jnp.where(used[:, None], squared_distances(points)[seeds], jnp.inf)
    members = (jnp.arange(len(seeds))[:, None] == jnp.argmin(distances, axis=0)) & mask
    sums = jnp.matmul(members.astype(points.dtype), points, precision="highest")
    size = members.sum(1)[:, None]
    return jnp.where(size > 0, sums / jnp.maximum(size, 1), points[seeds])


def shift(
    maps: Float[Array, "B H W C"], mask: Bool[Array, " B"], summary: Summary, key: Array, kept: str = ROWS
) -> Float[Array, "B H W C"]:
    """Half of n real rows, n // 2, in styles drawn from ``summary``; styles are constants to the gradient.

    ``kept``: the others are those that k-means++ chooses for their styles, as they are (``rows``); or they are the first
    ones, in the styles that are the centres of a k-means over the batch (``centres``).
    """
    seed_key, draw_key = jax.random.split(key)
    style = jax.lax.stop_gradient(style_of(maps))
    stay = mask.sum() - mask.sum() // 2
    seeds = seed(style, mask, len(mask) - len(mask) // 2, seed_key)
    used = jnp.arange(len(seeds)) < stay
    foreign = sample(summary, len(mask), draw_key)
    if kept == ROWS:
        stays = ((seeds[:, None] == jnp.arange(len(mask))) & used[:, None]).any(0)
        new, moved = foreign, mask & ~stays
    else:
        rank = jnp.cumsum(mask) - 1
        centres = centres_of(style, mask, seeds, used)[jnp.clip(rank, 0, len(seeds) - 1)]
        new, moved = jnp.where((rank < stay)[:, None], centres, foreign), mask
    return jnp.where(moved[:, None, None, None], restyle(maps, style, jax.lax.stop_gradient(new)), maps)


# --- classes --------------------------------------------------------------------------------------------------------


def oversample(
    labels: Int[Array, " B"], mask: Bool[Array, " B"], num_classes: int, key: Array
) -> tuple[Int[Array, " B"], Bool[Array, " B"]]:
    """Rows to add to a batch, as many as are real, so that classes even out; and which of the B places are filled.

    Each addition is of the class that has the fewest rows by then, of equal ones a random one; classes without rows stay
    without. The rows of a class take turns, in a random order.
    """
    row_key, class_key = jax.random.split(key)
    size, draws = len(mask), jax.random.uniform(row_key, labels.shape)
    counts = jnp.where(mask[:, None], jax.nn.one_hot(labels, num_classes, dtype=jnp.int32), 0).sum(0)
    by_class = jnp.argsort(jnp.where(mask, labels + 0.5 * draws, jnp.inf))  # class by class, shuffled within each
    # the j-th addition to class k comes when the class has c_k + j rows
    turn = counts[None] + jnp.arange(size)[:, None] + jax.random.uniform(class_key, (1, num_classes))
    order = jnp.argsort(jnp.where(counts[None] > 0, turn, jnp.inf).reshape(-1))[:size]
    times, chosen = order // num_classes, order % num_classes
    place = (jnp.cumsum(counts) - counts)[chosen] + times % jnp.maximum(counts[chosen], 1)
    return by_class[jnp.minimum(place, size - 1)], jnp.arange(size) < mask.sum()


def next_of_class(labels: Int[Array, " B"], mask: Bool[Array, " B"]) -> Int[Array, " B"]:
    """For every real row the next one of its class, the first after the last; itself for the only one, and for padding."""
    place = jnp.arange(len(mask))
    ahead = (place - place[:, None] - 1) % len(mask)  # 0 for the next place, most for its own
    same = group_rows(labels, mask).same > 0
    return jnp.where(mask, jnp.argmin(jnp.where(same, ahead, len(mask)), axis=1), place)
