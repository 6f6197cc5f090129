"""Sweeps: many settings of a run's options x held-out domains x seeds, in as few compiled programs as their sizes allow."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import tempfile
import tomllib
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console

from fedjax_dg import loggers
from fedjax_dg.cells import check_grids, run_grid
from fedjax_dg.config import (
    RUN_OPTIONS,
    RunConfig,
    aggregator_numbers,
    aggregator_options,
    algorithm_options,
    check,
    names,
    numbers_of,
    relevant,
    settled,
    typed_option,
)
from fedjax_dg.errors import unknown
from fedjax_dg.experiment import Grid, resolve
from fedjax_dg.progress import ProgressBars
from fedjax_dg.results import Cell, RunFolder
from fedjax_dg.tables import render

Setting = dict[str, Any]

#: What all cells of a sweep have in common, as their table would mean nothing otherwise.
NOT_SWEPT = ("dataset", "data_dir", "examples_per_domain", "held_out", "seeds", "selection", "split", "stream")
NOT_SWEPT += ("validation_fraction",)
#: How a hyper-parameter of a random search is drawn, from (generator, its two bounds or its choices).
DRAWS: dict[str, Callable[[np.random.Generator, Sequence[Any]], Any]] = {
    "uniform": lambda rng, bounds: float(rng.uniform(*bounds)),
    "log_uniform": lambda rng, bounds: float(np.exp(rng.uniform(*np.log(bounds)))),
    "int_uniform": lambda rng, bounds: int(rng.integers(bounds[0], bounds[1] + 1)),
    "choice": lambda rng, choices: choices[int(rng.integers(len(choices)))],
}


class Sweep(NamedTuple):
    """What a sweep found; its run folder holds the same."""

    config: RunConfig
    settings: list[Setting]
    cells: list[dict[str, Any]]  # as in ``result.json``
    failed: list[dict[str, Any]]
    folder: Path

    @property
    def axes(self) -> dict[str, list[Any]]:
        """What the axes of ``scores`` stand for."""
        found = self.cells + self.failed
        return {
            "aggregator": names(self.config.aggregator),
            "setting": self.settings,
            "held_out": list(dict.fromkeys(cell["held_out"] for cell in found)),
            "seed": list(range(self.config.seeds)),
        }

    def scores(self, name: str = "accuracy") -> np.ndarray:
        """A score of every cell, [server rule, setting, held-out domain, seed]; NaN where there is none.

        Settings that make no difference to a rule share its cell. ``name``: as in ``result.json``'s cells.
        """
        found = {
            (c["algorithm"], c["aggregator"], tuple(c.get("hparams", {}).items()), c["held_out"], c["seed"]): c[name]
            for c in self.cells
        }

        def score(rule, setting, held_out, seed):
            config = settled(self.config, setting)
            value = found.get((config.algorithm, rule, relevant(config, rule, setting), held_out, seed))
            return np.nan if value is None else value

        axes = self.axes
        flat = [score(*index) for index in itertools.product(*axes.values())]
        return np.array(flat, float).reshape([len(values) for values in axes.values()])

    def table(self, selection: str | None = None, settings: str = "best", format: str = "text", **options: Any) -> str:
        """The table of accuracies, as ``fedjax-dg table`` prints it (``tables.render``)."""
        return render([self.folder], selection=selection, settings=settings, format=format, **options)


def sweep(
    config: RunConfig,
    settings: Sequence[Mapping[str, Any]] | None = None,
    *,
    grid: Mapping[str, Any] | None = None,
    random: Mapping[str, Any] | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    overwrite: bool = False,
    jobs: int | None = None,
    at_once: int | None = None,
    devices: Sequence[Any] | None = None,
    report: Callable[[str, Cell, Any], None] = lambda event, cell, value: None,
    progress: bool = False,
    log: Sequence[str] = (),
) -> Sweep:
    """Train every setting x server rule x held-out domain x seed of a configuration.

    Settings are given as a list, or as a ``grid`` {option: values} whose product is taken, or drawn at ``random`` (see
    ``drawn``); of several of these the product. An option is a hyper-parameter (those of ``--set``, ``client_lr``) or one
    of ``RunConfig``. Settings that differ in traced hyper-parameters alone share one compiled program, which computes
    ``at_once`` of them side by side (``cells.default_at_once``), ``jobs`` programs at a time; each other combination
    has a program of its own. A configuration's seeds draw partitions, starts and batches and are the same for all settings;
    ``random`` has a seed of its own.

    ``out``: the run folder (None: a temporary one); ``resume`` goes on with one that was killed, or adds settings to it.
    ``progress``: show bars, also in notebooks, or lines where there is no terminal. ``log``: names of ``loggers.LOGGERS``.
    Raises ``ValueError``, one sentence, for what is wrong with any setting before anything is trained.
    """
    config, log = check(config), loggers.chosen(log)
    settings = product(settings, grid, random, config)
    grids = grids_of(config, settings, devices)
    check_grids(grids, at_once)
    path = tempfile.mkdtemp(prefix="fedjax_dg_") if out is None else out
    folder = RunFolder(Path(path), config, resume, overwrite or out is None)
    console = Console()
    with contextlib.ExitStack() as stack:
        if progress:
            report = loggers.together(stack.enter_context(ProgressBars(console, grids)), report)
        report = stack.enter_context(loggers.opened(log, folder.path, report, console.print))
        cells, failed = run_grid(grids, folder, report, jobs, at_once)
    return Sweep(config, [dict(s) for s in settings], cells, failed, folder.path)


def product(
    settings: Sequence[Mapping[str, Any]] | None,
    grid: Mapping[str, Any] | None,
    random: Mapping[str, Any] | None,
    config: RunConfig,
) -> list[Setting]:
    """All combinations of the settings given, those of a grid and those drawn. ``ValueError`` if there are none."""
    axes: list[Sequence[Mapping[str, Any]]] = [] if settings is None else [list(settings)]
    for name, values in (grid or {}).items():
        if not isinstance(values, list | tuple | np.ndarray) or len(values) == 0:
            raise ValueError(f"{name} = {values!r} in a grid is no list of values: give one, such as [0.01, 0.1].")
        axes.append([{name: value.item() if isinstance(value, np.generic) else value} for value in values])
    if random is not None:
        axes.append(drawn(random, config))
    combined = [{k: v for part in parts for k, v in part.items()} for parts in itertools.product(*axes)]
    twice = [name for name, number in _counts(axes).items() if number > 1]
    if twice:
        raise ValueError(f"{', '.join(twice)} is swept in more than one way: name each option once.")
    if not combined or not any(combined):
        raise ValueError("Nothing is swept: give a list of settings, a grid or a random search.")
    return list({json.dumps(setting, sort_keys=True): setting for setting in combined}.values())


def _counts(axes: Sequence[Sequence[Mapping[str, Any]]]) -> dict[str, int]:
    """In how many axes each option is."""
    options = [name for axis in axes for name in {name for setting in axis for name in setting}]
    return {name: options.count(name) for name in options}


def drawn(space: Mapping[str, Any], config: RunConfig) -> list[Setting]:
    """Settings of a random search: ``count`` of them, hyper-parameter by hyper-parameter.

    ``space``: {option: {rule: bounds}} with a rule of ``DRAWS``, and ``count``, ``hparams_seed`` (0), ``defaults_first``
    (true: the first setting is the configuration's own, as DomainBed's hparams_seed 0). A draw depends on the seed, the
    option's name and the setting's number alone, so more settings or options leave it as it was; it has nothing to do with
    the seeds that train. Raises ``ValueError`` for anything else.
    """
    options = dict(space)
    count, seed, first = options.pop("count", None), options.pop("hparams_seed", 0), options.pop("defaults_first", True)
    if type(count) is not int or count < 1:
        raise ValueError(f"count={count!r} of a random search is not a positive whole number: say how many settings.")
    if type(seed) is not int or seed < 0 or not isinstance(first, bool):
        raise ValueError(
            f"hparams_seed={seed!r}, defaults_first={first!r}: give a whole number from 0, and true or false."
        )
    settings: list[Setting] = [{} for _ in range(count)]
    for name, rule in options.items():
        kind, values = next(iter(rule.items())) if isinstance(rule, Mapping) and len(rule) == 1 else (None, None)
        if kind not in DRAWS or not isinstance(values, Sequence) or isinstance(values, str):
            raise ValueError(
                f"{name} = {rule!r} says not how to draw it: write {{ log_uniform = [0.001, 0.1] }}, or with one of "
                f"{', '.join(DRAWS)}."
            )
        low = 0.0 if kind == "log_uniform" else -np.inf
        if kind != "choice" and (len(values) != 2 or not low < values[0] <= values[1]) or len(values) == 0:
            raise ValueError(f"{name} = {rule!r} has no such bounds: give the smallest, then the largest value.")
        for number, setting in enumerate(settings):
            rng = np.random.default_rng([seed, zlib.crc32(name.encode()), number])
            setting[name] = own_value(config, name) if first and number == 0 else DRAWS[kind](rng, values)
    return settings


def own_value(config: RunConfig, name: str) -> Any:
    """The value that a configuration gives an option. ``ValueError`` when it has none of that name."""
    defaults = {k: getattr(config, k) for k in RUN_OPTIONS} | algorithm_options(config.algorithm)
    for rule in (*names(config.aggregator), config.station_aggregator):
        defaults |= aggregator_options(rule)
    if name not in defaults:
        raise unknown(f"option of {config.algorithm} or {config.aggregator}", name, defaults)
    return config.settings.get(name, defaults[name])


def checked(config: RunConfig, setting: Mapping[str, Any]) -> tuple[RunConfig, Setting]:
    """The configuration of a setting, and the setting with its values typed. ``ValueError`` for what is wrong with it."""
    for name in setting:
        if name in NOT_SWEPT:
            raise ValueError(f"{name} cannot be swept: all cells of a sweep have it in common; run one sweep for each.")
    typed = {k: typed_option(k, v, "a sweep") if k in RUN_OPTIONS else v for k, v in setting.items()}
    found = check(settled(config, typed))
    return found, {k: v if k in RUN_OPTIONS else found.settings[k] for k, v in typed.items()}


def grids_of(
    config: RunConfig,
    settings: Sequence[Mapping[str, Any]],
    devices: Sequence[Any] | None = None,
    workers: int = 0,
    report: Callable[[int, int], None] = lambda done, total: None,
) -> list[Grid]:
    """The cells of a sweep: a grid for each combination of options that are no traced hyper-parameters."""
    together: dict[str, tuple[RunConfig, list[Setting]]] = {}
    for setting in settings:
        found, typed = checked(config, setting)
        traced = {"client_lr", *numbers_of(found, names(found.aggregator)[0]).algorithm._fields}
        for rule in (*names(found.aggregator), found.station_aggregator):
            traced |= aggregator_numbers(rule).keys()
        common = check(settled(config, {k: v for k, v in typed.items() if k not in traced}))
        key = json.dumps(dataclasses.asdict(common), sort_keys=True)
        together.setdefault(key, (common, []))[1].append(typed)
    shared: dict[tuple, Any] = {}
    grids = [resolve(common, devices, workers, report, own, shared) for common, own in together.values()]
    if any(one.splits != grids[0].splits for one in grids):
        raise ValueError("The settings draw different validation examples, so they cannot be compared: give the split.")
    return grids


def is_sweep(path: str | Path) -> bool:
    """Whether a TOML file has tables of a sweep."""
    return "sweep" in tomllib.loads(Path(path).read_text())


def read_sweep(path: str | Path) -> dict[str, Any]:
    """What a file sweeps, as arguments of ``product``: its tables [sweep.grid], [sweep.list], [sweep.random].

    [sweep.list] has lists of one length; the settings are their first values, their second ones, ... Raises ``ValueError``
    for a file without them.
    """
    found = tomllib.loads(Path(path).read_text()).get("sweep")
    allowed = ("grid", "list", "random")
    if not isinstance(found, dict) or not found or not all(isinstance(table, dict) for table in found.values()):
        raise ValueError(
            f"{path} says not what to sweep: add a table [sweep.grid], such as client_lr = [0.01, 0.1] below it."
        )
    for name in found:
        if name not in allowed:
            raise unknown(f"table [sweep.NAME] in {path}", name, allowed)
    columns = found.get("list", {})
    if not all(isinstance(values, list) for values in columns.values()) or len({len(v) for v in columns.values()}) > 1:
        raise ValueError(f"[sweep.list] in {path} needs lists of one length: setting i has the i-th value of each.")
    rows = [dict(zip(columns, values)) for values in zip(*columns.values())] if columns else None
    return {"settings": rows, "grid": found.get("grid"), "random": found.get("random")}
