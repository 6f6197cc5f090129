"""LeNet-5 for small images."""

from __future__ import annotations

from collections.abc import Callable

from flax import linen as nn
from jaxtyping import Array, Float

from fedjax_dg.backbones.backbone import ACTIVATIONS, Backbone
from fedjax_dg.backbones.convolution import POOLINGS
from fedjax_dg.backbones.layers import ConvPool, Stage, check_channels, groups_of, sequence
from fedjax_dg.errors import unknown

SIDES = {32: 5, 28: 4}  # of an image, and of the last feature map


class LeNet5(nn.Module):
    """Two 5 x 5 convolutions (6 and 16 filters, valid padding) with 2 x 2 pools, dense 120 and 84, a linear head."""

    num_classes: int
    activation: Callable
    join: Callable  # of a pool: see POOLINGS

    def setup(self):
        self.conv1 = ConvPool(6, 5, self.activation, self.join)
        self.stage1 = Stage()
        self.conv2 = ConvPool(16, 5, self.activation, self.join)
        self.dense1 = nn.Dense(120)
        self.dense2 = nn.Dense(84)
        self.head = nn.Dense(self.num_classes)

    def maps(self, x: Float[Array, "B H W I"], train: bool, mask=None) -> Float[Array, "R h w C"]:
        x, _ = self.stage1(self.conv1(x), mask)
        return self.conv2(x)

    def reduce(self, maps: Float[Array, "B h w C"], train: bool) -> Float[Array, "B 84"]:
        x = maps.reshape(maps.shape[0], -1)
        return self.activation(self.dense2(self.activation(self.dense1(x))))

    def features(self, x: Float[Array, "B H W I"], train: bool, mask=None) -> Float[Array, "R 84"]:
        return self.reduce(self.maps(x, train, mask), train)

    def classify(self, z: Float[Array, "B 84"]) -> Float[Array, "B K"]:
        return self.head(z)

    def __call__(self, x, train: bool):
        return self.classify(self.features(x, train))


def lenet5(
    num_classes: int,
    image_size: int | tuple[int, int] = 32,
    activation: str = "relu",
    pooling: str = "max",
    channels: int = 3,
) -> Backbone:
    """LeNet-5 for [B, 32, 32, 3] images; 61,666 parameters at 6 classes, features of width 84.

    ``image_size``: 32, or 28, whose last feature map is 4 x 4 instead of 5 x 5. ``channels``: any number. ``activation``:
    ``relu`` or ``tanh``, ``pooling``: ``max`` or ``avg``; the HFedATM authors' release uses tanh and avg.
    Raises ``ValueError`` for other names, for any other ``image_size``, and for no channels.
    Source: LeCun et al., Proc. IEEE 1998, http://yann.lecun.com/exdb/publis/pdf/lecun-01a.pdf.

    >>> lenet5(num_classes=6).num_features
    84
    """
    height, width = (image_size, image_size) if isinstance(image_size, int) else image_size
    if height != width or height not in SIDES:
        raise ValueError(
            f"lenet5 takes images of 32 x 32 or 28 x 28 pixels, not image_size={image_size}: give 32 or 28, or a backbone "
            "for larger images, such as resnet18."
        )
    check_channels(channels)
    if activation not in ACTIVATIONS:
        raise unknown("activation", activation, ACTIVATIONS)
    if pooling not in POOLINGS:
        raise unknown("pooling", pooling, POOLINGS)
    return Backbone(
        module=LeNet5(num_classes, ACTIVATIONS[activation], POOLINGS[pooling]),
        input_shape=(height, width, channels),
        num_features=84,
        num_classes=num_classes,
        groups=groups_of(sequence((6, 16), (120, 84), positions=SIDES[height] ** 2)),  # of a flatten
    )
