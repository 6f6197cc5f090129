"""ELCFS and CCST: exchanged amplitudes and transferred styles against numpy; what they keep, and what clients are given."""

import dataclasses
import functools
import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from client import BACKBONE, fresh, one_batch, programs
from flax import linen as nn
from tiny import TINY_CODEC, TinyNet, tiny_federation

from fedjax_dg import make_round, run, sharding
from fedjax_dg.algorithms import (
    CCSTHparams,
    ELCFSHparams,
    FedAvgHparams,
    ccst,
    elcfs,
    fedavg,
    keep_batch_stats,
    keep_optimizer,
)
from fedjax_dg.algorithms.ccst import Style, adain, load_codec, moments, pooled
from fedjax_dg.algorithms.common import OPTIMIZERS, classify
from fedjax_dg.algorithms.elcfs import Bank, amplitudes_of, collect, draw, exchange, low_frequencies
from fedjax_dg.cells import compile_block
from fedjax_dg.config import RunConfig, build_algorithm, check
from fedjax_dg.run import FURNISHING, furnish, over_numbers, run_stage
from fedjax_dg.types import Examples, Local, Received, Workshop

LR = 0.05
KEY = jax.random.key(1)
SGD = OPTIMIZERS["sgd"]
WINDOWS = (0.0, 0.2, 0.4, 0.5, 0.7)
SIZES = ((6, 6), (7, 7), (5, 8), (8, 5))
ANY = [(size, window) for size in SIZES for window in WINDOWS]


def images(*shape, seed=0):
    """Pixels in [0, 1]."""
    return np.random.default_rng(seed).uniform(size=shape).astype(np.float32)


# --- ELCFS: the exchange --------------------------------------------------------------------------------------------


@functools.cache
def exchanged(window):
    """``exchange`` with the amplitudes of other images, of that window, compiled once for every size."""

    def one(x, other, t):
        frequencies = low_frequencies(x.shape[1:], window)
        return exchange(x, amplitudes_of(other, frequencies), t, frequencies)

    return jax.jit(one)


def naive_exchange(x, other, t, b):
    """Of one channel, as it is written: centred, a square cut out, amplitudes and phases put together again."""
    centre = [n // 2 for n in x.shape]
    spectrum, theirs = (np.fft.fftshift(np.fft.fft2(image.astype(np.float64))) for image in (x, other))
    amplitude, phase = np.abs(spectrum), np.angle(spectrum)
    rows, columns = (slice(max(c - b, 0), c + b + 1) for c in centre)
    amplitude[rows, columns] = (1 - t) * amplitude[rows, columns] + t * np.abs(theirs)[rows, columns]
    made = np.fft.ifft2(np.fft.ifftshift(amplitude * np.exp(1j * phase)))
    assert np.abs(made.imag).max() < 1e-12
    return made.real


@pytest.mark.parametrize(("size", "window"), ANY)
def test_the_exchange_is_the_papers(size, window):
    x, other, t = images(2, *size, 3), images(2, *size, 3, seed=1), np.float32([0.3, 1.0])
    b = min(int(window * min(size)), min(size) // 2)
    made = exchanged(window)(x, other, t)
    for row in range(2):
        for channel in range(3):
            expected = naive_exchange(x[row, ..., channel], other[row, ..., channel], t[row], b)
            np.testing.assert_allclose(made[row, ..., channel], expected, atol=2e-6)
    assert np.abs(made - x).max() > 1e-3


@pytest.mark.parametrize(("size", "window"), ANY)
def test_no_share_or_its_own_amplitudes_change_nothing(size, window):
    x, other = images(2, *size, 3), images(2, *size, 3, seed=1)
    np.testing.assert_allclose(exchanged(window)(x, other, np.zeros(2, np.float32)), x, atol=1e-6)
    np.testing.assert_allclose(exchanged(window)(x, x, np.ones(2, np.float32)), x, atol=1e-6)


def test_without_a_window_the_mean_moves_all_the_same():
    """x_t = x + t (mean x_j - mean x), per channel."""
    x, other, t = images(3, 6, 6, 2), 0.3 * images(3, 6, 6, 2, seed=1), np.float32([0.0, 0.4, 1.0])
    move = other.mean((1, 2)) - x.mean((1, 2))
    expected = x + (t[:, None] * move)[:, None, None]
    np.testing.assert_allclose(exchanged(0.0)(x, other, t), expected, atol=1e-6)
    assert np.abs(move).min() > 0.1


@pytest.mark.parametrize("window", WINDOWS)
def test_a_constant_image_takes_the_others_constant(window):
    x, other = np.full((1, 7, 7, 1), 0.2, np.float32), np.full((1, 7, 7, 1), 0.9, np.float32)
    np.testing.assert_allclose(exchanged(window)(x, other, np.ones(1, np.float32)), other, atol=1e-6)


def test_a_frequency_without_amplitude_stays_without():
    """A constant image has a phase at zero only: nothing else is made of rounding."""
    x = np.full((1, 8, 8, 1), 0.3, np.float32)
    made = exchanged(0.4)(x, images(1, 8, 8, 1), np.ones(1, np.float32))
    np.testing.assert_allclose(made, np.full(x.shape, images(1, 8, 8, 1).mean()), atol=1e-6)
    black = exchanged(0.4)(0 * x, images(1, 8, 8, 1), np.ones(1, np.float32))
    assert not np.asarray(black).any()


def test_only_the_window_of_the_spectrum_changes_and_no_phase():
    x, other = images(1, 8, 8, 1), images(1, 8, 8, 1, seed=1)
    before, after = (
        np.fft.fft2(np.asarray(i)[0, ..., 0]) for i in (x, exchanged(0.3)(x, other, np.ones(1, np.float32)))
    )
    moved = np.abs(np.abs(after) - np.abs(before)) > 1e-4
    assert moved.sum() == 5**2  # b = 2
    assert sorted(np.flatnonzero(moved.any(0))) == sorted(np.flatnonzero(moved.any(1))) == [0, 1, 2, 6, 7]
    np.testing.assert_allclose(np.angle(after), np.angle(before), atol=1e-4)


@pytest.mark.parametrize(
    ("size", "window", "sides"),
    [
        (224, 0.003, (1, 1)),
        (384, 0.003, (3, 3)),
        (100, 0.29, (59, 59)),  # 0.29 x 100 is a little less than 29
        (8, 0.7, (8, 8)),
        (7, 3.0, (7, 7)),
        ((6, 10), 0.4, (5, 5)),
        ((6, 10), 0.9, (6, 7)),
    ],
)
def test_the_window_grows_with_the_shorter_side(size, window, sides):
    shape = (size, size) if isinstance(size, int) else size
    assert tuple(len(side) for side in low_frequencies((*shape, 3), window)) == sides


# --- ELCFS: the bank ------------------------------------------------------------------------------------------------

FREQUENCIES = low_frequencies((6, 6, 2), 0.2)
SIZES_OF_CLIENTS = [[3, 17, 8, 9], [20, 0, 1, 12]]


@functools.cache
def collector(size, mesh):
    def made(*given):
        with sharding.under(mesh):
            return collect(*given, size=size, frequencies=FREQUENCIES)

    return jax.jit(made)


@functools.cache
def bank_of(size, mesh=None, padding=0, order=None):
    """The bank of the tiny federation; ``order``: where its clients are placed."""
    data = tiny_federation(SIZES_OF_CLIENTS, padding=padding, fill=np.nan).data
    if order is not None:
        data = jax.tree.map(lambda x: x[np.arange(2)[:, None], np.array(order)], data)
    return collector(size, mesh)(*sharding.place_data(data, mesh), KEY)


def test_every_client_shares_an_eighth_of_its_images():
    bank = bank_of(32)
    offered = {i: -(-n // 8) for i, n in enumerate(np.ravel(SIZES_OF_CLIENTS))}
    owners = np.asarray(bank.owner)[np.asarray(bank.valid)]
    assert {i: (owners == i).sum() for i in offered} == offered
    assert bank.dropped == 0
    clients = tiny_federation(SIZES_OF_CLIENTS).clients
    for place in np.flatnonzero(bank.valid):
        here = np.unravel_index(bank.owner[place], (2, 4))
        own = np.asarray(clients.inputs[here])[np.asarray(clients.mask[here])]
        spectra = np.abs(np.fft.fft2(own, axes=(1, 2)))[:, FREQUENCIES[0][:, None], FREQUENCIES[1]]
        assert np.abs(spectra - bank.amplitudes[place]).max((1, 2, 3)).min() < 1e-4
    two = np.asarray(bank.amplitudes)[np.flatnonzero(np.asarray(bank.owner) == 1)[:2]]
    assert np.abs(two[0] - two[1]).max() > 0.1  # not the same image again
    assert bank.amplitudes.shape == (32, 3, 3, 2) and not np.asarray(bank.amplitudes)[~np.asarray(bank.valid)].any()


@pytest.mark.parametrize(("size", "owners"), [(9, [0, 1, 2, 3, 4, 6, 7, 1, 3]), (3, [0, 1, 2])])
def test_a_small_bank_takes_everyones_first_image_first(size, owners):
    bank = bank_of(size)
    np.testing.assert_array_equal(bank.owner, owners)
    assert bank.valid.all()
    assert bank.dropped == 1 + 3 + 1 + 2 + 3 + 0 + 1 + 2 - size
    full = bank_of(32)
    np.testing.assert_array_equal(bank.amplitudes, full.amplitudes[:size])


def test_places_padding_and_devices_do_not_matter_to_the_bank():
    bank = bank_of(9)
    chex.assert_trees_all_equal(bank_of(9, padding=2), bank)
    chex.assert_trees_all_equal(bank_of(9, order=((3, 1, 0, 2), (1, 0, 3, 2))), bank)
    mesh = sharding.mesh_for(tiny_federation(SIZES_OF_CLIENTS).topology, jax.devices())
    assert mesh.size == 8
    spread = bank_of(9, mesh=mesh)
    chex.assert_trees_all_close(spread, bank, rtol=1e-6)
    assert all(leaf.sharding.is_fully_replicated for leaf in spread)


def bank_with(amplitudes, owner, valid=None):
    valid = np.ones(len(owner), bool) if valid is None else np.array(valid)
    return Bank(jnp.asarray(amplitudes), jnp.array(owner, jnp.int32), jnp.asarray(valid), jnp.int32(0))


@pytest.mark.parametrize(
    ("client", "own", "valid", "drawn"),
    [
        (0, False, (1, 1, 1, 1), {1, 2}),
        (0, True, (1, 1, 1, 1), {0, 1, 2, 3}),
        (0, True, (1, 0, 1, 0), {0, 2}),
        (5, False, (1, 1, 1, 1), {2}),
        (5, False, (1, 1, 0, 1), {0, 1, 3}),
    ],
    ids=["of others", "of all", "of what is there", "of the only other", "of all, as there is no other"],
)
def test_whose_amplitudes_a_client_draws(client, own, valid, drawn):
    owner = (0, 5, 7, 0) if client == 0 else (5, 5, 7, 5)
    bank = bank_with(np.zeros((4, 1, 1, 1), np.float32), owner, np.array(valid, bool))
    picked, found = draw(bank, jnp.int32(client), own, 200, KEY)
    assert found and set(np.asarray(picked).tolist()) == drawn
    assert np.bincount(picked).max() < 1.5 * 200 / len(drawn)


def test_an_empty_bank_has_nothing():
    assert not draw(bank_with(np.zeros((2, 1, 1, 1), np.float32), (0, 1), (False, False)), jnp.int32(0), False, 3, KEY)[
        1
    ]


# --- ELCFS: the step ------------------------------------------------------------------------------------------------


def received_of(bank, variables=None, client=0):
    client = jnp.int32(client)
    return Received(fresh() if variables is None else variables, bank, (), client)


def full(hparams, optimizer):
    """All of the only other amplitude: nothing is left to chance."""
    return elcfs(hparams, optimizer, mixing="full", bank=2)


OTHER = images(1, 6, 6, 2, seed=3)
OF_OTHER = bank_with(np.concatenate([0 * OTHER, 0.5 + OTHER]).sum((1, 2), keepdims=True), (0, 1))
NOTHING = bank_with(np.zeros((2, 1, 1, 2), np.float32), (0, 1), (False, False))


@jax.jit
def by_hand(batch, hparams, bank):
    """The new parameters, and the two losses, from gradients at w and at w'."""
    received = received_of(bank)
    params, local = received.variables.params, Local(received.variables, (), (), ())
    loss = jax.value_and_grad(lambda params, batch: classify(BACKBONE, params, local, batch, KEY)[0])
    value, gradient = loss(params, batch)
    beta, c = hparams.meta_lr, hparams.clip
    ahead = jax.tree.map(lambda w, g: w - beta * jnp.clip(g, -c, c), params, gradient)
    mean = batch.inputs.mean((1, 2), keepdims=True)
    moved = batch.inputs + jnp.sign(mean) * bank.amplitudes[1] / 36 - mean
    moved = jnp.where(bank.valid[1] & batch.mask[:, None, None, None], moved, batch.inputs)
    outer, other = loss(ahead, batch._replace(inputs=moved))
    return jax.tree.map(lambda w, g, h: w - hparams.client_lr * (g + h), params, gradient, other), value, outer


@pytest.mark.parametrize(
    "hparams",
    [ELCFSHparams(LR, 0.0), ELCFSHparams(LR, 0.8), ELCFSHparams(LR, 0.8, 0.02)],
    ids=["no step ahead", "ahead", "clipped"],
)
def test_a_step_descends_both_losses_to_first_order(hparams):
    """Images here have means of both signs, so the amplitude at frequency zero comes back with their sign."""
    batch = one_batch()
    local, metrics = programs(full, SGD)[0](hparams, received_of(OF_OTHER), batch, KEY)
    after, value, outer = by_hand(batch, hparams, OF_OTHER)
    chex.assert_trees_all_close(local.variables.params, after, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(metrics["cross_entropy"], value, rtol=1e-5)
    np.testing.assert_allclose(metrics["outer"], outer, rtol=1e-5)
    np.testing.assert_allclose(metrics["loss"], value + outer, rtol=1e-5)


def test_the_steps_ahead_differ():
    """Else the test above could not tell them apart."""
    hparams = (ELCFSHparams(LR, 0.0), ELCFSHparams(LR, 0.8), ELCFSHparams(LR, 0.8, 0.02))
    outer = [float(by_hand(one_batch(), h, OF_OTHER)[2]) for h in hparams]
    assert min(abs(outer[0] - outer[1]), abs(outer[1] - outer[2]), abs(outer[0] - outer[2])) > 1e-3
    assert abs(outer[0] - float(by_hand(one_batch(), hparams[0], NOTHING)[2])) > 1e-2


def test_with_an_empty_bank_and_no_step_ahead_it_is_fedavg_at_twice_the_rate():
    received, batch = received_of(NOTHING), one_batch()
    local, metrics = programs(full, SGD)[0](ELCFSHparams(LR, 0.0), received, batch, KEY)
    other, plain = programs(fedavg, SGD)[0](FedAvgHparams(2 * LR), received, batch, KEY)
    chex.assert_trees_all_close(local.variables, other.variables, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(metrics["loss"], 2 * plain["loss"], rtol=1e-6)


def test_shares_are_drawn_anew_for_every_image_and_step():
    """l(w'; x_t) is neither that of no exchange nor of a full one, and changes with the key."""
    step = programs(functools.partial(elcfs, bank=2), SGD)[0]
    outer = [
        step(ELCFSHparams(LR, 0.0), received_of(OF_OTHER), one_batch(), jax.random.key(k))[1]["outer"] for k in (1, 2)
    ]
    plain, whole = (float(by_hand(one_batch(), ELCFSHparams(LR, 0.0), bank)[2]) for bank in (NOTHING, OF_OTHER))
    assert min(abs(a - b) for a, b in itertools.combinations([*outer, plain, whole], 2)) > 1e-4


class Normed(TinyNet):
    """With batch norm first."""

    @nn.compact
    def maps(self, x, train, mask=None):
        where = None if mask is None else mask[:, None, None, None]
        x = nn.BatchNorm(momentum=0.9)(x, use_running_average=not train, mask=where)
        return super().maps(x, train, mask)


def test_batch_statistics_are_those_of_the_first_pass():
    backbone = dataclasses.replace(BACKBONE, module=Normed(), groups=())
    received = received_of(OF_OTHER, jax.jit(backbone.init)(KEY))
    local, _ = programs(full, SGD, backbone)[0](ELCFSHparams(LR), received, one_batch(), KEY)
    other, _ = programs(fedavg, SGD, backbone)[0](FedAvgHparams(LR), received, one_batch(), KEY)
    chex.assert_trees_all_close(local.variables.batch_stats, other.variables.batch_stats, rtol=1e-6)


def heard(dtype_of=lambda x: x):
    """A backbone that hands its second pass's inputs out as the gradient of a weight: y = <w, x>, linear and alone."""

    class Linear(nn.Module):
        def setup(self):
            self.head = nn.Dense(3, use_bias=False)

        def features(self, x, train, mask=None):
            return x.reshape(x.shape[0], -1)

        def classify(self, z):
            return self.head(z)

        def __call__(self, x, train):
            return self.classify(self.features(x, train))

    return dataclasses.replace(BACKBONE, module=Linear(), groups=(), num_features=72, transform=dtype_of)


@pytest.mark.parametrize(("amplitude", "shade"), [(36 * 0.5, 0.5), (36 * 3.0, 1.0)], ids=["within", "clipped"])
def test_uint8_images_are_exchanged_as_shares_of_white_and_stay_uint8(amplitude, shade):
    seen = []

    def transform(x):
        if x.dtype == jnp.uint8:
            jax.debug.callback(lambda x: seen.append(np.asarray(x)), x, ordered=True)
            return x / jnp.float32(255)
        return x

    backbone = heard(transform)
    pixels = np.full((2, 6, 6, 2), 51, np.uint8)
    pixels[1] = 200
    batch = Examples(jnp.asarray(pixels), jnp.array([0, 1]), jnp.ones(2, bool), jnp.zeros(2, jnp.int32))
    variables = jax.jit(backbone.init)(KEY)
    bank = bank_with(np.full((2, 1, 1, 2), amplitude, np.float32), (0, 1))
    for given in (bank, bank._replace(valid=jnp.zeros(2, bool))):
        programs(full, SGD, backbone)[0](ELCFSHparams(LR), received_of(given, variables), batch, KEY)
    jax.effects_barrier()
    first, second, _, same = seen
    np.testing.assert_array_equal(first, pixels)
    np.testing.assert_array_equal(second, np.full_like(pixels, round(255 * shade)))
    np.testing.assert_array_equal(same, pixels)


# --- ELCFS: a run ---------------------------------------------------------------------------------------------------

RUN_SIZES = [[3, 5, 2, 4], [4, 0, 6, 1]]


def run_of(algorithm, mesh=None, chunk=1):
    federation = tiny_federation(RUN_SIZES, padding=1, fill=np.nan, batch_size=3)
    federation = dataclasses.replace(
        federation, clients=sharding.place_data(federation.clients, mesh), ids=sharding.place_data(federation.ids, mesh)
    )
    round_fn = make_round(BACKBONE, algorithm, federation.topology, mesh=mesh, chunk=chunk)
    start = round_fn.init(KEY)
    shapes = jax.tree.map(lambda x: (x.shape, x.dtype, x.sharding), start)
    state, history = run(round_fn, start, federation, 2, KEY)
    assert jax.tree.map(lambda x: (x.shape, x.dtype, x.sharding), state) == shapes
    return state, history


@functools.cache
def elcfs_run():
    return run_of(elcfs(window=0.2, bank=9))


def test_a_run_starts_with_the_bank_and_clients_that_know_their_id():
    state, history = elcfs_run()
    np.testing.assert_array_equal(state.clients, np.arange(8).reshape(2, 4))
    np.testing.assert_array_equal(state.shared.owner[:7], [0, 1, 2, 3, 4, 6, 7])
    np.testing.assert_array_equal(state.shared.valid, np.arange(9) < 7)
    assert state.shared.amplitudes.shape == (9, 3, 3, 2)
    assert np.isfinite(history[-1]["train_outer"])


def test_a_run_on_a_mesh_is_the_same():
    mesh = sharding.mesh_for(tiny_federation(RUN_SIZES).topology, jax.devices())
    assert mesh.size == 8
    spread, alone = (sharding.fetch(reached[0]) for reached in (run_of(elcfs(window=0.2, bank=9), mesh), elcfs_run()))
    chex.assert_trees_all_close(spread, alone, rtol=1e-5, atol=1e-6)


def test_what_a_client_keeps_beside_its_id_stays():
    federation = tiny_federation(RUN_SIZES, padding=1, fill=np.nan)
    algorithm = keep_optimizer(keep_batch_stats(elcfs(window=0.2, bank=9)))
    round_fn = make_round(BACKBONE, algorithm, federation.topology)
    start = round_fn.init(KEY)
    workshop = Workshop(round_fn.topology, round_fn.chunk, run_stage)
    state = round_fn.algorithm.prepare(BACKBONE, start, federation.data, KEY, workshop)
    (ids, stats), momentum = state.clients
    np.testing.assert_array_equal(ids, federation.ids)
    chex.assert_trees_all_equal((stats, momentum), (start.clients[0][1], start.clients[1]))
    chex.assert_trees_all_equal(state.shared, elcfs_run()[0].shared)


def test_elcfs_refuses_what_it_cannot_do():
    with pytest.raises(ValueError, match="Unknown mixing 'uniforn'; did you mean 'uniform'"):
        elcfs(mixing="uniforn")
    tokens = dataclasses.replace(BACKBONE, input_shape=(16,))
    for method in (elcfs(), ccst(codec=TINY_CODEC)):
        with pytest.raises(ValueError, match=r"works on images .* of shape \(16,\): choose an image backbone"):
            method.adapt(tokens)
    with pytest.raises(ValueError, match="bank=0 is not positive"):
        check(RunConfig(algorithm="elcfs", settings={"bank": "0"}))


# --- CCST: styles ---------------------------------------------------------------------------------------------------


def test_features_take_the_mean_and_deviation_of_a_style():
    features, style = images(5, 4, 3), Style(jnp.array([1.0, -2.0, 0.0]), jnp.array([0.5, 2.0, 0.1]))
    made = np.asarray(adain(jnp.asarray(features), style))
    np.testing.assert_allclose(made.mean((0, 1)), style.mean, atol=1e-6)
    np.testing.assert_allclose(made.std((0, 1)), style.std, rtol=1e-3)  # of 1e-5 in the root
    own = Style(*(jnp.asarray(x) for x in (features.mean((0, 1)), np.sqrt(features.var((0, 1)) + 1e-5))))
    np.testing.assert_allclose(adain(jnp.asarray(features), own), features, atol=1e-6)
    flat = np.full((5, 4, 3), 7.0, np.float32)
    np.testing.assert_allclose(adain(jnp.asarray(flat), style), np.broadcast_to(style.mean, flat.shape), atol=1e-5)


def test_the_statistics_of_parts_make_those_of_the_union():
    parts = [images(n, 3, seed=n) + n for n in (4, 1, 7)]
    stats = [(part.mean(0), part.var(0), len(part)) for part in parts]
    whole = np.concatenate(parts).astype(np.float64)
    made = pooled(*(jnp.asarray(np.stack(x), jnp.float32) for x in zip(*stats)))
    np.testing.assert_allclose(made, (whole.mean(0), whole.var(0)), rtol=1e-5)
    none = pooled(jnp.ones((2, 3)), jnp.ones((2, 3)), jnp.zeros(2))
    assert not np.asarray(none).any()


def test_a_large_mean_leaves_the_variance_its_digits():
    maps = images(16, 8, 8, 2) + 3000.0
    made = pooled(*jax.vmap(moments)(jnp.asarray(maps)), jnp.ones(16))[1]
    np.testing.assert_allclose(made, maps.astype(np.float64).var((0, 1, 2)), rtol=1e-3)


# --- CCST: what clients train on ------------------------------------------------------------------------------------

MIX, BACK = TINY_CODEC.params["mix"], TINY_CODEC.params["back"]
ENCODED = []  # shapes of images
CODECS = {
    "tiny": TINY_CODEC,
    # does not give back what was encoded
    "doubling": TINY_CODEC._replace(decode=lambda params, features: 2.0 * features @ params["back"]),
    "watched": TINY_CODEC._replace(encode=lambda params, x: ENCODED.append(x.shape) or TINY_CODEC.encode(params, x)),
}


@functools.cache
def painter(mesh, codec, **options):
    """``furnish`` of CCST, compiled once for its shapes and every alpha."""

    def make(hparams, *given):
        algorithm = ccst(hparams, codec=CODECS[codec], **options)
        with sharding.under(mesh):
            return algorithm.furnish(algorithm.adapt(BACKBONE), *given)

    return jax.jit(make, out_shardings=sharding.of_clients(mesh) if mesh else None)


def furnished(sizes, alpha=1.0, mesh=None, order=None, change=lambda inputs: inputs, codec="tiny", **options):
    """What the clients of a tiny federation, each with two places of NaN, hold, and what they get to train on."""
    data = tiny_federation(sizes, padding=2, fill=np.nan).data
    if order is not None:
        data = jax.tree.map(lambda x: x[np.arange(len(sizes))[:, None], np.array(order)], data)
    examples, ids = data[0]._replace(inputs=change(data[0].inputs)), data[1]
    given = sharding.place_data((examples, ids), mesh)
    return examples, painter(mesh, codec, **options)(CCSTHparams(style_alpha=alpha), *given, KEY)


@functools.cache
def everyone():
    """Three clients, K = 3: all versions of everything."""
    return furnished([[3, 4, 2]], mixing_level=3)


def naive_style(inputs):
    features = np.concatenate([(image @ MIX).reshape(-1, 2) for image in np.asarray(inputs, np.float64)])
    return features.mean(0), np.sqrt(features.var(0) + 1e-5)


def naive_version(image, style, alpha=1.0):
    features = np.asarray(image, np.float64) @ MIX
    mean, std = features.mean((0, 1)), np.sqrt(features.var((0, 1)) + 1e-5)
    made = (features - mean) / std * style[1] + style[0]
    return (alpha * made + (1 - alpha) * features) @ BACK


def own_of(examples, station=0, client=0):
    return np.asarray(examples.inputs[station, client])[np.asarray(examples.mask[station, client])]


def same(images, image):
    return [n for n, other in enumerate(images) if np.abs(other - image).max() < 1e-4]


def test_with_every_client_drawn_there_is_one_version_of_each():
    """K = M: n M examples, each original once and untouched, the other versions by hand."""
    given, made = everyone()
    assert made.inputs.shape == (1, 3, 3 * given.mask.shape[2], 6, 6, 2)
    styles = [naive_style(own_of(given, 0, c)) for c in range(3)]
    for c, n in enumerate((3, 4, 2)):
        images_of = own_of(made, 0, c)
        assert len(images_of) == 3 * n
        for row, image in enumerate(own_of(given, 0, c)):
            versions = images_of[3 * row : 3 * row + 3]
            assert sum((version == image).all() for version in versions) == 1
            for donor in {0, 1, 2} - {c}:
                assert len(same(versions, naive_version(image, styles[donor]))) == 1
    real = np.asarray(made.mask)
    for field in ("labels", "domain", "mask"):
        expected = np.repeat(np.asarray(getattr(given, field)), 3, axis=-1)
        np.testing.assert_array_equal(np.asarray(getattr(made, field))[real], expected[real])
    assert np.isfinite(made.inputs).all() and real.sum() == 3 * 9


def test_one_version_is_the_original_for_one_in_m():
    given, made = furnished([[60, 60, 60]], mixing_level=1)
    kept = np.asarray((given.inputs == made.inputs).all((3, 4, 5)))[np.asarray(given.mask)]
    assert made.mask.sum() == 180
    assert 0.2 < kept.mean() < 0.47


@pytest.mark.parametrize("alpha", [0.0, 0.4])
def test_alpha_is_the_share_of_the_new_features(alpha):
    given, made = furnished([[3, 2]], alpha, codec="doubling", mixing_level=2)
    style = naive_style(own_of(given, 0, 1))
    for row, image in enumerate(own_of(given)):
        versions = own_of(made)[2 * row : 2 * row + 2]
        own = [n for n, version in enumerate(versions) if (version == image).all()]
        assert len(own) == 1
        np.testing.assert_allclose(versions[1 - own[0]], 2 * naive_version(image, style, alpha), rtol=1e-4, atol=1e-5)


def test_single_styles_are_those_of_images():
    given, made = furnished([[8, 30]], mixing_level=2, style="single", shared_images=6)
    styles = [naive_style(image[None]) for image in own_of(given, 0, 1)]
    used = []
    for row, image in enumerate(own_of(given)):
        versions = own_of(made)[2 * row : 2 * row + 2]
        found = [n for n, style in enumerate(styles) if same(versions, naive_version(image, style))]
        assert len(found) == 1 and sum((version == image).all() for version in versions) == 1
        used += found
    theirs = [naive_style(image[None]) for image in own_of(given, 0, 0)]
    for row, image in enumerate(own_of(given, 0, 1)):
        versions = own_of(made, 0, 1)[2 * row : 2 * row + 2]
        used += [100 + n for n, style in enumerate(theirs) if same(versions, naive_version(image, style))]
    assert len([n for n in used if n >= 100]) == 30
    assert 1 < len({n for n in used if n < 100}) <= 6 and len({n for n in used if n >= 100}) == 6


def test_clients_without_data_have_no_style():
    """Of four clients two hold data: of three versions one is missing."""
    given, made = furnished([[3, 0], [0, 4]], mixing_level=3)
    assert (made.mask.sum(-1) == 2 * given.mask.sum(-1)).all()
    assert np.isfinite(made.inputs).all()


@pytest.mark.parametrize("style", ["overall", "single"])
def test_places_and_devices_do_not_matter_to_what_clients_get(style):
    sizes, order = [[3, 2, 4, 1], [2, 0, 3, 3]], np.array([[2, 0, 3, 1], [1, 3, 0, 2]])
    options = {"mixing_level": 3, "style": style, "shared_images": 2}
    _, made = furnished(sizes, **options)
    _, moved = furnished(sizes, order=order, **options)
    expected = jax.tree.map(lambda x: x[np.arange(2)[:, None], order], made)
    chex.assert_trees_all_close(moved, expected, rtol=1e-5, atol=1e-5)
    if style == "overall":  # the other differs in shapes alone
        return
    mesh = sharding.mesh_for(tiny_federation(sizes).topology, jax.devices())
    _, spread = furnished(sizes, mesh=mesh, **options)
    assert mesh.size == 8 and sharding.lies_on(spread.inputs, mesh)
    chex.assert_trees_all_close(sharding.fetch(spread), sharding.fetch(made), rtol=1e-5, atol=1e-5)


def test_uint8_images_stay_uint8():
    change = lambda inputs: jnp.clip(jnp.nan_to_num(inputs) * 60 + 100, 0, 255).astype(jnp.uint8)
    given, made = furnished([[4, 3]], mixing_level=2, change=change)
    assert made.inputs.dtype == jnp.uint8
    style = naive_style(own_of(given, 0, 1) / 255)
    for row, image in enumerate(own_of(given)):
        versions = own_of(made)[2 * row : 2 * row + 2].astype(int)
        other = [version for version in versions if (version != image).any()]
        assert len(other) == 1
        expected = np.clip(255 * naive_version(image / 255, style), 0, 255)
        assert np.abs(other[0] - expected).max() < 0.51


def test_images_are_resized_for_the_networks_and_back():
    ENCODED.clear()
    given, made = furnished([[3, 2]], mixing_level=2, style_size=12, codec="watched")
    assert ENCODED[-1] == (12, 12, 2)
    style = naive_style(np.asarray(jax.image.resize(own_of(given, 0, 1), (2, 12, 12, 2), "bilinear")))
    image = own_of(given)[0]
    large = np.asarray(jax.image.resize(image, (12, 12, 2), "bilinear"))
    expected = jax.image.resize(naive_version(large, style).astype(np.float32), (6, 6, 2), "bilinear")
    assert len(same(own_of(made)[:2], np.asarray(expected))) == 1


def test_a_run_trains_on_all_versions():
    """With the program that was compiled ahead of it."""
    federation = tiny_federation([[3, 5], [4, 1]], padding=1, fill=np.nan, batch_size=4)
    round_fn = make_round(BACKBONE, ccst(codec=TINY_CODEC, mixing_level=2), federation.topology)
    program = compile_block(over_numbers(lambda numbers, like: round_fn, ()), (), federation, 1).rounds.at(())
    state, _ = run(program, round_fn.init(KEY), federation, 1, KEY)
    data = furnish(round_fn, federation.data, jax.random.fold_in(KEY, FURNISHING))
    other, info = program.block(round_fn.init(KEY), data, KEY, length=1)
    chex.assert_trees_all_equal(state, other)
    np.testing.assert_array_equal(info.steps[-1], -(-2 * federation.clients.mask.sum(-1) // 4))


def test_a_step_is_fedavgs():
    received = received_of(())
    step = lambda method, hparams: programs(method, SGD)[0](hparams, received, one_batch(), KEY)
    chex.assert_trees_all_equal(step(ccst, CCSTHparams(LR)), step(fedavg, FedAvgHparams(LR)))


# --- CCST: the public networks --------------------------------------------------------------------------------------


def public_files(folder, widths=(4, 5, 6, 7)):
    """Files of the public layout with small random layers: (encoder, decoder) as state dicts, and their paths."""
    rng = np.random.default_rng(0)
    a, b, c, d = widths
    encoder = [(0, 3, 3, 1), (2, 3, a, 3), (5, a, a, 3), (9, a, b, 3), (12, b, b, 3), (16, b, c, 3)]
    encoder += [(n, c, c, 3) for n in (19, 22, 25)] + [(29, c, d, 3), (32, d, d, 3)]  # the file goes on
    decoder = [(1, d, c, 3), (5, c, c, 3), (8, c, c, 3), (11, c, c, 3), (14, c, b, 3), (18, b, b, 3), (21, b, a, 3)]
    decoder += [(25, a, a, 3), (28, a, 3, 3)]
    paths, states = [], []
    for name, layers in (("vgg_normalised.npz", encoder), ("decoder.npz", decoder)):
        state = {}
        for n, i, o, k in layers:
            state[f"{n}.weight"] = (rng.normal(size=(o, i, k, k)) / np.sqrt(i * k * k) * 1.5).astype(np.float32)
            state[f"{n}.bias"] = rng.normal(size=o).astype(np.float32) * 0.3
        if "28.bias" in state:
            state["28.bias"] -= 0.8  # pixels of both signs: nothing is cut off behind the last layer
        np.savez(folder / name, **state)
        paths.append(str(folder / name))
        states.append(state)
    return states, paths


@pytest.mark.parametrize("size", [(16, 16), (13, 18), (9, 11)])
def test_the_networks_are_those_of_the_public_files(tmp_path, size):
    torch = pytest.importorskip("torch")
    states, paths = public_files(tmp_path)
    t = torch.nn

    def conv(state, n):
        o, i, k, _ = state[f"{n}.weight"].shape
        return t.Conv2d(i, o, k)

    def block(state, n):
        return [t.ReflectionPad2d(1), conv(state, n), t.ReLU()]

    pool, up = t.MaxPool2d(2, 2, ceil_mode=True), t.Upsample(scale_factor=2, mode="nearest")
    parts = [
        [conv(states[0], 0)],
        *(block(states[0], n) for n in (2, 5)),
        [pool],
        *(block(states[0], n) for n in (9, 12)),
    ]
    parts += [
        [pool],
        *(block(states[0], n) for n in (16, 19, 22, 25)),
        [pool],
        *(block(states[0], n) for n in (29, 32)),
    ]
    encoder = t.Sequential(*(layer for part in parts for layer in part))
    parts = [block(states[1], 1), [up], *(block(states[1], n) for n in (5, 8, 11, 14)), [up]]
    parts += [*(block(states[1], n) for n in (18, 21)), [up], *(block(states[1], n) for n in (25, 28))]
    decoder = t.Sequential(*[layer for part in parts for layer in part][:-1])
    for net, state in ((encoder, states[0]), (decoder, states[1])):
        net.load_state_dict({name: torch.tensor(x) for name, x in state.items()}, strict=True)
    encoder = encoder[:31]  # relu4_1
    image = images(*size, 3)
    with torch.no_grad():
        features = encoder(torch.tensor(image.transpose(2, 0, 1))[None])
        back = decoder(features)
    codec = load_codec(*paths)
    found = jax.jit(codec.encode)(codec.params, image)
    np.testing.assert_allclose(found, features[0].permute(1, 2, 0), rtol=1e-4, atol=1e-5)
    made = jax.jit(codec.decode)(codec.params, found)
    np.testing.assert_allclose(made, back[0].permute(1, 2, 0), rtol=1e-4, atol=1e-5)
    assert np.asarray(found).std() > 0.1 and np.asarray(made).std() > 0.05 and (np.asarray(made) < 0).any()


def test_the_networks_repaint_images_of_any_size(tmp_path):
    _, (encoder, decoder) = public_files(tmp_path)
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (1, 2, 3, 13, 10, 3), dtype=np.uint8)
    examples = Examples(
        jnp.asarray(pixels), jnp.zeros((1, 2, 3), jnp.int32), jnp.ones((1, 2, 3), bool), jnp.zeros((1, 2, 3), jnp.int32)
    )
    config = check(RunConfig(algorithm="ccst", settings={"encoder": encoder, "decoder": decoder, "mixing_level": "2"}))
    algorithm = build_algorithm(config)
    backbone = dataclasses.replace(BACKBONE, input_shape=(13, 10, 3))
    assert algorithm.adapt(backbone) is backbone
    made = jax.jit(functools.partial(algorithm.furnish, backbone))(examples, jnp.arange(2)[None], KEY)
    assert made.inputs.shape == (1, 2, 6, 13, 10, 3) and made.inputs.dtype == jnp.uint8
    kept = (np.asarray(made.inputs).reshape(1, 2, 3, 2, -1) == pixels.reshape(1, 2, 3, 1, -1)).all(-1)
    assert (kept.sum(-1) == 1).all()


def test_ccst_names_the_files_that_it_needs(tmp_path):
    _, (encoder, _) = public_files(tmp_path)
    needed = (
        "^ccst needs AdaIN's two networks, .* vgg_normalised.pth and decoder.pth with --set encoder=PATH --set decoder"
    )
    for given in ({}, {"encoder": encoder}):
        with pytest.raises(ValueError, match=needed):
            make_round(BACKBONE, ccst(**given), tiny_federation([[3]]).topology)


def test_ccst_refuses_other_files(tmp_path):
    states, (encoder, decoder) = public_files(tmp_path)
    with pytest.raises(
        ValueError, match=r"decoder.npz is not the network of AdaIN .*: 0.weight and 0.bias have shapes \[0\]"
    ):
        ccst(encoder=decoder, decoder=encoder)
    with pytest.raises(ValueError, match=r"missing.pth cannot be read"):
        ccst(encoder=str(tmp_path / "missing.pth"), decoder=decoder)
    folder = tmp_path / "other"
    folder.mkdir()
    _, (other, _) = public_files(folder, (4, 5, 6, 8))
    with pytest.raises(
        ValueError, match=r"makes 8 channels, but .*decoder.npz reads 7: give an encoder and its decoder"
    ):
        ccst(encoder=other, decoder=decoder)
    np.savez(decoder, **{**states[1], "14.weight": states[1]["14.weight"][:, 1:]})
    with pytest.raises(ValueError, match=r"expected: 14.weight and 14.bias have shapes \[5, 5, 3, 3\] and \[5\]"):
        ccst(encoder=encoder, decoder=decoder)


def test_ccst_refuses_images_that_the_networks_do_not_take(tmp_path):
    _, (encoder, decoder) = public_files(tmp_path)
    for shape in ((6, 6, 2), (8, 20, 3), (6, 6, 3)):
        with pytest.raises(
            ValueError, match=f"takes RGB images of at least 9 x 9 pixels, not .{shape[0]}, {shape[1]}, "
        ):
            ccst(encoder=encoder, decoder=decoder).adapt(dataclasses.replace(BACKBONE, input_shape=shape))
    small = dataclasses.replace(BACKBONE, input_shape=(6, 6, 3))
    assert ccst(encoder=encoder, decoder=decoder, style_size=9).adapt(small) is small
    halving = TINY_CODEC._replace(decode=lambda params, features: (features @ params["back"])[::2])
    with pytest.raises(
        ValueError, match=r"makes images \[3, 6, 2\] of images \[6, 6, 2\]: give the networks of a pair"
    ):
        ccst(codec=halving).adapt(BACKBONE)


def test_ccst_refuses_other_options():
    with pytest.raises(ValueError, match="Unknown style 'singel'; did you mean 'single'"):
        ccst(style="singel")
    with pytest.raises(ValueError, match="mixing_level=4, but there are 2 clients: give mixing_level=2 or less"):
        furnished([[3, 2]], mixing_level=4)
    for name in ("mixing_level", "shared_images"):
        with pytest.raises(ValueError, match=f"{name}=0 is not positive"):
            check(RunConfig(algorithm="ccst", settings={name: "0"}))
    with pytest.raises(ValueError, match=r"style_alpha=1.5 is not in \[0, 1\]"):
        check(RunConfig(algorithm="ccst", settings={"style_alpha": "1.5"}))
    with pytest.raises(ValueError, match="Unknown option of ccst or mean 'codec'"):
        check(RunConfig(algorithm="ccst", aggregator="mean", settings={"codec": "x"}))
