"""Learning curves, and accuracies of the selected models."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedjax_dg.plots.common import (
    COLORS,
    HATCHES,
    MOST_LINES,
    Run,
    legend_below,
    line_style,
    lines_of,
    load_matplotlib,
    open_run,
    save,
)
from fedjax_dg.tables import interval

#: What learning curves show, from top to bottom: name in the records, label, factor.
CURVES = (
    ("accuracy", "accuracy on the\nheld-out domain, %", 100.0),
    ("source_accuracy", "accuracy on the sources'\nvalidation examples, %", 100.0),
    ("train_loss", "training loss", 1.0),
)


def plot_accuracy(runs: Sequence[str | Path], folder: str | Path) -> list[Path]:
    """Draw accuracy on the held-out domain, on the sources' validation examples, and training loss against the server round,
    a column per domain and a line per algorithm and server rule: ``accuracy.png`` and ``.svg`` in ``folder``.

    Lines are means over seeds, bands reach from the lowest seed to the highest; of a sweep, the selected setting's. Raises
    ``ValueError`` for a folder without an evaluated round, and where matplotlib is missing.
    """
    return save(draw_accuracy([open_run(run) for run in runs]), Path(folder), "accuracy")


def draw_accuracy(runs: Sequence[Run]) -> Any:
    """The figure of ``plot_accuracy``."""
    _, Figure = load_matplotlib()
    lines: dict[str, list[dict]] = {}
    for run in runs:
        records = [record for record in run.records if "accuracy" in record]
        if not records:
            raise ValueError(f"{run.path} has no evaluated round yet: let it go on.")
        lines |= lines_of(run, records, several=len(runs) > 1)
    _check_number(lines)
    everything = [record for of_line in lines.values() for record in of_line]
    domains = list(dict.fromkeys(record["held_out"] for record in everything))
    curves = [curve for curve in CURVES if any(record.get(curve[0]) is not None for record in everything)]
    if len(domains) == 1:  # side by side
        figure = Figure(figsize=(max(5.0, 4.0 * len(curves)), 3.9), layout="constrained")
        panels = figure.subplots(1, len(curves), squeeze=False).T
    else:
        figure = Figure(figsize=(1.0 + 3.2 * len(domains), 0.9 + 2.5 * len(curves)), layout="constrained")
        panels = figure.subplots(len(curves), len(domains), squeeze=False, sharex=True, sharey="row")
    handles = {}
    for row, (name, label, factor) in zip(panels, curves):
        for axes, domain in zip(row, domains):
            for number, (line, of_line) in enumerate(lines.items()):
                of_domain = [record for record in of_line if record["held_out"] == domain]
                if found := _by_round(of_domain, name, factor):
                    handles[line] = _curve(axes, found, number, len(lines))
            axes.xaxis.get_major_locator().set_params(integer=True)
            axes.grid(alpha=0.3)
        row[0].set_ylabel(label, fontsize=9)
    titles = [axes.set_title for axes in panels[0]] if len(domains) > 1 else [figure.suptitle]
    for title, domain in zip(titles, domains):
        title(f"{domain} held out", fontsize=10)
    for axes in panels[-1] if len(domains) > 1 else panels.ravel():
        axes.set_xlabel("server round", fontsize=9)
    legend_below(figure, list(handles.values()), list(handles), figure.get_figwidth())
    return figure


def _by_round(records: Sequence[dict], name: str, factor: float) -> dict[int, list[float]]:
    """Values of the seeds by round."""
    found: dict[int, list[float]] = {}
    for record in records:
        if record.get(name) is not None:  # of a loss that was no number
            found.setdefault(record["round"], []).append(factor * record[name])
    return dict(sorted(found.items()))


def _curve(axes: Any, by_round: dict[int, list[float]], number: int, count: int) -> Any:
    style, values = line_style(number), list(by_round.values())
    every = max(1, len(by_round) // 8)  # rounds between two markers, at another place in every line
    # so that a line below another shows
    line = axes.plot(
        list(by_round),
        [float(np.mean(v)) for v in values],
        markersize=4,
        markevery=(number * every // max(count, 1), every),
        linewidth=1.5,
        **style,
    )[0]
    axes.fill_between(
        list(by_round),
        [min(v) for v in values],
        [max(v) for v in values],
        color=style["color"],
        alpha=0.15,
        linewidth=0,
    )
    return line


def draw_domains(runs: Sequence[Run]) -> Any:
    """Accuracy of the selected models on every held-out domain, a bar per algorithm and server rule.

    Bars are means over seeds with 95 % intervals of Student's t, dots the seeds, a triangle each line's worst domain.
    """
    _, Figure = load_matplotlib()
    from matplotlib.lines import Line2D

    lines: dict[str, list[dict]] = {}
    for run in runs:
        if not run.cells:
            raise ValueError(f"{run.path} has no finished cell yet: let it go on.")
        lines |= lines_of(run, run.cells, several=len(runs) > 1)
    _check_number(lines)
    domains = list(dict.fromkeys(cell["held_out"] for cells in lines.values() for cell in cells))
    width = 0.8 / len(lines)
    groups = [*domains, "average"] if len(domains) > 1 else domains
    size = min(18.0, max(6.0, 2.0 + len(groups) * (0.5 + 0.28 * len(lines))))
    figure = Figure(figsize=(size, 4.6), layout="constrained")
    axes, handles, top = figure.subplots(), [], 0.0
    for number, (line, cells) in enumerate(lines.items()):
        seeds = {
            domain: {c["seed"]: 100 * c["accuracy"] for c in cells if c["held_out"] == domain} for domain in domains
        }
        whole = sorted(set.intersection(*(set(of_domain) for of_domain in seeds.values())))
        if len(domains) > 1 and whole:
            seeds["average"] = {seed: float(np.mean([seeds[d][seed] for d in domains])) for seed in whole}
        means = {name: float(np.mean(list(found.values()))) for name, found in seeds.items() if found}
        worst = min((name for name in means if name != "average"), key=lambda name: means[name], default=None)
        for place, name in enumerate(groups):
            if not seeds.get(name):
                continue
            x, values = place + (number - (len(lines) - 1) / 2) * width, list(seeds[name].values())
            half = interval(values)["ci95"]
            bar = axes.bar(
                x,
                means[name],
                width,
                color=COLORS[number % len(COLORS)],
                alpha=0.75,
                edgecolor="black",
                linewidth=0.6,
                hatch=HATCHES[number % len(HATCHES)],
                yerr=half,
                error_kw={"elinewidth": 1.1, "capsize": 3},
            )
            spread = np.linspace(-0.22, 0.22, len(values)) * width if len(values) > 1 else [0.0]
            axes.plot(
                x + np.asarray(spread), values, "o", color="white", markeredgecolor="black", markersize=3.6, zorder=4
            )
            top = max(top, *values, means[name] + (half or 0.0))
            if name == worst and len(domains) > 1:
                axes.plot(x, 1.5, "^", color="black", markeredgecolor="white", markersize=8, zorder=5)
            if place == len(groups) - 1 or name == next(iter(means)):
                handles = handles if line in [h[0] for h in handles] else [*handles, (line, bar[0])]
    axes.set_xticks(
        range(len(groups)), groups, rotation=30 if len(groups) > 5 else 0, ha="right" if len(groups) > 5 else "center"
    )
    if "average" in groups:
        axes.axvline(len(groups) - 1.5, color="0.6", linewidth=0.8)
    axes.set_xlim(min(-0.6, len(groups) / 2 - 1.5), max(len(groups) - 0.4, len(groups) / 2 + 0.5))
    axes.set_ylim(0, min(100.0, 1.04 * top))
    axes.set_ylabel("accuracy on the held-out domain, %")
    axes.set_xlabel("held-out domain")
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    dot = Line2D([], [], linestyle="", marker="o", color="white", markeredgecolor="black", markersize=4)
    triangle = Line2D([], [], linestyle="", marker="^", color="black", markersize=7)
    marks = [(dot, "a seed"), *([(triangle, "worst domain of its line")] if len(domains) > 1 else [])]
    legend_below(
        figure, [h for _, h in handles] + [m for m, _ in marks], [t for t, _ in handles] + [t for _, t in marks], size
    )
    axes.set_title("selected models; bars: mean and 95 % interval over seeds", fontsize=10)
    return figure


def _check_number(lines: dict[str, Any]) -> None:
    if len(lines) > MOST_LINES:
        raise ValueError(
            f"There are {len(lines)} lines of algorithm and server rule, more than the {MOST_LINES} that can be told apart: "
            "draw fewer runs together."
        )
