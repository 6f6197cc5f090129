"""Every method's closed forms and reductions."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
from client import BACKBONE, batch_of, fresh, programs
from flax import linen as nn
from quadratic import optimum, quadratic_rounds
from tiny import CLASSES, tiny_federation

from fedjax_dg import make_round
from fedjax_dg.algorithms import (
    FedAvgHparams,
    FedIIRHparams,
    FedProxHparams,
    FedSRHparams,
    MTGCHparams,
    ScaffoldHparams,
    fedavg,
    fediir,
    fedprox,
    fedsr,
    keep_optimizer,
    mtgc,
    scaffold,
)
from fedjax_dg.algorithms.common import momentum
from fedjax_dg.algorithms.fedsr import Reference, gaussian_kl, gaussian_of
from fedjax_dg.alignment import permute
from fedjax_dg.backbones import Backbone, lenet5
from fedjax_dg.types import Examples, Received, Variables

LR = 0.05
# the drift example: two clients with losses a (theta - b)^2 / 2
A, B = [[[1.0], [4.0]]], [[[0.0], [1.0]]]


@functools.cache
def two_clients():
    """The examples [2, N] of two clients, 5 and 3 of 6 places."""
    clients = tiny_federation([[5, 3]], padding=1, fill=np.nan).clients
    return jax.tree.map(lambda x: x[0], clients)


def one(client=0):
    return jax.tree.map(lambda x: x[client], two_clients())


def random_like(tree, seed):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: jnp.asarray(0.1 * rng.normal(size=x.shape), jnp.float32), tree)


def take_step(method, hparams, batch, variables=None, backbone=BACKBONE, optimizer=momentum, client=(), shared=()):
    """One local step: the change of the parameters, what changed beside them, the metrics."""
    variables = fresh(backbone) if variables is None else variables
    received = Received(variables, shared, (), client)
    moved, metrics = programs(method, optimizer, backbone)[0](hparams, received, batch, jax.random.key(2))
    return jax.tree.map(jnp.subtract, moved.variables.params, variables.params), moved, metrics


def train(method, hparams, examples=None, variables=None, backbone=BACKBONE, optimizer=momentum, client=(), shared=()):
    """Two passes over a client's examples in batches of two: what training leaves, and what the client reports."""
    received = Received(fresh(backbone) if variables is None else variables, shared, (), client)
    examples = one() if examples is None else examples
    trained, *reported = programs(method, optimizer, backbone, size=2)[1](
        hparams, received, examples, jax.random.key(1)
    )
    return trained, tuple(reported)


def thetas(states):
    return states.variables.params["theta"]


# --- FedAvg ---------------------------------------------------------------------------------------------------------


def test_one_full_batch_step_each_is_one_step_on_all_data(key):
    federation = tiny_federation([[3, 5], [6, 1]], local_steps=1)
    round_fn = make_round(BACKBONE, fedavg(FedAvgHparams(LR), optax.sgd), federation.topology)
    state = round_fn.init(key)
    after, _ = jax.jit(round_fn.step)(state, federation.data, key)
    mask = federation.mask
    gradient = reference.plain_gradient(BACKBONE)(
        state.variables.params, federation.inputs[mask], federation.labels[mask]
    )
    expected = jax.tree.map(lambda x, g: x - LR * g, state.variables.params, gradient)
    chex.assert_trees_all_close(after.variables.params, expected, atol=1e-6)


def test_identical_clients_are_any_one_of_them(key):
    federation = tiny_federation([[5, 5], [5, 5]], batch_size=2, local_epochs=2)
    round_fn = make_round(BACKBONE, fedavg(), federation.topology)
    clients = jax.tree.map(lambda x: jnp.broadcast_to(x[:1, :1], x.shape), federation.clients)
    ids = jnp.zeros((2, 2), jnp.int32)  # so that they shuffle alike
    only = clients._replace(mask=clients.mask & jnp.array([[True, False], [False, False]])[..., None])
    step, state = jax.jit(round_fn.step), round_fn.init(key)
    all_four, alone = (step(state, (examples, ids), key)[0].variables for examples in (clients, only))
    chex.assert_trees_all_close(all_four, alone, atol=1e-6)
    assert not np.allclose(alone.params["head"]["kernel"], state.variables.params["head"]["kernel"])


def test_fedavg_drifts_to_the_known_fixed_point():
    states = quadratic_rounds(fedavg(FedAvgHparams(0.1), optax.sgd), A, B, 1.0, 60, steps=5)
    assert thetas(states)[-1] == pytest.approx(0.6925023465, abs=1e-10)
    assert optimum(A, B) == pytest.approx(0.8)


# --- FedProx --------------------------------------------------------------------------------------------------------


def test_mu_zero_is_fedavg_bit_for_bit():
    with_pull, without = train(fedprox, FedProxHparams(LR, mu=0.0)), train(fedavg, FedAvgHparams(LR))
    chex.assert_trees_all_equal(with_pull[0].local.variables, without[0].local.variables)


def test_the_first_step_does_not_feel_mu():
    batch = batch_of(one())
    first, second = (take_step(fedprox, FedProxHparams(LR, mu), batch)[0] for mu in (0.0, 50.0))
    chex.assert_trees_all_equal(first, second)


def test_fedprox_finds_the_exact_local_solution():
    """a = 4, b = 1, mu = 4 from 0: (a b + mu theta_t) / (a + mu) = 0.5."""
    states = quadratic_rounds(fedprox(FedProxHparams(0.1, mu=4.0), optax.sgd), [[[4.0]]], [[[1.0]]], 0.0, 1, steps=60)
    assert thetas(states)[-1] == pytest.approx(0.5, abs=1e-12)


# --- SCAFFOLD -------------------------------------------------------------------------------------------------------


def test_scaffold_without_controls_is_fedavg_bit_for_bit():
    zeros = jax.tree.map(jnp.zeros_like, fresh().params)
    corrected = train(scaffold, ScaffoldHparams(LR), optimizer=optax.sgd, client=zeros, shared=zeros)
    plain = train(fedavg, FedAvgHparams(LR), optimizer=optax.sgd)
    chex.assert_trees_all_equal(corrected[0].local.variables, plain[0].local.variables)


def test_scaffold_with_one_client_is_sgd():
    a, b = [[[3.0, 1.0]]], [[[1.0, -2.0]]]
    states = quadratic_rounds(scaffold(ScaffoldHparams(LR)), a, b, 0.5, 4, steps=3)
    plain = quadratic_rounds(fedavg(FedAvgHparams(LR), optax.sgd), a, b, 0.5, 4, steps=3)
    np.testing.assert_allclose(thetas(states), thetas(plain), rtol=1e-14)
    np.testing.assert_allclose(states.shared["theta"], states.clients["theta"][:, 0, 0], rtol=1e-14)


def test_option_two_is_the_mean_raw_gradient():
    """c_i - c + (theta - y) / (K lr), with K = 6 real steps for 5 examples."""
    own, shared = random_like(fresh().params, 1), random_like(fresh().params, 2)
    trained, (control, change) = train(scaffold, ScaffoldHparams(LR), optimizer=optax.sgd, client=own, shared=shared)
    assert trained.steps == 6
    option_two = jax.tree.map(
        lambda c_i, c, theta, y: c_i - c + (theta - y) / (6 * LR),
        own,
        shared,
        fresh().params,
        trained.local.variables.params,
    )
    chex.assert_trees_all_close(control, option_two, atol=2e-6)
    chex.assert_trees_all_close(change, jax.tree.map(jnp.subtract, control, own), atol=1e-7)


def test_scaffold_control_is_right_under_momentum_too():
    momentum = functools.partial(optax.sgd, momentum=0.9)
    states = quadratic_rounds(scaffold(ScaffoldHparams(LR), momentum), [[[4.0]]], [[[1.0]]], 0.0, 1, steps=5)
    path = [0.0] + [float(reference.one_client(lambda x: 4 * (x - 1), 0.0, momentum(LR), k)) for k in range(1, 5)]
    assert states.clients["theta"][0].item() == pytest.approx(np.mean([4 * (x - 1) for x in path]), rel=1e-6)


def test_scaffold_reaches_the_optimum_along_the_known_path():
    states = quadratic_rounds(scaffold(ScaffoldHparams(0.1)), A, B, 1.0, 150, steps=5)
    theta, c, c_i = thetas(states)[:, 0], states.shared["theta"][:, 0], states.clients["theta"][:, 0, :, 0]
    np.testing.assert_allclose(theta[:3], [0.795245, 0.763472142875, 0.775437644922], atol=1e-12)
    np.testing.assert_allclose(c_i[0], [0.81902, 0.0], atol=1e-12)
    np.testing.assert_allclose(c[0], 0.40951, atol=1e-12)
    np.testing.assert_allclose([theta[-1], c[-1], *c_i[-1]], [0.8, 0.0, 0.8, -0.8], atol=1e-10)
    np.testing.assert_allclose(c, c_i.mean(1), atol=1e-15)


# --- MTGC -----------------------------------------------------------------------------------------------------------


@functools.cache
def mixed(stations=4, clients=4):
    """Quadratics that differ between stations, and between the clients of a station."""
    rng = np.random.default_rng(0)
    a = rng.uniform(0.5, 2.0, (stations, clients, 3))
    return a, rng.normal(size=a.shape) + rng.normal(size=(stations, 1, 3))


def test_mtgc_starts_as_plain_averaging():
    plain = quadratic_rounds(fedavg(FedAvgHparams(LR), optax.sgd), *mixed(), 0.0, 1, steps=5)
    corrected = quadratic_rounds(mtgc(MTGCHparams(LR)), *mixed(), 0.0, 1, steps=5)
    np.testing.assert_array_equal(thetas(corrected), thetas(plain))


def test_mtgc_with_lone_clients_starts_as_plain_averaging():
    """z is zero with one client a station, y is zero in the first server round: any number of station rounds."""
    given = (*mixed(4, 1), 0.0, 2)
    plain = quadratic_rounds(fedavg(FedAvgHparams(LR), optax.sgd), *given, steps=5, station_rounds=3)
    corrected = quadratic_rounds(mtgc(MTGCHparams(LR)), *given, steps=5, station_rounds=3)
    np.testing.assert_allclose(thetas(corrected)[0], thetas(plain)[0], rtol=1e-14)
    assert not np.allclose(thetas(corrected)[1], thetas(plain)[1], rtol=1e-3)


def test_mtgc_corrections_vanish_in_the_mean():
    """Weighted by what the shares say, over the clients of a station and over stations."""
    rng = np.random.default_rng(1)
    gradients = jnp.asarray(rng.normal(size=(2, 3, 5)), jnp.float32)
    shares = jnp.asarray([[0.1, 0.2, 0.1], [0.3, 0.0, 0.3]])
    method = mtgc()
    station = method.init(BACKBONE, Variables(jnp.zeros(5), {}), jax.random.key(0)).station
    stations = jax.tree.map(lambda x: jnp.stack([x] * 2), station)
    gathered = jax.vmap(method.gather)(stations, gradients, shares)
    z = gathered.gradient[:, None] - gradients
    np.testing.assert_allclose(jnp.einsum("sc,scd->sd", shares, z), np.zeros((2, 5)), atol=1e-7)
    _, absorbed = method.absorb((), gathered, gradients, shares)
    np.testing.assert_allclose(shares.sum(1) @ absorbed.y, np.zeros(5), atol=1e-7)
    assert np.abs(absorbed.y).max() > 0.1


@pytest.mark.parametrize(("z_init", "exact"), [("zero", False), ("persist", True), ("grad", True)])
def test_mtgc_converges_as_its_z_init_promises(z_init, exact):
    a, b = mixed()
    settings = {"steps": 5, "station_rounds": 5}
    states = quadratic_rounds(mtgc(MTGCHparams(0.1), z_init=z_init), a, b, 0.0, 150, **settings)
    distance = np.abs(thetas(states)[-1] - optimum(a, b)).max()
    if exact:
        assert distance < 1e-12
    else:
        plain = quadratic_rounds(fedavg(FedAvgHparams(0.1), optax.sgd), a, b, 0.0, 150, **settings)
        assert 1e-4 < distance < 0.1 * np.abs(thetas(plain)[-1] - optimum(a, b)).max()
    own = states.stations.gradient["theta"][-1][:, None] - states.clients["theta"][-1]
    np.testing.assert_allclose(own.sum(1), np.zeros((4, 3)), atol=1e-13)
    np.testing.assert_allclose(states.stations.y["theta"][-1].sum(0), np.zeros(3), atol=1e-13)


def test_mtgc_surveys_full_gradients():
    method = mtgc(z_init="grad")
    survey = jax.jit(lambda examples, key: method.survey(BACKBONE, Received(fresh(), (), (), ()), (), examples, key))
    own, message = survey(one(), jax.random.key(0))
    examples = one()
    gradient = reference.plain_gradient(BACKBONE)(
        fresh().params, examples.inputs[examples.mask], examples.labels[examples.mask]
    )
    chex.assert_trees_all_close(own, gradient, atol=1e-6)
    chex.assert_trees_all_equal(own, message)


def test_mtgc_names_the_z_inits():
    with pytest.raises(ValueError, match="persist"):
        mtgc(z_init="persists")


# --- FedIIR ---------------------------------------------------------------------------------------------------------


class OneWeight(nn.Module):
    @nn.compact
    def __call__(self, z):
        w = self.param("w", nn.initializers.zeros, ())
        return jnp.concatenate([jnp.zeros_like(z), w * z], axis=-1)


class Logistic(nn.Module):
    """Binary logistic regression on z = phi x: logits (0, w z)."""

    def setup(self):
        self.phi = self.param("phi", nn.initializers.ones, ())
        self.head = OneWeight()

    def features(self, x, train, mask=None):
        return self.phi * x

    def classify(self, z):
        return self.head(z)

    def __call__(self, x, train):
        return self.classify(self.features(x, train))


def aligning_gradient(w, gamma):
    """FedIIR's gradient in (phi, w), and the penalty, for x = 1 and y = 1 at phi = 1, with G = 0."""
    backbone = Backbone(Logistic(), input_shape=(1,), num_features=1, num_classes=2)
    variables = Variables({"phi": jnp.ones(()), "head": {"w": jnp.asarray(w)}}, {})
    batch = Examples(jnp.ones((1, 1)), jnp.ones(1, jnp.int32), jnp.ones(1, bool), jnp.zeros(1, jnp.int32))
    move, _, metrics = take_step(
        fediir, FedIIRHparams(1.0, gamma), batch, variables, backbone, optax.sgd, shared={"w": jnp.zeros(())}
    )
    return -move["phi"], -move["head"]["w"], metrics["penalty"]


def test_the_penalty_is_differentiated_twice():
    """-0.5 would be the gradient if the one inside the penalty were stopped."""
    _, of_w, penalty = aligning_gradient(0.0, gamma=1.0)
    assert penalty == pytest.approx(0.25, rel=1e-6)
    assert of_w == pytest.approx(-0.75, rel=1e-6)


@pytest.mark.parametrize(("gamma", "expected"), [(1.0, 0.00758012), (0.0, -0.18877033)])
def test_the_penalty_reaches_the_features(gamma, expected):
    assert aligning_gradient(0.5, gamma)[0] == pytest.approx(expected, abs=1e-7)


class Linear(nn.Module):
    """Softmax regression."""

    def setup(self):
        self.head = nn.Dense(3, kernel_init=nn.initializers.zeros)

    def features(self, x, train, mask=None):
        return x

    def classify(self, z):
        return self.head(z)

    def __call__(self, x, train):
        return self.classify(self.features(x, train))


def test_the_penalty_of_zero_weights_is_four():
    """z = (1, 2), y = 0: || R ||^2 (|| z ||^2 + 1) = 2/3 * 6."""
    backbone = Backbone(Linear(), input_shape=(2,), num_features=2, num_classes=3)
    variables = fresh(backbone)
    batch = Examples(jnp.array([[1.0, 2.0]]), jnp.zeros(1, jnp.int32), jnp.ones(1, bool), jnp.zeros(1, jnp.int32))
    target = jax.tree.map(jnp.zeros_like, variables.params["head"])
    metrics = take_step(fediir, FedIIRHparams(), batch, variables, backbone, shared=target)[2]
    assert metrics["penalty"] == pytest.approx(4.0, rel=1e-6)


def head_gradient(examples):
    """The mean gradient of the head over a client's real examples at ``fresh()``."""
    inputs, labels = examples.inputs[examples.mask], examples.labels[examples.mask]
    return reference.plain_gradient(BACKBONE)(fresh().params, inputs, labels)["head"]


def test_the_penalty_vanishes_where_gradients_agree():
    batch, target = batch_of(one()), head_gradient(one())
    aligned, _, metrics = take_step(fediir, FedIIRHparams(LR, gamma=10.0), batch, optimizer=optax.sgd, shared=target)
    plain, _, _ = take_step(fedavg, FedAvgHparams(LR), batch, optimizer=optax.sgd)
    assert metrics["penalty"] < 1e-12
    chex.assert_trees_all_close(aligned, plain, atol=1e-6)


def test_the_nested_gradient_is_the_linear_heads_closed_form():
    """Padding in the batch, too, which the closed form never sees."""
    examples, target = one(), random_like(fresh().params["head"], 3)
    hparams = FedIIRHparams(1.0, gamma=2.0)
    move, _, _ = take_step(fediir, hparams, batch_of(examples), optimizer=optax.sgd, shared=target)
    expected = reference.aligned_gradient(BACKBONE, 2.0)(
        fresh().params, target, examples.inputs[examples.mask], examples.labels[examples.mask]
    )
    chex.assert_trees_all_close(jax.tree.map(jnp.negative, move), expected, atol=1e-6)


def test_gamma_zero_is_fedavg():
    target = random_like(fresh().params["head"], 4)
    aligned = train(fediir, FedIIRHparams(LR, gamma=0.0), shared=target)
    plain = train(fedavg, FedAvgHparams(LR))
    chex.assert_trees_all_close(aligned[0].local.variables, plain[0].local.variables, atol=1e-7)


def test_the_digest_is_a_running_mean_over_all_examples():
    """Sums and counts of two stations, 5 and 3 examples: G <- 0.9 G + 0.1 g, twice."""
    method = fediir(FedIIRHparams(ema=0.9))
    survey = jax.vmap(lambda x: method.survey(BACKBONE, Received(fresh(), (), (), ()), (), x, jax.random.key(0))[1])
    messages = jax.tree.map(lambda x: x[:, None], jax.jit(survey)(two_clients()))  # [S, P]
    fresh_gradient = reference.average([head_gradient(one(0)), head_gradient(one(1))], [5, 3])
    running = jax.tree.map(jnp.zeros_like, fresh_gradient)
    for expected in (0.1, 0.19):
        running, stations = method.digest(running, (), messages, jnp.full((2, 1), 0.5))
        chex.assert_trees_all_close(running, reference.scale(fresh_gradient, expected), atol=1e-6)
    assert stations == ()


# --- FedSR ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gaussian", "other", "expected"),
    [
        ((1.0, 1.0), (0.0, 1.0), 0.5),
        ((0.0, 2.0), (0.0, 1.0), 0.8068528194),
        ((0.5, 0.25), (-1.0, 2.0), 1.8685040417),
        ((0.0, np.log(2.0)), (0.0, np.log1p(np.e)), 0.2783163004),  # at the start: softplus(0) and softplus(1)
        ((-3.0, 0.7), (-3.0, 0.7), 0.0),
    ],
)
def test_gaussian_kl(gaussian, other, expected):
    with jax.enable_x64(True):
        assert gaussian_kl(*map(jnp.asarray, (*gaussian, *other))) == pytest.approx(expected, abs=1e-10)


@functools.cache
def stochastic():
    """The tiny network with Gaussian features."""
    return fedsr().adapt(BACKBONE)


def gaussian_variables(mean, std):
    """Variables whose features are N(mean, std^2) for every input."""
    params = fresh(stochastic()).params
    raw = jnp.log(jnp.expm1(jnp.broadcast_to(jnp.asarray(std), (5,))))
    posterior = {
        "kernel": jnp.zeros_like(params["posterior"]["kernel"]),
        "bias": jnp.concatenate([jnp.broadcast_to(jnp.asarray(mean), (5,)), raw]),
    }
    return Variables({**params, "posterior": posterior}, {})


def at_start(backbone):
    """A client's reference before round 1."""
    return fedsr().init(backbone, fresh(backbone), jax.random.key(0)).client


def stochastic_step(batch, variables, hparams=FedSRHparams(1.0), method=fedsr):
    """One plain SGD step at rate 1: the client's reference afterwards, and the metrics."""
    _, moved, metrics = take_step(
        method, hparams, batch, variables, stochastic(), optax.sgd, client=at_start(stochastic())
    )
    return moved.client, metrics


def test_the_posterior_is_a_softplus_gaussian():
    mean, std = gaussian_of(jnp.array([[3.0, -1.0, 0.5413248546, -100.0]]))
    np.testing.assert_allclose(mean, [[3.0, -1.0]])
    np.testing.assert_allclose(std, [[1.00001, 1e-5]], rtol=1e-6)


def test_cmi_at_the_start():
    """Summed over 5 dimensions; the floor under standard deviations moves it by 5e-5."""
    _, metrics = stochastic_step(batch_of(one()), gaussian_variables(0.0, np.log(2.0)))
    assert metrics["cmi"] == pytest.approx(5 * 0.2783163004, abs=1e-4)


def test_the_loss_is_the_sum_of_its_parts():
    hparams = FedSRHparams(1.0, l2=0.3, cmi=0.7)
    _, metrics = stochastic_step(batch_of(one()), gaussian_variables(0.5, 1.0), hparams)
    total = metrics["cross_entropy"] + 0.3 * metrics["l2"] + 0.7 * metrics["cmi"]
    assert metrics["loss"] == pytest.approx(float(total), rel=1e-6)


SQUARED = functools.partial(fedsr, l2_form="squared")


@pytest.mark.parametrize(("method", "expected"), [(fedsr, np.sqrt(20.0)), (SQUARED, 20.0)], ids=["norm", "squared"])
def test_l2_forms_of_a_sharp_posterior(method, expected):
    _, metrics = stochastic_step(batch_of(one()), gaussian_variables(2.0, 1e-6), method=method)
    assert metrics["l2"] == pytest.approx(expected, rel=1e-4)


def test_the_squared_length_has_its_expectation():
    """E || z ||^2 = || mu ||^2 + || sigma ||^2 = 7.5; 20,000 draws, four standard errors."""
    variables = gaussian_variables(jnp.array([1.0, -2.0, 0, 0, 0]), jnp.array([0.5, 1.5, 1e-6, 1e-6, 1e-6]))
    size = 20_000
    ones = jnp.ones(size, jnp.int32)
    batch = Examples(jnp.zeros((size, 6, 6, 2)), ones, ones == 1, ones)
    _, metrics = stochastic_step(batch, variables, method=SQUARED)
    variance = sum(2 * s**4 + 4 * m**2 * s**2 for m, s in ((1.0, 0.5), (-2.0, 1.5)))
    assert abs(metrics["l2"] - 7.5) < 4 * np.sqrt(variance / size)


def test_absent_classes_keep_their_reference():
    batch = batch_of(one())
    batch = batch._replace(labels=jnp.minimum(batch.labels, 1))
    moved, _ = stochastic_step(batch, fresh(stochastic()))
    for before, after in zip(at_start(stochastic())[:2], moved):
        np.testing.assert_array_equal(before[2], after[2])
        assert (before[:2] != after[:2]).all()


def test_references_differ_and_stay_on_the_client():
    given = {"backbone": stochastic(), "client": at_start(stochastic())}
    (first, (memory, message)), (second, _) = (train(fedsr, FedSRHparams(), one(i), **given) for i in range(2))
    assert isinstance(memory, Reference) and memory.mean.shape == (CLASSES, 5)
    assert not np.allclose(first.local.client.mean, second.local.client.mean)
    assert message == ()
    assert first.local.variables.params.keys() == {"conv", "dense", "posterior", "head"}


def test_without_penalties_and_noise_fedsr_is_fedavg_on_the_means():
    variables = fresh(stochastic())
    posterior = variables.params["posterior"]
    silent = {"kernel": posterior["kernel"].at[:, 5:].set(0.0), "bias": posterior["bias"].at[5:].set(-30.0)}
    variables = Variables({**variables.params, "posterior": silent}, {})
    given = {"variables": variables, "backbone": stochastic()}
    noisy, _ = train(fedsr, FedSRHparams(LR, l2=0.0, cmi=0.0), client=at_start(stochastic()), **given)
    plain, _ = train(fedavg, FedAvgHparams(LR), **given)
    # what is left of the noise is the floor of 1e-5
    chex.assert_trees_all_close(noisy.local.variables, plain.local.variables, atol=1e-4)
    chex.assert_trees_all_equal(noisy.local.client, at_start(stochastic()))


def test_predictions_are_log_probabilities(key):
    inputs = two_clients().inputs[0, :5]
    log_probabilities = fedsr().predict(stochastic(), gaussian_variables(0.0, 1.0), inputs, key)
    assert log_probabilities.shape == (5, CLASSES)
    np.testing.assert_allclose(jax.nn.logsumexp(log_probabilities, axis=1), np.zeros(5), atol=1e-6)


def test_predictions_average_probabilities(key):
    """4,000 draws against as many of NumPy's; five standard errors of both."""
    variables = gaussian_variables(0.0, 3.0)
    predicted = fedsr(samples=4000).predict(stochastic(), variables, jnp.zeros((1, 6, 6, 2)), key)[0]
    z = np.random.default_rng(0).normal(size=(4000, 5)) * 3.0
    probabilities = jax.nn.softmax(stochastic().head(variables, jnp.asarray(z, jnp.float32)))
    error = 5 * np.sqrt(2) * np.asarray(probabilities).std(0) / np.sqrt(4000)
    assert np.all(np.abs(np.exp(predicted) - probabilities.mean(0)) < error)


def test_fedsr_keeps_the_names_and_symmetries_of_the_network(key):
    backbone = fedsr().adapt(lenet5(num_classes=4))
    variables = fresh(backbone)
    assert variables.params.keys() == {"conv1", "conv2", "dense1", "dense2", "posterior", "head"}
    assert variables.params["posterior"]["kernel"].shape == (84, 168)
    inputs = jax.random.normal(key, (3, 32, 32, 3))
    other = variables
    for group in backbone.groups:
        other = permute(other, group, jnp.roll(jnp.arange(group.size), 1))
    features = jax.jit(backbone.features)
    before, after = features(variables, inputs), features(other, inputs)
    np.testing.assert_allclose(after, before, rtol=1e-4, atol=1e-5)
    assert not np.allclose(other.params["conv2"]["kernel"], variables.params["conv2"]["kernel"])


SHARED = functools.partial(fedsr, share_reference=True)
LEARNED = functools.partial(fedsr, learn_kappa=True)


def test_a_shared_reference_is_part_of_the_model():
    """The same training, with the reference uploaded and no state on the client."""
    start = SHARED().init(stochastic(), fresh(stochastic()), jax.random.key(0))
    assert start.client == () and start.variables.params["reference"].keys() == {"mean", "rho", "log_kappa"}
    given = {"backbone": stochastic()}
    shared, (memory, message) = train(SHARED, FedSRHparams(LR), variables=start.variables, **given)
    apart, _ = train(fedsr, FedSRHparams(LR), client=at_start(stochastic()), **given)
    assert memory == () and message == ()
    params = dict(shared.local.variables.params)
    chex.assert_trees_all_close(Reference(**params.pop("reference")), apart.local.client, atol=1e-7)
    chex.assert_trees_all_close(params, apart.local.variables.params, atol=1e-7)


def test_kappa_is_learned_only_on_request():
    """d KL(N(k mu, (k sigma)^2) || N(0, s^2)) / d log k = sum ((k sigma)^2 + (k mu)^2) / s^2 - 1."""
    variables = gaussian_variables(0.7, 0.9)
    fixed, metrics = stochastic_step(batch_of(one()), variables, FedSRHparams(1.0, l2=0.0, cmi=1.0))
    learned, same = stochastic_step(batch_of(one()), variables, FedSRHparams(1.0, l2=0.0, cmi=1.0), LEARNED)
    assert fixed.log_kappa == 0.0 and metrics["cmi"] == same["cmi"]
    slope = 5 * ((0.9**2 + 0.7**2) / np.log1p(np.e) ** 2 - 1)
    assert learned.log_kappa == pytest.approx(-slope, rel=1e-3)


def test_fedsr_names_the_l2_forms():
    with pytest.raises(ValueError, match="squared"):
        fedsr(l2_form="square")


# --- any method -----------------------------------------------------------------------------------------------------


def test_what_a_client_draws_does_not_depend_on_padding():
    """FedSR draws in every step: two passes over 5 examples in 6 places, and in 10, where a pass has more empty steps."""
    given = {"backbone": stochastic(), "client": at_start(stochastic())}
    widened = jax.tree.map(lambda x: jnp.pad(x, [(0, 4)] + [(0, 0)] * (x.ndim - 1)), one())
    (few, _), (many, _) = (train(fedsr, FedSRHparams(LR), examples, **given) for examples in (one(), widened))
    assert few.steps == many.steps == 6
    chex.assert_trees_all_close(few.local.variables, many.local.variables, atol=1e-6)


@pytest.mark.parametrize("method", [scaffold(), mtgc(z_init="grad")], ids=["scaffold", "mtgc"])
def test_keeping_an_optimizer_without_state_changes_nothing(method):
    """Through every hook that a client's state passes: begin, step, report, survey."""
    plain, kept = (
        quadratic_rounds(m, *mixed(), 0.0, 2, steps=3, station_rounds=2) for m in (method, keep_optimizer(method))
    )
    np.testing.assert_allclose(thetas(kept), thetas(plain), rtol=1e-14)
    chex.assert_trees_all_close(kept.clients[0], plain.clients, rtol=1e-14)
