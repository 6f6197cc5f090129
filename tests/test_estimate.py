"""What a run will take: memory of a client in training, clients at once, and seconds."""

import time
from types import SimpleNamespace

import jax
import pytest
from tiny import tiny_backbone, tiny_domains

from fedjax_dg import backbones, datasets, estimate, federate, make_round
from fedjax_dg.algorithms import fedavg, scaffold
from fedjax_dg.types import Topology

LENET = backbones.lenet5(7)
PARAMS = 61_751  # of LeNet-5 with 7 classes


def test_a_client_takes_four_models_its_batch_and_what_the_backward_pass_keeps():
    small, large = (estimate.client_bytes(LENET, fedavg(), Topology(1, 1, batch_size=b)) for b in (32, 64))
    image = 32 * 32 * 3
    # kept of an image at the least: what the two convolutions (in their matrix form) and three dense layers read
    least = 32 * 4 * (image + 14 * 14 * 6 + 400 + 120 + 84)
    assert small > 4 * 4 * PARAMS + 32 * 4 * image + 2 * least
    per_image = (large - small) / 32
    kernels = small - 32 * per_image - 4 * 4 * PARAMS  # kept once for each output of a tile, on CPU
    assert 0 <= kernels < 4 * 4 * PARAMS


def test_a_clients_state_counts():
    plain, controlled = (estimate.client_bytes(LENET, method(), Topology(1, 1)) for method in (fedavg, scaffold))
    assert controlled - plain == 2 * 4 * PARAMS


def test_on_cpu_clients_come_one_after_another():
    assert estimate.choose_chunk(LENET, fedavg(), Topology(10, 10)) == 1


@pytest.mark.parametrize(
    ("clients_that_fit", "devices", "chunk"),
    [(100, 1, 0), (99, 1, 10), (25, 4, 0), (24, 4, 10), (7, 1, 7), (0.5, 1, 1)],
)
def test_elsewhere_as_many_as_fit(clients_that_fit, devices, chunk, monkeypatch):
    """Of 10 stations x 10 clients: those of all stations on a device, else up to a station's, at least one."""
    topology = Topology(10, 10)
    limit = estimate.client_bytes(LENET, fedavg(), topology) * clients_that_fit / estimate.TRAINING_SHARE
    gpu = SimpleNamespace(platform="gpu", memory_stats=lambda: {"bytes_limit": limit})
    monkeypatch.setattr(jax, "devices", lambda: [gpu])
    assert estimate.choose_chunk(LENET, fedavg(), topology, devices) == chunk


def small_round(**topology):
    federation = federate(tiny_domains(), "domain2", 2, 2, batch_size=4, **topology)
    return make_round(tiny_backbone(), fedavg(), federation.topology), federation


def test_a_run_is_its_rounds_and_evaluations():
    took = estimate.duration(*small_round(), rounds=6, eval_every=2, cells=3, jobs=2)
    assert took.run == pytest.approx(1.5 * (6 * took.round + 3 * took.evaluation))


def test_only_those_that_take_part_count(monkeypatch):
    """With a clock that says that anything takes a second."""
    ticks = iter(range(10**6))
    monkeypatch.setattr(estimate.time, "perf_counter", lambda: float(next(ticks)))
    whole = estimate.duration(*small_round(station_rounds=3), rounds=1)
    half = estimate.duration(*small_round(station_rounds=3, participants=1), rounds=1)
    assert (whole.round, half.round) == (12.0, 6.0)  # 4 clients (as many steps each) x 3 station rounds


@pytest.mark.slow
@pytest.mark.usefixtures("full_optimization")
def test_the_estimate_is_near_the_truth():
    """Loosely: other work on the machine changes both. ``experiments/benchmarks/round.py`` compares them in earnest."""
    domains = datasets.load("emoji_styles")
    federation = federate(domains, "fluent_mono", 4, 4, batch_size=32, station_rounds=2)
    round_fn = make_round(backbones.lenet5(6), fedavg(), federation.topology)
    took = estimate.duration(round_fn, federation, rounds=1)
    state = round_fn.init(jax.random.key(0))
    step = jax.jit(round_fn.step)
    seconds = []
    for _ in range(4):
        begun = time.perf_counter()
        jax.block_until_ready(step(state, federation.data, jax.random.key(0)))
        seconds.append(time.perf_counter() - begun)
    assert took.round / 4 < min(seconds) < took.round * 4
