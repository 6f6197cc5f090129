"""VGG-11, plain or with norms."""

from __future__ import annotations

from flax import linen as nn
from jaxtyping import Array, Float

from fedjax_dg.backbones.backbone import Backbone, max_pool
from fedjax_dg.backbones.layers import (
    NORMS,
    Stage,
    adaptive_avg_pool,
    check_dropout,
    check_norm,
    conv,
    groups_of,
    image_shape,
    imagenet_pixels,
    normalise,
    sequence,
)

FILTERS = (64, 128, 256, 256, 512, 512, 512, 512)
POOLS = (1, 2, 4, 6, 8)  # the convolutions that a 2 x 2 pool follows
WIDTH = 4096
STAGES = 3  # the first pools, where methods may act between stages
POOLED = 7  # the dense layers see 7 x 7 places, whatever the image
# torchvision's numbers of the convolutions; it counts the norms and the activations too
PLACES = {None: (0, 3, 6, 8, 11, 13, 16, 18), "batch": (0, 4, 8, 11, 15, 18, 22, 25)}


class VGG11(nn.Module):
    """Eight 3 x 3 convolutions with five pools, dense 4096 twice before dropout, a linear head."""

    num_classes: int
    dropout: float
    norm: str | None
    freeze_bn: bool

    def setup(self):
        self.dense1, self.dense2 = nn.Dense(WIDTH), nn.Dense(WIDTH)
        self.drop = nn.Dropout(self.dropout)
        self.head = nn.Dense(self.num_classes)

    @nn.compact
    def maps(self, x: Float[Array, "B H W 3"], train: bool, mask=None) -> Float[Array, "R 7 7 C"]:
        running = self.freeze_bn or not train
        for i, filters in enumerate(FILTERS, 1):
            x = conv(filters, 3, padding=1, name=f"conv{i}")(x)
            x = nn.relu(normalise(x, self.norm, running, mask, name=f"norm{i}"))
            if i in POOLS:
                x = max_pool(x)
                if i in POOLS[:STAGES]:
                    x, mask = Stage()(x, mask)
        return adaptive_avg_pool(x, POOLED, POOLED)

    def reduce(self, maps: Float[Array, "B 7 7 C"], train: bool) -> Float[Array, "B D"]:
        x = maps.reshape(maps.shape[0], -1)
        for dense in (self.dense1, self.dense2):
            x = self.drop(nn.relu(dense(x)), deterministic=not train)
        return x

    def features(self, x: Float[Array, "B H W 3"], train: bool, mask=None) -> Float[Array, "R D"]:
        return self.reduce(self.maps(x, train, mask), train)

    def classify(self, z: Float[Array, "B D"]) -> Float[Array, "B K"]:
        return self.head(z)

    def __call__(self, x, train: bool):
        return self.classify(self.features(x, train))


def vgg11(
    num_classes: int,
    image_size: int | tuple[int, int] = 224,
    dropout: float = 0.5,
    norm: str | None = None,
    freeze_bn: bool = False,
) -> Backbone:
    """VGG-11 for [B, H, W, 3] images; 132,863,336 parameters at 1,000 classes without norm, features of width 4096.

    ``image_size`` is one side or (H, W), at least 32; other sizes than 224 are averaged to the 7 x 7 places that the
    dense layers read. ``norm`` after every convolution: None, ``batch``, or ``group`` (32 groups). ``freeze_bn`` keeps the
    running statistics of batch norm as they are and uses them in training too; scale and bias still train. Raises
    ``ValueError`` for a smaller image, an unknown norm, a norm that cannot be frozen, ``dropout`` outside [0, 1).
    Source: Simonyan, Zisserman, ICLR 2015, https://arxiv.org/abs/1409.1556, in torchvision's form.

    >>> vgg11(num_classes=7).num_features
    4096
    """
    check_norm(norm, (None, *NORMS), freeze_bn)
    check_dropout(dropout)
    names = {}
    for i, place in enumerate(PLACES.get(norm, ()), 1):
        names[f"conv{i}"] = (f"features.{place}",)
        if norm == "batch":
            names[f"norm{i}"] = (f"features.{place + 1}",)
    if names:  # nobody publishes weights with group norm
        names |= {
            "dense1": ("classifier.0", "pre_logits.fc1"),
            "dense2": ("classifier.3", "pre_logits.fc2"),
            "head": ("classifier.6", "head.fc"),
        }
    return Backbone(
        module=VGG11(num_classes, dropout, norm, freeze_bn),
        input_shape=image_shape("vgg11", image_size, smallest=32),
        num_features=WIDTH,
        num_classes=num_classes,
        groups=groups_of(sequence(FILTERS, (WIDTH, WIDTH), positions=POOLED**2, normed=norm is not None), norm),
        transform=imagenet_pixels,
        weight_names=names,
    )


def vgg11_bn(
    num_classes: int, image_size: int | tuple[int, int] = 224, dropout: float = 0.5, freeze_bn: bool = False
) -> Backbone:
    """``vgg11`` with batch norm; 132,868,840 parameters at 1,000 classes."""
    return vgg11(num_classes, image_size, dropout, norm="batch", freeze_bn=freeze_bn)
