"""The one place that chooses how a convolution, and the 2 x 2 pool after it, are computed.

Clients have their own kernels, so ``jax.vmap`` over clients turns XLA's convolution into a grouped one: slow on CPU,
and on a TPU mesh not even divided among the devices unless told so. Narrow layers, which do not fill a device,
therefore go through matrix products. On CPU all do: XLA calls its library for a kernel's gradient only outside of loops,
and a client's steps are one (ResNet-18: a minute a step instead of a second). The form suits the platform the program is
lowered for, not the one it is lowered on. ``convolution`` is handed to ``nn.Conv(conv_general_dilated=...)``;
``conv_pool`` serves ``layers.ConvPool``.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint
from jaxtyping import Array, Float

NHWC = ("NHWC", "HWIO", "NHWC")
# Layers of up to this many filters are narrow; wider ones fill a device by themselves.
MOST_FILTERS = 32
# Tiles of output rows x columns: the smallest whose outputs give the product FULL columns. More fill it with zeros.
TILES = (2, 2), (2, 4), (4, 4)
FULL = 48
# Bytes of patches that im2col makes at once; a larger batch is taken in parts.
PATCHES = 2**28


def convolution(
    inputs: Float[Array, "B H W I"],
    kernel: Float[Array, "kh kw G O"],  # G = I / feature_group_count
    window_strides,
    padding,
    *,
    lhs_dilation=None,
    rhs_dilation=None,
    dimension_numbers=None,
    feature_group_count=1,
    precision=None,
    **options,
) -> Float[Array, "B U V O"]:
    """``lax.conv_general_dilated`` for ``nn.Conv``; by matrix products where that is faster and means the same.

    It is without dilation and with one group. On CPU, by ``in_tiles`` for stride 1 and at most ``MOST_FILTERS`` filters (a
    round of LeNet-5 takes 0.22 of the time of XLA's own convolution, ``experiments/benchmarks/convolution.py``), else by
    ``im2col``, whose patches are not kept for the backward pass. Elsewhere only narrow layers with stride 1, by ``im2col``
    (chosen from what TPU programs cost, ``tpu_aot.py`` beside it; not timed on a GPU or TPU yet).
    """

    def by_xla(inputs, kernel):
        return lax.conv_general_dilated(
            inputs,
            kernel,
            window_strides,
            padding,
            lhs_dilation=lhs_dilation,
            rhs_dilation=rhs_dilation,
            dimension_numbers=dimension_numbers,
            feature_group_count=feature_group_count,
            precision=precision,
            **options,
        )

    if feature_group_count > 1 or any(d > 1 for d in (*(lhs_dilation or ()), *(rhs_dilation or ()))):
        return by_xla(inputs, kernel)
    strides = tuple(window_strides)
    narrow = kernel.shape[-1] <= MOST_FILTERS and strides == (1, 1)
    products = functools.partial(im2col, padding=padding, strides=strides, precision=precision)
    tiles = functools.partial(tiled, padding=padding, precision=precision)
    on_cpu = tiles if narrow else jax.checkpoint(products)
    return lax.platform_dependent(inputs, kernel, cpu=on_cpu, default=products if narrow else by_xla)


def conv_pool(
    inputs: Float[Array, "B H W I"],
    kernel: Float[Array, "kh kw I O"],
    bias: Float[Array, " O"],
    activation: Callable,
    join: Callable,
    precision=None,
) -> Float[Array, "B U V O"]:
    """Valid convolution with stride 1, bias, activation and 2 x 2 pool by ``join`` (``POOLINGS``), as one computation.

    On CPU the pool reads the product's four quarters as they lie in memory, so nothing is moved in between.
    """
    arguments, wide = (inputs, kernel, bias), kernel.shape[-1] > MOST_FILTERS

    def on_cpu(inputs, kernel, bias):
        outputs = in_tiles(inputs, kernel, precision)
        _, _, u, num_out, v, n, m, batch = outputs.shape
        # as a matrix: with more axes XLA lays the quarters out anew
        quarters = lax.split(outputs.reshape(4 * u * num_out * v, n * m * batch), (u * num_out * v,) * 4)
        of_filters = bias[:, None, None, None, None]
        finish = lambda x: activation(x.reshape(u, num_out, v, n, m, batch) + of_filters)
        pooled = pool(quarters, finish, join)
        pooled = pooled.transpose(1, 3, 0, 4, 2, 5).reshape(num_out, n * u, m * v, batch).transpose(3, 2, 1, 0)
        height, width = ((inputs.shape[i + 1] - kernel.shape[i] + 1) // 2 for i in (0, 1))
        return batch_last(pooled[:, :height, :width])

    def elsewhere(inputs, kernel, bias):
        outputs = convolution(inputs, kernel, (1, 1), "VALID", dimension_numbers=NHWC, precision=precision)
        return pool(quarters_of(outputs), lambda x: activation(x + bias), join)

    return elsewhere(*arguments) if wide else lax.platform_dependent(*arguments, cpu=on_cpu, default=elsewhere)


# --- the pool -------------------------------------------------------------------------------------------------------


def larger(one: Array, other: Array) -> Array:
    """Their maximum. Where they are equal the gradient goes to ``one``, as in PyTorch's pools; a NaN is passed on."""
    return lax.select((one >= other) | (one != one), one, other)


def halfway(one: Array, other: Array) -> Array:
    """Their mean."""
    return 0.5 * (one + other)


#: By the name that the command line takes: how two values become one; thrice makes a 2 x 2 pool.
POOLINGS: dict[str, Callable] = {"max": larger, "avg": halfway}


def pool(quarters: Sequence[Array], finish: Callable, join: Callable) -> Array:
    """The four values under each window, row by row, into one, with ``finish`` (bias and activation) before or after."""
    if join is not larger:
        quarters = [finish(x) for x in quarters]
    a, b, c, d = quarters
    pooled = join(join(a, b), join(c, d))
    # a maximum commutes with what rises: pooled first, the rest works on a quarter of the values
    return finish(pooled) if join is larger else pooled


def quarters_of(x: Float[Array, "B H W C"]) -> Sequence[Float[Array, "B h w C"]]:
    """What lies at each of the four places of the 2 x 2 windows, row by row; an odd last row or column is left out."""
    batch, height, width, channels = x.shape
    x = x[:, : height // 2 * 2, : width // 2 * 2].reshape(batch, height // 2, 2, width // 2, 2, channels)
    # split, not sliced: its gradient joins the quarters instead of adding four padded ones
    return [q.squeeze((2, 4)) for row in lax.split(x, (1, 1), 2) for q in lax.split(row, (1, 1), 4)]


# --- forms of the convolution ---------------------------------------------------------------------------------------


def pad(
    inputs: Float[Array, "B H W I"], kernel: Float[Array, "kh kw I O"], padding, strides: tuple[int, int] = (1, 1)
) -> Float[Array, "B h w I"]:
    """The inputs with zeros around them, by ``lax``'s names or as pairs: what is left is a convolution without padding."""
    if isinstance(padding, str):
        padding = lax.padtype_to_pads(inputs.shape[1:3], kernel.shape[:2], strides, padding)
    return jnp.pad(inputs, ((0, 0), *(tuple(sides) for sides in padding), (0, 0)))


def im2col(
    inputs: Float[Array, "B H W I"],
    kernel: Float[Array, "kh kw I O"],
    padding,
    precision=None,
    strides: tuple[int, int] = (1, 1),
) -> Float[Array, "B U V O"]:
    """Convolution as one product: the pixels under each place of the kernel [B*U*V, kh*kw*I] times the kernel.

    Patches of more than ``PATCHES`` bytes are made for a part of the batch at a time.
    """
    kh, kw, num_in, num_out = kernel.shape
    inputs = pad(inputs, kernel, padding, strides)
    (down, across), (_, height, width, _) = strides, inputs.shape
    out_height, out_width = (height - kh) // down + 1, (width - kw) // across + 1

    def of(inputs):
        starts = itertools.product(range(kh), range(kw))
        rows, columns = down * (out_height - 1) + 1, across * (out_width - 1) + 1
        under = [inputs[..., i : i + rows : down, j : j + columns : across, :] for i, j in starts]
        patches = jnp.concatenate(under, axis=-1).reshape(-1, kh * kw * num_in)  # a matrix: else a TPU pads every row
        outputs = jnp.matmul(patches, kernel.reshape(-1, num_out), precision=precision)
        return outputs.reshape(*inputs.shape[:-3], out_height, out_width, num_out)

    size = out_height * out_width * kh * kw * num_in * inputs.dtype.itemsize  # of an image's patches
    if inputs.shape[0] * size <= PATCHES:
        return of(inputs)
    return lax.map(of, inputs, batch_size=max(1, PATCHES // size))


def tiled(
    inputs: Float[Array, "B H W I"], kernel: Float[Array, "kh kw I O"], padding, precision=None
) -> Float[Array, "B U V O"]:
    """Stride-1 convolution by ``in_tiles``, with the outputs put in their places."""
    inputs = pad(inputs, kernel, padding)
    outputs = in_tiles(inputs, kernel, precision).transpose(7, 6, 4, 0, 5, 2, 1, 3)  # [B, m, v, 2, n, u, 2, O]
    batch, m, v, _, n, u, _, num_out = outputs.shape
    height, width = (inputs.shape[i + 1] - kernel.shape[i] + 1 for i in (0, 1))
    return outputs.reshape(batch, m * v * 2, n * u * 2, num_out)[:, :height, :width]


def in_tiles(
    inputs: Float[Array, "B H W I"], kernel: Float[Array, "kh kw I O"], precision=None
) -> Float[Array, "2 2 u O v n m B"]:
    """Valid stride-1 convolution as one product that makes a tile of outputs at a time.

    Output row 2 (m' v + v') + p and column 2 (n' u + u') + q are at [p, q, u', :, v', n', m']. A tile is 2v rows by 2u
    columns; cut into blocks of that size, what it sees is a few neighbouring blocks. Their pixels are the rows of the right
    factor [K, n*m*B], a handful of slices; the left one holds the kernel once for each output of a tile, and zeros. So the
    forward pass and both gradients are dense products, wide enough to be quick, at about twice the arithmetic. The batch
    comes last, so that all copies and elementwise work run along it.
    """
    kh, kw, num_in, num_out = kernel.shape
    height, width = next((tile for tile in TILES if tile[0] * tile[1] * num_out >= FULL), TILES[-1])
    down, across = -(-(height + kh - 1) // height), -(-(width + kw - 1) // width)  # blocks that a tile sees
    m, n = -(-(inputs.shape[1] - kh + 1) // height), -(-(inputs.shape[2] - kw + 1) // width)  # tiles
    rows, columns = m + down - 1, n + across - 1  # blocks
    x = batch_last(inputs)
    x = jnp.pad(x, ((0, 0), (0, rows * height - x.shape[1]), (0, columns * width - x.shape[2]), (0, 0)))
    x = x.transpose(3, 2, 1, 0).reshape(num_in, columns, width, rows, height, -1).transpose(0, 2, 4, 1, 3, 5)
    seen = jnp.stack([x[:, :, :, j : j + n, i : i + m] for j in range(across) for i in range(down)])
    right = seen.reshape(-1, n * m * inputs.shape[0])  # [across * down * I * width * height, n * m * B]
    spare = down * height - kh, across * width - kw
    at = lambda i, j: jnp.pad(kernel, ((i, spare[0] - i), (j, spare[1] - j), (0, 0), (0, 0)))
    halves = [range(2), range(2), range(width // 2), range(height // 2)]
    left = jnp.stack([at(2 * v + p, 2 * u + q) for p, q, u, v in itertools.product(*halves)])
    left = left.reshape(2, 2, width // 2, height // 2, down, height, across, width, num_in, num_out)
    left = left.transpose(6, 4, 8, 7, 5, 0, 1, 2, 9, 3).reshape(len(right), -1)
    product = lax.dot_general(left, right, (((0,), (0,)), ((), ())), precision=precision)
    return product.reshape(2, 2, width // 2, num_out, height // 2, n, m, inputs.shape[0])


def batch_last(x: Float[Array, "B H W C"]) -> Float[Array, "B H W C"]:
    """The same values, lying in memory with the batch as their fastest axis.

    Without it XLA fuses the transposition into each slice taken of it: 0.4 instead of 0.15 ms of a step's 1.6.
    """
    return with_layout_constraint(x, Layout(major_to_minor=(3, 2, 1, 0)))
