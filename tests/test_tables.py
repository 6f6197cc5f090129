"""Tables: intervals and pairs by hand, rounds and settings selected by every rule, why numbers are missing, all formats."""

import csv
import dataclasses
import io
import json
import re

import numpy as np
import pytest
from scipy import stats

from fedjax_dg.cli import main
from fedjax_dg.config import RunConfig
from fedjax_dg.results import SCHEMA, Cell, RunFolder, read_json
from fedjax_dg.tables import choose, interval, load, markdown, render, rows, summarise, table_title, write_results

CONFIG = RunConfig(rounds=3, seeds=2, domain_mix=0.0)


def cell(aggregator="mean", held_out="noto", seed=0, accuracy=0.5, algorithm="fedavg"):
    return {
        "algorithm": algorithm,
        "aggregator": aggregator,
        "held_out": held_out,
        "seed": seed,
        "accuracy": accuracy,
    }


def grid(accuracies):
    """Cells from ``{(aggregator, held_out): accuracy by seed}``."""
    return [cell(a, d, s, x) for (a, d), values in accuracies.items() for s, x in enumerate(values)]


def find(entries, **wanted):
    (entry,) = [e for e in entries if all(e[k] == v for k, v in wanted.items())]
    return entry


# --- numbers ---------------------------------------------------------------------------------------------------------


def test_interval_of_three_values_by_hand():
    got = interval([1.0, 2.0, 3.0])
    assert (got["mean"], got["n"]) == (2.0, 3)
    assert got["ci95"] == pytest.approx(4.302652729911275 / np.sqrt(3), rel=1e-9)  # t(0.975, 2) from a table


@pytest.mark.parametrize("n", [2, 5, 30])
def test_interval_is_that_of_scipy(n):
    values = np.random.default_rng(n).normal(0.6, 0.1, n)
    low, high = stats.t.interval(0.95, n - 1, loc=values.mean(), scale=stats.sem(values))
    got = interval(values.tolist())
    assert (got["mean"] - got["ci95"], got["mean"] + got["ci95"]) == pytest.approx((low, high), rel=1e-9)


def test_one_seed_has_no_interval():
    assert interval([0.25]) == {"mean": 0.25, "ci95": None, "se": None, "n": 1}


def test_summary_has_a_line_for_each_rule_and_domain():
    summary, _ = summarise(grid({("mean", "noto"): [0.2, 0.4], ("hfedatm", "noto"): [0.5, 0.5]}))
    assert [(s["algorithm"], s["aggregator"], s["held_out"]) for s in summary] == [
        ("fedavg", "mean", "noto"),
        ("fedavg", "hfedatm", "noto"),
    ]
    assert find(summary, aggregator="mean") | interval([0.2, 0.4]) == find(summary, aggregator="mean")
    assert find(summary, aggregator="hfedatm")["ci95"] == 0.0


def test_differences_are_paired_by_seed():
    """Both rules vary far more between seeds than they differ: an unpaired interval would be wide."""
    summary, paired = summarise(grid({("mean", "noto"): [0.1, 0.5, 0.9], ("hfedatm", "noto"): [0.2, 0.6, 1.0]}))
    (line,) = paired
    assert (line["aggregator"], line["baseline"], line["held_out"], line["n"]) == ("hfedatm", "mean", "noto", 3)
    assert line["mean"] == pytest.approx(0.1) and line["ci95"] == pytest.approx(0.0, abs=1e-12)
    assert find(summary, aggregator="mean")["ci95"] > 0.9


def test_differences_are_over_common_seeds_only():
    cells = [cell("mean", seed=1, accuracy=0.4), *(cell("hfedatm", seed=s, accuracy=0.5 + 0.1 * s) for s in range(2))]
    _, (line,) = summarise(cells)
    assert line["mean"] == pytest.approx(0.6 - 0.4) and (line["ci95"], line["n"]) == (None, 1)


def test_no_difference_without_a_common_seed():
    assert summarise([cell("mean", seed=0), cell("hfedatm", seed=1)])[1] == []


def test_the_first_rule_is_the_baseline_of_all_others():
    _, paired = summarise(grid({("hfedatm", "noto"): [0.5], ("mean", "noto"): [0.2], ("fedadam", "noto"): [0.1]}))
    assert [(p["aggregator"], p["baseline"]) for p in paired] == [("mean", "hfedatm"), ("fedadam", "hfedatm")]


def test_algorithms_are_compared_with_their_own_baseline():
    cells = [cell(a, accuracy=x, algorithm=m) for m, a, x in (("fedavg", "mean", 0.1), ("fedsr", "mean", 0.5))]
    cells += [cell("hfedatm", accuracy=0.6, algorithm="fedsr")]
    _, (line,) = summarise(cells)
    assert line["algorithm"] == "fedsr" and line["mean"] == pytest.approx(0.1)


def test_average_is_each_seeds_mean_over_domains():
    summary, paired = summarise(
        grid(
            {
                ("mean", "noto"): [0.1, 0.3],
                ("mean", "twemoji"): [0.5, 0.5],
                ("hfedatm", "noto"): [0.3, 0.3],
                ("hfedatm", "twemoji"): [0.5, 0.7],
            }
        )
    )
    expected = interval([0.3, 0.4])
    assert find(summary, aggregator="mean", held_out="average") == pytest.approx(
        {"algorithm": "fedavg", "aggregator": "mean", "held_out": "average"} | expected
    )
    assert find(paired, held_out="average")["mean"] == pytest.approx(0.1)


def test_average_is_over_seeds_that_have_every_domain():
    cells = grid({("mean", "noto"): [0.1, 0.3, 0.8], ("mean", "twemoji"): [0.5, 0.5]})
    line = find(summarise(cells)[0], held_out="average")
    assert line == pytest.approx(line | interval([0.3, 0.4]))


def test_no_average_where_a_rule_misses_a_domain_or_there_is_one_domain():
    cells = grid({("mean", "noto"): [0.1], ("mean", "twemoji"): [0.5], ("hfedatm", "noto"): [0.2]})
    averages = [s["aggregator"] for s in summarise(cells)[0] if s["held_out"] == "average"]
    assert averages == ["mean"]
    assert all(s["held_out"] == "noto" for s in summarise(grid({("mean", "noto"): [0.1, 0.2]}))[0])


def test_table_by_hand():
    cells = grid(
        {
            ("mean", "noto"): [0.5, 0.5],
            ("mean", "twemoji"): [0.25, 0.25],
            ("hfedatm", "noto"): [0.5, 0.6],
        }
    )
    assert markdown(cells, "A title.", seeds=2).splitlines() == [
        "A title.",
        "",
        "| algorithm | server rule | noto | twemoji | average | worst |",
        "| --- | --- | --- | --- | --- | --- |",
        "| fedavg | mean | 50.0 ± 0.0 | 25.0 ± 0.0 | 37.5 ± 0.0 | 25.0 ± 0.0 |",
        # t(0.975, 1) = 12.7062; 12.7062 * 0.0707107 / sqrt(2) = 0.635
        "| fedavg | hfedatm | 55.0 ± 63.5 | - | - | - |",
        "| fedavg | hfedatm - mean | +5.0 ± 63.5 | - | - | - |",
    ]


def test_table_of_one_seed_shows_no_interval():
    assert rows([cell(accuracy=0.123)], seeds=1)[1] == [["fedavg", "mean", "12.3"]]


def test_table_says_where_seeds_are_missing():
    cells = grid({("mean", "noto"): [0.5, 0.5, 0.5], ("hfedatm", "noto"): [0.6, 0.6]})
    assert [line[2] for line in rows(cells, seeds=3)[1]] == ["50.0 ± 0.0", "60.0 ± 0.0 (n=2)", "+10.0 ± 0.0 (n=2)"]


def test_worst_is_each_seeds_lowest_domain():
    cells = grid({("mean", "noto"): [0.1, 0.6], ("mean", "twemoji"): [0.5, 0.3]})
    line = find(summarise(cells)[0], held_out="worst")
    assert line == pytest.approx(line | interval([0.1, 0.3]))


def test_the_standard_error_is_scipys():
    values = np.random.default_rng(0).normal(0.6, 0.1, 5)
    assert interval(values)["se"] == pytest.approx(stats.sem(values), rel=1e-12)


def swept(aggregator, seed, accuracy, **hparams):
    return cell(aggregator, seed=seed, accuracy=accuracy) | {"hparams": hparams}


def test_a_sweeps_rows_are_its_settings_each_paired_with_the_baseline_of_the_same_one():
    """alpha is nothing to the mean, client_lr is for both."""
    cells = [swept("mean", 0, 0.1 * lr, client_lr=lr) for lr in (1, 2)]
    cells += [
        swept("hfedatm", 0, 0.1 * lr + alpha, client_lr=lr, alpha=alpha) for lr in (1, 2) for alpha in (0.25, 0.5)
    ]
    summary, paired = summarise(cells)
    assert [e["hparams"] for e in summary][:2] == [{"client_lr": 1}, {"client_lr": 2}] and len(summary) == 6
    assert [e["mean"] for e in paired] == pytest.approx([0.25, 0.5, 0.25, 0.5])
    header, lines = rows(cells, 1)
    assert header == ["algorithm", "server rule", "setting", "noto"]
    assert lines[2] == ["fedavg", "hfedatm", "client_lr=1, alpha=0.25", "35.0"]
    assert lines[-1] == ["fedavg", "hfedatm - mean", "client_lr=2, alpha=0.5", "+50.0"]


def test_the_title_does_not_give_one_value_of_what_is_swept():
    cells = [swept("mean", 0, 0.1, stations=2), cell("mean") | {"chosen": {"domain_mix": 0.5}}]
    assert "10 stations x 10 clients" in table_title(CONFIG)
    assert "several stations x 10 clients, 3 rounds of 5 station rounds, domain mix several." in table_title(
        CONFIG, cells=cells
    )


def test_any_row_can_be_the_baseline():
    cells = [cell("mean", accuracy=0.1), cell("mean", accuracy=0.4, algorithm="fedsr")]
    cells += [cell("hfedatm", accuracy=0.6, algorithm="fedsr")]
    _, paired = summarise(cells, ("fedavg", "mean"))
    assert [(e["algorithm"], e["aggregator"], e["baseline"]) for e in paired] == [
        ("fedsr", "mean", "fedavg mean"),
        ("fedsr", "hfedatm", "fedavg mean"),
    ]
    assert [e["mean"] for e in paired] == pytest.approx([0.3, 0.5])


# --- selection -------------------------------------------------------------------------------------------------------


def curve(*rounds):
    """Lines of a cell: (source accuracy, held-out accuracy) of each round, or a dict of its scores."""
    records = []
    for number, scores in enumerate(rounds, 1):
        if isinstance(scores, tuple):
            scores = dict(zip(("source_accuracy", "accuracy"), scores))
        rest = {"balanced_accuracy": None, "accuracy_unseen": None, "source_accuracy": 0.0}
        records.append({"round": number} | rest | scores)
    return records


def folder_of(path, curves, config=CONFIG, failed=(), planned=()):
    """A run folder with these cells, as a run leaves it."""
    folder = RunFolder(path, config)
    folder.keep_cells([*curves, *planned])
    cells = []
    for which, records in curves.items():
        for record in records:
            folder.add_metrics(which, record)
        last = {k: v for k, v in records[-1].items() if k != "round" and "/" not in k}
        told = {"selection": "last", "selected_round": len(records), "rounds": len(records)}
        cells.append(which.as_record() | last | told)
    write_results(folder, cells, [which.as_record() | {"error": why} for which, why in failed])
    return path


def of(seed=0, held_out="noto", setting=(), aggregator="mean"):
    return Cell("fedavg", aggregator, held_out, seed, tuple(setting))


CURVE = curve((0.5, 0.3), (0.9, 0.2), (0.7, 0.1), (0.9, 0.6))


@pytest.mark.parametrize(
    ("selection", "number", "accuracy"), [("source-validation", 2, 0.2), ("last", 4, 0.6), ("oracle", 4, 0.6)]
)
def test_rounds_are_selected_anew_by_any_rule(tmp_path, selection, number, accuracy):
    run = load(folder_of(tmp_path / "run", {of(): CURVE}))
    ((cell,), missing) = choose(run, selection)
    assert (cell["selected_round"], cell["accuracy"], cell["selection"], missing) == (number, accuracy, selection, {})


def test_the_setting_is_selected_for_each_seed_by_what_the_rule_looks_at(tmp_path):
    """By source validation the slow one for seed 0 and the fast one for seed 1; the oracle takes the other way round."""
    slow, fast = (("client_lr", 0.01),), (("client_lr", 0.1),)
    curves = {
        of(0, setting=slow): curve((0.9, 0.1)),
        of(0, setting=fast): curve((0.8, 0.5)),
        of(1, setting=slow): curve((0.3, 0.6)),
        of(1, setting=fast): curve((0.4, 0.2)),
    }
    run = load(folder_of(tmp_path / "run", curves))
    for selection, expected in (
        ("source-validation", [(0.01, 0.1), (0.1, 0.2)]),
        ("oracle", [(0.1, 0.5), (0.01, 0.6)]),
    ):
        cells = choose(run, selection).cells
        assert [(c["chosen"]["client_lr"], c["accuracy"]) for c in cells] == expected
        assert not any("hparams" in c for c in cells)
    assert len(choose(run, "oracle", "all").cells) == 4
    text = render([run.path], "source-validation")
    assert "Selected for fedavg, mean: client_lr=0.01 (1 of 2); client_lr=0.1 (1 of 2)" in text
    assert "15.0 ± " in text  # of 10 and 20


def test_equally_good_settings_and_rounds_leave_the_first(tmp_path):
    settings = [(("client_lr", lr),) for lr in (0.1, 0.01)]
    run = load(
        folder_of(tmp_path / "run", {of(setting=s): curve((0.5, 0.1 * i), (0.5, 0.9)) for i, s in enumerate(settings)})
    )
    ((cell,), _) = choose(run, "source-validation")
    assert (cell["chosen"], cell["selected_round"]) == ({"client_lr": 0.1}, 1)


def left_out(**accuracies):
    return {f"accuracy/{name}": value for name, value in accuracies.items()}


def test_leave_one_domain_out_selects_by_the_domains_that_are_left_out_too(tmp_path):
    """Domains a, b, c; for a, what counts is b without a and b, and c without a and c, in the same round and setting."""
    one, two = (("client_lr", 0.1),), (("client_lr", 0.2),)
    curves = {
        of(held_out="a", setting=one): curve((0.9, 0.11), (0.9, 0.12)),
        of(held_out="a", setting=two): curve((0.1, 0.21), (0.1, 0.22)),
        of(held_out="b", setting=one): curve((0.9, 0.31), (0.9, 0.32)),
        of(held_out="c", setting=one): curve((0.9, 0.41), (0.9, 0.42)),
        of(held_out="a+b", setting=one): curve(*[{"accuracy": 0.0} | left_out(a=0.9, b=b) for b in (0.2, 0.9)]),
        of(held_out="a+b", setting=two): curve(*[{"accuracy": 0.0} | left_out(a=0.1, b=b) for b in (0.7, 0.6)]),
        of(held_out="a+c", setting=one): curve(
            *[{"accuracy": 0.0} | left_out(a=a, c=c) for a, c in ((0.5, 0.1), (0.4, 0.2))]
        ),
        of(held_out="a+c", setting=two): curve(*[{"accuracy": 0.0} | left_out(a=0.1, c=c) for c in (0.5, 0.4)]),
        of(held_out="b+c", setting=one): curve(*[{"accuracy": 0.0} | left_out(b=x, c=x) for x in (0.3, 0.4)]),
    }
    run = load(folder_of(tmp_path / "run", curves))
    cells, missing = choose(run, "leave-one-domain-out")
    # a: two in round 1 has (0.7 + 0.5) / 2, one in round 2 (0.9 + 0.2) / 2. b: rounds have 0.9 + 0.3, 0.9 + 0.4. c: both
    # have 0.8, so the first
    assert [(c["held_out"], c["selected_round"], c["accuracy"]) for c in cells] == [
        ("a", 1, 0.21),
        ("b", 2, 0.32),
        ("c", 1, 0.41),
    ]
    assert missing == {} and {c["held_out"] for c in choose(run, "last").cells} == {"a", "b", "c"}


def test_leave_one_domain_out_says_which_cells_it_lacks(tmp_path):
    pair = {of(held_out="a+b"): curve({"accuracy": 0.1} | left_out(a=0.5, b=0.6))}
    curves = {of(held_out=d): CURVE for d in "abc"} | pair
    run = folder_of(tmp_path / "run", curves)
    text = render([run], "leave-one-domain-out")
    assert (
        "Missing: fedavg, mean, c, seed 0: no cell leaves out c and a: run with --held-out all --selection leave"
        in text
    )
    assert "%" in text and "fedavg" in text


# --- missing numbers and formats --------------------------------------------------------------------------------------


def example(path):
    """Two rules and domains, two seeds; one cell broke down, one has not been run."""
    curves = {
        of(seed, held_out, aggregator=rule): curve((0.5, value + 0.1 * seed))
        for (rule, held_out), value in {("mean", "noto"): 0.2, ("mean", "a_b"): 0.4, ("hfedatm", "noto"): 0.3}.items()
        for seed in range(2)
    }
    broken, waiting = of(0, "a_b", aggregator="hfedatm"), of(1, "a_b", aggregator="hfedatm")
    why = "Round 3: the loss of client 7 is not finite; lower client_lr."
    return folder_of(path, curves, failed=[(broken, why)], planned=[broken, waiting])


def test_a_table_says_why_cells_are_empty(tmp_path):
    text = render([example(tmp_path / "run")])
    assert (
        "Missing: fedavg, hfedatm, a_b, seed 0: Round 3: the loss of client 7 is not finite; lower client_lr." in text
    )
    assert "Missing: fedavg, hfedatm, a_b, seed 1: not finished yet" in text
    (line,) = [line for line in text.splitlines() if line.startswith("│ fedavg") and " hfedatm  " in line]
    assert [word.strip() for word in line.strip("│").split("│")] == ["fedavg", "hfedatm", "35.0 ± 63.5", "-", "-", "-"]


def test_formats_have_the_same_numbers(tmp_path):
    run = example(tmp_path / "run")
    summary, paired = summarise(read_json(run / "result.json")["cells"])
    found = list(csv.DictReader(io.StringIO(render([run], format="csv"))))
    assert len(found) == len(summary) + len(paired)
    for line, entry in zip(found, [*summary, *paired]):
        assert float(line["mean"]) == pytest.approx(100 * entry["mean"], abs=1e-4)
        assert float(line["ci95"]) == pytest.approx(100 * entry["ci95"], abs=1e-4)
        assert (line["held_out"], line["baseline"]) == (entry["held_out"], entry.get("baseline", ""))
    latex = render([run], format="latex").replace(r"$\pm$", "±")
    markdown_text = render([run], format="md")
    numbers = re.findall(r"[+-]?\d+\.\d(?: ± \d+\.\d)?", markdown_text.split("\n\n", 1)[1].split("\n\n")[0])
    assert len(numbers) == 4 + 1 + 1 and all(number in latex for number in numbers)
    assert r"a\_b" in latex and "a_b &" not in latex and r"\begin{tabular}{llrrrr}" in latex
    assert latex.count(r"\textbf") == 1 and r"\textbf{35.0 ± 63.5}" in latex
    assert latex.count(r"\\") == 4 and latex.count(" & ") == 4 * 5
    assert "- Missing: fedavg, hfedatm, a_b, seed 1: not finished yet" in markdown_text


def test_standard_errors_are_named(tmp_path):
    text = render([example(tmp_path / "run")], spread="se")
    assert "mean ± standard error over 2 seeds" in text and "25.0 ± 5.0" in text


def test_folders_of_the_same_setting_make_one_table(tmp_path):
    """Their rows are named by their folders only where they are the same; a baseline may be in another one."""
    one, other = (example(tmp_path / name) for name in ("one", "other"))
    lines = list(csv.DictReader(io.StringIO(render([one, other], format="csv"))))
    assert [(x["run"], x["aggregator"], x["baseline"]) for x in lines if x["held_out"] == "noto"] == [
        *[("one", "mean", ""), ("one", "hfedatm", ""), ("other", "mean", ""), ("other", "hfedatm", "")],
        *[("one", "hfedatm", "mean"), ("other", "hfedatm", "mean")],
    ]
    fedsr = {c._replace(algorithm="fedsr"): curve((0.5, 0.8)) for c in (of(0), of(1))}
    text = render([one, folder_of(tmp_path / "fedsr", fedsr)], baseline="fedavg mean", format="md")
    assert "| algorithm | server rule | noto" in text and text.count("selected by") == 1
    # 80 % less 20 % and 30 %
    (line,) = [line for line in text.splitlines() if line.startswith("| fedsr | mean - fedavg mean | +55.0 ± ")]
    assert line.count(" - |") == 3


def test_folders_of_other_settings_have_tables_of_their_own(tmp_path):
    one, other = tmp_path / "one", tmp_path / "other"
    folder_of(one, {of(): CURVE})
    folder_of(other, {of(): CURVE}, dataclasses.replace(CONFIG, stations=3))
    text = render([one, other])
    assert text.count("selected by source-validation") == 2 and "3 stations x" in text and "10 stations x" in text
    assert render([one, other], format="csv").count("algorithm") == 1


def test_result_file_has_the_schema(tmp_path):
    folder = RunFolder(tmp_path / "run", CONFIG)
    cells = grid({("mean", "noto"): [0.5, 0.6], ("hfedatm", "noto"): [0.7, 0.9]})
    write_results(folder, cells, [{"seed": 7}])
    result = read_json(folder.path / "result.json")
    assert list(result) == ["schema", "config", "environment", "cells", "summary", "paired", "failed"]
    assert result["schema"] == SCHEMA == 1
    assert RunConfig(**result["config"]) == CONFIG
    assert (result["cells"], result["failed"]) == (cells, [{"seed": 7}])
    assert (result["summary"], result["paired"]) == summarise(cells)
    assert (folder.path / "table.md").read_text() == markdown(cells, table_title(CONFIG), CONFIG.seeds)
    assert folder.finished() == cells


def test_folders_of_older_versions_have_tables(tmp_path):
    run = example(tmp_path / "run")
    (run / "cells.json").unlink()
    (run / "metrics.jsonl").unlink()
    cells = read_json(run / "result.json")["cells"]
    assert [c["accuracy"] for c in choose(load(run), "last").cells] == [c["accuracy"] for c in cells]
    assert "its rounds are not in metrics.jsonl, so only last can be shown" in render([run], "oracle")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--selection", "luck"],
            "Unknown selection rule 'luck'.*source-validation, last, oracle, leave-one-domain-out",
        ),
        (["--baseline", "median"], "Unknown baseline 'median'.*fedavg mean, fedavg hfedatm"),
    ],
)
def test_bad_options_are_named(tmp_path, capsys, options, message):
    assert main(["table", str(example(tmp_path / "run")), *options]) == 2
    assert re.search(message, capsys.readouterr().err)


def test_a_folder_that_is_no_run_is_named(tmp_path, capsys):
    assert main(["table", str(tmp_path)]) == 2
    assert "has no result.json: give the folder of a run" in capsys.readouterr().err
    assert main(["table"]) == 2
    assert "No run folder is given" in capsys.readouterr().err


def test_the_command_prints_the_same(tmp_path, capsys):
    run = example(tmp_path / "run")
    assert main(["table", str(run), "--format", "csv", "--spread", "se", "--baseline", "fedavg hfedatm"]) == 0
    assert capsys.readouterr().out == render([run], format="csv", spread="se", baseline="fedavg hfedatm")
    folder = RunFolder(tmp_path / "empty", dataclasses.replace(CONFIG, rounds=1))
    (folder.path / "result.json").write_text(
        json.dumps({"config": dataclasses.asdict(CONFIG), "cells": [], "failed": []})
    )
    assert main(["table", str(folder.path)]) == 2
    assert "has no finished cell: let it go on" in capsys.readouterr().err
