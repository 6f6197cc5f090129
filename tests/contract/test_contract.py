"""What every algorithm keeps with every aggregator, on the tiny network with clients of unequal sizes, one of them empty.

A method enters by its line in ``ALGORITHMS`` or ``AGGREGATORS``.
"""

import dataclasses
import functools
import inspect
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from tiny import backbone_for, contract_federation, tiny_federation, tiny_method

from fedjax_dg import Round, make_round, sharding, tree
from fedjax_dg.aggregators import AGGREGATORS, mean
from fedjax_dg.algorithms import ALGORITHMS, keep_optimizer
from fedjax_dg.config import aggregator_numbers
from fedjax_dg.traffic import messages
from fedjax_dg.types import Start

FEDERATION = contract_federation()
PARTIAL = tiny_federation([[3, 5, 2, 4], [4, 0, 6, 1]], station_rounds=2, local_steps=3, participants=2)
#: Methods that differ in their hooks; the others differ from FedAvg in the loss or a step alone, and with HFedATM only their
#: round itself is compiled every day.
DEEP = ("fedavg", "scaffold", "fediir", "mtgc", "fedsr", "fedadg", "afl", "gperxan", "mcgdm")
#: Methods that are FedAvg with another loss: it sees a batch of one client, so how clients are laid out, who takes part and
#: which optimizer persists is nothing to it.
LOSSES = ("fedprox", "rsc", "irm", "vrex", "mmd", "coral", "mixup")
KEY = jax.random.key(0)
# float32 sums in another order
CLOSE = {"rtol": 1e-5, "atol": 1e-6}


def everyday(algorithm, aggregator):
    return aggregator in ("mean", "hfedatm") or algorithm in ("fedavg", "scaffold")


def combination(algorithm, aggregator, slow=False):
    marks = () if everyday(algorithm, aggregator) and not slow else pytest.mark.slow
    return pytest.param((algorithm, aggregator), id=f"{algorithm}-{aggregator}", marks=marks)


#: Traced every day, as the round of every pair is; compiled and run of these: the pairs with an algorithm of its own hooks
#: and HFedATM, and each once.
TRACED = [combination(algorithm, aggregator) for algorithm in ALGORITHMS for aggregator in AGGREGATORS]
ALL = [
    combination(a, g, slow=g != "mean" and a != "fedavg" and not (g == "hfedatm" and a in DEEP))
    for a in ALGORITHMS
    for g in AGGREGATORS
]
#: Each algorithm with plain averaging, and each rule with FedAvg, every day; all others are slow.
EACH_ONCE = [combination(a, "mean") for a in ALGORITHMS] + [
    combination("fedavg", g) for g in AGGREGATORS if g != "mean"
]
OPTIONS = [combination(*p.values[0], slow=p.values[0][0] in LOSSES) for p in EACH_ONCE]
THOROUGH = [
    combination(a, g, slow=a in LOSSES or (g != "mean" and (a, g) != ("scaffold", "hfedatm") and a != "fedavg"))
    for a in ALGORITHMS
    for g in AGGREGATORS
]
#: Of those, the algorithms that differ in their hooks every day.
DEEP_ONCE = [combination(*p.values[0], slow=p.values[0][0] not in DEEP) for p in EACH_ONCE]
#: Of those, the algorithms alone, and HFedATM, every day: where a round is spread over devices it is three in a block with
#: every rule, and where hyper-parameters are swept clients of every rule are computed side by side.
AT_ONCE = [
    combination(*p.values[0], slow=bool(p.marks) or p.values[0][1] not in ("mean", "hfedatm")) for p in DEEP_ONCE
]


class Case(NamedTuple):
    """A combination, and its first three rounds one at a time."""

    round_fn: Round
    states: list[Any]  # the start and after each round, on the host
    infos: list[Any]
    compilations: int


def hparams_of(names):
    return inspect.signature(ALGORITHMS[names[0]]).parameters["hparams"].default


def build(names, hparams=None, federation=FEDERATION, chunk=1, mesh=None) -> Round:
    algorithm, aggregator = tiny_method(names[0], hparams), AGGREGATORS[names[1]]
    topology = federation.topology._replace(local_epochs=algorithm.least_epochs)
    return make_round(backbone_for(names[0]), algorithm, topology, to_server=aggregator(), chunk=chunk, mesh=mesh)


def saved(state):
    return jax.tree.map(np.array, state)


def loaded(state):
    return jax.tree.map(jnp.array, state)


def single_rounds(round_fn, state, data, rounds):
    """The saved states and infos after each of ``rounds`` blocks of one round."""
    states, infos = [], []
    for _ in range(rounds):
        state, info = round_fn.block(state, data, KEY, length=1)
        states.append(saved(state))
        infos.append(jax.tree.map(lambda x: np.array(x[0]), info))
    return states, infos


@functools.cache
def trace_of(names):
    """The round; shapes of its start; its block of one round, traced for those."""
    round_fn = build(names)
    start = jax.eval_shape(round_fn.init, KEY)
    return round_fn, start, round_fn.block.trace(start, FEDERATION.data, KEY, length=1)


@functools.cache
def case_of(names) -> Case:
    round_fn = trace_of(names)[0]  # whose trace is what is compiled here
    start = round_fn.init(KEY)
    first = saved(start)
    states, infos = single_rounds(round_fn, start, FEDERATION.data, 3)
    return Case(round_fn, [first, *states], infos, round_fn.block._cache_size())


def check_types(start, jaxpr, shapes):
    """The state that rounds return has the structure, shapes, dtypes and weak types of the one they were given."""
    assert jax.tree.structure(shapes[0]) == jax.tree.structure(start)
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(start)]
    assert dict(zip(paths, jaxpr.out_avals)) == dict(zip(paths, jaxpr.in_avals))


# --- the program ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("names", TRACED)
def test_a_round_returns_a_state_of_the_same_types(names):
    """Structure, shapes, dtypes and weak types: else blocks of rounds would compile again and again, or not at all."""
    _, start, block = trace_of(names)
    check_types(start, block.jaxpr, block.out_info)


@pytest.mark.parametrize("names", OPTIONS)
def test_the_types_stay_with_every_option_at_once(names):
    """Participants, local steps instead of passes, optimizers that persist, the rule at both tiers; all hyper-parameters
    are arguments of the program, of the algorithm and of the rule.
    """
    federation = PARTIAL

    def round_of(numbers):
        algorithm, rule = keep_optimizer(tiny_method(names[0], numbers[0])), AGGREGATORS[names[1]](**numbers[1])
        return make_round(backbone_for(names[0]), algorithm, federation.topology, to_server=rule, to_station=rule)

    def step(state, data, key, numbers):
        return round_of(numbers).step(state, data, key)

    numbers = hparams_of(names), aggregator_numbers(names[1])
    start = jax.eval_shape(round_of(numbers).init, KEY)
    check_types(start, *jax.make_jaxpr(step, return_shape=True)(start, federation.data, KEY, numbers))


@pytest.mark.parametrize("names", ALL)
def test_a_run_compiles_once(names):
    assert case_of(names).compilations == 1


def primitives(jaxpr):
    """The names of all primitives of a jaxpr and of those inside it."""
    for equation in jaxpr.eqns:
        yield equation.primitive.name
        for inner in jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, "eqns")):
            if hasattr(inner, "eqns"):
                yield from primitives(inner)


@pytest.mark.parametrize("names", TRACED)
def test_a_round_never_calls_the_host(names):
    found = set(primitives(trace_of(names)[2].jaxpr))
    assert "scan" in found and "dot_general" in found  # the walk goes inside
    assert not {name for name in found if "callback" in name or "debug" in name}


# --- ways to run it -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("names", AT_ONCE)
def test_three_rounds_in_one_block_all_clients_at_once(names):
    case = case_of(names)
    state, infos = build(names, chunk=0).block(loaded(case.states[0]), FEDERATION.data, KEY, length=3)
    chex.assert_trees_all_close(state, case.states[3], **CLOSE)
    assert state.round == 3
    chex.assert_trees_all_close(infos, jax.tree.map(lambda *x: np.stack(x), *case.infos), **CLOSE)


@pytest.mark.parametrize("names", ALL)
def test_a_run_goes_on_from_a_saved_state(names):
    case = case_of(names)
    states, _ = single_rounds(case.round_fn, loaded(case.states[1]), FEDERATION.data, 2)
    chex.assert_trees_all_equal(states, case.states[2:])


def without_jit(algorithm, aggregator):
    return combination(algorithm, aggregator, slow=aggregator != "mean" or algorithm not in ("fedavg", "fediir"))


@pytest.mark.parametrize("names", [without_jit(*p.values[0]) for p in EACH_ONCE])
def test_a_round_needs_no_jit(names):
    case = case_of(names)
    state, _ = case.round_fn.step(loaded(case.states[0]), FEDERATION.data, KEY)
    chex.assert_trees_all_close(state, case.states[1], **CLOSE)


@functools.cache
def spread_over(names, across, within):
    """The case's round on a mesh: its compiled block of three rounds, and state and data placed there."""
    mesh = sharding.mesh_for(FEDERATION.topology, jax.devices()[: across * within])
    assert tuple(mesh.shape.values()) == (across, within)
    round_fn = build(names, mesh=mesh)
    state = sharding.place(case_of(names).states[0], mesh)
    data = sharding.place_data(FEDERATION.data, mesh)
    return round_fn.block.lower(state, data, KEY, length=3).compile(), state, data


# the everyday check of each: on all its devices
MESHES = [
    pytest.param(size, marks=() if size == (2, 4) else pytest.mark.slow, id=str(size)) for size in ((2, 1), (2, 4))
]


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("names", THOROUGH)
def test_three_rounds_spread_over_devices(names, mesh):
    """To 1e-6: the sums of weighted means are made in another order. All that devices say to each other are sums."""
    case = case_of(names)
    program, state, data = spread_over(names, *mesh)
    state, infos = program(state, data, KEY)
    chex.assert_trees_all_close(state, case.states[3], rtol=1e-6, atol=1e-6)
    # costs of alignment are differences of numbers about 1: a few units in their last place
    expected = jax.tree.map(lambda *x: np.stack(x), *case.infos)
    chex.assert_trees_all_close(infos, expected, rtol=1e-5, atol=3e-6)
    assert set(sharding.collectives(program)) == {"all-reduce"}


@pytest.mark.slow
def test_three_rounds_spread_over_two_processes(tmp_path):
    """Everyday combinations of the methods that differ in their hooks, as with one device."""
    pairs = [p.values[0] for p in ALL if everyday(*p.values[0]) and p.values[0][0] in DEEP]
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    worker = [sys.executable, str(Path(__file__).with_name("two_processes.py")), address]
    more = [str(tmp_path), *("-".join(names) for names in pairs)]
    started = [
        subprocess.Popen([*worker, str(i), *more], stdout=subprocess.PIPE, stderr=subprocess.STDOUT) for i in range(2)
    ]
    told = [process.communicate(timeout=900)[0].decode() for process in started]
    assert [process.returncode for process in started] == [0, 0], told
    for names in pairs:
        with np.load(tmp_path / f"{'-'.join(names)}.npz") as arrays:
            leaves = list(arrays.values())
        chex.assert_trees_all_close(leaves, jax.tree.leaves(case_of(names).states[3]), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("names", DEEP_ONCE)
def test_hyper_parameters_side_by_side(names):
    """A vmap over all of a method's, clients two at a time: the defaults beside doubled ones, either way round."""
    case = case_of(names)

    @jax.jit
    @jax.vmap
    def sweep(hparams):
        return build(names, hparams, chunk=2).step(loaded(case.states[0]), FEDERATION.data, KEY)[0]

    default, doubled = hparams_of(names), jax.tree.map(lambda x: 2.0 * x, hparams_of(names))
    one, other = (
        sweep(jax.tree.map(lambda *x: jnp.array(x), *pair)) for pair in ((default, doubled), (doubled, default))
    )
    chex.assert_trees_all_close(tree.take(one, 0), case.states[1], **CLOSE)
    chex.assert_trees_all_close(tree.take(one, 1), tree.take(other, 0), **CLOSE)
    kernels = one.variables.params["head"]["kernel"]
    assert not np.allclose(kernels[0], kernels[1])


# --- what must not matter -------------------------------------------------------------------------------------------


def spoiled(clean):
    """Examples with NaN images, absurd labels and domains in all places that are padding, the empty client's included."""
    real = np.asarray(clean.mask)
    return clean._replace(
        inputs=jnp.asarray(np.where(real[..., None, None, None], clean.inputs, np.nan)),
        labels=jnp.asarray(np.where(real, clean.labels, 10**6)),
        domain=jnp.asarray(np.where(real, clean.domain, -7)),
    )


DIRTY = spoiled(FEDERATION.clients)


@pytest.mark.parametrize("names", ALL)
def test_padding_is_never_read(names):
    case = case_of(names)
    states, infos = single_rounds(case.round_fn, loaded(case.states[0]), (DIRTY, FEDERATION.ids), 2)
    chex.assert_trees_all_equal(states, case.states[1:3])
    chex.assert_trees_all_equal(infos, case.infos[:2])


def moved(clients):
    """All that is [S, C, ...], with clients in other places of their stations."""
    order = np.array([[2, 0, 3, 1], [1, 3, 0, 2]])
    return jax.tree.map(lambda x: np.asarray(x)[np.arange(2)[:, None], order], clients)


MOVED = loaded(moved(FEDERATION.data))


@pytest.mark.parametrize("names", ALL)
def test_places_of_clients_do_not_matter(names):
    case = case_of(names)
    start = case.states[0]._replace(clients=moved(case.states[0].clients))
    states, infos = single_rounds(case.round_fn, loaded(start), MOVED, 2)
    expected = case.states[2]
    chex.assert_trees_all_close(states[-1], expected._replace(clients=moved(expected.clients)), **CLOSE)
    for name in ("metrics", "steps", "finite"):
        chex.assert_trees_all_close(getattr(infos[-1], name), moved(getattr(case.infos[1], name)), **CLOSE)


# FedGMA counts whose signs agree at each tier by itself: two tiers are another method than one
@pytest.mark.parametrize(
    "algorithm",
    [
        pytest.param(a, marks=() if a in ("fedavg", "scaffold", "mcgdm") else pytest.mark.slow)
        for a in ALGORITHMS
        if a != "fedgma"
    ],
)
def test_one_station_of_all_clients_is_the_same_federation(algorithm):
    """With one station round and sample weights. The flat one has no empty client, and more places, filled with NaN.

    What a station remembers (MTGC's y) tells the two apart after the first round.
    """
    names, sizes, with_data = (algorithm, "mean"), [[3, 5, 2], [4, 0, 6]], np.array([0, 1, 2, 3, 5])
    tiers = tiny_federation(sizes, batch_size=2)
    padded = reference.flat(tiny_federation(sizes, batch_size=2, padding=3, fill=np.nan))
    single = padded.topology._replace(clients_per_station=len(with_data))
    keep = functools.partial(jax.tree.map, lambda x: x[:, with_data])
    flat = dataclasses.replace(padded, clients=keep(padded.clients), ids=keep(padded.ids), topology=single)
    in_one = functools.partial(jax.tree.map, lambda x: x.reshape(1, -1, *x.shape[2:])[:, with_data])

    start = case_of(names).states[0]
    start = start._replace(clients=jax.tree.map(lambda x: x[:, :3], start.clients))
    flat_start = start._replace(clients=in_one(start.clients), stations=jax.tree.map(lambda x: x[:1], start.stations))
    apart, together = (build(names, federation=federation, chunk=0) for federation in (tiers, flat))
    rounds = 1 if jax.tree.leaves(start.stations) else 2
    expected = single_rounds(apart, loaded(start), tiers.data, rounds)[0][-1]
    state = single_rounds(together, loaded(flat_start), flat.data, rounds)[0][-1]
    chex.assert_trees_all_close(state.variables, expected.variables, **CLOSE)
    chex.assert_trees_all_close(state.shared, expected.shared, **CLOSE)
    chex.assert_trees_all_close(state.clients, in_one(expected.clients), **CLOSE)


# --- what leaves a client -------------------------------------------------------------------------------------------


def uploads(round_fn, rule, state, places):
    """Shapes of a client's messages when it holds ``places`` examples."""
    one = lambda x: jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), x)
    start = Start(state.variables, one(one(state.clients)), one(state.stations), state.shared)
    return messages(round_fn.backbone, round_fn.algorithm, (mean(), rule), start, places)


@pytest.mark.parametrize("names", ALL)
def test_no_example_leaves_a_client(names):
    """No message has an axis as long as the client's data (13 and 17 occur nowhere else), nor depends on that length."""
    case, rule = case_of(names), AGGREGATORS[names[1]]()
    few, many = (uploads(case.round_fn, rule, case.states[0], places) for places in (13, 17))
    assert few == many
    assert not any({13, 17} & set(leaf.shape) for leaf in jax.tree.leaves(few))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_kept_optimizer_stays_on_the_client(algorithm):
    def sent(kept):
        round_fn = make_round(
            backbone_for(algorithm), kept, FEDERATION.topology._replace(local_epochs=kept.least_epochs)
        )
        return uploads(round_fn, mean(), jax.eval_shape(round_fn.init, KEY), 13)

    assert sent(keep_optimizer(tiny_method(algorithm))) == sent(tiny_method(algorithm))
