"""The page of a run: one file, whole, escaped, that loads nothing."""

import base64
import re
from html.parser import HTMLParser

import pytest
from fake_run import DESCRIPTION, DOMAINS, config_of, grid, line_of, record_of, write_run

from fedjax_dg.cli import main
from fedjax_dg.config import read_toml
from fedjax_dg.plots import Drawn, draw, open_run
from fedjax_dg.report import page, read_content, report, to_toml
from fedjax_dg.results import Cell, RunFolder

VOID = {"meta", "img", "br", "hr", "link", "input"}


class Page(HTMLParser):
    """Checks that every element is closed, and keeps what there is."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.open, self.tags, self.attributes, self.images, self.words = [], [], [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)
        if tag == "img":
            self.images.append(dict(attrs))

    def handle_endtag(self, tag):
        assert self.open and self.open.pop() == tag, tag

    def handle_data(self, data):
        if self.open and self.open[-1] != "style":
            self.words.append(data)

    @property
    def text(self):
        return " ".join(self.words)

    def assert_loads_nothing(self):
        assert not {"script", "link", "iframe", "object", "embed", "base", "form"} & set(self.tags)
        for name, value in self.attributes:
            assert not name.startswith("on"), name
            if name in ("src", "href", "srcset", "data", "action", "poster", "style"):
                assert name == "src" and value.startswith("data:image/svg+xml;base64,"), (name, value[:80])


@pytest.fixture
def whole(tmp_path):
    """A run in which one cell broke down and one is not finished."""
    config = config_of(settings={"alpha": 0.5})
    cells = grid(config)
    failed = cells.pop(3) | {"error": "Round 2: <b>not finite</b> & gone."}
    cells.pop(5)
    run = write_run(tmp_path / "run", config, cells, [failed])
    names = [Cell("fedavg", rule, h, s) for h in DOMAINS for s in (0, 1) for rule in ("mean", "hfedatm")]
    RunFolder(run, config, resume=True).keep_model(names, DESCRIPTION)
    return run


def test_the_page_is_whole_and_loads_nothing(whole, tmp_path, capsys):
    out = tmp_path / "report.html"
    assert main(["report", str(whole), "--out", str(out), "--kinds", "domains", "sweep"]) == 0
    said = capsys.readouterr().out
    assert "Without sweep: " in said and f"Wrote {out}" in said
    text = out.read_text()
    found = Page(text)
    found.assert_loads_nothing()
    assert not re.search(r"@import|url\(", text)
    assert found.tags.count("h1") == 1 and "prefers-color-scheme: dark" in text and "@media print" in text
    (image,) = found.images
    svg = base64.b64decode(image["src"].split(",")[1]).decode()
    assert "<!-- worst domain of its line -->" in svg and image["alt"] == "Selected models on every held-out domain"
    assert all(target.startswith("#") for target in re.findall(r'href="([^"]*)"', svg)) and "<script" not in svg
    assert "has no finished cells of different settings" in found.text  # why there is no sweep
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


def test_all_numbers_of_the_run_are_there(whole):
    content = read_content(whole)
    found = Page(page(content, []))
    assert len(content.run.cells) == 14 and "14 of 16 cells are finished, 1 broke down." in found.text
    for cell in content.run.cells:
        for score in ("accuracy", "source_accuracy", "balanced_accuracy", "accuracy_unseen"):
            assert f"{100 * cell[score]:.2f}" in found.text
    assert "0" * 64 in found.text and "1" * 64 in found.text  # digests of the splits
    assert "noto 80 / 20; twemoji 80 / 20" in found.text
    assert "fedavg-hfedatm-fluent_flat-seed0 not finished" not in found.text
    assert "nothing of the held-out domain was looked at" in found.text
    for version in content.environment["versions"].values():
        assert version in found.text


def test_the_table_has_means_differences_and_the_worst_domain(tmp_path):
    """By hand: two domains, two seeds."""
    accuracies = {("mean", "noto"): (0.5, 0.6), ("mean", "twemoji"): (0.4, 0.8)}
    accuracies |= {("hfedatm", "noto"): (0.6, 0.7), ("hfedatm", "twemoji"): (0.4, 0.8)}
    cells = [
        line_of(Cell("fedavg", *key, seed), a) for key, values in accuracies.items() for seed, a in enumerate(values)
    ]
    found = Page(page(read_content(write_run(tmp_path / "run", config_of(), cells)), []))
    words = [word for word in found.words if word.strip()]
    rows = {words[i + 1]: words[i + 2 : i + 6] for i, word in enumerate(words) if word == "fedavg"}
    assert words[words.index("server rule") + 1 :][:4] == ["noto", "twemoji", "average", "worst"]
    means = {name: [number.split(" ")[0] for number in numbers] for name, numbers in rows.items()}
    assert means == {
        "mean": ["55.0", "60.0", "57.5", "50.0"],
        "hfedatm": ["65.0", "60.0", "62.5", "55.0"],
        "hfedatm - mean": ["+10.0", "+0.0", "+5.0", "+5.0"],
    }
    assert rows["hfedatm - mean"][0] == "+10.0 ± 0.0" and rows["mean"][0] == "55.0 ± 63.5"  # t(0.975, 1) = 12.706


def test_what_comes_from_data_is_escaped(tmp_path):
    """Names of folders become names of domains; errors and configurations are anything."""
    nasty = '<img src=x onerror="alert(1)">&amp;'
    cells = [line_of(Cell("fedavg", "mean", nasty, seed)) for seed in (0, 1)]
    failed = cells[0] | {"held_out": "other", "error": "<script>alert(2)</script>"}
    config = config_of(data_dir=None, held_out=nasty, settings={})
    run = write_run(tmp_path / "<run>", config, cells, [failed])
    found = Page(page(read_content(run), [Drawn("grams", "grams", run, None, "<i>why</i>")]))
    found.assert_loads_nothing()
    assert found.tags.count("img") == 0 and "script" not in found.tags and "i" not in found.tags
    assert nasty in found.text and "<script>alert(2)</script>" in found.text and "<i>why</i>" in found.text


def test_what_is_missing_says_why(whole):
    found = Page(page(read_content(whole), []))
    assert "Cells without a result" in found.text
    assert "fedavg-hfedatm-noto-seed1" in found.text and "Round 2: <b>not finite</b> & gone." in found.text
    assert "not finished: 0 of 2 rounds are evaluated" in found.text


def test_an_unfinished_run_has_a_page(tmp_path):
    config = config_of()
    records = [record_of(Cell("fedavg", "mean", "noto", 0), 1)]
    run = write_run(tmp_path / "run", config, [], records=records)
    assert [drawn.kind for drawn in report(run, tmp_path / "page.html", ["accuracy", "domains"])] == ["domains"]
    found = Page((tmp_path / "page.html").read_text())
    assert "no cell is finished" in found.text and "No cell is finished yet." in found.text
    assert len(found.images) == 1 and "Not known before a cell is finished." in found.text


def test_the_configuration_on_the_page_is_the_runs(whole, tmp_path):
    config = config_of(
        algorithm="fedsr", settings={"l2": 1e-6, "samples": 3, "l2_form": "squared", "learn_kappa": True}
    )
    (tmp_path / "run.toml").write_text(to_toml(config))
    assert read_toml(tmp_path / "run.toml") == config
    text = Page(page(read_content(whole), [])).text
    assert "alpha = 0.5" in text and "fedjax-dg run --config run.toml --out run" in text


def test_alignment_in_numbers(tmp_path):
    def merge(stayed, residual):
        layer = {"identity_fraction": [stayed, stayed], "cost_before": [2.0, 2.0], "cost_after": [1.0, 1.0]}
        solve = {"residual": residual, "condition": 300.0, "fallback": 1.0, "raised": 0.0, "bytes": 4e6}
        return {"fot": {"conv1": layer}, "outputs_moved": [0.0], "regmean": {"dense1": solve}}

    cell = Cell("fedavg", "hfedatm", "noto", 0)
    records = [record_of(cell, i, merge=merge(s, r)) for i, s, r in ((1, 1.0, 1e-6), (2, 0.5, 3e-6))]
    found = Page(page(read_content(write_run(tmp_path / "run", config_of(), [line_of(cell)], records=records)), []))
    for shown in ("conv1", "75.0", "0.500", "dense1", "3.0e-06", "300", "2", "4,000.0"):
        assert shown in found.words, shown


def test_a_sweep_shows_the_selected_setting_and_all_others(tmp_path):
    cells = [
        line_of(Cell("fedavg", "hfedatm", "noto", seed, (("alpha", alpha),)), accuracy + 0.002 * seed, source)
        for alpha, accuracy, source in ((0.1, 0.9, 0.5), (0.5, 0.3, 0.7))
        for seed in (0, 1)
    ]
    found = Page(page(read_content(write_run(tmp_path / "run", config_of(), cells)), []))
    assert "fedavg, hfedatm: alpha=0.5" in found.text and "fedjax-dg sweep --config run.toml" in found.text
    assert "[sweep.list]" in found.text and "alpha = [0.1, 0.5]" in found.text
    row = found.words[found.words.index("alpha=0.5") :][:2]
    assert row == ["alpha=0.5", "selected"]
    assert any(word.startswith("30.1 ± ") for word in found.words)  # the table's
    assert not any(word.startswith("90.1 ± ") for word in found.words)
    row = found.words[found.words.index("alpha=0.1") :][:4]
    assert row == ["alpha=0.1", "2", "50.0", "90.1"]


def test_the_same_run_has_the_same_page(tmp_path):
    run = write_run(tmp_path / "run", config_of(), grid(config_of())[:2])
    content = read_content(run)
    pages = {page(content, list(draw([open_run(run)], ["domains"]))) for _ in range(2)}
    assert len(pages) == 1


def test_bad_input_is_refused(whole, tmp_path, capsys):
    assert main(["report", str(tmp_path / "no"), "--out", str(tmp_path / "a.html")]) == 2
    assert "There is no folder" in capsys.readouterr().err
    assert main(["report", str(whole), "--out", str(tmp_path / "no" / "a.html")]) == 2
    assert "cannot be written: give the name of a file, such as report.html" in capsys.readouterr().err
    assert main(["report", str(whole), "--out", str(tmp_path)]) == 2
    assert main(["report", str(whole), "--out", str(tmp_path / "a.html"), "--kinds", "pie"]) == 2
    assert "Unknown kind of figure 'pie'" in capsys.readouterr().err
    (whole / "metrics.jsonl").unlink()
    assert main(["report", str(whole), "--out", str(tmp_path / "a.html")]) == 2
    assert "has no metrics.jsonl" in capsys.readouterr().err
    assert not (tmp_path / "a.html").exists()
