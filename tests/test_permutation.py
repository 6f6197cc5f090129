"""Permutation groups of every backbone: permuting keeps the function, forgetting one leaf does not, nothing is missing."""

import functools
import importlib
from collections import Counter
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_dg.alignment.groups import Axis, leaves_of, permute
from fedjax_dg.backbones import (
    BACKBONES,
    Backbone,
    alexnet,
    lenet5,
    resnet18,
    resnet18_cifar,
    resnet50,
    vgg11,
    vgg11_bn,
)
from fedjax_dg.types import Variables

ROWS = 4
UNCHANGED, CHANGED = 1e-9, 1e-3  # in units of the largest value
NETS = {
    "lenet5": lambda: lenet5(5),
    "alexnet": lambda: alexnet(5, image_size=(72, 96), dropout=0.0),
    "vgg11": lambda: vgg11(5, image_size=(64, 96), dropout=0.0),
    "vgg11_bn": lambda: vgg11_bn(5, image_size=(64, 96), dropout=0.0),
    "vgg11, group norm": lambda: vgg11(5, image_size=(32, 48), dropout=0.0, norm="group"),
    "resnet18": lambda: resnet18(5, image_size=(40, 48)),
    "resnet18, group norm": lambda: resnet18(5, image_size=(40, 48), norm="group"),
    "resnet18_cifar": lambda: resnet18_cifar(5, image_size=(12, 16)),
    "resnet50": lambda: resnet50(5, image_size=(40, 48)),
}


# The wiring does not depend on widths: thin nets every day, the real ones with -m slow.
THIN = {
    "alexnet": {"FILTERS": (6, 10, 8, 5, 7), "WIDTH": 12},
    "vgg": {"FILTERS": (8, 12, 8, 16, 12, 8, 16, 12), "WIDTH": 12},
    "resnet": {"STEM_FILTERS": 8},
    "layers": {"NORM_GROUPS": 4},
    "convolution": {"MOST_FILTERS": 0},  # so wide nets never take the path for few filters
}
WIDTHS = [
    pytest.param(width, id=width, marks=pytest.mark.slow if width == "full" else ()) for width in ("thin", "full")
]


class Case(NamedTuple):
    """A backbone, a model with no leaf at a value that would hide a mistake, and its jitted passes."""

    net: str
    backbone: Backbone
    variables: Variables
    evaluate: Any  # variables -> logits
    train: Any  # variables -> logits and the statistics left behind


def random_variables(backbone, seed=0) -> Variables:
    """Every leaf random, none zero, variances positive; scales below 1, or residual streams would grow with every block."""
    rng = np.random.default_rng(seed)

    def leaf(path, shape):
        x = rng.standard_normal(shape.shape)
        name = path[-1].key
        if name == "kernel":
            x *= np.sqrt(2.0 / np.prod(shape.shape[:-1]))
        elif name == "var":
            x = 0.5 + abs(x)
        elif name == "scale":
            x = 0.4 + 0.5 * abs(x)
        elif name == "bias":
            x *= 0.5
        return jnp.asarray(x)

    return jax.tree.map_with_path(leaf, jax.eval_shape(backbone.init, jax.random.key(0)))


@functools.lru_cache(maxsize=1)
def build(net, width) -> Case:
    backbone = NETS[net]()
    variables = random_variables(backbone)
    images = jnp.asarray(np.random.default_rng(7).normal(size=(ROWS, *backbone.input_shape)))

    @jax.jit
    def evaluate(variables):
        return backbone.apply(variables, images)

    @jax.jit
    def train(variables):
        after = backbone.forward(variables, images, jnp.ones(ROWS, bool), jax.random.key(0))
        return after.logits, after.batch_stats

    # the training pass runs twice, the other for every leaf: only that is worth XLA's optimizations
    before = jax.config.values["jax_disable_most_optimizations"]
    jax.config.update("jax_disable_most_optimizations", True)
    compiled = train.lower(variables).compile()
    jax.config.update("jax_disable_most_optimizations", before)
    return Case(net, backbone, variables, evaluate, compiled)


@pytest.fixture(scope="module", params=WIDTHS)
def width(request):
    return request.param


@pytest.fixture(scope="module", params=NETS)
def net(request):
    return request.param


@pytest.fixture
def case(net, width, monkeypatch):
    """All tests of one net in a row, which holds one model at a time. In float64, so that what differs is no rounding."""
    for module, constants in THIN.items() if width == "thin" else ():
        for name, value in constants.items():
            monkeypatch.setattr(importlib.import_module(f"fedjax_dg.backbones.{module}"), name, value)
    with jax.enable_x64(True):
        yield build(net, width)


def random_order(group, rng):
    """Nothing stays in its place: a cycle of the norm groups, and a cycle within each of them."""

    def cycle(size):
        path, order = rng.permutation(size), np.empty(size, int)
        order[path] = np.roll(path, -1)
        return order

    if group.norm_groups == 1:
        return jnp.asarray(cycle(group.size))
    size = group.size // group.norm_groups
    return jnp.asarray(np.concatenate([g * size + cycle(size) for g in cycle(group.norm_groups)]))


def difference(one, other):
    """Largest difference, in units of the largest value."""
    one, other = np.asarray(one), np.asarray(other)
    return abs(one - other).max() / abs(one).max()


def axes_of(group):
    return (*group.producers, *group.followers, *group.consumers)


# --- the function ---------------------------------------------------------------------------------------------------


def test_permuting_every_group_keeps_the_function(case):
    """In evaluation and in training; the statistics that training leaves behind are those of the units, moved."""
    rng = np.random.default_rng(1)
    orders = [random_order(group, rng) for group in case.backbone.groups]
    permuted = case.variables
    for group, order in zip(case.backbone.groups, orders):
        permuted = permute(permuted, group, order)
    before, after = leaves_of(case.variables), leaves_of(permuted)
    assert [leaf for leaf in before if np.array_equal(before[leaf], after[leaf])] == ["params/head/bias"]
    assert difference(case.evaluate(case.variables), case.evaluate(permuted)) < UNCHANGED
    (logits, stats), (permuted_logits, permuted_stats) = case.train(case.variables), case.train(permuted)
    assert difference(logits, permuted_logits) < UNCHANGED
    moved = Variables(case.variables.params, stats)
    for group, order in zip(case.backbone.groups, orders):
        moved = permute(moved, group, order)
    for one, other in zip(jax.tree.leaves(moved.batch_stats), jax.tree.leaves(permuted_stats)):
        assert difference(one, other) < UNCHANGED


def test_leaving_one_leaf_behind_changes_the_function(case):
    """Moving one leaf alone is leaving it out of the inverse permutation, for the same function."""
    rng = np.random.default_rng(2)
    expected = case.evaluate(case.variables)
    for group in case.backbone.groups:
        order = random_order(group, rng)
        for axis in axes_of(group):
            alone = group._replace(producers=(axis,), followers=(), consumers=())
            changed = difference(expected, case.evaluate(permute(case.variables, alone, order)))
            assert changed > CHANGED, (group.name, axis.leaf)


def test_a_group_norm_keeps_units_of_different_groups_apart(case):
    """What ``norm_groups`` forbids does change the function, so it is not there in vain; nor where it is not."""
    group = case.backbone.groups[0]
    order = random_order(group._replace(norm_groups=1), np.random.default_rng(3))
    changed = difference(case.evaluate(case.variables), case.evaluate(permute(case.variables, group, order)))
    assert changed > CHANGED if "group norm" in case.net else changed < UNCHANGED


def test_rows_of_a_flatten_are_places_of_units(case):
    """A dense kernel that moves as if the channel ran slowest is another function."""
    for group in case.backbone.groups:
        for axis in group.consumers:
            if axis.positions > 1:
                order = random_order(group, np.random.default_rng(4))
                permuted = permute(case.variables, group._replace(consumers=()), order)
                kernel = leaves_of(permuted)[axis.leaf]
                wrong = kernel.reshape(group.size, axis.positions, -1)[order].reshape(kernel.shape)
                layer = axis.leaf.split("/")[1]
                params = permuted.params | {layer: permuted.params[layer] | {"kernel": wrong}}
                assert (
                    difference(case.evaluate(case.variables), case.evaluate(permuted._replace(params=params))) > CHANGED
                )


# --- the declaration ------------------------------------------------------------------------------------------------

every_net = pytest.mark.parametrize("net", NETS)


def shapes_of(backbone):
    return leaves_of(jax.eval_shape(backbone.init, jax.random.key(0)))


@every_net
def test_every_axis_of_hidden_units_belongs_to_exactly_one_group(net):
    """All but the image's channels, the class logits, and the two places of a convolution's window."""
    backbone = NETS[net]()
    expected = Counter()
    for leaf, x in shapes_of(backbone).items():
        if leaf.endswith("kernel"):
            expected.update([(leaf, x.ndim - 2), (leaf, x.ndim - 1)])
        else:
            expected.update([(leaf, 0)])
    expected -= Counter([("params/conv1/kernel", 2), ("params/head/kernel", 1), ("params/head/bias", 0)])
    assert Counter((a.leaf, a.axis) for group in backbone.groups for a in axes_of(group)) == expected


@every_net
def test_every_axis_is_as_long_as_its_group(net):
    backbone = NETS[net]()
    shapes = shapes_of(backbone)
    for group in backbone.groups:
        assert group.size % group.norm_groups == 0
        for axis in axes_of(group):
            assert shapes[axis.leaf].shape[axis.axis] == group.size * axis.positions, axis.leaf
        read = [(axis.leaf.split("/")[1], axis.positions) for axis in group.consumers if axis.axis == 0]
        assert list(group.grams) == read


@every_net
def test_groups_come_in_an_order_in_which_they_can_be_matched(net):
    """Each has a kernel whose inputs are in place: those of an earlier group, or the image's."""
    backbone = NETS[net]()
    known = {"params/conv1/kernel"}
    for group in backbone.groups:
        assert known & {axis.leaf for axis in group.producers}, group.name
        known |= {axis.leaf for axis in group.consumers}


def test_names_of_groups_are_those_of_their_first_layers():
    for make in NETS.values():
        names = [group.name for group in make().groups]
        assert len(set(names)) == len(names)
        for group in make().groups:
            assert group.producers[0].leaf == f"params/{group.name}/kernel"


@pytest.mark.parametrize(("net", "streams", "inner"), [("resnet18", 4, 8), ("resnet50", 5, 32)])
def test_a_residual_stream_is_one_group(net, streams, inner):
    groups = BACKBONES[net](5).groups
    found = [group.name for group in groups if group.name == "conv1" or group.name.endswith("downsample")]
    assert (len(found), len(groups) - len(found)) == (streams, inner)
    assert all(len(group.producers) == 1 for group in groups if group.name not in found)


@pytest.mark.parametrize("make", [resnet18, resnet50, vgg11])
def test_group_norm_limits_every_group_of_convolutions(make):
    """To its 32 groups; batch norm limits none."""
    assert {group.norm_groups for group in make(5, norm="group").groups if "conv" in group.producers[0].leaf} == {32}
    assert {group.norm_groups for group in make(5, norm="group").groups if "dense" in group.name} <= {1}
    assert {group.norm_groups for group in make(5, norm="batch").groups} == {1}


def test_the_streams_of_resnet18_by_hand():
    groups = {group.name: group for group in resnet18(5).groups}
    assert list(groups) == [
        "conv1",
        "layer1_0/conv1",
        "layer1_1/conv1",
        "layer2_0/conv1",
        "layer2_0/downsample",
        "layer2_1/conv1",
        "layer3_0/conv1",
        "layer3_0/downsample",
        "layer3_1/conv1",
        "layer4_0/conv1",
        "layer4_0/downsample",
        "layer4_1/conv1",
    ]

    def kernels(axes):
        return [axis.leaf.removeprefix("params/").removesuffix("/kernel") for axis in axes]

    stem, last = groups["conv1"], groups["layer4_0/downsample"]
    assert kernels(stem.producers) == ["conv1", "layer1_0/conv2", "layer1_1/conv2"]
    assert kernels(stem.consumers) == ["layer1_0/conv1", "layer1_1/conv1", "layer2_0/conv1", "layer2_0/downsample"]
    assert {axis.leaf for axis in stem.followers} == {
        f"{collection}/{norm}/{leaf}"
        for norm in ("norm1", "layer1_0/norm2", "layer1_1/norm2")
        for collection, leaf in (
            ("params", "scale"),
            ("params", "bias"),
            ("batch_stats", "mean"),
            ("batch_stats", "var"),
        )
    }
    assert kernels(last.producers) == ["layer4_0/downsample", "layer4_0/conv2", "layer4_1/conv2"]
    assert last.consumers == (Axis("params/layer4_1/conv1/kernel", 2), Axis("params/head/kernel", 0))
    assert last.grams == (("head", 1),)
