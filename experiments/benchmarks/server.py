"""What the server's rule costs: averaging, FOT, RegMean and both, per backbone, as time, memory and share of a round.

command:  python experiments/benchmarks/server.py --backbones lenet5,resnet18_cifar
cost:     1 minute for lenet5, 5 for all but AlexNet and VGG (20 GB of memory), on 2 CPU cores

Work: 10 stations x 10 clients, 128 examples each, batch 32, one local epoch, one station round; 32 x 32 images (AlexNet and
VGG: 224), 7 classes. Two parts, compilation not counted:

* the server's step alone on stations near their start (filters in place, the usual case) and in orders of their own
  (``shuffled``: every matching is solved), and the peak of its temporary memory as XLA plans it;
* its share of a round. LeNet-5: whole rounds, in turn, median and range of the ratio to averaging within a repeat. Others:
  one client's local training is timed, and a round taken as clients x that.
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import time

import jax
import jax.numpy as jnp

import fedjax_dg as fdg
from fedjax_dg.aggregators import grams_of
from fedjax_dg.alignment import permute
from fedjax_dg.local import merge_models, train
from fedjax_dg.types import Examples, Received, Topology

CLASSES = 7
TOPOLOGY = Topology(10, 10, batch_size=32)
EXAMPLES = 128
MOST_SHUFFLED = 512  # filters: matching wider layers (ResNet-50's 2,048) takes minutes a model on CPU
RULES = {
    "mean": fdg.aggregators.mean,
    "fot": functools.partial(fdg.aggregators.hfedatm, regmean=False),
    "regmean": functools.partial(fdg.aggregators.hfedatm, fot=False),
    "hfedatm": fdg.aggregators.hfedatm,
    "hfedatm, gram_at=client": functools.partial(fdg.aggregators.hfedatm, gram_at="client"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--backbones", default="lenet5,resnet18_cifar,resnet18,resnet50")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    print(f"{os.cpu_count()} cores, {jax.default_backend()}, jax {jax.__version__}")
    for name in options.backbones.split(","):
        size = 224 if name.startswith(("alexnet", "vgg")) else 32
        backbone = fdg.backbones.BACKBONES[name](CLASSES, image_size=size)
        seconds = server_step(name, backbone, options.repeats)
        if name == "lenet5":
            whole_rounds(backbone, options.repeats)
        else:
            share(name, backbone, seconds, options.repeats)


def server_step(name: str, backbone, repeats: int) -> dict[str, float]:
    """Time and memory of each rule's merge; seconds of the usual case."""
    start = jax.jit(backbone.init)(jax.random.key(0))
    near = jax.jit(functools.partial(stations_near, spread=0.05))(start)
    images = jax.random.normal(jax.random.key(2), (64, *backbone.input_shape))
    grams = jax.jit(lambda models: jax.lax.map(lambda m: grams_of(backbone, m, images), models))(near)
    seconds = {}
    for rule_name in ("mean", "fot", "regmean", "hfedatm"):
        rule = RULES[rule_name]()
        weights = jnp.ones(TOPOLOGY.stations)
        merge = jax.jit(
            lambda start, models, grams, r=rule, w=weights: merge_models(backbone, r, (), start, models, w, grams)
        )
        begun = time.perf_counter()
        compiled = merge.lower(start, near, grams).compile()
        compile_seconds = time.perf_counter() - begun
        seconds[rule_name] = median_time(lambda c=compiled: c(start, near, grams), repeats)
        text = f"{1e3 * seconds[rule_name]:8.1f} ms"
        groups = [group for group in backbone.groups if group.producers[0].axis == 3]  # of convolutions
        if rule_name in ("fot", "hfedatm") and max(group.size for group in groups) <= MOST_SHUFFLED:
            moved = jax.jit(functools.partial(shuffled, groups=groups))(near)
            text += f", shuffled {1e3 * median_time(lambda c=compiled, m=moved: c(start, m, grams), 1):8.1f} ms"
        memory = compiled.memory_analysis()
        temporary = memory.temp_size_in_bytes / 2**20 if memory else float("nan")
        print(f"{name:15s} {rule_name:8s} {text}; temporary {temporary:7.1f} MiB; compiled in {compile_seconds:.1f} s")
    return seconds


def stations_near(start, spread: float):
    """Station models at a relative distance from the start."""

    def move(path, leaf):
        key = jax.random.fold_in(jax.random.key(1), sum(map(ord, jax.tree_util.keystr(path))))
        return leaf + spread * leaf.std() * jax.random.normal(key, (TOPOLOGY.stations, *leaf.shape))

    return jax.tree_util.tree_map_with_path(move, start)


def shuffled(models, groups):
    """Every model with the filters of every convolution in another order."""

    def one(model, key):
        for number, group in enumerate(groups):
            if group.norm_groups == 1:
                order = jax.random.permutation(jax.random.fold_in(key, number), group.size)
                model = permute(model, group, order)
        return model

    return jax.vmap(one)(models, jax.random.split(jax.random.key(3), TOPOLOGY.stations))


def median_time(function, repeats: int) -> float:
    """Median seconds of a call, after one that does not count."""
    jax.block_until_ready(function())
    times = []
    for _ in range(repeats):
        begun = time.perf_counter()
        jax.block_until_ready(function())
        times.append(time.perf_counter() - begun)
    return statistics.median(times)


def examples_of(backbone, *axes: int) -> Examples:
    """Random examples."""
    images = jax.random.normal(jax.random.key(4), (*axes, EXAMPLES, *backbone.input_shape))
    labels = jax.random.randint(jax.random.key(5), (*axes, EXAMPLES), 0, CLASSES)
    return Examples(images, labels, jnp.ones(labels.shape, bool), jnp.zeros_like(labels))


def whole_rounds(backbone, repeats: int) -> None:
    """Seconds of a round with each rule, in turn."""
    data = examples_of(backbone, TOPOLOGY.stations, TOPOLOGY.clients_per_station)
    ids = jnp.arange(data.mask.shape[0] * data.mask.shape[1]).reshape(data.mask.shape[:2])
    steps = {}
    for name, rule in RULES.items():
        round_fn = fdg.make_round(backbone, fdg.algorithms.fedavg(), TOPOLOGY, rule())
        state, step = round_fn.init(jax.random.key(0)), jax.jit(round_fn.step)
        steps[name] = lambda step=step, state=state: step(state, (data, ids), jax.random.key(1))
        jax.block_until_ready(steps[name]())
    seconds = {name: [] for name in steps}
    for _ in range(repeats):
        for name, step in steps.items():
            begun = time.perf_counter()
            jax.block_until_ready(step())
            seconds[name].append(time.perf_counter() - begun)
    for name, times in seconds.items():
        ratios = [t / base for t, base in zip(times, seconds["mean"])]
        print(
            f"lenet5 round, {name:24s} {statistics.median(times):.3f} s, ratio to mean {statistics.median(ratios):.3f} "
            f"({min(ratios):.3f}-{max(ratios):.3f})"
        )


def share(name: str, backbone, seconds: dict[str, float], repeats: int) -> None:
    """The server step as a share of a round, from one client's local training with and without watching for Grams."""
    data, algorithm = examples_of(backbone), fdg.algorithms.fedavg()
    variables = jax.jit(backbone.init)(jax.random.key(0))
    times = {}
    for rule_name in ("mean", "hfedatm"):
        rules = (fdg.aggregators.mean(), RULES[rule_name]())

        def local(variables, rules=rules):
            received = Received(variables, (), (), ())
            return train(backbone, algorithm, TOPOLOGY, rules, received, (), data, jax.random.key(6))

        step = jax.jit(local)
        times[rule_name] = median_time(lambda step=step: step(variables), min(repeats, 3))
    clients = TOPOLOGY.stations * TOPOLOGY.clients_per_station
    round_seconds = clients * times["mean"] + seconds["mean"]
    extra = clients * (times["hfedatm"] - times["mean"]) + seconds["hfedatm"] - seconds["mean"]
    print(
        f"{name:15s} a client {times['mean']:.2f} s, with Grams {times['hfedatm']:.2f} s; a round of {clients} about "
        f"{round_seconds:.0f} s, of which HFedATM adds {100 * extra / round_seconds:.1f} %"
    )


if __name__ == "__main__":
    main()
