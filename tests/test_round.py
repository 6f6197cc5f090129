"""The round against the naive reference, the hierarchy's reductions, batch order, participants, local optimizers."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
from quadratic import quadratic_backbone, quadratic_data, quadratic_rounds
from tiny import tiny_backbone, tiny_federation

from fedjax_dg import make_round
from fedjax_dg.aggregators import mean
from fedjax_dg.algorithms import (
    FedAvgHparams,
    FedIIRHparams,
    FedProxHparams,
    MTGCHparams,
    ScaffoldHparams,
    fedavg,
    fediir,
    fedprox,
    keep_optimizer,
    mtgc,
    scaffold,
)
from fedjax_dg.local import choose_participants, map_clients, plan_batches
from fedjax_dg.types import Start, Topology

BACKBONE = tiny_backbone()
LR = 0.05
RAGGED = [[3, 5, 2], [4, 0, 6]]
EQUAL = [[6, 6, 6], [6, 6, 6]]
# float32 sums in another order, through up to 36 local steps; the papers' model differences divide them by K lr
CLOSE = {"rtol": 2e-5, "atol": 2e-5}


def rounds_of(algorithm, topology, **rules):
    """``run(federation, rounds, key)`` -> (state, info) at the start and after each round; compiled once for all."""
    round_fn = make_round(BACKBONE, algorithm, topology, **rules)
    step = jax.jit(round_fn.step)

    def run(federation, rounds, key):
        state = round_fn.init(jax.random.key(0))
        reached = [(state, None)]
        for _ in range(rounds):
            state, info = step(state, federation.data, key)
            reached.append((state, info))
        return reached

    return run


def last_state(algorithm, federation, rounds, key):
    return rounds_of(algorithm, federation.topology)(federation, rounds, key)[-1][0]


@functools.cache
def start():
    """The parameters that every run of ``rounds_of`` starts from."""
    return make_round(BACKBONE, fedavg(), Topology(1, 1)).init(jax.random.key(0)).variables.params


def at(tree, *place):
    return jax.tree.map(lambda x: x[place], tree)


# --- the naive reference --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ragged():
    return tiny_federation(RAGGED, padding=1, fill=np.nan, station_rounds=2, local_epochs=2, batch_size=2)


def test_fedavg_is_the_reference(ragged, key):
    state, info = rounds_of(fedavg(FedAvgHparams(LR)), ragged.topology)(ragged, 3, key)[-1]
    expected = reference.fedavg(BACKBONE, ragged, start(), key, 3, LR, momentum=0.9)
    chex.assert_trees_all_close(state.variables.params, expected, **CLOSE)
    assert info.steps.tolist() == [[4, 6, 2], [4, 0, 6]]


def test_fedprox_is_the_reference(ragged, key):
    state = last_state(fedprox(FedProxHparams(LR, mu=1.0)), ragged, 3, key)
    expected = reference.fedprox(BACKBONE, ragged, start(), key, 3, LR, momentum=0.9, mu=1.0)
    chex.assert_trees_all_close(state.variables.params, expected, **CLOSE)


def test_fediir_is_the_reference(ragged, key):
    state = last_state(fediir(FedIIRHparams(LR, gamma=0.5, ema=0.6)), ragged, 3, key)
    params, running = reference.fediir(BACKBONE, ragged, start(), key, 3, LR, momentum=0.9, gamma=0.5, ema=0.6)
    chex.assert_trees_all_close(state.variables.params, params, **CLOSE)
    chex.assert_trees_all_close(state.shared, running, **CLOSE)


def test_scaffold_is_the_papers_option_two(ragged, key):
    state = last_state(scaffold(ScaffoldHparams(LR)), ragged, 3, key)
    params, shared, controls = reference.scaffold(BACKBONE, ragged, start(), key, 3, LR)
    chex.assert_trees_all_close(state.variables.params, params, **CLOSE)
    chex.assert_trees_all_close(state.shared, shared, **CLOSE)
    for place, control in controls.items():
        chex.assert_trees_all_close(at(state.clients, *place), control, **CLOSE)


def test_mtgc_is_the_papers_model_differences(key):
    federation = tiny_federation(EQUAL, station_rounds=2, batch_size=2)
    state = last_state(mtgc(MTGCHparams(LR)), federation, 3, key)
    params, z, y = reference.mtgc(BACKBONE, federation, start(), key, 3, LR)
    chex.assert_trees_all_close(state.variables.params, params, **CLOSE)
    for (s, c), expected in z.items():
        own = jax.tree.map(jnp.subtract, at(state.stations.gradient, s), at(state.clients, s, c))
        chex.assert_trees_all_close(own, expected, **CLOSE)
    for s, expected in y.items():
        chex.assert_trees_all_close(at(state.stations.y, s), expected, **CLOSE)


# --- the hierarchy reduces to flat FedAvg ---------------------------------------------------------------------------


@functools.cache
def one_level(equal=False):
    """A federation, and FedAvg's models of two rounds over all its clients at once."""
    federation = tiny_federation(EQUAL if equal else RAGGED, batch_size=2)
    expected = reference.fedavg(BACKBONE, reference.flat(federation), start(), jax.random.key(0), 2, LR, momentum=0.9)
    return federation, expected


def test_one_station_is_fedavg(key):
    federation, expected = one_level()
    state = last_state(fedavg(FedAvgHparams(LR)), reference.flat(federation), 2, key)
    chex.assert_trees_all_close(state.variables.params, expected, **CLOSE)


def test_sample_weights_at_both_tiers_are_fedavg(key):
    federation, expected = one_level()
    state = last_state(fedavg(FedAvgHparams(LR)), federation, 2, key)
    chex.assert_trees_all_close(state.variables.params, expected, **CLOSE)


def test_client_count_weights_are_fedavg_for_equal_sizes_only(key):
    run = rounds_of(fedavg(FedAvgHparams(LR)), one_level()[0].topology, to_server=mean("clients"))
    for equal in (True, False):
        federation, expected = one_level(equal)
        params = run(federation, 2, key)[-1][0].variables.params
        gap = max(float(jnp.abs(x - y).max()) for x, y in zip(jax.tree.leaves(params), jax.tree.leaves(expected)))
        assert gap < 2e-5 if equal else gap > 1e-3


# --- batch order ----------------------------------------------------------------------------------------------------

HOLES = np.array([1, 0, 1, 1, 0, 1, 1], bool)  # 5 real examples in 7 places
EPOCHS = Topology(1, 1, local_epochs=3, batch_size=2)
STEPS = Topology(1, 1, local_steps=9, batch_size=2)


def reads(plan):
    """What each step reads."""
    return [index[valid].tolist() for index, valid in zip(np.asarray(plan.index), np.asarray(plan.valid))]


def passes(plan):
    """What each pass reads, in order."""
    number = np.asarray(plan.passes)
    return [sum((r for r, n in zip(reads(plan), number) if n == p), []) for p in range(number.max() + 1)]


@pytest.mark.parametrize(
    ("topology", "sizes"),
    [(EPOCHS, [2, 2, 1, 0] * 3), (STEPS, [2, 2, 1] * 3)],  # the largest client would make 4 steps a pass
    ids=["epochs", "steps"],
)
def test_every_pass_reads_every_real_example_once(topology, sizes, key):
    plan = plan_batches(jnp.asarray(HOLES), topology, key)
    assert [len(r) for r in reads(plan)] == sizes
    assert [sorted(p) for p in passes(plan)] == [[0, 2, 3, 5, 6]] * 3


@pytest.mark.parametrize("topology", [EPOCHS, STEPS], ids=["epochs", "steps"])
def test_shuffles_differ_between_passes_and_keys(topology, key):
    mask = jnp.ones(8, bool)
    one, two = (passes(plan_batches(mask, topology, jax.random.fold_in(key, i))) for i in range(2))
    shuffles = [tuple(p) for p in (*one[:2], *two[:2])]
    assert len(set(shuffles)) == 4
    assert tuple(range(8)) not in shuffles


def test_examples_come_first_equally_often(key):
    """Each of 5 examples opens a fifth of 2000 shuffles, within four standard deviations."""
    plans = jax.vmap(lambda k: plan_batches(jnp.asarray(HOLES), EPOCHS, k).index[0, 0])(jax.random.split(key, 2000))
    counts = np.bincount(np.asarray(plans), minlength=7)
    assert counts[~HOLES].tolist() == [0, 0]
    assert np.all(np.abs(counts[HOLES] - 400) < 4 * np.sqrt(2000 * 0.2 * 0.8))


@pytest.mark.parametrize("topology", [EPOCHS, STEPS], ids=["epochs", "steps"])
def test_more_padding_leaves_the_order_of_real_examples(topology, key):
    few, many = (passes(plan_batches(jnp.arange(places) < 5, topology, key)) for places in (5, 12))
    assert few == many


@pytest.mark.parametrize("topology", [EPOCHS, STEPS], ids=["epochs", "steps"])
def test_a_client_without_examples_reads_nothing(topology, key):
    assert not plan_batches(jnp.zeros(4, bool), topology, key).valid.any()


def test_a_batch_larger_than_the_client_holds_it_all(key):
    plan = plan_batches(jnp.asarray(HOLES), EPOCHS._replace(batch_size=32), key)
    assert plan.valid.shape == (3, 7)
    assert [sorted(r) for r in reads(plan)] == [[0, 2, 3, 5, 6]] * 3


# --- participants ---------------------------------------------------------------------------------------------------

SIZES = np.array([[3, 5, 2, 0, 4], [4, 0, 6, 1, 0]])
IDS = jnp.arange(10).reshape(2, 5)


@pytest.fixture(scope="module")
def sampled():
    """SCAFFOLD with two participants a station: states and infos of six rounds, the start first."""
    federation = tiny_federation(SIZES, station_rounds=2, batch_size=2, participants=2)
    return rounds_of(scaffold(ScaffoldHparams(LR)), federation.topology)(federation, 6, jax.random.key(0))


def test_only_clients_with_data_take_part(sampled):
    for _, info in sampled[1:]:
        assert info.participants.shape == info.steps.shape == (2, 2)
        assert all(len(set(station.tolist())) == 2 for station in info.participants)
        held = np.take_along_axis(SIZES, np.asarray(info.participants), axis=1)
        assert (held > 0).all()
        assert np.array_equal(info.steps, -(-held // 2))


def test_rounds_draw_different_participants(sampled):
    assert len({tuple(info.participants.ravel().tolist()) for _, info in sampled[1:]}) > 1


def test_others_keep_their_state(sampled):
    for (before, _), (after, info) in zip(sampled, sampled[1:]):
        for s, c in np.ndindex(SIZES.shape):
            same = jax.tree.map(np.array_equal, at(before.clients, s, c), at(after.clients, s, c))
            assert jax.tree.all(same) != (c in info.participants[s])


def test_scaffold_keeps_c_the_mean_of_all_controls(sampled):
    shares = SIZES / SIZES.sum()
    for state, _ in sampled:
        mean_control = jax.tree.map(lambda x: np.tensordot(shares, x, 2), state.clients)
        chex.assert_trees_all_close(state.shared, mean_control, atol=1e-6)


def test_draws_follow_ids(key):
    order = np.array([3, 0, 4, 2, 1])
    present = jnp.asarray(SIZES > 0)
    here = np.take_along_axis(np.asarray(IDS), np.asarray(choose_participants(present, IDS, 2, key)), 1)
    there = choose_participants(present[:, order], IDS[:, order], 2, key)
    there = np.take_along_axis(np.asarray(IDS[:, order]), np.asarray(there), 1)
    assert np.array_equal(np.sort(here, 1), np.sort(there, 1))


def test_every_client_with_data_is_equally_likely(key):
    """Station 0 draws 2 of 4, station 1 draws 2 of 3: counts of 2000 rounds within four standard deviations."""
    draw = jax.vmap(lambda k: choose_participants(jnp.asarray(SIZES > 0), IDS, 2, k))
    picked = np.asarray(draw(jax.random.split(key, 2000)))
    for s, expected in enumerate((2 / 4, 2 / 3)):
        counts = np.bincount(picked[:, s].ravel(), minlength=5)
        assert np.all(np.abs(counts[SIZES[s] > 0] - 2000 * expected) < 4 * np.sqrt(2000 * expected * (1 - expected)))
        assert not counts[SIZES[s] == 0].any()


def test_a_short_station_fills_up_with_empty_clients(key):
    present = jnp.array([[False, False, True, False, False]])
    picked = choose_participants(present, IDS[:1], 2, key)[0].tolist()
    assert len(set(picked)) == 2 and 2 in picked


def test_a_client_without_data_keeps_its_state(key):
    """Whatever its method would report: here the number of its station rounds."""
    counting = fedavg()._replace(
        init=lambda backbone, variables, key: Start(variables, client=jnp.zeros(())),
        report=lambda backbone, received, local, steps, examples, key: (local.client + 1.0, ()),
    )
    round_fn = make_round(quadratic_backbone(), counting, Topology(2, 2, station_rounds=3))
    examples, ids = quadratic_data(np.ones((2, 2, 1)), np.zeros((2, 2, 1)))
    examples = examples._replace(mask=jnp.array([[[True], [False]], [[False], [True]]]))
    state, info = jax.jit(round_fn.step)(round_fn.init(key), (examples, ids), key)
    assert state.clients.tolist() == [[3.0, 0.0], [0.0, 3.0]]
    assert info.steps.tolist() == [[1, 0], [0, 1]]


# --- layout in memory -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [0, 1, 2, 8])
def test_every_chunk_maps_each_client_with_its_station(chunk):
    """Also chunks that do not divide the clients, or that exceed them."""
    stations, clients = jnp.array([10.0, 20.0]), {"x": jnp.arange(6.0).reshape(2, 3)}
    one = lambda more, s, c: {"sum": more + s + c["x"], "pair": jnp.stack([s, c["x"]])}
    out = map_clients(one, jnp.float32(0.5), stations, clients, chunk)
    assert out["sum"].tolist() == [[10.5, 11.5, 12.5], [23.5, 24.5, 25.5]]
    assert out["pair"][1, 2].tolist() == [20, 5]


@pytest.mark.parametrize("chunk", [0, 1, 2])
def test_what_stations_make_anew_is_given_back_with_the_rest(chunk):
    """Both of the renewed, from what they and a third one were, whatever is done to them before."""
    stations = jnp.array([10.0, 20.0]), jnp.array([[1.0, 2.0], [3.0, 4.0]]), jnp.array([5.0, 7.0])
    clients = jnp.arange(6.0).reshape(2, 3)
    one = lambda common, station, c: station[0] + c
    finish = lambda station, sums: ((station[0] + station[2], station[1] * sums.sum()), sums, station[1].sum())
    (first, second), sums, rest = map_clients(one, (), stations, clients, chunk, finish, renewed=2)
    assert first.tolist() == [15, 27] and second.tolist() == [[33, 66], [216, 288]]
    assert sums.tolist() == [[10, 11, 12], [23, 24, 25]] and rest.tolist() == [3, 7]


def test_the_models_of_all_stations_are_in_memory_once():
    """A further station takes room for one, where their broadcast start and their ends would be two."""

    def memory(num_stations, width=100_000):
        def merged(model, clients):
            start = jnp.broadcast_to(model, (num_stations, width))
            finish = lambda station, models: ((models.mean(0),), models.sum())
            (ends,), _ = map_clients(lambda _, station, c: station[0] * c, (), (start,), clients, 1, finish, renewed=1)
            return ends.sum(0)

        shapes = jax.ShapeDtypeStruct((width,), jnp.float32), jax.ShapeDtypeStruct((num_stations, 2), jnp.float32)
        return jax.jit(merged).lower(*shapes).compile().memory_analysis().temp_size_in_bytes / (4 * width)

    assert memory(12) - memory(4) < 8.5


# --- local optimizers -----------------------------------------------------------------------------------------------


def two_steps_at_a_time(algorithm, restart_every, optimizer):
    """One client, 3 server rounds x 2 station rounds x 2 steps: its model, and that of a plain loop of 12 steps."""
    a, b = np.array([1.0, 4.0]), np.array([0.5, -1.0])
    got = quadratic_rounds(algorithm, [[a]], [[b]], 0.0, 3, steps=2, station_rounds=2).variables.params["theta"][-1]
    with jax.enable_x64(True):
        expected = reference.one_client(lambda theta: a * (theta - b), jnp.zeros(2), optimizer, 12, restart_every)
    return got, expected


def test_momentum_restarts_in_every_station_round():
    plain = fedavg(FedAvgHparams(LR))
    np.testing.assert_allclose(*two_steps_at_a_time(plain, 2, optax.sgd(LR, momentum=0.9)), rtol=1e-12)


def test_keep_optimizer_keeps_momentum_across_rounds():
    kept = keep_optimizer(fedavg(FedAvgHparams(LR)))
    np.testing.assert_allclose(*two_steps_at_a_time(kept, None, optax.sgd(LR, momentum=0.9)), rtol=1e-12)


def test_any_optax_optimizer_trains_locally():
    adamw = functools.partial(optax.adamw, weight_decay=0.1)
    np.testing.assert_allclose(*two_steps_at_a_time(fedavg(FedAvgHparams(LR), adamw), 2, adamw(LR)), rtol=1e-12)
