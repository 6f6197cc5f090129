"""``fedjax-dg plot``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console

from fedjax_dg.plots import plot


def plot_command(console: Console):
    """The command."""

    def plot_runs(
        runs: Annotated[tuple[str, ...], tyro.conf.Positional],
        out: str | None = None,
        kinds: tuple[str, ...] = (),
    ) -> int:
        """Draw the figures of runs as PNG and SVG: learning curves, domains, sweep, partition, alignment, Grams, features.

        Args:
            runs: Run folders.
            out: Folder for all of them, several runs in one figure where a kind can; by default each run's own folder.
            kinds: accuracy, domains, sweep, partition, alignment, grams, features; by default all that apply.
        """
        if not runs:
            raise ValueError("No run folder is given: name one or more, such as runs/emoji_styles-fedavg-fluent_mono.")
        written, skipped = 0, []
        for found in plot(runs, out, kinds or None):
            if isinstance(found, Path):
                written += 1
                console.print(f"Wrote {found}", highlight=False, soft_wrap=True)
            else:
                skipped.append(found)
                console.print(f"Skipped {found.name}: {found.why_not}", highlight=False, soft_wrap=True, markup=False)
        if not written:
            raise ValueError(f"No figure was drawn of {', '.join(runs)}: {skipped[0].why_not}")
        return 0

    return plot_runs
