"""What the experiments in ``hfedatm/``, ``lsi/`` and ``stable_fedadg/`` share: options, runs, tables with
the papers' numbers.

An experiment is some ``Part``s: each a configuration, and rows that say what they change of it. ``main`` runs all rows by
``fdg.sweep``, which goes on where it was killed, and writes OUT/table.md. With ``--smoke`` all of them run on emoji styles.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from rich.console import Console

from fedjax_dg.cli import describe, keep_programs, start_devices
from fedjax_dg.config import (
    RUN_OPTIONS,
    RunConfig,
    aggregator_options,
    algorithm_options,
    check,
    names,
    parse_settings,
    read_toml,
    relevant,
)
from fedjax_dg.errors import unknown
from fedjax_dg.experiment import resolve, rounds_of
from fedjax_dg.results import Cell, identity, read_metrics
from fedjax_dg.sweep import checked, sweep
from fedjax_dg.tables import interval

HERE = Path(__file__).parent
#: What --smoke sets in every experiment: one round of 2 x 2 clients with 48 icons of each style.
SMOKE = {
    "dataset": "emoji_styles",
    "examples_per_domain": 48,
    "held_out": "fluent_mono",
    "stations": 2,
    "clients_per_station": 2,
    "rounds": 1,
    "station_rounds": 1,
    "local_epochs": 1,
    "batch_size": 8,
    "client_optimizer": "momentum",
    "client_lr": 0.01,
    "seeds": 1,
    "backbone": "lenet5",
    "augment": "none",
    **dict.fromkeys(("data_dir", "pretrained", "image_size", "max_length", "split", "local_steps", "participants")),
}
#: What --smoke leaves out: it needs batch norm, and the smallest network that has it compiles for half a minute.
NOT_IN_SMOKE = ("gperxan",)

Columns = Literal["held_out", "source"] | tuple[int, ...]
Scores = dict[str, dict[str, dict[int, float]]]  # row -> column -> seed -> accuracy


class Found(NamedTuple):
    """What running a part gave."""

    scores: Scores
    broken: Sequence[str]  # cells that broke down, and why


class Part(NamedTuple):
    """One table."""

    name: str
    config: RunConfig
    rows: Mapping[str, Mapping[str, Any]]  # what each changes: options of [run] and hyper-parameters, by name
    paper: Mapping[str, Mapping[str, float]] = {}  # row -> column -> percent; also what is not run here
    against: Sequence[tuple[str, str]] = ()  # pairs of rows: one, and what it is compared with, paired by seed
    columns: Columns = "held_out"  # what has a column: held_out domains, source domains, or these rounds


def base(name: str, **options: Any) -> RunConfig:
    """The configuration ``experiments/NAME.toml`` with other options."""
    return dataclasses.replace(read_toml(HERE / f"{name}.toml"), **options)


def product(*tables: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Rows for all combinations of settings: ``{"FedSR": a}`` and ``{"Avg": b}`` give ``{"FedSR + Avg": a | b}``."""
    rows: dict[str, dict[str, Any]] = {"": {}}
    for table in tables:
        rows = {
            f"{one} + {two}".removeprefix(" + "): a | dict(b) for one, a in rows.items() for two, b in table.items()
        }
    return rows


def pairs(rows: Iterable[str], one: str, other: str) -> list[tuple[str, str]]:
    """``("FedSR + HFedATM", "FedSR + Avg")`` for every row that ends with ``one``."""
    return [(row, row.removesuffix(one) + other) for row in rows if row.endswith(one)]


def main(doc: str | None, parts: Sequence[Part], smoke: Mapping[str, Any] = {}) -> None:
    """Run an experiment as the command line says; print its tables. ``smoke``: what --smoke sets beside ``SMOKE``."""
    parser = parser_of(doc)
    parser.add_argument("--data-dir", help="folder with the data sets")
    parser.add_argument("--pretrained", help="weights to start from")
    parser.add_argument("--only", nargs="+", choices=[part.name for part in parts], metavar="PART", help="parts to run")
    parser.add_argument("--seeds", type=int, help="instead of the experiment's own")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="what the rows leave open")
    parser.add_argument(
        "--dry-run", action="store_true", help="check all rows, foresee the first's cost; train nothing"
    )
    arguments = parser.parse_args()
    out = start(parser, arguments)
    given = {name: getattr(arguments, name) for name in ("data_dir", "pretrained", "seeds")}
    given = {name: value for name, value in given.items() if value is not None}
    chosen = [part for part in parts if arguments.only is None or part.name in arguments.only]
    try:
        given |= parse_settings(tuple(arguments.set))
        ready = [changed(part, {**SMOKE, **smoke} if arguments.smoke else {}, given) for part in chosen]
        if arguments.dry_run:
            for part in ready:
                foresee(part)
            return
        texts, finished = [], {}
        for part in ready:
            what = repr((part.config, part.rows, part.columns))  # with --smoke, parts of several data sets are one
            finished[what] = finished.get(what) or run(part, out / part.name)
            texts.append(table(part, finished[what]))
    except ValueError as error:
        parser.exit(2, f"{parser.prog}: {error}\n")
    finish(out, "\n".join(texts))


def parser_of(doc: str | None) -> argparse.ArgumentParser:
    """The options of every experiment; its name is that of its paper and file."""
    file = Path(sys.argv[0])
    parser = argparse.ArgumentParser(
        prog=f"{file.parent.name}-{file.stem}", description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="for runs and table.md; a killed run goes on from there")
    parser.add_argument("--smoke", action="store_true", help="toy size, to see that it runs")
    return parser


def start(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> Path:
    """The folder to write to. With --smoke programs are compiled quickly, as that takes longer there than running them."""
    if arguments.smoke:
        jax.config.update("jax_disable_most_optimizations", True)
        flags = "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}"
        return arguments.out or Path(tempfile.mkdtemp())
    keep_programs()
    return arguments.out or Path("runs") / parser.prog


def finish(out: Path, text: str) -> None:
    """Write and print the tables."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "table.md").write_text(text)
    print(f"{text}\nWrote {out / 'table.md'}")


def changed(part: Part, smoke: Mapping[str, Any], given: Mapping[str, Any]) -> Part:
    """The part with what --smoke and the command line set; hyper-parameters go to the rows whose methods have them, and
    what a row itself says stays. Raises ``ValueError`` for what is given and no row has."""
    if smoke and part.config.sources:
        smoke = {"sources": "noto", **smoke}
    both = {**smoke, **given}
    options = {name: _typed(name, value) for name, value in both.items() if name in RUN_OPTIONS}
    config = dataclasses.replace(part.config, **options, settings={})
    hparams = part.config.settings | {name: value for name, value in both.items() if name not in RUN_OPTIONS}
    rows, known = {}, {}
    for label, row in part.rows.items():
        if smoke and row.get("algorithm") in NOT_IN_SMOKE:
            continue
        of_row = dataclasses.replace(config, **{name: value for name, value in row.items() if name in RUN_OPTIONS})
        rules = (*names(of_row.aggregator), of_row.station_aggregator)
        if len(rules) > 2:
            raise ValueError(f"{label} in {part.name} has the server rules {of_row.aggregator}: give it one.")
        takes = [algorithm_options(of_row.algorithm), *map(aggregator_options, rules)]
        rows[label] = {k: v for k, v in hparams.items() if any(k in options for options in takes)} | dict(row)
        known |= {k: v for options in takes for k, v in options.items()}
    for name in given:
        if name not in RUN_OPTIONS and name not in known:
            raise unknown(f"option of a method in {part.name}", name, known)
    return part._replace(config=config, rows=rows, against=[pair for pair in part.against if {*pair} <= {*rows}])


def _typed(name: str, value: Any) -> Any:
    """What stands in ``--set name=value``, as the option's type."""
    kind = str(RunConfig.__dataclass_fields__[name].type).split(" | ")[0]
    if not isinstance(value, str) or kind == "str":
        return value
    try:
        return {"bool": {"true": True, "false": False}.__getitem__, "int": int, "float": float}[kind](value.lower())
    except (KeyError, ValueError):
        raise ValueError(f"{name}={value} is not of type {kind}: correct --set.") from None


def config_of(part: Part, label: str) -> RunConfig:
    """The configuration of one row, checked."""
    return checked(check(part.config), part.rows[label])[0]


def foresee(part: Part) -> None:
    """Check every row's configuration; print the first one's federation, devices, memory and time."""
    configs = {label: config_of(part, label) for label in part.rows}
    console, (label, config) = Console(), next(iter(configs.items()))
    grid = resolve(config, start_devices(1, False))
    console.print(f"{part.name}: {len(configs)} rows of {len(grid.cells)} cells; of {label}:", highlight=False)
    describe(grid, {name: rounds_of(grid, name) for name in names(config.aggregator)}, None, console)


def run(part: Part, folder: Path) -> Found:
    """Run what is left of a part, and score every row by its ``columns``."""
    devices, rows = start_devices(1, False), list(part.rows.values())
    done = sweep(part.config, rows, out=folder, resume=True, devices=devices, report=tell)
    records = {(identity(r), r["round"]): r for r in read_metrics(folder) if "accuracy" in r}
    scores: Scores = {label: {} for label in part.rows}
    broken = []
    for label, row in part.rows.items():
        config, setting = checked(done.config, row)
        wanted = config.algorithm, config.aggregator, relevant(config, config.aggregator, setting)
        for cell in (*done.cells, *done.failed):
            which = identity(cell)
            if (which.algorithm, which.aggregator, which.setting) != wanted:
                continue
            if "error" in cell:
                broken.append(f"{label}, {which.held_out}, seed {which.seed}: {cell['error']}")
                continue
            curve = {r: record for (of_cell, r), record in records.items() if of_cell == which}
            for column, accuracy in columns_of(part.columns, cell, curve).items():
                scores[label].setdefault(column, {})[which.seed] = accuracy
    return Found(scores, broken)


def tell(event: str, cell: Cell, value: Any) -> None:
    """Say when a cell is finished, or has broken down."""
    if event in ("done", "failed"):
        print(f"{cell.name}: {event}", file=sys.stderr, flush=True)


def columns_of(columns: Columns, cell: Mapping[str, Any], curve: Mapping[int, Mapping[str, Any]]) -> dict[str, float]:
    """Column -> accuracy of one cell; ``curve``: its records by round."""
    if columns == "held_out":
        return {cell["held_out"]: cell["accuracy"]}
    if columns != "source":
        return {f"{cell['held_out']}, round {r}": curve[r]["accuracy"] for r in columns if r in curve}
    selected = curve[cell["selected_round"]]
    by_domain = {name.removeprefix("accuracy/"): x for name, x in selected.items() if name.startswith("accuracy/")}
    sources = {name: x for name, x in by_domain.items() if name != cell["held_out"] and x is not None}
    return {f"{name} ({cell['held_out']} held out)": x for name, x in sources.items()}


def table(part: Part, found: Found) -> str:
    """Ours and the paper's numbers in percent, and differences of the rows that ``against`` compares, as Markdown."""
    scores = found.scores
    columns = list(dict.fromkeys(column for by_column in scores.values() for column in by_column))
    if len(columns) > 1 and isinstance(part.columns, str):
        for by_column in scores.values():
            seeds = set.intersection(*(set(by_column.get(column, {})) for column in columns))
            by_column["average"] = {seed: float(np.mean([by_column[c][seed] for c in columns])) for seed in seeds}
        columns.append("average")
    columns += [column for by_column in part.paper.values() for column in by_column]
    columns = sorted(dict.fromkeys(columns), key=lambda column: column == "average")  # last
    lines = [["", "whose", *columns], ["---"] * (2 + len(columns))]
    for label in dict.fromkeys([*part.rows, *part.paper]):
        if label in part.rows:
            lines.append([label, "ours", *(in_percent(scores[label].get(c, {}), part) for c in columns)])
        if label in part.paper:
            lines.append([label, "paper", *(str(part.paper[label].get(c, "-")) for c in columns)])
    clear: dict[str, list[str]] = {"better": [], "worse": []}
    compared = 0
    for one, other in part.against:
        gains = [difference(scores, one, other, column) for column in columns]
        lines.append([f"{one}, minus {other}", "ours", *(in_percent(gain, part, "+") for gain in gains)])
        for column, gain in zip(columns, gains):
            compared += bool(gain)
            if len(gain) > 1 and abs((mean := interval(gain.values()))["mean"]) > mean["ci95"]:
                clear["better" if mean["mean"] > 0 else "worse"].append(f"{one} than {other} on {column}")
    text = f"## {part.name}\n\n{title(part)}\n\n" + "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"
    said = [f"Clearly {word} in {len(which)} of {compared} comparisons" for word, which in clear.items()]
    listed = [f": {'; '.join(which)}." if which else "." for which in clear.values()]
    text += f"\n{said[0]}{listed[0]} {said[1]}{listed[1]}\n" if compared else ""
    return text + "".join(f"\nBroke down: {what}\n" for what in found.broken)


def title(part: Part) -> str:
    """What the numbers are."""
    config = config_of(part, next(iter(part.rows)))
    judged = "on validation examples of the source domains" if part.columns == "source" else "on the held-out domain"
    judged += ", the part of it that DomainBed tests on" if config.split == "domainbed" else ""
    return (
        f"{config.dataset}, {config.backbone}: accuracy (%) {judged}; round selected by {config.selection}; "
        f"mean ± 95 % t interval over {config.seeds} seeds, differences paired by seed and clear where the interval "
        f"leaves out zero; {config.stations} stations x {config.clients_per_station} clients, {config.rounds} rounds."
    )


def difference(scores: Scores, label: str, other: str, column: str) -> dict[int, float]:
    """Seed -> how much better a row is than another."""
    one, two = (scores.get(name, {}).get(column, {}) for name in (label, other))
    return {seed: one[seed] - two[seed] for seed in one if seed in two}


def in_percent(by_seed: Mapping[int, float], part: Part, sign: str = "") -> str:
    """Mean and interval; over how many seeds, where some are missing as they are unfinished or broke down."""
    if not by_seed:
        return "-"
    found = interval(by_seed.values())
    spread = "" if found["ci95"] is None else f" ± {100 * found['ci95']:.1f}"
    number = "" if found["n"] == part.config.seeds else f" (n={found['n']})"
    return f"{100 * found['mean']:{sign}.1f}{spread}{number}"
