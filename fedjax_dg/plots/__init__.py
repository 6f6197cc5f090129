"""Figures of runs, one file a kind, drawn with matplotlib (``pip install 'fedjax-dg[plots]'``)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fedjax_dg.errors import unknown
from fedjax_dg.plots.accuracy import draw_accuracy, draw_domains, plot_accuracy
from fedjax_dg.plots.alignment import draw_alignment, plot_alignment
from fedjax_dg.plots.common import Run, load_matplotlib, open_run, records_of, save, svg_of
from fedjax_dg.plots.features import draw_features
from fedjax_dg.plots.grams import draw_grams
from fedjax_dg.plots.latents import plot_latents
from fedjax_dg.plots.partition import draw_partition
from fedjax_dg.plots.sweeps import draw_sweep


class Kind(NamedTuple):
    """A kind of figure."""

    #: runs -> Figure; ``ValueError``, one sentence, where it does not apply or what it needs is not there.
    draw: Callable[[Sequence[Run]], Any]
    title: str
    together: bool = False  # several runs in one figure


KINDS = {
    "accuracy": Kind(
        draw_accuracy, "Learning curves: mean over seeds, band from the lowest to the highest", together=True
    ),
    "domains": Kind(draw_domains, "Selected models on every held-out domain", together=True),
    "sweep": Kind(draw_sweep, "What the swept hyper-parameters do"),
    "partition": Kind(draw_partition, "Which client holds what"),
    "alignment": Kind(draw_alignment, "What alignment and RegMean did, layer by layer"),
    "grams": Kind(draw_grams, "Spectra of what the dense layers read, station by station"),
    "features": Kind(draw_features, "What the head reads, by t-SNE"),
}


class Drawn(NamedTuple):
    """A figure, or why there is none."""

    kind: str
    name: str  # of its file
    where: Path  # the folder of the run, or the first of several
    figure: Any  # None where it does not apply
    why_not: str = ""


def draw(runs: Sequence[Run], kinds: Sequence[str] | None = None) -> Iterator[Drawn]:
    """Figures of run folders, by default of all ``KINDS``, one after another as they are drawn.

    Several runs: together where a kind can, else each run's own with the run's name in the file's. Raises ``ValueError`` for
    an unknown kind and where matplotlib is missing.
    """
    load_matplotlib()
    for name in kinds or ():
        if name not in KINDS:
            raise unknown("kind of figure", name, KINDS)
    for name in kinds or KINDS:
        kind = KINDS[name]
        for group in [list(runs)] if kind.together else [[run] for run in runs]:
            file = name if kind.together or len(runs) == 1 else f"{name}-{group[0].name}"
            try:
                yield Drawn(name, file, group[0].path, kind.draw(group))
            except ValueError as error:
                yield Drawn(name, file, group[0].path, None, str(error))


def plot(
    runs: Sequence[str | Path], out: str | Path | None = None, kinds: Sequence[str] | None = None
) -> Iterator[Path | Drawn]:
    """Draw run folders' figures as ``.png`` and ``.svg``: the paths as they are written, and a ``Drawn`` for what is not.

    Each run's in its folder; with ``out`` all of them there, several runs in one figure where a kind can. Raises
    ``ValueError`` for a folder that is no run, an unknown kind, and where matplotlib is missing.
    """
    opened = [open_run(run) for run in runs]
    for group in [[run] for run in opened] if out is None else [opened]:
        for drawn in draw(group, kinds):
            if drawn.figure is None:
                yield drawn
            else:
                yield from save(drawn.figure, Path(out) if out is not None else drawn.where, drawn.name)


__all__ = [
    "KINDS",
    "Drawn",
    "Kind",
    "Run",
    "draw",
    "open_run",
    "plot",
    "plot_accuracy",
    "plot_alignment",
    "plot_latents",
    "records_of",
    "svg_of",
]
