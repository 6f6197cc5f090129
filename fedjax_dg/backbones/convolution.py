"""The one place that chooses how a convolution is computed; handed to ``nn.Conv(conv_general_dilated=...)``.

Clients have their own kernels, so ``jax.vmap`` over clients turns XLA's convolution into a grouped one, and XLA's CPU
convolution is slow inside a scan even for one client. On CPU, small images therefore go through a matrix product.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

# Wider rows waste more arithmetic (W / kw times the convolution's) than the dense product wins back.
WIDEST_ROW = 1024


def convolution(
    inputs: Float[Array, "B H W I"],
    kernel: Float[Array, "kh kw I O"],
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
    """``lax.conv_general_dilated`` for ``nn.Conv``, by ``row_toeplitz`` where that is faster and means the same.

    It is: on CPU, for stride 1, no dilation, one group and rows of at most ``WIDEST_ROW`` values (measured on LeNet-5:
    4 times faster per local step than XLA's own convolution).
    """
    plain = (
        all(s == 1 for s in window_strides)
        and all(d == 1 for d in (*(lhs_dilation or ()), *(rhs_dilation or ())))
        and feature_group_count == 1
        and inputs.shape[2] * inputs.shape[3] <= WIDEST_ROW
    )
    if plain and jax.default_backend() == "cpu":
        return row_toeplitz(inputs, kernel, padding, precision)
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


def row_toeplitz(
    inputs: Float[Array, "B H W I"], kernel: Float[Array, "kh kw I O"], padding, precision=None
) -> Float[Array, "B U V O"]:
    """Stride-1 convolution as one product: kh stacked image rows [B*U, kh*W*I] times a band matrix [kh*W*I, V*O].

    The band T[i, u, c, v, o] = kernel[i, u - v, c, o] (zero outside 0 <= u - v < kw) holds the kernel once per output
    column, so a row of outputs is a dense product, and both gradients are dense products too.
    """
    kh, kw, num_in, num_out = kernel.shape
    pads = lax.padtype_to_pads(inputs.shape[1:3], (kh, kw), (1, 1), padding) if isinstance(padding, str) else padding
    inputs = jnp.pad(inputs, ((0, 0), *(tuple(p) for p in pads), (0, 0)))
    batch, height, width, _ = inputs.shape
    out_height, out_width = height - kh + 1, width - kw + 1
    rows = jnp.concatenate(
        [inputs[:, i : i + out_height].reshape(batch, out_height, width * num_in) for i in range(kh)], axis=-1
    )
    # places[j, u, v] = 1 where input column u meets output column v through kernel column j
    places = np.zeros((kw, width, out_width), np.float32)
    for j in range(kw):
        places[j, np.arange(out_width) + j, np.arange(out_width)] = 1.0
    band = jnp.einsum("juv,ijco->iucvo", places.astype(kernel.dtype), kernel, precision=precision)
    outputs = jnp.matmul(
        rows.reshape(batch * out_height, kh * width * num_in),
        band.reshape(kh * width * num_in, out_width * num_out),
        precision=precision,
    )
    return outputs.reshape(batch, out_height, out_width, num_out)
