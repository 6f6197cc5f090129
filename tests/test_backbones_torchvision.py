"""AlexNet, VGG-11, ResNet-18 and -50 against torchvision: names, shapes, outputs; and what each layer promises."""

import functools
import importlib
import importlib.util
import json
import math
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import traverse_util

from fedjax_dg.algorithms import fedsr
from fedjax_dg.alignment.groups import leaves_of
from fedjax_dg.backbones import BACKBONES, alexnet, lenet5, resnet18, resnet18_cifar, resnet50, vgg11, vgg11_bn
from fedjax_dg.backbones.layers import adaptive_avg_pool, imagenet_pixels, max_pool_3x3, normalise
from fedjax_dg.types import Variables

GOLDEN = pathlib.Path(__file__).parent / "golden"
STATE_DICTS = json.loads((GOLDEN / "torchvision_state_dicts.json").read_text())
LEAVES = {  # ours -> theirs
    "kernel": "weight",
    "scale": "weight",
    "bias": "bias",
    "mean": "running_mean",
    "var": "running_var",
}


def load_module(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


formula = load_module(GOLDEN / "formula_weights.py")


def draw(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def shapes_of(backbone):
    return jax.eval_shape(backbone.init, jax.random.key(0))


# --- torchvision ----------------------------------------------------------------------------------------------------


def theirs(backbone, leaf):
    """PyTorch's name of one of our leaves."""
    _, *path, last = leaf.split("/")
    return f"{backbone.weight_names['/'.join(path)][0]}.{LEAVES[last]}"


def their_shape(shape):
    """HWIO -> OIHW, [in, out] -> [out, in]."""
    return (*shape[:-3:-1], *shape[:-2]) if len(shape) > 1 else shape


def converted(backbone, value_of) -> Variables:
    """Our variables from ``value_of(name, shape)``, the tensors of a torchvision state dict."""
    flattened = {axis.leaf: axis.positions for group in backbone.groups for axis in group.consumers}
    leaves = {}
    for leaf, ours in leaves_of(shapes_of(backbone)).items():
        x = value_of(theirs(backbone, leaf), their_shape(ours.shape))
        if x.ndim == 4:
            x = x.transpose(2, 3, 1, 0)
        elif x.ndim == 2:  # PyTorch flattens [C, H, W], we [H, W, C]
            x = x.reshape(len(x), -1, flattened[leaf]).transpose(2, 1, 0).reshape(ours.shape)
        leaves[leaf] = jnp.asarray(x)
    return Variables(**{"batch_stats": {}, **traverse_util.unflatten_dict(leaves, sep="/")})


@pytest.mark.parametrize("net", STATE_DICTS)
def test_names_and_shapes_are_torchvisions(net):
    backbone = BACKBONES[net](1000)
    ours = {theirs(backbone, k): list(their_shape(v.shape)) for k, v in leaves_of(shapes_of(backbone)).items()}
    assert ours == {k: v for k, v in STATE_DICTS[net].items() if not k.endswith("num_batches_tracked")}


VGGS = [pytest.param(net, marks=pytest.mark.slow) for net in ("vgg11", "vgg11_bn")]  # half a gigabyte each


@pytest.mark.parametrize("net", ["alexnet", "resnet18", "resnet50", *VGGS])
def test_outputs_are_torchvisions(net):
    backbone = BACKBONES[net](1000)
    variables = converted(backbone, formula.parameter)
    images = jnp.asarray(formula.image_batch().transpose(0, 2, 3, 1))
    z = jax.jit(backbone.features)(variables, images)
    logits = backbone.head(variables, z)
    with np.load(GOLDEN / "torchvision_outputs.npz") as golden:
        expected, expected_z = golden[f"{net}.logits"], golden[f"{net}.features"]
    scale = np.sqrt((expected**2).mean())
    assert z.shape == (2, backbone.num_features)
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-4 * scale)
    np.testing.assert_allclose(z, expected_z, rtol=0, atol=1e-4 * scale)


def test_timm_writes_vggs_dense_layers_as_convolutions():
    names = vgg11(10).weight_names
    assert [names[layer][1] for layer in ("dense1", "dense2", "head")] == [
        "pre_logits.fc1",
        "pre_logits.fc2",
        "head.fc",
    ]


@pytest.mark.parametrize("make", [resnet18, resnet50, vgg11])
def test_no_published_weights_have_group_norm(make):
    assert make(10, norm="group").weight_names == {}


@pytest.mark.parametrize("make", [resnet18, resnet50, vgg11])
def test_group_norm_takes_the_place_of_batch_norm(make):
    """The same parameters, no statistics."""
    batch, group = shapes_of(make(10, norm="batch")), shapes_of(make(10, norm="group"))
    assert group.params == batch.params
    assert group.batch_stats == {}
    assert batch.batch_stats["norm1"]["mean"].shape == (64,)


# --- layers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(12, 18), (7, 5), (3, 2), (1, 6), (6, 7), (13, 1)])
def test_adaptive_pool_is_the_mean_over_each_bin(shape):
    height, width = 6, 7
    x = draw(2, *shape, 3)
    pooled = adaptive_avg_pool(x, height, width)
    assert pooled.shape == (2, height, width, 3)
    (rows, columns), image = shape, np.asarray(x, np.float64)
    for i in range(height):
        top, bottom = math.floor(i * rows / height), math.ceil((i + 1) * rows / height)
        for j in range(width):
            left, right = math.floor(j * columns / width), math.ceil((j + 1) * columns / width)
            expected = image[:, top:bottom, left:right].mean((1, 2))
            np.testing.assert_allclose(pooled[:, i, j], expected, rtol=1e-5, atol=1e-6)


def test_adaptive_pool_leaves_a_map_that_fits_as_it_is():
    x = draw(2, 6, 7, 3)
    assert adaptive_avg_pool(x, 6, 7) is x


@pytest.mark.parametrize("padding", [0, 1])
@pytest.mark.parametrize("shape", [(7, 7), (8, 5), (3, 4)])
def test_3x3_pool_is_linens(shape, padding):
    """Value and gradient; all numbers are negative, so padding with zeros would show."""
    x = -1.0 - abs(draw(2, *shape, 3))
    pads = ((padding, padding), (padding, padding))
    value, pull = jax.vjp(lambda x: max_pool_3x3(x, padding), x)
    expected, pull_expected = jax.vjp(lambda x: nn.max_pool(x, (3, 3), strides=(2, 2), padding=pads), x)
    np.testing.assert_array_equal(value, expected)
    cotangent = draw(*value.shape, seed=1)
    np.testing.assert_allclose(pull(cotangent)[0], pull_expected(cotangent)[0], rtol=1e-6, atol=1e-6)


def test_imagenet_pixels_have_mean_0_and_deviation_1():
    pixels = jnp.array([[0, 51, 255]], jnp.uint8)
    expected = [[-0.485 / 0.229, (0.2 - 0.456) / 0.224, (1.0 - 0.406) / 0.225]]
    np.testing.assert_allclose(imagenet_pixels(pixels), expected, rtol=1e-6)
    floats = draw(2, 3)
    assert imagenet_pixels(floats) is floats


class OneNorm(nn.Module):
    kind: str | None

    @nn.compact
    def __call__(self, x, running, mask):
        return normalise(x, self.kind, running, mask, name="norm")


def normed(kind, x, running=False, mask=None, batch_stats=None):
    """Output and new statistics of one norm layer; scale 1, bias 0."""
    layer = OneNorm(kind)
    variables = layer.init(jax.random.key(0), x, False, None)
    if batch_stats is not None:
        variables = {**variables, "batch_stats": {"norm": batch_stats}}
    y, changed = layer.apply(variables, x, running, mask, mutable=["batch_stats"])
    return y, dict(changed).get("batch_stats", {}).get("norm", {})


def test_batch_norm_has_pytorchs_constants():
    """Momentum 0.1 of PyTorch is 0.9 here; epsilon 1e-5 shows at a variance as small."""
    x = 1e-3 * draw(4, 3, 3, 2)
    flat = np.asarray(x, np.float64).reshape(-1, 2)
    y, stats = normed("batch", x)
    np.testing.assert_allclose(y.reshape(-1, 2), (flat - flat.mean(0)) / np.sqrt(flat.var(0) + 1e-5), atol=1e-5)
    np.testing.assert_allclose(stats["mean"], 0.1 * flat.mean(0), rtol=1e-5, atol=1e-9)
    np.testing.assert_allclose(stats["var"], 0.9 + 0.1 * flat.var(0), rtol=1e-6)


def test_batch_norm_uses_running_statistics_and_keeps_them():
    given = {"mean": jnp.array([1.0, -2.0]), "var": jnp.array([4.0, 0.25])}
    x = draw(4, 3, 3, 2)
    y, stats = normed("batch", x, running=True, batch_stats=given)
    np.testing.assert_allclose(y, (x - given["mean"]) / np.sqrt(given["var"] + 1e-5), rtol=1e-5, atol=1e-6)
    jax.tree.map(np.testing.assert_array_equal, dict(stats), given)


def test_group_norm_is_over_32_groups_of_each_example():
    x = 1e-2 * draw(2, 3, 4, 64)
    y, _ = normed("group", x)
    grouped = np.asarray(x, np.float64).reshape(2, 12, 32, 2)
    mean, var = (f(grouped, axis=(1, 3), keepdims=True) for f in (np.mean, np.var))
    np.testing.assert_allclose(y, ((grouped - mean) / np.sqrt(var + 1e-5)).reshape(x.shape), atol=1e-4)


def test_without_a_norm_nothing_changes():
    x = draw(2, 3, 3, 2)
    assert normed(None, x)[0] is x


@pytest.mark.parametrize("kind", ["batch", "group"])
def test_padding_rows_do_not_enter_the_statistics(kind):
    x = draw(5, 3, 3, 64)
    padded = jnp.concatenate([x, jnp.zeros((3, 3, 3, 64))])
    mask = jnp.arange(8) < 5
    (y, stats), (y_padded, stats_padded) = normed(kind, x), normed(kind, padded, mask=mask)
    np.testing.assert_allclose(y_padded[:5], y, rtol=1e-5, atol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), stats_padded, stats)
    if kind == "batch":
        assert abs(normed(kind, padded)[1]["var"] - stats["var"]).max() > 1e-2


def test_a_batch_without_real_rows_stays_finite():
    y, stats = normed("batch", jnp.zeros((3, 2, 2, 4)), mask=jnp.zeros(3, bool))
    assert all(jnp.isfinite(x).all() for x in jax.tree.leaves((y, stats)))


# --- the training pass ----------------------------------------------------------------------------------------------


@pytest.fixture
def narrow(monkeypatch):
    """Dense layers of 512 units instead of 4,096: less to draw and to multiply."""
    for net in ("alexnet", "vgg"):
        monkeypatch.setattr(importlib.import_module(f"fedjax_dg.backbones.{net}"), "WIDTH", 512)


def random_variables(backbone):
    """Every leaf random, variances positive."""

    def leaf(path, shape):
        x = draw(*shape.shape, seed=1) / np.sqrt(np.prod(shape.shape[:-1]))
        return 0.5 + abs(x) if path[-1].key == "var" else x

    return jax.tree.map_with_path(leaf, jax.eval_shape(backbone.init, jax.random.key(0)))


@functools.cache
def forward_of(backbone):
    return jax.jit(backbone.forward)


MASKED = {
    "resnet18": lambda: resnet18_cifar(5, image_size=(16, 12)),
    "vgg11_bn": lambda: vgg11_bn(5, image_size=32, dropout=0.0),
}


@pytest.mark.parametrize("net", MASKED)
def test_the_mask_of_a_batch_reaches_every_norm(net, narrow):
    """Whatever stands in three rows of padding: same logits, same statistics behind."""
    backbone = MASKED[net]()
    variables, mask, images = random_variables(backbone), jnp.arange(8) < 5, draw(8, *backbone.input_shape)

    def forward(images):
        return forward_of(backbone)(variables, images, mask, jax.random.key(0))

    one, other = forward(images), forward(images.at[5:].set(0.0))
    np.testing.assert_allclose(one.logits[:5], other.logits[:5], rtol=0, atol=1e-6 * float(abs(one.logits).max()))
    assert (one.logits[5:] != other.logits[5:]).any()
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), one.batch_stats, other.batch_stats)


def test_frozen_statistics_are_used_in_training_and_stay():
    """In training the frozen net is the evaluated one; its scales and biases still have gradients."""
    frozen, thawed = (resnet18_cifar(5, image_size=(16, 12), freeze_bn=freeze) for freeze in (True, False))
    variables, mask = random_variables(frozen), jnp.ones(8, bool)
    images, key = draw(8, *frozen.input_shape), jax.random.key(0)

    def loss(params):
        after = frozen.forward(variables._replace(params=params), images, mask, key)
        return (after.logits**2).sum(), after

    gradient, after = jax.jit(jax.grad(loss, has_aux=True))(variables.params)
    evaluated = jax.jit(thawed.apply)(variables, images)
    np.testing.assert_allclose(after.logits, evaluated, rtol=0, atol=1e-5 * float(abs(evaluated).max()))
    jax.tree.map(np.testing.assert_array_equal, after.batch_stats, variables.batch_stats)
    norms = [x for leaf, x in leaves_of(Variables(gradient, {})).items() if "norm" in leaf]
    assert len(norms) == 40
    assert all((x != 0.0).any() for x in norms)
    moved = forward_of(thawed)(variables, images, mask, key).batch_stats
    assert all((a != b).any() for a, b in zip(jax.tree.leaves(moved), jax.tree.leaves(variables.batch_stats)))


@pytest.mark.parametrize(("net", "size"), [("alexnet", 63), ("vgg11", 32)])
def test_dropout_draws_in_training_only(net, size, narrow):
    backbone = BACKBONES[net](5, image_size=size)
    variables = random_variables(backbone)
    images, mask = draw(2, *backbone.input_shape), jnp.ones(2, bool)

    @jax.jit
    def features(variables, keys):
        trained = jax.vmap(lambda key: backbone.forward(variables, images, mask, key).z)(keys)
        return trained, backbone.features(variables, images)

    (one, other), evaluated = features(variables, jax.random.split(jax.random.key(1)))
    assert (one != other).any()
    zeros, zeros_evaluated = float((one == 0.0).mean()), float((evaluated == 0.0).mean())
    # VGG's features are behind the second dropout, AlexNet's behind a dense layer and its activation
    expected = 0.5 * (1 + zeros_evaluated) if net == "vgg11" else zeros_evaluated
    assert abs(zeros - expected) < 0.05
    assert zeros_evaluated < 0.6


def test_fedsr_adapts_a_residual_net():
    backbone = fedsr().adapt(resnet18_cifar(5))
    shapes = shapes_of(backbone)
    assert shapes.params["posterior"]["kernel"].shape == (512, 1024)
    assert {"conv1", "norm1", "layer4_1", "head"} < shapes.params.keys()


# --- sizes and arguments --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("net", BACKBONES)
def test_every_backbone_takes_classes_and_an_image_size(net):
    size = 32 if net == "lenet5" else (80, 96)
    backbone = BACKBONES[net](num_classes=7, image_size=size)
    assert backbone.input_shape == ((32, 32, 3) if net == "lenet5" else (80, 96, 3))
    variables = shapes_of(backbone)
    images = jax.ShapeDtypeStruct((3, *backbone.input_shape), jnp.uint8)
    assert jax.eval_shape(backbone.apply, variables, images).shape == (3, 7)
    assert jax.eval_shape(backbone.features, variables, images).shape == (3, backbone.num_features)


@pytest.mark.parametrize("net", [net for net in BACKBONES if net != "lenet5"])
def test_other_image_sizes_have_the_same_parameters(net):
    smallest = {"alexnet": 63, "vgg11": 32, "vgg11_bn": 32}.get(net, 1)
    assert shapes_of(BACKBONES[net](5, image_size=smallest)) == shapes_of(BACKBONES[net](5))


BAD = {
    "lenet5 size": (
        lambda: lenet5(6, image_size=64),
        "lenet5 takes images of 32 x 32 or 28 x 28 pixels, not image_size=64",
    ),
    "alexnet size": (lambda: alexnet(6, image_size=62), "alexnet takes images of at least 63 x 63 pixels, not 62 x 62"),
    "alexnet height": (lambda: alexnet(6, image_size=(62, 80)), "at least 63 x 63 pixels, not 62 x 80"),
    "vgg11 width": (
        lambda: vgg11(6, image_size=(64, 31)),
        "vgg11 takes images of at least 32 x 32 pixels, not 64 x 31",
    ),
    "resnet18 size": (lambda: resnet18(6, image_size=0), "at least 1 x 1 pixels, not 0 x 0"),
    "resnet18 norm": (lambda: resnet18(6, norm="gruop"), "Unknown norm 'gruop'; did you mean 'group'"),
    "resnet50 norm": (lambda: resnet50(6, norm="layer"), "Unknown norm 'layer'.*batch, group"),
    "vgg11 norm": (lambda: vgg11(6, norm="layer"), "Unknown norm 'layer'.*None, batch, group"),
    "resnet18 stem": (lambda: resnet18(6, stem="cifar10"), "Unknown stem 'cifar10'; did you mean 'cifar'"),
    "resnet18 freeze": (
        lambda: resnet18(6, norm="group", freeze_bn=True),
        "freeze_bn=True is for norm='batch', not 'group'",
    ),
    "vgg11 freeze": (lambda: vgg11(6, freeze_bn=True), "freeze_bn=True is for norm='batch', not None"),
    "alexnet dropout": (lambda: alexnet(6, dropout=1.0), "dropout=1.0 is no probability"),
    "vgg11 dropout": (lambda: vgg11(6, dropout=-0.1), "dropout=-0.1 is no probability"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_arguments_are_named_when_building(case):
    make, message = BAD[case]
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(("make", "size"), [(alexnet, 63), (vgg11, 32)])
def test_smallest_sizes_are_the_smallest(make, size):
    """One pixel less leaves no place in the last feature map."""
    module = make(6).module
    image = jnp.zeros((1, size - 1, size - 1, 3))
    with pytest.raises((TypeError, ZeroDivisionError)):
        jax.eval_shape(lambda: module.init(jax.random.key(0), image, train=False))
