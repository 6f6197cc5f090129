"""The run folder: configuration, metrics, checkpoints, results and table. Every write survives a kill."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import math
import os
import platform
import re
import shutil
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import orbax.checkpoint as ocp

from fedjax_dg import sharding
from fedjax_dg.config import RunConfig, differences
from fedjax_dg.types import PyTree

SCHEMA = 1
LONGEST_NAME = 150  # of a cell; file systems allow 255 bytes
PACKAGES = ("fedjax-dg", "jax", "jaxlib", "flax", "optax", "ott-jax", "orbax-checkpoint", "numpy")


class Cell(NamedTuple):
    """One training run of a configuration's grid."""

    algorithm: str
    aggregator: str
    held_out: str
    seed: int
    setting: tuple[tuple[str, Any], ...] = ()  # of a sweep: the options that are swept and matter here

    @property
    def name(self) -> str:
        """For people and for folders."""
        setting = ",".join(f"{name}={value}" for name, value in self.setting)
        name = f"{self.algorithm}-{self.aggregator}-{self.held_out}-seed{self.seed}" + (
            f"-{setting}" if setting else ""
        )
        fit = re.sub(r"[^\w.=,+ &-]", "_", name)
        return (
            fit
            if fit == name and len(name) <= LONGEST_NAME
            else f"{fit[:LONGEST_NAME]}-{zlib.crc32(name.encode()):08x}"
        )

    def as_record(self) -> dict[str, Any]:
        """For the lines of a run folder; a plain run's have no ``hparams``."""
        fields = self._asdict()
        setting = dict(fields.pop("setting"))
        return fields | ({"hparams": setting} if setting else {})


def identity(result: Mapping[str, Any]) -> Cell:
    """Which cell a line of ``result.json`` or ``metrics.jsonl`` is about."""
    setting = tuple(result.get("hparams", {}).items())
    return Cell(**{k: result[k] for k in Cell._fields[:-1]}, setting=setting)


def write_atomically(path: Path, text: str) -> None:
    """Replace a file whole: a reader, or a run killed half way, sees the old text or the new one."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text)
    os.replace(temporary, path)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file of a run folder. Raises ``ValueError`` when it cannot be read."""
    try:
        return json.loads(path.read_text())
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(
            f"{path} is missing or damaged ({type(error).__name__}): restore it, or run again with --overwrite."
        ) from None


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The lines of a run folder's ``metrics.jsonl``; not the last one of a killed run, if it was cut."""
    records = []
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return records


def read_config_of(run: Path) -> RunConfig:
    """The configuration of a run folder. ``ValueError`` for another folder, or what another version wrote."""
    if not run.is_dir():
        raise ValueError(f"There is no folder {run}: give the folder of a run, such as runs/emoji_styles-fedavg-noto.")
    if not (run / "config.json").exists():
        raise ValueError(f"{run} has no config.json: give the folder of a run.")
    found = read_json(run / "config.json")
    found.pop("schema", None)
    try:
        return RunConfig(**found)
    except TypeError as error:
        raise ValueError(
            f"{run} holds a configuration of another version ({error}): read it with the version that wrote it."
        ) from None


def environment() -> dict[str, Any]:
    """What the numbers of a run may depend on beside its configuration."""
    flags: Any = jax.config
    return {
        "jax": jax.__version__,
        "python": platform.python_version(),
        "platform": jax.default_backend(),
        "devices": [d.device_kind for d in jax.devices()],
        "threefry_partitionable": bool(flags.jax_threefry_partitionable),
        "versions": {name: importlib.metadata.version(name) for name in PACKAGES},
    }


class RunFolder:
    """``runs/<name>/``: ``config.json``, ``cells.json``, ``splits.json``, ``model.json``, ``metrics.jsonl``,
    ``result.json``, ``table.md``, ``checkpoints/<cell>/<round>``, ``stages/<stage>/<cell>/<block>``.

    Of several processes that share it only the first writes. Raises ``ValueError`` when the folder holds another
    configuration, the same one without ``resume``, or something else, or cannot be written.
    """

    def __init__(self, path: Path, config: RunConfig, resume: bool = False, overwrite: bool = False):
        self.path, self.config = Path(path), config
        wanted = {"schema": SCHEMA, **dataclasses.asdict(config)}
        try:
            is_run = self._check(wanted, resume, overwrite)
            sharding.wait("the run folder is checked")
            if sharding.is_first():
                self._make(wanted, is_run and overwrite)
            sharding.wait("the run folder is made")
        except OSError as error:
            raise ValueError(f"{self.path} cannot be a run folder ({error.strerror}): choose another --out.") from None

    def _check(self, wanted: dict[str, Any], resume: bool, overwrite: bool) -> bool:
        """Whether there is a run; in every process alike."""
        is_run = (self.path / "config.json").exists()
        # hidden files do not count: a run killed in its first write has left one
        if not is_run and self.path.exists() and any(p.name[0] != "." for p in self.path.iterdir()):
            raise ValueError(f"{self.path} exists and is no run folder: choose another --out.")
        if is_run and not overwrite:
            found = read_json(self.path / "config.json")
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
        return is_run

    def _make(self, wanted: dict[str, Any], replace: bool) -> None:
        if replace:
            # out of the way in one step: a run killed in the middle of deleting leaves no half of the old one
            here = self.path.resolve()
            old = here.with_name(f".{here.name}.old")
            shutil.rmtree(old, ignore_errors=True)
            shutil.rmtree(here.rename(old))
        self.path.mkdir(parents=True, exist_ok=True)
        write_atomically(self.path / "config.json", json.dumps(wanted, indent=2) + "\n")

    def keep_splits(self, splits: dict[str, Any]) -> None:
        """Write ``splits.json``. ``ValueError`` when there is another: the data are not what the run began with."""
        path = self.path / "splits.json"
        if path.exists() and (found := read_json(path)) != splits:
            seed = next(s for s in {**found, **splits} if found.get(s) != splits.get(s))
            raise ValueError(
                f"{self.path} was begun with another split of the data (seed {seed}): restore the files that were added, "
                "removed or renamed since, or pass --overwrite."
            )
        if sharding.is_first():
            write_atomically(path, json.dumps(splits, indent=2) + "\n")

    def keep_cells(self, cells: Sequence[Cell]) -> None:
        """Write ``cells.json``: what is going to be trained, for tables to know what is missing."""
        if sharding.is_first():
            write_atomically(
                self.path / "cells.json", json.dumps({"cells": [cell.as_record() for cell in cells]}) + "\n"
            )

    def keep_model(self, cells: Sequence[Cell], description: dict[str, Any]) -> None:
        """Write ``model.json``: what the networks of these cells are rebuilt from, where the data are not
        (``models.load_model``). Cells of other networks, in a sweep, keep what they have."""
        if not sharding.is_first():
            return
        path, names = self.path / "model.json", [cell.name for cell in cells]
        found = read_json(path)["networks"] if path.exists() else []
        others = [network | {"cells": [n for n in network["cells"] if n not in names]} for network in found]
        networks = [network for network in others if network["cells"]] + [{"cells": names, **description}]
        write_atomically(path, json.dumps({"schema": SCHEMA, "networks": networks}, indent=2) + "\n")

    def finished(self) -> list[dict[str, Any]]:
        """Cells of ``result.json``, which need not be run again."""
        path = self.path / "result.json"
        return read_json(path)["cells"] if path.exists() else []

    def keep_metrics(self, rounds: dict[str, int]) -> None:
        """Drop lines of ``metrics.jsonl`` that lie beyond a cell's checkpoint: that work is going to be repeated."""
        if not sharding.is_first():
            return
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
        if not sharding.is_first():
            return
        with open(self.path / "metrics.jsonl", "a") as file:
            file.write(json.dumps(_strict({"cell": cell.name, **cell.as_record(), **record})) + "\n")

    def checkpoints(self, cell: Cell, stage: str | None = None) -> Checkpoints:
        """The checkpoints of a cell; or of a stage of its method's work before round 1."""
        return Checkpoints(self.path.joinpath(*(("checkpoints",) if stage is None else ("stages", stage)), cell.name))


def _strict(value: Any) -> Any:
    """The same with null for NaN and infinity (the loss of a model about to break down), which JSON does not have."""
    if isinstance(value, dict):
        return {k: _strict(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_strict(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class Progress(NamedTuple):
    """Where a cell stands: everything that continuing it to the same bits takes."""

    arrays: PyTree  # server state, best variables so far, key data
    notes: dict[str, Any]  # round, best record, seconds


class Checkpoints:
    """Orbax checkpoints of one cell, the newest two kept; an unfinished write is never taken for a checkpoint."""

    def __init__(self, path: Path):
        options = ocp.CheckpointManagerOptions(max_to_keep=2, enable_async_checkpointing=False)
        # handlers are named so that a new process can read shapes before it restores
        handlers = {"arrays": ocp.StandardCheckpointHandler(), "notes": ocp.JsonCheckpointHandler()}
        self.path = path
        self.manager = ocp.CheckpointManager(path.absolute(), options=options, item_handlers=handlers)

    def latest(self) -> int | None:
        """The round of the newest checkpoint."""
        return self.manager.latest_step()

    def save(self, progress: Progress) -> None:
        """Write a checkpoint named by its round."""
        arguments = ocp.args.Composite(
            arrays=ocp.args.StandardSave(_named(progress.arrays)), notes=ocp.args.JsonSave(progress.notes)
        )
        self.manager.save(progress.notes["round"], args=arguments)

    def check(self, template: PyTree) -> None:
        """``ValueError`` when the newest checkpoint, if there is one, has other arrays than ``template``."""
        latest = self.latest()
        if latest is None:
            return
        wanted = {k: tuple(v.shape) for k, v in _named(template).items()}
        try:
            stored = {k: tuple(v.shape) for k, v in self.manager.item_metadata(latest)["arrays"].items()}
        except Exception as error:  # as many types as there are ways to damage a folder
            raise self._unusable(f"cannot be read ({type(error).__name__})") from error
        for name in sorted({*wanted, *stored}):
            if stored.get(name) != wanted.get(name):
                raise self._unusable(f"holds {name} of shape {stored.get(name)}, but this run needs {wanted.get(name)}")

    def restore(self, template: PyTree) -> Progress:
        """The newest checkpoint, in the structure of ``template``.

        Raises ``ValueError`` when it does not fit: saved by another version, or damaged.
        """
        self.check(template)
        arguments = ocp.args.Composite(arrays=ocp.args.StandardRestore(_named(template)), notes=ocp.args.JsonRestore())
        try:
            restored = self.manager.restore(self.latest(), args=arguments)
        except Exception as error:
            raise self._unusable(f"cannot be read ({type(error).__name__})") from error
        leaves = [restored["arrays"][name] for name in _named(template)]
        return Progress(jax.tree.unflatten(jax.tree.structure(template), leaves), restored["notes"])

    def _unusable(self, what: str) -> ValueError:
        return ValueError(
            f"The checkpoint in {self.path} {what}: continue with the version that wrote it, or delete {self.path} to "
            "run this cell again."
        )

    def close(self) -> None:
        self.manager.close()


def _named(tree: PyTree) -> dict[str, Any]:
    """Leaves by a readable path, in leaf order."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in jax.tree.leaves_with_path(tree)
    }
