"""One client's part of a round, and the one place that decides how clients are laid out in memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from fedjax_dg import tree
from fedjax_dg.types import Aggregator, Algorithm, Examples, Key, Local, Metrics, PyTree, Received, Topology, Variables

# How many examples a pass that is not training holds at once; only memory depends on it.
PASS_SIZE = 256


class Batches(NamedTuple):
    """Which examples [K, B] each of K local steps reads; ``valid`` is False for the empty places of a short batch."""

    index: Int[Array, "K B"]
    valid: Bool[Array, "K B"]
    passes: Int[Array, " K"]  # finished before this step


class Trained(NamedTuple):
    """What one client's local training leaves behind."""

    local: Local
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

    def one(step):
        draws = jax.random.uniform(jax.random.fold_in(key, step // per_pass), (places,))
        order = jnp.argsort(jnp.where(mask, draws, jnp.inf))  # padding last
        position = (step % per_pass) * size + jnp.arange(size)
        return order[jnp.minimum(position, places - 1)], position < num_examples, (step // per_pass).astype(jnp.int32)

    return Batches(*jax.vmap(one)(jnp.arange(num_steps)))


def take_batch(examples: Examples, index: Int[Array, " B"], valid: Bool[Array, " B"]) -> Examples:
    """The examples at ``index``, zeros where not ``valid``: padding may hold NaN and must not reach a gradient."""

    def pick(x):
        x = x[index]
        return jnp.where(valid.reshape(-1, *[1] * (x.ndim - 1)), x, jnp.zeros((), x.dtype))

    return Examples(*(pick(x) for x in examples))


def train(
    backbone, algorithm: Algorithm, topology: Topology, received: Received, client: PyTree, examples: Examples, key: Key
) -> Trained:
    """Local training: ``algorithm.step`` over shuffled batches, from the received model. Empty steps change nothing."""
    plan_key, step_key = jax.random.split(key)
    batches = plan_batches(examples.mask, topology, plan_key)
    optimizer, tally = algorithm.begin(backbone, received, client)

    def step(local, inputs):
        number, index, valid, passes = inputs

        def move():
            batch = take_batch(examples, index, valid)
            key = jax.random.fold_in(step_key, number)
            return algorithm.step(backbone, received, local._replace(passes=passes), batch, key)

        real = valid.any()
        nothing = tree.zeros(jax.eval_shape(move)[1])
        moved, metrics = jax.lax.cond(real, move, lambda: (local, nothing))
        return moved, (real, metrics)

    start = Local(received.variables, optimizer, client, tally, jnp.int32(0))
    numbers = jnp.cumsum(batches.valid.any(1)) - 1  # of real steps: padding must not shift what later ones draw
    local, (real, metrics) = jax.lax.scan(step, start, (numbers, *batches))
    steps = real.sum()
    means = jax.tree.map(lambda x: x.sum(0) / jnp.maximum(steps, 1), metrics)
    return Trained(local, steps, means, tree.all_finite((metrics, local.variables)))


def visit(
    backbone,
    algorithm: Algorithm,
    topology: Topology,
    rules: tuple[Aggregator, Aggregator],
    last: Bool[Array, ""] | bool,
    received: Received,
    client: PyTree,
    examples: Examples,
    key: Key,
) -> Visit:
    """All that one client does in a station round: train, report, measure for the (station, server) rules.

    What the server's rule wants is measured in the ``last`` station round only. A client without data keeps its state.
    """
    to_station, to_server = rules
    train_key, report_key, station_key, server_key = jax.random.split(key, 4)
    trained = train(backbone, algorithm, topology, received, client, examples, train_key)
    variables = trained.local.variables
    memory, message = algorithm.report(backbone, received, trained.local, trained.steps, examples, report_key)
    for_server = lambda: to_server.measure(backbone, variables, examples, server_key)
    return Visit(
        variables=variables,
        client=tree.where(trained.steps > 0, memory, client),
        message=message,
        for_station=to_station.measure(backbone, variables, examples, station_key),
        for_server=jax.lax.cond(last, for_server, lambda: tree.zeros(jax.eval_shape(for_server))),
        steps=trained.steps,
        metrics=trained.metrics,
        finite=trained.finite,
    )


def sum_over_batches(statistic: Callable[[Examples], PyTree], examples: Examples) -> PyTree:
    """Sum of ``statistic(batch)`` over a client's examples in batches of ``PASS_SIZE``; its leaves must add up."""
    places = examples.mask.shape[0]
    size = min(PASS_SIZE, places)
    position = jnp.arange(-(-places // size) * size).reshape(-1, size)

    def one(position):
        index = jnp.minimum(position, places - 1)
        return statistic(take_batch(examples, index, examples.mask[index] & (position < places)))

    if len(position) == 1:
        return one(position[0])
    zeros = tree.zeros(jax.eval_shape(one, position[0]))
    return jax.lax.scan(lambda total, p: (jax.tree.map(jnp.add, total, one(p)), None), zeros, position)[0]


def map_clients(function: Callable, per_station: PyTree, per_client: PyTree, chunk: int | None = None) -> PyTree:
    """``function(per_station[s], per_client[s, p])`` for every client; results [S, P, ...]. The one seam for memory.

    ``chunk`` clients at a time: 0 = all at once (vmap), 1 = one after another. By default one after another on CPU,
    where a client's working set then stays in the cache (measured: 0.08 ms an image against 0.12 for LeNet-5), and all
    at once elsewhere. Every choice computes the same function.
    """
    if chunk is None:
        chunk = 1 if jax.default_backend() == "cpu" else 0

    def station(inputs):
        here, clients = inputs
        if chunk == 0:
            return jax.vmap(lambda client: function(here, client))(clients)
        return jax.lax.map(lambda client: function(here, client), clients, batch_size=chunk if chunk > 1 else None)

    if chunk == 0:
        return jax.vmap(station)((per_station, per_client))
    return jax.lax.map(station, (per_station, per_client))


def choose_participants(
    present: Bool[Array, "S C"], ids: Int[Array, "S C"], participants: int | None, key: Key
) -> Int[Array, "S P"]:
    """Which clients of each station take part in a server round: ``participants`` of those that hold data, uniformly.

    Draws depend on a client's id, not its place. A station with fewer clients holding data fills up with empty ones.
    """
    num_stations, num_clients = present.shape
    if participants is None or participants == num_clients:
        return jnp.broadcast_to(jnp.arange(num_clients), present.shape)
    draws = jax.vmap(lambda i: jax.random.uniform(jax.random.fold_in(key, i)))(ids.reshape(-1)).reshape(present.shape)
    return jnp.sort(jax.lax.top_k(jnp.where(present, draws, -1.0), participants)[1], axis=1)


def client_shares(weights: Float[Array, "S C"], station_weights: Float[Array, " S"]) -> Float[Array, "S C"]:
    """A client's weight in the whole federation: its share of its station times the station's share; sums to 1."""
    within = weights / jnp.maximum(weights.sum(1, keepdims=True), 1e-12)
    return within * (station_weights / jnp.maximum(station_weights.sum(), 1e-12))[:, None]
