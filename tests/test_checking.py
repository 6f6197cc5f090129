"""What ``data check`` says of a folder, and the exit statuses of the ``data`` commands."""

import json
import os
import pickle

import numpy as np
import pytest
from trees import PACS_CLASSES, PACS_DOMAINS, grow, kfold_lists, picture, write

from fedjax_dg import datasets
from fedjax_dg.cli import main
from fedjax_dg.datasets import benchmarks, checking
from fedjax_dg.datasets.benchmarks import LAYOUTS, PACS
from fedjax_dg.datasets.checking import check, compare
from fedjax_dg.datasets.layouts import Version
from fedjax_dg.datasets.prepare import prepare


@pytest.fixture
def root(tmp_path):
    return grow(tmp_path / "PACS", PACS_DOMAINS, PACS_CLASSES)


@pytest.fixture
def whole(root, monkeypatch):
    """A small PACS that is taken for all of it."""
    version = Version("as published", (14,) * 4, ((2,) * 7,) * 4)
    monkeypatch.setitem(LAYOUTS, "PACS", PACS._replace(versions=(version,)))
    monkeypatch.setitem(datasets.DATASETS, "PACS", lambda data_dir=None: benchmarks.load("PACS", data_dir, 8))
    return root


def one(found) -> str:
    """The only problem."""
    assert len(found.problems) == 1, found.problems
    (problem,) = found.problems
    assert not found.ok and problem.endswith(".") and "\n" not in problem
    return problem


def test_a_whole_data_set(whole):
    found = check("PACS", str(whole.parent))
    assert found.ok and found.problems == () and os.path.samefile(found.root, whole)
    assert found.version == "as published" and found.layout == "domain/class/image"
    assert found.counts == ((2,) * 7,) * 4 and found.expected == (14,) * 4
    assert found.domain_names == PACS_DOMAINS and found.class_names == PACS_CLASSES
    assert found.notes == ("The official lists of its split are not there.",)


SPOILED = {
    "empty": (lambda r: write(r / "photo/dog/pic_003.png", b""), "photo/dog/pic_003.png is empty"),
    "truncated": (
        lambda r: write(r / "photo/dog/pic_002.png", picture(1, size=32)[:-60]),
        "photo/dog/pic_002.png cannot be read as an image (",
    ),
    "text": (
        lambda r: write(r / "photo/dog/pic_002.png", b"text"),
        "photo/dog/pic_002.png cannot be read as an image (",
    ),
    "misnamed": (
        lambda r: write(r / "photo/dog/pic.gif", picture(1, "GIF")),
        "photo/dog/pic.gif is an image but not named",
    ),
    "broken link": (lambda r: (r / "photo/dog/x.png").symlink_to("none"), "photo/dog/x.png is a link to nothing"),
    "extra class": (lambda r: write(r / "photo/cat/1.png", picture(1)), "photo/cat is no class of it"),
    "extra domain": (lambda r: write(r / "clipart/dog/1.png", picture(1)), "clipart is no domain of it"),
    "missing domain": (lambda r: (r / "photo").rename(r.parent / "elsewhere"), "the domain photo is missing"),
    "a file less": (
        lambda r: (r / "photo/dog/pic_001.png").unlink(),
        "photo has 13 images (dog 1 for 2), expected 14 of PACS (as published)",
    ),
    "a file more": (
        lambda r: write(r / "photo/dog/pic_009.png", picture(1)),
        "photo has 15 images (dog 3 for 2), expected 14 of PACS (as published)",
    ),
    "a file moved": (
        lambda r: (r / "photo/dog/pic_001.png").rename(r / "photo/horse/x.png"),
        "photo has 14 images (dog 1 for 2, horse 3 for 2), expected 14",
    ),
    "lists": (lambda r: kfold_lists(r / "lists", first_label=0), "counts labels from 0"),
}


@pytest.mark.parametrize("case", SPOILED)
def test_one_thing_wrong(whole, case):
    spoil, words = SPOILED[case]
    spoil(whole)
    assert one(check("PACS", str(whole))).startswith(words) or (
        case == "lists" and words in one(check("PACS", str(whole)))
    )


def test_everything_wrong_is_told_at_once_and_what_is_right_still_read(whole):
    for case in SPOILED:
        if case not in ("text", "a file moved", "a file less", "missing domain"):
            SPOILED[case][0](whole)
    for number in range(3, 70):  # two blocks and more
        write(whole / "sketch/dog" / f"pic_{number:03d}.png", picture(number) if number % 10 else b"no")
    found = check("PACS", str(whole))
    text = "\n".join(found.problems)
    for case in ("empty", "truncated", "misnamed", "broken link", "extra class", "extra domain", "lists"):
        assert SPOILED[case][1] in text
    bad = [f"sketch/dog/pic_{number:03d}.png" for number in range(10, 70, 10)]
    assert [problem.split()[0] for problem in found.problems if "cannot be read" in problem] == [
        "photo/dog/pic_002.png",
        *bad,
    ]
    assert "sketch has 81 images (dog 69 for 2)" in text
    assert [sum(counts) for counts in found.counts] == [14, 14, 15, 81]


def test_workers_and_progress_are_handed_on(whole, monkeypatch):
    SPOILED["truncated"][0](whole)
    asked, seen = [], []
    read = checking.read
    monkeypatch.setattr(checking, "read", lambda inputs, rows, workers: (asked.append(workers), read(inputs, rows))[1])
    monkeypatch.setattr(checking, "BLOCK", 20)
    found = check("PACS", str(whole), workers=3, report=lambda *now: seen.append(now))
    assert one(found).startswith(SPOILED["truncated"][1])
    assert asked == [3] and seen == [(20, 56), (40, 56), (56, 56)]
    verdicts = pickle.loads(
        pickle.dumps(checking.Verdicts(found.root, ("photo/dog/pic_001.png", "photo/dog/pic_002.png")))
    )
    assert verdicts[np.asarray([1, 0])].tolist() == [False, True]


def test_official_lists_that_fit(whole):
    kfold_lists(whole / "lists")
    found = check("PACS", str(whole))
    assert found.ok and found.notes == ("The official lists fit: 28 images to train on, 28 to validate on.",)


def test_a_part_of_a_benchmark_is_a_problem_here_though_it_loads(root):
    found = check("PACS", str(root))
    assert len(found.problems) == 4 and found.version is None and found.expected == (2048, 2344, 1670, 3929)
    assert (
        "art_painting has 14 images (dog 2 for 379, elephant 2 for 255, giraffe 2 for 285 and 4 more), expected 2,0"
        in (found.problems[0])
    )
    assert len(datasets.load("PACS", data_dir=str(root)).labels) == 56


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("name", ["TerraIncognita", "DomainNet"])
def test_the_nearest_version_is_compared_with(name, number):
    layout = LAYOUTS[name]
    version = layout.versions[number]
    counts = np.zeros((len(layout.domains), len(layout.classes)), int)
    if version.by_class is None:
        counts[:, 0] = version.by_domain
    else:
        counts[:] = version.by_class
    assert compare(layout, counts) == (version, ())
    counts[1, 0] += 1
    nearest, (problem,) = compare(layout, counts)
    assert nearest == version and problem.startswith(
        f"{layout.domain_names[1]} has {version.by_domain[1] + 1:,} images"
    )
    assert version.name in problem


def test_a_folder_of_ones_own_has_no_expected_counts(tmp_path):
    grow(tmp_path, ["a", "b"], ["x", "y"])
    found = check("folder", str(tmp_path))
    assert found.ok and found.expected is None and found.version is None and found.counts == ((2, 2), (2, 2))
    write(tmp_path / "b/y/bad.png", b"bad")
    assert one(check("folder", str(tmp_path))).startswith("b/y/bad.png cannot be read")
    (tmp_path / "only" / "x").mkdir(parents=True)
    assert "holds only the folder x" in one(check("folder", str(tmp_path / "only")))


def test_nothing_there(tmp_path):
    found = check("PACS", str(tmp_path))
    assert found.root is None and "No PACS in" in one(found)
    assert "does not exist" in one(check("PACS", str(tmp_path / "none")))


def test_a_prepared_data_set(whole, tmp_path):
    out = prepare("PACS", str(whole), tmp_path / "out", image_size=8)
    found = check("PACS", str(out))
    assert found.ok and found.layout == "prepared, uint8, image_size 8" and found.counts == ((2,) * 7,) * 4
    assert found.version == "as published" and found.root == str(out)
    assert "is a prepared PACS, not VLCS" in one(check("VLCS", str(out)))
    os.truncate(out / "images.npy", 300)
    assert "images.npy has 300 bytes" in one(check("PACS", str(out)))


def test_data_sets_that_are_no_folders_of_images(tmp_path, monkeypatch):
    found = check("emoji_styles")
    assert found.ok and found.counts == ((85, 158, 130, 262, 168, 218),) * 4
    with pytest.raises(ValueError, match="data_dir='x' is given, but emoji_styles comes with the library"):
        check("emoji_styles", "x")

    def broken(data_dir):
        raise ValueError(f"{data_dir} is damaged.")

    monkeypatch.setitem(datasets.DATASETS, "other", broken)
    assert one(check("other", "here")) == "here is damaged."


@pytest.mark.parametrize("arguments", [("PACSS", "."), ("PACS", None), ("folder", None)])
def test_bad_usage(arguments):
    with pytest.raises(ValueError, match="did you mean 'PACS'|--data-dir"):
        check(*arguments)


# --- the command line ---------------------------------------------------------------------------------------------------


def test_check_prints_what_is_there_and_exits_with_0(whole, capsys):
    assert main(["data", "check", "PACS", "--data-dir", str(whole)]) == 0
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert f"PACS in {whole} (domain/class/image): as published" in lines and lines[-1] == "ok" and err == ""
    assert next(line for line in lines if line.strip().startswith("sketch")).split() == [
        "sketch",
        "14",
        "14",
        *"2222222",
    ]
    assert "Note: The official lists of its split are not there." in lines and not {"┃", "│"} & set(out)


def test_check_prints_problems_and_exits_with_1(whole, capsys):
    for number in range(30):
        write(whole / "photo/dog" / f"{number}.png", b"")
    SPOILED["truncated"][0](whole)
    assert main(["data", "check", "PACS", "--data-dir", str(whole)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("Problem: ") for line in lines) == 20
    assert lines[-2:] == ["and 11 more problems; --json gives all", "31 problems"]
    assert main(["data", "check", "PACS", "--data-dir", str(whole), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert len(found["problems"]) == 31 and found["ok"] is False and found["expected"] == [14] * 4
    assert found["name"] == "PACS" and found["counts"][0] == [2] * 7


def test_names_with_brackets_are_printed_as_they_are(tmp_path, capsys):
    grow(tmp_path, ["a [red]", "b"], ["x[/]"])
    write(tmp_path / "b/x[/]/[bold].png", b"")
    assert main(["data", "check", "folder", "--data-dir", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert "b/x[/]/[bold].png is empty" in out and "a [red]" in out and "x[/]" in out


def test_prepare_writes_and_exits_with_0(root, tmp_path, capsys):
    command = ["data", "prepare", "PACS", "--data-dir", str(root), "--out", str(tmp_path / "out"), "--image-size", "8"]
    assert main(command) == 0
    out, err = capsys.readouterr()
    assert (
        out.splitlines()
        == [
            "preparing PACS: 56 of 56 images",
            f"Wrote {tmp_path / 'out'}: give it as --data-dir.",
        ]
        and err == ""
    )
    assert datasets.load("PACS", data_dir=str(tmp_path / "out"), image_size=8).inputs.shape == (56, 8, 8, 3)
    assert main([*command[:-1], "4"]) == 2
    assert "another image_size: pass --overwrite" in capsys.readouterr().err
    assert main([*command[:-1], "4", "--overwrite"]) == 0
    write(root / "photo/dog/pic_001.png", b"no")
    assert main([*command, "--overwrite"]) == 2
    assert "photo/dog/pic_001.png cannot be read as an image" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["check", "PACS"], "--data-dir"),
        (["check", "pacs", "--data-dir", "."], "did you mean 'PACS'"),
        (["check", "emoji_styles", "--data-dir", "."], "leave data_dir out"),
        (["prepare", "PACS", "--data-dir", "."], "name it with --out"),
        (["prepare", "PACS", "--out", "x"], "--data-dir"),
        (["prepare", "emoji_styles", "--out", "x"], "Unknown data set of image files"),
        (["prepare", "PACS", "--data-dir", "nowhere", "--out", "x"], "does not exist"),
    ],
)
def test_bad_usage_exits_with_2(arguments, words, capsys):
    assert main(["data", *arguments]) == 2
    err = capsys.readouterr().err
    assert words in err and err.count("\n") == 1


@pytest.mark.parametrize(
    "arguments", [["check", "PACS", "--data"], ["prepare", "PACS", "--format", "unit8"], [], ["chek"]]
)
def test_unknown_options_exit_with_2(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["data", *arguments])
    assert caught.value.code == 2
    capsys.readouterr()


def test_list_says_what_each_data_set_holds(capsys):
    assert main(["data", "list"]) == 0
    out = capsys.readouterr().out
    for words in (
        "PACS: 9,991 examples",
        "OfficeHome: 15,588 examples",
        "345 classes: aircraft_carrier, airplane, ",
        "folder: images of your own, in folders domain/class/image",
        "emoji_styles: 4,084 examples",
    ):
        assert words in out
    assert "zigzag" not in out and checking.BLOCK > 1
