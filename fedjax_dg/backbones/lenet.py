"""LeNet-5 for 32 x 32 images."""

from __future__ import annotations

from collections.abc import Callable

from flax import linen as nn
from jaxtyping import Array, Float

from fedjax_dg.backbones.backbone import ACTIVATIONS, Backbone
from fedjax_dg.backbones.convolution import POOLINGS
from fedjax_dg.backbones.layers import ConvPool, Stage, groups_of, sequence
from fedjax_dg.errors import unknown


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

    def maps(self, x: Float[Array, "B 32 32 3"], train: bool, mask=None) -> Float[Array, "R 5 5 C"]:
        x, _ = self.stage1(self.conv1(x), mask)
        return self.conv2(x)

    def reduce(self, maps: Float[Array, "B 5 5 C"], train: bool) -> Float[Array, "B 84"]:
        x = maps.reshape(maps.shape[0], -1)
        return self.activation(self.dense2(self.activation(self.dense1(x))))

    def features(self, x: Float[Array, "B 32 32 3"], train: bool, mask=None) -> Float[Array, "R 84"]:
        return self.reduce(self.maps(x, train, mask), train)

    def classify(self, z: Float[Array, "B 84"]) -> Float[Array, "B K"]:
        return self.head(z)

    def __call__(self, x, train: bool):
        return self.classify(self.features(x, train))


def lenet5(
    num_classes: int, image_size: int | tuple[int, int] = 32, activation: str = "relu", pooling: str = "max"
) -> Backbone:
    """LeNet-5 for [B, 32, 32, 3] images; 61,666 parameters at 6 classes, features of width 84.

    ``activation`` is ``relu`` or ``tanh``, ``pooling`` ``max`` or ``avg``; the HFedATM authors' release uses tanh and avg.
    Raises ``ValueError`` for other names and for any other ``image_size``.
    Source: LeCun et al., Proc. IEEE 1998, http://yann.lecun.com/exdb/publis/pdf/lecun-01a.pdf.

    >>> lenet5(num_classes=6).num_features
    84
    """
    if image_size not in (32, (32, 32)):
        raise ValueError(
            f"lenet5 takes images of 32 x 32 pixels, not image_size={image_size}: give 32 or a backbone for larger images, "
            "such as resnet18."
        )
    if activation not in ACTIVATIONS:
        raise unknown("activation", activation, ACTIVATIONS)
    if pooling not in POOLINGS:
        raise unknown("pooling", pooling, POOLINGS)
    return Backbone(
        module=LeNet5(num_classes, ACTIVATIONS[activation], POOLINGS[pooling]),
        input_shape=(32, 32, 3),
        num_features=84,
        num_classes=num_classes,
        groups=groups_of(sequence((6, 16), (120, 84), positions=25)),  # the flatten is of [5, 5, 16]
    )
