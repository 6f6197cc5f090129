"""What a round will take: how many clients fit into a device at once, and how long a run will last, before it starts."""

from __future__ import annotations

import functools
import os
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_dg import local, stream, tree
from fedjax_dg.types import Algorithm, PyTree, Received, Topology

if TYPE_CHECKING:
    from fedjax_dg.federation import Deal, Federation
    from fedjax_dg.run import Round

# Share of a device's memory that clients in training may take; the data, and XLA's own needs, have the rest.
TRAINING_SHARE = 0.5
# Share that the data of a federation may take before it is streamed.
DATA_SHARE = 0.3


def num_bytes(shapes: PyTree) -> int:
    """Bytes of arrays or of ``jax.eval_shape``'s answer."""
    return sum(
        int(np.prod(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(shapes) if hasattr(x.dtype, "itemsize")
    )


def client_bytes(backbone, algorithm: Algorithm, topology: Topology) -> int:
    """Memory of one client in training: four models (received, own, gradient, momentum), its state, and for a batch
    what the backward pass keeps of the forward pass, with as much again for the gradients of it.
    """
    start = jax.eval_shape(lambda key: algorithm.init(backbone, backbone.init(key), key), jax.random.key(0))
    size = topology.batch_size
    inputs = jax.ShapeDtypeStruct((size, *backbone.input_shape), jnp.float32)

    def kept(params, stats, inputs):
        def logits(params):
            variables = start.variables._replace(params=params, batch_stats=stats)
            return backbone.forward(variables, inputs, jnp.ones(size, bool), jax.random.key(0)).logits

        return jax.vjp(logits, params)[1]

    residuals = jax.eval_shape(kept, start.variables.params, start.variables.batch_stats, inputs)
    activations = max(0, num_bytes(residuals) - num_bytes(start.variables.params))
    return 4 * num_bytes(start.variables) + 2 * num_bytes(start.client) + num_bytes(inputs) + 2 * activations


def choose_chunk(backbone, algorithm: Algorithm, topology: Topology, num_devices: int = 1) -> int:
    """How many clients of a station to compute at once, for ``local.map_clients``: 0 = those of all stations.

    One on CPU, where a client's working set then stays in the cache (``experiments/benchmarks/convolution.py``: all at once
    a round of LeNet-5 takes 1.10 times as long). Elsewhere as many as fit into ``TRAINING_SHARE`` of the device's memory.
    """
    device = jax.devices()[0]
    if device.platform == "cpu":
        return 1
    room = int(TRAINING_SHARE * device_memory() // client_bytes(backbone, algorithm, topology))
    participants = topology.participants or topology.clients_per_station
    if room >= -(-topology.stations * participants // num_devices):
        return 0
    return max(1, min(room, participants))


def cells_at_once(backbone, algorithm: Algorithm, topology: Topology, cells: int) -> int:
    """How many of so many cells, each of all its clients in ``choose_chunk``'s way, to compute side by side.

    One on CPU; elsewhere as many as fit into ``TRAINING_SHARE`` of the device's memory, with a model and a message for every
    station.
    """
    if jax.devices()[0].platform == "cpu":
        return 1
    participants = topology.participants or topology.clients_per_station
    chunk = choose_chunk(backbone, algorithm, topology)
    clients = topology.stations * participants if chunk == 0 else chunk
    size = (clients + topology.stations) * client_bytes(backbone, algorithm, topology)
    return int(np.clip(TRAINING_SHARE * device_memory() // size, 1, cells))


def fits(inputs: Any, dealt: Deal, mesh: Any = None) -> bool:
    """Whether ``DATA_SHARE`` of the devices' memory holds the inputs of a federation, clients' and judged ones."""
    example = int(np.prod(inputs.shape[1:])) * inputs.dtype.itemsize
    clients = dealt.held.size * example / (mesh.size if mesh else 1)
    return clients + len(dealt.judged) * example <= DATA_SHARE * device_memory()


def device_memory() -> int:
    """Bytes of the first device; of a CPU, the machine's divided among its cores, as so many cells run side by side."""
    device = jax.devices()[0]
    if device.platform == "cpu":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // (os.cpu_count() or 1)
    return int((device.memory_stats() or {}).get("bytes_limit", 16 * 2**30))


class Duration(NamedTuple):
    """Seconds of a run, foreseen from ``steps`` timed local steps; servers and checkpoints come on top."""

    client_step: float
    round: float
    evaluation: float
    run: float


def duration(
    round_fn: Round, federation: Federation, rounds: int, eval_every: int = 1, cells: int = 1, jobs: int = 1
) -> Duration:
    """Foresee the time of ``cells`` runs of ``rounds`` rounds, ``jobs`` at a time, from the largest client's own part.

    That client is trained and measured alone, as many times at once as there will be jobs; a round is that for all real
    local steps of all clients, divided among the devices. Left out: merges at stations and the server.
    """
    topology, backbone, algorithm = round_fn.topology, round_fn.backbone, round_fn.algorithm
    state = round_fn.init(jax.random.key(0))
    masks = np.asarray(federation.mask)
    largest = tuple(int(i) for i in np.unravel_index(masks.sum(-1).argmax(), masks.shape[:2]))
    held, plan = stream.largest(federation) if federation.source else (tree.take(federation.clients, largest), ())
    examples, memory, station, variables, shared = jax.device_put(
        jax.tree.map(
            np.asarray,
            (
                held,
                tree.take(state.clients, largest),
                tree.take(state.stations, largest[0]),
                state.variables,
                state.shared,
            ),
        ),
        jax.devices()[0],
    )
    received = Received(variables, shared, station, memory, jnp.int32(0))
    part = jax.jit(functools.partial(local.visit, backbone, algorithm, topology, round_fn.rules))

    def seconds(last: bool) -> float:
        def call(_=None):
            begun = time.perf_counter()
            jax.block_until_ready(part(received, (memory, plan), examples, jax.random.key(0), jnp.asarray(last)))
            return time.perf_counter() - begun

        call()
        with ThreadPoolExecutor(jobs) as pool:
            return statistics.median(t for _ in range(3) for t in pool.map(call, range(jobs)))

    counts = masks.sum(-1)
    if (wanted := topology.local_steps) is None:
        steps = -(-counts // topology.batch_size) * topology.local_epochs
    else:
        steps = np.where(counts > 0, wanted, 0)
    taking = (topology.participants or counts.shape[1]) / counts.shape[1]
    share = float(steps.sum() / steps.max()) * taking / (round_fn.mesh.size if round_fn.mesh else 1)
    early, last = seconds(False), seconds(True)
    a_round = share * ((topology.station_rounds - 1) * early + last)
    parts, judged = 1, federation.evaluation
    if federation.source is not None:
        parts, judged = stream.num_parts(federation), stream.part_of(federation.evaluation)
    judged = (state.variables, judged, jax.random.key(0), len(federation.domain_names))
    jax.block_until_ready(round_fn.evaluate(*judged))
    begun = time.perf_counter()
    jax.block_until_ready(round_fn.evaluate(*judged))
    evaluation = parts * (time.perf_counter() - begun)
    total = max(1.0, cells / jobs) * (rounds * a_round + rounds // eval_every * evaluation)
    return Duration(last / int(steps.max()), a_round, evaluation, total)
