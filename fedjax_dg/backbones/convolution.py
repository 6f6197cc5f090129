"""The one place that chooses how a convolution is computed; handed to ``nn.Conv(conv_general_dilated=...)``.

Clients have their own kernels, so ``jax.vmap`` over clients turns XLA's convolution into a grouped one: slow on CPU,
and on a TPU mesh not even divided among the devices unless told so. Narrow layers, which do not fill a device,
therefore go through matrix products, in a form that suits the platform the program is lowered for (not the one it is
lowered on).
"""

import functools

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

# Layers of up to this many filters go through matrix products; wider ones fill a device by themselves.
MOST_FILTERS = 32
# Output columns that share one band matrix: fewer make the product thin, more fill the band with zeros.
BLOCK_WIDTHS = range(4, 9)


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

    It is for stride 1, no dilation, one group and at most ``MOST_FILTERS`` filters: by ``block_toeplitz`` on CPU (a round
    of LeNet-5 takes 0.2 of the time of XLA's own convolution, ``experiments/benchmarks/convolution.py``), by ``im2col``
    elsewhere (chosen from what TPU programs cost, ``tpu_aot.py`` beside it; not timed on a GPU or TPU yet).
    """
    plain = (
        all(s == 1 for s in window_strides)
        and all(d == 1 for d in (*(lhs_dilation or ()), *(rhs_dilation or ())))
        and feature_group_count == 1
        and kernel.shape[-1] <= MOST_FILTERS
    )
    if plain:
        on_cpu, elsewhere = (
            functools.partial(f, padding=padding, precision=precision) for f in (block_toeplitz, im2col)
        )
        return lax.platform_dependent(inputs, kernel, cpu=on_cpu, default=elsewhere)
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


def pad(inputs: Float[Array, "B H W I"], kernel: Float[Array, "kh kw I O"], padding) -> Float[Array, "B h w I"]:
    """The inputs with zeros around them, by ``lax``'s names or as pairs: what is left is a convolution without padding."""
    if isinstance(padding, str):
        padding = lax.padtype_to_pads(inputs.shape[1:3], kernel.shape[:2], (1, 1), padding)
    return jnp.pad(inputs, ((0, 0), *(tuple(sides) for sides in padding), (0, 0)))


def im2col(
    inputs: Float[Array, "B H W I"], kernel: Float[Array, "kh kw I O"], padding, precision=None
) -> Float[Array, "B U V O"]:
    """Stride-1 convolution as one product: the pixels under each place of the kernel [B*U*V, kh*kw*I] times the kernel."""
    kh, kw, num_in, num_out = kernel.shape
    inputs = pad(inputs, kernel, padding)
    batch, out_height, out_width = inputs.shape[0], inputs.shape[1] - kh + 1, inputs.shape[2] - kw + 1
    under = [inputs[:, i : i + out_height, j : j + out_width] for i in range(kh) for j in range(kw)]
    patches = jnp.concatenate(under, axis=-1).reshape(-1, kh * kw * num_in)
    outputs = jnp.matmul(patches, kernel.reshape(-1, num_out), precision=precision)
    return outputs.reshape(batch, out_height, out_width, num_out)


def block_toeplitz(
    inputs: Float[Array, "B H W I"], kernel: Float[Array, "kh kw I O"], padding, precision=None
) -> Float[Array, "B U V O"]:
    """Stride-1 convolution as one product over blocks of v output columns.

    Each row of the left factor is what one such block sees, kh rows of w = v + kw - 1 input columns: [.., kh*w*I]. The
    right one is a band matrix [kh*w*I, v*O], T[i, c, a, u, o] = kernel[i, c - u, a, o] where 0 <= c - u < kw, else 0. So
    the forward pass and both gradients are dense products; the zeros cost w / kw times the convolution's arithmetic.
    """
    kh, kw, num_in, num_out = kernel.shape
    inputs = pad(inputs, kernel, padding)
    batch, height, width, _ = inputs.shape
    out_height, out_width = height - kh + 1, width - kw + 1
    block = min(BLOCK_WIDTHS, key=lambda v: -(-out_width // v) * v * (v + kw - 1))
    num_blocks, span = -(-out_width // block), block + kw - 1
    inputs = jnp.pad(inputs, ((0, 0), (0, 0), (0, num_blocks * block - out_width), (0, 0)))
    columns = jnp.stack(
        [inputs[:, :, n * block : n * block + span].reshape(batch, height, span * num_in) for n in range(num_blocks)],
        axis=2,
    )
    seen = jnp.concatenate([columns[:, i : i + out_height] for i in range(kh)], axis=-1)
    # places[j, c, u] = 1 where the block's input column c meets its output column u through kernel column j
    places = np.zeros((kw, span, block), np.float32)
    for j in range(kw):
        places[j, np.arange(block) + j, np.arange(block)] = 1.0
    band = jnp.einsum("jcu,ijao->icauo", places.astype(kernel.dtype), kernel, precision=precision)
    outputs = jnp.matmul(
        seen.reshape(batch * out_height * num_blocks, kh * span * num_in),
        band.reshape(kh * span * num_in, block * num_out),
        precision=precision,
    )
    return outputs.reshape(batch, out_height, num_blocks * block, num_out)[:, :, :out_width]
