"""States that live in a model's coordinates move along when the model's units change places, alone and in whole rounds."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tiny import tiny_backbone, tiny_federation

from fedjax_dg import local, make_round, tree
from fedjax_dg.aggregators import Gram, hfedatm, mean
from fedjax_dg.algorithms import keep_optimizer, mtgc, scaffold
from fedjax_dg.algorithms.fedavg import FedAvgHparams, fedavg
from fedjax_dg.algorithms.mtgc import MTGCHparams
from fedjax_dg.algorithms.scaffold import ScaffoldHparams
from fedjax_dg.alignment import carry, permute
from fedjax_dg.types import Variables

BACKBONE = tiny_backbone()
GROUPS = BACKBONE.groups
ORDER = np.array([1, 2, 3, 0])  # a cycle: not its own inverse
ORDERS = {"conv": jnp.asarray(ORDER)}
SHAPES = jax.eval_shape(BACKBONE.init, jax.random.key(0))


def random_model(seed=0):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), jnp.float32), SHAPES)


def moved(params):
    """By hand: the convolution's outputs, and the dense layer's inputs at each of four places."""
    index = np.concatenate([4 * place + ORDER for place in range(4)])
    conv = {"kernel": params["conv"]["kernel"][..., ORDER], "bias": params["conv"]["bias"][ORDER]}
    return {**params, "conv": conv, "dense": {**params["dense"], "kernel": params["dense"]["kernel"][index]}}


def assert_same(actual, expected):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


# --- alone ----------------------------------------------------------------------------------------------------------


def test_whatever_is_shaped_like_the_parameters_moves_wherever_it_lies():
    model, other = random_model(), random_model(1).params
    state = {
        "control": other,
        "pair": (other, [other, jnp.arange(4)]),
        "model": model,
        "nothing": (),
        "none": None,
        "number": jnp.float32(3.0),
    }
    expected = {
        **state,
        "control": moved(other),
        "pair": (moved(other), [moved(other), jnp.arange(4)]),
        "model": Variables(moved(model.params), {}),
    }
    assert_same(carry(state, model, GROUPS, ORDERS), expected)
    assert_same(carry(other, model, GROUPS, ORDERS), moved(other))


def test_parts_of_the_parameters_move():
    """As the state of an optimizer for some of them."""
    model, other = random_model(), random_model(1).params
    for names in (["conv"], ["dense"], ["conv", "head"]):
        part, expected = ({name: tree[name] for name in names} for tree in (other, moved(other)))
        assert_same(carry((part, [part]), model, GROUPS, ORDERS), (expected, [expected]))


def test_the_moments_of_an_optimizer_move():
    model, gradient = random_model(), random_model(1).params
    optimizer = optax.chain(optax.trace(0.9), optax.scale_by_adam())
    after = jax.jit(lambda gradient: optimizer.update(gradient, optimizer.init(model.params), model.params)[1])
    assert_same(carry(after(gradient), model, GROUPS, ORDERS), after(moved(gradient)))


def test_what_is_not_in_these_coordinates_stays():
    """Other shapes, other names: nothing says which units they belong to."""
    model = random_model()
    doubled = jax.tree.map(lambda x: jnp.stack([x, x]), model.params)
    renamed = {f"{name}_": layer for name, layer in model.params.items()}
    for state in (doubled, renamed, model.params["conv"]["kernel"], jnp.arange(4), {}, ()):
        assert_same(carry(state, model, GROUPS, ORDERS), state)
    assert_same(carry(model.params, model, GROUPS, {}), model.params)
    assert_same(carry(model.params, model, (), ORDERS), model.params)


def test_grams_move_beside_the_parameters():
    rng, model = np.random.default_rng(0), random_model()
    index = np.concatenate([4 * place + ORDER for place in range(4)])

    def gram(x):
        return Gram(jnp.asarray(x.T @ x), jnp.asarray(x.sum(0)), jnp.float32(len(x)))

    x, z = (rng.integers(-3, 4, size=(9, width)).astype(np.float32) for width in (16, 5))  # sums are exact
    state = ({"dense": gram(x), "head": gram(z)}, {"deep": ({"dense": gram(x)}, model.params)})
    expected = (
        {"dense": gram(x[:, index]), "head": gram(z)},
        {"deep": ({"dense": gram(x[:, index])}, moved(model.params))},
    )
    assert_same(carry(state, model, GROUPS, ORDERS), expected)


def test_carrying_there_and_back_changes_nothing():
    model = random_model()
    there = carry((model, model.params), model, GROUPS, ORDERS)
    assert_same(carry(there, model, GROUPS, {"conv": jnp.argsort(ORDERS["conv"])}), (model, model.params))
    assert_same(there[0], permute(model, GROUPS[0], ORDERS["conv"]))


def test_a_plan_mixes_states_as_it_mixes_filters():
    model, other = random_model(), random_model(1).params
    plan = jnp.asarray(0.7 * np.eye(4)[ORDER] + 0.3 * np.eye(4), jnp.float32)
    mixed = carry(other, model, GROUPS, {"conv": plan})
    expected = jax.tree.map(lambda a, b: 0.7 * a + 0.3 * b, moved(other), other)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), mixed, expected)


# --- in rounds ------------------------------------------------------------------------------------------------------

# One local step, for the wrapper below.
FEDERATION = tiny_federation([[3, 5], [4, 6]], station_rounds=1, local_steps=1, batch_size=8)
RELABELLED = 1  # the station whose clients come out in another order


def relabelled(algorithm, order):
    """The same method, but at one station the trained models come out with their units in this order, and with them all
    that a client remembers and sends. Only names have changed, so the next round must not know.
    """

    def change(state, station, variables):
        there = jnp.where(station == RELABELLED, order, jnp.arange(4))  # a station holds one domain
        return carry(state, variables, GROUPS, {"conv": there})

    def step(backbone, received, at, batch, key):
        moved, metrics = algorithm.step(backbone, received, at, batch, key)
        return moved._replace(variables=change(moved.variables, batch.domain.max(), moved.variables)), metrics

    def report(backbone, received, at, steps, examples, key):
        told = algorithm.report(backbone, received, at, steps, examples, key)
        return change(told, examples.domain.max(), at.variables)

    return algorithm._replace(step=step, report=report)


METHODS = {
    "scaffold": lambda: scaffold(ScaffoldHparams(client_lr=0.02)),
    "mtgc": lambda: mtgc(MTGCHparams(client_lr=0.02), z_init="persist"),
    "kept momentum": lambda: keep_optimizer(fedavg(FedAvgHparams(client_lr=0.02))),
}


def two_rounds(make_algorithm, rule):
    """Jitted order -> the states after two rounds from a model whose filters are far apart, and what the server says."""

    @jax.jit
    def states(order):
        round_fn = make_round(BACKBONE, make_algorithm(order), FEDERATION.topology, to_server=rule)
        state = round_fn.init(jax.random.key(0))._replace(variables=random_model())

        def one(state, _):
            state, info = round_fn.step(state, FEDERATION.data, jax.random.key(1))
            return state, (state, info.server_merge)

        return jax.lax.scan(one, state, length=2)[1]

    return states


@functools.cache
def aligned(name):
    """Rounds that align; dense layers are averaged."""
    rule = hfedatm(regmean=False, assignment="hungarian")
    return two_rounds(lambda order: relabelled(METHODS[name](), order), rule)


def near(one, other):
    assert jax.tree.structure(one) == jax.tree.structure(other)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=2e-6), one, other)


@pytest.mark.parametrize("name", METHODS)
def test_a_round_does_not_know_in_which_order_a_station_has_its_units(name):
    """Alignment brings models back into the server's order, and control variates, corrections and momenta with them."""
    plain, told = aligned(name)(jnp.arange(4))
    assert told["fot"]["conv"]["identity_fraction"].tolist() == [[1.0, 1.0]] * 2
    states, told = aligned(name)(ORDERS["conv"])
    assert told["fot"]["conv"]["identity_fraction"].tolist() == [[1.0, 0.0]] * 2
    near(states, plain)
    assert any(x.any() for x in jax.tree.leaves(states.clients))


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_where_nothing_moves_a_round_is_that_of_the_mean(name):
    plain, _ = two_rounds(lambda order: METHODS[name](), mean("clients"))(jnp.arange(4))
    near(aligned(name)(jnp.arange(4))[0], plain)


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_states_left_behind_would_show(monkeypatch, name):
    """So the test above can fail: without moving them, client states are those of other units."""
    expected = tree.take(aligned(name)(jnp.arange(4))[0], 0)
    monkeypatch.setattr(local, "follow", lambda backbone, start, orders, *states: states)
    left = tree.take(aligned.__wrapped__(name)(ORDERS["conv"])[0], 0)
    near(left.variables, expected.variables)
    apart = [abs(a - b).max() for a, b in zip(jax.tree.leaves(left.clients), jax.tree.leaves(expected.clients))]
    assert max(apart) > 1e-2
