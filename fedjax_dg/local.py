"""One client's part of a round, and the one place that decides how clients are laid out in memory."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from fedjax_dg import sharding, tree
from fedjax_dg.alignment.groups import carry
from fedjax_dg.backbones.backbone import first_readers
from fedjax_dg.types import (
    Aggregator,
    Algorithm,
    Examples,
    Key,
    Local,
    Metrics,
    PyTree,
    Received,
    Seen,
    Topology,
    Variables,
)

# How many examples a pass that is not training holds at once; only memory depends on it.
PASS_SIZE = 256


class Batches(NamedTuple):
    """Which examples [K, B] each of K local steps reads; ``valid`` is False for the empty places of a short batch."""

    index: Int[Array, "K B"]
    valid: Bool[Array, "K B"]
    passes: Int[Array, " K"]  # finished before this step
    final: Bool[Array, " K"]  # among the last pass's worth of steps


class Drawn(NamedTuple):
    """What the participants of one server round read, drawn before it: the data of a round where not all fits."""

    examples: Examples  # [S, P, U, ...]: each example that a client reads in this round, once
    plan: Batches  # [S, P, R, ...] for R station rounds
    counts: Int[Array, "S C"]  # examples of every client, read or not


class Trained(NamedTuple):
    """What one client's local training leaves behind."""

    local: Local
    seen: Seen | None  # in the last pass, if a rule watches it
    steps: Int[Array, ""]  # real ones: with at least one example
    metrics: Metrics  # means over the real steps
    finite: Bool[Array, ""]


class Visit(NamedTuple):
    """What one client's part of a station round yields; model and messages are its upload, the rest is simulation."""

    variables: Variables
    client: PyTree
    message: PyTree  # the algorithm's
    for_station: PyTree  # the station aggregator's measurements
    for_server: PyTree  # the server aggregator's
    steps: Int[Array, ""]
    metrics: Metrics
    finite: Bool[Array, ""]


def plan_batches(mask: Bool[Array, " N"], topology: Topology, key: Key) -> Batches:
    """Shuffled batches of a client's real examples; a new shuffle whenever all of them have been seen.

    In epochs, every client makes ``local_epochs`` passes, so one with fewer examples makes fewer steps; the rest of its
    steps are empty. In steps, every client with data makes exactly ``local_steps``. The last batch of a pass may be short.
    """
    places = mask.shape[0]
    size = min(topology.batch_size, places)
    num_examples = mask.sum()
    slots = -(-places // size)  # steps of a full pass, for the largest client
    if topology.local_steps is None:
        num_steps, per_pass = topology.local_epochs * slots, jnp.asarray(slots)
    else:
        num_steps, per_pass = topology.local_steps, jnp.maximum(-(-num_examples // size), 1)

    def shuffled(done):
        draws = jax.random.uniform(jax.random.fold_in(key, done), (places,))
        return jnp.argsort(jnp.where(mask, draws, jnp.inf))  # padding last

    def one(order, step):
        done, place = (step // per_pass).astype(jnp.int32), step % per_pass
        order = jax.lax.cond(place == 0, shuffled, lambda done: order, done)
        position = place * size + jnp.arange(size)
        batch = (order[jnp.minimum(position, places - 1)], position < num_examples, done, step >= num_steps - per_pass)
        return order, batch

    return Batches(*jax.lax.scan(one, jnp.arange(places), jnp.arange(num_steps))[1])


def holdings(data: Examples | Drawn) -> tuple[PyTree, PyTree, PyTree, Int[Array, "S C"]]:
    """The data of a round as: examples of all clients [S, C, N], or else of the participants [S, P, U] with the plan of
    their batches; and how many each client holds."""
    if isinstance(data, Drawn):
        return (), data.examples, data.plan, data.counts
    return data, (), (), data.mask.sum(-1)


def plan_round(
    topology: Topology, mask: Bool[Array, "S C N"], ids: Int[Array, "S C"], key: Key, number: Int[Array, ""] | int
) -> tuple[Int[Array, "S P"], Batches]:
    """Who takes part in server round ``number`` (from 0), and which of its N examples each of a client's steps reads.

    Batches are [S, P, R, ...] for R station rounds. These are the very draws that the round would make by itself.
    """
    draw_key, _, local_key = round_keys(key, number)
    picked = choose_participants(mask.any(-1), ids, topology.participants, draw_key)
    mask, ids = jax.tree.map(jax.vmap(lambda x, i: x[i]), (mask, ids), (picked, picked))

    def of_client(given):
        mask, i = given

        def of_station_round(number):
            train_key = visit_keys(client_key(station_round_key(local_key, number), i))[0]
            return plan_batches(mask, topology, train_keys(train_key)[0])

        return jax.lax.map(of_station_round, jnp.arange(topology.station_rounds))

    flat = lambda x: x.reshape(-1, *x.shape[2:])
    plan = jax.lax.map(of_client, (flat(mask), flat(ids)))
    return picked, jax.tree.map(lambda x: x.reshape(*picked.shape, *x.shape[1:]), plan)


# the keys of a round, in one place: what is drawn before a round must be what it would draw


def round_keys(key: Key, number: Int[Array, ""] | int) -> Array:
    """Of a server round: to draw participants, for the survey, for station rounds."""
    return jax.random.split(jax.random.fold_in(key, number), 3)


def station_round_key(local_key: Key, number: Int[Array, ""] | int) -> Key:
    return jax.random.fold_in(local_key, number)


def client_key(key: Key, identity: Int[Array, ""]) -> Key:
    return jax.random.fold_in(key, identity)


def visit_keys(key: Key) -> Array:
    """Of a client's part of a station round: training, its report, measuring for the station and for the server."""
    return jax.random.split(key, 4)


def train_keys(key: Key) -> Array:
    """Of a client's training: to shuffle its examples, for its steps."""
    return jax.random.split(key)


def take_batch(examples: Examples, index: Int[Array, " B"], valid: Bool[Array, " B"]) -> Examples:
    """The examples at ``index``, zeros where not ``valid``: padding may hold NaN and must not reach a gradient."""

    def pick(x):
        x = x[index]
        return jnp.where(valid.reshape(-1, *[1] * (x.ndim - 1)), x, jnp.zeros((), x.dtype))

    return Examples(*(pick(x) for x in examples))


def train(
    backbone,
    algorithm: Algorithm,
    topology: Topology,
    rules: tuple[Aggregator, Aggregator],
    received: Received,
    client: PyTree,
    examples: Examples,
    key: Key,
    plan: Batches | tuple = (),
) -> Trained:
    """Local training: ``algorithm.step`` over shuffled batches, from the received model. Empty steps change nothing.

    ``plan``: the batches, if they were chosen before (``plan_round``). Where one of the (station, server) ``rules`` watches,
    what the dense layers read in the last pass is kept.
    """
    plan_key, step_key = train_keys(key)
    batches = Batches(*plan) if plan else plan_batches(examples.mask, topology, plan_key)
    optimizer, tally = algorithm.begin(backbone, received, client)
    num_steps, size = batches.valid.shape
    slots = min(num_steps, -(-examples.mask.shape[0] // size))  # steps of a pass
    watching = [rule.watches for rule in rules if rule.watches is not None]
    watched = bool(watching)

    @functools.partial(jax.jit, inline=True)  # inlined: for JAX to trace it once, not wherever its shapes are asked for
    def move(local, number, index, valid):
        batch = take_batch(examples, index, valid)
        moved, metrics = algorithm.step(backbone, received, local, batch, jax.random.fold_in(step_key, number))
        if not watched:
            return moved._replace(seen=()), metrics, ()
        seen = {layer: x for layer, x in dict(moved.seen).items() if any(w(backbone, layer) for w in watching)}
        firsts = dict.fromkeys(first_readers(seen).values())
        rows = backbone.real_rows(batch.inputs, valid)
        return moved._replace(seen=()), metrics, Seen({layer: seen[layer] for layer in firsts}, rows)

    def step(carried, inputs):
        (local, kept), (place, number, index, valid, passes, final) = carried, inputs
        local, real = local._replace(passes=passes), valid.any()
        go = lambda: move(local, number, index, valid)
        local, metrics, seen = jax.lax.cond(real, go, lambda: (local, *tree.zeros(jax.eval_shape(go)[1:])))
        if watched:  # in a ring: what is left at the end is the last pass
            new = seen._replace(mask=seen.mask & final)
            kept = jax.tree.map(lambda all, x: jax.lax.dynamic_update_index_in_dim(all, x, place % slots, 0), kept, new)
        return (local, kept), (real, metrics)

    start = Local(received.variables, optimizer, client, tally, passes=jnp.int32(0))
    numbers = jnp.cumsum(batches.valid.any(1)) - 1  # of real steps: padding must not shift what later ones draw
    shapes = jax.eval_shape(move, start, numbers[0], batches.index[0], batches.valid[0])[2]
    if watched and not shapes.inputs:
        raise ValueError(
            "The steps of this algorithm do not show their forward passes (Local.seen), so nothing can be gathered from "
            "them: choose gram_at=client."
        )
    nothing = jax.tree.map(lambda x: jnp.zeros((slots, *x.shape), x.dtype), shapes) if watched else None
    (local, kept), (real, metrics) = jax.lax.scan(step, (start, nothing), (jnp.arange(num_steps), numbers, *batches))
    seen = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), kept)  # [slots, B, ...] as rows
    steps = real.sum()
    means = jax.tree.map(lambda x: x.sum(0) / jnp.maximum(steps, 1), metrics)
    return Trained(local, seen, steps, means, tree.all_finite((metrics, local.variables)))


def visit(
    backbone,
    algorithm: Algorithm,
    topology: Topology,
    rules: tuple[Aggregator, Aggregator],
    received: Received,
    own: tuple[PyTree, Batches | tuple],
    examples: Examples,
    key: Key,
    last: Bool[Array, ""] | bool,
) -> Visit:
    """All that one client does in a station round: train, report, measure for the (station, server) rules.

    ``own``: its state, and the plan of its batches if that was made before.

    What the server's rule wants is measured in the ``last`` station round only. A client without data keeps its state.
    """
    (to_station, to_server), (client, plan) = rules, own
    train_key, report_key, station_key, server_key = visit_keys(key)
    trained = train(backbone, algorithm, topology, rules, received, client, examples, train_key, plan)
    variables, seen = trained.local.variables, trained.seen
    memory, message = algorithm.report(backbone, received, trained.local, trained.steps, examples, report_key)

    @functools.partial(jax.jit, inline=True)  # traced once
    def for_server():
        if to_server.at_station:
            return ()
        return to_server.measure(backbone, received.server, variables, examples, server_key, seen)

    nothing = lambda: tree.zeros(jax.eval_shape(for_server))
    return Visit(
        variables=variables,
        client=tree.where(trained.steps > 0, memory, client),
        message=message,
        for_station=to_station.measure(backbone, received.variables, variables, examples, station_key, seen),
        for_server=for_server() if last is True else jax.lax.cond(last, for_server, nothing),
        steps=trained.steps,
        metrics=trained.metrics,
        finite=trained.finite,
    )


def add_leaves(one: PyTree, other: PyTree) -> PyTree:
    """Leafwise sum."""
    return jax.tree.map(jnp.add, one, other)


def sum_over_batches(
    statistic: Callable[[Examples], PyTree],
    examples: Examples,
    add: Callable[[PyTree, PyTree], PyTree] = add_leaves,
    size: int | None = None,
) -> PyTree:
    """Sum of ``statistic(batch)`` over a client's examples in batches of ``size``, with zeros as the empty sum.

    ``size``: by default ``PASS_SIZE``, which suits forward passes.
    """
    places = examples.mask.shape[0]
    size = min(size or PASS_SIZE, places)
    position = jnp.arange(-(-places // size) * size).reshape(-1, size)

    @functools.partial(jax.jit, inline=True)  # traced once
    def one(position):
        index = jnp.minimum(position, places - 1)
        return statistic(take_batch(examples, index, examples.mask[index] & (position < places)))

    if len(position) == 1:
        return one(position[0])
    zeros = tree.zeros(jax.eval_shape(one, position[0]))
    return jax.lax.scan(lambda total, p: (add(total, one(p)), None), zeros, position)[0]


def visiting(
    backbone, algorithm: Algorithm, topology: Topology, rules: tuple[Aggregator, Aggregator]
) -> tuple[Callable, Callable]:
    """A station round, as what each client does (``visit``) and then its station (``settle``)."""
    part = functools.partial(visit, backbone, algorithm, topology, rules)
    return part, functools.partial(settle, backbone, algorithm, rules)


def surveying(backbone, algorithm: Algorithm) -> tuple[Callable | None, Callable]:
    """The survey, as what each client does and then its station, which passes all on."""
    return functools.partial(algorithm.survey, backbone) if algorithm.survey else None, lambda station, seen: seen


def measuring(backbone, rule: Aggregator) -> tuple[Callable, Callable]:
    """What each client and then its station do for a rule that measures with the station's merged model."""

    def part(received, client, examples, key):
        return rule.measure(backbone, received.server, received.variables, examples, key, None)

    def finish(station, messages):
        _, _, weights = station
        return rule.combine(messages, weights)

    return part, finish


def map_clients(
    function: Callable,
    common: PyTree,
    per_station: PyTree,
    per_client: PyTree,
    chunk: int = 1,
    finish: Callable[[PyTree, PyTree], PyTree] | None = None,
    renewed: int = 0,
) -> PyTree:
    """``finish(per_station[s], results)`` of every station, where ``results`` [P, ...] are ``function(common,
    per_station[s], per_client[s, p])`` of its clients; without it ``results``. The one seam for memory and devices.

    ``chunk`` clients at a time: 0 = all at once (vmap), 1 = one after another (``estimate.choose_chunk``). Unless all at
    once, stations come one after another too, so that only one station's clients are in memory with their models and
    messages. On a mesh, every device does so with its own. Every choice computes the same function.
    ``renewed``: so many of ``per_station``, its first, are what ``finish`` gives anew, first: each then takes the old
    one's place, so that models of all stations are in memory once.
    """
    size = chunk if chunk > 1 else None

    def all_of(common, stations, clients, finish):
        num_stations, num_clients = jax.tree.leaves(clients)[0].shape[:2]
        end = finish or (lambda station, results: results)
        anew = renewed if finish else 0

        def station(state, s):
            here = tree.take((*state, *stations[anew:]) if anew else stations, s)
            # straight from the whole: a station's data taken first would be copied
            one = lambda c: function(common, here, jax.tree.map(lambda x: x[s, c], clients))
            found = end(here, jax.lax.map(one, jnp.arange(num_clients), batch_size=size))
            if not anew:
                return state, found
            put = lambda old, new: jax.lax.dynamic_update_index_in_dim(old, new, s, 0)
            return jax.tree.map(put, state, found[0]), found[1:]

        if chunk:
            state, found = jax.lax.scan(station, stations[:anew] if anew else (), jnp.arange(num_stations))
            return (state, *found) if anew else found
        every = lambda here, clients: end(here, jax.vmap(lambda client: function(common, here, client))(clients))
        return jax.vmap(every)(stations, clients)

    return sharding.each_client(all_of, finish, common, per_station, per_client)


def settle(
    backbone, algorithm: Algorithm, rules: tuple[Aggregator, Aggregator], station: tuple, seen: Visit
) -> tuple[tuple, PyTree, PyTree, tuple]:
    """The end of a station round at one station: its clients' models into one, its state, its message to the server.

    ``station``: model, algorithm's state, rule's state, weights [P], shares [P]. Returns the first three anew, the clients'
    states [P], what goes up (client messages [P], the station's message), and what is told (metrics, steps, finite, info).
    """
    (model, memory, rule_memory, weights, shares), (to_station, to_server) = station, rules
    merged, rule_memory, orders, info = merge_models(
        backbone, to_station, rule_memory, model, seen.variables, weights, seen.for_station
    )
    ((client, message, for_server),) = follow(backbone, model, orders, (seen.client, seen.message, seen.for_server))
    memory = algorithm.gather(memory, message, shares)
    measured = () if to_server.at_station else to_server.combine(for_server, weights)
    return (merged, memory, rule_memory), client, (message, measured), (seen.metrics, seen.steps, seen.finite, info)


def merge_models(
    backbone, rule: Aggregator, memory: PyTree, start: Variables, models: Variables, weights: Array, messages: PyTree
) -> tuple[Variables, PyTree, PyTree, Metrics]:
    """Models [n] of a tier into one, in one basis if the rule aligns: (model, rule's state, orders applied [n], info)."""
    orders, noted = {}, {}
    if rule.align is not None:
        align = functools.partial(rule.align, backbone)
        models, messages, orders, noted = sharding.each_station(align, rule.target(start, models), models, messages)
    merged, memory, info = rule.merge(backbone, memory, start, models, weights, messages)
    return merged, memory, orders, {**noted, **info}


def follow(backbone, start: Variables, orders: PyTree, *states: PyTree) -> tuple[PyTree, ...]:
    """States that lived in the coordinates of models [n], moved along with the ``orders`` [n] those took.

    The first has the leading axis [n]; the second, of a model's clients, [n, P]; see ``alignment.carry``.
    """
    if not orders:
        return states
    move = lambda order, here: carry(here, start, backbone.groups, order)
    of_model = lambda state: sharding.each_station(lambda _, *x: jax.vmap(move)(*x), (), orders, state)
    of_clients = lambda state: sharding.spread(lambda _, *x: jax.vmap(jax.vmap(move, (None, 0)))(*x), (), orders, state)
    return tuple(f(x) if jax.tree.leaves(x) else x for f, x in zip((of_model, of_clients), states))


def choose_participants(
    present: Bool[Array, "S C"], ids: Int[Array, "S C"], participants: int | None, key: Key
) -> Int[Array, "S P"]:
    """Which clients of each station take part in a server round: ``participants`` of those that hold data, uniformly.

    Draws depend on a client's id, not its place. A station with fewer clients holding data fills up with empty ones.
    """
    if participants is None or participants == present.shape[1]:
        return jnp.broadcast_to(jnp.arange(present.shape[1]), present.shape)

    def choose(key, present, ids):
        draws = jax.vmap(jax.vmap(lambda i: jax.random.uniform(jax.random.fold_in(key, i))))(ids)
        return jnp.sort(jax.lax.top_k(jnp.where(present, draws, -1.0), participants)[1], axis=1)

    return sharding.each_station(choose, key, *sharding.whole_stations((present, ids)))


def weigh(
    rules: tuple[Aggregator, Aggregator], counts: Int[Array, "S C"]
) -> tuple[Float[Array, "S C"], Float[Array, " S"]]:
    """Weights of clients at their station and of stations at the server, from the examples each client holds."""
    to_station, to_server = rules
    present = (counts > 0).astype(jnp.int32)
    return to_station.weigh(counts, present), to_server.weigh(counts.sum(1), present.sum(1))


def client_shares(weights: Float[Array, "S C"], station_weights: Float[Array, " S"]) -> Float[Array, "S C"]:
    """A client's weight in the whole federation: its share of its station times the station's share; sums to 1."""
    within = weights / jnp.maximum(weights.sum(1, keepdims=True), 1e-12)
    return within * (station_weights / jnp.maximum(station_weights.sum(), 1e-12))[:, None]
