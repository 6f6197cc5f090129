"""Meshes of (station, client) devices: what fits, who holds what, and that a spread run is the same run."""

import functools
import json
import os
import socket
import subprocess
import sys

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import tiny_backbone, tiny_domains, tiny_federation

from fedjax_dg import federate, make_round, run, sharding
from fedjax_dg.aggregators import hfedatm, mean
from fedjax_dg.algorithms import fedavg, scaffold
from fedjax_dg.cli import main
from fedjax_dg.types import Topology

SIZES = [[3, 5, 2, 4], [4, 0, 6, 1]]
CLOSE = {"rtol": 1e-6, "atol": 1e-6}


def mesh_of(topology, devices):
    return sharding.mesh_for(topology, jax.devices()[:devices])


# --- the mesh -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stations", "clients", "participants", "devices", "shape"),
    [
        (10, 10, None, 1, (1, 1)),
        (10, 10, None, 2, (2, 1)),
        (10, 10, None, 4, (2, 2)),
        (10, 10, None, 8, (5, 1)),  # six to eight devices do not divide
        (8, 8, None, 8, (8, 1)),  # stations first
        (1, 16, None, 8, (1, 8)),
        (1, 16, 4, 8, (1, 4)),  # the participants must divide too
        (3, 5, None, 8, (1, 5)),
    ],
)
def test_a_mesh_takes_as_many_devices_as_divide(stations, clients, participants, devices, shape):
    mesh = mesh_of(Topology(stations, clients, participants=participants), devices)
    assert tuple(mesh.shape.values()) == shape


def test_several_processes_must_not_leave_devices_out(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(
        ValueError, match=r"10 stations x 10 clients do not divide among 8 devices in 2 processes \(at most 5"
    ):
        mesh_of(Topology(10, 10), 8)


def test_outside_a_mesh_nothing_is_spread():
    assert sharding.num_devices() == 1
    with sharding.under(mesh_of(Topology(2, 4), 8)):
        assert sharding.num_devices() == 8
        with sharding.under(None):
            assert sharding.num_devices() == 1


# --- placement ------------------------------------------------------------------------------------------------------


def test_every_device_holds_its_own_clients_only():
    federations = [federate(tiny_domains(), "domain2", 4, 2, mesh=mesh) for mesh in (None, mesh_of(Topology(4, 2), 8))]
    alone, spread = federations
    chex.assert_trees_all_equal(alone.clients, spread.clients)
    chex.assert_trees_all_equal(alone.evaluation, spread.evaluation)
    assert alone.ids.tolist() == spread.ids.tolist()
    shards = spread.inputs.addressable_shards
    assert len(shards) == 8 and {shard.data.shape[:2] for shard in shards} == {(1, 1)}
    assert all(
        shard.data.shape == spread.evaluation.unseen.shape for shard in spread.evaluation.unseen.addressable_shards
    )


def test_only_the_asked_part_of_an_array_is_built():
    asked = []

    def block(index):
        asked.append(tuple((s.start or 0, s.stop) for s in index[:2]))
        return np.zeros([len(range(n)[s]) for n, s in zip((4, 2, 3), index)], np.float32)

    built = sharding.build((4, 2, 3), np.float32, block, mesh_of(Topology(4, 2), 8))
    assert built.shape == (4, 2, 3) and len(set(asked)) == 8


# --- clients that are picked ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("devices", [2, 4, 8])
def test_picked_clients_are_taken_and_put_back(devices):
    topology = Topology(2, 4, participants=4)
    mesh = mesh_of(topology, devices)
    key = jax.random.key(0)
    clients = {
        "float": jax.random.normal(key, (2, 4, 3)),
        "byte": jax.random.randint(key, (2, 4, 2), 0, 255).astype(jnp.uint8),
        "flag": jax.random.bernoulli(key, shape=(2, 4)),
        "none": (),
    }
    picked = jnp.array([[3, 0, 2, 1], [1, 2, 3, 0]])
    parts = jax.tree.map(lambda x: x[::-1, ::-1], clients)

    def both(clients, picked, parts):
        with sharding.under(mesh):
            return sharding.take_clients(clients, picked), sharding.put_clients(clients, picked, parts)

    rows = jnp.arange(2)[:, None]
    program = (
        jax.jit(both).lower(sharding.place_data(clients, mesh), picked, sharding.place_data(parts, mesh)).compile()
    )
    taken, put = program(sharding.place_data(clients, mesh), picked, sharding.place_data(parts, mesh))
    chex.assert_trees_all_equal(taken, jax.tree.map(lambda x: x[rows, picked], clients))
    chex.assert_trees_all_equal(put, jax.tree.map(lambda x, part: x.at[rows, picked].set(part), clients, parts))


def state_after(federation, devices, rounds, algorithm=scaffold, rule=mean, **options):
    """A run's last state and history, on so many devices, and the collectives of its program."""
    mesh = mesh_of(federation.topology, devices) if devices > 1 else None
    round_fn = make_round(tiny_backbone(), algorithm(), federation.topology, rule(), mesh=mesh, **options)
    key = jax.random.key(0)
    state = round_fn.init(key)
    data = sharding.place_data(federation.data, mesh)
    program = round_fn.block.lower(state, data, key, length=rounds).compile()
    return program(state, data, key), set(sharding.collectives(program))


@pytest.mark.parametrize("devices", [pytest.param(2, marks=pytest.mark.slow), 4])
def test_partial_participation_is_the_same_on_a_mesh(devices):
    """Two of four clients a round; their states come from and return to devices of other clients."""
    federation = tiny_federation(SIZES, station_rounds=2, batch_size=2, participants=2)
    (expected, told), nothing = state_after(federation, 1, 3)
    (state, info), spoken = state_after(federation, devices, 3)
    chex.assert_trees_all_close(state, expected, **CLOSE)
    assert info.participants.tolist() == told.participants.tolist()
    assert nothing == set() and spoken == {"all-reduce"}


@pytest.mark.parametrize("chunk", [0, 2])
def test_every_chunk_is_the_same_on_a_mesh(chunk):
    federation = tiny_federation(SIZES, batch_size=2)
    (expected, _), _ = state_after(federation, 1, 2)
    (state, _), spoken = state_after(federation, 2, 2, chunk=chunk)
    chex.assert_trees_all_close(state, expected, **CLOSE)
    assert spoken == {"all-reduce"}


OPTIONS = {
    "first station as reference": {"reference": "first"},
    "Grams at the station": {"gram_at": "station"},
    "Grams of the trained model": {"gram_at": "client"},
    "hungarian": {"assignment": "hungarian"},
    "augmented bias": {"bias": "augmented"},
}


# at the station: what is measured there is the one part that takes another way over the mesh
@pytest.mark.parametrize(
    "options", [pytest.param(o, marks=() if o == "Grams at the station" else pytest.mark.slow) for o in OPTIONS]
)
def test_every_way_of_aligning_is_the_same_on_a_mesh(options):
    federation = tiny_federation([[3, 5], [4, 2], [2, 6], [3, 3]], batch_size=2)
    rule = functools.partial(hfedatm, **OPTIONS[options])
    (expected, told), _ = state_after(federation, 1, 2, fedavg, rule)
    (state, info), _ = state_after(federation, 8, 2, fedavg, rule)
    chex.assert_trees_all_close(state, expected, **CLOSE)
    chex.assert_trees_all_close(info.server_merge["fot"], told.server_merge["fot"], rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_the_rule_at_both_tiers_is_the_same_on_a_mesh():
    """A station whose clients are on several devices aligns and merges them too."""
    federation = tiny_federation([[3, 5, 2, 4], [4, 2, 6, 1]], batch_size=2)
    options = {"algorithm": fedavg, "rule": hfedatm, "to_station": hfedatm()}
    (expected, _), _ = state_after(federation, 1, 2, **options)
    for devices in (2, 8):
        (state, _), _ = state_after(federation, devices, 2, **options)
        chex.assert_trees_all_close(state, expected, **CLOSE)


def test_evaluation_is_spread_and_exact():
    """Counts are whole numbers; 24 judged examples make fewer batches than there are devices."""
    topology = Topology(4, 2, batch_size=4)
    records = []
    for mesh in (None, mesh_of(topology, 8)):
        federation = federate(tiny_domains(), "domain2", 4, 2, batch_size=4, mesh=mesh)
        round_fn = make_round(tiny_backbone(), fedavg(), federation.topology, mesh=mesh)
        state = round_fn.init(jax.random.key(0))
        records.append(run(round_fn, state, federation, 2, jax.random.key(1))[1][-1])
    alone, spread = records
    for name in alone:
        if "accuracy" in name:
            assert alone[name] == spread[name]
    assert spread["loss"] == pytest.approx(alone["loss"], rel=1e-5)


@pytest.mark.parametrize(("round_on", "data_on"), [(8, 0), (0, 8), (8, 2)])
def test_a_federation_on_other_devices_than_the_round_is_refused(round_on, data_on):
    topology = Topology(4, 2, batch_size=4)
    on = lambda devices: mesh_of(topology, devices) if devices else None
    federation = federate(tiny_domains(), "domain2", 4, 2, batch_size=4, mesh=on(data_on))
    round_fn = make_round(tiny_backbone(), fedavg(), federation.topology, mesh=on(round_on))
    state = round_fn.init(jax.random.key(0))
    with pytest.raises(ValueError, match=r"lies on other devices: pass the same mesh to make_round"):
        run(round_fn, state, federation, 1, jax.random.key(1))


# --- the command line -----------------------------------------------------------------------------------------------

RUN = (
    "run --rounds 2 --station-rounds 1 --seeds 1 --aggregator mean --stations 4 --clients-per-station 4 "
    "--client-lr 0.01"
)


def metrics_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_cpu_devices_share_a_cell(tmp_path, capsys):
    alone, spread = tmp_path / "alone", tmp_path / "spread"
    assert main([*RUN.split(), "--out", str(alone)]) == 0
    assert main([*RUN.split(), "--out", str(spread), "--cpu-devices", "4"]) == 0
    for one, other in zip(metrics_of(alone), metrics_of(spread), strict=True):
        assert one["train_loss"] == pytest.approx(other["train_loss"], rel=1e-4)
    assert main([*RUN.split(), "--dry-run", "--cpu-devices", "4"]) == 0
    assert "stations over 4, clients over 1 devices (4 of 8, 1 processes)" in capsys.readouterr().out


@pytest.mark.parametrize("given", [{}, {"JAX_COORDINATOR_ADDRESS": "localhost:1"}])
def test_processes_that_are_not_there(given, monkeypatch, capsys):
    for name in (sharding.ADDRESS, sharding.PROCESSES, sharding.PROCESS):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)

    def initialize():  # as it is in a process of its own
        raise ValueError("coordinator_address should be defined.")

    monkeypatch.setattr(jax.distributed, "initialize", initialize)
    assert main(["run", "--distributed"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "JAX_PROCESS_ID" in said


def test_no_cpu_devices(capsys):
    assert main(["run", "--cpu-devices", "0"]) == 2
    assert "cpu_devices=0 is not positive: give 1 or more." in capsys.readouterr().err


@pytest.mark.slow
def test_two_processes_are_one_run(tmp_path, full_optimization):
    """The same table and model as one process with as many devices; the second process writes nothing; and it resumes."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"

    def start(folder, process, *more):
        shared = os.environ | {"JAX_NUM_CPU_DEVICES": "2"}
        if process is not None:
            shared |= {sharding.ADDRESS: address, sharding.PROCESSES: "2", sharding.PROCESS: str(process)}
        command = [sys.executable, "-m", "fedjax_dg.cli", *RUN.split(), "--out", str(folder), *more]
        return subprocess.Popen(command, env=shared, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def finish(*started):
        told = [process.communicate(timeout=300) for process in started]
        assert [process.returncode for process in started] == [0] * len(started), told
        return [out for out, _ in told]

    together, alone = tmp_path / "together", tmp_path / "alone"
    first, second = finish(*(start(together, i, "--distributed") for i in range(2)))
    assert "held-out" in first and "held-out" not in second
    finish(start(alone, None, "--cpu-devices", "4"))
    for one, other in zip(metrics_of(together), metrics_of(alone), strict=True):
        assert one["train_loss"] == pytest.approx(other["train_loss"], rel=1e-5)
        assert one["accuracy"] == other["accuracy"]
    first, second = finish(*(start(together, i, "--distributed", "--resume") for i in range(2)))
    assert "held-out" in first
