"""Runs on data sets of files: resident, streamed and prepared alike, the split that is kept, the configurations."""

import dataclasses
import importlib
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tiny import tiny_backbone
from trees import grow

from fedjax_dg import datasets
from fedjax_dg.backbones import BACKBONES
from fedjax_dg.cli import main
from fedjax_dg.config import check, read_toml
from fedjax_dg.datasets.benchmarks import LAYOUTS
from fedjax_dg.experiment import load_data, resolve

EXPERIMENTS = Path(__file__).parent.parent / "experiments"
CONFIGS = ("pacs", "office_home", "terra_incognita", "domain_net")
SMALL = ["--stations", "2", "--clients-per-station", "1", "--station-rounds", "1", "--rounds", "2", "--seeds", "1"]
SMALL += ["--aggregator", "mean", "--backbone", "tiny", "--image-size", "6", "--jobs", "1"]


@pytest.fixture(autouse=True)
def tiny_network(monkeypatch):
    """The tiny network under a name that the command line knows, for 6 x 6 RGB images of any number of classes."""

    def tiny(num_classes, image_size):
        monkeypatch.setattr("tiny.CLASSES", num_classes)
        return dataclasses.replace(tiny_backbone(), input_shape=(*image_size, 3), num_classes=num_classes)

    monkeypatch.setitem(BACKBONES, "tiny", tiny)


@pytest.fixture
def tree(tmp_path):
    return grow(tmp_path / "tree", ("ink", "oil", "pencil"), ("cat", "dog"), images=6)


def run(*arguments):
    assert main(["run", *SMALL, *map(str, arguments)]) == 0


def result(folder):
    return json.loads((folder / "result.json").read_text())["cells"]


def splits(folder):
    return json.loads((folder / "splits.json").read_text())


def test_resident_streamed_and_prepared_runs_are_the_same(tree, tmp_path, capsys):
    assert (
        main(["data", "prepare", "folder", "--data-dir", str(tree), "--out", str(tmp_path / "p"), "--image-size", "6"])
        == 0
    )
    options = ["--dataset", "folder", "--held-out", "oil", "--split", "domainbed", "--augment", "domainbed"]
    for name, data_dir, stream in (("a", tree, "off"), ("b", tree, "on"), ("c", tmp_path / "p", "on")):
        run(*options, "--data-dir", data_dir, "--stream", stream, "--out", tmp_path / name)
    (resident,), (streamed,), (prepared,) = (result(tmp_path / name) for name in "abc")
    for other in (streamed, prepared):
        assert {k: v for k, v in other.items() if "seconds" not in k} == {
            k: v for k, v in resident.items() if "seconds" not in k
        }
    told = splits(tmp_path / "a")
    assert told == splits(tmp_path / "b") == splits(tmp_path / "c")
    assert told["0"]["domains"] == {name: {"train": 10, "validation": 2} for name in ("ink", "oil", "pencil")}
    assert "the part of it that DomainBed tests on" in (tmp_path / "a" / "table.md").read_text()
    capsys.readouterr()


def test_a_run_whose_files_have_changed_is_not_continued(tree, tmp_path, capsys):
    options = ["--dataset", "folder", "--held-out", "oil", "--data-dir", tree, "--out", tmp_path / "run"]
    run(*options)
    run(*options, "--resume")
    (tree / "ink" / "cat" / "pic_001.png").rename(tree / "ink" / "cat" / "pic_009.png")
    assert main(["run", *SMALL, *map(str, options), "--resume"]) == 2
    assert "was begun with another split of the data (seed 0): restore the files" in capsys.readouterr().err


def test_a_file_that_cannot_be_read_stops_a_run_before_it_begins(tree, tmp_path, capsys):
    damaged = tree / "ink" / "dog" / "pic_002.png"
    damaged.write_bytes(damaged.read_bytes()[:60])
    options = ["--dataset", "folder", "--held-out", "oil", "--data-dir", str(tree), "--out", str(tmp_path / "run")]
    assert main(["run", *SMALL, *options]) == 2
    assert "pic_002.png cannot be read as an image" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_embedded_images_are_resized_on_demand():
    config = check(read_toml(EXPERIMENTS / "hfedatm_main.toml"))
    whole, half = load_data(config), load_data(dataclasses.replace(config, image_size=16))
    assert half.inputs.shape == (*whole.inputs.shape[:1], 16, 16, 3) and half.inputs.dtype == np.uint8
    for row in (0, 1500, 4083):
        expected = Image.fromarray(whole.inputs[row]).resize((16, 16), Image.Resampling.BILINEAR)
        assert np.array_equal(half.inputs[row], expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stream": "yes"}, "Unknown stream 'yes'"),
        ({"split": "kfold"}, "Unknown split 'kfold'"),
        ({"image_size": 0}, "image_size=0 is not positive"),
        ({"validation_fraction": 1.5}, r"validation_fraction=1.5 is not in \[0, 1\)"),
        ({"augment": "randaug"}, "Unknown augmentation 'randaug'"),
    ],
)
def test_bad_options_are_refused(options, message):
    config = dataclasses.replace(read_toml(EXPERIMENTS / "hfedatm_main.toml"), **options)
    with pytest.raises(ValueError, match=message):
        check(config)


def tree_of(name, root):
    """A generated tree for a configuration, with enough images for its hundred clients."""
    layout = LAYOUTS[read_toml(EXPERIMENTS / f"{name}.toml").dataset]
    images = -(-200 // (len(layout.domains) * len(layout.classes)))
    return grow(root, layout.domain_names, layout.class_names, max(2, images))


@pytest.mark.parametrize("name", CONFIGS)
def test_configurations_are_ready_for_files(name, tmp_path):
    config = dataclasses.replace(read_toml(EXPERIMENTS / f"{name}.toml"), data_dir=str(tree_of(name, tmp_path)))
    grid = resolve(check(config))
    num_domains = 6 if name == "domain_net" else 4
    assert len(grid.cells) == 2 * num_domains * 3 and set(grid.splits) == {"0", "1", "2"}
    assert not grid.federations.stream
    assert all(dealt.held.shape[:2] == (10, 10) for dealt in grid.federations.deals.values())
    assert grid.domains.inputs.shape[1:] == (224, 224, 3)
    assert datasets.SUMMARIES[config.dataset].domain_names == grid.domains.domain_names


def table(monkeypatch, name, root, out, *options, rows=None):
    """HFedATM's main table on a data set's files, or its first ``rows``, small in all else."""
    monkeypatch.syspath_prepend(EXPERIMENTS.parent)
    command = [
        "main_table.py",
        "--only",
        read_toml(EXPERIMENTS / f"{name}.toml").dataset,
        "--data-dir",
        root,
        "--out",
        out,
    ]
    small = ["backbone=tiny", "image_size=6", "rounds=1", "stations=2", "clients_per_station=2"]
    command += [word for pair in small for word in ("--set", pair)]
    monkeypatch.setattr(sys, "argv", [str(word) for word in [*command, "--seeds", "1", *options]])
    parts = [
        part._replace(rows=dict(list(part.rows.items())[:rows]), against=part.against[: rows and rows // 2])
        for part in importlib.import_module("experiments.hfedatm.main_table").PARTS
    ]
    importlib.import_module("experiments.papers").main("", parts)


def test_hfedatms_table_with_one_command(monkeypatch, tmp_path, capsys):
    root = tree_of("pacs", tmp_path / "tree")
    table(monkeypatch, "pacs", root, tmp_path / "out", "--set", "held_out=photo", rows=2)
    text = (tmp_path / "out" / "table.md").read_text()
    assert (
        "| FedAvg + HFedATM, minus FedAvg + Avg | ours |" in text and "PACS, tiny: accuracy (%) on the held-out" in text
    )
    capsys.readouterr()


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS[:3])
def test_every_table_is_ready(name, monkeypatch, tmp_path, capsys):
    root = tree_of(name, tmp_path / "tree")
    table(monkeypatch, name, root, tmp_path / "dry", "--dry-run")
    assert not (tmp_path / "dry").exists() and "Memory of a round with mean" in capsys.readouterr().out
    table(monkeypatch, name, root, tmp_path / "dry", "--dry-run", "--set", "stream=on")
    assert "Streamed: a round reads at most" in capsys.readouterr().out
    for stream in ("off", "on"):
        table(monkeypatch, name, root, tmp_path / stream, "--set", f"stream={stream}")
    tables = [(tmp_path / stream / "table.md").read_text() for stream in ("off", "on")]
    assert tables[0] == tables[1] and tables[0].count("FedIIR + HFedATM") == 3
    capsys.readouterr()


@pytest.mark.slow
def test_domain_net_is_ready(tmp_path, capsys):
    root = tree_of("domain_net", tmp_path / "tree")
    run(
        "--config",
        EXPERIMENTS / "domain_net.toml",
        "--data-dir",
        root,
        "--participants",
        "1",
        "--out",
        tmp_path / "out",
    )
    assert len(result(tmp_path / "out")) == 6
    capsys.readouterr()
