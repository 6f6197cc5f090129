"""MCGDM: gradients of a linear head in closed form, their distance, the heads of the last round; and augmented views."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from client import BACKBONE, examples_of, fresh, one_batch, programs
from tiny import tiny_backbone, tiny_federation

from fedjax_dg import augment, make_round, tree
from fedjax_dg.algorithms import FedAvgHparams, MCGDMHparams, fedavg, mcgdm
from fedjax_dg.algorithms.common import momentum
from fedjax_dg.algorithms.mcgdm import Head, HeadGradient, cosd, head_gradient
from fedjax_dg.augment import rand_augment
from fedjax_dg.backbones import Backbone
from fedjax_dg.types import Examples, Received, Topology

LR = 0.05
KEY = jax.random.key(0)


def normal(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


# --- gradients of a linear head -------------------------------------------------------------------------------------


def labelled(labels, mask):
    labels, mask = jnp.asarray(labels, jnp.int32), jnp.asarray(mask, bool)
    return Examples(jnp.zeros((len(labels), 1)), labels, mask, jnp.zeros_like(labels))


def test_the_closed_form_is_what_autodiff_gives():
    """Padding, of any features and label, counts nothing."""
    z, kernel, bias = normal(6, 5), normal(5, 3, seed=1), normal(3, seed=2)
    batch = labelled([0, 2, 1, 2, 99, 0], [1, 1, 1, 0, 0, 1])

    def loss(kernel, bias):
        rows = np.array([0, 1, 2, 5])
        return optax.softmax_cross_entropy_with_integer_labels(z[rows] @ kernel + bias, batch.labels[rows]).mean()

    expected = HeadGradient(*jax.grad(loss, (0, 1))(kernel, bias))
    found = head_gradient(jnp.where(batch.mask[:, None], z, 1e3 * z), z @ kernel + bias, batch)
    chex.assert_trees_all_close(found, expected, rtol=1e-4, atol=1e-6)


def test_an_empty_batch_has_no_gradient():
    gradient = head_gradient(normal(2, 5), normal(2, 3), labelled([0, 1], [0, 0]))
    chex.assert_trees_all_equal(gradient, HeadGradient(jnp.zeros((5, 3)), jnp.zeros(3)))


def drawn_gradient(seed):
    return HeadGradient(normal(5, 3, seed=seed), normal(3, seed=seed + 10))


def cosd_by_hand(one, other):
    cos = lambda a, b: a @ b / (np.linalg.norm(a) * np.linalg.norm(b))
    one, other = (jax.tree.map(np.float64, gradient) for gradient in (one, other))
    of_classes = [1 - cos(a, b) for a, b in zip(one.kernel.T, other.kernel.T)]
    return (np.mean(of_classes) + 1 - cos(one.bias, other.bias)) / 2


def test_the_distance_is_a_mean_over_classes_and_a_mean_of_kernel_and_bias():
    one, other = drawn_gradient(0), drawn_gradient(1)
    assert cosd(one, other) == pytest.approx(cosd_by_hand(one, other), rel=1e-5)
    assert cosd(one, other._replace(bias=7 * other.bias)) == pytest.approx(float(cosd(one, other)), rel=1e-5)


def test_gradients_alike_are_at_0_and_opposite_ones_at_2():
    one = drawn_gradient(0)
    assert cosd(one, one) == pytest.approx(0.0, abs=1e-6)
    assert cosd(one, jax.tree.map(lambda x: -3 * x, one)) == pytest.approx(2.0, rel=1e-6)


@pytest.mark.parametrize("size", [0.0, 1e-20, 1e-3])
def test_without_a_gradient_the_distance_is_1_and_can_be_differentiated(size):
    small = jax.tree.map(lambda x: size * x, drawn_gradient(0))
    value, slope = jax.value_and_grad(cosd)(small, drawn_gradient(1))
    expected = cosd_by_hand(small, drawn_gradient(1)) if size == 1e-3 else 1.0
    assert value == pytest.approx(expected, rel=1e-5)
    assert all(jnp.isfinite(x).all() for x in jax.tree.leaves(slope))


# --- the loss -------------------------------------------------------------------------------------------------------


def head_of(seed=None):
    """The network's own head, or another."""
    head = fresh().params["head"]
    return head if seed is None else jax.tree.map(lambda x: normal(*x.shape, seed=seed), head)


def heads_of(*heads, trained=None):
    """[1, P]"""
    stacked = jax.tree.map(lambda *x: jnp.stack(x)[None], *heads)
    return Head({"head": stacked}, jnp.asarray([[True] * len(heads) if trained is None else trained]))


def received_by(shared=()):
    client = Head({"head": tree.zeros(fresh().params["head"])}, jnp.array(False))
    return Received(fresh(), shared, (), client, jnp.int32(0), fresh())


def take_step(hparams, shared=(), method=mcgdm, optimizer=optax.sgd):
    return programs(method, optimizer)[0](hparams, received_by(shared), one_batch(), KEY)


def two_views(params, magnitude, heads=(), a_intra=0.0, a_inter=0.0):
    """The loss by nested differentiation, with losses of the two views and the terms."""
    batch = one_batch()
    rows = np.flatnonzero(batch.mask)
    view = rand_augment(batch.inputs, jax.random.split(KEY, 3)[0], magnitude)
    features = lambda inputs: BACKBONE.features(fresh()._replace(params=params), inputs)[rows]
    strong, weak = features(view), features(batch.inputs)

    def ce(head, z):
        logits = z @ head["kernel"] + head["bias"]
        return -jax.nn.log_softmax(logits)[np.arange(len(rows)), batch.labels[rows]].mean()

    def distance(one, other):
        cos = lambda a, b: (a * b).sum(0) / jnp.sqrt((a * a).sum(0) * (b * b).sum(0))
        return (2 - cos(one["kernel"], other["kernel"]).mean() - cos(one["bias"], other["bias"])) / 2

    own = params["head"]
    target = jax.grad(ce)(own, strong)
    task = (ce(own, strong) + ce(own, weak)) / 2
    intra = distance(target, jax.grad(ce)(own, weak))
    inter = sum(distance(jax.grad(ce)(head, weak), target) for head in heads) / max(len(heads), 1)
    return task + a_intra * intra + a_inter * inter, (task, intra, inter)


@pytest.mark.parametrize(("a_intra", "a_inter"), [(0.0, 0.0), (0.7, 0.0), (0.0, 0.4), (0.7, 0.4)])
def test_loss_and_gradient_are_those_of_nested_differentiation(a_intra, a_inter):
    """With heads of two clients, and one of a client that has not trained, which does not count."""
    heads = head_of(1), head_of(2)
    after, metrics = take_step(
        MCGDMHparams(1.0, a_intra, a_inter, 0.5), heads_of(*heads, head_of(3), trained=[True, True, False])
    )
    objective = functools.partial(two_views, magnitude=0.5, heads=heads, a_intra=a_intra, a_inter=a_inter)
    (value, terms), gradient = jax.value_and_grad(objective, has_aux=True)(fresh().params)
    found = [metrics[name] for name in ("loss", "cross_entropy", "intra", "inter")]
    np.testing.assert_allclose(found, [value, *terms], rtol=1e-4, atol=1e-6)
    assert min(terms[1], terms[2]) > 1e-2
    expected = jax.tree.map(lambda p, g: p - g, fresh().params, gradient)
    chex.assert_trees_all_close(after.variables.params, expected, rtol=1e-4, atol=1e-5)


def test_views_alike_have_no_intra_distance_and_heads_alike_no_inter_distance():
    metrics = take_step(MCGDMHparams(LR, magnitude=0.0), heads_of(head_of(), head_of()))[1]
    assert metrics["intra"] == pytest.approx(0.0, abs=1e-6)
    assert metrics["inter"] == pytest.approx(0.0, abs=1e-6)
    metrics = take_step(MCGDMHparams(LR, magnitude=0.0), heads_of(head_of(), head_of(1)))[1]
    assert metrics["inter"] > 1e-2


@pytest.mark.parametrize("shared", [(), heads_of(head_of(1), trained=[False])])
def test_without_heads_there_is_no_inter_distance(shared):
    after, metrics = take_step(MCGDMHparams(LR, a_inter=5.0), shared)
    assert metrics["inter"] == 0.0
    expected = take_step(MCGDMHparams(LR, a_inter=0.0), shared)[0]
    chex.assert_trees_all_close(after.variables, expected.variables, rtol=1e-6, atol=1e-7)


def test_without_penalties_and_with_views_alike_it_is_fedavg():
    hparams = MCGDMHparams(LR, 0.0, 0.0, 0.0)
    mine = programs(mcgdm, momentum)[1](hparams, received_by(), examples_of(), KEY)[0]
    plain = programs(fedavg, momentum)[1](FedAvgHparams(LR), received_by()._replace(origin=()), examples_of(), KEY)[0]
    chex.assert_trees_all_close(mine.local.variables, plain.local.variables, rtol=1e-5, atol=1e-6)


def test_both_views_move_batch_statistics_the_strong_one_first():
    backbone = tiny_backbone("batch")
    start, batch = fresh(backbone), one_batch()
    received = received_by()._replace(variables=start)
    after = programs(mcgdm, optax.sgd, backbone)[0](MCGDMHparams(0.0, magnitude=0.9), received, batch, KEY)[0]
    view = rand_augment(batch.inputs, jax.random.split(KEY, 3)[0], 0.9)
    for inputs in (view, batch.inputs):
        start = start._replace(batch_stats=backbone.forward(start, inputs, batch.mask, KEY).batch_stats)
    chex.assert_trees_all_close(after.variables.batch_stats, start.batch_stats, rtol=1e-5)


# --- the heads ------------------------------------------------------------------------------------------------------


@functools.cache
def case():
    """Two rounds: the states after each, and metrics."""
    federation = tiny_federation([[3, 5, 2], [4, 0, 6]], batch_size=2)
    round_fn = make_round(BACKBONE, mcgdm(MCGDMHparams(LR)), federation.topology)
    step = jax.jit(round_fn.step)
    state, states, infos = round_fn.init(KEY), [], []
    for _ in range(2):
        state, info = step(state, federation.data, KEY)
        states.append(state)
        infos.append(info)
    return round_fn, states, infos


def test_clients_keep_the_heads_they_trained():
    """Those that were averaged: local ones, of clients with data."""
    _, states, infos = case()
    trained = np.array([[True, True, True], [True, False, True]])
    sizes = np.array([[3, 5, 2], [4, 0, 6]]) / 20
    for state in states:
        assert state.shared == ()
        np.testing.assert_array_equal(state.clients.trained, trained)
        heads = state.clients.params["head"]
        mean = jax.tree.map(lambda x: np.einsum("sc,sc...->...", sizes, x), heads)
        chex.assert_trees_all_close(mean, state.variables.params["head"], rtol=1e-4, atol=1e-6)
        assert abs(heads["kernel"][0, 0] - heads["kernel"][0, 1]).max() > 1e-3
    assert not infos[0].metrics["inter"].any()
    assert (np.asarray(infos[1].metrics["inter"])[trained] > 1e-4).all()


def test_of_several_station_rounds_the_last_heads_count():
    """With one client to a station they are their models'."""
    federation = tiny_federation([[3], [5]], batch_size=4, station_rounds=2)
    round_fn = make_round(BACKBONE, mcgdm(MCGDMHparams(LR)), federation.topology)
    state = jax.jit(round_fn.step)(round_fn.init(KEY), federation.data, KEY)[0]
    mean = jax.tree.map(lambda x: (3 * x[0, 0] + 5 * x[1, 0]) / 8, state.clients.params["head"])
    chex.assert_trees_all_close(mean, state.variables.params["head"], rtol=1e-5, atol=1e-6)


def test_all_heads_reach_everyone_and_none_stays():
    """Each client's own one of the round before, in the places of this round's participants."""
    round_fn, states, _ = case()
    clients, method = states[0].clients, round_fn.algorithm
    one = tree.take(clients, (0, 1))
    assert method.survey(BACKBONE, None, one, None, KEY) == (one, one)
    shared, stations = method.digest((), ("kept",), clients, None)
    chex.assert_trees_all_equal(shared, clients)
    assert method.absorb(shared, stations, (), None) == ((), ("kept",))


def test_networks_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"mcgdm augments images, but this network takes inputs of shape \(8,\)"):
        make_round(Backbone(None, (8,), 5, 3), mcgdm(), Topology(1, 1))
    params = {**fresh().params, "head": {"kernel": jnp.zeros((5, 3)), "scale": jnp.zeros(3)}}
    with pytest.raises(ValueError, match="needs a linear head, but this network's has kernel, scale"):
        mcgdm().init(BACKBONE, fresh()._replace(params=params), KEY)


# --- augmented views ------------------------------------------------------------------------------------------------

PIXELS = np.random.default_rng(3).integers(0, 256, (16, 9, 7, 3)).astype(np.uint8)
FLOATS = normal(16, 6, 6, 2, seed=4)
IMAGE = jnp.asarray(PIXELS[0] / 255.0, jnp.float32)
augmented = jax.jit(rand_augment, static_argnames="num_ops")


@pytest.mark.parametrize("images", [PIXELS, FLOATS], ids=["pixels", "floats"])
def test_magnitude_0_changes_nothing(images):
    np.testing.assert_array_equal(augmented(jnp.asarray(images), KEY, 0.0), images)


@pytest.mark.parametrize("images", [PIXELS, FLOATS], ids=["pixels", "floats"])
def test_an_image_is_augmented_by_itself(images):
    """Its operations depend on its row and the key alone; the dtype stays, and most images change."""
    images = jnp.asarray(images)
    out = augmented(images, KEY, 0.7)
    assert (out.dtype, out.shape) == (images.dtype, images.shape)
    np.testing.assert_allclose(augmented(images[:5], KEY, 0.7), out[:5], atol=1e-6)
    same = lambda one, other: (np.asarray(one) == np.asarray(other)).all((1, 2, 3)).sum()
    assert same(out, images) <= 6
    assert same(out, augmented(images, jax.random.key(1), 0.7)) <= 6
    assert jnp.isfinite(out.astype(jnp.float32)).all()


def test_every_operation_is_drawn():
    """Of one image: as many results as operations, directions and places of cuts give, for each about alike."""
    images = jnp.asarray(np.tile(PIXELS[:1], (300, 1, 1, 1)))
    out = np.asarray(augmented(images, KEY, 1.0, num_ops=1)).reshape(300, -1)
    found, counts = np.unique(out, axis=0, return_counts=True)
    # identity, posterize, solarize of 1/13 each; four with a sign and five moves with one, of 1/26 each
    assert len(found[counts > 4]) >= 20
    assert counts.max() < 60


def test_floats_are_not_clipped_and_have_no_levels():
    images = 100.0 * FLOATS + 300.0
    out = augmented(images, KEY, 0.5, num_ops=1)
    assert out.max() > 400.0
    assert len(augment.COLOURING) == 5 and len(augment.LEVELLING) == 2


def test_magnitudes_side_by_side():
    images = jnp.asarray(PIXELS)
    both = jax.vmap(lambda magnitude: augmented(images, KEY, magnitude))(jnp.array([0.0, 0.4]))
    np.testing.assert_array_equal(both[0], images)
    assert abs(both[1].astype(int) - augmented(images, KEY, 0.4).astype(int)).max() <= 1


def smooth_by_hand(image):
    out = np.array(image)
    for i in range(1, image.shape[0] - 1):
        for j in range(1, image.shape[1] - 1):
            out[i, j] = (image[i - 1 : i + 2, j - 1 : j + 2].sum((0, 1)) + 4 * image[i, j]) / 13
    return out


OTHERS = {  # what an operation goes away from, or towards
    0: lambda x: x,
    1: np.zeros_like,
    2: lambda x: np.full_like(x, (x @ np.array([0.299, 0.587, 0.114])).mean()),
    3: lambda x: np.repeat((x @ np.array([0.299, 0.587, 0.114]))[..., None], 3, -1),
    4: smooth_by_hand,
}


@pytest.mark.parametrize("number", OTHERS)
@pytest.mark.parametrize("strength", [0.5, -1.0])
def test_colours_by_hand(number, strength):
    image = np.asarray(IMAGE, np.float64)
    other = OTHERS[number](image)
    expected = other + (1 + 0.9 * strength) * (image - other)
    np.testing.assert_allclose(augment.COLOURING[number](IMAGE, jnp.float32(strength)), expected, atol=1e-5)


def test_levels_by_hand():
    levels = np.asarray(augment.posterize(IMAGE, jnp.float32(-0.5))) * 255
    np.testing.assert_allclose(levels, PIXELS[0] // 4 * 4, atol=1e-3)
    inverted = np.asarray(augment.solarize(IMAGE, jnp.float32(0.25))) * 255
    np.testing.assert_allclose(
        inverted, np.where(PIXELS[0] > 0.75 * 255, 255 - PIXELS[0].astype(int), PIXELS[0]), atol=1e-3
    )
    np.testing.assert_allclose(
        augment.solarize(IMAGE, jnp.float32(1.0)), np.where(IMAGE > 0, 1 - IMAGE, IMAGE), atol=1e-6
    )


def moved(number, strength, image=IMAGE, fill=0.5):
    matrices, shifts = augment.moves(jnp.float32(strength), image.shape)
    return np.asarray(augment.warp(image, matrices[number], shifts[number], fill))


@pytest.mark.parametrize(("strength", "pixels"), [(1.0, 9), (-1 / 3, -3)])
@pytest.mark.parametrize(("number", "axis"), [(2, 1), (3, 0)])
def test_translations_move_whole_pixels(number, axis, strength, pixels):
    """0.45 of a side; what comes in is the fill."""
    image = normal(20, 20, 3)
    expected = np.roll(np.asarray(image), -pixels, axis)
    entered = slice(20 - pixels, 20) if pixels > 0 else slice(0, -pixels)
    expected[(entered, slice(None)) if axis == 0 else (slice(None), entered)] = 0.5
    np.testing.assert_allclose(moved(number, strength, image), expected, atol=1e-4)


def test_shears_and_rotations_turn_around_the_middle():
    image = normal(5, 5, 1)
    turned = augment.warp(image, jnp.array([[0.0, 1.0], [-1.0, 0.0]]), jnp.zeros(2), 0.0)
    np.testing.assert_allclose(turned, np.rot90(image), atol=1e-6)
    sheared = np.asarray(augment.warp(image, jnp.array([[1.0, 0.0], [1.0, 1.0]]), jnp.zeros(2), 0.0))
    np.testing.assert_allclose(sheared[2], image[2], atol=1e-6)
    np.testing.assert_allclose(sheared[3], np.append(image[3, 1:], [[0.0]], 0), atol=1e-6)
    matrices, shifts = augment.moves(jnp.float32(-0.5), (5, 5, 1))
    cos, sin = np.cos(np.pi / 12), np.sin(np.pi / 12)
    np.testing.assert_allclose(matrices[0], [[1, 0], [-0.15, 1]], atol=1e-6)
    np.testing.assert_allclose(matrices[1], [[1, -0.15], [0, 1]], atol=1e-6)
    np.testing.assert_allclose(matrices[4], [[cos, -sin], [sin, cos]], atol=1e-6)
    np.testing.assert_array_equal(matrices[augment.MOVES], np.eye(2))
    assert not shifts[jnp.array([0, 1, 4, 5])].any()


def test_between_pixels_neighbours_are_averaged():
    image = normal(6, 8, 2)
    out = augment.warp(image, jnp.eye(2), jnp.array([0.25, -0.5]), 0.0)
    rows = 0.75 * image[:-1] + 0.25 * image[1:]
    np.testing.assert_allclose(out[:-1, 1:], (rows[:, 1:] + rows[:, :-1]) / 2, atol=1e-5)


def test_a_square_is_cut_out():
    """Of half the shorter side at most, around any place: less of it where it reaches the border."""
    cuts = np.stack([augment.cut(key, jnp.float32(-1.0), (20, 30, 3)) for key in jax.random.split(KEY, 40)])
    sizes = cuts.sum((1, 2, 3))
    assert sizes.max() == 100 and sizes.min() >= 20
    for one in cuts:
        rows, columns = one.any((1, 2)), one.any((0, 2))
        np.testing.assert_array_equal(one[..., 0], np.outer(rows, columns))
        assert np.ptp(np.flatnonzero(rows)) < 10 and np.ptp(np.flatnonzero(columns)) < 10
    assert cuts.any(0).mean() > 0.9
    assert not augment.cut(KEY, jnp.float32(0.0), (20, 30, 3)).any()
