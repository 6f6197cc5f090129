"""A run's numbers to TensorBoard, Weights & Biases or MLflow, beside ``metrics.jsonl``, which always has them all.

A logger is the function that ``cells.run_grid`` calls, ``report(event, cell, value)``, made by a context manager of
the run's folder. Each writes into that folder and nowhere else, unless the user's own environment names a server
(``WANDB_MODE``, ``MLFLOW_TRACKING_URI``).
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedjax_dg import sharding
from fedjax_dg.errors import unknown
from fedjax_dg.results import Cell, read_json, write_atomically

Report = Callable[[str, Cell, Any], None]

#: So many failures one after another, and a logger is left alone: each may have waited for a network.
MOST_FAILURES = 3


class Sink(NamedTuple):
    """Where the numbers of one cell go."""

    write: Callable[[dict[str, float], int], None]  # numbers by name, and their round
    end: Callable[[str, dict[str, float], str], None]  # done, failed or stopped; numbers of the result; what failed


@contextlib.contextmanager
def tensorboard(folder: str | Path) -> Iterator[Report]:
    """Event files in ``tensorboard/<cell>``, for ``tensorboard --logdir FOLDER/tensorboard``."""
    library = _library("tensorboardX", "tensorboard")

    def open_sink(cell: Cell, done: int) -> Sink:
        # what lies beyond the checkpoint that a cell goes on from was repeated, or will be
        purge = {"purge_step": done + 1} if done else {}
        writer = library.SummaryWriter(str(Path(folder) / "tensorboard" / cell.name), **purge)

        def write(values, step):
            for name, value in values.items():
                writer.add_scalar(name, value, step)

        def end(how, result, error):
            write({f"result/{name}": value for name, value in result.items()}, int(result.get("selected_round", 0)))
            if error:
                writer.add_text("error", error)
            writer.close()

        return Sink(write, end)

    with by_cell(open_sink) as report:
        yield report


@contextlib.contextmanager
def wandb(folder: str | Path, project: str | None = None, mode: str | None = None) -> Iterator[Report]:
    """A W&B run per cell in ``wandb/``, grouped by the folder's name; a resumed cell goes on in its own run.

    ``project`` is ``WANDB_PROJECT`` or ``fedjax_dg`` where none is given, ``mode`` ``WANDB_MODE`` or ``offline``: nothing is
    sent before ``wandb sync FOLDER/wandb/offline-run-*``, unless the environment says ``WANDB_MODE=online``.
    """
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # crash reports go over the network, offline too
    library = _library("wandb", "wandb")
    path, known = Path(folder), Path(folder) / "wandb_runs.json"
    runs = _known(known)

    def open_sink(cell: Cell, done: int) -> Sink:
        run = library.init(
            dir=str(path),
            project=project or os.environ.get("WANDB_PROJECT") or "fedjax_dg",
            mode=mode or os.environ.get("WANDB_MODE") or "offline",
            group=path.name,
            name=cell.name,
            id=runs.get(cell.name),
            resume="allow",
            config=_settings(path, cell),
            reinit="create_new",  # several cells at a time
            settings=library.Settings(silent=True, console="off", init_timeout=30),  # the terminal has our bars
        )
        runs[cell.name] = run.id
        write_atomically(known, json.dumps(runs, indent=2) + "\n")
        run.define_metric("*", step_metric="round")

        def end(how, result, error):
            run.summary.update({f"result/{name}": value for name, value in result.items()})
            if error:
                run.summary.update({"error": error})
            run.finish(exit_code=0 if how == "done" else 1)

        return Sink(lambda values, step: run.log({"round": step, **values}), end)

    with by_cell(open_sink) as report:
        yield report


@contextlib.contextmanager
def mlflow(folder: str | Path, experiment: str | None = None, uri: str | None = None) -> Iterator[Report]:
    """An MLflow run per cell; a resumed cell goes on in its own run.

    ``uri`` is ``MLFLOW_TRACKING_URI`` or the data base ``mlflow.db`` in the folder where none is given, ``experiment``
    ``MLFLOW_EXPERIMENT_NAME`` or ``fedjax_dg``. See them with ``mlflow ui --backend-store-uri sqlite:///FOLDER/mlflow.db``.
    """
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # it goes over the network, without a server too
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")  # its own 7 hold a run up for four minutes a report
    library, entities = _library("mlflow", "mlflow"), _library("mlflow.entities", "mlflow")
    path, known = Path(folder), Path(folder) / "mlflow_runs.json"
    runs = _known(known)
    uri = uri or os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{path.absolute() / 'mlflow.db'}"
    title = experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME") or "fedjax_dg"
    name_of = lambda name: re.sub(r"[^\w .:/-]", "_", name)  # what MLflow allows; not the % of a domain's name
    clients: list[Any] = []  # one, when it is first needed: a server may not answer

    def open_sink(cell: Cell, done: int) -> Sink:
        if not clients:
            clients.append(library.MlflowClient(uri))
        (client,) = clients
        if (run_id := runs.get(cell.name)) is None:
            found = client.get_experiment_by_name(title)
            number = client.create_experiment(title) if found is None else found.experiment_id
            run_id = client.create_run(number, run_name=cell.name, tags={"group": path.name}).info.run_id
            runs[cell.name] = run_id
            write_atomically(known, json.dumps(runs, indent=2) + "\n")
            settings = flat(_settings(path, cell)).items()
            for params in _parts([entities.Param(name_of(k), str(v)) for k, v in settings], 100):
                client.log_batch(run_id, params=params)
        client.set_terminated(run_id, "RUNNING")

        def write(values, step):
            now = int(1000 * time.time())
            for metrics in _parts([entities.Metric(name_of(k), v, now, step) for k, v in values.items()], 1000):
                client.log_batch(run_id, metrics=metrics)

        def end(how, result, error):
            write({f"result/{name}": value for name, value in result.items()}, int(result.get("selected_round", 0)))
            if error:
                client.set_tag(run_id, "error", error)
            client.set_terminated(run_id, {"done": "FINISHED", "failed": "FAILED", "stopped": "KILLED"}[how])

        return Sink(write, end)

    with by_cell(open_sink) as report:
        yield report


LOGGERS: dict[str, Callable[..., contextlib.AbstractContextManager[Report]]] = {
    "tensorboard": tensorboard,
    "wandb": wandb,
    "mlflow": mlflow,
}
PACKAGES = {"tensorboard": "tensorboardX", "wandb": "wandb", "mlflow": "mlflow"}


def chosen(names: Sequence[str]) -> list[str]:
    """The names, each once; ``ValueError`` for one that is unknown, or whose package is not installed."""
    for name in names:
        if name not in LOGGERS:
            raise unknown("logger", name, LOGGERS)
        _library(PACKAGES[name], name)
    return list(dict.fromkeys(names))


@contextlib.contextmanager
def opened(
    names: Sequence[str], folder: str | Path, first: Report | None = None, tell: Callable[[str], Any] = print
) -> Iterator[Report]:
    """Context: ``first`` (a progress bar) and the named loggers as one report.

    A logger that fails stops nothing: its first failure is told, the rest are counted, and told in the end. Only the first
    of several processes logs. Raises as ``chosen`` does.
    """
    names = chosen(names) if sharding.is_first() else []
    with contextlib.ExitStack() as stack:
        reports = [first] if first is not None else []
        reports += [stack.enter_context(guarded(name, LOGGERS[name](folder), tell)) for name in names]
        yield together(*reports)


def together(*reports: Report) -> Report:
    """One report that tells all of these, in their order; from one thread at a time."""
    lock = threading.Lock()

    def report(event: str, cell: Cell, value: Any) -> None:
        with lock:
            for each in reports:
                each(event, cell, value)

    return report


@contextlib.contextmanager
def guarded(
    name: str, logger: contextlib.AbstractContextManager[Report], tell: Callable[[str], Any] = print
) -> Iterator[Report]:
    """Context: a logger whose failures stop nothing.

    The first is told, all are counted, and ``MOST_FAILURES`` one after another are the last: the logger is left alone then.
    """
    inner = logger.__enter__()
    told, missed, in_a_row = False, 0, 0

    def attempt(call: Callable, *arguments: Any) -> bool:
        nonlocal told
        try:
            call(*arguments)
            return True
        except Exception as error:  # of a network, a disk, a server: whatever it is, the run is worth more
            if not told:
                text = " ".join(str(error).split())
                tell(f"Logging to {name} failed ({type(error).__name__}: {text[:200]}); the run goes on.")
            told = True
            return False

    def report(event: str, cell: Cell, value: Any) -> None:
        nonlocal missed, in_a_row
        if in_a_row < MOST_FAILURES and attempt(inner, event, cell, value):
            in_a_row = 0
        else:
            missed, in_a_row = missed + 1, in_a_row + 1

    try:
        yield report
    finally:
        attempt(logger.__exit__, None, None, None)
        if missed:
            tell(f"Logging to {name}: {missed} reports are missing there; metrics.jsonl has all numbers.")


@contextlib.contextmanager
def by_cell(open_sink: Callable[[Cell, int], Sink]) -> Iterator[Report]:
    """Context: a report that opens a sink for every cell it hears of (``open_sink(cell, rounds done)``), and ends it."""
    sinks: dict[str, Sink] = {}

    def report(event: str, cell: Cell, value: Any) -> None:
        if event == "compiled":  # of a program, which several cells share
            return
        if cell.name not in sinks:
            sinks[cell.name] = open_sink(cell, value if event == "start" else 0)
        sink = sinks[cell.name]
        if event == "record":
            sink.write(numbers(value), value["round"])
        elif event == "stage":
            name, done, _, told = value
            if told:
                sink.write({f"{name}/{key}": number for key, number in numbers(told).items()}, done)
        elif event in ("done", "failed"):
            del sinks[cell.name]
            done = event == "done"
            sink.end(event, numbers(value) if done else {}, "" if done else value)

    try:
        yield report
    finally:
        with contextlib.ExitStack() as stack:  # all of them, though one may fail
            for sink in sinks.values():
                stack.callback(sink.end, "stopped", {}, "")


def numbers(record: dict[str, Any]) -> dict[str, float]:
    """The finite numbers of a record by path; of several (one a station) their mean; settings and the round are left out.

    >>> numbers({"round": 3, "accuracy": 0.5, "merge": {"fot": {"conv0": [1.0, 0.5]}}, "held_out": "noto"})
    {'accuracy': 0.5, 'merge/fot/conv0': 0.75}
    """
    out = {}
    for name, value in flat(record).items():
        if name in ("round", "seed") or name.startswith("hparams/"):
            continue
        try:
            values = np.asarray(value, np.float64)
        except (TypeError, ValueError):  # no number
            continue
        if values.size and not isinstance(value, str) and np.isfinite(values).all():
            out[name] = float(values.mean())
    return out


def flat(tree: Any, path: str = "") -> dict[str, Any]:
    """Leaves of nested dictionaries by their path."""
    if not isinstance(tree, dict):
        return {path: tree}
    return {k: v for name, each in tree.items() for k, v in flat(each, f"{path}/{name}" if path else name).items()}


def _known(path: Path) -> dict[str, str]:
    """The numbers that a service gave to the runs of cells: kept in the run folder, so that a resumed cell finds its own."""
    return read_json(path) if path.exists() else {}


def _settings(folder: Path, cell: Cell) -> dict[str, Any]:
    """The run's configuration, where it has one, and which cell this is."""
    path = folder / "config.json"
    return (read_json(path) if path.exists() else {}) | cell.as_record()


def _parts(items: list, size: int) -> list[list]:
    return [items[i : i + size] for i in range(0, len(items), size)]


def _library(package: str, extra: str) -> Any:
    try:
        return importlib.import_module(package)
    except ImportError:
        raise ValueError(f"Logging to {extra} needs {package}: run pip install 'fedjax-dg[{extra}]'.") from None
