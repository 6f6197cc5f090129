"""The figure of what alignment and RegMean did, from the lines of a run folder."""

import builtins
import json

import numpy as np
import pytest

from fedjax_dg.cli import main
from fedjax_dg.plots import plot_accuracy, plot_alignment, plot_latents


def record(number, rule="hfedatm", **parts):
    layer = {"residual": 1e-6 * number, "condition": 300.0, "fallback": 0.0, "raised": 0.0, "bytes": 4e6}
    group = {"identity_fraction": [1.0, 0.5], "cost_before": [2.0, 4.0], "cost_after": [1.0, 2.0]}
    merge = {"fot": {"conv1": group, "conv2": group}, "outputs_moved": [0.0, 3e-7], "regmean": {"dense1": layer}}
    scores = {"algorithm": "fedavg", "held_out": "noto", "seed": 0, "accuracy": 0.25 * number}
    return {"cell": "c", "aggregator": rule, "round": number, **scores, "merge": {**merge, **parts}}


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
    without = record(1)
    del without["merge"]["fot"], without["merge"]["outputs_moved"]
    _, svg = plot_alignment(run(without))
    assert svg.read_text().count("<!-- switched off -->") == 2


def test_a_network_without_filters_says_so(run):
    _, svg = plot_alignment(run(record(1, fot={}, outputs_moved=[0.0, 0.0])))
    assert svg.read_text().count("<!-- nothing to align -->") == 2


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
def test_a_run_without_alignment_is_refused(run, records, message):
    with pytest.raises(ValueError, match=message):
        plot_alignment(run(*records))


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
    drawn = ["accuracy.png", "accuracy.svg", "alignment.png", "alignment.svg"]
    assert sorted(p.name for p in folder.iterdir()) == [*drawn, "metrics.jsonl"]
    assert "alignment.png" in capsys.readouterr().out


def test_a_run_without_alignment_has_its_accuracy_drawn(run):
    folder = run({**record(1, rule="mean"), "merge": {}})
    assert main(["plot", str(folder)]) == 0
    assert sorted(p.name for p in folder.iterdir()) == ["accuracy.png", "accuracy.svg", "metrics.jsonl"]


def test_accuracy_is_a_line_per_rule_and_a_panel_per_domain_over_seeds(run):
    """A stage's line, which has no accuracy, is left out."""
    lines = [
        {**record(number, rule), "held_out": domain, "seed": seed, "accuracy": 0.1 * number + 0.02 * seed}
        for number in (1, 2)
        for rule in ("mean", "hfedatm")
        for domain in ("noto", "twemoji")
        for seed in (0, 1)
    ]
    stage = {"cell": "c", "algorithm": "lsi", "aggregator": "mean", "held_out": "noto", "round": 0, "stage": "latents"}
    folder = run(stage, *lines)
    png, svg = plot_accuracy([folder], folder)
    assert png.read_bytes().startswith(b"\x89PNG")
    text = svg.read_text()
    for shown in ("noto held out", "twemoji held out", "fedavg, mean", "fedavg, hfedatm", "server round"):
        assert f"<!-- {shown} -->" in text, shown
    assert "lsi" not in text


def test_runs_are_drawn_together(tmp_path, capsys):
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text(json.dumps(record(1)) + "\n")
    runs = [str(tmp_path / name) for name in ("one", "other")]
    assert main(["plot", *runs, "--out", str(tmp_path / "both")]) == 0
    text = (tmp_path / "both" / "accuracy.svg").read_text()
    assert "(one)" in text and "(other)" in text
    assert "accuracy.png" in capsys.readouterr().out


def test_a_run_without_an_evaluated_round_is_refused(run):
    with pytest.raises(ValueError, match="has no evaluated round yet"):
        plot_accuracy([run({"round": 0, "stage": "latents"})], ".")


def test_latents_are_drawn_beside_features(tmp_path):
    rng = np.random.default_rng(0)
    real, made = rng.normal(size=(20, 5)), rng.normal(size=(12, 5)) + 3
    labels = np.arange(20) % 3, np.arange(12) % 3
    png, svg = plot_latents({"all losses": (real, made), "without one": (real, real[:12])}, labels, tmp_path)
    assert png.read_bytes().startswith(b"\x89PNG")
    assert all(f"<!-- {shown} -->" in svg.read_text() for shown in ("all losses", "without one", "real", "made"))
