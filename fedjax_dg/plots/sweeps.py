"""What a sweep's hyper-parameters do."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from fedjax_dg.plots.common import (
    Run,
    legend_below,
    line_style,
    load_matplotlib,
    selected_settings,
    setting_of,
    setting_text,
)
from fedjax_dg.tables import interval

SCORES = {"source_accuracy": "sources' validation", "accuracy": "held-out domain"}
#: From which ratio of the largest value to the smallest an axis is logarithmic.
DECADES = 20.0
MOST_ROWS = 12  # of panels
STAR: dict[str, Any] = {"marker": "*", "color": "white", "markeredgecolor": "black", "markersize": 15, "linestyle": ""}


def draw_sweep(runs: Sequence[Run]) -> Any:
    """Source-validation and held-out accuracy, side by side, by the values of what was swept; a star marks what is selected.

    One hyper-parameter: curves, means over seeds (of the held-out domains' mean) with 95 % intervals; a rule that does not
    have it is a level line. Several: for each server rule and each pair a heat map, of which every place shows the best
    setting by source validation among the other hyper-parameters (random searches: a point per setting). The selected one
    is the best by source validation over all domains and seeds, never by the held-out domain.
    """
    _, Figure = load_matplotlib()
    (run,) = runs
    cells = [cell for cell in run.cells if cell.get("accuracy") is not None and cell.get("source_accuracy") is not None]
    swept = {rule: _varying(own) for rule, own in _by_rule(cells).items()}
    names = list(dict.fromkeys(name for of_rule in swept.values() for name in of_rule))
    if not names:
        raise ValueError(f"{run.path} has no finished cells of different settings: it is for fedjax-dg sweep.")
    if len(names) == 1:
        return _curves(cells, names[0])
    rows = [
        (rule, pair)
        for rule, own in swept.items()
        for pair in (itertools.combinations(own, 2) if len(own) > 1 else [tuple(own)] if own else [])
    ]
    rows = rows[:MOST_ROWS]
    figure = Figure(figsize=(10.5, 3.7 * len(rows)), layout="constrained")
    for part, (rule, pair) in zip(figure.subfigures(len(rows), 1, squeeze=False)[:, 0], rows):
        own, selected = _by_rule(cells)[rule], dict(selected_settings(cells)[rule])
        part.suptitle(f"{', '.join(rule)}; selected: {setting_text(tuple(selected.items()))}", fontsize=10)
        panels = part.subplots(1, 2)
        for axes, (score, label) in zip(panels, SCORES.items()):
            if len(pair) == 1:
                _one_curve(axes, own, pair[0], score, 0)
                axes.set_ylabel("accuracy, %")
            else:
                _surface(part, axes, own, pair, score, selected)
            axes.set_title(f"accuracy on the {label}, %", fontsize=9)
    return figure


def _by_rule(cells: Sequence[Mapping[str, Any]]) -> dict[tuple[str, str], list[Mapping[str, Any]]]:
    rules: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for cell in cells:
        rules.setdefault((cell["algorithm"], cell["aggregator"]), []).append(cell)
    return rules


def _varying(cells: Sequence[Mapping[str, Any]]) -> list[str]:
    """Names of what has several values."""
    values: dict[str, set] = {}
    for cell in cells:
        for name, value in setting_of(cell):
            values.setdefault(name, set()).add(value)
    return [name for name, found in values.items() if len(found) > 1]


def by_setting(cells: Sequence[Mapping[str, Any]], score: str) -> dict[tuple, dict[str, Any]]:
    """Mean and interval over seeds of a score in percent, of every setting; a seed's number is the mean over its domains."""
    found: dict[tuple, dict[int, list[float]]] = {}
    for cell in cells:
        found.setdefault(setting_of(cell), {}).setdefault(cell["seed"], []).append(100 * cell[score])
    return {setting: interval(float(np.mean(v)) for v in of_seed.values()) for setting, of_seed in found.items()}


# --- one hyper-parameter --------------------------------------------------------------------------------------------


def _curves(cells: Sequence[Mapping[str, Any]], name: str) -> Any:
    _, Figure = load_matplotlib()
    figure = Figure(figsize=(10.5, 4.4), layout="constrained")
    handles = {}
    for axes, (score, label) in zip(figure.subplots(1, 2, sharey=False), SCORES.items()):
        for number, (rule, own) in enumerate(_by_rule(cells).items()):
            handles[", ".join(rule)] = _one_curve(axes, own, name, score, number)
        axes.set_title(f"accuracy on the {label}", fontsize=10)
        axes.set_ylabel("accuracy, %")
        values = sorted_values(v for cell in cells for n, v in setting_of(cell) if n == name)
        scale_of(values)(axes)
        axes.set_xlabel(name)
    from matplotlib.lines import Line2D

    style: dict[str, Any] = {**STAR, "markersize": 11}
    star = Line2D([], [], **style)
    legend_below(figure, [*handles.values(), star], [*handles, "selected by source validation"], 10.5)
    return figure


def _one_curve(axes: Any, cells: Sequence[Mapping[str, Any]], name: str, score: str, number: int) -> Any:
    """A rule's line with its star; a level line where the rule has no such hyper-parameter."""
    found = by_setting(cells, score)
    style = line_style(number)
    if all(name not in dict(setting) for setting in found):
        (entry,) = list(found.values())[:1]
        if entry["ci95"] is not None:
            low, high = entry["mean"] - entry["ci95"], entry["mean"] + entry["ci95"]
            axes.axhspan(low, high, color=style["color"], alpha=0.12, linewidth=0)
        return axes.axhline(entry["mean"], color=style["color"], linestyle=style["linestyle"], linewidth=1.5)
    values = sorted_values(dict(setting)[name] for setting in found)
    of_value = {dict(setting)[name]: entry for setting, entry in found.items()}
    category = _is_category(values)
    if category:  # no line between them, and rules side by side
        style |= {"linestyle": ""}
    places = [i + 0.08 * number for i in range(len(values))] if category else values
    means = [of_value[v]["mean"] for v in values]
    halves = [of_value[v]["ci95"] or 0.0 for v in values]
    line = axes.errorbar(places, means, yerr=halves, capsize=3, markersize=5, linewidth=1.5, elinewidth=1.0, **style)
    (selected,) = selected_settings(cells).values()
    at = values.index(dict(selected)[name])
    axes.plot(places[at], means[at], zorder=5, **STAR)
    if category:
        axes.set_xticks(range(len(values)), [str(v) for v in values])
        axes.set_xlim(-0.5, len(values) - 0.5)
    else:
        scale_of(values)(axes)
    axes.set_xlabel(name)
    axes.grid(alpha=0.3)
    return line


def _is_category(values: Sequence[Any]) -> bool:
    return not all(isinstance(v, (int, float)) and not isinstance(v, bool) for v in values)


def sorted_values(values: Any) -> list[Any]:
    """Different values, numbers in order, others as they come."""
    found = list(dict.fromkeys(values))
    return found if _is_category(found) else sorted(found)


def scale_of(values: Sequence[Any], axis: str = "x") -> Callable[[Any], None]:
    """What makes an axis fit for values: logarithmic where they span decades, linear around a zero among them."""

    def apply(axes: Any) -> None:
        if _is_category(values) or min(values) < 0:
            return
        positive = [v for v in values if v > 0]
        if not positive or max(positive) / min(positive) < DECADES:
            return
        change = getattr(axes, f"set_{axis}scale")
        if 0 in values:
            change("symlog", linthresh=min(positive), linscale=0.5)
        else:
            change("log")

    return apply


# --- two ------------------------------------------------------------------------------------------------------------


def _surface(
    figure: Any,
    axes: Any,
    cells: Sequence[Mapping[str, Any]],
    pair: Sequence[str],
    score: str,
    selected: Mapping[str, Any],
) -> None:
    """A heat map of a pair of hyper-parameters, or points where most of the map would be empty."""
    judged, shown = by_setting(cells, "source_accuracy"), by_setting(cells, score)
    best: dict[tuple, tuple] = {}  # place -> its setting
    for setting in judged:
        place = tuple(dict(setting).get(name) for name in pair)
        if place not in best or judged[setting]["mean"] > judged[best[place]]["mean"]:
            best[place] = setting
    xs, ys = (sorted_values(place[i] for place in best) for i in range(2))
    numbers = {place: shown[setting]["mean"] for place, setting in best.items()}
    star = tuple(selected.get(name) for name in pair)
    points = 2 * len(numbers) < len(xs) * len(ys) and not _is_category(xs) and not _is_category(ys)
    if points:
        x, y = zip(*numbers)
        image = axes.scatter(x, y, c=list(numbers.values()), cmap="viridis", s=70, edgecolors="black", linewidths=0.5)
        scale_of(xs)(axes)
        scale_of(ys, "y")(axes)
        at = {"c": [numbers[star]], "cmap": image.cmap, "norm": image.norm}  # in the colour of its value
        axes.scatter(*star, marker="*", s=330, edgecolors="black", linewidths=1.0, zorder=5, **at)
    else:
        grid = np.ma.masked_invalid([[numbers.get((x, y), np.nan) for x in xs] for y in ys])
        image = axes.imshow(grid, origin="lower", aspect="auto", cmap="viridis", interpolation="nearest")
        middle = (grid.min() + grid.max()) / 2
        for (y, x), value in np.ndenumerate(grid.filled(np.nan)):
            if np.isfinite(value) and grid.size <= 100:
                lift = 0.22 if (xs[x], ys[y]) == star else 0.0
                ink = "black" if value > middle else "white"
                axes.text(x, y - lift, f"{value:.1f}", ha="center", va="center", fontsize=8, color=ink)
        axes.set_xticks(range(len(xs)), [_tick(v) for v in xs], fontsize=8)
        axes.set_yticks(range(len(ys)), [_tick(v) for v in ys], fontsize=8)
        lift = 0.18 if grid.size <= 100 else 0.0
        axes.plot(xs.index(star[0]), ys.index(star[1]) + lift, zorder=5, **STAR)
    axes.set_xlabel(pair[0], fontsize=9)
    axes.set_ylabel(pair[1], fontsize=9)
    figure.colorbar(image, ax=axes, pad=0.01)


def _tick(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
