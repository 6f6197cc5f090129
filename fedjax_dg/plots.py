"""Figures of a run, drawn with matplotlib (``pip install 'fedjax-dg[plots]'``)."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

MOST_NAMED = 12  # layers in a legend
#: Okabe and Ito's, which colour-blind people tell apart, without yellow.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")


def plot_alignment(run: str | Path) -> list[Path]:
    """Draw what alignment and RegMean did in a run, layer by layer and round by round: ``alignment.png`` and ``.svg``.

    Values are means over stations and over the run's cells (seeds, held-out domains) with the same server rule. Raises
    ``ValueError`` for a folder without such records, and where matplotlib is missing.
    """
    matplotlib, Figure = _matplotlib()
    records = aligned_in(run)
    if not records:
        raise ValueError(
            f"{run} has no round in which layers were aligned or merged: run it with --aggregator hfedatm."
        )
    rules = list(dict.fromkeys(record["aggregator"] for record in records))
    figure = Figure(figsize=(11, 6.5 * len(rules)), layout="constrained")
    parts = figure.subfigures(len(rules), 1, squeeze=False)[:, 0]
    for part, rule in zip(parts, rules):
        _draw_rule(part, rule, [record for record in records if record["aggregator"] == rule], matplotlib.colormaps)
    return _save(figure, Path(run), "alignment")


def plot_accuracy(runs: Sequence[str | Path], folder: str | Path) -> list[Path]:
    """Draw accuracy on the held-out domain against the server round, a panel per domain and a line per algorithm and server
    rule: ``accuracy.png`` and ``.svg`` in ``folder``.

    Lines are means over seeds, bands reach from the lowest seed to the highest. Raises ``ValueError`` for a folder without
    an evaluated round, and where matplotlib is missing.
    """
    _, Figure = _matplotlib()
    curves: dict[str, dict[str, dict[int, list[float]]]] = {}  # domain -> line -> round -> accuracies of seeds
    for run in runs:
        records = [record for record in records_of(run) if "accuracy" in record]
        if not records:
            raise ValueError(f"{run} has no evaluated round yet: let it go on.")
        for record in records:
            line = f"{record['algorithm']}, {record['aggregator']}"
            line += f" ({Path(run).name})" if len(runs) > 1 else ""
            of_line = curves.setdefault(record["held_out"], {}).setdefault(line, {})
            of_line.setdefault(record["round"], []).append(100 * record["accuracy"])
    figure = Figure(figsize=(5.0 * len(curves), 4.2), layout="constrained")
    panels = figure.subplots(1, len(curves), squeeze=False, sharey=True)[0]
    names = list(dict.fromkeys(line for lines in curves.values() for line in lines))
    for axes, (domain, lines) in zip(panels, curves.items()):
        for line, by_round in lines.items():
            number = names.index(line)
            color, marker = COLORS[number % len(COLORS)], "osD^v"[number % 5]
            rounds = sorted(by_round)
            accuracies = [by_round[r] for r in rounds]
            means = [float(np.mean(a)) for a in accuracies]
            axes.plot(rounds, means, color=color, marker=marker, markersize=3.5, linewidth=1.4, label=line)
            axes.fill_between(
                rounds, [min(a) for a in accuracies], [max(a) for a in accuracies], color=color, alpha=0.15
            )
        axes.set_title(f"{domain} held out", fontsize=10)
        axes.set_xlabel("server round")
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("accuracy on the held-out domain, %")
    panels[0].legend(fontsize=7)
    return _save(figure, Path(folder), "accuracy")


def plot_latents(
    panels: Mapping[str, tuple[np.ndarray, np.ndarray]], labels: tuple[np.ndarray, np.ndarray], folder: str | Path
) -> list[Path]:
    """Draw features of real examples beside latents made from the head, by t-SNE, a panel for each way they were made:
    ``latents.png`` and ``.svg`` in ``folder``.

    ``panels``: title -> (real [N, n], made [L, n]), each panel with an embedding of its own; ``labels``: class of every row
    of both, told by colour. Raises ``ValueError`` where matplotlib or scikit-learn is missing.
    """
    _, Figure = _matplotlib()
    try:
        from sklearn.manifold import TSNE
    except ImportError:
        raise ValueError("This figure needs scikit-learn: run pip install 'fedjax-dg[plots]'.") from None
    figure = Figure(figsize=(4.2 * len(panels), 4.6), layout="constrained")
    for axes, (title, (real, made)) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels.items()):
        rows = np.concatenate([real, made])
        places = TSNE(init="pca", perplexity=min(30, (len(rows) - 1) / 3), random_state=0).fit_transform(rows)
        for part, label, marker, name in (
            (places[: len(real)], labels[0], "o", "real"),
            (places[len(real) :], labels[1], "x", "made"),
        ):
            colors = [COLORS[int(y) % len(COLORS)] for y in label]
            face = {"facecolors": "none", "edgecolors": colors} if marker == "o" else {"color": colors}
            axes.scatter(part[:, 0], part[:, 1], s=14, marker=marker, linewidths=0.8, label=name, **face)
        axes.set_title(title, fontsize=10)
        axes.set_xticks([])
        axes.set_yticks([])
        axes.legend(fontsize=7, labelcolor="black")
    return _save(figure, Path(folder), "latents")


def records_of(run: str | Path) -> list[dict]:
    """The lines of a run folder's ``metrics.jsonl``; ``ValueError`` where there is none."""
    path = Path(run) / "metrics.jsonl"
    if not path.exists():
        raise ValueError(f"{run} has no metrics.jsonl: give the folder of a run.")
    return [json.loads(line) for line in path.read_text().splitlines()]


def aligned_in(run: str | Path) -> list[dict]:
    """Those in which layers were aligned or merged by RegMean."""
    return [record for record in records_of(run) if {"fot", "regmean"} & set(record.get("merge", {}))]


def _matplotlib() -> tuple[Any, Any]:
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError("Figures need matplotlib: run pip install 'fedjax-dg[plots]'.") from None
    return matplotlib, Figure


def _save(figure: Any, folder: Path, name: str) -> list[Path]:
    paths = [folder / f"{name}.{kind}" for kind in ("png", "svg")]
    for path in paths:
        figure.savefig(path, dpi=150)
    return paths


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
