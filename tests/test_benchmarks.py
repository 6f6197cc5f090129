"""The benchmark against PyTorch says what it should, and PyTorch's side of it does the same work."""

import functools
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedjax_dg as fdg

FOLDER = Path(__file__).parent.parent / "experiments" / "benchmarks"
SIZES = {"stations": 2, "clients": 2, "examples": 32}  # one batch: its order does not matter
CLASSES = 7


@functools.cache
def script(name):
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where annotations are looked up
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_a_small_round_writes_the_stated_numbers(tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
    sizes = [f"--{name}=1" for name in ("stations", "clients", "examples")]
    command = [sys.executable, FOLDER / "round.py", *sizes, "--repeats=2", "--variants=ours mean", "--json", "out.json"]
    said = subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True).stdout
    assert "ours mean" in said and "GFLOP" in said
    told = json.loads((tmp_path / "out.json").read_text())
    own = told["variants"]["ours mean"]
    assert told["speedup_over_best_torch"] is None and told["hfedatm_extra_share"] is None
    assert told["compile_seconds"] == own["compile_seconds"] > own["warm_seconds"] > own["seconds"]["median"] > 0
    assert told["peak_rss_mib"] == own["peak_rss_mib"] > 50
    assert own.keys() == {"seconds", "cpu_seconds", "peak_rss_mib", "compile_seconds", "warm_seconds"}
    assert 0 < own["cpu_seconds"]["min"] <= own["cpu_seconds"]["median"] <= own["cpu_seconds"]["max"]
    assert told["machine"].keys() == {"cores", "cpu", "jax", "torch", "backend", "matmul_gflops"}
    assert told["machine"]["matmul_gflops"] > 0
    assert told.keys() == {
        *("speedup_over_best_torch", "hfedatm_extra_share", "compile_seconds", "peak_rss_mib", "variants", "machine")
    }


def test_ratios_are_taken_within_a_repeat_to_its_fastest_torch_variant():
    module = script("round")
    times = {
        "ours mean": [1.0, 2.0, 1.0],
        "ours hfedatm": [1.5, 2.5, 1.75],
        "torch mean 1 thread": [4.0, 4.0, 6.0],
        "torch mean 2 threads": [3.0, 8.0, 9.0],
        "torch hfedatm 1 thread": [0.1, 0.1, 0.1],
    }
    measured = {name: module.Measured(seconds, seconds, 8.0, 1.0, 5.0, 2.0) for name, seconds in times.items()}
    told = module.summary(measured, {})
    assert told["speedup_over_best_torch"] == {"median": 3.0, "min": 2.0, "max": 6.0}
    assert told["hfedatm_extra_share"] == {"median": 0.5, "min": 0.25, "max": 0.75}


def test_work_is_counted_as_its_layers_say():
    module = script("round")
    layers = {
        "kernels": [(25 * 3, 6), (25 * 6, 16), (400, 120), (120, 84), (84, CLASSES)],
        "places": [784, 100, 1, 1, 1],
    }
    adds = [rows * columns * places for (rows, columns), places in zip(*layers.values())]
    said = module.roofline({}, module.Sizes(1, 1, 1000), 1.0)
    assert f"{2e-6 * (3 * sum(adds) - adds[0]):.3g} GFLOP" in said


# --- PyTorch's side, where it is installed --------------------------------------------------------------------------


def torch_side():
    return pytest.importorskip("torch"), script("torch_round")


def as_torch(torch, params):
    """A network's parameters as PyTorch lays them out: kernels [o, i, h, w] and [o, d], the flatten in the order c, h, w."""
    found = []
    for name in ("conv1", "conv2", "dense1", "dense2", "head"):
        kernel = np.array(params[name]["kernel"])
        if name == "dense1":
            kernel = kernel.reshape(5, 5, 16, -1).transpose(2, 0, 1, 3).reshape(400, -1)
        found += [kernel.transpose(3, 2, 0, 1) if kernel.ndim == 4 else kernel.T, np.array(params[name]["bias"])]
    return [torch.from_numpy(np.ascontiguousarray(x)) for x in found]


# the rounding of the clients' models, times the condition of the Grams: here of fewer rows than inputs
@pytest.mark.parametrize(("rule", "limit"), [("mean", 1e-5), ("hfedatm", 5e-4)])
def test_torch_does_the_same_round(rule, limit, key):
    torch, module = torch_side()
    images, labels = script("round").examples(script("round").Sizes(**SIZES), range(SIZES["stations"]))
    topology = fdg.Topology(SIZES["stations"], SIZES["clients"], batch_size=module.BATCH)
    to_server = fdg.aggregators.hfedatm(gram_at="client") if rule == "hfedatm" else fdg.aggregators.mean()
    round_fn = fdg.make_round(fdg.backbones.lenet5(CLASSES), fdg.algorithms.fedavg(), topology, to_server)
    there = jnp.asarray(labels)
    whole = fdg.Examples(jnp.asarray(images), there, jnp.ones(there.shape, bool), jnp.zeros_like(there))
    state = round_fn.init(key)
    new, _ = jax.jit(round_fn.step)(state, (whole, jnp.arange(4).reshape(2, 2)), key)

    start, net = as_torch(torch, state.variables.params), module.network(CLASSES)
    pictures = torch.from_numpy(images).movedim(-1, -3)
    sent = [module.station(net, start, x, y, rule) for x, y in zip(pictures, torch.from_numpy(labels))]
    merged = module.server(rule, start, sent, [2, 2])
    for own, theirs, before in zip(as_torch(torch, new.variables.params), merged, start):
        assert torch.norm(theirs - own) < limit * torch.norm(own - before)


def test_torch_puts_filters_and_grams_back_into_order():
    torch, module = torch_side()
    torch.manual_seed(1)
    net = module.network(CLASSES)
    model = [x.detach() for x in net.parameters()]
    images = torch.randn(8, 3, 32, 32)
    first, second = torch.randperm(6), torch.randperm(16)
    moved = [model[0][first], model[1][first], model[2][second][:, first], model[3][second], *model[4:]]
    moved[4] = model[4].view(120, 16, 25)[:, second].reshape(120, 400)
    other = module.network(CLASSES)
    for own, given in zip(other.parameters(), moved):
        own.data.copy_(given)
    torch.testing.assert_close(other(images), net(images))
    back, statistics = module.align(model, moved, module.grams(other, images))
    torch.testing.assert_close(back, model)
    torch.testing.assert_close(statistics, module.grams(net, images))
