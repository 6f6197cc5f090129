"""The (station, client) mesh: how a round spreads over devices and processes. Nothing else names ``jax.sharding``.

The round is traced ``under`` a mesh; what runs per client or per station asks for it here (``each_client``,
``each_station``, ``total``) and is a plain call without one. Every device does its own clients; only sums travel, so the
one collective of a round is the all-reduce: of a station's devices, and of all of them.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Int

from fedjax_dg import tree
from fedjax_dg.types import PyTree, ServerState, Topology

STATION, CLIENT = AXES = ("station", "client")
# what a process needs to find the others, where no cluster tells it
ADDRESS, PROCESSES, PROCESS = "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"

# --- the mesh -------------------------------------------------------------------------------------------------------


def mesh_for(topology: Topology, devices: Sequence[Any] | None = None) -> Mesh:
    """The mesh of as many devices (all there are, by default) as stations x participants divide among evenly.

    Stations first: a station on one device merges its clients without talking. Raises ``ValueError`` when several
    processes are at work and some device would be left out.

    >>> dict(mesh_for(Topology(stations=10, clients_per_station=10), jax.devices()[:1]).shape)
    {'station': 1, 'client': 1}
    """
    devices = jax.devices() if devices is None else devices
    stations, clients = topology.stations, topology.clients_per_station
    shared = math.gcd(clients, topology.participants or clients)
    sizes = [(s, c) for s in _divisors(stations) for c in _divisors(shared) if s * c <= len(devices)]
    across, within = max(sizes, key=lambda size: (size[0] * size[1], size[0]))
    if across * within < len(devices) and jax.process_count() > 1:
        raise ValueError(
            f"{stations} stations x {shared} clients do not divide among {len(devices)} devices in {jax.process_count()} "
            f"processes (at most {across * within} would work): give numbers of stations or clients that do."
        )
    grid = np.asarray(devices[: across * within], dtype=object).reshape(across, within)
    return Mesh(grid, (STATION, CLIENT), axis_types=(AxisType.Auto, AxisType.Auto))


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def describe(mesh: Mesh | None) -> str:
    """A mesh in words."""
    if mesh is None:
        return f"all stations and clients on {jax.devices()[0]}"
    parts = f"stations over {mesh.shape[STATION]}, clients over {mesh.shape[CLIENT]} devices"
    return f"{parts} ({mesh.size} of {jax.device_count()}, {jax.process_count()} processes)"


# --- where arrays live ----------------------------------------------------------------------------------------------


def of_clients(mesh: Mesh) -> NamedSharding:
    """For arrays [S, C, ...]."""
    return NamedSharding(mesh, PartitionSpec(STATION, CLIENT))


def everywhere(mesh: Mesh) -> NamedSharding:
    """For what every device holds whole."""
    return NamedSharding(mesh, PartitionSpec())


def of_state(mesh: Mesh | None) -> Any:
    """Shardings of a ``ServerState``, for ``jax.jit``."""
    if mesh is None:
        return None
    whole: Any = everywhere(mesh)
    clients: Any = of_clients(mesh)
    stations: Any = NamedSharding(mesh, PartitionSpec(STATION))
    return ServerState(whole, whole, clients, stations, stations, whole, whole)


def build(shape: tuple[int, ...], dtype: Any, block: Callable[[Any], np.ndarray], mesh: Mesh | None) -> jax.Array:
    """An array [S, C, ...] of which ``block(index)`` gives any part: every process builds only what its devices hold."""
    if mesh is None:
        return jnp.asarray(block(tuple(slice(0, n) for n in shape)))
    return jax.make_array_from_callback(shape, of_clients(mesh), lambda index: block(index).astype(dtype))


def mine(shape: tuple[int, ...], mesh: Mesh | None) -> np.ndarray:
    """Which of stations x clients lie on devices of this process."""
    here = np.ones(shape, bool)
    if mesh is None or jax.process_count() == 1:
        return here
    here[:] = False
    for index in of_clients(mesh).addressable_devices_indices_map(shape).values():
        here[index] = True
    return here


def place(state: ServerState, mesh: Mesh | None) -> ServerState:
    """A state from elsewhere (a checkpoint of another mesh, host arrays) on the devices of ``mesh``.

    A federation is built in place: ``federate(..., mesh=mesh)``.
    """
    if mesh is None:
        return jax.tree.map(jnp.asarray, state)
    shardings = of_state(mesh)
    return ServerState(*(jax.device_put(part, where) for part, where in zip(state, shardings)))


def place_data(data: PyTree, mesh: Mesh | None) -> PyTree:
    """Arrays [S, C, ...] on the devices of ``mesh``."""
    return data if mesh is None else jax.device_put(data, of_clients(mesh))


def lies_on(array: Any, mesh: Mesh | None) -> bool:
    """Whether a round on ``mesh`` (None: one device) can read an array as it lies; one of the host, always."""
    if not isinstance(array, jax.Array):
        return True
    return array.sharding.num_devices == 1 if mesh is None else getattr(array.sharding, "mesh", None) == mesh


def collectives(program: Any) -> dict[str, int]:
    """How often each kind of communication between devices occurs in a compiled program."""
    kinds = "all-reduce|all-gather|(?:ragged-)?all-to-all|reduce-scatter|collective-permute|collective-broadcast"
    return dict(Counter(re.findall(rf" ({kinds})(?:-start)?\(", program.as_text())))


def replicate(values: PyTree, mesh: Mesh | None) -> PyTree:
    """Host arrays, the same in every process, whole on every device."""
    if mesh is None:
        return jax.tree.map(jnp.asarray, values)
    put = lambda x: jax.make_array_from_callback(x.shape, everywhere(mesh), lambda index: np.asarray(x)[index])
    return jax.tree.map(put, values)


def fetch(values: PyTree) -> PyTree:
    """Arrays of a round as numpy arrays, whole in every process."""
    if jax.process_count() == 1:
        return jax.device_get(values)
    return multihost_utils.process_allgather(values, tiled=True)


# --- the round under a mesh -----------------------------------------------------------------------------------------


@contextlib.contextmanager
def under(mesh: Mesh | None) -> Iterator[None]:
    """Context: what is traced in it spreads over ``mesh``; None: over nothing, whatever the surroundings are."""
    with jax.sharding.use_abstract_mesh(AbstractMesh((), ()) if mesh is None else mesh.abstract_mesh):
        yield


def _axes() -> dict[str, int]:
    """Sizes of the mesh around; none where there is no mesh, or where a device is already on its own."""
    mesh = jax.sharding.get_abstract_mesh()
    return {} if mesh.empty or mesh.manual_axes else dict(mesh.shape)


def each_client(
    function: Callable, finish: Callable | None, common: PyTree, stations: PyTree, clients: PyTree
) -> PyTree:
    """``finish`` of every station's results: on each device, ``function(common, stations, clients, finish)`` for its own.

    ``function(common, stations [s], clients [s, p], finish)`` gives ``finish(station, results [p])`` of s stations, with
    None ``results``. Where a station's clients are on several devices, its end is made afterwards, from the results of all.
    ``common`` is what everyone reads: a function must not close over arrays, as devices hold those in another way than
    what they are given.
    """
    axes = _axes()
    if not axes:
        return function(common, stations, clients, finish)
    if axes[CLIENT] == 1:
        return each_station(lambda *given: function(*given, finish), common, stations, clients)
    results = spread(lambda *given: function(*given, None), common, stations, clients)
    if finish is None:
        return results

    def alone(station, results):
        with under(None):
            return finish(station, results)

    return jax.vmap(alone)(stations, results)


# unchecked below: a gradient inside is a client's own and must not be summed over devices
def spread(function: Callable, common: PyTree, stations: PyTree, clients: PyTree) -> PyTree:
    """``function(common, stations [S], clients [S, C]) -> [S, C]`` that treats every client by itself: on each device,
    for its own."""
    if not _axes():
        return function(common, stations, clients)
    given = (PartitionSpec(), PartitionSpec(STATION), PartitionSpec(STATION, CLIENT))
    return jax.shard_map(function, in_specs=given, out_specs=given[-1], check_vma=False)(common, stations, clients)


def each_station(function: Callable, common: PyTree, *stations: PyTree) -> PyTree:
    """``function(common, *stations)`` for trees [S, ...] that treats every station by itself: on each device, its own."""
    if not _axes():
        return function(common, *stations)
    given = (PartitionSpec(), *(PartitionSpec(STATION) for _ in stations))
    return jax.shard_map(function, in_specs=given, out_specs=PartitionSpec(STATION), check_vma=False)(common, *stations)


def total(
    function: Callable[[PyTree, PyTree], PyTree], common: PyTree, parts: PyTree, axes: Sequence[str] = (STATION,)
) -> PyTree:
    """Sum of ``function(common, part)`` over the leading axis, one after another: one result at a time is in memory.

    On a mesh, every device adds up its own, then an all-reduce the sums. The parts must divide among the devices of
    ``axes``.
    """

    def here(common, parts):
        one = functools.partial(function, common)
        add = lambda total, part: (jax.tree.map(jnp.add, total, one(part)), None)
        return jax.lax.scan(add, tree.zeros(jax.eval_shape(one, tree.take(parts, 0))), parts)[0]

    if not _axes():
        return here(common, parts)
    together = lambda *given: jax.lax.psum(here(*given), tuple(axes))
    given = (PartitionSpec(), PartitionSpec(tuple(axes)))
    return jax.shard_map(together, in_specs=given, out_specs=PartitionSpec(), check_vma=False)(common, parts)


def whole_stations(clients: PyTree) -> PyTree:
    """Arrays [S, C, ...] so that every device has all the clients of its stations."""
    if not _axes():
        return clients
    given, out = PartitionSpec(STATION, CLIENT), PartitionSpec(STATION)
    return jax.shard_map(_join, in_specs=given, out_specs=out, check_vma=False)(clients)


def whole(parts: PyTree, axes: Sequence[str] = (STATION,)) -> PyTree:
    """Arrays [S, ...] (or with both ``AXES`` [S, C, ...]) so that every device has all of them: what a rule sorts, or
    everyone reads."""
    if not _axes():
        return parts

    def one(x):
        for axis, name in enumerate(axes):
            shape = (*x.shape[:axis], x.shape[axis] * jax.lax.axis_size(name), *x.shape[axis + 1 :])
            start = jax.lax.axis_index(name) * x.shape[axis]
            x = jax.lax.dynamic_update_slice_in_dim(jnp.zeros(shape, x.dtype), x, start, axis)
        bits = x.astype(jnp.uint8) if x.dtype == bool else x
        return jax.lax.psum(bits, tuple(axes)).astype(x.dtype)

    together = lambda parts: jax.tree.map(one, parts)
    return jax.shard_map(together, in_specs=PartitionSpec(*axes), out_specs=PartitionSpec(), check_vma=False)(parts)


def alike(function: Callable, *common: PyTree) -> PyTree:
    """``function(*common)``, by every device for itself, of what all hold whole: else XLA may divide what a rule remembers
    of each station, to fit how the models lie, and has to fetch it together again."""
    if not _axes():
        return function(*common)
    return jax.shard_map(function, in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False)(*common)


def take_clients(clients: PyTree, picked: Int[Array, "S P"]) -> PyTree:
    """Arrays [S, C, ...] of the picked clients only, [S, P, ...]; ``picked`` is whole on every device of a station."""

    def take(clients, picked):
        def one(x):
            place = picked - jax.lax.axis_index(CLIENT) * x.shape[1]
            mine = (place >= 0) & (place < x.shape[1])
            found = jax.vmap(lambda x, i: x[i])(x, jnp.clip(place, 0, x.shape[1] - 1))
            return _sum(jnp.where(mine.reshape(*mine.shape, *[1] * (x.ndim - 2)), found, jnp.zeros((), x.dtype)))

        return jax.tree.map(lambda x: _own_part(one(x)), clients)

    if not _axes():
        return jax.tree.map(jax.vmap(lambda x, i: x[i]), clients, jax.tree.map(lambda _: picked, clients))
    given, out = (PartitionSpec(STATION, CLIENT), PartitionSpec(STATION)), PartitionSpec(STATION, CLIENT)
    return jax.shard_map(take, in_specs=given, out_specs=out, check_vma=False)(clients, picked)


def put_clients(clients: PyTree, picked: Int[Array, "S P"], parts: PyTree) -> PyTree:
    """The inverse of ``take_clients``: arrays [S, C, ...] with the picked clients' ``parts`` [S, P, ...] in them."""

    def put(clients, picked, parts):
        def one(x, part):
            place = picked - jax.lax.axis_index(CLIENT) * x.shape[1]
            place = jnp.where(place >= 0, place, x.shape[1])  # not from the end: out of bounds is dropped
            return jax.vmap(lambda x, i, part: x.at[i].set(part, mode="drop"))(x, place, part)

        return jax.tree.map(one, clients, _join(parts))

    if not _axes():
        one = jax.vmap(lambda x, i, part: x.at[i].set(part))
        return jax.tree.map(lambda x, part: one(x, picked, part), clients, parts)
    each, station = PartitionSpec(STATION, CLIENT), PartitionSpec(STATION)
    return jax.shard_map(put, in_specs=(each, station, each), out_specs=each, check_vma=False)(clients, picked, parts)


# on one device of a station, with x [s, c, ...] its own clients of all [s, C, ...]


def _sum(x: Array) -> Array:
    """Over the station's devices."""
    return jax.lax.psum(x.astype(jnp.uint8), CLIENT).astype(bool) if x.dtype == bool else jax.lax.psum(x, CLIENT)


def _join(clients: PyTree) -> PyTree:
    """Those of all devices."""

    def one(x):
        whole = jnp.zeros((x.shape[0], x.shape[1] * jax.lax.axis_size(CLIENT), *x.shape[2:]), x.dtype)
        start = jax.lax.axis_index(CLIENT) * x.shape[1]
        return _sum(jax.lax.dynamic_update_slice_in_dim(whole, x, start, axis=1))

    return jax.tree.map(one, clients)


def _own_part(x: Array) -> Array:
    """This device's, of those of all."""
    size = x.shape[1] // jax.lax.axis_size(CLIENT)
    return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(CLIENT) * size, size, axis=1)


def num_devices() -> int:
    """Devices of the mesh around."""
    return math.prod(_axes().values())


# --- several processes ----------------------------------------------------------------------------------------------


def start() -> None:
    """Join the other processes of a Slurm job or a TPU slice; elsewhere, those that the environment variables
    ``JAX_COORDINATOR_ADDRESS`` (host:port of process 0), ``JAX_NUM_PROCESSES`` and ``JAX_PROCESS_ID`` tell of.

    Call it before anything else of JAX. Raises ``ValueError`` when there is nothing to join.
    """
    given = {name: os.environ[name] for name in (ADDRESS, PROCESSES, PROCESS) if name in os.environ}
    if given and len(given) < 3:
        missing = " and ".join(name for name in (ADDRESS, PROCESSES, PROCESS) if name not in given)
        raise ValueError(f"{', '.join(given)} given without {missing}: set all three, the same but for the process id.")
    try:
        if given:
            jax.distributed.initialize(given[ADDRESS], int(given[PROCESSES]), int(given[PROCESS]))
        else:
            jax.distributed.initialize()
    except ValueError as error:
        raise ValueError(
            f"There are no other processes to join ({error}): start under Slurm or on a TPU slice, or set {ADDRESS}, "
            f"{PROCESSES} and {PROCESS}."
        ) from None


def is_first() -> bool:
    """Whether this process is the one that writes and prints."""
    return jax.process_index() == 0


def wait(reason: str) -> None:
    """Until every process has come here."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(reason)
