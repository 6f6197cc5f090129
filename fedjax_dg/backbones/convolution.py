"""The one place that chooses how a convolution is computed; handed to ``nn.Conv(conv_general_dilated=...)``.

Clients have their own kernels, so ``jax.vmap`` over clients turns XLA's convolution into a grouped one, and XLA's CPU
convolution is slow inside a scan even for one client. On CPU, small images therefore go through a matrix product.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

# Up to this many filters, XLA's CPU convolution loses to ``block_toeplitz``; wider layers are unmeasured.
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
    """``lax.conv_general_dilated`` for ``nn.Conv``, by ``block_toeplitz`` where that is faster and means the same.

    It is: on CPU, for stride 1, no dilation, one group and at most ``MOST_FILTERS`` filters (measured with
    ``experiments/benchmarks/convolution.py``: a round of LeNet-5 is 5.5 times faster than with XLA's own convolution).
    """
    plain = (
        all(s == 1 for s in window_strides)
        and all(d == 1 for d in (*(lhs_dilation or ()), *(rhs_dilation or ())))
        and feature_group_count == 1
        and kernel.shape[-1] <= MOST_FILTERS
    )
    if plain and jax.default_backend() == "cpu":
        return block_toeplitz(inputs, kernel, padding, precision)
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


def block_toeplitz(
    inputs: Float[Array, "B H W I"], kernel: Float[Array, "kh kw I O"], padding, precision=None
) -> Float[Array, "B U V O"]:
    """Stride-1 convolution as one product over blocks of v output columns.

    Each row of the left factor is what one such block sees, kh rows of w = v + kw - 1 input columns: [.., kh*w*I]. The
    right one is a band matrix [kh*w*I, v*O], T[i, c, a, u, o] = kernel[i, c - u, a, o] where 0 <= c - u < kw, else 0. So
    the forward pass and both gradients are dense products; the zeros cost w / kw times the convolution's arithmetic.
    """
    kh, kw, num_in, num_out = kernel.shape
    pads = lax.padtype_to_pads(inputs.shape[1:3], (kh, kw), (1, 1), padding) if isinstance(padding, str) else padding
    (top, bottom), (left, right) = (tuple(p) for p in pads)
    batch, height, width = inputs.shape[0], inputs.shape[1] + top + bottom, inputs.shape[2] + left + right
    out_height, out_width = height - kh + 1, width - kw + 1
    block = min(BLOCK_WIDTHS, key=lambda v: -(-out_width // v) * v * (v + kw - 1))
    num_blocks, span = -(-out_width // block), block + kw - 1
    inputs = jnp.pad(inputs, ((0, 0), (top, bottom), (left, right + num_blocks * block - out_width), (0, 0)))
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
