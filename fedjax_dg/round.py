"""The hierarchical round: clients -> stations -> server as one pure function, on one screen."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from fedjax_dg import tree
from fedjax_dg.local import choose_participants, client_shares, map_clients, visit
from fedjax_dg.types import Aggregator, Algorithm, Received, RoundInfo, ServerState, Topology


def make_step(
    backbone, algorithm: Algorithm, topology: Topology, to_station: Aggregator, to_server: Aggregator, chunk: int | None
) -> Callable:
    """``step(state, (examples [S, C, N, ...], ids [S, C]), key) -> (state, RoundInfo)``: one server round.

    Randomness depends on (key, round, station round, client id) alone. A round's participants are drawn once and take
    part in all its station rounds; only their measurements of the last one go up to the server.
    """
    rules, rows = (to_station, to_server), jnp.arange(topology.stations)[:, None]

    def weigh(counts):
        present = (counts > 0).astype(jnp.int32)
        return to_station.weigh(counts, present), to_server.weigh(counts.sum(1), present.sum(1))

    def step(state: ServerState, data, key):
        key = jax.random.fold_in(key, state.round)
        examples, ids = data
        counts = examples.mask.sum(-1)  # [S, C]
        shares = client_shares(*weigh(counts))
        picked = choose_participants(counts > 0, ids, topology.participants, key)  # [S, P]
        here = (examples, ids, counts, shares, state.clients)
        if topology.participants is not None:  # else a copy of the whole data set
            here = tree.take(here, (rows, picked))
        examples, ids, counts, shares, origin = here
        weights, station_weights = weigh(counts)  # [S, P], [S]
        models = jax.tree.map(lambda x: jnp.broadcast_to(x, (topology.stations, *x.shape)), state.variables)
        shared, stations, clients = state.shared, state.stations, origin

        if algorithm.survey is not None:

            def survey(station, client):
                (model, memory), (own, its_examples, i) = station, client
                received = Received(model, shared, memory, own)
                return algorithm.survey(backbone, received, own, its_examples, jax.random.fold_in(key, i))

            clients, messages = map_clients(survey, (models, stations), (clients, examples, ids), chunk)
            shared, stations = algorithm.digest(shared, stations, messages, shares)

        def station_round(carry, number):
            models, clients, stations, states = carry

            def client_part(station, client):
                (model, memory), (own, at_start, its_examples, i) = station, client
                its_key = jax.random.fold_in(jax.random.fold_in(key, number + 1), i)
                received, last = Received(model, shared, memory, at_start), number == topology.station_rounds - 1
                return visit(backbone, algorithm, topology, rules, received, own, its_examples, last, its_key)

            seen = map_clients(client_part, (models, stations), (clients, origin, examples, ids), chunk)
            merge = jax.vmap(lambda *station: to_station.merge(backbone, *station))
            models, states, info = merge(states, models, seen.variables, weights, seen.for_station)
            stations = jax.vmap(algorithm.gather)(stations, seen.message, shares)
            upward = (seen.message, jax.vmap(to_server.combine)(seen.for_server, weights))
            return ((models, seen.client, stations, states), upward), (seen.metrics, seen.steps, seen.finite, info)

        start = (models, clients, stations, state.station_rule)
        empty = tree.zeros(jax.eval_shape(station_round, start, 0)[0][1])
        (carry, upward), history = jax.lax.scan(
            lambda carry, number: station_round(carry[0], number), (start, empty), jnp.arange(topology.station_rounds)
        )
        (models, clients, stations, station_rule), (messages, measured) = carry, upward

        variables, server_rule, merge_info = to_server.merge(
            backbone, state.server_rule, state.variables, models, station_weights, measured
        )
        shared, stations = algorithm.absorb(shared, stations, messages, shares)
        if topology.participants is not None:
            clients = jax.tree.map(lambda whole, part: whole.at[rows, picked].set(part), state.clients, clients)
        metrics, steps, _, station_info = tree.take(history, -1)
        info = RoundInfo(
            picked, metrics, steps, history[2].all(0), tree.all_finite(variables), station_info, merge_info
        )
        return ServerState(variables, shared, clients, stations, station_rule, server_rule, state.round + 1), info

    return step
