"""Data sets that do not fit: what every round and every evaluation reads, decoded ahead of the device.

What a round will read is known before it starts, as its draws depend on its number and the key alone. So a run is a list of
rows, which worker processes read in order while the device is at work.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from fedjax_dg import sharding
from fedjax_dg.datasets.reading import read
from fedjax_dg.evaluate import Evaluation, EvaluationSet
from fedjax_dg.federation import Federation, Source
from fedjax_dg.local import PASS_SIZE, Batches, Drawn, plan_round
from fedjax_dg.types import Examples, Key, RoundInfo, ServerState, Topology, Variables

BLOCK = 64  # rows that a worker reads at a time
JUDGED = 4 * PASS_SIZE  # examples of an evaluation on the devices at a time
# Rows that are drawn before they are read: the more, the more memory; after them, worker processes start anew.
WINDOW_ROWS, WINDOW_ROUNDS = 2**21, 64


class Part(NamedTuple):
    """A part of what is judged, on the devices."""

    data: EvaluationSet  # padded to one size
    start: int  # place of its first example among all


class Draw(NamedTuple):
    """What a round reads."""

    rows: Int[np.ndarray, "S P U"]  # of the data set; -1 = padding
    plan: Batches  # [S, P, R, ...], whose indices are places among the U rows


def pool_size(topology: Topology, largest: int) -> int:
    """U: how many different examples a client can read in a server round, of ``largest`` that it holds."""
    if topology.local_steps is None:
        return largest
    return min(largest, topology.station_rounds * topology.local_steps * min(topology.batch_size, largest))


def drawing(source: Source) -> Callable[[Key, int], Draw]:
    """(key, round) -> ``Draw``.

    Where clients can read all they hold, the rows are those, in the order they are held: what looks at a client's examples
    sees what it would in a resident federation. Else they are the rows that its steps read.
    """
    held, topology = source.deal.held, source.deal.topology
    mask, ids = jnp.asarray(held >= 0), jnp.asarray(source.deal.ids)
    size = pool_size(topology, held.shape[-1])
    planned = jax.jit(lambda key, number: plan_round(topology, mask, ids, key, number))

    def draw(key, number):
        picked, plan = jax.tree.map(np.asarray, planned(key, number))
        rows = np.take_along_axis(held, picked[..., None], 1)  # [S, P, N]
        if size == held.shape[-1]:
            return Draw(rows, plan)
        some, index = np.full((*picked.shape, size), -1), np.zeros_like(plan.index)
        for client in np.ndindex(picked.shape):
            read = np.unique(plan.index[client][plan.valid[client]])
            some[client][: len(read)] = rows[client][read]
            index[client] = np.minimum(np.searchsorted(read, plan.index[client]), size - 1)
        return Draw(some, plan._replace(index=index))

    return draw


def feed(
    federation: Federation,
    done: int,
    rounds: int,
    eval_every: int,
    key: Key,
    mesh: sharding.Mesh | None = None,
    workers: int = 0,
) -> Generator[Any]:
    """In the order of a run from round ``done`` to ``rounds``: a ``Drawn`` for each of ``eval_every`` rounds, then every
    ``Part`` of what is judged, and again.

    Each is put together while the one before is in use. Close it to stop the workers.
    """
    source = federation.source
    assert source is not None
    parts = _feed(source, done, rounds, eval_every, key, mesh, workers)
    thread = ThreadPoolExecutor(1)
    coming = thread.submit(next, parts, None)
    try:
        while (part := coming.result()) is not None:
            coming = thread.submit(next, parts, None)
            yield part
    finally:
        # without waiting: a collector that finds this generator may be running in that very thread
        coming.add_done_callback(lambda _: parts.close())
        thread.shutdown(wait=False)


def _feed(source, done, rounds, eval_every, key, mesh, workers) -> Generator[Any]:
    domains, deal = source
    draw = drawing(source)
    counts = (deal.held >= 0).sum(-1, dtype=np.int32)
    size = min(JUDGED, len(deal.judged))
    judged = [_padded(deal.judged[i : i + size], size) for i in range(0, len(deal.judged), size or 1)]
    per_round = deal.held[..., 0].size * pool_size(deal.topology, deal.held.shape[-1])
    window = max(1, min(WINDOW_ROUNDS, WINDOW_ROWS // per_round) // eval_every) * eval_every

    for first in range(done, rounds, window):
        numbers = range(first, min(first + window, rounds))
        draws = [draw(key, number) for number in numbers]
        blocks: list[np.ndarray] = []
        for number, drawn in zip(numbers, draws):
            here = sharding.mine(drawn.rows.shape[:2], mesh)  # those of other processes' devices are not read
            blocks += _cut(np.where(here[..., None], drawn.rows, -1).ravel())
            if (number + 1) % eval_every == done % eval_every:
                blocks += [block for rows in judged for block in _cut(rows)]
        reading = read(domains.inputs, blocks, workers)
        try:
            for number, drawn in zip(numbers, draws):
                inputs = _gather(reading, drawn.rows, domains.inputs)
                put = lambda x: sharding.build(x.shape, x.dtype, lambda index, x=x: x[index], mesh)
                examples = _examples(domains, drawn.rows, inputs)
                yield Drawn(*jax.tree.map(put, (examples, drawn.plan, counts)))
                if (number + 1) % eval_every == done % eval_every:
                    for place, rows in enumerate(judged):
                        unseen = _padded(deal.unseen[place * size : (place + 1) * size], size, False)
                        examples = _examples(domains, rows, _gather(reading, rows, domains.inputs))
                        yield Part(sharding.replicate(EvaluationSet(examples, unseen), mesh), place * size)
        finally:
            reading.close()


def _examples(domains, rows: np.ndarray, inputs: np.ndarray) -> Examples:
    real = rows >= 0
    of = lambda values: np.where(real, values[np.maximum(rows, 0)], 0).astype(values.dtype)
    return Examples(inputs, of(domains.labels), real, of(domains.domain))  # type: ignore  # numpy's, until they are placed


def _gather(reading: Iterator[np.ndarray], rows: np.ndarray, inputs) -> np.ndarray:
    """The next blocks, as many as ``rows``, in one array."""
    out = np.empty((rows.size, *inputs.shape[1:]), inputs.dtype)
    for start in range(0, rows.size, BLOCK):
        block = next(reading)
        out[start : start + len(block)] = block
    return out.reshape(*rows.shape, *inputs.shape[1:])


def _cut(rows: np.ndarray) -> list[np.ndarray]:
    return [rows[i : i + BLOCK] for i in range(0, len(rows), BLOCK)]


def _padded(values: np.ndarray, size: int, fill: Any = -1) -> Any:
    return np.concatenate([values, np.full(size - len(values), fill, values.dtype)])


def advance(
    round_fn: Any, state: ServerState, ids: Array, coming: Iterator[Any], key: Key, rounds: int
) -> tuple[ServerState, RoundInfo]:
    """``rounds`` rounds, one after another, with what comes: as ``Round.block``."""
    infos = []
    for _ in range(rounds):
        state, info = round_fn.block(state, (next(coming), ids), key, length=1)
        infos.append(info)
    return state, jax.tree.map(lambda *x: jnp.concatenate(x), *infos)


def judge(round_fn: Any, variables: Variables, federation: Federation, coming: Iterator[Any], key: Key) -> Evaluation:
    """``Round.evaluate`` of all parts that come."""
    total, num_domains = None, len(federation.domain_names)
    for _ in range(num_parts(federation)):
        part = next(coming)
        found = round_fn.evaluate(variables, part.data, key, num_domains, part.start)
        total = found if total is None else jax.tree.map(jnp.add, total, found)
    if total is None:
        square = jnp.zeros((num_domains, *[round_fn.backbone.num_classes] * 2))
        return Evaluation(square, square, jnp.zeros(num_domains))
    return total


def shapes(federation: Federation, mesh: sharding.Mesh | None = None) -> Drawn:
    """Shapes, types and places of what each round of a streamed federation is given."""
    source = federation.source
    assert source is not None
    (domains, deal), topology = source, source.deal.topology
    where = sharding.of_clients(mesh) if mesh else None
    shape = lambda shape, dtype: jax.ShapeDtypeStruct(shape, jax.dtypes.canonicalize_dtype(dtype), sharding=where)
    key, mask, ids = jax.random.key(0), shape(deal.held.shape, bool), shape(deal.ids.shape, np.int32)
    picked, plan = jax.eval_shape(functools.partial(plan_round, topology, number=0), mask, ids, key)
    rows = (*picked.shape, pool_size(topology, deal.held.shape[-1]))
    inputs, labels, domain = (
        shape((*rows, *x.shape[1:]), x.dtype) for x in (domains.inputs, domains.labels, domains.domain)
    )
    plan = jax.tree.map(lambda x: shape(x.shape, x.dtype), plan)
    return Drawn(Examples(inputs, labels, shape(rows, bool), domain), plan, ids)  # type: ignore  # shapes, no arrays


def largest(federation: Federation) -> tuple[Examples, Batches]:
    """Stand-ins for what a client reads in a round whose steps are all real, and for its batches in a station round."""
    drawn = shapes(federation)
    one = lambda x, axes: jnp.ones(x.shape[axes:], x.dtype)
    return jax.tree.map(lambda x: one(x, 2), drawn.examples), jax.tree.map(lambda x: one(x, 3), drawn.plan)


def num_parts(federation: Federation) -> int:
    """How many parts an evaluation has."""
    return -(-len(federation.evaluation.unseen) // JUDGED)


def part_of(evaluation: EvaluationSet) -> EvaluationSet:
    """A stand-in for one of them."""
    size = min(JUDGED, len(evaluation.unseen))
    return jax.tree.map(lambda x: jnp.ones((size, *x.shape[1:]), x.dtype), evaluation)
