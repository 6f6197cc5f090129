"""Figures of run folders."""

import builtins
import dataclasses
import json
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from fake_run import DOMAINS, config_of, grid, line_of, record_of, write_checkpoint, write_run
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text
from threadpoolctl import threadpool_limits

from fedjax_dg import datasets
from fedjax_dg.cli import main
from fedjax_dg.config import RunConfig
from fedjax_dg.datasets import Domains
from fedjax_dg.federation import Deal, deal
from fedjax_dg.models import load_model
from fedjax_dg.plots import (
    KINDS,
    draw,
    draw_accuracy,
    draw_domains,
    draw_sweep,
    open_run,
    plot,
    plot_accuracy,
    plot_alignment,
    plot_latents,
)
from fedjax_dg.plots.common import MOST_LINES, Run, line_style, selected_settings
from fedjax_dg.plots.features import embed, head_inputs
from fedjax_dg.plots.grams import effective_rank, spectra_of
from fedjax_dg.plots.partition import counts, draw_counts
from fedjax_dg.plots.sweeps import by_setting, scale_of
from fedjax_dg.results import Cell
from fedjax_dg.types import Topology


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


# --- figures of whole run folders -----------------------------------------------------------------------------------


def texts_of(figure):
    return [text.get_text() for text in figure.findobj(Text) if text.get_visible() and text.get_text()]


def assert_nothing_is_cut(figure):
    """Every text that is shown lies within the page."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    parts = [figure, *figure.subfigs]
    shown = [text for part in parts for text in part.texts]
    shown += [text for part in parts for legend in part.legends for text in legend.get_texts()]
    for axes in figure.axes:
        if axes.axison:
            shown += [axes.title, axes.xaxis.label, axes.yaxis.label, *axes.texts]
            for axis in (axes.xaxis, axes.yaxis):
                shown += [label for tick in axis._update_ticks() for label in (tick.label1, tick.label2)]
    shown = [text for text in shown if text.get_visible() and text.get_text().strip()]
    assert len(shown) > 5
    for text in shown:
        box = text.get_window_extent(canvas.get_renderer())
        assert min(box.x0, box.y0) >= -1, text.get_text()
        assert box.x1 <= figure.bbox.x1 + 1 and box.y1 <= figure.bbox.y1 + 1, text.get_text()


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run folder with everything that figures can need; its model is drawn, not trained."""
    config = config_of()
    cells = grid(config)
    aligned = record(2)["merge"]
    records = [
        record_of(cell, number, 0.2 + 0.1 * number, merge=aligned if cell.aggregator == "hfedatm" else {})
        for cell in (Cell("fedavg", rule, h, s) for h in DOMAINS for s in (0, 1) for rule in ("mean", "hfedatm"))
        for number in (1, 2)
    ]
    run = write_run(tmp_path_factory.mktemp("runs") / "whole", config, cells, records=records)
    write_checkpoint(run, config, max(cells, key=lambda line: line["source_accuracy"]))
    return run


def test_every_kind_is_drawn_or_skipped_by_name(whole, tmp_path, monkeypatch):
    monkeypatch.setattr("fedjax_dg.plots.features.MOST_EXAMPLES", 12)
    monkeypatch.setattr("fedjax_dg.plots.grams.MOST_ROWS", 64)
    found = list(plot([whole], tmp_path / "figures"))
    (skipped,) = [f for f in found if not hasattr(f, "read_bytes")]
    assert (skipped.kind, skipped.why_not.startswith(f"{whole} has no finished cells of different settings")) == (
        "sweep",
        True,
    )
    assert [p.name for p in found if p is not skipped] == [
        f"{kind}.{end}" for kind in KINDS if kind != "sweep" for end in ("png", "svg")
    ]
    shown = {kind: (tmp_path / "figures" / f"{kind}.svg").read_text() for kind in KINDS if kind != "sweep"}
    wanted = {
        "accuracy": ("training loss", "validation examples, %", "fedavg, hfedatm"),
        "domains": ("worst domain of its line", "average", "fluent_mono"),
        "partition": (
            "emoji_styles, noto held out, seed 0: training examples of every client",
            "Objects",
            "station, its 2 clients side by side",
        ),
        "alignment": ("conv2",),
        "grams": ("dense1 (d = 400)", "station: effective rank", "head (d = 84)"),
        "features": ("fluent_mono (held out)", "Objects", "fedavg-hfedatm-fluent_mono-seed1, round 2"),
    }
    for kind, words in wanted.items():
        for word in words:
            assert f"<!-- {word} -->" in shown[kind].replace("&amp;", "&"), (kind, word)


def test_no_label_is_cut(whole):
    for drawn in draw([open_run(whole)], ["accuracy", "domains", "partition"]):
        assert_nothing_is_cut(drawn.figure)


def test_kinds_that_need_what_is_not_there_are_named(tmp_path, capsys):
    """Without config.json and result.json only the learning curves can be drawn."""
    (tmp_path / "metrics.jsonl").write_text(json.dumps(record(1, rule="mean", fot={}) | {"merge": {}}) + '\n{"cut')
    assert main(["plot", str(tmp_path), "--kinds", "domains", "partition", "grams", "accuracy"]) == 0
    said = capsys.readouterr().out
    assert "Skipped domains: " in said and "has no finished cell yet" in said
    assert "Skipped partition: " in said and "has no config.json" in said
    assert "Skipped grams: " in said
    assert main(["plot", str(tmp_path), "--kinds", "domains"]) == 2
    assert "No figure was drawn of" in capsys.readouterr().err
    assert main(["plot", str(tmp_path), "--kinds", "domain"]) == 2
    assert "Unknown kind of figure 'domain'; did you mean 'domains'?" in capsys.readouterr().err


def test_several_runs_are_compared_in_one_figure_and_have_their_own_others(whole, tmp_path):
    other = write_run(tmp_path / "other", config_of(algorithm="fedprox"))
    found = list(plot([whole, other], tmp_path / "out", ["domains", "partition"]))
    names = [path.name for path in found]
    assert names == [
        f"{name}.{end}" for name in ("domains", "partition-whole", "partition-other") for end in ("png", "svg")
    ]
    text = (tmp_path / "out" / "domains.svg").read_text()
    assert "<!-- fedavg, mean (whole) -->" in text and "<!-- fedprox, hfedatm (other) -->" in text


# --- what is drawn --------------------------------------------------------------------------------------------------


def test_bars_are_means_with_intervals_and_the_worst_domain_is_marked(tmp_path):
    cells = [
        line_of(Cell("fedavg", "mean", held_out, seed), accuracy)
        for held_out, accuracies in (("noto", (0.5, 0.7)), ("twemoji", (0.4, 0.4)))
        for seed, accuracy in enumerate(accuracies)
    ]
    figure = draw_domains([open_run(write_run(tmp_path / "run", config_of(), cells))])
    (axes,) = figure.axes
    heights = [bar.get_height() for bars in axes.containers if hasattr(bars, "patches") for bar in bars.patches]
    np.testing.assert_allclose(heights, [60, 40, 50])  # noto, twemoji, average
    (segment,) = axes.containers[0].lines[2][0].get_segments()
    half = 12.706204736 * 20 / np.sqrt(2) / np.sqrt(2)  # t(0.975, 1) from a table
    np.testing.assert_allclose(segment[:, 1], [60 - half, 60 + half], rtol=1e-6)
    triangles = [line.get_xdata()[0] for line in axes.lines if line.get_marker() == "^"]
    assert [round(float(x)) for x in triangles] == [1]
    assert_nothing_is_cut(figure)


def test_curves_are_means_and_bands_the_range(tmp_path):
    records = [
        record_of(Cell("fedavg", "mean", "noto", seed), number, accuracy=0.1 * number + 0.1 * seed)
        for seed in (0, 1)
        for number in (1, 2, 3)
    ]
    figure = draw_accuracy([open_run(write_run(tmp_path / "run", config_of(held_out="noto"), [], records=records))])
    accuracy, source, loss = figure.axes
    np.testing.assert_allclose(accuracy.lines[0].get_ydata(), [15, 25, 35])
    band = accuracy.collections[0].get_paths()[0].vertices[:, 1]
    np.testing.assert_allclose([band.min(), band.max()], [10, 40])
    np.testing.assert_allclose(loss.lines[0].get_ydata(), [2, 1, 2 / 3])
    assert_nothing_is_cut(figure)


def test_no_two_lines_look_alike():
    styles = [tuple(line_style(number).values()) for number in range(MOST_LINES)]
    assert len(set(styles)) == MOST_LINES
    assert len({(color, dashes) for color, _, dashes in styles}) == MOST_LINES


def test_more_lines_than_can_be_told_apart_are_refused(tmp_path):
    rules = [f"rule{i}" for i in range(13)]
    run = open_run(write_run(tmp_path / "run", config_of(), grid(config_of(), rules, ("noto",), 1)))
    with pytest.raises(ValueError, match="There are 13 lines .* more than the 12"):
        draw_domains([run])


def test_counts_by_hand():
    """Two stations of one client; the third example is of domain 1, class 0."""
    domains = Domains(
        "d", np.zeros((4, 1)), np.int32([0, 1, 0, 1]), np.int32([0, 0, 1, 1]), None, None, ("a", "b"), ("x", "y")
    )
    held = np.array([[[0, 1, 2]], [[3, -1, -1]]])
    dealt = Deal(held, np.zeros((2, 1), np.int32), np.array([0]), np.array([True]), Topology(2, 1), None)
    assert counts(domains.domain, dealt, 2).tolist() == [[[2, 1]], [[0, 1]]]
    assert counts(domains.labels, dealt, 2).tolist() == [[[2, 1]], [[0, 1]]]
    figure = draw_counts(domains, dealt, "a title")
    assert {"a", "b", "x", "y", "2", "1", "station, of one client", "a title"} <= set(texts_of(figure))
    assert_nothing_is_cut(figure)


def test_many_clients_and_classes_fit():
    rng = np.random.default_rng(0)
    total = 3000
    names = tuple(f"domain {i}" for i in range(6)), tuple(f"class number {i}" for i in range(65))
    domain, labels = rng.integers(0, 6, total).astype(np.int32), rng.integers(0, 65, total).astype(np.int32)
    domains = Domains("d", np.zeros((total, 1)), labels, domain, None, None, *names)
    dealt = deal(domains, "domain 0", 10, 10, 0.3, label_alpha=0.3)
    figure = draw_counts(domains, dealt, "many")
    assert not any("class number" in text for text in texts_of(figure))  # 65 names are no names
    assert_nothing_is_cut(figure)


def test_effective_rank_of_known_spectra():
    assert effective_rank(np.ones(7)) == pytest.approx(7)
    assert effective_rank(np.array([3.0, 0.0, 0.0])) == pytest.approx(1)
    assert effective_rank(np.array([1.0, 1.0, -1e-9])) == pytest.approx(2)
    shares = np.array([0.5, 0.25, 0.25])
    assert effective_rank(8 * shares) == pytest.approx(2**1.5)  # entropy of 1.5 bits
    assert effective_rank(np.zeros(3)) == pytest.approx(1)


def test_spectra_are_those_of_what_the_layers_read(whole, monkeypatch):
    monkeypatch.setattr("fedjax_dg.plots.grams.MOST_ROWS", 300)
    run = open_run(whole)
    spectra = spectra_of(run)
    model = load_model(whole)
    held = run.deal("fluent_mono", 1).held[1]
    rows = np.sort(held[held >= 0])
    chosen = rows[np.linspace(0, len(rows) - 1, 300).round().astype(int)]
    read = jax.jit(model.backbone.dense_inputs)(model.variables, jax.numpy.asarray(run.data.inputs[chosen]))
    for layer in ("dense2", "head"):
        x = np.asarray(read[layer], np.float64)
        with threadpool_limits(1):
            expected = np.linalg.svd(x, compute_uv=False) ** 2 / len(x)
        np.testing.assert_allclose(spectra[1][layer], expected, atol=1e-5 * expected[0])


def test_features_are_what_the_head_reads_of_each_row(whole, monkeypatch):
    monkeypatch.setattr("fedjax_dg.plots.features.AT_ONCE", 4)
    model, inputs = load_model(whole), np.random.default_rng(0).integers(0, 256, (9, 32, 32, 3), dtype=np.uint8)
    rows = np.array([8, 0, 3, 3, 1, 7])
    read = head_inputs(model, inputs, rows)
    np.testing.assert_allclose(read, model.features(inputs[rows]), atol=1e-5)


def test_the_same_points_are_drawn_every_time():
    rows = np.random.default_rng(0).normal(size=(30, 5)).astype(np.float32)
    assert np.array_equal(embed(rows), embed(rows))


# --- sweeps ---------------------------------------------------------------------------------------------------------


def swept(tmp_path, settings, rules=("hfedatm",)):
    """A sweep whose source validation likes the second setting, and whose held-out domain the last."""
    cells = [
        line_of(
            Cell("fedavg", rule, held_out, seed, tuple(setting.items())),
            0.3 + 0.01 * i + 0.001 * seed,
            0.6 - 0.02 * abs(i - 1),
        )
        for rule in rules
        for i, setting in enumerate(settings)
        for held_out in ("noto", "twemoji")
        for seed in (0, 1)
    ]
    return open_run(write_run(tmp_path / "run", config_of(), cells))


def test_a_setting_is_selected_by_source_validation_alone(tmp_path):
    run = swept(tmp_path, [{"alpha": a} for a in (0.1, 0.5, 0.9)])
    assert selected_settings(run.cells) == {("fedavg", "hfedatm"): (("alpha", 0.5),)}


def test_a_setting_that_broke_down_on_a_domain_is_not_judged_by_the_others(tmp_path):
    """0.9 is best where it finished; a seed without one of its domains counts nowhere."""
    easy = {"noto": 0.9, "twemoji": 0.1}
    cells = [
        line_of(Cell("fedavg", "hfedatm", held_out, seed, (("alpha", alpha),)), 0.5, easy[held_out])
        for alpha in (0.1, 0.9)
        for held_out in easy
        for seed in (0, 1)
        if (alpha, held_out, seed) != (0.9, "twemoji", 1)
    ]
    assert selected_settings(cells) == {("fedavg", "hfedatm"): (("alpha", 0.1),)}
    scores = by_setting(cells, "source_accuracy")
    assert {dict(setting)["alpha"]: (round(x["mean"]), x["n"]) for setting, x in scores.items()} == {
        0.1: (50, 2),
        0.9: (50, 1),
    }
    figure = draw_sweep([open_run(write_run(tmp_path / "run", config_of(), cells))])
    assert "fedavg, hfedatm (1 settings lack cells)" in texts_of(figure)
    split = [cell for cell in cells if (cell["held_out"] == "noto") == (cell["seed"] == 0)]
    with pytest.raises(
        ValueError, match="has no setting of fedavg, hfedatm with a seed that has finished all held-out domains"
    ):
        draw_sweep([open_run(write_run(tmp_path / "split", config_of(), split))])


def test_one_hyper_parameter_is_a_curve_with_a_star(tmp_path):
    run = swept(tmp_path, [{"ridge": r} for r in (1e-6, 1e-3, 1.0)])
    figure = draw_sweep([run])
    source, held_out = figure.axes
    assert source.get_xscale() == held_out.get_xscale() == "log"
    stars = [line for axes in figure.axes for line in axes.lines if line.get_marker() == "*"]
    np.testing.assert_allclose([line.get_xdata()[0] for line in stars], [1e-3, 1e-3])
    np.testing.assert_allclose([line.get_ydata()[0] for line in stars], [60, 31.05])
    assert_nothing_is_cut(figure)


def test_a_rule_without_the_hyper_parameter_is_a_level_line(tmp_path):
    run = swept(tmp_path, [{"alpha": a} for a in (0.0, 0.01, 1.0)])
    plain = [line_of(Cell("fedavg", "mean", "noto", seed), 0.4, 0.5) for seed in (0, 1)]
    run = open_run(write_run(tmp_path / "more", config_of(), [*plain, *run.cells]))
    source, _ = draw_sweep([run]).axes
    assert source.get_xscale() == "symlog"
    assert source.lines[0].get_ydata() == [50, 50]


def test_two_hyper_parameters_are_heat_maps_side_by_side(tmp_path):
    settings = [{"alpha": a, "reference": r} for r in ("first", "previous_global") for a in (0.1, 0.5)]
    figure = draw_sweep([swept(tmp_path, settings)])
    source, held_out = (axes for axes in figure.axes if axes.images)
    assert source.images[0].get_array().tolist() == pytest.approx(np.array([[58, 60], [58, 56]]))
    assert held_out.images[0].get_array().tolist() == pytest.approx(np.array([[30.05, 31.05], [32.05, 33.05]]))
    (star,) = [line for line in source.lines if line.get_marker() == "*"]
    assert round(float(star.get_xdata()[0])), round(float(star.get_ydata()[0])) == (1, 0)
    assert {"first", "previous_global", "60.0", "alpha"} <= set(texts_of(figure))
    assert_nothing_is_cut(figure)


def test_three_hyper_parameters_are_a_row_a_pair_and_random_ones_are_points(tmp_path):
    settings = [{"alpha": 0.1 + 0.01 * i**2, "ridge": 10.0**-i, "batch_size": 8 * 2 ** (i % 2)} for i in range(6)]
    figure = draw_sweep([swept(tmp_path, settings)])
    panels = [axes for axes in figure.axes if axes.get_xlabel()]
    pairs = [(axes.get_xlabel(), axes.get_ylabel()) for axes in panels[::2]]
    assert pairs == [("alpha", "ridge"), ("alpha", "batch_size"), ("ridge", "batch_size")]
    assert len(panels[0].collections[0].get_offsets()) == 6 and panels[0].get_yscale() == "log"
    assert_nothing_is_cut(figure)


@pytest.mark.parametrize(
    ("values", "scale"),
    [
        ((0.1, 0.5, 1.0), "linear"),
        ((0.01, 1.0), "log"),
        ((0, 1e-3, 1.0), "symlog"),
        (("a", "b"), "linear"),
        ((-1.0, 100.0), "linear"),
    ],
)
def test_axes_are_logarithmic_where_values_span_decades(values, scale):
    axes = Figure().subplots()
    scale_of(values)(axes)
    assert axes.get_xscale() == scale


def test_curves_and_bars_of_a_sweep_are_of_the_selected_setting(tmp_path):
    run = swept(tmp_path, [{"alpha": a} for a in (0.1, 0.5, 0.9)])
    for figure in (draw_accuracy([run]), draw_domains([run])):
        assert "fedavg, hfedatm, alpha=0.5" in texts_of(figure) and "fedavg, hfedatm, alpha=0.9" not in texts_of(figure)
    begun = write_run(tmp_path / "begun", config_of(), [], records=list(run.records))
    with pytest.raises(ValueError, match="is a sweep without a finished cell, so no setting can be chosen"):
        draw_accuracy([open_run(begun)])


def test_cells_of_two_held_out_domains_are_left_out(tmp_path):
    """They are only trained for leave-one-domain-out."""
    cells = [line_of(Cell("fedavg", "mean", name, 0)) for name in ("noto", "twemoji", "noto+twemoji")]
    run = open_run(write_run(tmp_path / "run", config_of(), cells))
    assert [cell["held_out"] for cell in run.cells] == ["noto", "twemoji"]
    assert {record["held_out"] for record in run.records} == {"noto", "twemoji"}


def test_the_selected_model_of_a_sweep_has_the_stations_of_its_own_cell(tmp_path):
    """Not those of the configuration that the sweep changed."""
    run = Run(tmp_path, "run", (), ())
    config = RunConfig(stations=3, clients_per_station=2, domain_mix=0.0)
    own = dataclasses.replace(config, stations=2)
    cell = {"held_out": "noto", "seed": 0}
    run.__dict__.update(config=config, data=datasets.load("emoji_styles"), model=SimpleNamespace(config=own, cell=cell))
    assert run.deal("noto", 0).held.shape[:2] == (3, 2)
    assert run.deal_of_model().held.shape[:2] == (2, 2)
