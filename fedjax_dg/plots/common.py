"""What figures share: run folders as they are read, styles, files."""

from __future__ import annotations

import functools
import io
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedjax_dg import tables
from fedjax_dg.config import RunConfig
from fedjax_dg.datasets import Domains
from fedjax_dg.experiment import deal_of, load_data, start_of
from fedjax_dg.federation import Deal
from fedjax_dg.models import Model, load_model
from fedjax_dg.results import read_config_of, read_json, read_metrics

#: Okabe and Ito's, which colour-blind people tell apart, without yellow.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
#: So that lines, bars and points differ in grey print too.
MARKERS, DASHES, HATCHES = "osD^vP", ("-", "--", "-.", ":"), ("", "///", "...", "\\\\\\", "xx", "++", "oo")
MOST_LINES = 12  # in a figure


@dataclass(frozen=True)
class Run:
    """A run folder as figures read it; what needs the data or a model is read when it is asked for."""

    path: Path
    name: str
    records: tuple[dict[str, Any], ...]  # the lines of metrics.jsonl
    cells: tuple[dict[str, Any], ...]  # finished ones

    @functools.cached_property
    def config(self) -> RunConfig:
        return read_config_of(self.path)

    @functools.cached_property
    def data(self) -> Domains:
        """Its data set; of a frozen encoder what that made of the texts. ``ValueError`` where it cannot be read."""
        domains = load_data(self.config)
        return (
            start_of(self.config, domains, lambda done, total: None).domains if self.config.freeze_encoder else domains
        )

    @functools.cached_property
    def model(self) -> Model:
        """The selected model of its best finished cell, by the sources' validation."""
        return load_model(self.path)

    def deal(self, held_out: str, seed: int) -> Deal:
        """Who holds which examples in a cell of its configuration."""
        return deal_of(self.config, self.data, held_out, seed)

    def deal_of_model(self) -> Deal:
        """Who held which examples in the selected model's cell, whose stations or partition a sweep may have changed."""
        return deal_of(self.model.config, self.data, self.model.cell["held_out"], self.model.cell["seed"])


def open_run(path: str | Path) -> Run:
    """Read a run folder. ``ValueError`` for another folder.

    Without what was trained only to select by (two domains held out, ``leave-one-domain-out``).
    """
    path = Path(path)
    result = read_json(path / "result.json")["cells"] if (path / "result.json").exists() else []
    shown = lambda lines: tuple(line for line in lines if "+" not in line.get("held_out", ""))
    return Run(path, path.resolve().name, shown(records_of(path)), shown(result))


def records_of(run: str | Path) -> list[dict]:
    """The lines of a run folder's ``metrics.jsonl``; ``ValueError`` where there is none."""
    if not (Path(run) / "metrics.jsonl").exists():
        raise ValueError(f"{run} has no metrics.jsonl: give the folder of a run.")
    return read_metrics(Path(run))


# --- sweeps ---------------------------------------------------------------------------------------------------------


def setting_of(line: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    """What a sweep gave a cell; empty in plain runs."""
    return tuple((line.get("hparams") or {}).items())


def setting_text(setting: Sequence[tuple[str, Any]]) -> str:
    """A sweep's setting in words."""
    return tables.setting_text(dict(setting))


def mean_scores(cells: Sequence[Mapping[str, Any]], score: str) -> dict[tuple, float]:
    """A score of every setting, averaged over its cells that have it."""
    found: dict[tuple, list[float]] = {}
    for cell in cells:
        if cell.get(score) is not None:
            found.setdefault(setting_of(cell), []).append(cell[score])
    return {setting: float(np.mean(values)) for setting, values in found.items()}


def selected_settings(cells: Sequence[Mapping[str, Any]]) -> dict[tuple[str, str], tuple]:
    """Of every algorithm and server rule the setting with the best source-validation accuracy, over domains and seeds.

    Only among those with the most cells: a setting that broke down on hard domains would else be judged by easy ones.
    """
    rules: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for cell in cells:
        rules.setdefault((cell["algorithm"], cell["aggregator"]), []).append(cell)
    chosen = {}
    for rule, of_rule in rules.items():
        sizes = Counter(setting_of(cell) for cell in of_rule)
        whole = [cell for cell in of_rule if sizes[setting_of(cell)] == max(sizes.values())]
        scores = mean_scores(whole, "source_accuracy")
        chosen[rule] = max(scores, key=lambda s: scores[s]) if scores else setting_of(whole[0])
    return chosen


def lines_of(run: Run, records: Sequence[dict], several: bool) -> dict[str, list[dict]]:
    """Records or cells by what a figure draws as one line: algorithm and server rule, and of ``several`` runs their name.

    Of a sweep only the selected setting of each. ``ValueError`` where none can be selected yet.
    """
    swept = any(setting_of(record) for record in records)
    if swept and not run.cells:
        raise ValueError(f"{run.path} is a sweep without a finished cell, so no setting can be chosen: let it go on.")
    chosen = selected_settings(run.cells) if swept else {}
    lines: dict[str, list[dict]] = {}
    for record in records:
        rule = record["algorithm"], record["aggregator"]
        if swept and chosen.get(rule) != setting_of(record):
            continue
        setting = f", {setting_text(setting_of(record))}" if setting_of(record) else ""
        lines.setdefault(", ".join(rule) + setting + (f" ({run.name})" if several else ""), []).append(record)
    return lines


# --- matplotlib -----------------------------------------------------------------------------------------------------


def load_matplotlib() -> tuple[Any, Any]:
    """Matplotlib and its Figure. ``ValueError`` where it is missing."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError("Figures need matplotlib: run pip install 'fedjax-dg[plots]'.") from None
    return matplotlib, Figure


def line_style(number: int) -> dict[str, Any]:
    """Colour, marker and dashes of a figure's line, all of which differ."""
    cycles = {"color": COLORS, "marker": MARKERS, "linestyle": DASHES}
    return {name: values[number % len(values)] for name, values in cycles.items()}


def legend_below(figure: Any, handles: Sequence[Any], labels: Sequence[str], width: float, **options: Any) -> None:
    """One legend for all panels, below them, in as many columns as fit into ``width`` inches."""
    longest = max((len(label) for label in labels), default=1)
    columns = int(min(len(labels), max(1, width // (0.075 * longest + 0.6))))
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, fontsize=8, frameon=False, **options)


def save(figure: Any, folder: Path, name: str) -> list[Path]:
    """``.png`` and ``.svg``; the folder is made if it has to be."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{name}.{kind}" for kind in ("png", "svg")]
    for path in paths:
        figure.savefig(path, dpi=150)
    return paths


def svg_of(figure: Any) -> str:
    """A figure as SVG, of which equal ones have equal bytes."""
    matplotlib, _ = load_matplotlib()
    text = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": "fedjax_dg"}):
        figure.savefig(text, format="svg", metadata={"Date": None})
    return text.getvalue()
