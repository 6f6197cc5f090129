"""Training augmentation: what is drawn against torchvision's way of drawing, what is done against Pillow and colorsys."""

import colorsys
import dataclasses
import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from client import one_batch
from PIL import Image, ImageEnhance
from tiny import tiny_backbone, tiny_federation

from fedjax_dg import recipes
from fedjax_dg.aggregators import mean
from fedjax_dg.algorithms import augmenting, fedavg, fedsr, keep_batch_stats, keep_optimizer
from fedjax_dg.config import RunConfig, build_algorithm, check, read_toml
from fedjax_dg.recipes import AUGMENTS, Draws, crop_and_jitter
from fedjax_dg.run import make_round
from fedjax_dg.types import Local, Received

SCALE, JITTER = (0.7, 1.0), 0.3


def photo(height=40, width=56, seed=0):
    """uint8 [H, W, 3] with large coloured shapes and some noise: all hues, black, white and grey."""
    rng = np.random.default_rng(seed)
    coarse = rng.integers(0, 256, (5, 7, 3), dtype=np.uint8)
    coarse[0, :3] = [[0] * 3, [255] * 3, [128] * 3]
    smooth = np.asarray(Image.fromarray(coarse).resize((width, height), Image.Resampling.NEAREST)).astype(int)
    return np.clip(smooth + rng.integers(-6, 7, smooth.shape), 0, 255).astype(np.uint8)


def planes_of(image):
    return jnp.moveaxis(jnp.asarray(image, jnp.float32) / 255.0, -1, 0)


def levels(planes):
    """Planes as an image in levels of 0 to 255, not rounded."""
    return 255.0 * np.moveaxis(np.asarray(planes, np.float64), 0, -1)


# --- what is drawn ---------------------------------------------------------------------------------------------------


def box_of_torchvision(rng, height, width, scale, ratio=(3 / 4, 4 / 3)):
    """RandomResizedCrop.get_params, written down from its documentation and code's steps; with NumPy's generator."""
    for _ in range(10):
        area = height * width * rng.uniform(*scale)
        aspect = math.exp(rng.uniform(math.log(ratio[0]), math.log(ratio[1])))
        w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < w <= width and 0 < h <= height:
            return rng.integers(0, height - h + 1), rng.integers(0, width - w + 1), h, w
    if width / height < ratio[0]:
        w, h = width, round(width / ratio[0])
    elif width / height > ratio[1]:
        w, h = round(height * ratio[1]), height
    else:
        w, h = width, height
    return (height - h) // 2, (width - w) // 2, h, w


@functools.cache
def drawn(height, width, scale, count=4000):
    """Draws for so many images, jitter 0.3."""
    one = lambda key: recipes.draw(key, height, width, JITTER, scale, 0.5, 0.1)
    return jax.tree.map(np.asarray, jax.jit(jax.vmap(one))(jax.random.split(jax.random.key(5), count)))


def alike(one, other):
    """Whether two samples have the same mean, up to four standard errors."""
    error = math.sqrt(np.var(one) / len(one) + np.var(other) / len(other))
    return abs(np.mean(one) - np.mean(other)) <= 4 * error


# one image in which some tries fail, one in which most do, one in which none can succeed, twice
@pytest.mark.parametrize(("height", "width", "scale"), [(64, 64, SCALE), (40, 60, (0.3, 1.0)), (40, 60, SCALE)])
def test_parts_are_drawn_as_torchvision_draws_them(height, width, scale):
    boxes = drawn(height, width, scale).box
    rng = np.random.default_rng(0)
    theirs = np.array([box_of_torchvision(rng, height, width, scale) for _ in range(4000)])
    top, left, h, w = boxes.T
    assert (top >= 0).all() and (left >= 0).all() and (top + h <= height).all() and (left + w <= width).all()
    statistics = {
        "area": lambda b: b[:, 2] * b[:, 3] / (height * width),
        "area squared": lambda b: (b[:, 2] * b[:, 3] / (height * width)) ** 2,
        "log aspect": lambda b: np.log(b[:, 3] / b[:, 2]),
        "log aspect squared": lambda b: np.log(b[:, 3] / b[:, 2]) ** 2,
        "top": lambda b: b[:, 0],
        "left": lambda b: b[:, 1],
        "top squared": lambda b: b[:, 0] ** 2,
        "at the left edge": lambda b: b[:, 1] == 0,
        "at the lower edge": lambda b: b[:, 0] + b[:, 2] == height,
        "full height": lambda b: b[:, 2] == height,
    }
    for name, statistic in statistics.items():
        assert alike(statistic(boxes), statistic(theirs)), name


@pytest.mark.parametrize(("height", "width", "box"), [(10, 200, (0, 93, 10, 13)), (200, 10, (93, 0, 13, 10))])
def test_where_no_part_fits_it_is_the_middle(height, width, box):
    assert (drawn(height, width, SCALE).box == box).all()


def test_where_no_part_fits_a_well_shaped_image_it_is_whole():
    assert (drawn(20, 24, (4.0, 5.0)).box == (0, 0, 20, 24)).all()


def test_rates_and_ranges():
    d = drawn(64, 64, SCALE)
    near = lambda share, expected: abs(share - expected) < 4 * math.sqrt(expected * (1 - expected) / 4000)
    assert near(d.flip.mean(), 0.5) and near(d.grey.mean(), 0.1)
    for values, low, high in [(d.factors[:, 0], 0.7, 1.3), (d.factors[:, 1], 0.7, 1.3), (d.shift, -0.3, 0.3)]:
        assert low <= values.min() < low + 0.003 and high - 0.003 < values.max() <= high
        for threshold in (0.25, 0.5, 0.75):
            assert near((values < low + threshold * (high - low)).mean(), threshold)
    orders = dict.fromkeys(itertools.product(itertools.permutations(range(3)), range(4)), 0)
    for order, before in zip(d.order.tolist(), d.before.tolist()):
        orders[tuple(order), before] += 1
    assert all(near(count / 4000, 1 / 24) for count in orders.values())
    # one image's draws tell nothing of each other
    columns = np.stack([d.flip, d.grey, *d.factors.T, d.shift, d.before, d.box[:, 0], d.box[:, 2]]).astype(float)
    correlations = np.corrcoef(columns[:, :]) - np.eye(len(columns))
    correlations[-1, -2] = correlations[-2, -1] = 0.0  # a higher part has less room to move
    assert abs(correlations).max() < 4.5 / math.sqrt(4000)


def test_strong_jitter_never_has_a_negative_factor():
    one = lambda key: recipes.draw(key, 8, 8, 1.5, SCALE, 0.5, 0.1).factors
    factors = jax.jit(jax.vmap(one))(jax.random.split(jax.random.key(0), 500))
    assert 0.0 <= factors.min() < 0.05 and 2.4 < factors.max() <= 2.5


# --- what is done ----------------------------------------------------------------------------------------------------

resized_crop = jax.jit(recipes.resized_crop, static_argnums=2)


@pytest.mark.parametrize("size", [(40, 56), (17, 23), (64, 90)], ids=["same", "smaller", "larger"])
def test_parts_are_resized_as_pillow_does(size):
    """Pillow rounds between the two axes and at the end: half a level each, so at most one."""
    noise = np.random.default_rng(1).integers(0, 256, (40, 56, 3), dtype=np.uint8)
    for image in (photo(), noise):
        for box in ((0, 0, 40, 56), (3, 7, 33, 41), (10, 0, 30, 56), (0, 15, 37, 31), (5, 5, 1, 2)):
            top, left, height, width = box
            part = Image.fromarray(image).crop((left, top, left + width, top + height))
            expected = np.asarray(part.resize(size[::-1], Image.Resampling.BILINEAR)).astype(float)
            actual = levels(resized_crop(planes_of(image), jnp.array(box), size))
            assert abs(actual.round() - expected).max() <= 1.0
            flipped = levels(resized_crop(planes_of(image), jnp.array(box), size, True))
            np.testing.assert_array_equal(flipped, actual[:, ::-1])


def test_nothing_outside_of_a_part_is_read():
    image = np.full((20, 20, 3), np.nan, np.float32)
    image[5:15, 6:13] = 0.5
    inside = np.nan_to_num(image, nan=1e6)
    made = resized_crop(jnp.moveaxis(inside, -1, 0), jnp.array([5, 6, 10, 7]), (20, 20))
    np.testing.assert_allclose(made, 0.5, rtol=1e-6)


def by_enhance(kind):
    enhance = (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color)[kind]
    return lambda image, factor: np.asarray(enhance(Image.fromarray(image)).enhance(factor))


blend = jax.jit(recipes.blend)


@pytest.mark.parametrize("kind", range(3), ids=["brightness", "contrast", "saturation"])
@pytest.mark.parametrize("factor", [0.0, 0.6, 0.9, 1.0, 1.2, 1.4, 2.0])
def test_colours_change_as_in_pillow(kind, factor):
    """Pillow rounds the grey it blends with, half a level |1 - f| times, and cuts the result off: within two levels."""
    actual = levels(blend(planes_of(photo()), jnp.int32(kind), jnp.float32(factor)))
    expected = by_enhance(kind)(photo(), factor)
    assert abs(actual - expected).max() <= 1.0 + 0.5 * abs(1 - factor) + 1e-3
    if factor == 1.0:
        np.testing.assert_allclose(actual, photo(), atol=1e-4)


def test_grey_is_pillows():
    grey = np.asarray(Image.fromarray(photo()).convert("L")).astype(float)
    assert abs(levels(recipes.luma(planes_of(photo())))[..., 0] - grey).max() <= 0.5 + 1e-2


shift_hue = jax.jit(recipes.shift_hue)
SHIFTS = (-0.5, -0.4, -0.25, -0.1, 0.0, 0.05, 0.3, 0.5)


@pytest.mark.parametrize("shift", SHIFTS)
def test_hue_is_colorsys(shift):
    """Also of the corners and edges of the cube, where channels are equal."""
    corners = np.array(list(itertools.product((0, 100, 255), repeat=3)), np.uint8).reshape(9, 3, 3)
    for image in (photo(12, 12), corners):
        expected = np.empty(image.shape)
        for place in np.ndindex(image.shape[:2]):
            h, s, v = colorsys.rgb_to_hsv(*(image[place] / 255.0))
            expected[place] = colorsys.hsv_to_rgb((h + shift) % 1.0, s, v)
        actual = levels(shift_hue(planes_of(image), jnp.float32(shift))) / 255.0
        np.testing.assert_allclose(actual, expected, atol=2e-6)


@pytest.mark.parametrize("shift", SHIFTS)
def test_hue_is_pillows_up_to_its_eight_bits(shift):
    """As torchvision's PIL route: the hue's 8 bits plus int(255 shift), wrapped.

    That route cuts the hue off to 1/255 of a turn, the shift likewise, and wraps after 256 steps instead of 255. A turn is
    six chromas of up to 255 levels, so each of the three is worth up to 6 levels; saturation and the last rounding one each.
    """
    h, s, v = Image.fromarray(photo()).convert("HSV").split()
    moved = np.asarray(h) + np.array(int(shift * 255) % 256, np.uint8)
    expected = np.asarray(Image.merge("HSV", (Image.fromarray(moved), s, v)).convert("RGB")).astype(float)
    difference = abs(levels(shift_hue(planes_of(photo()), jnp.float32(shift))) - expected)
    assert difference.max() <= 20.0
    assert difference.mean() < 2.0


jittered = jax.jit(recipes.jitter_colours)


def test_the_four_come_in_the_order_drawn():
    """Against one after the other, for all 24 orders; with factors that clip, so that the order matters."""
    planes = planes_of(photo(6, 8))
    factors, shift = jnp.array([1.3, 1.4, 0.6]), jnp.float32(0.2)
    blank = Draws(
        jnp.array([0, 0, 6, 8]), jnp.array(False), factors, shift, jnp.arange(3), jnp.int32(0), jnp.array(False)
    )
    seen = []
    for order in itertools.permutations(range(3)):
        for before in range(4):
            expected = planes
            for place, kind in enumerate((*order, None)):
                if place == before:
                    expected = shift_hue(expected, shift)
                if kind is not None:
                    expected = blend(expected, jnp.int32(kind), factors[kind])
            actual = jittered(planes, blank._replace(order=jnp.array(order), before=jnp.int32(before)))
            np.testing.assert_allclose(actual, expected, atol=1e-5)
            seen.append(np.asarray(actual))
    assert len({x.round(3).tobytes() for x in seen}) == 24


# --- batches ---------------------------------------------------------------------------------------------------------


@functools.cache
def batch(count=16, side=12):
    return jnp.asarray(np.stack([photo(side, side, seed) for seed in range(count)]))


compiled = jax.jit(crop_and_jitter)
draw_alone = jax.jit(lambda key, row: recipes.draw(jax.random.fold_in(key, row), 12, 12, 0.3, (0.7, 1.0), 0.5, 0.1))


def test_a_batch_is_its_images_one_by_one():
    """With the draws of their keys, by hand: part, flip, colours, grey; uint8, rounded."""
    key, images = jax.random.key(0), batch()
    actual = compiled(images, key)
    assert actual.dtype == jnp.uint8 and actual.shape == images.shape
    seen = []
    for row, image in enumerate(images):
        d = draw_alone(key, row)
        planes = np.asarray(resized_crop(planes_of(image), d.box, (12, 12)))
        planes = np.asarray(jittered(planes[..., ::-1] if d.flip else planes, d))
        expected = levels(
            (planes * recipes.LUMA[:, None, None]).sum(0, keepdims=True).repeat(3, 0) if d.grey else planes
        )
        assert abs(np.asarray(actual[row], float) - expected).max() <= 0.5 + 1e-2
        seen.append((bool(d.flip), bool(d.grey)))
    assert {flip for flip, _ in seen} == {grey for _, grey in seen} == {False, True}


def test_an_image_does_not_depend_on_the_others():
    key, images = jax.random.key(1), batch()
    whole = compiled(images, key)
    np.testing.assert_array_equal(compiled(images[:5], key), whole[:5])
    mixed = jnp.concatenate([images[:3], 255 - images[3:]])
    np.testing.assert_array_equal(compiled(mixed, key)[:3], whole[:3])
    assert (compiled(images, jax.random.key(2)) != whole).any((1, 2, 3)).all()
    same = compiled(jnp.broadcast_to(images[0], images.shape), key)
    assert len({np.asarray(x).tobytes() for x in same}) == len(images)  # every row draws for itself


def test_compiled_and_not_are_the_same():
    """Up to the rounding of a number that lies between two levels."""
    key, images = jax.random.key(1), batch()
    alone = levels(recipes.apply(planes_of(images[2]), draw_alone(key, 2))).round()
    difference = abs(alone - np.asarray(compiled(images, key)[2], float))
    assert difference.max() <= 1 and (difference > 0).mean() < 0.01


def test_flips_and_greys_of_a_thousand_images():
    """Rates through the whole: the left half bright red, the right one dark blue."""
    image = np.zeros((8, 8, 3), np.uint8)
    image[:, :4, 0], image[:, 4:, 2] = 200, 120
    made = np.asarray(compiled(jnp.broadcast_to(jnp.asarray(image), (1000, 8, 8, 3)), jax.random.key(0)), int)
    near = lambda share, expected: abs(share - expected) < 4 * math.sqrt(expected * (1 - expected) / 1000)
    grey = (made.max(-1) == made.min(-1)).all((1, 2))
    assert near(grey.mean(), 0.1)
    brightest = made.max(-1)
    flipped = brightest[:, :, 7].mean(1) > brightest[:, :, 0].mean(1)
    assert near(flipped[~grey].mean(), 0.5)


def test_black_stays_black_and_what_is_off_changes_nothing():
    images = batch()
    assert not compiled(jnp.zeros_like(images), jax.random.key(0)).any()
    never = functools.partial(crop_and_jitter, jitter=0.0, scale=(4.0, 4.0), flip=0.0, grey=0.0)  # the fallback: whole
    np.testing.assert_array_equal(jax.jit(never)(images, jax.random.key(0)), images)


def test_the_recipes_of_the_names():
    assert list(AUGMENTS) == ["none", "domainbed", "fl", "feddg_ga"] and AUGMENTS["none"] is None
    for name, jitter in (("domainbed", 0.3), ("fl", 0.3), ("feddg_ga", 0.4)):
        assert AUGMENTS[name].func is crop_and_jitter and AUGMENTS[name].keywords == {"jitter": jitter}


BAD = {
    "grey": jax.ShapeDtypeStruct((2, 8, 8, 1), jnp.uint8),
    "two channels": jax.ShapeDtypeStruct((2, 8, 8, 2), jnp.uint8),
    "floats": jax.ShapeDtypeStruct((2, 8, 8, 3), jnp.float32),
    "text": jax.ShapeDtypeStruct((2, 64), jnp.int32),
}


@pytest.mark.parametrize("case", BAD)
def test_other_inputs_are_refused_while_tracing(case):
    with pytest.raises(
        ValueError, match=r"^This augmentation changes uint8 RGB images .* and these inputs are"
    ) as caught:
        jax.eval_shape(compiled, BAD[case], jax.random.key(0))
    assert str(BAD[case].dtype) in str(caught.value) and "\n" not in str(caught.value)


# --- in a method -----------------------------------------------------------------------------------------------------


def halved(inputs, key):
    """An augmentation that can be undone by hand."""
    return inputs * (0.5 + jax.random.uniform(key, (len(inputs), 1, 1, 1)))


@pytest.mark.parametrize("wrap", [lambda x: x, keep_optimizer, keep_batch_stats], ids=["plain", "optimizer", "norm"])
def test_only_a_steps_inputs_are_augmented(wrap):
    """The method's own step gets everything else, its key too, as it was."""
    backbone, method, key = tiny_backbone("batch"), fedavg(), jax.random.key(4)
    seen = []

    def step(backbone, received, local, batch, key):
        seen.append((batch, key))
        return local, {}

    def recorded(inputs, key):
        seen.append((inputs, key))
        return halved(inputs, key)

    algorithm = wrap(augmenting(method._replace(step=step), recorded))
    variables = jax.tree.map(lambda x: jnp.zeros(x.shape), jax.eval_shape(backbone.init, key))
    start = algorithm.init(backbone, variables, key)
    received = Received(variables, start.shared, start.station, start.client)
    optimizer, tally = algorithm.begin(backbone, received, start.client)
    examples = one_batch()
    local = Local(variables, optimizer, start.client, tally)
    algorithm.step(backbone, received, local, examples, key)
    (inputs, augment_key), (batch, step_key) = seen
    np.testing.assert_array_equal(inputs, examples.inputs)
    np.testing.assert_array_equal(batch.inputs, halved(examples.inputs, augment_key))
    for name in ("labels", "mask", "domain"):
        np.testing.assert_array_equal(getattr(batch, name), getattr(examples, name))
    data = jax.random.key_data
    np.testing.assert_array_equal(data(step_key), data(key))
    assert (data(augment_key) != data(key)).any()


def test_everything_else_of_a_method_is_its_own():
    method = fedsr()
    wrapped = augmenting(method, halved)
    assert wrapped.step is not method.step
    assert wrapped._replace(step=method.step) == method


def test_a_configuration_augments_steps_and_no_evaluation(tmp_path, monkeypatch):
    """The network's training passes see other images than it is judged on; a new draw in every step."""
    monkeypatch.setitem(AUGMENTS, "fl", lambda inputs, key: jnp.full_like(inputs, jax.random.uniform(key)))
    path = tmp_path / "run.toml"
    path.write_text('[run]\naugment = "fl"\nkeep_optimizer = true\nbn_pool = "local"\n')
    config = check(read_toml(path))
    assert config.augment == "fl" and RunConfig().augment == "none"
    algorithm = build_algorithm(config)
    seen = []

    def watch(inputs):
        jax.debug.callback(lambda x: seen.append(np.asarray(x)), inputs)
        return inputs

    backbone = dataclasses.replace(tiny_backbone("batch"), transform=watch)
    federation = tiny_federation([[4]], local_steps=3, batch_size=2)
    measure = lambda backbone, start, variables, examples, *_: backbone.transform(examples.inputs).sum()
    rule = mean()._replace(measure=measure, combine=lambda messages, weights: messages.sum())
    round_fn = make_round(backbone, algorithm, federation.topology, rule)
    state = round_fn.init(jax.random.key(0))
    seen.clear()
    jax.block_until_ready(jax.jit(round_fn.step)(state, federation.data, jax.random.key(1)))
    jax.effects_barrier()
    trained = [x for x in seen if len(x) == 2]
    measured = [x for x in seen if len(x) == 4]
    assert len(trained) == 3 and len(measured) == len(seen) - 3 > 0
    assert all((x == x.flat[0]).all() for x in trained) and len({float(x.flat[0]) for x in trained}) == 3
    assert all((x == federation.inputs[0, 0]).all() for x in measured)


def test_an_unknown_recipe():
    with pytest.raises(ValueError, match="Unknown augmentation 'domainbd'; did you mean 'domainbed'"):
        check(RunConfig(augment="domainbd"))
