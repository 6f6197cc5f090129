"""Streamed federations: the same batches, models and scores as resident ones, whatever is read when and by whom."""

import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import tiny_backbone, tiny_domains, tiny_method
from trees import grow

from fedjax_dg import aggregators, algorithms, datasets, federate, make_round, run, sharding, stream
from fedjax_dg.algorithms import fedavg, fediir, scaffold
from fedjax_dg.datasets.reading import read, read_all
from fedjax_dg.estimate import fits
from fedjax_dg.federation import deal
from fedjax_dg.types import Algorithm, ServerState, Start

BACKBONE = tiny_backbone()
KEY = jax.random.key(3)
SIZES = {
    "epochs": {"local_epochs": 2},
    "steps": {"local_steps": 2},
    "steps of a few": {"local_steps": 3, "participants": 1},
    "more steps than examples": {"local_steps": 9, "participants": 2},
}


def ragged():
    """Three domains of 30, 13 and 30 examples."""
    data = tiny_domains()
    keep = np.concatenate([np.arange(43), np.arange(60, 90)])
    return data._replace(inputs=data.inputs[keep], labels=data.labels[keep], domain=data.domain[keep])


def both(domains=None, **options):
    """The same federation resident and streamed."""
    options = {"station_rounds": 2, "batch_size": 3, **options}
    return [federate(domains or ragged(), "domain2", 2, 2, stream=s, **options) for s in (False, True)]


def fingerprints() -> Algorithm:
    """Trains nothing: every client keeps a number that changes with every bit of every batch, and with their order."""

    def init(backbone, variables, key):
        return Start(variables, client=jnp.uint32(1))

    def step(backbone, received, local, batch, key):
        bits = [jax.lax.bitcast_convert_type(x.ravel(), jnp.uint32) for x in (batch.inputs, batch.labels, batch.domain)]
        values = jnp.concatenate([*bits, batch.mask.astype(jnp.uint32)])
        weights = jnp.arange(1, 2 * len(values), 2, dtype=jnp.uint32)
        told = local.client * jnp.uint32(1_000_003) + (values * weights).sum(dtype=jnp.uint32)
        return local._replace(client=told), {"passes": local.passes.astype(jnp.float32)}

    return Algorithm(step=step, init=init)


def trained(federation, algorithm, rounds=3, to_server=None, mesh=None, **options):
    round_fn = make_round(BACKBONE, algorithm, federation.topology, to_server, mesh=mesh)
    state, history = run(round_fn, round_fn.init(KEY), federation, rounds, KEY, **options)
    return round_fn, state, history


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_batches_are_the_same_bits_in_the_same_order(sizes):
    resident, streamed = both(**sizes)
    one, other = (trained(f, fingerprints())[1].clients for f in (resident, streamed))
    assert np.array_equal(one, other)
    assert len(np.unique(one)) == 4 or "participants" in sizes  # clients read other things than each other


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_a_round_holds_what_its_steps_read_and_no_more(sizes):
    streamed = both(**sizes)[1]
    drawn = stream.drawing(streamed.source)(KEY, 0)
    stations, participants, places = drawn.rows.shape
    largest = streamed.mask.shape[-1]
    assert (stations, participants) == (2, sizes.get("participants", 2))
    assert places == min(largest, 2 * sizes.get("local_steps", largest) * 3)
    index, valid = drawn.plan.index, drawn.plan.valid
    for s, p in np.ndindex(stations, participants):
        held = drawn.rows[s, p][drawn.rows[s, p] >= 0]
        used = drawn.rows[s, p][index[s, p][valid[s, p]]]
        assert len(set(held)) == len(held) and (used >= 0).all()
        assert set(used) == set(held) or (places == largest and set(used) < set(held))


@pytest.mark.parametrize("sizes", [SIZES["epochs"], SIZES["steps of a few"]], ids=["epochs", "steps of a few"])
def test_models_and_scores_are_those_of_a_resident_federation(sizes):
    results = [trained(f, scaffold(), to_server=aggregators.hfedatm()) for f in both(**sizes)]
    (_, one, told), (_, other, told_too) = results
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6), one, other)
    assert told[-1]["accuracy"] == told_too[-1]["accuracy"]
    assert told[-1]["loss"] == pytest.approx(told_too[-1]["loss"], rel=1e-5)


def test_a_survey_of_whole_clients_is_that_of_a_resident_federation():
    one, other = (trained(f, fediir())[1].variables for f in both())
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6), one, other)


def test_neither_the_window_nor_the_parts_nor_the_blocks_matter(monkeypatch):
    streamed = both()[1]
    expected = trained(streamed, fedavg(), rounds=4, eval_every=2)
    for name, size in (("WINDOW_ROUNDS", 2), ("JUDGED", 7), ("BLOCK", 4)):
        monkeypatch.setattr(stream, name, size)
    assert stream.num_parts(streamed) > 2
    found = trained(streamed, fedavg(), rounds=4, eval_every=2)
    jax.tree.map(np.testing.assert_array_equal, expected[1], found[1])
    for one, other in zip(expected[2], found[2]):
        assert one["accuracy"] == other["accuracy"] and one["loss"] == pytest.approx(other["loss"], rel=1e-5)


def test_resumed_in_the_middle_is_the_same_run():
    streamed = both(local_steps=2, participants=1)[1]
    round_fn, whole, _ = trained(streamed, fingerprints(), rounds=5)
    half = run(round_fn, round_fn.init(KEY), streamed, 2, KEY)[0]
    state = run(round_fn, half, streamed, 5, KEY)[0]
    jax.tree.map(np.testing.assert_array_equal, whole, state)
    assert round_fn.block._cache_size() == 1


def test_worker_processes_read_the_same(tmp_path):
    grow(tmp_path, ("one", "two"), ("class",), images=20)
    images = datasets.load("folder", data_dir=str(tmp_path), image_size=4).inputs
    expected = images[np.arange(40)]
    rows = [np.array(r) for r in ([3, -1, 39], [0, 0], [-1, -1, -1, -1], [12])]
    for workers in (0, 2):
        for found, wanted in zip(read(images, rows, workers), rows, strict=True):
            assert found.dtype == np.uint8
            assert np.array_equal(found, np.where((wanted >= 0)[:, None, None, None], expected[wanted], 0))


def test_a_streamed_federation_on_a_mesh_is_the_same():
    options = {"station_rounds": 2, "batch_size": 3, "local_steps": 2, "stream": True}
    alone = federate(ragged(), "domain2", 2, 2, **options)
    mesh = sharding.mesh_for(alone.topology, jax.devices()[:4])
    spread = federate(ragged(), "domain2", 2, 2, mesh=mesh, **options)
    one, other = trained(alone, fingerprints())[1], trained(spread, fingerprints(), mesh=mesh)[1]
    assert np.array_equal(one.clients, other.clients)


def test_shapes_are_those_of_what_comes():
    streamed = both(**SIZES["steps of a few"])[1]
    coming = stream.feed(streamed, 0, 1, 1, KEY)
    drawn = next(coming)
    expected = stream.shapes(streamed)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), drawn) == jax.tree.map(lambda x: (x.shape, x.dtype), expected)
    part = next(coming)
    assert part.start == 0 and part.data.examples.inputs.shape == streamed.evaluation.examples.inputs.shape
    assert next(coming, None) is None


def test_giving_up_in_the_middle_stops_reading():
    streamed = both()[1]
    before = set(threading.enumerate())
    coming = stream.feed(streamed, 0, 50, 1, KEY)
    next(coming)
    coming.close()
    ends = time.monotonic() + 60
    while set(threading.enumerate()) - before and time.monotonic() < ends:
        time.sleep(0.01)
    assert set(threading.enumerate()) <= before


def test_a_feed_that_is_collected_in_its_own_thread_does_not_wait_for_itself(monkeypatch):
    streamed, examples = both()[1], stream._examples
    alone, collected, held, calls = threading.Event(), threading.Event(), [], []

    def noting(*given):  # runs in the thread that puts the next part together
        calls.append(given)
        if len(calls) == 2 and alone.wait(60):
            held.clear()
            collected.set()
        return examples(*given)

    monkeypatch.setattr(stream, "_examples", noting)
    held.append(stream.feed(streamed, 0, 50, 1, KEY))
    next(held[0])
    alone.set()
    assert collected.wait(60)


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    (tmp_path / "bad.png").write_bytes(b"no image")
    images = datasets.images.Images(str(tmp_path), ("bad.png",), 6)
    with pytest.raises(datasets.images.UnreadableImage, match="bad.png cannot be read as an image"):
        read_all(images)
    data = ragged()
    broken = datasets.images.Images(str(tmp_path), ("bad.png",) * len(data.labels), 6)
    federation = federate(data._replace(inputs=broken), "domain2", 2, 2, stream=True)
    backbone = tiny_backbone()
    round_fn = make_round(backbone, fedavg(), federation.topology)
    with pytest.raises(ValueError, match=r"backbone takes inputs of shape \(6, 6, 2\)"):  # before anything is read
        run(round_fn, round_fn.init(KEY), federation, 1, KEY)
    with pytest.raises(datasets.images.UnreadableImage, match="bad.png cannot be read as an image"):
        next(stream.feed(federation, 0, 1, 1, KEY))


def test_methods_that_need_all_examples_before_round_1_say_so():
    streamed = both()[1]
    round_fn = make_round(BACKBONE, algorithms.elcfs(), streamed.topology)
    with pytest.raises(
        ValueError, match="works on all the clients' examples before round 1, but the federation is streamed"
    ):
        run(round_fn, round_fn.init(KEY), streamed, 1, KEY)
    with pytest.raises(ValueError, match="streamed, so no array holds its examples"):
        _ = streamed.data


@pytest.mark.parametrize("name", algorithms.ALGORITHMS)
def test_other_methods_look_at_no_input_before_round_1(name):
    streamed, method = both()[1], tiny_method(name)
    if method.resident:
        assert name in ("lsi", "elcfs", "ccst")
    else:
        assert method.furnish is None
        data = (streamed.clients, streamed.ids)  # their inputs are only a shape
        state = ServerState((), (), ((), ()), (), (), (), jnp.int32(0))
        assert method.prepare(BACKBONE, state, data, KEY, None) == state


def test_what_a_client_keeps_is_no_hindrance():
    kept = algorithms.keep_batch_stats(algorithms.keep_optimizer(fedavg()))
    one, other = (trained(f, kept, rounds=2)[1].variables for f in both())
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6), one, other)


def test_what_fits_into_a_device(monkeypatch):
    dealt, inputs = deal(ragged(), "domain2", 2, 2), ragged().inputs.astype(np.float32)
    mesh = sharding.mesh_for(dealt.topology, jax.devices()[:4])
    clients, judged = (dealt.held.size * 72 * 4, len(dealt.judged) * 72 * 4)
    for needed, where in ((clients + judged, None), (clients / 4 + judged, mesh)):
        monkeypatch.setattr("fedjax_dg.estimate.device_memory", lambda needed=needed: needed / 0.3 + 1)
        assert fits(inputs, dealt, where)
        monkeypatch.setattr("fedjax_dg.estimate.device_memory", lambda needed=needed: needed / 0.3 - 4)
        assert not fits(inputs, dealt, where)
