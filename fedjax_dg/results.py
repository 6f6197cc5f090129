"""The run folder: configuration, metrics, checkpoints, results and table. Every write survives a kill."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import platform
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp
from scipy import stats

from fedjax_dg.config import RunConfig, differences
from fedjax_dg.types import PyTree

SCHEMA = 1
PACKAGES = ("fedjax-dg", "jax", "jaxlib", "flax", "optax", "ott-jax", "orbax-checkpoint", "numpy")


class Cell(NamedTuple):
    """One training run of a configuration's grid."""

    algorithm: str
    aggregator: str
    held_out: str
    seed: int

    @property
    def name(self) -> str:
        return f"{self.algorithm}-{self.aggregator}-{self.held_out}-seed{self.seed}"


def write_atomically(path: Path, text: str) -> None:
    """Replace a file whole: a reader, or a run killed half way, sees the old text or the new one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_text(text)
    os.replace(temporary, path)


def environment() -> dict[str, Any]:
    """What the numbers of a run may depend on beside its configuration."""
    return {
        "jax": jax.__version__,
        "python": platform.python_version(),
        "platform": jax.default_backend(),
        "devices": [d.device_kind for d in jax.devices()],
        "threefry_partitionable": bool(jax.config.jax_threefry_partitionable),
        "versions": {name: importlib.metadata.version(name) for name in PACKAGES},
    }


class RunFolder:
    """``runs/<name>/``: ``config.json``, ``metrics.jsonl``, ``result.json``, ``table.md``, ``checkpoints/<cell>/<round>``.

    Raises ``ValueError`` when the folder holds another configuration, or the same one without ``resume``.
    """

    def __init__(self, path: Path, config: RunConfig, resume: bool = False, overwrite: bool = False):
        self.path = Path(path)
        wanted = {"schema": SCHEMA, **dataclasses.asdict(config)}
        if overwrite and self.path.exists():
            if any(self.path.iterdir()) and not (self.path / "config.json").exists():
                raise ValueError(f"{self.path} is no run folder, so it is not overwritten: choose another --out.")
            shutil.rmtree(self.path)
        if (self.path / "config.json").exists():
            found = json.loads((self.path / "config.json").read_text())
            if found != wanted:
                raise ValueError(
                    f"{self.path} holds a run of another configuration ({differences(wanted, found)}): "
                    "pass --overwrite to replace it, or another --out."
                )
            if not resume:
                raise ValueError(
                    f"{self.path} already holds this run: pass --resume to continue it (finished cells are not run "
                    "again), --overwrite to start over, or another --out."
                )
        elif self.path.exists() and any(self.path.iterdir()):
            raise ValueError(f"{self.path} exists and is no run folder: choose another --out.")
        self.path.mkdir(parents=True, exist_ok=True)
        write_atomically(self.path / "config.json", json.dumps(wanted, indent=2) + "\n")

    def finished(self) -> list[dict[str, Any]]:
        """Cells of ``result.json``, which need not be run again."""
        path = self.path / "result.json"
        return json.loads(path.read_text())["cells"] if path.exists() else []

    def keep_metrics(self, rounds: dict[str, int]) -> None:
        """Drop lines of ``metrics.jsonl`` that lie beyond a cell's checkpoint: that work is going to be repeated."""
        path, kept = self.path / "metrics.jsonl", []
        for line in path.read_text().splitlines() if path.exists() else []:
            try:
                record = json.loads(line)
            except json.JSONDecodeError:  # the last line of a killed run
                continue
            if record["round"] <= rounds.get(record["cell"], 0):
                kept.append(line)
        write_atomically(path, "".join(line + "\n" for line in kept))

    def add_metrics(self, cell: Cell, record: dict[str, Any]) -> None:
        """Append a line to ``metrics.jsonl``."""
        with open(self.path / "metrics.jsonl", "a") as file:
            file.write(json.dumps({"cell": cell.name, **cell._asdict(), **record}) + "\n")

    def checkpoints(self, cell: Cell) -> Checkpoints:
        """The checkpoints of a cell."""
        return Checkpoints(self.path / "checkpoints" / cell.name)


class Progress(NamedTuple):
    """Where a cell stands: everything that continuing it to the same bits takes."""

    arrays: PyTree  # server state, best variables so far, key data
    notes: dict[str, Any]  # round, best record, seconds


class Checkpoints:
    """Orbax checkpoints of one cell, the newest two kept; an unfinished write is never taken for a checkpoint."""

    def __init__(self, path: Path):
        options = ocp.CheckpointManagerOptions(max_to_keep=2, enable_async_checkpointing=False)
        self.path, self.manager = path, ocp.CheckpointManager(path.absolute(), options=options)

    def latest(self) -> int | None:
        """The round of the newest checkpoint."""
        return self.manager.latest_step()

    def save(self, progress: Progress) -> None:
        """Write a checkpoint named by its round."""
        arguments = ocp.args.Composite(
            arrays=ocp.args.StandardSave(_named(progress.arrays)), notes=ocp.args.JsonSave(progress.notes)
        )
        self.manager.save(progress.notes["round"], args=arguments)

    def restore(self, template: PyTree) -> Progress:
        """The newest checkpoint, in the structure of ``template``.

        Raises ``ValueError`` when it does not fit: saved by another version, or damaged.
        """
        wanted = _named(template)
        advice = f"continue it with the version that wrote it, or delete {self.path} to run this cell again"
        try:
            stored = self.manager.item_metadata(self.latest())["arrays"]
            stored = {k: tuple(v.shape) for k, v in stored.items()}
        except Exception as error:
            raise ValueError(
                f"The checkpoint in {self.path} cannot be read ({type(error).__name__}); {advice}."
            ) from error
        for name in sorted({*wanted, *stored}):
            have, want = stored.get(name), None if name not in wanted else tuple(wanted[name].shape)
            if have != want:
                raise ValueError(
                    f"The checkpoint in {self.path} holds {name} of shape {have}, this run needs {want}; {advice}."
                )
        arguments = ocp.args.Composite(arrays=ocp.args.StandardRestore(wanted), notes=ocp.args.JsonRestore())
        try:
            restored = self.manager.restore(self.latest(), args=arguments)
        except Exception as error:
            raise ValueError(
                f"The checkpoint in {self.path} cannot be read ({type(error).__name__}); {advice}."
            ) from error
        leaves = [restored["arrays"][name] for name in wanted]
        return Progress(jax.tree.unflatten(jax.tree.structure(template), leaves), restored["notes"])

    def close(self) -> None:
        self.manager.close()


def _named(tree: PyTree) -> dict[str, jax.Array]:
    """Leaves by a readable path, in leaf order."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in jax.tree.leaves_with_path(tree)
    }


def interval(values: Iterable[float]) -> dict[str, Any]:
    """Mean and half width of the 95 % t interval; the latter is None for fewer than two values."""
    values = np.asarray(list(values), np.float64)
    n = len(values)
    half = float(stats.t.ppf(0.975, n - 1) * values.std(ddof=1) / np.sqrt(n)) if n > 1 else None
    return {"mean": float(values.mean()), "ci95": half, "n": n}


def summarise(cells: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """``summary`` (per algorithm, server rule, held-out domain) and ``paired`` differences to the first server rule.

    Over seeds; the domain ``average`` is each seed's mean over the held-out domains, for seeds that have all of them.
    """
    table: dict[tuple[str, str], dict[str, dict[int, float]]] = {}
    for cell in cells:
        row = table.setdefault((cell["algorithm"], cell["aggregator"]), {})
        row.setdefault(cell["held_out"], {})[cell["seed"]] = cell["accuracy"]
    domains = list(dict.fromkeys(cell["held_out"] for cell in cells))
    for row in table.values():
        if len(domains) > 1 and set(row) == set(domains):
            seeds = set.intersection(*(set(row[d]) for d in domains))
            if seeds:
                row["average"] = {s: float(np.mean([row[d][s] for d in domains])) for s in sorted(seeds)}
    summary, paired, baselines = [], [], {}
    for (algorithm, aggregator), row in table.items():
        base_name, base = baselines.setdefault(algorithm, (aggregator, row))
        for held_out, by_seed in row.items():
            key = {"algorithm": algorithm, "aggregator": aggregator, "held_out": held_out}
            summary.append(key | interval(by_seed.values()))
            common = [s for s in by_seed if s in base.get(held_out, {})]
            if base is not row and common:
                gains = [by_seed[s] - base[held_out][s] for s in common]
                paired.append(key | {"baseline": base_name} | interval(gains))
    return summary, paired


def write_results(folder: RunFolder, config: RunConfig, cells: list[dict], failed: list[dict], title: str) -> None:
    """``result.json`` and ``table.md`` of all finished cells."""
    cells = sorted(
        cells, key=lambda c: (c["algorithm"], config.aggregator.find(c["aggregator"]), c["held_out"], c["seed"])
    )
    summary, paired = summarise(cells)
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
    write_atomically(folder.path / "table.md", markdown(cells, title))


def rows(cells: list[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Header and rows of the table: a line per server rule, a line per paired difference; accuracies in percent."""
    summary, paired = summarise(cells)
    columns = list(dict.fromkeys(s["held_out"] for s in summary))
    columns = [c for c in columns if c != "average"] + (["average"] if "average" in columns else [])

    def text(entry, sign=""):
        if entry is None:
            return "-"
        spread = "" if entry["ci95"] is None else f" ± {100 * entry['ci95']:.1f}"
        return f"{100 * entry['mean']:{sign}.1f}{spread}"

    lines = []
    for entries, sign in ((summary, ""), (paired, "+")):
        by_row: dict[tuple, dict[str, dict]] = {}
        for e in entries:
            by_row.setdefault((e["algorithm"], e["aggregator"], e.get("baseline")), {})[e["held_out"]] = e
        for (algorithm, aggregator, baseline), cells_of_row in by_row.items():
            rule = aggregator if baseline is None else f"{aggregator} - {baseline}"
            lines.append([algorithm, rule, *(text(cells_of_row.get(c), sign) for c in columns)])
    return ["algorithm", "server rule", *columns], lines


def markdown(cells: list[dict[str, Any]], title: str) -> str:
    """The table as Markdown."""
    header, lines = rows(cells)
    body = ["| " + " | ".join(line) + " |" for line in [header, ["---"] * len(header), *lines]]
    return f"{title}\n\n" + "\n".join(body) + "\n"
