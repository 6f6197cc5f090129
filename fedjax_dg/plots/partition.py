"""Which client holds what."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Int

from fedjax_dg.datasets import Domains
from fedjax_dg.federation import Deal
from fedjax_dg.plots.common import Run, load_matplotlib

MOST_NAMED = 40  # classes with a name at the axis
MOST_CLIENTS = 14  # with numbers in their places


def draw_partition(runs: Sequence[Run]) -> Any:
    """Training examples of every client by domain and by class, stations apart, for the first held-out domain and seed 0.

    Colour is the number of examples; grey where there is none. Needs the data set.
    """
    (run,) = runs
    held_out = run.config.held_out if run.config.held_out != "all" else _first_held_out(run)
    dealt = run.deal(held_out, 0)
    title = f"{run.config.dataset}, {held_out} held out, seed 0: training examples of every client"
    return draw_counts(run.data, dealt, title)


def draw_counts(domains: Domains, dealt: Deal, title: str) -> Any:
    """The figure of ``draw_partition`` for a deal."""
    matplotlib, Figure = load_matplotlib()
    stations, clients = dealt.held.shape[:2]
    width = min(16.0, max(6.5, 2.8 + 0.17 * stations * clients))
    of_kind = {
        "domain": (domains.domain, domains.domain_names),
        "class": (domains.labels, domains.class_names),
    }
    heights = [min(7.0, 0.6 + 0.27 * len(names)) for _, names in of_kind.values()]
    figure = Figure(figsize=(width, 1.3 + sum(heights)), layout="constrained")
    panels = figure.subplots(2, 1, sharex=True, height_ratios=heights)
    for axes, (kind, (values, names)) in zip(panels, of_kind.items()):
        found = counts(values, dealt, len(names))
        shown = np.ma.masked_equal(found.reshape(-1, len(names)).T, 0)  # [names, S C]
        colors = matplotlib.colormaps["cividis_r"].with_extremes(bad="0.93")
        image = axes.imshow(
            shown, aspect="auto", cmap=colors, vmin=0, vmax=max(1, found.max()), interpolation="nearest"
        )
        for edge in range(1, stations * clients):
            axes.axvline(edge - 0.5, color="white", linewidth=0.4)
        for s in range(1, stations):
            axes.axvline(s * clients - 0.5, color="black", linewidth=1.2)
        if len(names) <= MOST_NAMED:
            axes.set_yticks(range(len(names)), names, fontsize=8)
        axes.set_ylabel(kind)
        figure.colorbar(image, ax=axes, label="examples", pad=0.01)
        if stations * clients <= MOST_CLIENTS:
            for (y, x), value in np.ndenumerate(shown.filled(0)):
                red, green, blue, _ = image.cmap(image.norm(value))
                ink = "black" if not value or 0.3 * red + 0.59 * green + 0.11 * blue > 0.5 else "white"
                axes.text(x, y, str(value) if value else "", ha="center", va="center", fontsize=7, color=ink)
    centres = [(s + 0.5) * clients - 0.5 for s in range(stations)]
    panels[-1].set_xticks(centres, [str(s) for s in range(stations)], fontsize=8)
    panels[-1].tick_params(axis="x", length=0)
    panels[0].tick_params(axis="x", length=0)
    panels[-1].set_xlabel(f"station, its {clients} clients side by side" if clients > 1 else "station, of one client")
    figure.suptitle(title, fontsize=10)
    return figure


def counts(values: Int[np.ndarray, " M"], dealt: Deal, kinds: int) -> Int[np.ndarray, "S C k"]:
    """How many examples of each kind every client holds; ``values`` are the kinds of all examples of the data set."""
    out = np.zeros((*dealt.held.shape[:2], kinds), np.int64)
    for place in np.ndindex(*dealt.held.shape[:2]):
        rows = dealt.held[place]
        out[place] = np.bincount(values[rows[rows >= 0]], minlength=kinds)
    return out


def _first_held_out(run: Run) -> str:
    """The first cell's held-out domain; of a run that only starts, the data set's first domain."""
    return next((line["held_out"] for line in (*run.cells, *run.records)), run.data.domain_names[0])
