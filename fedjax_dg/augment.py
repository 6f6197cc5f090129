"""Augmented views of a batch of images, made on the device with the batch: shapes are static, strengths traced."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.ndimage import map_coordinates
from jaxtyping import Array, ArrayLike, Bool, Float

from fedjax_dg import tree
from fedjax_dg.types import Key

# What magnitude 1 is: of the change of contrast and the like, of shears, of a side that is translated, of a side that is
# cut out, and in degrees.
MOST_BLEND, MOST_SHEAR, MOST_TRANSLATION, MOST_CUT, MOST_ROTATION = 0.9, 0.3, 0.45, 0.5, 30.0
LUMA = np.array([0.299, 0.587, 0.114], np.float32)  # of red, green and blue in grey

Image = Float[Array, "H W C"]
Strength = Float[Array, ""]  # in [-1, 1]


def rand_augment(images: Array, key: Key, magnitude: ArrayLike, num_ops: int = 2) -> Array:
    """Every image [B, H, W, C] after ``num_ops`` operations drawn for it alone, in the dtype of ``images``.

    Operations, each as likely: identity, brightness, contrast, saturation, sharpness, posterize, solarize, cutout, shear and
    translation along either axis, rotation. ``magnitude`` in [0, 1] is how strong; those that have a direction take either
    at random. 0 changes nothing. What comes in from outside of an image, and what is cut out, is mid-grey.

    uint8 images are RGB and stay in 0 to 255: every operation clips, the last result is rounded. Of other images (normalised
    ones) the range is not known: they are never clipped, mid-grey is 0, and posterize and solarize, which need levels, are
    not drawn.

    After RandAugment (Cubuk et al., NeurIPS 2020, https://arxiv.org/abs/1909.13719), with bilinear interpolation.
    Deviations: without autocontrast and equalize, which have no magnitude, and with cutout; invert is solarize at 1.
    """
    pixels = images.dtype == jnp.uint8
    one = functools.partial(_augment, magnitude=jnp.asarray(magnitude, jnp.float32), num_ops=num_ops, pixels=pixels)
    # by row, so that the length of a batch does not matter
    keys = jax.vmap(functools.partial(jax.random.fold_in, key))(jnp.arange(len(images)))
    if not pixels:
        return jax.vmap(one)(images.astype(jnp.float32), keys).astype(images.dtype)
    return jnp.round(jax.vmap(one)(images / 255.0, keys) * 255.0).astype(jnp.uint8)


def _augment(image: Image, key: Key, magnitude: Strength, num_ops: int, pixels: bool) -> Image:
    coloured = (*COLOURING, *LEVELLING) if pixels else COLOURING
    fill = 0.5 if pixels else 0.0

    def one(number, image):
        op_key, sign_key, place_key = jax.random.split(jax.random.fold_in(key, number), 3)
        strength = magnitude * jax.random.rademacher(sign_key, (), jnp.float32)
        op = jax.random.randint(op_key, (), 0, len(coloured) + MOVES + 1)  # the colours, then the moves, then cutout
        way = op - len(coloured)
        # a switch under vmap computes every case, so all that moves pixels is one warp
        image = jax.lax.switch(jnp.where(way < 0, op, 0), coloured, image, strength)
        matrix, shift = tree.take(moves(strength, image.shape), jnp.where(way < 0, MOVES, way))
        image = warp(image, matrix, shift, fill)
        image = jnp.where((way == MOVES) & cut(place_key, strength, image.shape), fill, image)
        return jnp.clip(image, 0.0, 1.0) if pixels else image

    return jax.lax.fori_loop(0, num_ops, one, image)


# --- colours --------------------------------------------------------------------------------------------------------


def away_from(other: Callable[[Image], Array]) -> Callable[[Image, Strength], Image]:
    """The operation that removes an image from another one made of it, or brings it nearer if the strength is negative."""

    def apply(image, strength):
        return image + MOST_BLEND * strength * (image - other(image))

    return apply


def grey(image: Image) -> Float[Array, "H W 1"]:
    """Luma of three channels; the mean of any other number."""
    return (image * LUMA).sum(-1, keepdims=True) if image.shape[-1] == 3 else image.mean(-1, keepdims=True)


def smooth(image: Image) -> Image:
    """Means over 3 x 3 places in which the middle counts five times; the border as it was."""
    height, width, _ = image.shape
    near = sum(image[i : height - 2 + i, j : width - 2 + j] for i in range(3) for j in range(3))
    return image.at[1:-1, 1:-1].set((near + 4 * image[1:-1, 1:-1]) / 13)


def posterize(image: Image, strength: Strength) -> Image:
    """Without the lowest bits of every pixel, up to four."""
    step = 2.0 ** jnp.round(4 * jnp.abs(strength))
    return jnp.floor(jnp.round(image * 255.0) / step) * step / 255.0


def solarize(image: Image, strength: Strength) -> Image:
    """Inverted where it is brightest."""
    return jnp.where(image > 1.0 - jnp.abs(strength), 1.0 - image, image)


COLOURING: tuple[Callable, ...] = (
    away_from(lambda image: image),  # identity
    away_from(jnp.zeros_like),  # brightness
    away_from(lambda image: grey(image).mean()),  # contrast
    away_from(grey),  # saturation
    away_from(smooth),  # sharpness
)
LEVELLING: tuple[Callable, ...] = (posterize, solarize)

# --- places ---------------------------------------------------------------------------------------------------------


def moves(strength: Strength, shape: tuple[int, ...]) -> tuple[Float[Array, "M 2 2"], Float[Array, "M 2"]]:
    """Where pixels come from: matrix and shift of (row, column) around the middle, for every way to move; the last stays."""
    shear, angle = MOST_SHEAR * strength, jnp.deg2rad(MOST_ROTATION * strength)
    down, right = (MOST_TRANSLATION * side * strength for side in shape[:2])
    sin, cos = jnp.sin(angle), jnp.cos(angle)
    table = (
        ([[1, 0], [shear, 1]], [0, 0]),  # shear along x
        ([[1, shear], [0, 1]], [0, 0]),  # along y
        ([[1, 0], [0, 1]], [0, right]),
        ([[1, 0], [0, 1]], [down, 0]),
        ([[cos, sin], [-sin, cos]], [0, 0]),
        ([[1, 0], [0, 1]], [0, 0]),
    )
    matrices, shifts = (jnp.array(x, jnp.float32) for x in zip(*table))
    return matrices, shifts


MOVES = 5  # without the one that stays


def warp(image: Image, matrix: Float[Array, "2 2"], shift: Float[Array, "2"], fill: float) -> Image:
    """Every pixel from another place, between pixels by bilinear interpolation, ``fill`` from outside."""
    height, width, _ = image.shape
    middle = (height - 1) / 2, (width - 1) / 2
    y, x = jnp.meshgrid(jnp.arange(height) - middle[0], jnp.arange(width) - middle[1], indexing="ij")
    # sums, as a product of matrices may be rounded to bfloat16
    places = [row[0] * y + row[1] * x + step + at for row, step, at in zip(matrix, shift, middle)]
    of_channel = lambda channel: map_coordinates(channel, places, order=1, mode="constant", cval=fill)
    return jax.vmap(of_channel, in_axes=-1, out_axes=-1)(image)


def cut(key: Key, strength: Strength, shape: tuple[int, ...]) -> Bool[Array, "H W 1"]:
    """The places of a square around a random one."""
    height, width = shape[:2]
    half = MOST_CUT * min(height, width) * jnp.abs(strength) / 2
    row, column = jax.random.uniform(key, (2,)) * jnp.array([height, width])
    down, right = jnp.abs(jnp.arange(height) + 0.5 - row), jnp.abs(jnp.arange(width) + 0.5 - column)
    return (jnp.maximum(down[:, None], right) < half)[:, :, None]
