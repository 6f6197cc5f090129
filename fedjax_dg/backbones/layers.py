"""What the image networks share: pixels, layers, and the wiring from which their permutation groups follow."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax import lax
from jaxtyping import Array, Bool, Float

from fedjax_dg.alignment.groups import Axis, Group
from fedjax_dg.backbones.convolution import conv_pool, convolution
from fedjax_dg.errors import unknown

NORMS = ("batch", "group")  # what a network is built with; ``xan`` comes from batch norm (``algorithms.gperxan``)
NORM_GROUPS = 32  # of a group norm: the number its paper settles on

IMAGENET_MEAN = np.array([0.485, 0.456, 0.406], np.float32)
IMAGENET_STD = np.array([0.229, 0.224, 0.225], np.float32)


def imagenet_pixels(inputs: Array) -> Array:
    """uint8 RGB pixels to float32 of ImageNet's mean 0 and deviation 1 per channel; anything else passes unchanged."""
    if inputs.dtype != jnp.uint8:
        return inputs
    return (inputs.astype(jnp.float32) / 255.0 - IMAGENET_MEAN) / IMAGENET_STD


# --- layers, for the inside of an ``nn.compact`` method -------------------------------------------------------------


def conv(features: int, size: int, stride: int = 1, padding: int = 0, bias: bool = True, name: str | None = None):
    """A square convolution with padding on all four sides, He-normal by fan-out as torchvision's ResNet and VGG.

    Never ``SAME``, which pads only one side when the stride is 2.
    """
    return nn.Conv(
        features,
        (size, size),
        strides=(stride, stride),
        padding=((padding, padding), (padding, padding)),
        use_bias=bias,
        kernel_init=nn.initializers.variance_scaling(2.0, "fan_out", "normal"),
        conv_general_dilated=convolution,
        name=name,
    )


class ConvPool(nn.Module):
    """A square convolution without padding, bias, activation and 2 x 2 pool by ``join`` (``convolution.POOLINGS``).

    Its parameters are named and initialised as ``nn.Conv``'s.
    """

    features: int
    size: int
    activation: Callable
    join: Callable

    @nn.compact
    def __call__(self, x: Float[Array, "B H W I"]) -> Float[Array, "B h w O"]:
        shape = (self.size, self.size, x.shape[-1], self.features)
        kernel = self.param("kernel", nn.initializers.lecun_normal(), shape)
        bias = self.param("bias", nn.initializers.zeros_init(), (self.features,))
        return conv_pool(x, kernel, bias, self.activation, self.join)


class XAN(nn.Module):
    """s_1 BN(x) + s_2 IN(x), (s_1, s_2) = softmax(batch_score, instance_score); each norm with its own scale and bias.

    Batch norm's leaves have the names that they have without the other norm, so that its weights fit.
    """

    def setup(self):
        self.batch = nn.BatchNorm(momentum=0.9, epsilon=1e-5)
        nn.share_scope(self, self.batch)
        self.instance = nn.InstanceNorm(epsilon=1e-5)
        self.batch_score = self.param("batch_score", nn.initializers.ones_init(), ())
        self.instance_score = self.param("instance_score", nn.initializers.ones_init(), ())

    def __call__(self, x: Float[Array, "B H W C"], running: bool, where) -> Float[Array, "B H W C"]:
        share = nn.sigmoid(self.batch_score - self.instance_score)  # the softmax of two
        batch = self.batch(x, use_running_average=running, mask=where)
        return share * batch + (1.0 - share) * self.instance(x)


class Stage(nn.Module):
    """The end of a stage of a network, before the next: its feature map and which rows are real, handed on as they are.

    A place with a name, where a method may change the map or add rows to the batch (``styles.at_stages``).
    """

    def __call__(self, maps: Float[Array, "B H W C"], mask: Bool[Array, " B"] | None):
        return maps, mask


def normalise(
    x: Float[Array, "B H W C"], kind: str | None, running: bool, mask: Bool[Array, " B"] | None, name: str
) -> Float[Array, "B H W C"]:
    """Batch norm (PyTorch's momentum 0.1 and epsilon), group norm, ``XAN``, or with ``kind=None`` nothing.

    Batch norm, in ``XAN`` too, uses its running statistics if ``running``, otherwise those of the real rows, which ``mask``
    marks; a batch without any is taken whole, so that nothing is divided by zero.

    Deviation from PyTorch: the running variance gathers the biased variance of a batch.
    """
    if kind is None:
        return x
    if kind == "group":
        return nn.GroupNorm(NORM_GROUPS, epsilon=1e-5, name=name)(x)
    where = None if mask is None else (mask | ~mask.any())[:, None, None, None]
    if kind == "xan":
        return XAN(name=name)(x, running, where)
    return nn.BatchNorm(momentum=0.9, epsilon=1e-5, name=name)(x, use_running_average=running, mask=where)


def max_pool_3x3(x: Float[Array, "B H W C"], padding: int = 0) -> Float[Array, "B h w C"]:
    """3 x 3 maximum, stride 2, as elementwise maxima (``nn.max_pool``'s gradient is a slow scatter on CPU)."""
    sides = (padding, padding)
    x = jnp.pad(x, ((0, 0), sides, sides, (0, 0)), constant_values=-jnp.inf)
    for axis in (1, 2):
        last = 2 * ((x.shape[axis] - 3) // 2)  # where the last window starts
        shifted = (lax.slice_in_dim(x, i, last + i + 1, stride=2, axis=axis) for i in range(3))
        x = functools.reduce(jnp.maximum, shifted)
    return x


def adaptive_avg_pool(x: Float[Array, "B H W C"], height: int, width: int) -> Float[Array, "B h w C"]:
    """Means over ``height`` x ``width`` bins, PyTorch's: bin i of n covers floor(i H / n) to ceil((i + 1) H / n) - 1."""
    if x.shape[1:3] == (height, width):
        return x
    rows, columns = _bins(x.shape[1], height), _bins(x.shape[2], width)
    return jnp.einsum("bhwc,ih,jw->bijc", x, rows, columns, precision="highest").astype(x.dtype)


def _bins(size: int, bins: int) -> Float[np.ndarray, "n s"]:
    """The averaging matrix of one axis; neighbouring bins may overlap."""
    matrix = np.zeros((bins, size), np.float32)
    for i in range(bins):
        start, stop = i * size // bins, -(-(i + 1) * size // bins)
        matrix[i, start:stop] = 1.0 / (stop - start)
    return matrix


# --- wiring ---------------------------------------------------------------------------------------------------------


class Layer(NamedTuple):
    """How a layer is wired. Hidden units have a name; the image's channels and the class logits have none."""

    name: str  # path below params
    reads: str | None  # the units on its input axis
    makes: str | None  # the units on its output axis; several layers make the same where their outputs are added
    size: int = 0  # how many it makes
    norm: str | None = None  # the norm after it
    bias: bool = True
    dense: bool = False
    positions: int = 1  # places of a feature map that was flattened before it


def sequence(convs: Sequence[int], denses: Sequence[int], positions: int, normed: bool = False) -> list[Layer]:
    """A net without branches: ``conv1``.. (with ``norm1``.. if ``normed``), a flatten, ``dense1``.., ``head``."""
    layers, reads = [], None
    for i, size in enumerate(convs, 1):
        layers.append(Layer(f"conv{i}", reads, f"conv{i}", size, norm=f"norm{i}" if normed else None))
        reads = f"conv{i}"
    for i, size in enumerate(denses, 1):
        layers.append(Layer(f"dense{i}", reads, f"dense{i}", size, dense=True, positions=positions if i == 1 else 1))
        reads = f"dense{i}"
    return [*layers, Layer("head", reads, None, dense=True)]


def groups_of(layers: Sequence[Layer], norm: str | None = None) -> tuple[Group, ...]:
    """One permutation group per name of hidden units, in the order in which the layers first make them.

    ``norm`` is the kind of the norms: a batch norm's running statistics move along, a group norm limits what may move.
    """
    groups = []
    for units in dict.fromkeys(layer.makes for layer in layers if layer.makes):
        makers = [layer for layer in layers if layer.makes == units]
        readers = [layer for layer in layers if layer.reads == units]
        norms = [layer.norm for layer in makers if layer.norm]
        leaves = [f"params/{layer.name}/bias" for layer in makers if layer.bias]
        leaves += [f"params/{name}/{leaf}" for name in norms for leaf in ("scale", "bias")]
        if norm == "batch":
            leaves += [f"batch_stats/{name}/{leaf}" for name in norms for leaf in ("mean", "var")]
        groups.append(
            Group(
                name=units,
                size=makers[0].size,
                producers=tuple(Axis(f"params/{x.name}/kernel", 1 if x.dense else 3) for x in makers),
                followers=tuple(Axis(leaf, 0) for leaf in leaves),
                consumers=tuple(Axis(f"params/{x.name}/kernel", 0 if x.dense else 2, x.positions) for x in readers),
                grams=tuple((x.name, x.positions) for x in readers if x.dense),
                norm_groups=NORM_GROUPS if norms and norm == "group" else 1,
            )
        )
    return tuple(groups)


# --- arguments ------------------------------------------------------------------------------------------------------


def image_shape(
    net: str, image_size: int | tuple[int, int], smallest: int = 1, channels: int = 3
) -> tuple[int, int, int]:
    """(H, W, channels); ``ValueError`` below the ``smallest`` side that leaves the net's last feature map a pixel."""
    height, width = (image_size, image_size) if isinstance(image_size, int) else image_size
    if min(height, width) < smallest:
        raise ValueError(
            f"{net} takes images of at least {smallest} x {smallest} pixels, not {height} x {width}: "
            "give a larger image_size or a backbone for small images, such as resnet18_cifar."
        )
    check_channels(channels)
    return height, width, channels


def check_channels(channels: int) -> None:
    """``ValueError`` unless it is a number of channels."""
    if channels < 1:
        raise ValueError(f"channels={channels} is not positive: give 1 for grey images, 3 for RGB.")


def check_norm(norm: str | None, allowed: Sequence[str | None], freeze_bn: bool) -> None:
    """``ValueError`` for a norm that the net does not have, or for freezing what is no batch norm."""
    if norm not in allowed:
        raise unknown("norm", str(norm), [str(name) for name in allowed])
    if freeze_bn and norm != "batch":
        raise ValueError(f"freeze_bn=True is for norm='batch', not {norm!r}: leave freeze_bn out or use batch norm.")


def check_dropout(dropout: float) -> None:
    """``ValueError`` unless it is the probability of dropping a unit."""
    if not 0.0 <= dropout < 1.0:
        raise ValueError(f"dropout={dropout} is no probability: give 0 <= dropout < 1, 0 for none.")
