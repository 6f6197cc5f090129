"""The command line, ``fedjax-dg run | sweep | table | plot | report | export | data | traffic``.

A thin layer over functions that Python has too.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import jax
import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

from fedjax_dg import estimate, loggers, sharding, stream, tables
from fedjax_dg.cells import check_grids, compile_block, default_jobs, run_grid
from fedjax_dg.commands.data import data_command
from fedjax_dg.commands.export import export_command
from fedjax_dg.commands.plot import plot_command
from fedjax_dg.commands.report import report_command
from fedjax_dg.commands.table import table_command
from fedjax_dg.commands.traffic import traffic_command
from fedjax_dg.config import (
    RunConfig,
    check,
    names,
    numbers_of,
    parse_settings,
    read_toml,
)
from fedjax_dg.experiment import Grid, majority_share, resolve, rounds_of
from fedjax_dg.progress import CountBar, ProgressBars, shows_bars
from fedjax_dg.results import RunFolder, identity
from fedjax_dg.sweep import grids_of, is_sweep, product, read_sweep


@dataclass(frozen=True)
class RunOptions(RunConfig):
    """Train every cell of a grid, server rules x held-out domains x seeds, then print the table.

    With no options: the demo, plain averaging against HFedATM on the embedded emoji styles, line art held out.
    """

    settings: tyro.conf.Suppress[dict] = field(default_factory=dict)
    config: str | None = None
    """TOML file: a [run] table of these options in snake case and a [set] table; options given here win."""
    set: Annotated[tuple[str, ...], tyro.conf.UseAppendAction, tyro.conf.arg(metavar="KEY=VALUE")] = ()
    """A hyper-parameter of the algorithm or the aggregators, such as alpha=0.5; may be given several times."""
    out: str | None = None
    """Run folder; by default runs/DATASET-ALGORITHM-HELD_OUT."""
    resume: bool = False
    """Continue the run in the folder; finished cells are not run again."""
    overwrite: bool = False
    """Replace the run in the folder."""
    dry_run: bool = False
    """Print the resolved configuration, the federation, the devices, memory and time to expect, and stop."""
    jobs: int | None = None
    """Cells trained at the same time; by default one per core on CPU, else one."""
    workers: int = 0
    """Processes that decode images; 0 = threads of this one."""
    cpu_devices: int = 1
    """Spread every cell over this many CPU devices, instead of training several cells at a time."""
    log: str | None = None
    """Loggers beside metrics.jsonl, comma separated: tensorboard, wandb, mlflow; they write into the run folder."""
    distributed: bool = False
    """Spread every cell over the processes of a Slurm job, a TPU slice, or as JAX_COORDINATOR_ADDRESS and others say."""


@dataclass(frozen=True)
class SweepOptions(RunOptions):
    """Train every setting that a file asks for x server rules x held-out domains x seeds, then print the table."""

    at_once: int | None = None
    """Settings that one program computes side by side; by default as many as fit, on CPU one."""


def main(argv: list[str] | None = None) -> int:
    """Entry point; the exit status is 0, 1 when a cell broke down, 2 for bad input, 130 when interrupted."""
    arguments = sys.argv[1:] if argv is None else argv
    keep_programs()
    console = Console()
    if not shows_bars(console):
        console.width = 10_000  # lines in a file or a pipe are never wrapped or cut
    try:
        given = _fields(read_toml(path)) if (path := _config_path(arguments)) else {}

        def run(run: tyro.conf.OmitArgPrefixes[RunOptions] = RunOptions(**given)) -> int:
            if path is not None and is_sweep(path):
                raise ValueError(f"{path} has [sweep] tables: give it to fedjax-dg sweep.")
            return run_command(run, console)

        def sweep(sweep: tyro.conf.OmitArgPrefixes[SweepOptions] = SweepOptions(**given)) -> int:
            if path is None:
                raise ValueError("No sweep is given: name its file with --config, with tables [run] and [sweep.grid].")
            return run_command(sweep, console)

        run.__doc__, sweep.__doc__ = RunOptions.__doc__, SweepOptions.__doc__
        return tyro.extras.subcommand_cli_from_dict(
            {
                "run": run,
                "sweep": sweep,
                "table": table_command(console),
                "plot": plot_command(console),
                "data": data_command(console),
                "report": report_command(console),
                "export": export_command(console),
                "traffic": traffic_command(console),
            },
            prog="fedjax-dg",
            description="Federated domain generalization in JAX.",
            args=arguments,
            config=(tyro.conf.FlagCreatePairsOff,),
        )
    except ValueError as error:
        print(f"fedjax-dg: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("fedjax-dg: interrupted; the same command with --resume continues the run.", file=sys.stderr)
        return 130


def run_command(options: RunOptions, console: Console) -> int:
    """``fedjax-dg run`` and ``fedjax-dg sweep``."""
    at_once = options.at_once if isinstance(options, SweepOptions) else 1
    for name, value in (("jobs", options.jobs), ("at_once", at_once)):
        if value is not None and value < 1:
            raise ValueError(f"{name}={value} is not positive: give 1 or more.")
    logs = loggers.chosen(names(options.log or ""))
    devices = start_devices(options.cpu_devices, options.distributed)
    if not sharding.is_first():
        console.quiet = True
    config = check(dataclasses.replace(_config(options), settings=options.settings | parse_settings(options.set)))
    with CountBar(console, "encoding", unit="texts", quiet=not config.freeze_encoder) as report:
        if isinstance(options, SweepOptions):
            assert options.config is not None
            settings = product(config=config, **read_sweep(options.config))
            grids = grids_of(config, settings, devices, options.workers, report)
        else:
            grids = [resolve(config, devices, options.workers, report)]
    check_grids(grids, at_once)
    for notice in dict.fromkeys(notice for grid in grids for notice in grid.notices):
        console.print(notice, highlight=False)
    if options.dry_run:
        console.print_json(json.dumps(dataclasses.asdict(config)))
        for grid in grids:
            rounds = {name: rounds_of(grid, name) for name in names(grid.config.aggregator)}
            describe(grid, rounds, options.jobs, console)
            grid.federations.forget()
        return 0
    kind = "sweep-" if isinstance(options, SweepOptions) else ""
    out = options.out or f"runs/{kind}{config.dataset}-{config.algorithm}-{config.held_out}"
    folder = RunFolder(Path(out), config, options.resume, options.overwrite)
    with ProgressBars(console, grids) as bars, loggers.opened(logs, folder.path, bars, console.print) as report:
        cells, failed = run_grid(grids, folder, report, options.jobs, at_once)
    if cells:
        console.print(tables.render([folder.path]), highlight=False, markup=False, end="")
    for held_out in dict.fromkeys(cell["held_out"] for cell in cells if "+" not in cell["held_out"]):
        console.print(
            f"Always answering the commonest class of {held_out}: {100 * majority_share(grids[0].domains, held_out):.1f} %"
        )
    console.print(f"Run folder: {folder.path}", soft_wrap=True)
    for failure in failed:
        print(f"fedjax-dg: {identity(failure).name}: {failure['error']}", file=sys.stderr)
    return 1 if failed else 0


def keep_programs() -> None:
    """Let JAX keep compiled programs for the next run, unless JAX_COMPILATION_CACHE_DIR or JAX_ENABLE_COMPILATION_CACHE say
    otherwise."""
    flags: Any = jax.config
    if flags.jax_compilation_cache_dir is None and flags.jax_enable_compilation_cache:
        caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        jax.config.update("jax_compilation_cache_dir", str(caches / "fedjax_dg"))


def start_devices(cpu_devices: int, distributed: bool) -> list:
    """The devices of a run: all there are, of all processes; of CPU devices of one process as many as asked for."""
    if cpu_devices < 1:
        raise ValueError(f"cpu_devices={cpu_devices} is not positive: give 1 or more.")
    if cpu_devices > 1:
        flags: Any = jax.config
        if flags.jax_num_cpu_devices < cpu_devices:
            jax.config.update("jax_num_cpu_devices", cpu_devices)
    if distributed:
        sharding.start()
    devices = jax.devices()
    return devices if distributed or devices[0].platform != "cpu" else devices[:cpu_devices]


def describe(grid: Grid, rounds: dict, jobs: int | None, console: Console) -> None:
    """Print the first federation of a grid, the devices, and what memory and time each server rule will take."""
    (held_out, seed), federation = next(iter(grid.federations.items()))
    counts = federation.counts()  # [S, C, G]
    console.print(f"Federation with {held_out} held out, seed {seed}: examples by station and domain")
    table = Table()
    for column in ("station", *federation.domain_names, "smallest client", "largest client"):
        table.add_column(column, justify="right")
    for number, station in enumerate(counts):
        sizes = station.sum(-1)
        table.add_row(*(str(x) for x in (number, *station.sum(0), sizes.min(), sizes.max())))
    table.add_row("all", *(str(x) for x in counts.sum((0, 1))), str(counts.sum(-1).min()), str(counts.sum(-1).max()))
    console.print(table)
    main_domain = np.bincount(counts.argmax(-1).ravel(), minlength=len(federation.domain_names))
    owners = ", ".join(f"{name} {n}" for name, n in zip(federation.domain_names, main_domain, strict=True) if n)
    console.print(f"Clients by their main domain: {owners}")
    padding = 1 - counts.sum() / np.prod(federation.mask.shape)
    console.print(f"Padding: {100 * padding:.0f} % of the places; {len(grid.cells)} cells to run")
    kinds = Counter(d.device_kind for d in jax.devices())
    devices = ", ".join(f"{number} {kind}" for kind, number in kinds.items())
    console.print(f"Devices: {devices}; mesh: {sharding.describe(grid.mesh)}")
    if federation.source is not None:
        drawn = stream.shapes(federation)
        images, size = drawn.examples.mask.size, estimate.num_bytes(drawn.examples)
        console.print(
            f"Streamed: a round reads at most {images:,} examples, {size / 2**20:,.0f} MiB and as much for the next one; an "
            f"evaluation reads {len(federation.evaluation.unseen):,}"
        )
    config, jobs = grid.config, jobs or default_jobs([grid])
    for name, rounds_fn in rounds.items():
        round_fn = rounds_fn.like
        numbers = numbers_of(config, name)
        program = compile_block(rounds_fn, numbers, federation, config.eval_every)
        console.print(
            f"Memory of a round with {name}: {program.memory / 2**20:.0f} MiB a device; compiled in {program.seconds:.1f} s"
        )
        if jax.process_count() == 1:
            cells = len(grid.cells) // len(rounds)
            took = estimate.duration(round_fn, federation, config.rounds, config.eval_every, cells, jobs)
            console.print(
                f"Time with {name}: about {took.round:.3g} s a round, {took.run:.3g} s for its {cells} cells, {jobs} at a "
                "time (from one client's part; without the server's)"
            )


def _config(options: RunOptions) -> RunConfig:
    return RunConfig(**{name: getattr(options, name) for name in _fields(RunConfig())})


def _fields(config: RunConfig) -> dict:
    return {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}


def _config_path(arguments: list[str]) -> str | None:
    """What ``--config`` names; needed before parsing, as the file gives the defaults."""
    for number, argument in enumerate(arguments):
        if argument == "--config" and number + 1 < len(arguments):
            return arguments[number + 1]
        if argument.startswith("--config="):
            return argument.split("=", 1)[1]
    return None


if __name__ == "__main__":
    sys.exit(main())
