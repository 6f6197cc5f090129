"""The hierarchical round: clients -> stations -> server as one pure function, on one screen."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from fedjax_dg import local, sharding, tree
from fedjax_dg.types import Aggregator, Algorithm, Received, RoundInfo, ServerState, Topology


def make_step(
    backbone, algorithm: Algorithm, topology: Topology, to_station: Aggregator, to_server: Aggregator, chunk: int
) -> Callable:
    """``step(state, (examples [S, C, N, ...] or ``Drawn``, ids [S, C]), key) -> (state, RoundInfo)``: one server round.

    Randomness depends on (key, round, station round, client id) alone. A round's participants are drawn once and take
    part in all its station rounds; only their measurements of the last one go up to the server.
    """
    rules = (to_station, to_server)

    def step(state: ServerState, data, key):
        draw_key, survey_key, local_key = local.round_keys(key, state.round)
        ids, (examples, drawn, plan, counts) = data[1], local.holdings(data[0])
        picked = local.choose_participants(counts > 0, ids, topology.participants, draw_key)  # [S, P]
        here = (examples, ids, counts, local.client_shares(*local.weigh(rules, counts)), state.clients)
        if topology.participants is not None:  # else a needless copy of the whole data set
            here = sharding.take_clients(here, picked)
        examples, ids, counts, shares, origin = here
        examples = drawn or examples
        weights, station_weights = local.weigh(rules, counts)  # [S, P], [S]
        shared, stations, clients = state.shared, state.stations, origin
        models = jax.tree.map(lambda x: jnp.broadcast_to(x, (topology.stations, *x.shape)), state.variables)

        def each_client(part, finish, common, stations, clients, renewed=0):
            def one(common, station, client):
                (shared, number, server, key, *last), (model, memory, *_), (own, at_start, held, i) = (
                    common,
                    station,
                    client,
                )
                received = Received(model, shared, memory, at_start, number, server)
                return part(received, own, held, local.client_key(key, i), *last)

            common = (shared, state.round, state.variables, *common)
            return local.map_clients(one, common, stations, (clients, origin, examples, ids), chunk, finish, renewed)

        if algorithm.survey is not None:
            clients, messages = each_client(
                *local.surveying(backbone, algorithm), (survey_key,), (models, stations), clients
            )
            shared, stations = algorithm.digest(shared, stations, messages, shares)

        @functools.partial(jax.jit, inline=True)  # inlined: for JAX to trace it once, though its shapes are asked for
        def station_round(carry, number):
            stations, clients = carry
            last = topology.station_rounds == 1 or number == topology.station_rounds - 1
            common = (local.station_round_key(local_key, number), last)
            own = (clients, jax.tree.map(lambda x: x[:, :, number], plan))
            visiting = local.visiting(backbone, algorithm, topology, rules)
            stations, clients, up, told = each_client(*visiting, common, (*stations, weights, shares), own, 3)
            return ((stations, clients), up), told

        start = ((models, stations, state.station_rule), clients)
        nothing = tree.zeros(jax.eval_shape(station_round, start, jnp.int32(0))[0][1])
        (carry, (messages, measured)), (metrics, steps, finite, station_info) = jax.lax.scan(
            lambda carry, number: station_round(carry[0], number), (start, nothing), jnp.arange(topology.station_rounds)
        )
        (models, stations, station_rule), clients = carry
        if to_server.at_station:
            measured = each_client(
                *local.measuring(backbone, to_server), (local_key,), (models, stations, weights), clients
            )
        variables, server_rule, orders, server_info = local.merge_models(
            backbone, to_server, state.server_rule, state.variables, models, station_weights, measured
        )
        (stations, station_rule), (clients, messages) = local.follow(
            backbone, variables, orders, (stations, station_rule), (clients, messages)
        )
        shared, stations = algorithm.absorb(shared, stations, messages, shares)
        if topology.participants is not None:
            clients = sharding.put_clients(state.clients, picked, clients)
        metrics, steps, told = tree.take((metrics, steps, station_info), -1)
        info = RoundInfo(picked, metrics, steps, finite.all(0), tree.all_finite(variables), told, server_info)
        return ServerState(variables, shared, clients, stations, station_rule, server_rule, state.round + 1), info

    return step
