"""Runs: a round made ready, and rounds in blocks with an evaluation after each."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_dg import sharding, stream, tree
from fedjax_dg.aggregators.mean import mean
from fedjax_dg.alignment.groups import from_leaves, leaves_of
from fedjax_dg.backbones.backbone import Backbone
from fedjax_dg.estimate import choose_chunk
from fedjax_dg.evaluate import evaluate, scores
from fedjax_dg.federation import Federation
from fedjax_dg.progress import round_bar
from fedjax_dg.round import make_step
from fedjax_dg.types import (
    Aggregator,
    Algorithm,
    Examples,
    Key,
    PyTree,
    RoundInfo,
    Seen,
    ServerState,
    Topology,
    Workshop,
)

# Keep what is drawn elsewhere apart from the rounds, whose keys fold in their number.
EVALUATION = 2**31 - 1
FURNISHING = EVALUATION - 1


@dataclass(frozen=True)
class Round:
    """A round ready to run; ``make_round`` makes it."""

    backbone: Backbone
    algorithm: Algorithm
    topology: Topology
    rules: tuple[Aggregator, Aggregator]  # of the stations and the server
    mesh: sharding.Mesh | None
    chunk: int
    init: Callable[..., ServerState]  # jitted (key, variables=None)
    step: Callable[..., tuple[ServerState, RoundInfo]]  # one round, pure: jit, vmap or lower it as you like
    block: Any  # jitted (state, data, key, length) -> (state, RoundInfo [length, ...]); consumes ``state``
    evaluate: Any  # jitted (variables, evaluation set, key, num_domains, start=0) -> Evaluation


@dataclass(frozen=True)
class Rounds:
    """Rounds that differ in numbers alone, as one program; ``over_numbers`` makes it. Its parts take the numbers first."""

    make: Callable[[PyTree, Round | None], Round]
    like: Round  # one of them, for what all have in common
    init: Any  # jitted (numbers, key, variables=None)
    block: Any  # jitted (numbers, state, data, key, length); consumes ``state``
    evaluate: Any  # jitted (numbers, variables, evaluation set, key, num_domains, start=0)

    def at(self, numbers: PyTree) -> Round:
        """The round with these numbers, which runs the common program."""
        return dataclasses.replace(
            self.make(numbers, self.like),
            init=functools.partial(self.init, numbers),
            block=functools.partial(self.block, numbers),
            evaluate=functools.partial(self.evaluate, numbers),
        )


class NotFinite(FloatingPointError):
    """A loss or parameter became NaN or infinite; the message names round, station and client."""


def make_round(
    backbone: Backbone,
    algorithm: Algorithm,
    topology: Topology,
    to_server: Aggregator | None = None,
    to_station: Aggregator | None = None,
    chunk: int | None = None,
    mesh: sharding.Mesh | None = None,
    like: Round | None = None,
) -> Round:
    """What clients do, how stations and the server merge (``mean()`` by default), and the sizes: a round.

    ``chunk``: how many clients of a station are computed at once (``local.map_clients``: 0 = those of all stations); None:
    ``estimate.choose_chunk``. ``mesh``: devices to spread over (``sharding.mesh_for``), each with its own clients; the
    federation must be placed on the same. Keep the result and use it for every seed: its compiled program is kept with
    it. ``init(key)`` draws the start of a run; ``init(key, variables)`` starts from given (pretrained) ones of
    ``backbone``, and draws only what they lack (see ``Backbone.starts``). ``like``: a round that differs in
    hyper-parameters alone, so that what was checked and chosen for it holds.
    """
    check_epochs(algorithm, topology)
    to_server, to_station = (algorithm.merging(rule or mean()) for rule in (to_server, to_station))
    backbone = algorithm.adapt(backbone)
    if like is not None:
        chunk = like.chunk
    else:
        for rule in (to_station, to_server):
            check_rule(backbone, rule)
    if chunk is None:
        chunk = choose_chunk(backbone, algorithm, topology, mesh.size if mesh else 1)
    plain_step = make_step(backbone, algorithm, topology, to_station, to_server, chunk)

    def step(state, data, key):
        with sharding.under(mesh):
            return plain_step(state, data, key)

    def init(key, variables=None):
        variables_key, key = jax.random.split(key)
        fresh = backbone.init(variables_key)
        if variables is not None:
            fresh = from_leaves(leaves_of(fresh) | backbone.complete(leaves_of(variables)))
        start = algorithm.init(backbone, fresh, key)
        ids = jnp.arange(topology.stations * topology.clients_per_station).reshape(topology.stations, -1)
        draw = jax.vmap(jax.vmap(lambda i: algorithm.init(backbone, fresh, jax.random.fold_in(key, i)).client))
        per_station = (
            start.station,
            to_station.init(start.variables, topology.participants or topology.clients_per_station),
        )
        stations, station_rule = jax.tree.map(lambda x: jnp.stack([x] * topology.stations), per_station)
        server_rule = to_server.init(start.variables, topology.stations)
        return ServerState(start.variables, start.shared, draw(ids), stations, station_rule, server_rule, jnp.int32(0))

    def block(state, data, key, length):
        return jax.lax.scan(lambda state, _: step(state, data, key), state, length=length)

    def judge(variables, data, key, num_domains, start=0):
        predict = functools.partial(algorithm.predict, backbone)
        with sharding.under(mesh):
            return evaluate(predict, num_domains, backbone.num_classes, variables, data, key, start)

    placed = sharding.of_state(mesh)
    return Round(
        backbone,
        algorithm,
        topology,
        (to_station, to_server),
        mesh,
        chunk,
        jax.jit(init, out_shardings=placed),
        step,
        jax.jit(block, static_argnames="length", donate_argnames="state", out_shardings=(placed, None)),
        jax.jit(judge, static_argnames="num_domains"),
    )


def over_numbers(make: Callable[[PyTree, Round | None], Round], numbers: PyTree, together: bool = False) -> Rounds:
    """The rounds ``make(numbers, like)`` as one program, for any numbers of the same structure: hyper-parameters.

    ``like``: see ``make_round``; None at first. ``together``: ``block`` and ``evaluate`` take several at once, numbers and
    states [T, ...] (a vmap); data and keys are common to them, so what does not depend on the numbers, such as the draw of
    the batches, is computed once.
    """
    like = make(numbers, None)
    placed = sharding.of_state(like.mesh)

    def init(numbers, key, variables=None):
        return make(numbers, like).init(key, variables)

    def block(numbers, state, data, key, length):
        one = lambda numbers, state: make(numbers, like).block(state, data, key, length=length)
        return (jax.vmap(one) if together else one)(numbers, state)

    def judge(numbers, variables, data, key, num_domains, start=0):
        one = lambda numbers, variables: make(numbers, like).evaluate(variables, data, key, num_domains, start)
        return (jax.vmap(one) if together else one)(numbers, variables)

    return Rounds(
        make,
        like,
        jax.jit(init, out_shardings=placed),
        jax.jit(block, static_argnames="length", donate_argnames="state", out_shardings=(placed, None)),
        jax.jit(judge, static_argnames="num_domains"),
    )


class Block(NamedTuple):
    """Where a run stands after a block of rounds."""

    state: ServerState
    info: RoundInfo  # [rounds of the block, ...]
    record: dict[str, Any]  # plain numbers: round, loss, accuracies


def furnish(round_fn: Round, data: tuple[Examples, Any], key: Key) -> tuple[Examples, Any]:
    """What clients train on, where a method makes it of what they hold; ``data`` is (examples [S, C, N, ...], ids)."""
    if (make := round_fn.algorithm.furnish) is None:
        return data

    def furnished(examples, ids, key):
        with sharding.under(round_fn.mesh):
            return make(round_fn.backbone, examples, ids, key)

    placed = sharding.of_clients(round_fn.mesh) if round_fn.mesh else None
    return jax.jit(furnished, out_shardings=placed)(*data, key), data[1]


def run_stage(
    name: str,
    state: PyTree,
    advance: Callable[[PyTree, Any], PyTree],
    blocks: int,
    tell: Callable[[PyTree], dict[str, Any]] | None = None,
) -> PyTree:
    """A stage of a method's work before round 1, from its beginning to its end, kept nowhere: see ``Workshop``."""
    for block in range(blocks):
        state = advance(state, jnp.int32(block))
    return state


def run_blocks(
    round_fn: Round,
    state: ServerState,
    federation: Federation,
    rounds: int,
    key: Key,
    eval_every: int = 1,
    stage: Callable = run_stage,
    workers: int = 0,
) -> Iterator[Block]:
    """Run from ``state.round`` to round ``rounds``, yielding after every ``eval_every`` rounds. Consumes ``state``.

    ``stage`` runs a part of what a method does before round 1 (``Workshop.stage``). ``workers``: processes that decode for
    a streamed federation (0: threads). Raises ``ValueError`` for sizes that do not fit before anything runs, ``NotFinite``
    when training breaks down (the block before it was the last good one).
    """
    done, num_domains = int(state.round), len(federation.domain_names)
    state, data = begin(round_fn, state, federation, rounds, key, eval_every, stage)
    if federation.source is None:
        advance = lambda state: round_fn.block(state, data, key, length=eval_every)
        judge = lambda variables, key: round_fn.evaluate(variables, federation.evaluation, key, num_domains)
    else:
        coming = stream.feed(federation, done, rounds, eval_every, key, round_fn.mesh, workers)
        advance = lambda state: stream.advance(round_fn, state, federation.ids, coming, key, eval_every)
        judge = lambda variables, key: stream.judge(round_fn, variables, federation, coming, key)
    while done < rounds:
        state, info = advance(state)
        info = sharding.fetch(info)
        check_finite(info, done)
        done += eval_every
        judged = judge(state.variables, evaluation_key(key, done))
        yield Block(state, info, record_of(info, judged, done, federation))


def run_together(
    rounds_fn: Rounds,
    numbers: Sequence[PyTree],
    states: Sequence[ServerState],
    federation: Federation,
    rounds: int,
    key: Key,
    eval_every: int = 1,
    stages: Sequence[Callable] = (),
    at_once: int | None = None,
) -> Iterator[list[Block | NotFinite]]:
    """``run_blocks`` of several hyper-parameters at once, over ``over_numbers(..., together=True)``; all at the same round.

    Each of the yielded ones is a block, its state on the host, or what broke down, then and from then on; the others go on.
    ``at_once``: how many the program is for, if more: the last ones are then computed several times.
    Not for streamed federations, nor methods that make their own data (``Algorithm.furnish``).
    """
    done, num_domains = int(states[0].round), len(federation.domain_names)
    stages = stages or [run_stage] * len(states)
    begun = [
        begin(rounds_fn.at(n), state, federation, rounds, key, eval_every, stage)[0]
        for n, state, stage in zip(numbers, states, stages)
    ]
    filled = [min(t, len(begun) - 1) for t in range(at_once or len(begun))]
    stacked, state = (jax.tree.map(lambda *x: jnp.stack(x), *(trees[t] for t in filled)) for trees in (numbers, begun))
    broken: dict[int, NotFinite] = {}
    while done < rounds:
        state, info = rounds_fn.block(stacked, state, federation.data, key, length=eval_every)
        now = evaluation_key(key, done + eval_every)
        judged = rounds_fn.evaluate(stacked, state.variables, federation.evaluation, now, num_domains)
        # copied, as the next block consumes the state
        info, judged, kept = jax.tree.map(np.array, (info, judged, state))
        reached = []
        for t in range(len(states)):
            own = tree.take((info, judged, kept), t)
            try:
                if t not in broken:
                    check_finite(own[0], done)
            except NotFinite as error:
                broken[t] = error
            record = record_of(own[0], own[1], done + eval_every, federation)
            reached.append(broken.get(t) or Block(own[2], own[0], record))
        done += eval_every
        yield reached


def begin(
    round_fn: Round,
    state: ServerState,
    federation: Federation,
    rounds: int,
    key: Key,
    eval_every: int,
    stage: Callable,
) -> tuple[ServerState, tuple[Examples, Any]]:
    """State and data of a run before its next round. ``ValueError`` for sizes that do not fit."""
    check_fit(round_fn, federation)
    done = int(state.round)
    if eval_every < 1 or (rounds - done) % eval_every:
        raise ValueError(
            f"{rounds - done} rounds do not divide into blocks of eval_every={eval_every}: choose a divisor, or another "
            "number of rounds."
        )
    data = (federation.clients, federation.ids)
    if federation.source is None:
        data = furnish(round_fn, data, jax.random.fold_in(key, FURNISHING))
    if done == 0:
        workshop = Workshop(round_fn.topology, round_fn.chunk, stage)
        with sharding.under(round_fn.mesh):
            state = round_fn.algorithm.prepare(round_fn.backbone, state, data, key, workshop)
    return state, data


def evaluation_key(key: Key, done: int) -> Key:
    """For the evaluation after round ``done``."""
    return jax.random.fold_in(jax.random.fold_in(key, EVALUATION), done)


def record_of(info: RoundInfo, judged: Any, done: int, federation: Federation) -> dict[str, Any]:
    """Plain numbers of a block that ends with round ``done``."""
    return {"round": done} | summary(info) | scores(judged, federation.domain_names, federation.held_out)


def run(
    round_fn: Round,
    state: ServerState,
    federation: Federation,
    rounds: int,
    key: Key,
    *,
    eval_every: int = 1,
    workers: int = 0,
    progress: bool = False,
) -> tuple[ServerState, list[dict[str, Any]]]:
    """Run ``rounds`` rounds; the last state, and a record of plain numbers for every evaluated round.

    ``state`` is consumed (its buffers are donated). ``progress``: show a bar, also in notebooks, or lines where there is
    no terminal. For checkpoints and model selection use ``run_blocks`` or the
    command line. Raises as ``run_blocks`` does.
    """
    history = []
    shown = round_bar(rounds, int(state.round)) if progress else contextlib.nullcontext(lambda record: None)
    with shown as report:
        for reached in run_blocks(round_fn, state, federation, rounds, key, eval_every, workers=workers):
            state = reached.state
            history.append(reached.record)
            report(reached.record)
    return state, history


def check_epochs(algorithm: Algorithm, topology: Topology) -> None:
    """``ValueError`` when clients make too few passes to reach every part of a method."""
    if topology.local_steps is None and topology.local_epochs < algorithm.least_epochs:
        raise ValueError(
            f"local_epochs={topology.local_epochs}, but this method needs {algorithm.least_epochs} or more, as its first "
            f"{algorithm.least_epochs - 1} only warm up: raise local_epochs, or lower warmup_epochs."
        )


def check_rule(backbone: Backbone, rule: Aggregator) -> None:
    """Let a rule look at the shapes of a network, so that it raises now what it would raise while the round is traced."""

    message_shapes(backbone, rule)


def message_shapes(backbone: Backbone, rule: Aggregator) -> PyTree:
    """Shapes of what a client measures for a rule."""

    def once(variables, inputs):
        mask, labels = jnp.ones(1, bool), jnp.zeros(1, jnp.int32)
        examples = Examples(inputs, labels, mask, labels)
        rows = backbone.real_rows(inputs, mask)
        seen = Seen(backbone.dense_inputs(variables, inputs), rows) if rule.watches is not None else None
        return rule.measure(backbone, variables, variables, examples, jax.random.key(0), seen)

    variables = jax.eval_shape(backbone.init, jax.random.key(0))
    return jax.eval_shape(once, variables, jax.ShapeDtypeStruct((1, *backbone.input_shape), jnp.float32))


def check_fit(round_fn: Round, federation: Federation) -> None:
    """``ValueError`` when a federation has other sizes than the round was made for, or lies on other devices."""
    have = federation.clients.mask.shape[:2]
    want = (round_fn.topology.stations, round_fn.topology.clients_per_station)
    if have != want:
        raise ValueError(
            f"The round was made for {want[0]} stations x {want[1]} clients, but the federation has {have[0]} x {have[1]}: "
            "pass federation.topology to make_round."
        )
    if round_fn.backbone.num_classes != len(federation.class_names):
        raise ValueError(
            f"The backbone has {round_fn.backbone.num_classes} classes, but the data set has {len(federation.class_names)}: "
            f"build it with num_classes={len(federation.class_names)}."
        )
    if round_fn.backbone.input_shape != federation.clients.inputs.shape[3:]:
        raise ValueError(
            f"The backbone takes inputs of shape {round_fn.backbone.input_shape}, but the data set has "
            f"{federation.clients.inputs.shape[3:]}: choose another backbone or resize the images."
        )
    if (size := round_fn.backbone.vocab_size) is not None:
        ids = federation.clients.inputs
        largest = -1 if federation.source is not None else int(sharding.fetch(ids.max(-1)).max())
        if largest >= size:
            raise ValueError(
                f"The data set has token {largest}, but the backbone has only {size}, from 0: give it vocab_size="
                f"{largest + 1} or more, or the data set the tokenizer of its folder."
            )
    if federation.source is not None and round_fn.algorithm.resident:
        raise ValueError(
            "This method works on all the clients' examples before round 1, but the federation is streamed: choose another "
            "algorithm, or stream=off and images that fit."
        )
    if not sharding.lies_on(federation.clients.mask, round_fn.mesh):
        raise ValueError(
            f"The round runs with {sharding.describe(round_fn.mesh)}, but the federation lies on other devices: pass the "
            "same mesh to make_round(..., mesh=mesh) and federate(..., mesh=mesh)."
        )


def check_finite(info: RoundInfo, done: int) -> None:
    """``NotFinite`` for the first round of a block in which a client or the merged model broke down."""
    finite, merged = np.asarray(info.finite), np.asarray(info.merged_finite)
    for r in range(len(merged)):
        if not finite[r].all():
            station, place = np.argwhere(~finite[r])[0]
            client = int(info.participants[r, station, place])
            raise NotFinite(
                f"Round {done + r + 1}: the loss or a parameter of client {client} at station {station} is not finite "
                f"({int((~finite[r]).sum())} such clients); lower client_lr (or server_lr) or check that client's data."
            )
        if not merged[r]:
            raise NotFinite(
                f"Round {done + r + 1}: the merged model is not finite though every client's is; lower server_lr."
            )


def summary(info: RoundInfo) -> dict[str, Any]:
    """The last round of a block as plain numbers: client metrics averaged over clients that trained, merge infos."""
    trained = np.asarray(info.steps[-1]) > 0
    means = {f"train_{k}": float(np.asarray(v[-1])[trained].mean()) for k, v in info.metrics.items()}
    merges = {"merge": jax.tree.map(lambda x: np.asarray(x[-1], np.float64).tolist(), info.server_merge)}
    return means | (merges if info.server_merge else {})
