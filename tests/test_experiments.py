"""Every experiment of a paper says what it is, and runs: those in the folders of ``experiments/``, whichever these are."""

import importlib
import re
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parent.parent
PAPERS = ("hfedatm", "lsi", "stable_fedadg")
FILES = sorted(path for paper in PAPERS for path in (ROOT / "experiments" / paper).glob("*.py"))
NAMES = [f"{path.parent.name}.{path.stem}" for path in FILES]
WITH_PARTS = [name for name, path in zip(NAMES, FILES) if "PARTS" in path.read_text()]
#: What runs every day, and which part of it; the rest is slow.
QUICK = {"lsi.table6_stored_parameters": None, "stable_fedadg.emoji_styles": "mixed"}
HEAD = ("command:", "cost:", "data:", "paper:", "ours:", "status:")


@pytest.fixture(autouse=True)
def from_the_root(monkeypatch):
    monkeypatch.syspath_prepend(ROOT)


def papers():
    """The shared module."""
    return importlib.import_module("experiments.papers")


def run(monkeypatch, name, *options):
    """``python -m experiments.NAME`` with options."""
    path = ROOT / "experiments" / f"{name.replace('.', '/')}.py"
    monkeypatch.setattr(sys, "argv", [str(path), *map(str, options)])
    runpy.run_path(str(path), run_name="__main__")


def rows_of(text):
    """Row by row, what stands in the tables of a text."""
    lines = [line for line in text.splitlines() if line.startswith("| ") and not line.startswith("| ---")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def numbers(cells):
    """The first number of every cell that has one."""
    found = [re.match(r"[+-]?(\d[\d,.]*|(nan|inf)\b)", cell) for cell in cells]
    return [float(match.group().replace(",", "")) for match in found if match]


# --- what they say ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_a_head_says_what_a_researcher_wants_to_know(name):
    path = ROOT / "experiments" / f"{name.replace('.', '/')}.py"
    doc, body = path.read_text().split('"""')[1], path.read_text().split('"""', 2)[2]
    for part in HEAD:
        assert re.search(rf"^{part} +\S", doc, re.MULTILINE), part
    assert f"python -m experiments.{name}" in doc
    status = doc[doc.index("status:") :]
    assert "not run by us on the real data" in status or "run: results/" in status or "run on emoji styles" in status
    for result in re.findall(r"results/[\w.]+\.(?:md|png)", doc):
        assert (ROOT / "experiments" / result).exists(), result
    if "PARTS" in body:  # the shared module does the work
        assert len(body.splitlines()) < 75


def test_the_index_lists_every_experiment_and_no_other():
    text = (ROOT / "experiments" / "README.md").read_text()
    listed = re.findall(r"^\| \[`([\w/]+)\.py`\]\(([\w/]+)\.py\)", text, re.MULTILINE)
    assert [one for one, _ in listed] == [other for _, other in listed]
    assert sorted(name.replace("/", ".") for name, _ in listed) == NAMES


@pytest.mark.parametrize("name", WITH_PARTS)
def test_rows_are_ready_and_quoted_averages_are_averages(name):
    for part in importlib.import_module(f"experiments.{name}").PARTS:
        assert len({repr(row) for row in part.rows.values()}) == len(part.rows) > 1
        assert {row for pair in part.against for row in pair} <= {*part.rows}
        ready = papers().changed(part, {}, {})
        for label in part.rows:
            papers().config_of(ready, label)
        for by_column in part.paper.values():
            own = [x for column, x in by_column.items() if column != "average"]
            if own and "average" in by_column:  # a slip of the pen shows
                printed_wrong = (
                    name == "lsi.table1_pacs_officehome" and by_column["average"] == 68.84
                )  # its head says so
                assert printed_wrong or abs(np.mean(own) - by_column["average"]) < 0.02, by_column


# --- that they run ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in QUICK else pytest.mark.slow) for n in NAMES])
def test_smoke(name, monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("XLA_FLAGS", "")  # what --smoke adds is taken back
    options = ["--only", QUICK[name]] if QUICK.get(name) else []
    run(monkeypatch, name, "--smoke", "--out", tmp_path, *options)
    text = (tmp_path / "table.md").read_text()
    assert text in capsys.readouterr().out
    found = rows_of(text)
    assert found and all(np.isfinite(numbers(row)).all() for row in found)
    module = importlib.import_module(f"experiments.{name}")
    if not hasattr(module, "PARTS"):
        assert all(numbers(row[1:]) for row in found if row[0] in ("LSI", "latents", "HFedATM", "all losses"))
        assert {"LSI", "latents", "HFedATM", "all losses"} & {row[0] for row in found}
        return
    parts = [part for part in module.PARTS if part.name in (options or [part.name])]
    assert re.findall(r"^## (.*)$", text, re.MULTILINE) == [part.name for part in parts]
    for part, table in zip(parts, text.split("\n## ")):
        ours = {row[0]: numbers(row[2:]) for row in rows_of(table) if row[1] == "ours"}
        for label, row in part.rows.items():
            assert row.get("algorithm") in papers().NOT_IN_SMOKE or ours[label], label
        quoted = {row[0]: numbers(row[2:]) for row in rows_of(table) if row[1] == "paper"}
        assert quoted.keys() == part.paper.keys() and all(quoted.values())
    run(monkeypatch, name, "--smoke", "--out", tmp_path, *options)  # again: all cells are there
    assert (tmp_path / "table.md").read_text() == text and ": done" not in capsys.readouterr().err


@pytest.mark.slow
def test_a_dry_run_foresees_and_trains_nothing(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("XLA_FLAGS", "")
    run(monkeypatch, "hfedatm.emoji_styles", "--smoke", "--dry-run", "--out", tmp_path / "out", "--only", "noto")
    assert "noto: 12 rows of 1 cells; of lambda 0.0 + Avg:" in (said := capsys.readouterr().out)
    assert "Memory of a round with mean" in said and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--set", "alpah=0.5"], "Unknown option of a method in noto 'alpah'"),
        (["--set", "rounds=many"], "rounds=many is not of type int: correct --set."),
        (["--set", "freeze_bn=yes"], "freeze_bn=yes is not of type bool: correct --set."),
        (["--set", "alpha"], "has no '=': write it as key=value"),
        (["--set", "alpha=2"], "alpha=2.0 is not in [0, 1]"),
        (["--seeds", "0"], "seeds=0 is not positive"),
        (["--data-dir", "D"], "emoji_styles comes with the library: leave data_dir out"),
    ],
)
def test_bad_options_are_refused_in_one_sentence(options, message, monkeypatch, tmp_path, capsys):
    with pytest.raises(SystemExit) as stopped:
        run(monkeypatch, "hfedatm.emoji_styles", "--out", tmp_path, *options)
    assert stopped.value.code == 2 and message in (said := capsys.readouterr().err)
    assert said.startswith("hfedatm-emoji_styles: ") and not (tmp_path / "table.md").exists()


# --- the shared module ------------------------------------------------------------------------------------------------


def part(**options):
    """Two rows of averaging against HFedATM."""
    shared = papers()
    rows = {"Avg": {"aggregator": "mean"}, "HFedATM": {"aggregator": "hfedatm", "ridge": 0.5}}
    return shared.Part("noto", shared.RunConfig(held_out="noto", seeds=3, domain_mix=0.0), rows, **options)


def test_what_is_given_goes_to_the_rows_that_have_it():
    given = papers().changed(
        part(), {"rounds": 1, "bank": 3}, {"alpha": "0.5", "ridge": "9", "rounds": "2", "freeze_bn": "true"}
    )
    assert given.rows == {
        "Avg": {"aggregator": "mean"},
        "HFedATM": {"alpha": "0.5", "aggregator": "hfedatm", "ridge": 0.5},
    }
    assert given.config.rounds == 2 and given.config.freeze_bn is True and given.config.settings == {}
    assert papers().config_of(given, "HFedATM").settings == {"alpha": 0.5, "ridge": 0.5}


def test_a_row_has_one_server_rule():
    made = part()._replace(rows={"both": {"client_lr": 0.1}})
    with pytest.raises(ValueError, match="both in noto has the server rules mean,hfedatm: give it one"):
        papers().changed(made, {}, {})


def test_products_and_pairs_of_rows():
    rows = papers().product({"a": {"x": 1}, "b": {"x": 2}}, {"c": {"y": 3}, "d": {}})
    assert rows == {"a + c": {"x": 1, "y": 3}, "a + d": {"x": 1}, "b + c": {"x": 2, "y": 3}, "b + d": {"x": 2}}
    assert papers().pairs(rows, "d", "c") == [("a + d", "a + c"), ("b + d", "b + c")]


def test_a_table_has_ours_the_papers_and_what_is_clear():
    scores = {
        "Avg": {"noto": {0: 0.4, 1: 0.5, 2: 0.6}, "twemoji": {0: 0.2, 1: 0.2}},
        "HFedATM": {"noto": {0: 0.3, 1: 0.4, 2: 0.51}, "twemoji": {0: 0.1, 1: 0.4}},
    }
    paper = {"Avg": {"photo": 81.8}, "Other": {"noto": 50.0, "average": 49.0}}
    made = part(paper=paper, against=[("HFedATM", "Avg")])
    text = papers().table(made, papers().Found(scores, ["HFedATM, twemoji, seed 2: not finite"]))
    assert rows_of(text) == [
        ["", "whose", "noto", "twemoji", "photo", "average"],
        ["Avg", "ours", "50.0 ± 24.8", "20.0 ± 0.0 (n=2)", "-", "32.5 ± 31.8 (n=2)"],
        ["Avg", "paper", "-", "-", "81.8", "-"],
        ["HFedATM", "ours", "40.3 ± 26.1", "25.0 ± 190.6 (n=2)", "-", "30.0 ± 127.1 (n=2)"],
        ["Other", "paper", "50.0", "-", "-", "49.0"],
        ["HFedATM, minus Avg", "ours", "-9.7 ± 1.4", "+5.0 ± 190.6 (n=2)", "-", "-2.5 ± 95.3 (n=2)"],
    ]
    said = "Clearly better in 0 of 3 comparisons. Clearly worse in 1 of 3 comparisons: HFedATM than Avg on noto.\n"
    assert said in text
    assert text.endswith("Broke down: HFedATM, twemoji, seed 2: not finite\n")


def test_columns_are_held_out_domains_their_clients_or_rounds():
    cell = {"held_out": "noto", "accuracy": 0.5, "selected_round": 2}
    curve = {
        r: {"accuracy": 0.1 * r, "accuracy/noto": 0.1 * r, "accuracy/twemoji": 0.2 * r, "accuracy/x": None}
        for r in (1, 2)
    }
    assert papers().columns_of("held_out", cell, curve) == {"noto": 0.5}
    assert papers().columns_of("source", cell, curve) == {"twemoji (noto held out)": 0.4}
    assert papers().columns_of((1, 5), cell, curve) == {"noto, round 1": 0.1}
