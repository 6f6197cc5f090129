"""Tables of run folders: rounds and settings selected by a rule, accuracies over seeds, paired with a baseline.

The field's conventions are DomainBed's: a number a held-out domain, their average, a selection rule that is named.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table
from scipy import stats

from fedjax_dg import sharding
from fedjax_dg.config import RunConfig
from fedjax_dg.errors import unknown
from fedjax_dg.evaluate import SELECTIONS, is_better
from fedjax_dg.results import SCHEMA, Cell, RunFolder, environment, identity, read_json, read_metrics, write_atomically

FORMATS = ("text", "md", "latex", "csv")
SPREADS = {"ci95": "95 % interval", "se": "standard error"}
#: Of the rows of a sweep: for each seed and domain the setting that the selection rule prefers, or every setting.
SETTINGS = ("best", "all")
SCORES = ("accuracy", "balanced_accuracy", "accuracy_unseen", "source_accuracy")
#: Columns over the held-out domains.
OVERALL = ("average", "worst")


# --- run folders ----------------------------------------------------------------------------------------------------


class Results(NamedTuple):
    """What is in a run folder."""

    path: Path
    config: RunConfig
    cells: list[dict[str, Any]]
    failed: list[dict[str, Any]]
    planned: list[Cell]  # what its last command was to run; empty for folders of older versions
    curves: dict[Cell, list[dict[str, Any]]]  # the evaluated rounds of each cell


def load(run: str | Path) -> Results:
    """Read a run folder. ``ValueError`` for one without a finished cell."""
    folder = Path(run)
    if not (folder / "result.json").exists():
        raise ValueError(f"{run} has no result.json: give the folder of a run that has finished at least one cell.")
    result = read_json(folder / "result.json")
    planned = read_json(folder / "cells.json")["cells"] if (folder / "cells.json").exists() else []
    curves: dict[Cell, list[dict[str, Any]]] = {}
    for record in read_metrics(folder) if (folder / "metrics.jsonl").exists() else ():
        if "accuracy" in record:
            curves.setdefault(identity(record), []).append(record)
    return Results(
        folder,
        RunConfig(**result["config"]),
        result["cells"],
        result["failed"],
        [identity(cell) for cell in planned],
        curves,
    )


# --- selection ------------------------------------------------------------------------------------------------------


class Chosen(NamedTuple):
    """The cells of a table, and why others are not in it."""

    cells: list[dict[str, Any]]
    missing: dict[Cell, str]


def choose(run: Results, selection: str, settings: str = "best") -> Chosen:
    """Select every cell's round, and with ``settings="best"`` a sweep's setting for each seed and held-out domain.

    ``source-validation``: the round, then the setting, with the best mean validation accuracy of the source domains;
    ``last``: the last round, the setting as before; ``oracle``: both by the accuracy on the held-out domain.
    ``leave-one-domain-out``: round and setting together, by the mean over the other domains b of the accuracy on b when b is
    left out too: needs the cells that a run with this selection trains. Ties keep the earlier round and setting. Sources:
    Gulrajani, Lopez-Paz, ICLR 2021, https://arxiv.org/abs/2007.01434. Deviations: there the oracle looks at a held-out part
    of the domain and at the last round only; here at all its examples, round by round, so it is an upper bound.
    """
    for kind, given, allowed in (("selection rule", selection, SELECTIONS), ("settings", settings, SETTINGS)):
        if given not in allowed:
            raise unknown(kind, given, allowed)
    cells, missing = [], {}
    for cell in run.cells:
        which = identity(cell)
        if "+" in which.held_out:  # trained for leave-one-domain-out, which asks for it by name
            continue
        record, why = _pick(run, cell, which, selection)
        if record is None:
            missing[which] = why
        else:
            scores = {name: record[name] for name in SCORES} | {"selected_round": record["round"]}
            cells.append(cell | scores | {"selection": selection, "_judged": record["_judged"]})
    for cell in run.failed:
        missing[identity(cell)] = cell["error"]
    for which in run.planned:
        if "+" not in which.held_out and which not in {identity(c) for c in run.cells} | set(missing):
            missing[which] = "not finished yet"
    if settings == "best":
        best: dict[Cell, dict[str, Any]] = {}
        for cell in cells:
            which = identity(cell)._replace(setting=())
            if which not in best or cell["_judged"] > best[which]["_judged"]:
                best[which] = cell
        cells = [
            {k: v for k, v in c.items() if k != "hparams"} | {"chosen": c.get("hparams", {})} for c in best.values()
        ]
        found = {identity(cell) for cell in cells}
        missing = {which: why for which, why in missing.items() if which._replace(setting=()) not in found}
    return Chosen([{k: v for k, v in cell.items() if k != "_judged"} for cell in cells], missing)


def _pick(run: Results, cell: dict[str, Any], which: Cell, selection: str) -> tuple[dict[str, Any] | None, str]:
    """The selected round's record of a cell with what it is ``_judged`` by; or why there is none."""
    curve = run.curves.get(which, [])
    if selection == "leave-one-domain-out":
        return _left_out(run, which, curve)
    if cell["rounds"] not in {record["round"] for record in curve}:
        if cell["selection"] != selection:
            return None, f"its rounds are not in metrics.jsonl, so only {cell['selection']} can be shown"
        best: dict[str, Any] = cell | {"round": cell["selected_round"]}
    else:
        best = {}
        for record in curve:
            if is_better(selection, record, best):
                best = record
    judged = best["accuracy" if selection == "oracle" else "source_accuracy"]
    return best | {"_judged": -1.0 if judged is None else judged}, ""


def _left_out(run: Results, which: Cell, curve: list[dict[str, Any]]) -> tuple[dict[str, Any] | None, str]:
    """The same for leave-one-domain-out."""
    domains = list(dict.fromkeys(cell["held_out"] for cell in run.cells if "+" not in cell["held_out"]))
    others: list[tuple[str, dict[int, float]]] = []
    for domain in domains:
        pairs = [f"{which.held_out}+{domain}", f"{domain}+{which.held_out}"]
        found = [run.curves[c] for c in (which._replace(held_out=pair) for pair in pairs) if c in run.curves]
        if found:
            others.append((domain, {record["round"]: record[f"accuracy/{domain}"] for record in found[0]}))
    wanted = [domain for domain in domains if domain != which.held_out]
    if lacking := [domain for domain in wanted if domain not in [name for name, _ in others]]:
        return None, (
            f"no cell leaves out {which.held_out} and {lacking[0]}: run with --held-out all --selection leave-one-domain-out"
        )
    best: dict[str, Any] = {}
    for record in curve:
        judged = float(np.mean([by_round.get(record["round"], -1.0) for _, by_round in others]))
        if not best or judged > best["_judged"]:
            best = record | {"_judged": judged}
    return (best, "") if best else (None, "its rounds are not in metrics.jsonl")


# --- numbers --------------------------------------------------------------------------------------------------------


def interval(values: Iterable[float]) -> dict[str, Any]:
    """Mean, half width of the 95 % t interval and standard error; the latter two are None for fewer than two values."""
    values = np.asarray(list(values), np.float64)
    n = len(values)
    error = float(values.std(ddof=1) / np.sqrt(n)) if n > 1 else None
    half = None if error is None else float(stats.t.ppf(0.975, n - 1)) * error
    return {"mean": float(values.mean()), "ci95": half, "se": error, "n": n}


class Row(NamedTuple):
    """What the cells of a row have in common."""

    algorithm: str
    aggregator: str
    setting: tuple = ()
    run: str = ""  # named where several run folders have the same row

    def as_record(self) -> dict[str, Any]:
        """For a summary; without what is not said."""
        told: dict[str, Any] = {"run": self.run} if self.run else {}
        told |= {"algorithm": self.algorithm, "aggregator": self.aggregator}
        return told | ({"hparams": dict(self.setting)} if self.setting else {})


def row_of(cell: Mapping[str, Any]) -> Row:
    """The row of a table that a cell is in."""
    return Row(cell["algorithm"], cell["aggregator"], tuple(cell.get("hparams", {}).items()), cell.get("run", ""))


def summarise(
    cells: Sequence[Mapping[str, Any]], baseline: tuple[str, str] | None = None
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """``summary`` (per algorithm, server rule, setting, held-out domain) and ``paired`` differences to a baseline's row.

    Over seeds; the domains ``average`` and ``worst`` are each seed's mean and minimum over the held-out domains, for seeds
    that have all of them. The baseline is the first server rule of the same algorithm, or of (algorithm, server rule) if
    given, and in a sweep its row with the same values of what is swept for both.
    """
    table: dict[Row, dict[str, dict[int, float]]] = {}
    for cell in cells:
        table.setdefault(row_of(cell), {}).setdefault(cell["held_out"], {})[cell["seed"]] = cell["accuracy"]
    domains = list(dict.fromkeys(cell["held_out"] for cell in cells))
    for row in table.values():
        if len(domains) > 1 and set(row) == set(domains):
            seeds = sorted(set.intersection(*(set(row[d]) for d in domains)))
            for name, over in zip(OVERALL, (np.mean, np.min)) if seeds else ():
                row[name] = {s: float(over([row[d][s] for d in domains])) for s in seeds}

    def base_of(key: Row) -> Row | None:
        own = [other for other in table if other.algorithm == key.algorithm and other.run == key.run]
        wanted = baseline or own[0][:2]
        fits = [other for other in table if other[:2] == wanted and set(other.setting) <= set(key.setting)]
        fits = [other for other in fits if other.run == key.run] or fits
        return fits[0] if fits and fits[0] != key and (baseline or key[:2] != wanted) else None

    summary, paired = [], []
    for key, row in table.items():
        other = base_of(key)
        for held_out, by_seed in row.items():
            told = key.as_record() | {"held_out": held_out}
            summary.append(told | interval(by_seed.values()))
            base = {} if other is None else table[other].get(held_out, {})
            if common := [s for s in by_seed if s in base]:
                assert other is not None
                name = other.aggregator if other[::3] == key[::3] else " ".join(x for x in (other.run, *other[:2]) if x)
                paired.append(told | {"baseline": name} | interval([by_seed[s] - base[s] for s in common]))
    return summary, paired


def write_results(folder: RunFolder, cells: list[dict], failed: list[dict], complete: bool = False) -> None:
    """``result.json`` and ``table.md`` of all finished cells; when the run is ``complete``, also why others are missing."""
    if not sharding.is_first():
        return
    config = folder.config
    summary, paired = summarise([cell for cell in cells if "+" not in cell["held_out"]])
    result = {
        "schema": SCHEMA,
        "config": dataclasses.asdict(config),
        "environment": environment(),
        "cells": cells,
        "summary": summary,
        "paired": paired,
        "failed": failed,
    }
    write_atomically(folder.path / "result.json", json.dumps(result, indent=2) + "\n")
    if complete and cells:
        text = render([folder.path], format="md", settings="all")
    else:
        shown = [cell for cell in cells if "+" not in cell["held_out"]]
        text = markdown(shown, table_title(config, cells=shown), config.seeds)
    write_atomically(folder.path / "table.md", text)


# --- what is printed ------------------------------------------------------------------------------------------------


def render(
    runs: Sequence[str | Path],
    selection: str | None = None,
    settings: str = "best",
    format: str = "text",
    spread: str = "ci95",
    baseline: str | None = None,
) -> str:
    """The tables of run folders as text: a row per algorithm and server rule, then the paired differences, in percent.

    ``selection`` (default: each run's own) and ``settings``: see ``choose``. ``format``: ``text``, ``md``, ``latex``
    (booktabs; the best of a column bold), ``csv`` (a line per number). ``spread``: ``ci95``, the half width of the 95 % t
    interval, or ``se``, the standard error with n - 1 (DomainBed divides by n). ``baseline``: ``RULE`` or
    ``ALGORITHM RULE``, as the table prints them. Folders whose numbers mean the same (``table_title``) make one table.
    Below it: why numbers are missing. Raises ``ValueError`` for what does not exist.
    """
    for kind, given, allowed in (("format", format, FORMATS), ("spread", spread, SPREADS)):
        if given not in allowed:
            raise unknown(kind, given, allowed)
    if not runs:
        raise ValueError("No run folder is given: name one or more, such as runs/emoji_styles-fedavg-fluent_mono.")
    alike: dict[str, list[tuple[Results, RunConfig]]] = {}
    for run in (load(run) for run in dict.fromkeys(map(str, runs))):
        config = dataclasses.replace(run.config, selection=selection or run.config.selection)
        if not run.cells and not run.failed:
            raise ValueError(f"{run.path} has no finished cell: let it go on.")
        alike.setdefault(table_title(config, spread), []).append((run, config))
    parts = []
    for group in alike.values():
        chosen = [choose(run, config.selection, settings) for run, config in group]
        heads = [{row_of(cell) for cell in one.cells} for one in chosen]
        if len(set().union(*heads)) < sum(map(len, heads)):  # the same row in several
            paths = [run.path for run, _ in group]
            alone = len({path.name for path in paths}) == len(paths)
            for path, one in zip(paths, chosen):
                for cell in one.cells:
                    cell["run"] = path.name if alone else str(path)
        cells = [cell for one in chosen for cell in one.cells]
        missing = {which: why for one in chosen for which, why in one.missing.items()}
        parts.append(_body(Chosen(cells, missing), group[0][1], format, spread, baseline))
    if format == "csv":
        return parts[0] + "".join(part.split("\n", 1)[1] for part in parts[1:])
    return "\n".join(parts)


def _body(chosen: Chosen, config: RunConfig, format: str, spread: str, baseline: str | None) -> str:
    """The table of one run folder."""
    base = None
    if baseline is not None:
        found = list(dict.fromkeys(row_of(cell)[:2] for cell in chosen.cells))
        fits = [row for row in found if baseline in (row[1], " ".join(row))]
        if not fits:
            raise unknown("baseline", baseline, [" ".join(row) for row in found])
        base = fits[0]
    summary, paired = summarise(chosen.cells, base)
    if format == "csv":
        return _csv(summary, paired, spread)
    header, lines = rows(chosen.cells, config.seeds, spread, base, latex=format == "latex")
    title, notes = table_title(config, spread, chosen.cells), notes_of(chosen)
    if format == "latex":
        return _latex(header, lines, title, notes)
    if format == "md":
        return markdown_of(header, lines, title, notes)
    table = Table()
    for number, name in enumerate(header):
        table.add_column(name, justify="right" if number >= _words(header) else "left")
    for line in lines:
        table.add_row(*line)
    # plain text, also in a notebook, where a console would show it at once, and colours are forced
    console = Console(file=io.StringIO(), width=10_000, force_jupyter=False, color_system=None)
    console.print(title, highlight=False, markup=False)
    console.print(table)
    for note in notes:
        console.print(note, highlight=False, markup=False)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def _words(header: Sequence[str]) -> int:
    """How many of the first columns hold words."""
    return sum(name in header for name in ("run", "algorithm", "server rule", "setting"))


def rows(
    cells: Sequence[Mapping[str, Any]],
    seeds: int,
    spread: str = "ci95",
    baseline: tuple[str, str] | None = None,
    latex: bool = False,
) -> tuple[list[str], list[list[str]]]:
    """Header and rows of the table: a line per server rule, a line per paired difference; accuracies in percent.

    A number over fewer than ``seeds`` seeds, as cells are unfinished or broke down, says over how many.
    """
    summary, paired = summarise(cells, baseline)
    columns = list(dict.fromkeys(s["held_out"] for s in summary))
    columns = [c for c in columns if c not in OVERALL] + [c for c in OVERALL if c in columns]
    swept, named = any("hparams" in s for s in summary), any("run" in s for s in summary)
    compared = {c: [s["mean"] for s in summary if s["held_out"] == c] for c in columns}
    plus_minus = r"$\pm$" if latex else "±"

    def text(entry, sign=""):
        if entry is None:
            return "-"
        number = f"{100 * entry['mean']:{sign}.1f}"
        if entry[spread] is not None:
            number += f" {plus_minus} {100 * entry[spread]:.1f}"
        others = compared[entry["held_out"]]
        if latex and not sign and len(others) > 1 and entry["mean"] == max(others):
            number = rf"\textbf{{{number}}}"
        return number + ("" if entry["n"] == seeds else f" (n={entry['n']})")

    lines = []
    for entries, sign in ((summary, ""), (paired, "+")):
        by_row: dict[tuple, dict[str, dict]] = {}
        for e in entries:
            setting, base = setting_text(e.get("hparams", {})), e.get("baseline")
            rule = e["aggregator"] if base is None else f"{e['aggregator']} - {base}"
            words = (*([e["run"]] if named else []), e["algorithm"], rule, *([setting] if swept else []))
            by_row.setdefault(words, {})[e["held_out"]] = e
        lines += [[*words, *(text(row.get(c), sign) for c in columns)] for words, row in by_row.items()]
    return [*(["run"] if named else []), "algorithm", "server rule", *(["setting"] if swept else []), *columns], lines


def setting_text(setting: Mapping[str, Any]) -> str:
    """A sweep's setting in words."""
    return ", ".join(f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in setting.items())


def notes_of(chosen: Chosen) -> list[str]:
    """Which settings were selected how often, and why cells are missing."""
    notes = []
    picked: dict[str, Counter[str]] = {}
    for cell in chosen.cells:
        if setting := setting_text(cell.get("chosen", {})):
            picked.setdefault(f"{cell['algorithm']}, {cell['aggregator']}", Counter())[setting] += 1
    for row, counts in picked.items():
        listed = "; ".join(f"{setting} ({number} of {counts.total()})" for setting, number in counts.most_common())
        notes.append(f"Selected for {row}: {listed}")
    for which, why in chosen.missing.items():
        setting = f", {setting_text(dict(which.setting))}" if which.setting else ""
        notes.append(
            f"Missing: {which.algorithm}, {which.aggregator}, {which.held_out}, seed {which.seed}{setting}: {why}"
        )
    return notes


def markdown(cells: Sequence[Mapping[str, Any]], title: str, seeds: int) -> str:
    """The table of cells as Markdown."""
    return markdown_of(*rows(cells, seeds), title)


def markdown_of(header: Sequence[str], lines: Sequence[Sequence[str]], title: str, notes: Sequence[str] = ()) -> str:
    """Columns as Markdown, with a title above and notes below."""
    body = ["| " + " | ".join(line) + " |" for line in [header, ["---"] * len(header), *lines]]
    below = "".join(f"\n- {note}" for note in notes)
    return f"{title}\n\n" + "\n".join(body) + "\n" + (below + "\n" if below else "")


def _latex(header: Sequence[str], lines: Sequence[Sequence[str]], title: str, notes: Sequence[str]) -> str:
    """Columns as a booktabs tabular, with title and notes as comments."""

    def escaped(text: str) -> str:
        return "".join("\\" + c if c in "&%$#_{}" else c for c in text)

    words, rule = _words(header), header.index("server rule")
    shown = [[escaped(cell) if n < words else cell for n, cell in enumerate(line)] for line in lines]
    first = next((i for i, line in enumerate(lines) if " - " in line[rule]), len(lines))
    body = [" & ".join(line) + r" \\" for line in shown]
    comments = [f"% {text}" for text in (title, *notes)]
    return "\n".join(
        [
            *comments,
            rf"\begin{{tabular}}{{{'l' * words}{'r' * (len(header) - words)}}}",
            r"\toprule",
            " & ".join(map(escaped, header)) + r" \\",
            r"\midrule",
            *body[:first],
            *([r"\midrule", *body[first:]] if first < len(body) else []),
            r"\bottomrule",
            r"\end{tabular}",
            "",
        ]
    )


def _csv(summary: Sequence[Mapping[str, Any]], paired: Sequence[Mapping[str, Any]], spread: str) -> str:
    """A line per number, in percent."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["run", "algorithm", "aggregator", "setting", "baseline", "held_out", "mean", spread, "seeds"])
    for entry in (*summary, *paired):
        setting, base = setting_text(entry.get("hparams", {})), entry.get("baseline", "")
        wide = "" if entry[spread] is None else f"{100 * entry[spread]:.4f}"
        told = [entry.get("run", ""), entry["algorithm"], entry["aggregator"], setting, base, entry["held_out"]]
        writer.writerow([*told, f"{100 * entry['mean']:.4f}", wide, entry["n"]])
    return out.getvalue()


def table_title(config: RunConfig, spread: str = "ci95", cells: Sequence[Mapping[str, Any]] = ()) -> str:
    """What a table's numbers are, in one line; ``several`` of what a sweep's ``cells`` have several."""
    swept = {name for cell in cells for key in ("hparams", "chosen") for name in cell.get(key, {})}
    of = lambda name: "several" if name in swept else f"{getattr(config, name):g}"
    tested = "the part of it that DomainBed tests on" if config.split == "domainbed" else "all its examples"
    return (
        f"{config.dataset}, accuracy (%) on the held-out domain, {tested}; round selected by {config.selection}; "
        f"mean ± {SPREADS[spread]} over {config.seeds} seeds; {of('stations')} stations x {of('clients_per_station')} "
        f"clients, {of('rounds')} rounds of {of('station_rounds')} station rounds, domain mix {of('domain_mix')}."
    )
