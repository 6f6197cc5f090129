"""The figure of what alignment and RegMean did, from the lines of a run folder."""

import builtins
import json

import pytest

from fedjax_dg.cli import main
from fedjax_dg.plots import plot_alignment


def record(number, rule="hfedatm", **parts):
    layer = {"residual": 1e-6 * number, "condition": 300.0, "fallback": 0.0, "raised": 0.0, "bytes": 4e6}
    group = {"identity_fraction": [1.0, 0.5], "cost_before": [2.0, 4.0], "cost_after": [1.0, 2.0]}
    merge = {"fot": {"conv1": group, "conv2": group}, "outputs_moved": [0.0, 3e-7], "regmean": {"dense1": layer}}
    return {"cell": "c", "aggregator": rule, "round": number, "merge": {**merge, **parts}}


@pytest.fixture
def run(tmp_path):
    """Writes a run folder of these records."""

    def write(*records):
        (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
        return tmp_path

    return write


def test_the_figure_has_every_layer_and_what_was_uploaded(run):
    folder = run(record(1), record(2), {"cell": "m", "aggregator": "mean", "round": 1})
    png, svg = plot_alignment(folder)
    assert png.read_bytes().startswith(b"\x89PNG")
    text = svg.read_text()
    comments = [line for line in text.splitlines() if line.strip().startswith("<!--")]
    for shown in ("conv1", "conv2", "dense1", "hfedatm", "server round"):
        assert any(shown in line for line in comments), shown
    assert any("Grams: 4.00 MB a client" in line for line in comments)
    assert any("3.0e-07" in line and "0 fallbacks" in line for line in comments)


def test_parts_that_were_switched_off_say_so(run):
    _, svg = plot_alignment(run(record(1, fot={}, outputs_moved=[0.0, 0.0])))
    assert svg.read_text().count("<!-- switched off -->") == 2


def test_several_rules_are_drawn_below_each_other(run):
    _, svg = plot_alignment(run(record(1), record(1, rule="hfedatm_literal")))
    text = svg.read_text()
    assert "hfedatm: alignment" in text and "hfedatm_literal: alignment" in text


@pytest.mark.parametrize(
    ("records", "message"),
    [
        (
            [{"aggregator": "mean", "round": 1}],
            "has no round in which layers were aligned or merged: run it with --aggr",
        ),
        ([], "has no round in which"),
    ],
)
def test_a_run_without_alignment_is_refused(run, records, message, capsys):
    folder = run(*records)
    assert main(["plot", str(folder)]) == 2
    assert message in capsys.readouterr().err


def test_a_folder_that_is_no_run_is_refused(tmp_path, capsys):
    assert main(["plot", str(tmp_path)]) == 2
    assert "has no metrics.jsonl: give the folder of a run" in capsys.readouterr().err
    assert main(["plot"]) == 2
    assert "No run folder is given" in capsys.readouterr().err


def test_without_matplotlib_the_extra_is_named(run, capsys, monkeypatch):
    real = builtins.__import__

    def missing(name, *args, **kwargs):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", missing)
    assert main(["plot", str(run(record(1)))]) == 2
    assert "pip install 'fedjax-dg[plots]'" in capsys.readouterr().err


def test_the_command_writes_beside_the_run(run, capsys):
    folder = run(record(1))
    assert main(["plot", str(folder)]) == 0
    assert sorted(p.name for p in folder.iterdir()) == ["alignment.png", "alignment.svg", "metrics.jsonl"]
    assert "alignment.png" in capsys.readouterr().out
