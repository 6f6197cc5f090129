"""AlexNet, the one-tower form whose ImageNet weights torchvision publishes."""

from __future__ import annotations

from flax import linen as nn
from jaxtyping import Array, Float

from fedjax_dg.backbones.backbone import Backbone
from fedjax_dg.backbones.layers import (
    Stage,
    adaptive_avg_pool,
    check_dropout,
    conv,
    groups_of,
    image_shape,
    imagenet_pixels,
    max_pool_3x3,
    sequence,
)

FILTERS = (64, 192, 384, 256, 256)
WIDTH = 4096
POOLED = 6  # the dense layers see 6 x 6 places, whatever the image


class AlexNet(nn.Module):
    """Five convolutions with three 3 x 3 pools, dense 4096 twice behind dropout, a linear head; no response norm."""

    num_classes: int
    dropout: float

    def setup(self):
        self.dense1, self.dense2 = nn.Dense(WIDTH), nn.Dense(WIDTH)
        self.drop = nn.Dropout(self.dropout)
        self.head = nn.Dense(self.num_classes)

    @nn.compact
    def maps(self, x: Float[Array, "B H W 3"], train: bool, mask=None) -> Float[Array, "R 6 6 C"]:
        x = max_pool_3x3(nn.relu(conv(FILTERS[0], 11, stride=4, padding=2, name="conv1")(x)))
        x, mask = Stage()(x, mask)
        x = max_pool_3x3(nn.relu(conv(FILTERS[1], 5, padding=2, name="conv2")(x)))
        x, mask = Stage()(x, mask)
        x = nn.relu(conv(FILTERS[2], 3, padding=1, name="conv3")(x))
        x = nn.relu(conv(FILTERS[3], 3, padding=1, name="conv4")(x))
        x = nn.relu(conv(FILTERS[4], 3, padding=1, name="conv5")(x))
        return adaptive_avg_pool(max_pool_3x3(x), POOLED, POOLED)

    def reduce(self, maps: Float[Array, "B 6 6 C"], train: bool) -> Float[Array, "B D"]:
        x = maps.reshape(maps.shape[0], -1)
        for dense in (self.dense1, self.dense2):
            x = nn.relu(dense(self.drop(x, deterministic=not train)))
        return x

    def features(self, x: Float[Array, "B H W 3"], train: bool, mask=None) -> Float[Array, "R D"]:
        return self.reduce(self.maps(x, train, mask), train)

    def classify(self, z: Float[Array, "B D"]) -> Float[Array, "B K"]:
        return self.head(z)

    def __call__(self, x, train: bool):
        return self.classify(self.features(x, train))


def alexnet(num_classes: int, image_size: int | tuple[int, int] = 224, dropout: float = 0.5) -> Backbone:
    """AlexNet for [B, H, W, 3] images; 61,100,840 parameters at 1,000 classes, features of width 4096.

    ``image_size`` is one side or (H, W), at least 63; other sizes than 224 are averaged to the 6 x 6 places that the
    dense layers read. Raises ``ValueError`` below, and for ``dropout`` outside [0, 1).
    Source: Krizhevsky, "One weird trick", 2014, https://arxiv.org/abs/1404.5997, in torchvision's form: not the two-tower
    net with response norms of 2012, which early papers on PACS used.

    >>> alexnet(num_classes=7).num_features
    4096
    """
    check_dropout(dropout)
    return Backbone(
        module=AlexNet(num_classes, dropout),
        input_shape=image_shape("alexnet", image_size, smallest=63),
        num_features=WIDTH,
        num_classes=num_classes,
        groups=groups_of(sequence(FILTERS, (WIDTH, WIDTH), positions=POOLED**2)),
        transform=imagenet_pixels,
        weight_names={
            **{f"conv{i}": (f"features.{place}",) for i, place in enumerate((0, 3, 6, 8, 10), 1)},
            "dense1": ("classifier.1",),
            "dense2": ("classifier.4",),
            "head": ("classifier.6",),
        },
    )
