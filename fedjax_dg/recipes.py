"""Augmentation of training images as the published protocols have it, made on the device with every batch.

A random part of the image at full size, turned left to right or not, its colours changed, now and then grey. What is drawn
for an image (``draw``) and what is done to it (``apply``) are apart. Inside, an image is its planes [3, H, W] in [0, 1].
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Bool, Float, Int

from fedjax_dg.augment import LUMA
from fedjax_dg.types import Key

TRIES = 10  # at a part of the image that fits
ASPECT = (3 / 4, 4 / 3)  # width over height, of the part

Planes = Float[Array, "3 H W"]
Box = Int[Array, "4"]  # top, left, height, width


class Draws(NamedTuple):
    """What happens to one image."""

    box: Box
    flip: Bool[Array, ""]
    factors: Float[Array, "3"]  # of brightness, contrast, saturation
    shift: Float[Array, ""]  # of the hue, in turns
    order: Int[Array, "3"]  # in which the factors are used
    before: Int[Array, ""]  # how many of them before the hue is shifted
    grey: Bool[Array, ""]


def crop_and_jitter(
    images: Array,
    key: Key,
    jitter: float = 0.3,
    scale: tuple[float, float] = (0.7, 1.0),
    flip: float = 0.5,
    grey: float = 0.1,
) -> Array:
    """Every image of uint8 RGB [B, H, W, 3] after changes drawn for it alone, in this order; uint8 again, rounded.

    1. A part of the image with ``scale`` of its area and an aspect of 3/4 to 4/3, resized to H x W, bilinear with
       antialiasing. 2. With probability ``flip``, left to right. 3. Brightness, contrast and saturation times a factor each
       from U(max(0, 1 - j), 1 + j), j = ``jitter``, and the hue moved by U(-j, j) turns; the four in a random order, clipped
       to [0, 1] after each. 4. With probability ``grey``, its luma in all channels.

    Image number i is changed by ``fold_in(key, i)``: the others and their number do not matter. Black stays black, so
    padding does too. Raises ``ValueError`` while it is traced for anything but uint8 RGB images.

    As torchvision's RandomResizedCrop, RandomHorizontalFlip, ColorJitter and RandomGrayscale, with its way of drawing.
    Deviations: on PIL images those round to 8 bits after every operation, the hue's saturation and angle too; here only the
    result is rounded.
    """
    if images.ndim != 4 or images.shape[-1] != 3 or images.dtype != jnp.uint8:
        raise ValueError(
            f"This augmentation changes uint8 RGB images [B, H, W, 3], and these inputs are {images.dtype} "
            f"{list(images.shape)}: choose augment=none, or RGB images."
        )
    height, width = images.shape[1:3]

    def one(image, number):
        planes = jnp.moveaxis(image, -1, 0).astype(jnp.float32) / 255.0
        drawn = draw(jax.random.fold_in(key, number), height, width, jitter, scale, flip, grey)
        return jnp.moveaxis(jnp.round(apply(planes, drawn) * 255.0).astype(jnp.uint8), 0, -1)

    return jax.vmap(one)(images, jnp.arange(len(images)))


#: By the name that the command line takes. DomainBed draws its part on the picture as it was stored, the FedDG Benchmark
#: (``fl``) on one already resized to the network's size. Ours are stored at that size: ``domainbed`` is the same program as
#: ``fl``, and not exactly DomainBed's. FedDG-GA changes colours more.
AUGMENTS: dict[str, Callable[[Array, Key], Array] | None] = {
    "none": None,
    "domainbed": functools.partial(crop_and_jitter, jitter=0.3),
    "fl": functools.partial(crop_and_jitter, jitter=0.3),
    "feddg_ga": functools.partial(crop_and_jitter, jitter=0.4),
}


# --- what is drawn --------------------------------------------------------------------------------------------------


def draw(
    key: Key, height: int, width: int, jitter: float, scale: tuple[float, float], flip: float, grey: float
) -> Draws:
    """Everything that is random about one image; from one call, as each takes a third of a second to compile."""
    uniform = jax.random.uniform(key, (2 * TRIES + 9,))
    boxes, factors, rest = jnp.split(uniform, (2 * TRIES + 2, 2 * TRIES + 5))
    order, before = jnp.divmod(jnp.floor(24 * rest[2]).astype(jnp.int32), 4)
    low, high = max(0.0, 1.0 - jitter), 1.0 + jitter
    return Draws(
        box=crop_box(boxes, height, width, scale),
        flip=rest[0] < flip,
        factors=low + (high - low) * factors,
        shift=jitter * (2.0 * rest[1] - 1.0),
        order=jnp.array(list(itertools.permutations(range(3))))[order],
        before=before,
        grey=rest[3] < grey,
    )


def crop_box(uniform: Float[Array, "22"], height: int, width: int, scale: tuple[float, float]) -> Box:
    """A part of an image: area ~ U(``scale``) of the whole, log aspect ~ U, sides rounded; the first of ten that fits.

    Its place is uniform. If none fits, the largest central part whose aspect is allowed. ``uniform``: from U(0, 1).
    """
    area, aspect, place = jnp.split(uniform, (TRIES, 2 * TRIES))
    area = height * width * (scale[0] + (scale[1] - scale[0]) * area)
    low, high = (math.log(aspect) for aspect in ASPECT)
    aspect = jnp.exp(low + (high - low) * aspect)
    sides = jnp.round(jnp.sqrt(jnp.stack([area / aspect, area * aspect], axis=-1))).astype(jnp.int32)  # height, width
    whole = jnp.array([height, width])
    fits = ((sides > 0) & (sides <= whole)).all(-1)
    first = sides[jnp.argmax(fits)]
    corner = jnp.floor(place * (whole - first + 1)).astype(jnp.int32)
    central = jnp.array([min(height, round(width / ASPECT[0])), min(width, round(height * ASPECT[1]))])
    found = jnp.concatenate([corner, first])
    return jnp.where(fits.any(), found, jnp.concatenate([(whole - central) // 2, central]))


# --- what is done ---------------------------------------------------------------------------------------------------


def apply(planes: Planes, drawn: Draws) -> Planes:
    """An image after what was drawn for it."""
    x = resized_crop(planes, drawn.box, planes.shape[1:], drawn.flip)
    x = jitter_colours(x, drawn)
    return jnp.where(drawn.grey, luma(x), x)


def resized_crop(planes: Planes, box: Box, size: tuple[int, ...], flip: ArrayLike = False) -> Float[Array, "3 h w"]:
    """A part of an image at another size, perhaps turned left to right: R x C^T with ``resizing`` matrices R and C."""
    top, left, height, width = box
    rows = resizing(top, height, planes.shape[1], size[0])
    columns = resizing(left, width, planes.shape[2], size[1])
    columns = jnp.where(flip, columns[::-1], columns)
    down = jnp.einsum("oh,chw->cow", rows, planes, precision="highest")
    return jnp.einsum("cow,pw->cop", down, columns, precision="highest")


def resizing(start: Int[Array, ""], length: Int[Array, ""], given: int, made: int) -> Float[Array, "m n"]:
    """The matrix that makes ``made`` pixels of ``length`` of the ``given``, from ``start`` on, as Pillow's bilinear.

    Pixel o is a mean with weights max(0, 1 - |i + 1/2 - c| / s) around its middle c = start + (o + 1/2) length / made, with
    s = max(1, length / made): no step of a large image is skipped. Pixels outside of the part weigh nothing.
    """
    step = length / made
    place = jnp.arange(given) + 0.5
    middle = start + (jnp.arange(made) + 0.5) * step
    weights = jnp.maximum(0.0, 1.0 - jnp.abs(place - middle[:, None]) / jnp.maximum(step, 1.0))
    weights = jnp.where((place > start) & (place < start + length), weights, 0.0)
    return weights / weights.sum(1, keepdims=True)


def jitter_colours(planes: Planes, drawn: Draws) -> Planes:
    """Brightness, contrast, saturation and hue changed in the order drawn, clipped to [0, 1] after each.

    Where every image has its own order, each place in it is computed for all of them. The three factors are one formula;
    the hue is the costly one, so it has one place, and each factor one before it and one after it, in one of which it is 1.
    """

    def at(place, planes, after):
        kind = drawn.order[place]
        here = (place >= drawn.before) == after
        return blend(planes, kind, jnp.where(here, drawn.factors[kind], 1.0))

    planes = jax.lax.fori_loop(0, 3, functools.partial(at, after=False), planes)
    planes = shift_hue(planes, drawn.shift)
    return jax.lax.fori_loop(0, 3, functools.partial(at, after=True), planes)


def blend(planes: Planes, kind: Int[Array, ""], factor: Float[Array, ""]) -> Planes:
    """f x + (1 - f) y, clipped. y by ``kind``: 0 black (brightness), 1 the mean luma (contrast), 2 luma (saturation)."""
    grey = luma(planes)
    other = jnp.where(kind == 1, grey.mean(), jnp.where(kind == 2, grey, 0.0))
    return jnp.clip(factor * planes + (1.0 - factor) * other, 0.0, 1.0)


def luma(planes: Planes) -> Float[Array, "1 H W"]:
    """What of an image is left without colour."""
    return (planes * LUMA[:, None, None]).sum(0, keepdims=True)


def shift_hue(planes: Planes, shift: Float[Array, ""]) -> Planes:
    """Hues moved by ``shift`` turns, with value v and chroma d = max - min as they were (HSV).

    With the hue h in sixths of a turn, channel n = 0, 1, 2 becomes v - d clip(min(k, 4 - k), 0, 1), k = (5 - 2n + h) mod 6.
    """
    red, green, blue = planes
    value = planes.max(0)
    chroma = value - planes.min(0)
    safe = jnp.where(chroma > 0.0, chroma, 1.0)
    hue = jnp.where(
        value == red,
        (green - blue) / safe,
        jnp.where(value == green, 2.0 + (blue - red) / safe, 4.0 + (red - green) / safe),
    )
    k = np.array([5.0, 3.0, 1.0], np.float32)[:, None, None] + hue + 6.0 * shift
    k = k - 6.0 * jnp.floor(k / 6.0)  # not %, which is a call for every pixel on CPU
    return value - chroma * jnp.clip(jnp.minimum(k, 4.0 - k), 0.0, 1.0)
