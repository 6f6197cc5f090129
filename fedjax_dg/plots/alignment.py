"""What alignment and RegMean did in a run, layer by layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedjax_dg.plots.common import Run, load_matplotlib, open_run, save

MOST_NAMED = 12  # layers in a legend


def plot_alignment(run: str | Path) -> list[Path]:
    """Draw what alignment and RegMean did in a run, layer by layer and round by round: ``alignment.png`` and ``.svg``.

    Values are means over stations and over the run's cells (seeds, held-out domains) with the same server rule. Raises
    ``ValueError`` for a folder without such records, and where matplotlib is missing.
    """
    return save(draw_alignment([open_run(run)]), Path(run), "alignment")


def draw_alignment(runs: Sequence[Run]) -> Any:
    """The figure of ``plot_alignment``."""
    matplotlib, Figure = load_matplotlib()
    (run,) = runs
    records = aligned_in(run)
    if not records:
        raise ValueError(
            f"{run.path} has no round in which layers were aligned or merged: run it with --aggregator hfedatm."
        )
    rules = list(dict.fromkeys(record["aggregator"] for record in records))
    figure = Figure(figsize=(11, 6.5 * len(rules)), layout="constrained")
    parts = figure.subfigures(len(rules), 1, squeeze=False)[:, 0]
    for part, rule in zip(parts, rules):
        _draw_rule(part, rule, [record for record in records if record["aggregator"] == rule], matplotlib.colormaps)
    return figure


def aligned_in(run: Run) -> list[dict]:
    """The records in which layers were aligned or merged by RegMean."""
    return [record for record in run.records if {"fot", "regmean"} & set(record.get("merge", {}))]


def _draw_rule(figure: Any, rule: str, records: list[dict], colormaps: Any) -> None:
    """Four panels of one server rule."""
    solves = records[-1]["merge"].get("regmean", {})
    size = sum(layer["bytes"] for layer in solves.values())
    title = f"{rule}: alignment and RegMean by layer; Grams: {size / 1e6:.2f} MB a client and server round"
    if "outputs_moved" in records[-1]["merge"]:
        moved = max(max(record["merge"]["outputs_moved"]) for record in records)
        fallbacks = sum(layer["fallback"] for r in records for layer in r["merge"].get("regmean", {}).values())
        title += (
            f"\nalignment moved logits by at most {moved:.1e} of the largest; {fallbacks:.0f} fallbacks to the mean"
        )
    figure.suptitle(title, fontsize=11)
    top, bottom = figure.subplots(2, 2)
    panels: tuple[tuple[Any, str, str, Callable[[dict], Any], str], ...] = (
        (top[0], "filters that stayed in place", "fot", lambda layer: layer["identity_fraction"], "linear"),
        (top[1], "matching cost left / before", "fot", _cost_left, "linear"),
        (bottom[0], "relative residual of the solve", "regmean", lambda layer: layer["residual"], "log"),
        (bottom[1], "condition estimate", "regmean", lambda layer: layer["condition"], "log"),
    )
    for axes, title, kind, value, scale in panels:
        layers = list(records[-1]["merge"].get(kind, {}))
        for number, layer in enumerate(layers):
            series = _by_round(records, lambda merge, k=kind, n=layer, v=value: v(merge[k][n]))
            color = colormaps["viridis"](0.9 * number / max(len(layers) - 1, 1))
            label = layer if number < MOST_NAMED else None
            axes.plot(*series, color=color, marker="osD^v"[number % 5], markersize=3, linewidth=1.2, label=label)
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("server round")
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(alpha=0.3)
        if not layers:
            why = "nothing to align" if kind in records[-1]["merge"] else "switched off"  # no convolutions, in texts
            axes.text(0.5, 0.5, why, ha="center", va="center", transform=axes.transAxes)
            continue
        axes.legend(fontsize=7, ncols=2)
        if scale == "log":
            axes.set_yscale("log")
        else:
            axes.set_ylim(-0.05, 1.05)


def _cost_left(layer: dict) -> float:
    before, after = np.sum(layer["cost_before"]), np.sum(layer["cost_after"])
    return after / before if before > 0 else 1.0


def _by_round(records: list[dict], value: Callable[[dict], Any]) -> tuple[list[int], list[float]]:
    """Rounds, and the mean of a value over the cells and stations of each."""
    found: dict[int, list[float]] = {}
    for record in records:
        found.setdefault(record["round"], []).append(float(np.mean(value(record["merge"]))))
    return sorted(found), [float(np.mean(found[r])) for r in sorted(found)]
