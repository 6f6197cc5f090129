"""What travels between a client and its server, and what the server keeps: read off the shapes of what is sent."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_dg.aggregators.mean import mean
from fedjax_dg.backbones.backbone import Backbone
from fedjax_dg.estimate import num_bytes
from fedjax_dg.types import (
    Aggregator,
    Algorithm,
    Disclosure,
    Examples,
    Local,
    PyTree,
    Received,
    Seen,
    Start,
    Topology,
)

FROM_BATCH_NORM = Disclosure("mean and variance of every batch norm's input", "server")


class Size(NamedTuple):
    """How much of something."""

    floats: int = 0  # array entries of any type
    bytes: int = 0

    def times(self, n: int) -> Size:
        return Size(n * self.floats, n * self.bytes)


class Both(NamedTuple):
    """What one client sends, and what is sent to it."""

    up: Size
    down: Size


class Part(NamedTuple):
    """Something of a size of its own: a piece of the model, a message, or what the server works with before round 1."""

    size: Size
    place: str  # where it is kept or goes
    until: str  # when it is freed


class Traffic(NamedTuple):
    """Of one client that takes part in every round."""

    parts: dict[str, Part]
    before: Both  # once, before round 1
    per_round: Both
    per_run: Both
    rounds: int
    disclosures: tuple[Disclosure, ...]  # beside the model's parameters


def size_of(shapes: PyTree) -> Size:
    """Entries and bytes of a tree of arrays or shapes."""
    return Size(sum(math.prod(x.shape) for x in jax.tree.leaves(shapes)), num_bytes(shapes))


def total(sizes: Iterable[Size]) -> Size:
    """Their sum."""
    sizes = list(sizes)
    return Size(sum(s.floats for s in sizes), sum(s.bytes for s in sizes))


class Sent(NamedTuple):
    """Shapes of all that one client sends in a round beside its model."""

    survey: PyTree
    report: PyTree
    to_station: PyTree
    to_server: PyTree


def messages(
    backbone: Backbone, algorithm: Algorithm, rules: tuple[Aggregator, Aggregator], start: Start, places: int = 2
) -> Sent:
    """Shapes of a client's messages, for (station, server) ``rules``; ``start`` are shapes, of ``algorithm.init``.

    ``places``: how many examples the client holds. No message may depend on it.
    """
    row = jnp.zeros(places, jnp.int32)
    inputs = jnp.zeros((places, *backbone.input_shape), jnp.float32)
    examples, key = Examples(inputs, row, row == 0, row), jax.random.key(0)

    def sent(start):
        received = Received(start.variables, start.shared, start.station, start.client, 0, start.variables)
        client, surveyed = start.client, ()
        if algorithm.survey is not None:
            client, surveyed = algorithm.survey(backbone, received, client, examples, key)
        optimizer, tally = algorithm.begin(backbone, received, client)
        local = Local(start.variables, optimizer, client, tally)
        reported = algorithm.report(backbone, received, local, jnp.int32(1), examples, key)[1]

        def measured(rule):
            rows = backbone.real_rows(inputs, examples.mask)
            seen = Seen(backbone.dense_inputs(start.variables, inputs), rows) if rule.watches is not None else None
            return rule.measure(backbone, start.variables, start.variables, examples, key, seen)

        return Sent(surveyed, reported, *map(measured, rules))

    return jax.eval_shape(sent, start)


def read_state(algorithm: Algorithm, topology: Topology, start: Start, sent: Sent) -> PyTree:
    """Shapes of the method's state at the server as clients read it while they train: after the survey, if it has one."""
    if algorithm.survey is None:
        return start.shared
    sizes = topology.stations, topology.participants or topology.clients_per_station
    stack = lambda tree, axes: jax.tree.map(lambda x: jax.ShapeDtypeStruct((*axes, *x.shape), x.dtype), tree)
    shares = jax.ShapeDtypeStruct(sizes, jnp.float32)
    return jax.eval_shape(
        algorithm.digest, start.shared, stack(start.station, sizes[:1]), stack(sent.survey, sizes), shares
    )[0]


def traffic_of(
    backbone: Backbone,
    algorithm: Algorithm,
    topology: Topology,
    rounds: int,
    to_server: Aggregator | None = None,
    to_station: Aggregator | None = None,
) -> Traffic:
    """Floats and bytes up and down for one client, once, in a server round, and in a run of ``rounds``; nothing is run.

    Up: the model and the method's message in every station round, with what the station's rule wants; once a server round,
    the survey's message and what the server's rule wants. Down: the station's model in every station round, and the
    method's state at server and station once a round, unless it is sent before round 1 once for all.
    """
    rules = algorithm.merging(to_station or mean()), algorithm.merging(to_server or mean())
    backbone = algorithm.adapt(backbone)
    key = jax.random.key(0)
    start = jax.eval_shape(lambda key: algorithm.init(backbone, backbone.init(key), key), key)
    sent, before = messages(backbone, algorithm, rules, start), algorithm.before(backbone)
    shared = read_state(algorithm, topology, start, sent) if not before.down else ()
    params = dict(start.variables.params)
    own = jax.eval_shape(backbone.init, key).params
    extra = {name: params.pop(name) for name in list(params) if name not in own}
    pieces = {"encoder": {k: v for k, v in params.items() if k != "head"}, "head": params["head"], **extra}
    pieces["batch_stats"] = start.variables.batch_stats
    parts = {
        name: Part(size_of(x), "clients and server", "the end") for name, x in pieces.items() if jax.tree.leaves(x)
    }
    model = size_of(start.variables)
    survey, report, for_station, for_server = map(size_of, sent)
    moving = {
        "survey": (survey, "client to server, every round"),
        "message": (report, "client to station, every station round"),
        "measured for the station": (for_station, "client to station, every station round"),
        "measured for the server": (for_server, "client to server, every round"),
        "state of the server": (size_of(shared), "server to client, every round"),
        "state of the station": (size_of(start.station), "station to client, every round"),
    }
    parts |= {name: Part(size, place, "the round's end") for name, (size, place) in moving.items() if size.floats}
    parts |= {name: Part(size_of(x), "client to server, once", "round 1") for name, x in before.up.items()}
    parts |= {name: Part(size_of(x), "server", "round 1") for name, x in before.server.items()}
    parts |= {
        name: Part(size_of(x), "server to client, once", "the end of training") for name, x in before.down.items()
    }
    n = topology.station_rounds
    up = total([survey, total([model, report, for_station]).times(n), for_server])
    state = total(size for name, (size, _) in moving.items() if name.startswith("state"))
    down = total([model.times(n + rules[1].at_station), state])
    once = Both(*(total(size_of(x) for x in way.values()) for way in (before.up, before.down)))
    per_run = Both(*(total([first, each.times(rounds)]) for first, each in zip(once, (up, down))))
    statistics = (FROM_BATCH_NORM,) if jax.tree.leaves(start.variables.batch_stats) else ()
    told = (*algorithm.discloses, *statistics, *(d for rule in rules for d in rule.discloses))
    return Traffic(parts, once, Both(up, down), per_run, rounds, tuple(dict.fromkeys(told)))


def as_json(traffic: Traffic) -> dict[str, Any]:
    """Plain numbers and words."""
    size = lambda s: s._asdict()
    both = lambda b: {"up": size(b.up), "down": size(b.down)}
    return {
        "parts": {
            name: size(part.size) | {"place": part.place, "until": part.until} for name, part in traffic.parts.items()
        },
        "once": both(traffic.before),
        "per_round": both(traffic.per_round),
        "per_run": {"rounds": traffic.rounds, **both(traffic.per_run)},
        "shared_statistics": [d._asdict() for d in traffic.disclosures],
    }
