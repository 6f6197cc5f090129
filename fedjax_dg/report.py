"""A run as one page of HTML that needs nothing else: tables, figures, failures, how to run it again."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from string import Template
from typing import Any, NamedTuple

import numpy as np

from fedjax_dg import __version__, tables
from fedjax_dg.config import RunConfig
from fedjax_dg.plots import KINDS, Drawn, Run, draw, open_run, svg_of
from fedjax_dg.plots.alignment import aligned_in
from fedjax_dg.plots.common import mean_scores, selected_settings, setting_of, setting_text
from fedjax_dg.results import read_config_of, read_json, write_atomically

#: What each selection rule looks at, for readers of the page.
SELECTED_BY = {
    "source-validation": (
        "The model of a cell is that of the round with the highest mean accuracy on the validation examples of its source "
        "domains; nothing of the held-out domain was looked at."
    ),
    "last": "The model of a cell is that of its last round.",
    "oracle": (
        "The model of a cell is that of the round with the highest accuracy on the held-out domain itself, which no one has "
        "in practice: these numbers are upper bounds."
    ),
    "leave-one-domain-out": (
        "The model of a cell is that of the round that does best on other source domains when each of them is left out too."
    ),
}

PAGE = Template("""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>$title</title>
<style>
:root { color-scheme: light dark; --ink: #1b1f24; --soft: #57606a; --line: #d0d7de; --back: #ffffff; --tint: #f6f8fa; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6edf3; --soft: #9aa4af; --line: #3d444d; --back: #15191f; --tint: #1d232b; }
}
body { margin: 2rem auto; max-width: 70rem; padding: 0 1rem; background: var(--back); color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0 0 .5rem; }
h2 { font-size: 1.2rem; margin: 2.2rem 0 .6rem; border-bottom: 1px solid var(--line); padding-bottom: .2rem; }
p.note, figcaption, caption { color: var(--soft); font-size: .9rem; text-align: left; }
caption { padding: .2rem 0; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .88rem; font-variant-numeric: tabular-nums; margin: .4rem 0; }
th, td { padding: .25rem .7rem; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
th { font-weight: 600; background: var(--tint); white-space: normal; vertical-align: bottom; }
th.text, td.text { text-align: left; }
td.long { text-align: left; white-space: normal; min-width: 14rem; }
figure { margin: 1rem 0 1.6rem; }
figure img { max-width: 100%; height: auto; background: #ffffff; border: 1px solid var(--line); }
pre { background: var(--tint); border: 1px solid var(--line); padding: .7rem; overflow-x: auto; font-size: .85rem; }
.bad { color: #b35900; font-weight: 600; }
@media (prefers-color-scheme: dark) { .bad { color: #ffb066; } }
@media print {
  :root { --ink: #000; --soft: #333; --line: #999; --back: #fff; --tint: #fff; }
  body { margin: 0; max-width: none; font-size: 10pt; }
  table { font-size: 8pt; }
  th, td { padding: .15rem .4rem; white-space: normal; }
  td.long { min-width: 0; }
  td { overflow-wrap: anywhere; }
  figure, tr { break-inside: avoid; }
  h2 { break-after: avoid; }
  .wide { overflow: visible; }
  pre { white-space: pre-wrap; }
}
</style>
</head>
<body>
<h1>$title</h1>
$body
<p class="note">Written by fedjax_dg $version from the run folder $folder.</p>
</body>
</html>
""")


FEWER = (
    '<p class="note">Means over the cells that there are, so settings with fewer cells cannot be compared with the others; '
    "they are not selected.</p>\n"
)


class Content(NamedTuple):
    """What is in a run folder, for its page."""

    run: Run
    config: RunConfig
    failed: list[dict[str, Any]]
    environment: dict[str, Any]  # empty before a cell has finished
    splits: dict[str, Any]
    planned: list[str]  # names of all cells; empty for folders of older versions


def report(run: str | Path, out: str | Path, kinds: Sequence[str] | None = None) -> list[Drawn]:
    """Write a run folder's page to the file ``out``; the figures that it does not have, and why.

    One HTML file that loads nothing: figures are SVG inside it. ``kinds``: of figures, by default all that apply
    (``plots.KINDS``). Numbers are those of ``result.json``: mean and 95 % interval of Student's t over seeds. Of a sweep the
    table shows for each rule the setting with the best source-validation accuracy over its domains and seeds. An unfinished
    run has the page of what there is. Raises ``ValueError`` for a folder that is no run, a folder of ``out`` that is not
    there, and where matplotlib is missing.
    """
    out = Path(out)
    if not out.absolute().parent.is_dir() or out.is_dir():
        raise ValueError(
            f"{out} cannot be written: give the name of a file, such as report.html, in a folder that exists."
        )
    content = read_content(run)
    drawn = list(draw([content.run], kinds))
    write_atomically(out, page(content, drawn))
    return [figure for figure in drawn if figure.figure is None]


def read_content(run: str | Path) -> Content:
    """Read a run folder. ``ValueError`` for another folder."""
    path = Path(run)
    config = read_config_of(path)
    if not (path / "metrics.jsonl").exists():
        raise ValueError(f"{run} has no metrics.jsonl, so no round of it has been evaluated: let it go on.")

    def found(name: str) -> dict[str, Any]:
        return read_json(path / name) if (path / name).exists() else {}

    result, networks = found("result.json"), found("model.json").get("networks", [])
    planned = [cell for network in networks for cell in network["cells"]]
    failed, environment = result.get("failed", []), result.get("environment", {})
    return Content(open_run(path), config, failed, environment, found("splits.json"), planned)


def page(content: Content, drawn: Iterable[Drawn]) -> str:
    """The page as text."""
    config = content.config
    drawn = list(drawn)
    title = f"{config.dataset}: {config.algorithm} with {', '.join(config.aggregator.split(','))}"
    parts = [
        _what_was_run(content),
        _accuracies(content),
        _settings(content),
        _figures(drawn),
        _alignment(content),
        _missing(content),
        _cells(content),
        _again(content),
        _environment(content),
    ]
    return PAGE.substitute(
        title=escape(title),
        body="\n".join(part for part in parts if part),
        version=escape(__version__),
        folder=escape(content.run.name),
    )


# --- sections -------------------------------------------------------------------------------------------------------


def _what_was_run(content: Content) -> str:
    config, cells = content.config, content.run.cells
    total = max(len(content.planned), len(cells) + len(content.failed))
    held_out = "each domain in turn" if config.held_out == "all" else config.held_out
    state = f"{len(cells)} of {total} cells are finished" if total else "no cell is finished"
    state += f", {len(content.failed)} broke down" if content.failed else ""
    bad = ' class="bad"' if len(cells) < total or not cells else ""
    words = (
        f"{config.backbone} on {config.dataset}, trained by {config.algorithm} on {config.stations} stations with "
        f"{config.clients_per_station} clients each: {config.rounds} rounds of {config.station_rounds} station rounds. Held "
        f"out, so that no client trains on it: {held_out}. Server rules: {', '.join(config.aggregator.split(','))}. "
        f"Seeds: {config.seeds}."
    )
    return f"<p>{escape(words)}</p>\n<p{bad}>{escape(state)}.</p>"


def _accuracies(content: Content) -> str:
    config, cells = content.config, content.run.cells
    if not cells:
        return _section("Accuracy on the held-out domain", "<p>No cell is finished yet.</p>")
    chosen = selected_settings(cells)
    shown = [cell for cell in cells if setting_of(cell) == chosen[cell["algorithm"], cell["aggregator"]]]
    shown = [{name: value for name, value in cell.items() if name != "hparams"} for cell in shown]
    header, lines = tables.rows(shown, config.seeds)
    swept = [f"{', '.join(rule)}: {setting_text(setting)}" for rule, setting in chosen.items() if setting]
    told = [
        tables.table_title(config),
        SELECTED_BY.get(config.selection, f"Selected by {config.selection}."),
        "Differences are paired by seed; “average” is each seed's mean and “worst” its minimum over the held-out domains.",
    ]
    if swept:
        told.append(
            "This is a sweep: of each rule the setting is shown that has the best source-validation accuracy over all "
            f"held-out domains and seeds ({'; '.join(swept)})."
        )
    notes = "".join(f'<p class="note">{escape(line)}</p>\n' for line in told)
    return _section("Accuracy on the held-out domain", notes + _table(header, lines, text_columns=2))


def _settings(content: Content) -> str:
    """Of a sweep every setting with its scores."""
    cells = content.run.cells
    if not any(setting_of(cell) for cell in cells):
        return ""
    rows = []
    for rule, chosen in selected_settings(cells).items():
        own = [cell for cell in cells if (cell["algorithm"], cell["aggregator"]) == rule]
        judged, held_out = mean_scores(own, "source_accuracy"), mean_scores(own, "accuracy")
        for setting in dict.fromkeys(setting_of(cell) for cell in own):
            number = sum(setting_of(cell) == setting for cell in own)
            scores = [_percent(judged.get(setting)), _percent(held_out.get(setting))]
            rows.append(
                [*rule, setting_text(setting) or "–", "selected" if setting == chosen else "", str(number), *scores]
            )
    header = ["algorithm", "server rule", "setting", "", "cells", "source validation, %", "held-out domain, %"]
    note = "" if len({row[4] for row in rows}) == 1 else FEWER
    return _section("Settings of the sweep", note + _table(header, rows, text_columns=4))


def _figures(drawn: Sequence[Drawn]) -> str:
    parts = []
    for figure in drawn:
        title = escape(KINDS[figure.kind].title)
        if figure.figure is not None:
            data = base64.b64encode(svg_of(figure.figure).encode()).decode()
            image = f'<img alt="{title}" src="data:image/svg+xml;base64,{data}">'
            parts.append(
                f'<figure id="figure-{escape(figure.name)}">\n{image}\n<figcaption>{title}.</figcaption>\n</figure>'
            )
    absent = [f"<li>{escape(figure.kind)}: {escape(figure.why_not)}</li>" for figure in drawn if figure.figure is None]
    if absent:
        parts.append('<p class="note">Not drawn:</p>\n<ul class="note">' + "\n".join(absent) + "</ul>")
    return _section("Figures", "\n".join(parts))


def _alignment(content: Content) -> str:
    """What FOT and RegMean did: means over all rounds, stations and cells of a rule."""
    found: dict[tuple[str, str], dict[str, list[float]]] = {}
    for record in aligned_in(content.run):
        merge = record["merge"]
        for layer, told in merge.get("fot", {}).items():
            own = found.setdefault((record["aggregator"], layer), {})
            own.setdefault("stayed", []).append(float(np.mean(told["identity_fraction"])))
            before = float(np.sum(told["cost_before"]))
            own.setdefault("left", []).append(float(np.sum(told["cost_after"])) / before if before else 1.0)
        for layer, told in merge.get("regmean", {}).items():
            own = found.setdefault((record["aggregator"], layer), {})
            for name in ("residual", "condition", "fallback", "bytes"):
                own.setdefault(name, []).append(float(np.mean(told[name])))
    if not found:
        return ""
    columns = {
        "stayed": ("filters that stayed, %", lambda v: f"{100 * np.mean(v):.1f}"),
        "left": ("matching cost left / before", lambda v: f"{np.mean(v):.3f}"),
        "residual": ("largest residual of the solve", lambda v: f"{np.max(v):.1e}"),
        "condition": ("largest condition estimate", lambda v: f"{np.max(v):.3g}"),
        "fallback": ("fallbacks to the mean", lambda v: f"{np.sum(v):.0f}"),
        "bytes": ("Gram, kB a client and round", lambda v: f"{np.mean(v) / 1e3:,.1f}"),
    }
    rows = [
        [rule, layer, *(show(own[name]) if name in own else "–" for name, (_, show) in columns.items())]
        for (rule, layer), own in found.items()
    ]
    note = '<p class="note">Over all evaluated rounds, stations and cells of a rule.</p>\n'
    header = ["server rule", "layer", *(label for label, _ in columns.values())]
    return _section("Alignment and RegMean", note + _table(header, rows, text_columns=2))


def _missing(content: Content) -> str:
    """Cells that broke down, and those that are not finished."""
    from fedjax_dg.models import cell_name

    rows = [[cell_name(line), line["error"]] for line in content.failed]
    gone = {cell_name(line) for line in (*content.run.cells, *content.failed)}
    reached: dict[str, int] = {}
    for record in content.run.records:
        reached[record["cell"]] = max(reached.get(record["cell"], 0), record["round"])
    for name in content.planned:
        if name not in gone:
            rows.append([name, f"not finished: {reached.get(name, 0)} of {content.config.rounds} rounds are evaluated"])
    if not rows:
        return ""
    return _section("Cells without a result", _table(["cell", "why"], rows, text_columns=2, long=True))


def _cells(content: Content) -> str:
    from fedjax_dg.models import cell_name

    if not content.run.cells:
        return ""
    rows = []
    for cell in content.run.cells:
        times = [f"{cell[name]:.1f}" if name in cell else "–" for name in ("seconds", "compile_seconds")]
        round_ = f"{cell.get('selected_round', '–')} of {cell.get('rounds', '–')}"
        rows.append([cell_name(cell), *(_percent(cell.get(name), 2) for name in tables.SCORES), round_, *times])
    header = ["cell", "held-out domain, %", "mean of its classes, %", "its unseen items, %", "source validation, %"]
    return _section("Every cell", _table([*header, "selected round", "seconds", "to compile"], rows, text_columns=1))


def _again(content: Content) -> str:
    settings = list(dict.fromkeys(setting_of(cell) for cell in content.run.cells if setting_of(cell)))
    command, toml = "fedjax-dg sweep" if settings else "fedjax-dg run", to_toml(content.config)
    words = "Save this as run.toml; data and pretrained weights are found by its paths."
    if settings:
        names = list(dict.fromkeys(name for setting in settings for name, _ in setting))
        # a rule without one of the options has settings without it; those of the others tell all values
        whole = [dict(setting) for setting in settings if len(setting) == len(names)]
        toml += "\n[sweep.list]\n" + "".join(f"{name} = {_toml([s[name] for s in whole])}\n" for name in names)
        words += " The sweep's settings are those of finished cells, which another file may have listed otherwise."
    lines = f"{command} --config run.toml --out {_quoted(content.run.name)}"
    return _section("To run it again", f"<p>{escape(words)}</p>\n<pre>{escape(toml)}</pre>\n<pre>{escape(lines)}</pre>")


def _environment(content: Content) -> str:
    found = content.environment
    rows = [[name, version] for name, version in found.get("versions", {}).items()]
    for name in ("python", "platform", "devices", "threefry_partitionable"):
        if name in found:
            value = found[name]
            rows.append([name, ", ".join(map(str, value)) if isinstance(value, list) else str(value)])
    body = _table(["what", "which"], rows, text_columns=2) if rows else "<p>Not known before a cell is finished.</p>"
    splits = []
    for seed, told in content.splits.items():
        sizes = [f"{name} {n['train']:,} / {n['validation']:,}" for name, n in told["domains"].items()]
        splits.append([seed, told["digest"], "; ".join(sizes)])
    if splits:
        note = '<p class="note">SHA-256 of which example is for training and which for validation; how many are.</p>\n'
        header = ["seed", "digest", "domain: training / validation"]
        body += note + _table(header, splits, text_columns=3, long=True)
    return _section("Environment and data", body)


# --- parts ----------------------------------------------------------------------------------------------------------


def to_toml(config: RunConfig) -> str:
    """A configuration as a file that ``read_toml`` reads; what is None is left out, as that is its default."""
    fields = {name: value for name, value in vars(config).items() if name != "settings" and value is not None}
    lines = ["[run]", *(f"{name} = {_toml(value)}" for name, value in fields.items())]
    if config.settings:
        lines += ["", "[set]", *(f"{name} = {_toml(value)}" for name, value in config.settings.items())]
    return "\n".join(lines) + "\n"


def _toml(value: Any) -> str:
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    return json.dumps(value)  # booleans, whole numbers and strings are written alike


def _quoted(word: str) -> str:
    return (
        word if word.replace("-", "").replace("_", "").replace(".", "").isalnum() else "'" + word.replace("'", "") + "'"
    )


def _percent(value: float | None, digits: int = 1) -> str:
    return "–" if value is None else f"{100 * value:.{digits}f}"


def _section(title: str, body: str) -> str:
    return f"<section>\n<h2>{escape(title)}</h2>\n{body}\n</section>"


def _table(header: Sequence[str], rows: Sequence[Sequence[Any]], text_columns: int, long: bool = False) -> str:
    """A table whose first columns are words and the rest numbers; ``long``: the last column may wrap."""

    def kind_of(number: int, columns: int, kind: str) -> str:
        if long and kind == "td" and number == columns - 1:
            return ' class="long"'
        return ' class="text"' if number < text_columns else ""

    def cells(kind: str, line: Sequence[Any]) -> str:
        return "".join(f"<{kind}{kind_of(n, len(line), kind)}>{escape(str(x))}</{kind}>" for n, x in enumerate(line))

    body = "\n".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    head = f"<tr>{cells('th', header)}</tr>"
    return f'<div class="wide"><table>\n<thead>{head}</thead>\n<tbody>\n{body}\n</tbody>\n</table></div>'
