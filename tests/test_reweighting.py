"""Sample weights under which features look independent: closed forms, and StableNet, which uses them."""

import functools
import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from client import BACKBONE, examples_of, fresh, one_batch, programs

from fedjax_dg import reweighting as rw
from fedjax_dg.algorithms import (
    FedAvgHparams,
    StableFedADGHparams,
    StableNetHparams,
    fedavg,
    stable_fedadg,
    stablenet,
)
from fedjax_dg.algorithms.common import momentum
from fedjax_dg.alignment.groups import OfFeatures, carry
from fedjax_dg.backbones import lenet5
from fedjax_dg.types import Received, Variables

LR = 0.05
FIVE = np.array([(0, 0), (1, 1), (1, 1), (0, 1), (1, 0)], np.float64)
EVEN = np.full(5, 0.2)


def real_rows(num, places=None):
    return jnp.arange(places or num) < num


def normal(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def dependent(rows=64, width=4, seed=0):
    """Rows of independent features, but for the first quarter, where all features are equal."""
    z = np.random.default_rng(seed).normal(size=(rows, width))
    z[: rows // 4, 1:] = z[: rows // 4, :1]
    return jnp.asarray(z, jnp.float32)


@functools.cache
def solver(num=5, steps=rw.STEPS, lambda_p=0.5, lr=1.0):
    """Compiled ``solve``."""
    return jax.jit(
        lambda z, mask, key, memory=None: rw.solve(z, mask, key, lambda_p, lr, num, steps, memory),
    )


# --- random Fourier features ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("a", "b", "expected"), [(0.3, 1.1, 0.726149), (-2.0, 0.5, 0.043937), (0.7, 0.7, 1.0)])
def test_fourier_features_have_a_gaussian_kernel(key, a, b, expected):
    """E u(a) u(b) = exp(-(a - b)^2 / 2); five standard errors of 400,000 draws."""
    draws = 400_000
    u = np.asarray(rw.fourier_features(jnp.array([[a], [b]]), key, draws), np.float64)[:, 0]
    products = u[0] * u[1]
    error = products.std() / np.sqrt(draws)
    assert error < 2e-3
    assert abs(products.mean() - expected) < 5 * error


def test_every_feature_has_functions_of_its_own(key):
    u = rw.fourier_features(jnp.ones((2, 3)), key, 4)
    assert u.shape == (2, 3, 4)
    np.testing.assert_array_equal(u[0], u[1])
    assert len(np.unique(np.asarray(u[0]))) == 12
    assert np.abs(u).max() <= np.sqrt(2.0) + 1e-6


# --- standardised features ------------------------------------------------------------------------------------------


def test_standardised_features_have_mean_zero_and_deviation_one():
    z = 5.0 + 3.0 * normal(9, 4) * jnp.arange(1.0, 5.0)
    mask = real_rows(7, 9)
    out = np.asarray(rw.standardise(z.at[7:].set(np.nan), mask))
    np.testing.assert_allclose(out[:7].mean(0), np.zeros(4), atol=1e-6)
    np.testing.assert_allclose(out[:7].std(0), np.ones(4), atol=1e-5)
    real = np.asarray(z[:7], np.float64)
    np.testing.assert_allclose(out[:7], (real - real.mean(0)) / real.std(0), atol=1e-5)
    np.testing.assert_array_equal(out[7:], np.zeros((2, 4)))


def test_constant_features_become_zero():
    z = jnp.broadcast_to(jnp.array([3.0, 0.0, -0.5]), (6, 3)).at[5].set(1e9)
    np.testing.assert_array_equal(rw.standardise(z, real_rows(5, 6)), np.zeros((6, 3)))


def test_no_rows_stay_zero():
    np.testing.assert_array_equal(rw.standardise(normal(3, 2), real_rows(0, 3)), np.zeros((3, 2)))


# --- dependence -----------------------------------------------------------------------------------------------------


def naive_dependence(u, q):
    """Explicit covariances of every pair of features m < h: n x n blocks."""
    rows, width, num = u.shape
    total, pairs = 0.0, 0
    for m, h in itertools.combinations(range(width), 2):
        covariance = sum(q[i] * np.outer(u[i, m], u[i, h]) for i in range(rows))
        covariance = covariance - np.outer(q @ u[:, m], q @ u[:, h])
        total, pairs = total + (covariance**2).sum(), pairs + 1
    return total / (pairs * num**2)


@pytest.mark.parametrize(
    ("q", "expected"),
    [(EVEN, 0.04**2), (np.array([2, 1, 1, 2, 2]) / 8, 0.0), (np.eye(5)[1], 0.0), (np.eye(5)[3], 0.0)],
    ids=["even", "independent", "a vertex", "another vertex"],
)
def test_the_dependence_of_five_rows_is_known(q, expected):
    with jax.enable_x64(True):
        assert rw.dependence(jnp.asarray(FIVE[..., None]), jnp.asarray(q)) == pytest.approx(expected, abs=1e-15)


def test_its_gradient_in_the_logits_is_known():
    """Of 2 cov^2 at even weights: 4 cov q_i ((x_i - mean x)(y_i - mean y) - cov)."""
    with jax.enable_x64(True):
        gradient = jax.grad(lambda a: 2 * rw.dependence(jnp.asarray(FIVE[..., None]), jax.nn.softmax(a)))(jnp.zeros(5))
    np.testing.assert_allclose(gradient, [0.01024, 0.00384, 0.00384, -0.00896, -0.00896], atol=1e-12)
    assert np.asarray(gradient).sum() == pytest.approx(0.0, abs=1e-15)


@pytest.mark.parametrize(("width", "num"), [(2, 1), (5, 1), (2, 3), (4, 5)])
def test_dependence_is_the_mean_squared_covariance_of_pairs(width, num):
    rng = np.random.default_rng(width * num)
    u, q = rng.normal(size=(7, width, num)), rng.dirichlet(np.ones(7))
    with jax.enable_x64(True):
        value = rw.dependence(jnp.asarray(u), jnp.asarray(q))
    assert value == pytest.approx(naive_dependence(u, q), rel=1e-11)
    single = rw.dependence(jnp.asarray(u, jnp.float32), jnp.asarray(q, jnp.float32))
    assert single == pytest.approx(naive_dependence(u, q), rel=1e-4)


@pytest.mark.parametrize("num", [1, 5])
def test_one_feature_depends_on_nothing(num):
    u, q = normal(6, 1, num), jnp.full(6, 1 / 6)
    assert rw.dependence(u, q) == pytest.approx(0.0, abs=1e-6)


# --- the weights ----------------------------------------------------------------------------------------------------


def test_weights_move_where_they_must(key):
    z = dependent()
    q, logits, metrics = solver()(z, real_rows(64), key)
    assert metrics["dependence"] < 0.2 * metrics["dependence_before"]
    assert metrics["weight_max"] > 1.5 and metrics["weight_min"] < 0.5
    assert metrics["weight_max"] == pytest.approx(64 * float(q.max()), rel=1e-6)
    assert metrics["weight_min"] == pytest.approx(64 * float(q.min()), rel=1e-6)
    # the rows whose features are equal have lost weight, a quarter of it at first
    assert q[:16].sum() < 0.2
    assert q.sum() == pytest.approx(1.0, abs=1e-6)
    np.testing.assert_allclose(q, jax.nn.softmax(logits), atol=1e-7)


def test_the_metrics_are_the_dependence_before_and_after(key):
    z, mask = dependent(16, 3), real_rows(16)
    q, _, metrics = solver()(z, mask, key)
    u = np.asarray(rw.fourier_features(rw.standardise(z, mask), key, 5), np.float64)
    assert metrics["dependence_before"] == pytest.approx(naive_dependence(u, np.full(16, 1 / 16)), rel=1e-4)
    assert metrics["dependence"] == pytest.approx(naive_dependence(u, np.asarray(q, np.float64)), rel=1e-3)


def descend_by_hand(z, mask, key, lambda_p, lr, num, steps):
    """The logits after descent with momentum, of explicit covariances."""
    u = rw.fourier_features(rw.standardise(z, mask), key, num)[np.asarray(mask)]
    rows, width = u.shape[:2]

    def objective(a):
        q = jax.nn.softmax(a)
        total = 0.0
        for m, h in itertools.combinations(range(width), 2):
            own, other = u[:, m] - q @ u[:, m], u[:, h] - q @ u[:, h]
            total += ((own * q[:, None]).T @ other) ** 2
        dependence = jnp.sum(total) / (width * (width - 1) / 2 * num**2)
        return rows * (dependence / lambda_p + (q**2).sum())

    slope = jax.jit(jax.grad(objective))
    a, speed = jnp.zeros(rows), jnp.zeros(rows)
    for step in range(steps):
        speed = 0.9 * speed + slope(a)
        a = a - (lr if step < steps / 2 else 0.1 * lr) * speed
    return a


@pytest.mark.parametrize(("lambda_p", "lr", "num"), [(0.5, 1.0, 2), (0.1, 0.3, 3)])
def test_the_descent_is_the_documented_one(lambda_p, lr, num):
    with jax.enable_x64(True):
        key, mask = jax.random.key(4), real_rows(8, 10)
        z = jnp.asarray(dependent(10, 3), jnp.float64)
        q, logits, _ = solver(num, 20, lambda_p, lr)(z, mask, key)
        expected = descend_by_hand(z, mask, key, lambda_p, lr, num, 20)
        np.testing.assert_allclose(logits[:8], expected, atol=1e-9)
        np.testing.assert_allclose(q[:8], jax.nn.softmax(expected), atol=1e-10)
        assert np.ptp(np.asarray(expected)) > 0.1


def test_padding_weighs_nothing_and_is_never_read(key):
    z, mask = dependent(20, 3), real_rows(16, 20)
    q, logits, metrics = solver()(z.at[16:].set(np.nan), mask, key)
    alone, _, told = solver()(z[:16], real_rows(16), key)
    np.testing.assert_array_equal(q[16:], np.zeros(4))
    assert q.sum() == pytest.approx(1.0, abs=1e-6)
    np.testing.assert_allclose(q[:16], alone, atol=1e-5)
    assert np.isfinite(logits).all() and metrics["weight_min"] > 0.0
    chex.assert_trees_all_close(metrics, told, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("settings", [{"lr": 0.0}, {"steps": 0}], ids=["no rate", "no steps"])
def test_without_descent_weights_are_even(key, settings):
    q, _, metrics = solver(**settings)(dependent(20, 3), real_rows(16, 20), key)
    np.testing.assert_array_equal(q, np.where(np.arange(20) < 16, np.float32(1 / 16), 0.0))
    assert metrics["weight_max"] == metrics["weight_min"] == 1.0
    assert metrics["dependence"] == metrics["dependence_before"] > 0.0


def test_a_huge_lambda_p_leaves_weights_even(key):
    q, _, _ = solver(lambda_p=1e12)(dependent(), real_rows(64), key)
    np.testing.assert_allclose(q, np.full(64, 1 / 64), atol=1e-6 / 64)


def test_a_larger_lambda_p_is_more_even(key):
    largest = [float(solver(lambda_p=x)(dependent(), real_rows(64), key)[2]["weight_max"]) for x in (0.1, 0.5, 5.0)]
    assert largest[0] > 1.1 * largest[1] > 1.21 * largest[2] > 1.21


def test_even_weights_of_128_rows_have_the_known_length(key):
    q, _, _ = solver(lr=0.0)(dependent(200), real_rows(128, 200), key)
    assert (q**2).sum() == pytest.approx(0.0078125, rel=1e-6)


def test_permuting_a_batch_permutes_its_weights(key):
    z, mask = dependent(16, 3), jnp.arange(16) != 5
    order = np.random.default_rng(3).permutation(16)
    q, _, _ = solver()(z, mask, key)
    permuted, _, _ = solver()(z[order], mask[order], key)
    np.testing.assert_allclose(permuted, q[order], atol=1e-5)
    assert np.ptp(np.asarray(q)[np.asarray(mask)]) > 0.01


@pytest.mark.parametrize("num", [1, 2])
def test_one_row_and_two_rows_stay_even(num):
    """Even weights are stationary, but not stable: roundings must not grow."""
    keys = jax.random.split(jax.random.key(1), 40)
    z = normal(40, 6, 3)
    q, _, _ = jax.vmap(solver(lambda_p=0.02), (0, None, 0))(z, real_rows(num, 6), keys)
    np.testing.assert_array_equal(q, np.tile(np.where(np.arange(6) < num, np.float32(1 / num), 0.0), (40, 1)))


def test_features_are_constants(key):
    z, ramp = dependent(16, 3), jnp.arange(16.0)
    value, gradient = jax.value_and_grad(lambda z: ramp @ solver()(z, real_rows(16), key)[0])(z)
    assert not np.asarray(gradient).any()
    assert abs(value - 7.5) > 1e-2


# --- with a memory --------------------------------------------------------------------------------------------------


def test_an_empty_memory_changes_nothing(key):
    z, mask = dependent(16, 3), real_rows(14, 16)
    without = solver()(z, mask, key)
    chex.assert_trees_all_close(solver()(z, mask, key, rw.empty_memory(12, 3)), without, rtol=1e-4, atol=1e-6)


def test_a_filled_memory_is_seen(key):
    """Solving then is for the batch's rows and the memory's together, those at fixed logits."""
    z, past = dependent(16, 3), 2.0 * normal(12, 3, seed=1)
    filled = rw.Memory(past, jnp.zeros(12), jnp.where(jnp.arange(12) < 9, 1.0, 0.0))
    q, _, metrics = solver()(z, real_rows(16), key, filled)
    assert np.abs(q - solver()(z, real_rows(16), key)[0]).max() > 1e-3
    assert q.sum() == pytest.approx(1.0, abs=1e-6)
    both, mask = jnp.concatenate([z, past]), real_rows(25, 28)
    u = np.asarray(rw.fourier_features(rw.standardise(both, mask), key, 5), np.float64)[:25]
    assert metrics["dependence_before"] == pytest.approx(naive_dependence(u, np.full(25, 1 / 25)), rel=1e-4)
    # rows that nothing has gone into do not count
    garbage = filled._replace(z=past.at[9:].set(1e3), logits=filled.logits.at[9:].set(50.0))
    np.testing.assert_allclose(solver()(z, real_rows(16), key, garbage)[0], q, atol=1e-6)


def test_two_rows_with_a_memory_can_move(key):
    filled = rw.Memory(dependent(12, 3), jnp.zeros(12), jnp.ones(12))
    q, _, _ = solver(lambda_p=0.05)(normal(2, 3, seed=7), real_rows(2), key, filled)
    assert abs(q[0] - 0.5) > 1e-3


def test_a_memory_is_a_running_mean_and_then_forgets():
    """The mean of the first ten batches; then 0.9 of the old and 0.1 of the new."""
    batches = [(normal(3, 2, seed=i), normal(3, seed=100 + i)) for i in range(13)]
    memory, mask = rw.empty_memory(3, 2), real_rows(3)
    for i, (z, logits) in enumerate(batches, 1):
        memory = rw.remember(memory, z, logits, mask)
        if i <= 10:
            expected = [np.mean([batch[j] for batch in batches[:i]], axis=0) for j in range(2)]
        else:
            expected = [0.9 * old + 0.1 * np.asarray(new) for old, new in zip(expected, (z, logits))]
        np.testing.assert_allclose(memory.z, expected[0], atol=1e-6)
        np.testing.assert_allclose(memory.logits, expected[1], atol=1e-6)
        np.testing.assert_array_equal(memory.count, np.full(3, float(i)))


def test_padding_never_enters_a_memory():
    memory = rw.remember(rw.empty_memory(3, 2), jnp.ones((3, 2)), jnp.ones(3), real_rows(3))
    z = jnp.full((3, 2), 5.0).at[1].set(np.nan)
    after = rw.remember(memory, z, jnp.array([3.0, np.nan, 3.0]), jnp.array([True, False, True]))
    np.testing.assert_allclose(after.z[:, 0], [3.0, 1.0, 3.0])
    np.testing.assert_allclose(after.logits, [2.0, 1.0, 2.0])
    np.testing.assert_array_equal(after.count, [2.0, 1.0, 2.0])


@pytest.mark.parametrize("batch", [2, 5])
def test_a_batch_of_another_size_meets_the_first_rows(batch):
    memory = rw.remember(rw.empty_memory(3, 2), normal(batch, 2), normal(batch, seed=1), real_rows(batch))
    num = min(batch, 3)
    np.testing.assert_allclose(memory.z[:num], normal(batch, 2)[:num])
    np.testing.assert_array_equal(memory.count, [float(i < num) for i in range(3)])
    assert not np.asarray(memory.z[num:]).any()


# --- StableNet ------------------------------------------------------------------------------------------------------


def take_step(method, hparams, client=(), optimizer=momentum):
    """One local step on a batch: the change of the parameters, the metrics."""
    received = Received(fresh(), (), (), client)
    moved, metrics = programs(method, optimizer)[0](hparams, received, one_batch(), jax.random.key(2))
    return jax.tree.map(jnp.subtract, moved.variables.params, fresh().params), metrics


def train(method, hparams, variables=None, client=()):
    """Two passes in batches of four and three: the parameters, the client's state, its message."""
    received = Received(fresh() if variables is None else variables, (), (), client, jnp.int32(0))
    trained, *reported = programs(method, momentum)[1](hparams, received, examples_of(), jax.random.key(1))
    return trained.local.variables.params, *reported


def apart(tree, other):
    """The largest difference of two trees."""
    return max(np.abs(a - b).max() for a, b in zip(jax.tree.leaves(tree), jax.tree.leaves(other)))


WITH_MEMORY = functools.partial(stablenet, memory_rows=4)
PERSISTENT = functools.partial(stablenet, memory_rows=4, persist_memory=True)


def test_even_weights_are_fedavg():
    trained, plain = train(stablenet, StableNetHparams(LR, weight_lr=0.0)), train(fedavg, FedAvgHparams(LR))
    chex.assert_trees_all_close(trained[0], plain[0], atol=1e-6)


def test_stablenet_differs_from_fedavg():
    assert apart(train(stablenet, StableNetHparams(LR))[0], train(fedavg, FedAvgHparams(LR))[0]) > 1e-4
    _, metrics = take_step(stablenet, StableNetHparams(LR))
    assert metrics["weight_max"] > 1.05 and metrics["weight_min"] < 0.95
    assert metrics["dependence"] < metrics["dependence_before"]


def test_weights_are_constants_in_the_gradient():
    """The step's gradient is that of sum_i q_i CE_i with the q of these features put in as numbers."""
    hparams, key = StableNetHparams(1.0, lambda_p=0.2), jax.random.key(2)
    move, metrics = take_step(stablenet, hparams, optimizer=optax.sgd)
    z = BACKBONE.features(fresh(), one_batch().inputs)
    q, _, told = solver(lambda_p=0.2)(z, one_batch().mask, jax.random.fold_in(key, 1))
    assert metrics["weight_max"] == pytest.approx(float(told["weight_max"]), rel=1e-5)

    @jax.jit
    @jax.value_and_grad
    def weighted(params):
        log_p = jax.nn.log_softmax(BACKBONE.apply(Variables(params, {}), one_batch().inputs))
        return -(q * log_p[jnp.arange(8), one_batch().labels]).sum()

    value, gradient = weighted(fresh().params)
    assert metrics["loss"] == pytest.approx(float(value), rel=1e-5)
    chex.assert_trees_all_close(jax.tree.map(jnp.negative, move), gradient, atol=1e-6)


# --- what a client remembers ----------------------------------------------------------------------------------------


def test_the_first_step_has_an_empty_memory():
    without, remembering = (take_step(method, StableNetHparams(LR))[0] for method in (stablenet, WITH_MEMORY))
    chex.assert_trees_all_close(remembering, without, atol=1e-6)


def test_later_steps_see_the_memory():
    assert apart(train(WITH_MEMORY, StableNetHparams(LR))[0], train(stablenet, StableNetHparams(LR))[0]) > 1e-5


def started(method):
    return method().init(BACKBONE, fresh(), jax.random.key(0))


@pytest.mark.parametrize("method", [stablenet, WITH_MEMORY])
def test_a_memory_that_is_not_kept_is_in_no_state(method):
    assert started(method).client == ()
    assert train(method, StableNetHparams(LR))[1:] == ((), ())


def test_a_kept_memory_stays_on_the_client():
    """Two passes in batches of four and three: three rows are seen four times, one twice. Nothing is sent."""
    start = started(PERSISTENT)
    assert isinstance(start.client.z, OfFeatures) and start.client.z.value.shape == (4, 5)
    assert start.variables.params.keys() == fresh().params.keys()
    params, memory, message = train(PERSISTENT, StableNetHparams(LR), client=start.client)
    np.testing.assert_array_equal(memory.count, [4.0, 4.0, 4.0, 2.0])
    assert np.abs(memory.z.value).min() > 0 and memory.z.axis == 1
    assert message == ()
    chex.assert_trees_all_equal(params, train(WITH_MEMORY, StableNetHparams(LR))[0])
    again, later, _ = train(PERSISTENT, StableNetHparams(LR), client=memory)
    np.testing.assert_array_equal(later.count, 2 * np.asarray(memory.count))
    assert apart(again, params) > 1e-6


def test_a_kept_memory_follows_the_order_of_the_features():
    backbone = lenet5(num_classes=3)
    variables = jax.eval_shape(backbone.init, jax.random.key(0))
    memory = PERSISTENT().init(backbone, variables, jax.random.key(0)).client
    memory = memory._replace(z=OfFeatures(normal(4, 84), axis=1), logits=normal(4, seed=1))
    order = jnp.roll(jnp.arange(84), 5)
    moved = carry(memory, variables, backbone.groups, {"dense2": order, "dense1": jnp.arange(120)[::-1]})
    np.testing.assert_array_equal(moved.z.value, memory.z.value[:, order])
    np.testing.assert_array_equal(moved.logits, memory.logits)


STABLE = functools.partial(stable_fedadg, warmup_epochs=1, rectify=False)


@pytest.mark.parametrize("options", [{}, {"memory_rows": 4}])
def test_stable_fedadg_keeps_no_memory_unless_told(options):
    method = functools.partial(STABLE, **options)
    start = started(method)
    assert start.client[1] == ()
    _, state, message = train(method, StableFedADGHparams(LR), start.variables, start.client)
    assert state[1] == () and message == ()


def test_stable_fedadg_keeps_a_memory_on_the_client():
    method = functools.partial(STABLE, memory_rows=4, persist_memory=True)
    start = started(method)
    _, (_, memory), message = train(method, StableFedADGHparams(LR), start.variables, start.client)
    np.testing.assert_array_equal(memory.count, [4.0, 4.0, 4.0, 2.0])
    assert isinstance(memory.z, OfFeatures) and message == ()


@pytest.mark.parametrize("method", [stablenet, stable_fedadg])
@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"fourier": 0}, "fourier=0 is not"),
        ({"memory_rows": -1}, "memory_rows=-1"),
        ({"persist_memory": True}, "give memory_rows"),
    ],
)
def test_weights_and_memories_that_cannot_be_are_refused(method, options, told):
    with pytest.raises(ValueError, match=told):
        method(**options)
