"""LeNet-5, the convolution by matrix products, and the pools: against XLA's and Flax's own."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jax import lax

from fedjax_dg.backbones import BACKBONES, in_precision, lenet5
from fedjax_dg.backbones import convolution as convolutions
from fedjax_dg.backbones.backbone import max_pool, scale_pixels
from fedjax_dg.backbones.convolution import (
    MOST_FILTERS,
    POOLINGS,
    conv_pool,
    convolution,
    halfway,
    im2col,
    larger,
    pool,
    quarters_of,
    tiled,
)
from fedjax_dg.backbones.layers import ConvPool

NHWC = ("NHWC", "HWIO", "NHWC")


def draw(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def near(actual, expected, tolerance=1e-5):
    """Within ``tolerance`` of the largest value: sums of many terms may cancel."""
    assert actual.shape == expected.shape
    assert abs(actual - expected).max() <= tolerance * max(1e-6, float(abs(expected).max()))


def xla(inputs, kernel, padding, strides=(1, 1), **options):
    return lax.conv_general_dilated(inputs, kernel, strides, padding, dimension_numbers=NHWC, **options)


# --- convolution by matrix products ---------------------------------------------------------------------------------

FORMS = pytest.mark.parametrize("form", [tiled, im2col])

SHAPES = {  # inputs [B, H, W, I], kernel [kh, kw, I, O], padding
    "lenet conv1": ((2, 32, 32, 3), (5, 5, 3, 6), "VALID"),
    "lenet conv2": ((2, 14, 14, 6), (5, 5, 6, 16), "VALID"),
    "same": ((2, 9, 13, 2), (3, 3, 2, 4), "SAME"),
    "even kernel, same": ((1, 6, 7, 2), (2, 4, 2, 3), "SAME"),
    "lopsided pairs": ((1, 5, 11, 2), (3, 2, 2, 3), ((2, 0), (1, 3))),
    "pointwise": ((3, 4, 5, 6), (1, 1, 6, 2), "VALID"),
    "narrower than a tile": ((2, 8, 3, 1), (3, 3, 1, 2), "VALID"),
    "width is prime": ((1, 4, 29, 1), (1, 7, 1, 1), "VALID"),
}


def with_gradients(convolve):
    """Value and both gradients, against a fixed random cotangent."""

    def function(inputs, kernel):
        outputs, pull_back = jax.vjp(convolve, inputs, kernel)
        return outputs, *pull_back(draw(*outputs.shape, seed=5))

    return jax.jit(function)


@FORMS
@pytest.mark.parametrize("case", SHAPES)
def test_every_form_is_the_convolution(form, case):
    shape, kernel_shape, padding = SHAPES[case]
    inputs, kernel = draw(*shape), draw(*kernel_shape, seed=1)
    actual = with_gradients(lambda x, k: form(x, k, padding))(inputs, kernel)
    expected = with_gradients(lambda x, k: xla(x, k, padding))(inputs, kernel)
    for a, b in zip(actual, expected):
        near(a, b)


@FORMS
def test_every_form_maps_over_clients_with_their_own_kernels(form):
    shape, kernel_shape, padding = SHAPES["same"]
    inputs, kernels = draw(3, *shape), draw(3, *kernel_shape, seed=1)
    actual = jax.vmap(with_gradients(lambda x, k: form(x, k, padding)))(inputs, kernels)
    expected = [with_gradients(lambda x, k: xla(x, k, padding))(x, k) for x, k in zip(inputs, kernels)]
    for i in range(3):
        for a, b in zip(actual, expected[i]):
            near(a[i], b)


@FORMS
def test_every_form_keeps_low_precision(form):
    inputs, kernel = draw(1, 6, 6, 2).astype(jnp.bfloat16), draw(3, 3, 2, 4, seed=1).astype(jnp.bfloat16)
    outputs = form(inputs, kernel, "VALID")
    assert outputs.dtype == jnp.bfloat16
    expected = xla(inputs.astype(jnp.float32), kernel.astype(jnp.float32), "VALID")
    near(outputs.astype(jnp.float32), expected, 1e-2)  # bfloat16 has 8 bits of precision


# --- convolution, the choice ----------------------------------------------------------------------------------------

CONVS = {
    "plain": ({}, True),
    "pairs": ({"padding": ((1, 2), (0, 1))}, True),
    "one number": ({"padding": 2}, True),
    "circular": ({"padding": "CIRCULAR"}, True),
    "widest": ({"features": MOST_FILTERS}, True),
    "wide": ({"features": MOST_FILTERS + 2}, False),
    "strided": ({"strides": (2, 1)}, False),
    "strided, same": ({"strides": (2, 3), "padding": "SAME"}, False),
    "wide, strided, padded": ({"features": MOST_FILTERS + 2, "strides": 2, "padding": ((1, 2), (0, 1))}, False),
    "kernel dilation": ({"kernel_dilation": (1, 2)}, False),
    "input dilation": ({"input_dilation": (2, 1), "padding": ((1, 1), (0, 1))}, False),
    "groups": ({"feature_group_count": 2}, False),
}


@pytest.mark.parametrize("case", CONVS)
def test_convolution_is_what_linen_computes(case, monkeypatch):
    """Equal values everywhere; ``tiled`` exactly where it is faster and means the same."""
    options, by_tiles = CONVS[case]
    calls = []
    monkeypatch.setattr(convolutions, "tiled", lambda *a, **k: calls.append(a) or tiled(*a, **k))
    options = {"features": 4, "kernel_size": (3, 3)} | options
    inputs = draw(2, 9, 8, 4)
    own, linen = nn.Conv(conv_general_dilated=convolution, **options), nn.Conv(**options)
    variables = linen.init(jax.random.key(0), inputs)
    near(own.apply(variables, inputs), linen.apply(variables, inputs))
    assert bool(calls) == by_tiles


@pytest.mark.parametrize("case", CONVS)
def test_gradients_through_convolution_are_linens(case):
    options = {"features": 4, "kernel_size": (3, 3)} | CONVS[case][0]
    inputs = draw(2, 9, 8, 4)
    own, linen = nn.Conv(conv_general_dilated=convolution, **options), nn.Conv(**options)
    variables = linen.init(jax.random.key(0), inputs)
    cotangent = draw(*linen.apply(variables, inputs).shape, seed=3)
    of_all = lambda net: jax.jit(jax.grad(lambda *a: (net.apply(*a) * cotangent).sum(), argnums=(0, 1)))
    gradient = lambda net: of_all(net)(variables, inputs)
    jax.tree.map(near, gradient(own), gradient(linen))


def test_patches_of_a_large_batch_are_made_in_parts(monkeypatch):
    """Three images at a time, the last one alone; 4 x 4 places of 3 x 3 pixels x 2 channels."""
    inputs, kernel = draw(7, 6, 6, 2), draw(3, 3, 2, 4, seed=1)
    whole = with_gradients(lambda x, k: im2col(x, k, "VALID"))(inputs, kernel)
    monkeypatch.setattr(convolutions, "PATCHES", 3 * 16 * 18 * 4)
    parted = lambda x, k: im2col(x, k, "VALID")
    assert "scan" in str(jax.make_jaxpr(parted)(inputs, kernel))
    jax.tree.map(near, with_gradients(parted)(inputs, kernel), whole)


# a tile of 4 x 4 outputs sees 2 x 2 blocks of 4 x 4 pixels x 2 channels; im2col 3 x 3 pixels
PLATFORMS = pytest.mark.parametrize("platform, inner", [("cpu", 8 * 8 * 2), ("cuda", 3 * 3 * 2), ("tpu", 3 * 3 * 2)])


def inner_of_product(function, platform):
    """Over how many numbers the last product of a program for a platform sums."""
    shapes = jax.ShapeDtypeStruct((1, 6, 6, 2), jnp.float32), jax.ShapeDtypeStruct((3, 3, 2, 2), jnp.float32)
    text = jax.jit(function).trace(*shapes).lower(lowering_platforms=(platform,)).as_text()
    product = re.findall("stablehlo.dot_general.*", text)[-1]
    contracted = int(re.search(r"contracting_dims = \[(\d)\]", product)[1])
    return int(re.search(r": \(tensor<([\dx]+)xf32>", product)[1].split("x")[contracted])


@PLATFORMS
def test_convolution_suits_the_platform_it_is_lowered_for(platform, inner):
    function = lambda x, k: convolution(x, k, (1, 1), "VALID", dimension_numbers=NHWC)
    assert inner_of_product(function, platform) == inner


@PLATFORMS
def test_convolution_and_pool_suit_the_platform_they_are_lowered_for(platform, inner):
    function = lambda x, k: conv_pool(x, k, jnp.zeros(2), nn.relu, larger)
    assert inner_of_product(function, platform) == inner


# --- precision ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("lenet5", {}),
        pytest.param("resnet18_cifar", {}, marks=pytest.mark.slow),
        pytest.param("vgg11_bn", {}, marks=pytest.mark.slow),
        pytest.param("resnet18_cifar", {"norm": "group"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_bfloat16_is_the_same_network_in_fewer_digits(name, options):
    """Layers read bfloat16 (8 bits: 0.4 % a step); what comes out, statistics and gradients are float32."""
    exact = BACKBONES[name](3, image_size=32, **options)
    rough = in_precision(exact, "bfloat16")
    variables, inputs = jax.jit(exact.init)(jax.random.key(0)), draw(2, 32, 32, 3)

    @functools.partial(jax.jit, static_argnums=0)
    def both(backbone, params):
        def loss(params):
            forward = backbone.forward(variables._replace(params=params), inputs, jnp.ones(2, bool), jax.random.key(1))
            return (forward.logits**2).sum(), forward

        return jax.grad(loss, has_aux=True)(params)

    (gradient, forward), (_, expected) = both(rough, variables.params), both(exact, variables.params)
    assert {x.dtype for x in forward.dense_inputs.values()} == {jnp.dtype("bfloat16")}
    floats = (gradient, forward.z, forward.logits, forward.batch_stats, jax.jit(rough.apply)(variables, inputs))
    assert {x.dtype for x in jax.tree.leaves(floats)} == {jnp.dtype("float32")}
    near(forward.logits, expected.logits, 0.05)
    assert (forward.logits != expected.logits).any()


def test_an_unknown_precision_is_named():
    with pytest.raises(ValueError, match="'float16'.*bfloat16"):
        in_precision(lenet5(3), "float16")


# --- pools ----------------------------------------------------------------------------------------------------------

POOLS = {
    "max": (max_pool, lambda x: nn.max_pool(x, (2, 2), strides=(2, 2))),
    "avg": (
        lambda x: pool(quarters_of(x), lambda pooled: pooled, halfway),
        lambda x: nn.avg_pool(x, (2, 2), strides=(2, 2)),
    ),
}


@pytest.mark.parametrize("shape", [(2, 6, 4, 3), (1, 7, 5, 2)])
@pytest.mark.parametrize("name", POOLS)
def test_pools_are_linens(name, shape):
    """Value and gradient; random numbers have no ties. The odd last row and column are left out, as Linen does."""
    own, linen = POOLS[name]
    x = draw(*shape)
    (value, pull), (expected, pull_expected) = jax.vjp(own, x), jax.vjp(linen, x)
    near(value, expected, 1e-6)
    cotangent = draw(*value.shape, seed=1)
    near(pull(cotangent)[0], pull_expected(cotangent)[0], 1e-6)


def test_max_pool_gives_the_gradient_among_ties_to_the_first():
    """As PyTorch does; the windows of an image's background are all ties."""
    gradient = jax.grad(lambda x: max_pool(x).sum())(jnp.zeros((1, 2, 2, 1)))
    np.testing.assert_array_equal(gradient[0, :, :, 0], [[1.0, 0.0], [0.0, 0.0]])


@pytest.mark.parametrize("place", range(4))
def test_max_pool_hides_no_nan(place):
    x = jnp.arange(4.0).at[place].set(jnp.nan).reshape(1, 2, 2, 1)
    assert jnp.isnan(max_pool(x)).all()


# --- convolution and pool in one ------------------------------------------------------------------------------------

#: inputs [B, H, W, I], kernel [kh, kw, I, O]
POOLED = {
    "lenet conv1": ((2, 32, 32, 3), (5, 5, 3, 6)),
    "lenet conv2": ((2, 14, 14, 6), (5, 5, 6, 16)),
    "odd outputs": ((3, 9, 8, 2), (3, 2, 2, 3)),
    "one window": ((2, 4, 4, 1), (3, 3, 1, 2)),
    "too many filters": ((1, 7, 7, 2), (2, 2, 2, MOST_FILTERS + 2)),
}
# the form for CPU is what runs here; the other one by leaving the platform out of account
HERE = pytest.mark.parametrize("elsewhere", [False, True], ids=["here", "elsewhere"])


def away(monkeypatch, elsewhere):
    if elsewhere:
        monkeypatch.setattr(jax.lax, "platform_dependent", lambda *arguments, cpu, default: default(*arguments))


def pooled_by_the_book(x, kernel, bias, activation, name):
    return POOLS[name][1](activation(xla(x, kernel, "VALID") + bias))


@HERE
@pytest.mark.parametrize(("activation", "name"), [(nn.relu, "max"), (jnp.tanh, "avg"), (nn.relu, "avg")])
@pytest.mark.parametrize("case", POOLED)
def test_convolution_and_pool_are_those_of_the_book(case, activation, name, elsewhere, monkeypatch):
    """Value and all three gradients, in the forms of both platforms."""
    away(monkeypatch, elsewhere)
    shape, kernel_shape = POOLED[case]
    arguments = draw(*shape), draw(*kernel_shape, seed=1), draw(kernel_shape[-1], seed=2)
    expected = jax.eval_shape(lambda *a: pooled_by_the_book(*a, activation, name), *arguments)
    cotangent = draw(*expected.shape, seed=3)

    def both(function):
        value, pull = jax.vjp(function, *arguments)
        return value, pull(cotangent)

    own = jax.jit(lambda: both(lambda *a: conv_pool(*a, activation, POOLINGS[name])))()
    jax.tree.map(near, own, jax.jit(lambda: both(lambda *a: pooled_by_the_book(*a, activation, name)))())


@HERE
def test_convolution_and_pool_map_over_clients_with_their_own_kernels(elsewhere, monkeypatch):
    away(monkeypatch, elsewhere)
    shape, kernel_shape = POOLED["odd outputs"]
    inputs, kernels, biases = draw(4, *shape), draw(4, *kernel_shape, seed=1), draw(4, kernel_shape[-1], seed=2)
    own = jax.jit(jax.vmap(lambda *a: conv_pool(*a, nn.relu, larger)))(inputs, kernels, biases)
    for i in range(4):
        near(own[i], pooled_by_the_book(inputs[i], kernels[i], biases[i], nn.relu, "max"))


def test_forms_for_all_platforms_agree_among_ties(monkeypatch):
    """On a plain background every window holds four equal numbers (whole ones here, so that no rounding parts them)."""
    arguments = jnp.ones((2, 8, 8, 2)), jnp.round(4 * draw(3, 3, 2, 4)), jnp.ones(4)
    of_all = jax.grad(lambda *a: conv_pool(*a, nn.relu, larger).sum(), argnums=(0, 1, 2))
    gradient = lambda: jax.jit(lambda *a: of_all(*a))(*arguments)
    here = gradient()
    away(monkeypatch, True)
    jax.tree.map(near, here, gradient())


@HERE
def test_convolution_and_pool_can_be_differentiated_twice(elsewhere, monkeypatch):
    """Reverse over reverse, as FedIIR does, and forward over reverse."""
    away(monkeypatch, elsewhere)
    shape, kernel_shape = POOLED["odd outputs"]
    x, kernel, bias = draw(*shape), draw(*kernel_shape, seed=1), draw(kernel_shape[-1], seed=2)
    direction = draw(*kernel_shape, seed=3)

    def slope(function):
        return lambda k: (jax.grad(lambda k: (function(x, k, bias) ** 3).sum())(k) * direction).sum()

    own = slope(lambda *a: conv_pool(*a, jnp.tanh, larger))
    book = slope(lambda *a: pooled_by_the_book(*a, jnp.tanh, "max"))
    twice = lambda f: (jax.grad(f)(kernel), jax.jvp(f, (kernel,), (direction,))[1])
    jax.tree.map(near, jax.jit(lambda: twice(own))(), jax.jit(lambda: twice(book))())


def test_convolution_and_pool_keep_low_precision():
    arguments = draw(1, 8, 8, 2), draw(3, 3, 2, 4, seed=1), draw(4, seed=2)
    low = jax.jit(lambda *a: conv_pool(*a, nn.relu, larger))(*(x.astype(jnp.bfloat16) for x in arguments))
    assert low.dtype == jnp.bfloat16
    near(low.astype(jnp.float32), pooled_by_the_book(*arguments, nn.relu, "max"), 2e-2)  # 8 bits of precision


def test_conv_pool_starts_as_linens_convolution():
    inputs = draw(1, 8, 8, 2)
    own = ConvPool(4, 3, nn.relu, larger).init(jax.random.key(0), inputs)
    jax.tree.map(np.testing.assert_array_equal, own, nn.Conv(4, (3, 3)).init(jax.random.key(0), inputs))


# --- LeNet-5 --------------------------------------------------------------------------------------------------------

VARIANTS = {"relu max": {}, "tanh avg": {"activation": "tanh", "pooling": "avg"}}


@functools.cache
def net(variant="relu max", num_classes=6):
    """A backbone, random variables (biases too) and its jitted evaluation pass."""
    backbone = lenet5(num_classes, **VARIANTS[variant])
    rng = np.random.default_rng(0)
    variables = jax.jit(backbone.init)(jax.random.key(0))
    variables = jax.tree.map(lambda x: x + jnp.asarray(0.05 * rng.normal(size=x.shape), jnp.float32), variables)
    return backbone, variables, jax.jit(backbone.apply)


@functools.cache
def images():
    return jnp.asarray(np.random.default_rng(1).integers(0, 256, size=(5, 32, 32, 3)), jnp.uint8)


def by_the_book(variables, inputs, activation, pool):
    """LeNet-5 written out with XLA's convolution and Linen's pools: activation first, then the pool."""
    p = variables.params
    x = inputs
    for conv in ("conv1", "conv2"):
        x = pool(activation(xla(x, p[conv]["kernel"], "VALID") + p[conv]["bias"]))
    x = x.reshape(len(x), 400)
    for dense in ("dense1", "dense2"):
        x = activation(x @ p[dense]["kernel"] + p[dense]["bias"])
    return x, x @ p["head"]["kernel"] + p["head"]["bias"]


@pytest.mark.parametrize("variant", VARIANTS)
def test_lenet5_is_lenet5(variant):
    backbone, variables, apply = net(variant)
    activation = {"relu max": nn.relu, "tanh avg": jnp.tanh}[variant]
    pool = POOLS[variant.split()[1]][1]
    book = jax.jit(functools.partial(by_the_book, activation=activation, pool=pool))
    z, logits = book(variables, images().astype(jnp.float32) / 127.5 - 1.0)
    near(apply(variables, images()), logits)
    near(backbone.features(variables, images()), z)


def test_lenet5_gradients_are_those_of_the_book():
    backbone, variables, _ = net()
    inputs = scale_pixels(images())
    cotangent = draw(5, 6, seed=3)

    def loss(forward):
        return jax.jit(jax.grad(lambda v: (forward(v) * cotangent).sum()))(variables)

    actual = loss(lambda v: backbone.forward(v, inputs, jnp.ones(5, bool), jax.random.key(0)).logits)
    expected = loss(lambda v: by_the_book(v, inputs, nn.relu, POOLS["max"][1])[1])
    jax.tree.map(near, actual, expected)


@pytest.mark.parametrize(("num_classes", "expected"), [(6, 61_666), (7, 61_751), (65, 66_681)])
def test_lenet5_has_the_published_number_of_parameters(num_classes, expected):
    variables = jax.eval_shape(lenet5(num_classes).init, jax.random.key(0))
    assert sum(x.size for x in jax.tree.leaves(variables.params)) == expected
    assert variables.batch_stats == {}


def test_lenet5_sizes():
    backbone, variables, apply = net()
    assert backbone.features(variables, images()).shape == (5, 84) == (5, backbone.num_features)
    assert apply(variables, images()).shape == (5, 6) == (5, backbone.num_classes)
    assert backbone.input_shape == (32, 32, 3)
    wider = jax.eval_shape(lenet5(65).apply, jax.eval_shape(lenet5(65).init, jax.random.key(0)), images())
    assert wider.shape == (5, 65)


def test_init_looks_only_at_the_shape_of_inputs():
    backbone, _, _ = net()
    init = jax.jit(backbone.init)
    one, other = init(jax.random.key(3)), init(jax.random.key(3), images())
    jax.tree.map(np.testing.assert_array_equal, one, other)
    assert (one.params["conv1"]["kernel"] != init(jax.random.key(4)).params["conv1"]["kernel"]).any()


@pytest.mark.parametrize("variant", VARIANTS)
def test_head_of_features_is_the_network(variant):
    backbone, variables, apply = net(variant)
    near(backbone.head(variables, backbone.features(variables, images())), apply(variables, images()), 1e-6)


def test_a_feature_map_and_what_follows_are_the_training_pass():
    backbone, variables, _ = net()
    mask, key = jnp.ones(5, bool), jax.random.key(0)
    maps, batch_stats = backbone.maps(variables, images(), mask, key)
    assert maps.shape == (5, 5, 5, 16) and batch_stats == {}
    forward, later = backbone.forward(variables, images(), mask, key), backbone.from_maps(variables, maps, key)
    near(later.logits, forward.logits, 1e-6)
    near(later.z, forward.z, 1e-6)
    assert list(later.dense_inputs) == list(forward.dense_inputs)


@pytest.mark.parametrize("name", BACKBONES)
def test_every_image_network_has_a_feature_map(name):
    """Its shape, and that dropout in what follows draws as in the whole pass: the same primitives with the same key."""
    size = {"lenet5": 32, "alexnet": 96}.get(name, 64)
    backbone = BACKBONES[name](4, image_size=size)
    variables = jax.eval_shape(backbone.init, jax.random.key(0))
    inputs = jax.ShapeDtypeStruct((2, size, size, 3), jnp.float32)
    mask, key = jnp.ones(2, bool), jax.random.key(0)
    maps, stats = jax.eval_shape(lambda v, x: backbone.maps(v, x, mask, key), variables, inputs)
    assert len(maps.shape) == 4
    assert jax.tree.map(lambda x: x.shape, stats) == jax.tree.map(lambda x: x.shape, variables.batch_stats)
    rest = jax.eval_shape(lambda v, x: backbone.from_maps(v, x, key), variables, maps)
    assert rest.z.shape == (2, backbone.num_features) and rest.logits.shape == (2, 4)


def test_training_pass_is_the_evaluation_pass_of_a_net_without_norms():
    backbone, variables, apply = net()
    z, logits, batch_stats, seen = backbone.forward(variables, images(), jnp.ones(5, bool), jax.random.key(0))
    near(logits, apply(variables, images()), 1e-6)
    near(z, backbone.features(variables, images()), 1e-6)
    assert batch_stats == {}
    expected = backbone.dense_inputs(variables, images())
    assert list(seen) == list(expected) == ["dense1", "dense2", "head"]
    jax.tree.map(lambda a, b: near(a, b, 1e-6), seen, expected)


def test_pixels_and_scaled_floats_are_the_same_input():
    backbone, variables, apply = net()
    scaled = images().astype(jnp.float32) / 127.5 - 1.0
    assert (scaled.min(), scaled.max()) == (-1.0, 1.0)
    np.testing.assert_array_equal(scale_pixels(images()), scaled)
    near(apply(variables, images()), apply(variables, scaled), 1e-6)
    np.testing.assert_array_equal(scale_pixels(jnp.arange(3)), jnp.arange(3))  # token ids pass


def test_examples_do_not_look_at_each_other():
    _, variables, apply = net()
    together = apply(variables, images())
    spoiled = images().at[3].set(0)
    np.testing.assert_array_equal(apply(variables, spoiled)[:3], together[:3])
    np.testing.assert_array_equal(apply(variables, spoiled)[4:], together[4:])
    assert (apply(variables, spoiled)[3] != together[3]).any()
    order = jnp.array([1, 2, 0, 4, 3])
    near(apply(variables, images()[order]), together[order], 1e-6)


def test_dense_inputs_names_every_dense_layer():
    backbone, variables, _ = net()
    seen = backbone.dense_inputs(variables, images())
    assert {name: x.shape for name, x in seen.items()} == {"dense1": (5, 400), "dense2": (5, 120), "head": (5, 84)}
    near(seen["head"], backbone.features(variables, images()), 1e-6)


def test_unknown_names_are_named():
    with pytest.raises(ValueError, match="did you mean 'tanh'"):
        lenet5(6, activation="tahn")
    with pytest.raises(ValueError, match="did you mean 'avg'"):
        lenet5(6, pooling="average")


def test_every_backbone_declares_groups_of_leaves_it_has():
    for make in BACKBONES.values():
        backbone = make(6)
        shapes = jax.eval_shape(backbone.init, jax.random.key(0))
        for group in backbone.groups:
            for axis in (*group.producers, *group.followers, *group.consumers):
                collection, *path = axis.leaf.split("/")
                leaf = functools.reduce(lambda node, name: node[name], path, getattr(shapes, collection))
                assert leaf.shape[axis.axis] == group.size * axis.positions, axis.leaf
            for layer, positions in group.grams:
                assert shapes.params[layer]["kernel"].shape[0] == group.size * positions
