"""ResNet-18 and ResNet-50, with batch or group norm, for large images or small ones."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

from flax import linen as nn
from jaxtyping import Array, Float

from fedjax_dg.backbones.backbone import Backbone, scale_pixels
from fedjax_dg.backbones.layers import (
    NORMS,
    Layer,
    Stage,
    check_norm,
    conv,
    groups_of,
    image_shape,
    imagenet_pixels,
    max_pool_3x3,
    normalise,
)
from fedjax_dg.errors import unknown

STEMS = ("imagenet", "cifar")
STEM_FILTERS = 64


class Plan(NamedTuple):
    """A residual block: what its module and its permutation groups are both built from."""

    name: str  # layer1_0: the first of the first stage
    convs: tuple[tuple[int, int, int], ...]  # filters, kernel size, stride
    projects: bool  # its shortcut is a convolution, since width or resolution change
    ends_stage: bool  # it is the last before another stage


def plan_blocks(depths: Sequence[int], bottleneck: bool) -> tuple[Plan, ...]:
    """Stages of 64, 128, 256, 512 filters, each but the first halving the resolution in its first block.

    Two 3 x 3 convolutions a block, or with ``bottleneck`` 1 x 1, 3 x 3, 1 x 1 to four times the filters; there the 3 x 3
    has the stride ("v1.5", as in torchvision), not the first 1 x 1 of the paper.
    """
    blocks, channels = [], STEM_FILTERS
    for stage, depth in enumerate(depths):
        filters = STEM_FILTERS * 2**stage
        for i in range(depth):
            stride = 2 if stage > 0 and i == 0 else 1
            if bottleneck:
                convs = ((filters, 1, 1), (filters, 3, stride), (4 * filters, 1, 1))
            else:
                convs = ((filters, 3, stride), (filters, 3, 1))
            ends_stage = i == depth - 1 and stage < len(depths) - 1
            projects = stride != 1 or channels != convs[-1][0]
            blocks.append(Plan(f"layer{stage + 1}_{i}", convs, projects, ends_stage))
            channels = convs[-1][0]
    return tuple(blocks)


class Block(nn.Module):
    """relu(x + F(x)), F = convolutions with norms, x projected by a strided 1 x 1 convolution where shapes differ."""

    plan: Plan

    @nn.compact
    def __call__(self, x: Float[Array, "B H W C"], norm: Callable) -> Float[Array, "B h w D"]:
        convs, y = self.plan.convs, x
        for i, (filters, size, stride) in enumerate(convs, 1):
            y = conv(filters, size, stride, padding=size // 2, bias=False, name=f"conv{i}")(y)
            y = norm(y, name=f"norm{i}")
            if i < len(convs):
                y = nn.relu(y)
        if self.plan.projects:
            stride = max(stride for _, _, stride in convs)
            x = norm(conv(convs[-1][0], 1, stride, bias=False, name="downsample")(x), name="downsample_norm")
        return nn.relu(x + y)


class ResNet(nn.Module):
    """A convolution, residual blocks, the mean over all places, a linear head."""

    num_classes: int
    blocks: tuple[Plan, ...]
    stem: str
    norm: str
    freeze_bn: bool

    def setup(self):
        self.head = nn.Dense(self.num_classes)

    @nn.compact
    def maps(self, x: Float[Array, "B H W I"], train: bool, mask=None) -> Float[Array, "R h w D"]:
        norm = functools.partial(normalise, kind=self.norm, running=self.freeze_bn or not train)
        size, stride = (7, 2) if self.stem == "imagenet" else (3, 1)
        x = conv(STEM_FILTERS, size, stride, padding=size // 2, bias=False, name="conv1")(x)
        x = nn.relu(norm(x, mask=mask, name="norm1"))
        if self.stem == "imagenet":
            x = max_pool_3x3(x, padding=1)
        for block in self.blocks:
            x = Block(block, name=block.name)(x, functools.partial(norm, mask=mask))
            if block.ends_stage:
                x, mask = Stage()(x, mask)
        return x

    def reduce(self, maps: Float[Array, "B h w D"], train: bool) -> Float[Array, "B D"]:
        return maps.mean((1, 2))

    def features(self, x: Float[Array, "B H W I"], train: bool, mask=None) -> Float[Array, "R D"]:
        return self.reduce(self.maps(x, train, mask), train)

    def classify(self, z: Float[Array, "B D"]) -> Float[Array, "B K"]:
        return self.head(z)

    def __call__(self, x, train: bool):
        return self.classify(self.features(x, train))


def resnet18(
    num_classes: int,
    image_size: int | tuple[int, int] = 224,
    norm: str = "batch",
    stem: str = "imagenet",
    freeze_bn: bool = False,
    channels: int = 3,
) -> Backbone:
    """ResNet-18 for [B, H, W, 3] images; 11,689,512 parameters at 1,000 classes, features of width 512.

    ``image_size`` is one side or (H, W), any. ``norm``: ``batch``, or ``group`` (32 groups), which does not depend on a
    client's batches. ``stem``: ``imagenet`` (7 x 7 convolution, stride 2, and a pool: a quarter of the resolution) or
    ``cifar`` (3 x 3, stride 1, no pool). ``freeze_bn`` keeps the running statistics of batch norm as they are and uses
    them in training too; scale and bias still train. ``channels``: of other images than RGB, whose uint8 pixels go to
    [-1, 1]. Raises ``ValueError`` for an unknown norm or stem, for a norm that cannot be frozen, and for no channels.
    Source: He et al., CVPR 2016, https://arxiv.org/abs/1512.03385, in torchvision's form.

    >>> resnet18(num_classes=7).num_features
    512
    """
    blocks = plan_blocks((2, 2, 2, 2), bottleneck=False)
    return _resnet("resnet18", blocks, num_classes, image_size, norm, stem, freeze_bn, channels)


def resnet18_cifar(
    num_classes: int,
    image_size: int | tuple[int, int] = 32,
    norm: str = "batch",
    freeze_bn: bool = False,
    channels: int = 3,
) -> Backbone:
    """``resnet18`` with ``stem="cifar"``, for images of about 32 x 32."""
    return resnet18(num_classes, image_size, norm, stem="cifar", freeze_bn=freeze_bn, channels=channels)


def resnet50(
    num_classes: int,
    image_size: int | tuple[int, int] = 224,
    norm: str = "batch",
    stem: str = "imagenet",
    freeze_bn: bool = False,
    channels: int = 3,
) -> Backbone:
    """ResNet-50, arguments as ``resnet18``; 25,557,032 parameters at 1,000 classes, features of width 2048.

    >>> resnet50(num_classes=7).num_features
    2048
    """
    blocks = plan_blocks((3, 4, 6, 3), bottleneck=True)
    return _resnet("resnet50", blocks, num_classes, image_size, norm, stem, freeze_bn, channels)


def _resnet(net, blocks, num_classes, image_size, norm, stem, freeze_bn, channels) -> Backbone:
    check_norm(norm, NORMS, freeze_bn)
    if stem not in STEMS:
        raise unknown("stem", stem, STEMS)
    return Backbone(
        module=ResNet(num_classes, blocks, stem, norm, freeze_bn),
        input_shape=image_shape(net, image_size, channels=channels),
        num_features=blocks[-1].convs[-1][0],
        num_classes=num_classes,
        groups=groups_of(_wiring(blocks), norm),
        transform=imagenet_pixels if channels == 3 else scale_pixels,  # ImageNet has means of red, green, blue
        weight_names=_weight_names(blocks) if norm == "batch" else {},  # nobody publishes weights with group norm
    )


def _wiring(blocks: Sequence[Plan]) -> list[Layer]:
    """Sums tie their terms: all that is added to a stem or a projection, up to the next one, is one stream of units."""
    stream = "conv1"
    layers = [Layer("conv1", None, stream, STEM_FILTERS, norm="norm1", bias=False)]
    for name, convs, projects, _ in blocks:
        before = reads = stream
        *inner, (width, _, _) = convs
        for i, (filters, _, _) in enumerate(inner, 1):
            layers.append(
                Layer(f"{name}/conv{i}", reads, f"{name}/conv{i}", filters, norm=f"{name}/norm{i}", bias=False)
            )
            reads = f"{name}/conv{i}"
        if projects:
            stream = f"{name}/downsample"
            layers.append(Layer(stream, before, stream, width, norm=f"{stream}_norm", bias=False))
        last = len(convs)
        layers.append(Layer(f"{name}/conv{last}", reads, stream, width, norm=f"{name}/norm{last}", bias=False))
    return [*layers, Layer("head", stream, None, dense=True)]


def _weight_names(blocks: Sequence[Plan]) -> dict[str, tuple[str, ...]]:
    names = {"conv1": ("conv1",), "norm1": ("bn1",), "head": ("fc",)}
    for name, convs, projects, _ in blocks:
        theirs = name.replace("_", ".")
        for i in range(1, len(convs) + 1):
            names |= {f"{name}/conv{i}": (f"{theirs}.conv{i}",), f"{name}/norm{i}": (f"{theirs}.bn{i}",)}
        if projects:
            names[f"{name}/downsample"] = (f"{theirs}.downsample.0",)
            names[f"{name}/downsample_norm"] = (f"{theirs}.downsample.1",)
    return names
