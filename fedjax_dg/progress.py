"""Progress of runs: bars on a terminal and in notebooks, lines elsewhere."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

if TYPE_CHECKING:
    from fedjax_dg.experiment import Grid
    from fedjax_dg.results import Cell


def shows_bars(console: Console) -> bool:
    """Whether bars can move there: on a terminal, and in a notebook that has ipywidgets, as Colab does."""
    return console.is_terminal or (console.is_jupyter and importlib.util.find_spec("ipywidgets") is not None)


@contextlib.contextmanager
def round_bar(rounds: int, done: int = 0, console: Console | None = None) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Context: a bar over the rounds of one run, or a line for every tenth of them; gives ``report(record)``."""
    console = console or Console()
    columns = TextColumn("round"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[scores]}")
    bar = Progress(*columns, TimeRemainingColumn(), console=console, disable=not shows_bars(console))
    task = bar.add_task("", total=rounds, completed=done, scores="")
    printed = 10 * done // max(rounds, 1)

    def report(record):
        nonlocal printed
        bar.update(task, completed=record["round"], scores=told(record))
        tenth = 10 * record["round"] // rounds
        if bar.disable and tenth > printed:
            printed = tenth
            console.print(f"round {record['round']} of {rounds}: {told(record)}", highlight=False)

    with bar:
        yield report


def told(record: dict[str, Any]) -> str:
    """Loss and accuracies of an evaluated round, in words."""
    words = [f"loss {record['train_loss']:.3f}"]
    for name, key in (("held-out", "accuracy"), ("source", "source_accuracy")):
        words += [f"{name} {100 * record[key]:.1f} %"] if record.get(key) is not None else []
    return "  ".join(words)


class CountBar:
    """Context: a bar, or some lines; gives a ``report`` of how many of how many are done."""

    def __init__(self, console: Console, what: str, quiet: bool = False, unit: str = "images"):
        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
        self.bar = Progress(*columns, console=console, disable=quiet or not shows_bars(console), transient=True)
        self.console, self.what, self.unit, self.printed = console, what, unit, 0
        self.lines = not quiet and not shows_bars(console)

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


class ProgressBars:
    """Context: bars, or a line per finished cell; gives the ``report`` of ``run_grid``."""

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
            disable=not shows_bars(console),
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
            name += "".join(f", {option}={value}" for option, value in cell.setting)
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
            step = value["round"] - self.bars.tasks[self.bars.task_ids.index(self.tasks[cell])].completed
            self.bars.update(self.tasks[cell], completed=value["round"], scores=told(value))
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
