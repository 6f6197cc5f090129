"""Cells of grids, trained side by side on one machine, resumable: what ``fedjax-dg run`` and ``sweep`` do."""

from __future__ import annotations

import dataclasses
import functools
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from threadpoolctl import threadpool_limits

from fedjax_dg import stream
from fedjax_dg.config import (
    build_algorithm,
    names,
    numbers_of,
    settled,
    topology,
)
from fedjax_dg.estimate import cells_at_once
from fedjax_dg.evaluate import is_better
from fedjax_dg.experiment import Grid, describe_model, rounds_of, sizes_of
from fedjax_dg.federation import Federation
from fedjax_dg.results import Cell, Checkpoints, Progress, RunFolder, identity
from fedjax_dg.run import (
    Block,
    NotFinite,
    Round,
    Rounds,
    furnish,
    run_blocks,
    run_together,
)
from fedjax_dg.tables import SCORES, write_results
from fedjax_dg.types import Key, PyTree, ServerState, Variables


class Program(NamedTuple):
    """A compiled block of rounds, shared by every cell of its shapes whatever its hyper-parameters are."""

    rounds: Rounds
    at_once: int  # cells that it computes side by side
    seconds: float  # to trace and compile
    memory: int  # bytes on a device: arguments, results and temporaries


def compile_block(rounds: Rounds, numbers: PyTree, federation: Federation, length: int, at_once: int = 1) -> Program:
    """Compile a block of ``length`` rounds for a federation's shapes; running it can then never compile again.

    ``numbers``: any that it will be run with. ``at_once``: how many of them together, if ``rounds`` are for that.
    """
    start = time.perf_counter()
    key, round_fn = jax.random.key(0), rounds.like
    state = jax.eval_shape(round_fn.init, key)
    if at_once > 1:
        several = lambda x: jax.ShapeDtypeStruct((at_once, *x.shape), x.dtype)
        numbers, state = jax.tree.map(several, (jax.tree.map(jnp.asarray, numbers), state))
    if federation.source is not None:  # a round at a time, each with its own data
        data, length = (stream.shapes(federation, round_fn.mesh), federation.ids), 1
    elif round_fn.algorithm.furnish is not None:
        data = jax.eval_shape(functools.partial(furnish, round_fn), federation.data, key)
    else:
        data = federation.data
    compiled = rounds.block.lower(numbers, state, data, key, length=length).compile()
    seconds = time.perf_counter() - start
    memory = compiled.memory_analysis()
    total = memory.argument_size_in_bytes + memory.temp_size_in_bytes
    total += memory.output_size_in_bytes - memory.alias_size_in_bytes
    rounds = dataclasses.replace(rounds, block=lambda *args, length: compiled(*args))
    return Program(rounds, at_once, seconds, total)


def shapes_of(federation: Federation) -> tuple:
    """What a program is compiled for."""
    return tuple((x.shape, x.dtype) for x in jax.tree.leaves((federation.clients, federation.ids)))


def arrays_of(state: ServerState, best: Variables, key: Key) -> dict[str, Any]:
    """What a checkpoint holds beside plain numbers."""
    return {"state": state, "best": best, "key": np.asarray(jax.random.key_data(key))}


def template(round_fn: Round) -> dict[str, Any]:
    """Shapes of what a checkpoint holds."""

    key = jax.random.key(0)
    state = jax.eval_shape(round_fn.init, key)
    return arrays_of(state, state.variables, key)


@dataclasses.dataclass
class CellRun:
    """A cell under way: its best model so far, its checkpoints."""

    cell: Cell
    key: jax.Array
    checkpoints: Checkpoints
    selection: str
    best: dict[str, Any]  # its record; empty before the first block
    best_variables: Any
    seconds: float  # spent in earlier sessions and this one, without compiling
    record: dict[str, Any]  # of the last block; empty before the first
    broken: bool = False

    def keep(self, block: Block) -> None:
        """Remember the best model and write a checkpoint."""
        self.record = block.record
        if is_better(self.selection, block.record, self.best):
            # the next block consumes the state, so the best model needs buffers of its own
            self.best, self.best_variables = block.record, jax.tree.map(np.array, block.state.variables)
        notes = {"round": block.record["round"], "best": self.best, "record": block.record, "seconds": self.seconds}
        self.checkpoints.save(Progress(arrays_of(block.state, self.best_variables, self.key), notes))


@dataclasses.dataclass
class Batch:
    """Cells under way side by side in one program; mostly one."""

    runs: list[CellRun]
    blocks: Iterator[list[Block | NotFinite]]

    def advance(self) -> list[Block | NotFinite] | None:
        """The next block of each, None at the end. Runs in a worker thread: XLA lets go of Python while it computes."""
        start = time.perf_counter()
        blocks = next(self.blocks, None)
        for cell_run in self.runs:
            cell_run.seconds += (time.perf_counter() - start) / len(self.runs)
        return blocks


def open_batch(cells: Sequence[Cell], grid: Grid, program: Program, folder: RunFolder, report: Callable) -> Batch:
    """Cells of one rule, held-out domain and seed that are ready to run, from the same round on."""
    config, federation = grid.config, grid.federations[cells[0].held_out, cells[0].seed]
    numbers = [numbers_of(settled(config, cell.setting), cell.aggregator) for cell in cells]
    opened = [open_cell(cell, grid, program.rounds.at(n), folder) for cell, n in zip(cells, numbers)]
    runs, states = [cell_run for cell_run, _ in opened], [state for _, state in opened]
    stages = [functools.partial(run_stage_in, folder, cell, report) for cell in cells]
    if program.at_once == 1:
        last = config.rounds, runs[0].key, config.eval_every, stages[0], grid.workers
        blocks = run_blocks(program.rounds.at(numbers[0]), states[0], federation, *last)
        return Batch(runs, one_by_one(blocks))
    last = config.rounds, runs[0].key, config.eval_every, stages, program.at_once
    return Batch(runs, run_together(program.rounds, numbers, states, federation, *last))


def one_by_one(blocks: Iterator[Block]) -> Iterator[list[Block | NotFinite]]:
    """The blocks of a single cell, as a batch has them."""
    try:
        for block in blocks:
            yield [block]
    except NotFinite as error:
        yield [error]


def open_cell(cell: Cell, grid: Grid, round_fn: Round, folder: RunFolder) -> tuple[CellRun, ServerState]:
    """A cell and where it stands, by its newest checkpoint if it has one."""
    init_key, key = jax.random.split(jax.random.key(cell.seed))
    state = round_fn.init(init_key, grid.pretrained)
    checkpoints = folder.checkpoints(cell)
    variables, notes = state.variables, {"best": {}, "record": {}, "seconds": 0.0}
    if checkpoints.latest() is not None:
        arrays, notes = checkpoints.restore(arrays_of(state, variables, key))
        state, variables, key = arrays["state"], arrays["best"], jax.random.wrap_key_data(arrays["key"])
    best, selection = jax.tree.map(np.array, variables), grid.config.selection
    cell_run = CellRun(cell, key, checkpoints, selection, notes["best"], best, notes["seconds"], notes["record"])
    return cell_run, state


def run_stage_in(
    folder: RunFolder,
    cell: Cell,
    report: Callable,
    name: str,
    state: PyTree,
    advance: Callable,
    blocks: int,
    tell: Callable[[PyTree], dict[str, Any]] | None = None,
) -> PyTree:
    """``run.run_stage`` whose state and numbers go into the run folder after every block; goes on from the newest."""
    checkpoints = folder.checkpoints(cell, stage=name)
    done = checkpoints.latest() or 0
    if done:
        state = checkpoints.restore(state).arrays
    report("stage", cell, (name, done, blocks, {}))
    for block in range(done, blocks):
        state = advance(state, jnp.int32(block))
        numbers = {k: float(v) for k, v in (tell(state) if tell else {}).items()}
        checkpoints.save(Progress(state, {"round": block + 1}))
        folder.add_metrics(cell, {"round": 0, "stage": name, "block": block + 1, **numbers})
        report("stage", cell, (name, block + 1, blocks, numbers))
    checkpoints.close()
    return state


def result_of(cell_run: CellRun, program: Program) -> dict[str, Any]:
    """A finished cell's line of ``result.json``: the scores of the selected round."""
    best = cell_run.best
    scores = {k: best[k] for k in SCORES}
    return (
        cell_run.cell.as_record()
        | scores
        | {
            "selection": cell_run.selection,
            "selected_round": best["round"],
            "rounds": cell_run.record["round"],
            "seconds": round(cell_run.seconds, 3),
            "compile_seconds": round(program.seconds, 3),
            "compilations": 1,  # compiled ahead of time: other shapes would be an error, not another program
        }
    )


def run_grid(
    grid: Grid | Sequence[Grid],
    folder: RunFolder,
    report: Callable[[str, Cell, Any], None] = lambda event, cell, value: None,
    jobs: int | None = None,
    at_once: int | None = None,
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Run every cell that is not finished; results of all finished cells, and those that failed.

    ``jobs`` programs at a time (``default_jobs``), each with at most ``at_once`` cells that differ in hyper-parameters alone
    (``default_at_once``); the numbers do not depend on the former, and on the latter by rounding. Several grids, of a sweep
    over more than that, one after another. ``report(event, cell, value)`` is told ``compiled`` (seconds), ``start`` (rounds
    done), ``stage`` (name, blocks done, blocks, numbers), ``record``, ``done`` and ``failed``. A cell whose training breaks
    down is left at its last good checkpoint; the others go on.
    """
    grids = [grid] if isinstance(grid, Grid) else list(grid)
    for one in grids:
        folder.keep_splits(one.splits)
        folder.keep_model(one.cells, describe_model(one))
    cells, failed = folder.finished(), []
    latest = {identity(result): result["rounds"] for result in cells}
    everything = [cell for one in grids for cell in one.cells]
    folder.keep_cells(everything)
    rules = [rule for one in grids for rule in names(one.config.aggregator)]
    order = {cell: (rules.index(cell.aggregator), number) for number, cell in enumerate(everything)}
    queues = []
    for one in grids:
        rounds = {rule: rounds_of(one, rule, size_of(one, rule, at_once) > 1) for rule in names(one.config.aggregator)}
        for cell in (waiting := [cell for cell in one.cells if cell not in latest]):
            checkpoints = folder.checkpoints(cell)
            checkpoints.check(template(rounds[cell.aggregator].like))
            latest[cell] = checkpoints.latest() or 0
            checkpoints.close()
        if len(grids) > 1:  # else each would keep one on the devices from here on
            one.federations.forget()
        queues.append((one, rounds, batches_of(waiting, latest, lambda rule, one=one: size_of(one, rule, at_once))))
    folder.keep_metrics({cell.name: done for cell, done in latest.items()})

    def finish(cell_run: CellRun, program: Program) -> None:
        result = result_of(cell_run, program)
        # the first server rule first, as it is the baseline; then as the grid has them
        cells.append(result)
        cells.sort(key=lambda result: order.get(identity(result), (len(rules), 0)))
        write_results(folder, cells, failed)
        report("done", cell_run.cell, result)
        cell_run.checkpoints.close()

    def take(batch: Batch, program: Program, blocks: list[Block | NotFinite] | None) -> bool:
        """What a batch has reached; whether it goes on."""
        for number, cell_run in enumerate(batch.runs):
            if blocks is None and not cell_run.broken:
                finish(cell_run, program)
            elif blocks is not None and isinstance(reached := blocks[number], Block):
                folder.add_metrics(cell_run.cell, reached.record)
                cell_run.keep(reached)
                report("record", cell_run.cell, reached.record)
            elif blocks is not None and not cell_run.broken:
                cell_run.broken = True
                failed.append(cell_run.cell.as_record() | {"error": str(blocks[number])})
                report("failed", cell_run.cell, str(blocks[number]))
                cell_run.checkpoints.close()
        return blocks is not None and not all(cell_run.broken for cell_run in batch.runs)

    jobs = jobs or default_jobs(grids)
    # the solves of a cell would otherwise start BLAS threads that fight the other cells for the cores
    with threadpool_limits(1, user_api="blas"), ThreadPoolExecutor(jobs) as pool:
        try:
            for one, rounds, queue in queues:
                running: dict[Any, tuple[Batch, Program]] = {}
                programs: dict[tuple, Program] = {}
                while queue or running:
                    while queue and len(running) < jobs:
                        batch = queue.pop(0)
                        program = program_of(one, rounds, batch[0], programs, at_once, report)
                        opened = open_batch(batch, one, program, folder, report)
                        for cell_run in opened.runs:
                            report("start", cell_run.cell, cell_run.record.get("round", 0))
                        running[pool.submit(opened.advance)] = (opened, program)
                    done, _ = wait(running, return_when=FIRST_COMPLETED)
                    for future in done:
                        opened, program = running.pop(future)
                        if take(opened, program, future.result()):
                            running[pool.submit(opened.advance)] = (opened, program)
                one.federations.forget()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
    write_results(folder, cells, failed, complete=True)
    return cells, failed


def program_of(
    grid: Grid, rounds: dict[str, Rounds], cell: Cell, programs: dict, at_once: int | None, report: Callable
) -> Program:
    """The program that runs a cell; compiled when its shapes have not been met."""
    federation, rule = grid.federations[cell.held_out, cell.seed], cell.aggregator
    key = (rule, shapes_of(federation))
    if key not in programs:
        numbers, size = numbers_of(grid.config, rule), size_of(grid, rule, at_once)
        programs[key] = compile_block(rounds[rule], numbers, federation, grid.config.eval_every, size)
        report("compiled", cell, programs[key].seconds)
    return programs[key]


def batches_of(cells: Sequence[Cell], latest: Mapping[Cell, int], size: Callable[[str], int]) -> list[list[Cell]]:
    """Cells that are computed side by side: of one rule, held-out domain and seed, from the same round on."""
    alike: dict[tuple, list[Cell]] = {}
    for cell in cells:
        alike.setdefault((cell.held_out, cell.seed, cell.aggregator, latest[cell]), []).append(cell)
    return [
        group[start : start + size(key[2])]
        for key, group in alike.items()
        for start in range(0, len(group), size(key[2]))
    ]


def size_of(grid: Grid, aggregator: str, at_once: int | None) -> int:
    """Cells of one rule that a program computes side by side: as even as their number allows, at most ``at_once``."""
    first = next(cell for cell in grid.cells if cell.aggregator == aggregator)
    settings = sum(cell[1:4] == first[1:4] for cell in grid.cells)
    if settings == 1:
        return 1
    most = default_at_once(grid, settings) if at_once is None else at_once
    if most > 1 and (why := one_at_a_time(grid)) is not None:
        raise ValueError(f"at_once={most} is given, but {why}: leave it out, or give 1.")
    return -(-settings // -(-settings // most))


def check_grids(grids: Sequence[Grid], at_once: int | None) -> None:
    """``ValueError`` for rounds that do not fit their data, or cannot be computed side by side; before a folder is made."""
    for grid in grids:
        for rule in names(grid.config.aggregator):
            size_of(grid, rule, at_once)
            rounds_of(grid, rule)
        if len(grids) > 1:  # else each would keep a federation on the devices from here on
            grid.federations.forget()


def one_at_a_time(grid: Grid) -> str | None:
    """Why the cells of a grid cannot be computed side by side in one program; None if they can."""
    if grid.mesh is not None:
        return "every cell is spread over several devices"
    if grid.federations.stream:
        return "the examples are streamed"
    if build_algorithm(grid.config, **sizes_of(grid)).furnish is not None:
        return f"{grid.config.algorithm} makes examples of its own for every setting"
    return None


def default_at_once(grid: Grid, settings: int) -> int:
    """Cells of a sweep that one program computes side by side: on CPU one, as ``jobs`` programs use the cores and a cell's
    working set then stays in the cache (``experiments/benchmarks/sweep.py``); elsewhere as many as a device's memory holds.
    """
    if one_at_a_time(grid) is not None:
        return 1
    algorithm = build_algorithm(grid.config, **sizes_of(grid))
    return cells_at_once(algorithm.adapt(grid.backbone), algorithm, topology(grid.config), settings)


def default_jobs(grids: Sequence[Grid]) -> int:
    """Programs at a time: one per core on CPU, one where devices share a cell.

    A round is a chain of small steps that one core can fill: on two cores, two cells at a time take 0.57 of the time of one
    after another, and one vmapped program gains nothing (``experiments/benchmarks/grid.py``).
    """
    alone = jax.default_backend() == "cpu" and grids[0].mesh is None
    return min(os.cpu_count() or 1, sum(len(grid.cells) for grid in grids)) if alone else 1
