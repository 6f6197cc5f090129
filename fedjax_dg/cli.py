"""The command line: ``fedjax-dg run | table | plot | data | traffic``. A thin layer over functions that Python has too."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
import numpy as np
import tyro
from rich.box import HEAVY_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from fedjax_dg import datasets, estimate, sharding, stream, tables
from fedjax_dg import sweep as sweeps
from fedjax_dg.aggregators import AGGREGATORS
from fedjax_dg.backbones import BACKBONES, TEXT_BACKBONES
from fedjax_dg.config import (
    RunConfig,
    build_aggregator,
    build_algorithm,
    check,
    names,
    numbers_of,
    parse_settings,
    read_toml,
    topology,
)
from fedjax_dg.datasets.checking import check as check_files
from fedjax_dg.datasets.prepare import prepare
from fedjax_dg.errors import unknown
from fedjax_dg.experiment import (
    Grid,
    compile_block,
    default_jobs,
    majority_share,
    resolve,
    rounds_of,
    run_grid,
)
from fedjax_dg.plots import aligned_in, plot_accuracy, plot_alignment
from fedjax_dg.results import Cell, RunFolder, identity
from fedjax_dg.traffic import Traffic, as_json, traffic_of

#: Problems that ``data check`` prints, and classes that its table has columns for.
MOST_PROBLEMS, MOST_CLASSES = 20, 12


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
    if not console.is_terminal:
        console.width = 10_000  # lines in a file or a pipe are never wrapped or cut
    try:
        given = _fields(read_toml(path)) if (path := _config_path(arguments)) else {}

        def run(run: tyro.conf.OmitArgPrefixes[RunOptions] = RunOptions(**given)) -> int:
            if path is not None and sweeps.is_sweep(path):
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
                "table": _table_command(console),
                "plot": _plot_command(console),
                "data": _data_command(console),
                "traffic": _traffic_command(console),
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
    devices = start_devices(options.cpu_devices, options.distributed)
    if not sharding.is_first():
        console.quiet = True
    config = check(dataclasses.replace(_config(options), settings=options.settings | parse_settings(options.set)))
    with _Counter(console, "encoding", unit="texts", quiet=not config.freeze_encoder) as report:
        if isinstance(options, SweepOptions):
            assert options.config is not None
            settings = sweeps.product(config=config, **sweeps.read_sweep(options.config))
            grids = sweeps.grids_of(config, settings, devices, options.workers, report)
        else:
            grids = [resolve(config, devices, options.workers, report)]
    for notice in dict.fromkeys(notice for grid in grids for notice in grid.notices):
        console.print(notice, highlight=False)
    rounds = [{name: rounds_of(grid, name) for name in names(grid.config.aggregator)} for grid in grids]
    if options.dry_run:
        console.print_json(json.dumps(dataclasses.asdict(config)))
        for grid, own in zip(grids, rounds):
            describe(grid, own, options.jobs, console)
        return 0
    kind = "sweep-" if isinstance(options, SweepOptions) else ""
    out = options.out or f"runs/{kind}{config.dataset}-{config.algorithm}-{config.held_out}"
    folder = RunFolder(Path(out), config, options.resume, options.overwrite)
    with ProgressBars(console, grids) as report:
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


def _table_command(console: Console):
    def table(
        runs: Annotated[tuple[str, ...], tyro.conf.Positional],
        selection: str | None = None,
        settings: Literal["best", "all"] = "best",
        format: Literal["text", "md", "latex", "csv"] = "text",
        spread: Literal["ci95", "se"] = "ci95",
        baseline: str | None = None,
    ) -> int:
        """Print the table of one or more run folders: accuracies, paired differences, and why numbers are missing.

        Args:
            runs: Run folders.
            selection: source-validation, last, oracle, leave-one-domain-out; by default what the run was made with.
            settings: Of a sweep, the setting that the selection rule prefers for each seed and domain, or every setting.
            format: As text, Markdown, LaTeX (booktabs) or CSV.
            spread: 95 % interval or standard error over seeds.
            baseline: Row that the differences are to, such as mean or "fedavg mean"; by default an algorithm's first rule.
        """
        text = tables.render(runs, selection, settings, format, spread, baseline)
        console.print(text, highlight=False, markup=False, end="", soft_wrap=True)
        return 0

    return table


def _plot_command(console: Console):
    def plot(runs: Annotated[tuple[str, ...], tyro.conf.Positional], together: str | None = None) -> int:
        """Draw each run's accuracy by round, and what alignment and RegMean did in it.

        Args:
            runs: Run folders.
            together: Draw the accuracies of all of them in one figure, in this folder.
        """
        if not runs:
            raise ValueError("No run folder is given: name one or more, such as runs/emoji_styles-fedavg-fluent_mono.")
        drawn = []
        if together is not None:
            Path(together).mkdir(parents=True, exist_ok=True)
            drawn += plot_accuracy(runs, together)
        else:
            for run in runs:
                drawn += plot_accuracy([run], run) + (plot_alignment(run) if aligned_in(run) else [])
        for path in drawn:
            console.print(f"Wrote {path}", highlight=False, soft_wrap=True)
        return 0

    return plot


@dataclass(frozen=True)
class DataList:
    """List the data sets."""


@dataclass(frozen=True)
class DataCheck:
    """Check a data set on disk: what is there, what should be, every image decoded; exit status 1 for any problem."""

    name: tyro.conf.Positional[str]
    """Data set, see `fedjax-dg data list`."""
    data_dir: str | None = None
    """The folder that holds it, up to three folders above its domains."""
    workers: int = 0
    """Processes that decode; 0 for threads."""
    json: bool = False
    """Print one JSON object."""


@dataclass(frozen=True)
class DataPrepare:
    """Decode and resize a data set of image files once; give the folder as --data-dir afterwards."""

    name: tyro.conf.Positional[str]
    """Data set, see `fedjax-dg data list`."""
    data_dir: str | None = None
    """The folder that holds it, up to three folders above its domains."""
    out: str | None = None
    """Folder to write."""
    format: Literal["uint8", "array_record"] = "uint8"
    """One array that is mapped into memory, or compressed records of tensorflow_datasets."""
    image_size: int = 224
    """Both sides of the images in pixels."""
    workers: int = 0
    """Processes that decode; 0 for threads."""
    overwrite: bool = False
    """Replace a prepared data set with other content."""


DataAction = (
    Annotated[DataList, tyro.conf.subcommand("list")]
    | Annotated[DataCheck, tyro.conf.subcommand("check")]
    | Annotated[DataPrepare, tyro.conf.subcommand("prepare")]
)


def _data_command(console: Console):
    def data(action: tyro.conf.OmitSubcommandPrefixes[tyro.conf.OmitArgPrefixes[DataAction]]) -> int:
        """List the data sets, check one on disk, or prepare it for quick reading."""
        if isinstance(action, DataCheck):
            return check_data(action, console)
        if isinstance(action, DataPrepare):
            return prepare_data(action, console)
        for name in datasets.DATASETS:
            console.print(datasets.describe(name), highlight=False)
        return 0

    return data


def check_data(options: DataCheck, console: Console) -> int:
    """``fedjax-dg data check``."""
    with _Counter(console, f"checking {options.name}", quiet=options.json) as report:
        found = check_files(options.name, options.data_dir, options.workers, report)
    if options.json:
        console.print_json(json.dumps(found._asdict() | {"ok": found.ok}))
        return 0 if found.ok else 1
    where = f"in {found.root}" if found.root is not None else "without a folder"
    words = [
        found.name,
        where,
        *([f"({found.layout})"] if found.layout else []),
        *([found.version] if found.version else []),
    ]
    console.print(" ".join(words[:3]) + "".join(f": {word}" for word in words[3:]), highlight=False, markup=False)
    if found.counts:
        console.print(_counts_table(found, console.is_terminal))
    for note in found.notes:
        console.print(f"Note: {note}", highlight=False, markup=False)
    for problem in found.problems[:MOST_PROBLEMS]:
        console.print(f"Problem: {problem}", highlight=False, markup=False)
    if len(found.problems) > MOST_PROBLEMS:
        console.print(f"and {len(found.problems) - MOST_PROBLEMS} more problems; --json gives all", highlight=False)
    console.print("ok" if found.ok else f"{len(found.problems)} problems" if len(found.problems) > 1 else "1 problem")
    return 0 if found.ok else 1


def _counts_table(found, lines: bool) -> Table:
    """Examples by domain, and by class where these are few."""
    header = "domain", *(("expected",) if found.expected else ()), found.unit
    table = Table(*header, box=HEAVY_HEAD if lines else None)
    by_class = len(found.class_names) <= MOST_CLASSES
    for name in found.class_names if by_class else (f"classes with {found.unit}",):
        table.add_column(Text(name), overflow="fold")
    for column in table.columns[1:]:
        column.justify = "right"
    for number, (name, counts) in enumerate(zip(found.domain_names, found.counts, strict=True)):
        expected = [f"{found.expected[number]:,}"] if found.expected else []
        rest = [f"{count:,}" for count in counts] if by_class else [f"{sum(count > 0 for count in counts)}"]
        table.add_row(Text(name), *expected, f"{sum(counts):,}", *rest)
    return table


def prepare_data(options: DataPrepare, console: Console) -> int:
    """``fedjax-dg data prepare``."""
    if options.out is None:
        raise ValueError("No folder to write is given: name it with --out.")
    settings = {name: getattr(options, name) for name in ("format", "image_size", "workers", "overwrite")}
    with _Counter(console, f"preparing {options.name}") as report:
        out = prepare(options.name, options.data_dir, options.out, report=report, **settings)
    console.print(f"Wrote {out}: give it as --data-dir.", highlight=False, soft_wrap=True, markup=False)
    return 0


class _Counter:
    """Context: a bar on a terminal, some lines elsewhere; gives a ``report`` of how many of how many are done."""

    def __init__(self, console: Console, what: str, quiet: bool = False, unit: str = "images"):
        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
        self.bar = Progress(*columns, console=console, disable=quiet or not console.is_terminal, transient=True)
        self.console, self.what, self.unit, self.printed = console, what, unit, 0
        self.lines = not quiet and not console.is_terminal

    def __enter__(self):
        self.bar.start()
        self.task = self.bar.add_task(self.what, total=None)
        return self.report

    def __exit__(self, *exception):
        self.bar.stop()

    def report(self, done: int, total: int) -> None:
        self.bar.update(self.task, completed=done, total=total)
        tenth = 10 * done // max(total, 1)
        if self.lines and tenth > self.printed:
            self.printed = tenth
            self.console.print(f"{self.what}: {done:,} of {total:,} {self.unit}", highlight=False)


@dataclass(frozen=True)
class TrafficOptions:
    """What travels between a client and its server, read off shapes; nothing is trained."""

    algorithm: str = "fedavg"
    aggregator: str = "mean"
    """The server rule."""
    station_aggregator: str = "mean"
    """The stations' rule."""
    backbone: str = "lenet5"
    num_classes: int = 7
    num_domains: int = 3
    """Source domains."""
    image_size: int | None = None
    """One side of the images; by default the backbone's own."""
    regmean_scope: str | None = None
    """Dense layers that HFedATM merges by RegMean: head, all_dense, none; by default head for texts, else all_dense."""
    stations: int = 1
    clients_per_station: int = 3
    station_rounds: int = 1
    rounds: int = 20
    set: Annotated[tuple[str, ...], tyro.conf.UseAppendAction, tyro.conf.arg(metavar="KEY=VALUE")] = ()
    """An option of the algorithm or the aggregator; may be given several times."""
    json: bool = False
    """Print one JSON object."""


def _traffic_command(console: Console):
    def traffic(options: tyro.conf.OmitArgPrefixes[TrafficOptions] = TrafficOptions()) -> int:
        found = traffic_of_options(options)
        if options.json:
            console.print_json(json.dumps(as_json(found)))
        else:
            show_traffic(console, found)
        return 0

    traffic.__doc__ = TrafficOptions.__doc__
    return traffic


def traffic_of_options(options: TrafficOptions) -> Traffic:
    """``traffic.traffic_of`` for names. Raises ``ValueError`` for what does not fit."""
    shared = ("algorithm", "aggregator", "backbone", "stations", "clients_per_station", "station_rounds", "rounds")
    shared += ("regmean_scope",)
    texts = options.backbone in TEXT_BACKBONES
    dataset = next(iter(datasets.texts.LOADERS)) if texts else RunConfig.dataset
    given = {name: getattr(options, name) for name in shared}
    config = check(RunConfig(dataset=dataset, **given, settings=parse_settings(options.set), eval_every=1))
    if len(names(config.aggregator)) > 1:
        raise ValueError(f"aggregator={config.aggregator!r} names several server rules: give one.")
    if options.station_aggregator not in AGGREGATORS:
        raise unknown("aggregator", options.station_aggregator, AGGREGATORS)
    for name in ("num_classes", "num_domains"):
        if getattr(options, name) < 1:
            raise ValueError(f"{name}={getattr(options, name)} is not positive: give 1 or more.")
    if texts and options.image_size is not None:
        raise ValueError(f"image_size={options.image_size} is given, but {options.backbone} takes texts: leave it out.")
    size = {} if options.image_size is None else {"image_size": options.image_size}
    factory: Any = (TEXT_BACKBONES if texts else BACKBONES)[config.backbone]
    backbone = factory(options.num_classes, **size)
    sizes = {"num_domains": options.num_domains, "num_sources": options.num_domains}
    return traffic_of(
        backbone,
        build_algorithm(config, **sizes),
        topology(config),
        options.rounds,
        build_aggregator(config, config.aggregator),
        AGGREGATORS[options.station_aggregator](),
    )


def show_traffic(console: Console, found: Traffic) -> None:
    """Print what travels, how much of it there is, and what it tells."""
    parts = Table("part", "floats", "bytes", "where", "kept until", title="Sizes")
    for name, part in found.parts.items():
        parts.add_row(name, f"{part.size.floats:,}", f"{part.size.bytes:,}", part.place, part.until)
    ways = Table("one client", "floats up", "floats down", "MB up", "MB down", title="Traffic")
    for name, both in (
        ("before round 1", found.before),
        ("a round", found.per_round),
        (f"{found.rounds} rounds", found.per_run),
    ):
        floats = (f"{way.floats:,}" for way in both)
        ways.add_row(name, *floats, *(f"{way.bytes / 1e6:,.2f}" for way in both))
    told = Table("beside the model's parameters", "seen by", "when", title="What leaves a client")
    for what, seen_by, when in found.disclosures:
        told.add_row(what, seen_by, when)
    for table in (parts, ways, told) if found.disclosures else (parts, ways):
        for column in table.columns[1:]:
            column.justify = "right" if "floats" in str(column.header) or "bytes" in str(column.header) else "left"
        console.print(table)


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


class ProgressBars:
    """Context: bars on a terminal, a line per finished cell elsewhere; gives the ``report`` of ``run_grid``."""

    def __init__(self, console: Console, grids: Sequence[Grid]):
        self.console = console
        self.rounds = {cell: grid.config.rounds for grid in grids for cell in grid.cells}
        self.total = sum(self.rounds.values())
        self.tasks: dict[Cell, TaskID] = {}
        self.stages: dict[tuple[Cell, str], TaskID] = {}
        self.bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[unit]} {task.completed:.0f}/{task.total:.0f}"),
            TextColumn("{task.fields[scores]}"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )

    def __enter__(self):
        self.bars.start()
        self.all = self.bars.add_task("all cells", total=self.total, unit="round", scores="")
        return self.report

    def __exit__(self, *exception):
        self.bars.stop()

    def report(self, event: str, cell: Cell, value) -> None:
        if event == "compiled":
            self.console.print(f"Compiled the round with {cell.aggregator} in {value:.1f} s")
        elif event == "start":
            name = f"{cell.aggregator}, {cell.held_out}, seed {cell.seed}"
            name += f", {tables.setting_text(dict(cell.setting))}" if cell.setting else ""
            self.tasks[cell] = self.bars.add_task(
                name, total=self.rounds[cell], completed=value, unit="round", scores=""
            )
            self.bars.advance(self.all, value)
        elif event == "stage":
            name, done, blocks, numbers = value
            text = "  ".join(f"{key.replace('_', ' ')} {number:.3f}" for key, number in numbers.items())
            if (cell, name) not in self.stages:
                title = f"{cell.held_out}, seed {cell.seed}: {name}"
                self.stages[cell, name] = self.bars.add_task(title, total=blocks, unit="part", scores="")
            self.bars.update(self.stages[cell, name], completed=done, scores=text)
            if done == blocks:
                self.bars.remove_task(self.stages.pop((cell, name)))
                self.console.print(f"{cell.name}: {name} done  {text}", highlight=False)
        elif event == "record":
            text = f"loss {value['train_loss']:.3f}  held-out {100 * value['accuracy']:.1f} %"
            step = value["round"] - self.bars.tasks[self.bars.task_ids.index(self.tasks[cell])].completed
            self.bars.update(self.tasks[cell], completed=value["round"], scores=text)
            self.bars.advance(self.all, step)
        elif event == "done":
            self.bars.remove_task(self.tasks.pop(cell))
            self.console.print(
                f"{cell.name}: held-out {100 * value['accuracy']:.1f} %, source {100 * value['source_accuracy']:.1f} % "
                f"(round {value['selected_round']} of {value['rounds']}, by {value['selection']}), "
                f"{value['seconds']:.1f} s",
                highlight=False,
            )
        elif event == "failed":
            self.bars.remove_task(self.tasks.pop(cell))
            self.console.print(f"{cell.name}: stopped. {value}", highlight=False)


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
