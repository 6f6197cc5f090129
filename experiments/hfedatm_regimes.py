"""When does HFedATM help? One set of station models, merged by every server rule; then complete runs of a few rules.

command:  OPENBLAS_NUM_THREADS=1 python experiments/hfedatm_regimes.py --out regimes
          python experiments/hfedatm_regimes_report.py --out regimes
cost:     2 hours on two cores for everything; can be killed and started again at any time: finished cells are kept, and the
          most telling come first. --smoke takes a minute
data:     emoji_styles, embedded; LeNet-5, FedAvg clients with the demo's settings; every style held out in turn

One merge: from one start, stations train on their own for 1, 5 and 20 station rounds, and the same station models and Grams
are then merged by averaging, FOT and RegMean of every alpha and ridge: nothing but the rule differs. Regimes: stations of
one style or of all; starts "warm" (a model trained by averaging), "shared" (a random init), "independent" (one for each
station); federations "full" (10 x 10 clients of some 25 examples: a station's 245 rows do not fill dense1's 400 inputs),
"few" (6 each: 60 rows), "wide" (3 x 10 clients of 82: 816 rows) and "uneven" (stations of 6 and of 25 in turn).

Complete runs: 20 server rounds of 1 station round, 4 of 5 or 2 of 20, every rule on its own way. "step 2" is a control:
averaging whose every change is doubled.

One line of ``cells.jsonl`` is one cell: what is judged is in ``judge``, what explains it in ``spread`` and ``merge_all``.
OPENBLAS_NUM_THREADS matters: two cells run side by side, and LAPACK's own threads then wait for each other.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import json
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
import optax

import fedjax_dg as fdg
from fedjax_dg.aggregators.grams import GRAMS, add_grams, measure_grams, per_row
from fedjax_dg.alignment import align_all
from fedjax_dg.alignment.groups import leaves_of
from fedjax_dg.config import RunConfig, build_algorithm, topology
from fedjax_dg.evaluate import EvaluationSet, evaluate
from fedjax_dg.types import Aggregator, Examples, Topology

DEMO = RunConfig()
STYLES = ("noto", "twemoji", "fluent_flat", "fluent_mono")
MIXES = {"by-style": 0.0, "mixed": 1.0}
# stations, and how many examples a client of an even and of an odd station keeps (None: all)
FEDERATIONS = {"full": (10, None, None), "few": (10, 6, 6), "wide": (3, None, None), "uneven": (10, 6, None)}
# (federation, where stations start), what matters most first
CASES = (
    *(("full", "warm"), ("few", "warm"), ("full", "independent"), ("uneven", "warm"), ("full", "shared")),
    *(("wide", "warm"), ("few", "shared"), ("wide", "shared"), ("few", "independent")),
)
ALPHAS = (0.0, 0.25, 0.5, 0.75, 1.0)
RIDGES = (1e-6, 1e-2, 1e-1, 1.0, 10.0)
STATION_ROUNDS = (1, 5, 20)
# A "warm" start: some 500 local steps of averaging, every station one client with all that its clients hold; at a smaller
# step size, as passes this long kill ReLUs at the demo's.
WARM_ROUNDS = {"full": 15, "few": 30, "wide": 15, "uneven": 20}
WARM_LR = 0.01
DONE = 1000  # round number after any start, for what is drawn
RUN_ROUNDS = {1: 20, 5: 20, 20: 40}  # station rounds of a complete run, by station rounds in a server round
STEPS = (1.5, 2.0, 3.0)  # of the server, as a control
#: Server rules of the complete runs: alpha and ridge, or averaging with a server's step.
RULES = {"mean": 1.0, "paper": (0.75, 1e-6), "ridge": (1.0, 0.1), "strong ridge": (1.0, 10.0), "step 2": 2.0}
LARGEST = {10: 28, 3: 82}  # examples of the largest client, by stations: all cells share their programs
BATCH = {10: 7, 3: 21}  # by stations: four local steps a station round with all examples


class Cell(NamedTuple):
    """What one line of ``cells.jsonl`` is about."""

    part: str  # "merge": station models merged by every rule; "run": a complete run with one rule
    federation: str
    mix: str
    held_out: str
    seed: int
    start: str  # "shared": a random init; "warm": a trained model; "independent": a random init for each station
    rule: str = ""  # of a run
    station_rounds: int = 0  # of a run


SMOKE = [
    Cell("merge", "few", "by-style", "noto", 0, "warm"),
    *(Cell("run", "full", "by-style", "noto", 0, "shared", rule, 5) for rule in ("mean", "paper")),
]


class Programs(NamedTuple):
    """Jitted functions for federations of one number of stations."""

    init: Callable  # keys -> models
    warm: Callable  # (model, data, key, rounds) -> model
    drift: dict[int, Callable]  # station rounds -> (models, data, key, done) -> (models, grams)
    merge: dict[bool, Callable]  # fot -> see merge_all
    spread: Callable
    judge: Callable
    run: dict[tuple[bool, int], Callable]  # (averaging, station rounds) -> half a run


def recorder() -> Aggregator:
    """A rule for one station: keeps its model, and hands out its Grams of either kind."""

    def merge(backbone, state, start, models, weights, messages):
        return jax.tree.map(lambda x: x[0], models), state, messages

    def measure(backbone, start, variables, examples, key, seen):
        grams = measure_grams(backbone, variables, examples)
        return {"sum": grams, "mean": per_row(grams)}

    return fdg.aggregators.mean("clients")._replace(
        merge=merge,
        measure=measure,
        combine=lambda messages, weights: {gram: add_grams(messages[gram], weights) for gram in GRAMS},
    )


def drift(backbone, algorithm, sizes: Topology, length: int, models, data, key, done):
    """``length`` station rounds of every station on its own, from its own model: models [S], Grams [S] by kind."""
    alone = fdg.make_round(backbone, algorithm, sizes._replace(stations=1, station_rounds=length), recorder())

    def station(inputs):
        model, here = inputs
        state = alone.init(key)._replace(variables=model, round=done)
        state, info = alone.step(state, jax.tree.map(lambda x: x[None], here), key)
        return state.variables, jax.tree.map(lambda x: x[0], info.server_merge)

    return jax.lax.map(station, (models, data))


def judge(backbone, variables, evaluation, out):
    """Accuracy on the held-out style, on the source styles' validation (mean), on clients' examples; the losses: [6]."""
    predict = lambda variables, inputs, key: backbone.apply(variables, inputs)
    kinds = len(STYLES) + 1
    seen = evaluate(predict, kinds, backbone.num_classes, variables, evaluation, jax.random.key(0))
    counts = seen.confusion.sum((1, 2))
    accuracy, loss = jnp.trace(seen.confusion, axis1=1, axis2=2) / counts, seen.loss / counts
    styles = jnp.arange(kinds)
    source = ((styles != out) & (styles < len(STYLES))) / (len(STYLES) - 1)
    return jnp.stack([accuracy[out], accuracy @ source, accuracy[-1], loss[out], loss @ source, loss[-1]])


def merge_all(backbone, fot: bool, reference, models, grams, evaluation, out) -> dict[str, Any]:
    """One set of station models merged by every rule: scores [6] of averaging, [A, R, 6] of RegMean; what was done.

    ``larger``: averaging with server steps of ``STEPS``, [.., 6]. With D the change of the first dense kernel from the
    reference by RegMean and M that by averaging: ``moved`` = ||D - M|| / ||averaged kernel||, ``step`` = <D, M> / <M, M>.

    Solves run one after another (batched Cholesky can hang on CPU); only dense layers differ between settings, so under
    vmap the evaluation computes the convolutions once.
    """
    identity = {}
    if fot:
        models, grams, _, info = align_all(models, reference, backbone.groups, grams)
        identity = {name: group["identity_fraction"].mean() for name, group in info.items()}
    weights = jnp.ones(len(jax.tree.leaves(models)[0]))

    def merge(rule):
        return rule(fot=False).merge(backbone, (), reference, models, weights, grams)

    plain, _, _ = merge(functools.partial(fdg.aggregators.hfedatm, regmean=False))
    first = lambda params: params["dense1"]["kernel"]
    change = first(plain.params) - first(reference.params)

    def solve(setting):
        variables, _, info = merge(functools.partial(fdg.aggregators.hfedatm, *setting))
        raised = jnp.stack([info["regmean"][layer]["raised"] for layer in grams]).sum()
        return {layer: variables.params[layer] for layer in grams}, raised

    def score(dense):
        moved = jnp.linalg.norm(first(dense) - first(plain.params)) / jnp.linalg.norm(first(plain.params))
        step = jnp.vdot(first(dense) - first(reference.params), change) / jnp.vdot(change, change)
        return judge(backbone, plain._replace(params=plain.params | dense), evaluation, out), moved, step

    def extrapolate(step):
        further = jax.tree.map(lambda a, b: a + step * (b - a), reference, plain)
        return judge(backbone, further, evaluation, out)

    alphas, ridges = jnp.meshgrid(jnp.array(ALPHAS), jnp.array(RIDGES), indexing="ij")
    dense, raised = jax.lax.map(solve, (alphas.ravel(), ridges.ravel()))
    scores, moved, step = jax.vmap(score)(dense)
    return {
        "mean": judge(backbone, plain, evaluation, out),
        "larger": jax.lax.map(extrapolate, jnp.array(STEPS)),
        "regmean": scores.reshape(*alphas.shape, -1),
        "moved": moved.reshape(alphas.shape),
        "step": step.reshape(alphas.shape),
        "raised": raised.sum(),
        "identity": identity,
    }


def spread(models, grams) -> dict[str, Any]:
    """Why: how far station models lie from their mean, kernel by kernel, and how full and how alike their Grams are.

    ``rank``: eigenvalues above d eps times the largest, of the summed Gram and of the first station's; ``effective``:
    trace(G)^2 / ||G||^2; ``unlike``: mean over stations of || G_e / tr G_e - mean || / || mean ||.
    """

    def distance(x):
        mean = x.mean(0)
        return (jnp.linalg.norm((x - mean).reshape(len(x), -1), axis=1) / jnp.linalg.norm(mean)).mean()

    def numbers(gram):
        values = jnp.stack([jnp.linalg.eigvalsh(gram.sum(0)), jnp.linalg.eigvalsh(gram[0])])
        scaled = gram / jnp.trace(gram, axis1=1, axis2=2)[:, None, None]
        return {
            "rank": (values > values[:, -1:] * gram.shape[-1] * jnp.finfo(gram.dtype).eps).sum(1),
            "effective": values.sum(1) ** 2 / (values**2).sum(1),
            "unlike": distance(scaled),
        }

    kernels = {name: distance(x) for name, x in leaves_of(models).items() if name.endswith("kernel")}
    return {"spread": kernels, "gram": {name: numbers(g.gram) for name, g in grams.items()}}


def half_run(backbone, algorithm, sizes: Topology, averaging: bool, setting, variables, data, key, done):
    """Half the rounds of a complete run: the model, and the least share of filters that FOT left in place."""
    if averaging:
        to_server = fdg.aggregators.server_optimizer(fdg.aggregators.mean("clients"), optax.sgd(setting))
    else:
        to_server = fdg.aggregators.hfedatm(*setting, gram_at="client")
    together = fdg.make_round(backbone, algorithm, sizes, to_server)
    state = together.init(key)._replace(variables=variables, round=done)
    length = RUN_ROUNDS[sizes.station_rounds] // sizes.station_rounds // 2
    state, info = jax.lax.scan(lambda state, _: together.step(state, data, key), state, length=length)
    groups: Any = info.server_merge.get("fot", {})
    return state.variables, [group["identity_fraction"].min() for group in groups.values()]


def programs_for(stations: int) -> Programs:
    """All that is compiled for ``stations`` stations (and once more for another number of examples a client)."""
    backbone, algorithm = fdg.backbones.lenet5(num_classes=6), build_algorithm(DEMO)
    sizes = topology(dataclasses.replace(DEMO, stations=stations, station_rounds=1, batch_size=BATCH[stations]))
    gentle = build_algorithm(dataclasses.replace(DEMO, client_lr=WARM_LR))
    pooled = fdg.make_round(backbone, gentle, sizes._replace(clients_per_station=1))

    def warm(model, data, key, rounds):
        examples, ids = data
        examples = jax.tree.map(lambda x: x.reshape(len(x), 1, -1, *x.shape[3:]), examples)
        state = pooled.init(key)._replace(variables=model)
        step = lambda state, _: (pooled.step(state, (examples, ids[:, :1]), key)[0], None)
        return jax.lax.scan(step, state, length=rounds)[0].variables

    lengths = np.diff((0, *STATION_ROUNDS)).tolist()
    part = functools.partial
    return Programs(
        init=jax.jit(jax.vmap(backbone.init)),
        warm=jax.jit(warm, static_argnums=3),
        drift={n: jax.jit(part(drift, backbone, algorithm, sizes, n)) for n in lengths},
        merge={fot: jax.jit(part(merge_all, backbone, fot)) for fot in (False, True)},
        spread=jax.jit(spread),
        judge=jax.jit(part(judge, backbone)),
        run={
            (averaging, n): jax.jit(part(half_run, backbone, algorithm, sizes._replace(station_rounds=n), averaging))
            for averaging in (False, True)
            for n in STATION_ROUNDS
        },
    )


def federation_of(cell: Cell, domains) -> fdg.Federation:
    """The cell's federation, its clients cut to what they keep and padded to what all cells share."""
    stations, *keeps = FEDERATIONS[cell.federation]
    whole = fdg.federate(domains, cell.held_out, stations, domain_mix=MIXES[cell.mix], seed=cell.seed)
    places = LARGEST[stations] if None in keeps else max(keeps)
    rng = np.random.default_rng(cell.seed)
    mask = np.asarray(whole.mask)
    index = np.zeros((*mask.shape[:2], places), np.int32)
    real = np.zeros(index.shape, bool)
    for s, c in np.ndindex(*mask.shape[:2]):
        mine = rng.permutation(mask[s, c].sum())[: keeps[s % 2]]
        index[s, c, : len(mine)], real[s, c, : len(mine)] = mine, True

    def pick(x):
        x = np.asarray(x)
        return jnp.asarray(np.take_along_axis(x, index.reshape(*index.shape, *[1] * (x.ndim - 3)), axis=2))

    clients = Examples(*(pick(x) for x in whole.clients))._replace(mask=jnp.asarray(real))
    # some of the clients' own examples are judged too, as one more "style"
    seen = rng.choice(np.flatnonzero(real), 500, replace=False)
    seen = jax.tree.map(lambda x: x.reshape(-1, *x.shape[3:])[seen], clients)
    seen = seen._replace(domain=jnp.full_like(seen.domain, len(STYLES)))
    judged = jax.tree.map(lambda *x: jnp.concatenate(x), whole.evaluation, EvaluationSet(seen, jnp.zeros(500, bool)))
    return dataclasses.replace(whole, clients=clients, evaluation=judged)


def starts_of(cell: Cell, federation: fdg.Federation, programs: Programs, folder: Path):
    """Where the server and each station start, and the key of what follows. Warm starts are kept in ``folder``."""
    stations = len(federation.ids)
    init_key, key = jax.random.split(jax.random.key(cell.seed))
    models = programs.init(jax.random.split(init_key, stations))
    start = jax.tree.map(lambda x: x[0], models)
    if cell.start == "independent":
        return start, models, key
    if cell.start == "warm":
        path = folder / f"{cell.federation}-{cell.mix}-{cell.held_out}-{cell.seed}.npy"
        flat, unravel = jax.flatten_util.ravel_pytree(start)
        if not path.exists():
            flat = jax.flatten_util.ravel_pytree(
                programs.warm(start, federation.data, key, WARM_ROUNDS[cell.federation])
            )[0]
            np.save(part := path.with_suffix(f".{threading.get_ident()}.npy"), flat)
            part.rename(path)
        start = unravel(jnp.asarray(np.load(path)))
    return start, jax.tree.map(lambda x: jnp.broadcast_to(x, (stations, *x.shape)), start), key


def merge_cell(cell: Cell, federation: fdg.Federation, programs: Programs, folder: Path) -> dict[str, Any]:
    """Let the stations go their own way, and merge them after 1, 5 and 20 station rounds by every rule."""
    out = federation.domain_names.index(cell.held_out)
    start, models, key = starts_of(cell, federation, programs, folder)
    # stations with inits of their own share no basis with the server's model, but may with the first station
    reference = jax.tree.map(lambda x: x[0], models) if cell.start == "independent" else start
    done, rows = DONE, {"start": numbers(programs.judge(start, federation.evaluation, out))}
    for rounds, length in zip(STATION_ROUNDS, np.diff((0, *STATION_ROUNDS)).tolist()):
        models, grams = programs.drift[length](models, federation.data, key, jnp.int32(done))
        done += length
        row = numbers(programs.spread(models, grams["sum"])) | {"rule": {}}
        # clients of equal size: mean-Grams are the sum-Grams times a constant, which changes nothing
        for gram in GRAMS if cell.federation == "uneven" else ("sum",):
            args = (reference, models, grams[gram], federation.evaluation, out)
            row["rule"][f"fot-{gram}"] = both = numbers(programs.merge[True](*args))
            if any(share < 1.0 for share in both["identity"].values()):  # else it changed nothing
                row["rule"][f"plain-{gram}"] = numbers(programs.merge[False](*args))
        rows[str(rounds)] = row
    return rows


def run_cell(cell: Cell, federation: fdg.Federation, programs: Programs, folder: Path) -> dict[str, Any]:
    """A complete run with one server rule, judged halfway and at the end."""
    out = federation.domain_names.index(cell.held_out)
    setting = RULES[cell.rule]
    half = programs.run[isinstance(setting, float), cell.station_rounds]
    variables, _, key = starts_of(cell, federation, programs, folder)
    halfway = RUN_ROUNDS[cell.station_rounds] // cell.station_rounds // 2
    halves = []
    for done in (DONE, DONE + halfway):
        variables, identity = half(setting, variables, federation.data, key, jnp.int32(done))
        scores = programs.judge(variables, federation.evaluation, out)
        size = jnp.linalg.norm(variables.params["dense1"]["kernel"])
        halves.append(numbers({"scores": scores, "identity": identity, "size": size}))
    return {"halves": halves}


def numbers(tree: Any) -> Any:
    """Arrays as short plain numbers."""
    return jax.tree.map(lambda x: np.round(np.asarray(x, np.float64), 5).tolist(), tree)


def cells_of(seeds: int) -> list[Cell]:
    """Everything there is to do: what matters most first, and seed by seed, so that an interruption leaves balance."""
    every = list(itertools.product(MIXES, STYLES))

    def merges(seed, cases):
        return [Cell("merge", f, mix, style, seed, start) for f, start in cases for mix, style in every]

    def runs(seed, federation, start, lengths, rules):
        return [
            Cell("run", federation, mix, style, seed, start, rule, n)
            for n in lengths
            for mix, style in every
            for rule in rules
        ]

    main, others = ("mean", "paper", "strong ridge"), ("ridge", "step 2")
    first = lambda seed: merges(seed, CASES[:2]) + runs(seed, "full", "warm", (1, 5), main)
    second = lambda seed: runs(seed, "few", "warm", (5, 20), main)
    third = lambda seed: merges(seed, CASES[2:6]) + runs(seed, "full", "warm", (1,), others)
    fourth = lambda seed: runs(seed, "wide", "warm", (5,), main)
    fifth = lambda seed: runs(seed, "full", "warm", (20,), main) + runs(seed, "full", "shared", (20,), main)
    stages = (first, second, third, fourth, fifth, lambda seed: merges(seed, CASES[6:]))
    return [cell for stage in stages for seed in range(seeds) for cell in stage(seed)]


def read_cells(path: Path) -> dict[Cell, dict[str, Any]]:
    """The finished cells; a line that was cut off when a run was killed does not count."""
    found = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            entry = json.loads(line)
        except json.JSONDecodeError:
            continue
        found[Cell(*entry.pop("cell"))] = entry
    return found


def compute(path: Path, cells: list[Cell], jobs: int) -> None:
    """Compute the cells that ``path`` lacks, ``jobs`` at a time, a line each."""
    (folder := path.parent / "warm").mkdir(parents=True, exist_ok=True)
    finished, lock = read_cells(path), threading.Lock()
    waiting = [cell for cell in cells if cell not in finished]
    domains = fdg.datasets.load("emoji_styles")
    programs = {stations: programs_for(stations) for stations in LARGEST}

    def work(cell):
        start = time.perf_counter()
        federation = federation_of(cell, domains)
        one = merge_cell if cell.part == "merge" else run_cell
        result = one(cell, federation, programs[len(federation.ids)], folder)
        seconds = round(time.perf_counter() - start, 1)
        with lock, path.open("a") as file:
            file.write(json.dumps({"cell": cell, "seconds": seconds, **result}) + "\n")
            print(f"{seconds:6.1f} s", *cell, flush=True)

    if path.exists() and not path.read_text().endswith("\n"):
        path.open("a").write("\n")
    with ThreadPoolExecutor(jobs) as pool:
        for future in [pool.submit(work, cell) for cell in waiting]:
            future.result()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("regimes"))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--smoke", action="store_true", help="a few small cells only")
    options = parser.parse_args()
    compute(options.out / "cells.jsonl", SMOKE if options.smoke else cells_of(options.seeds), options.jobs)


if __name__ == "__main__":
    main()
