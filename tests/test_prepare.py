"""Prepared data sets: the same as before, whole or not there at all, and never mistaken for another."""

import json
import os
import pickle
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from trees import PACS_CLASSES, PACS_DOMAINS, grow, kfold_lists, picture, write

from fedjax_dg import datasets
from fedjax_dg.datasets import prepare as prepare_module
from fedjax_dg.datasets.images import Images, UnreadableImage
from fedjax_dg.datasets.prepare import prepare
from fedjax_dg.datasets.reading import read, read_all
from fedjax_dg.datasets.records import Records


@pytest.fixture
def root(tmp_path) -> Path:
    return grow(tmp_path / "raw" / "PACS", PACS_DOMAINS, PACS_CLASSES)


@pytest.fixture
def out(tmp_path) -> Path:
    return tmp_path / "cache" / "pacs"


def load(data_dir, image_size=8, **options):
    return datasets.load("PACS", data_dir=str(data_dir), image_size=image_size, **options)


def refusal(call, *words) -> str:
    with pytest.raises(ValueError) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message and message.endswith(".")
    for word in words:
        assert word in message, message
    return message


def assert_same(found, expected):
    """All of two data sets but the kind of ``inputs``."""
    for name in expected._fields:
        a, b = getattr(found, name), getattr(expected, name)
        if name == "inputs":
            assert a.shape == b.shape and a.dtype == b.dtype
            np.testing.assert_array_equal(read_all(a), read_all(b))
        elif isinstance(b, np.ndarray):
            np.testing.assert_array_equal(a, b)
            assert a.dtype == b.dtype
        else:
            assert a == b, name


def left(folder: Path) -> list[str]:
    return sorted(os.listdir(folder)) if folder.exists() else []


@pytest.mark.parametrize("image_size", [8, 5])
def test_the_same_rows_labels_files_split_and_pixels(root, out, image_size):
    kfold_lists(root / "lists")
    seen = []
    assert prepare("PACS", str(root.parent), out, image_size=image_size, report=lambda *now: seen.append(now)) == out
    assert seen[-1] == (56, 56) and [done for done, _ in seen] == sorted(done for done, _ in seen)
    for official in (False, True):
        found = load(out, image_size, official=official)
        assert isinstance(found.inputs, np.memmap) and not found.inputs.flags.writeable
        assert_same(found, load(root, image_size, official=official))
    assert left(out.parent) == ["pacs"] and left(out) == ["examples.json", "images.npy", "manifest.json"]
    np.testing.assert_array_equal(np.load(out / "images.npy"), read_all(load(root, image_size).inputs))
    assert_same(load(out.parent, image_size), load(root, image_size))  # a folder that holds it


def test_more_than_a_block(tmp_path, out):
    root = grow(tmp_path / "own", ["a", "b b"], ["x", "y"], 40)
    prepare("folder", str(root), out, image_size=8)
    found, expected = (datasets.load("folder", data_dir=str(path), image_size=8) for path in (out, root))
    assert len(found.labels) == 160 and isinstance(expected.inputs, Images)
    assert_same(found, expected)


def test_array_record(tmp_path, out, capfd):
    """Random access in the rows' order, in this process and in workers, without TensorFlow."""
    root = grow(tmp_path / "own", ["all", "Städte", "städte 2"], ["x", "größer"], 4)
    printed = []
    prepare("folder", str(root), out, "array_record", 8, report=lambda *now: (printed.append(now), print("seen")))
    assert printed[-1] == (24, 24) and set(capfd.readouterr().out.split()) == {"seen"}
    found, expected = (datasets.load("folder", data_dir=str(path), image_size=8) for path in (out, root))
    assert isinstance(found.inputs, Records) and "tensorflow" not in sys.modules
    assert_same(found, expected)
    every = read_all(expected.inputs)
    rows = [3, 17, 17, 0, 23]
    np.testing.assert_array_equal(found.inputs[rows], every[rows])
    np.testing.assert_array_equal(found.inputs[-2], every[-2])
    np.testing.assert_array_equal(found.inputs[4:9:2], every[4:9:2])
    assert found.inputs[np.zeros(0, int)].shape == (0, 8, 8, 3) and len(found.inputs) == 24
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(found.inputs))[rows], every[rows])
    blocks = list(read(found.inputs, [np.asarray([5, -1]), np.asarray([1, 2])]))
    np.testing.assert_array_equal(blocks, [[every[5], 0 * every[5]], [every[1], every[2]]])
    import tensorflow_datasets as tfds

    builder = tfds.builder_from_directory(str(out / "images" / "folder" / "1.0.0"))
    assert {name: split.num_examples for name, split in builder.info.splits.items()} == {
        f"domain_{n}": 8 for n in range(3)
    }
    for record in builder.as_data_source(split="domain_1"):
        np.testing.assert_array_equal(record["image"], every[record["index"]])
        assert record["label"] == expected.labels[record["index"]] and expected.domain[record["index"]] == 1
    part = out / "images" / "folder" / "1.0.0" / "features.json"
    part.write_text(part.read_text().replace("zlib", "none"))
    refusal(lambda: datasets.load("folder", data_dir=str(out), image_size=8), "features.json was changed")


def test_workers_are_handed_on(root, out, monkeypatch):
    asked = []
    monkeypatch.setattr(
        prepare_module, "read", lambda inputs, rows, workers: (asked.append(workers), read(inputs, rows))[1]
    )
    prepare("PACS", str(root), out, image_size=8, workers=3)
    assert asked == [3] and len(load(out).labels) == 56


def test_the_official_split_that_was_not_there_is_refused_as_before(root, out):
    prepare("PACS", str(root), out, image_size=8)
    assert refusal(lambda: load(root, official=True)) == refusal(lambda: load(out, official=True))
    assert load(out).validation is None


@pytest.mark.parametrize(
    ("data_dir", "name", "words"),
    [
        (
            "cache/pacs",
            "PACS",
            "cache/pacs holds PACS prepared with image_size=8, and 224 is asked for: give image_size=8",
        ),
        ("cache", "PACS", "cache/pacs holds PACS prepared with image_size=8"),
        ("cache/pacs", "OfficeHome", "cache/pacs is a prepared PACS, not OfficeHome"),
        ("cache", "OfficeHome", "No OfficeHome in "),
    ],
)
def test_another_size_or_data_set_than_prepared(root, out, tmp_path, data_dir, name, words):
    prepare("PACS", str(root), out, image_size=8)
    refusal(lambda: datasets.load(name, data_dir=str(tmp_path / data_dir), image_size=224), words)


def test_of_several_sizes_the_one_asked_for(root, tmp_path):
    for size in (4, 8):
        prepare("PACS", str(root), tmp_path / "cache" / f"pacs_{size}", image_size=size)
    for size in (4, 8):
        assert load(tmp_path / "cache", size).inputs.shape[1] == size
        assert load(tmp_path / "cache" / f"pacs_{size}", None).inputs.shape[1] == size
    assert load(root, None).inputs.shape[1] == 224
    refusal(lambda: load(tmp_path / "cache", None), "holds PACS prepared several times", "pacs_8 as --data-dir")
    refusal(lambda: load(tmp_path / "cache", 5), "prepared with image_size=4, and 5 is asked for")


# --- damage -----------------------------------------------------------------------------------------------------------


def replace_in(name, old, new):
    return lambda out: (out / name).write_text((out / name).read_text().replace(old, new, 1))


def resign(change):
    """A manifest that agrees with itself."""

    def spoil(out):
        manifest = json.loads((out / "manifest.json").read_text())
        del manifest["sha256"]
        change(manifest)
        prepare_module.write_manifest(str(out), manifest)

    return spoil


DAMAGE = {
    "cut manifest": (lambda out: os.truncate(out / "manifest.json", 100), "manifest.json cannot be read"),
    "empty manifest": (lambda out: (out / "manifest.json").write_text(""), "manifest.json cannot be read"),
    "no manifest": (lambda out: (out / "manifest.json").write_text("[1]"), "manifest.json cannot be read"),
    "other names": (replace_in("manifest.json", "sketch", "sketsh"), "manifest.json was changed"),
    "other schema": (resign(lambda manifest: manifest.update(schema=0)), "manifest.json is of version 0, expected 1"),
    "no pixels": (lambda out: (out / "images.npy").unlink(), "images.npy is missing"),
    "cut pixels": (lambda out: os.truncate(out / "images.npy", 5000), "images.npy has 5,000 bytes, expected 10,880"),
    "other labels": (replace_in("examples.json", "[0, 0, 1", "[0, 1, 1"), "examples.json was changed"),
    "longer list": (replace_in("examples.json", "dog/", "dogs/"), "examples.json has"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_damage_is_told(root, out, case):
    prepare("PACS", str(root), out, image_size=8)
    spoil, words = DAMAGE[case]
    spoil(out)
    message = refusal(lambda: load(out), f"{out} is no whole prepared data set, ", words, "--overwrite")
    assert message.count(". ") == 0
    refusal(lambda: prepare("PACS", str(root), out, image_size=8), words, "or choose another --out")
    prepare("PACS", str(root), out, image_size=8, overwrite=True)
    assert_same(load(out), load(root))


def test_pixels_of_another_shape(root, out):
    prepare("PACS", str(root), out, image_size=8)
    np.save(out / "images.npy", np.load(out / "images.npy").reshape(56, 4, 16, 3))
    files = {"images.npy": [os.path.getsize(out / "images.npy"), None]}
    resign(lambda manifest: manifest["files"].update(files))(out)
    refusal(lambda: load(out), "images.npy holds uint8 [56, 4, 16, 3]")


# --- written whole or not at all ----------------------------------------------------------------------------------------


def failing_after(number, error):
    def report(done, total):
        if done >= number:
            raise error

    return report


@pytest.mark.parametrize("error", [RuntimeError("in the middle"), KeyboardInterrupt()])
@pytest.mark.parametrize("format", ["uint8"])
def test_interrupted_half_way(root, out, format, error):
    with pytest.raises(type(error)):
        prepare("PACS", str(root), out, format, 8, report=failing_after(1, error))
    assert left(out.parent) == []
    prepare("PACS", str(root), out, format, 8)
    before = (out / "manifest.json").read_text()
    write(root / "photo/dog/pic_003.png", picture(99))
    with pytest.raises(type(error)):
        prepare("PACS", str(root), out, format, 8, report=failing_after(1, error), overwrite=True)
    assert left(out.parent) == ["pacs"] and (out / "manifest.json").read_text() == before
    assert len(load(out).labels) == 56


@pytest.mark.parametrize("existing", [False, True])
def test_what_a_killed_run_left_is_removed_by_the_next(root, out, tmp_path, existing):
    """What lies there in the middle, put back after the run was stopped, which had removed it."""
    if existing:
        prepare("PACS", str(root), out, image_size=8)
        write(root / "photo/dog/pic_003.png", picture(99))

    def kill(done, total):
        shutil.copytree(out.parent / ".pacs.partial", tmp_path / "left")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare("PACS", str(root), out, image_size=8, report=kill, overwrite=True)
    for name in (".pacs.partial", ".pacs.old"):  # the second where it was killed while it replaced another
        shutil.copytree(tmp_path / "left", out.parent / name)
    assert "images.npy" in left(tmp_path / "left") and "manifest.json" not in left(tmp_path / "left")
    if existing:
        assert len(load(out.parent).labels) == 56
    else:
        refusal(lambda: load(out.parent), "No PACS in ")
    prepare("PACS", str(root), out, image_size=8, overwrite=True)
    assert left(out.parent) == ["pacs"]
    assert_same(load(out), load(root))


def test_two_at_a_time(root, out):
    def another(done, total):
        refusal(lambda: prepare("PACS", str(root), out, image_size=8), f"Another process is writing {out}")

    prepare("PACS", str(root), out, image_size=8, report=another)
    assert left(out.parent) == ["pacs"] and len(load(out).labels) == 56


def test_an_image_that_cannot_be_decoded_is_named(root, out):
    write(root / "photo/dog/pic_002.png", picture(1)[:60])
    with pytest.raises(UnreadableImage, match="photo/dog/pic_002.png cannot be read as an image"):
        prepare("PACS", str(root), out, image_size=8)
    assert left(out.parent) == []


@pytest.mark.parametrize("place", ["PACS", "PACS/photo", "PACS/photo/dog/cache"])
def test_not_among_the_images(root, place):
    refusal(lambda: prepare("PACS", str(root), root.parent / place, image_size=8), "lies among the images of")
    assert len(load(root).labels) == 56


def test_beside_the_domains(root):
    prepare("PACS", str(root), root / "cache", image_size=8)
    assert isinstance(load(root).inputs, np.memmap)
    own = grow(root.parent / "own", ["a", "b"], ["x"])
    refusal(lambda: prepare("folder", str(own), own / "cache", image_size=8), "lies among the images of")


def test_a_folder_of_something_else_is_never_replaced(root, out):
    write(out / "thesis.txt", b"all of it")
    for overwrite in (False, True):
        refusal(
            lambda o=overwrite: prepare("PACS", str(root), out, image_size=8, overwrite=o), "is no prepared data set"
        )
    assert left(out) == ["thesis.txt"]


def test_an_empty_folder_is_taken(root, out):
    out.mkdir(parents=True)
    prepare("PACS", str(root), out, image_size=8)
    assert len(load(out).labels) == 56


def test_other_content_is_refused_and_the_same_left_as_it_is(root, out):
    prepare("PACS", str(root), out, image_size=8)
    written = os.stat(out / "manifest.json").st_mtime_ns
    prepare("PACS", str(root), out, image_size=8, report=lambda *now: pytest.fail("read again"))
    assert os.stat(out / "manifest.json").st_mtime_ns == written
    refusal(lambda: prepare("PACS", str(root), out, image_size=4), "another image_size: pass --overwrite")
    refusal(lambda: prepare("PACS", str(root), out, "array_record", 8), "another format: pass")
    kfold_lists(root / "lists")
    refusal(lambda: prepare("PACS", str(root), out, image_size=8), "with another official, content: pass --overwrite")
    (root / "photo/dog/pic_001.png").write_bytes(picture(99, size=9))
    prepare("PACS", str(root), out, image_size=8, overwrite=True)
    assert_same(load(out, official=True), load(root, official=True))


def test_a_full_disk(root, out, monkeypatch):
    usage = shutil.disk_usage(root)
    monkeypatch.setattr(prepare_module.shutil, "disk_usage", lambda path: usage._replace(free=10_000))
    refusal(
        lambda: prepare("PACS", str(root), out, image_size=8),
        "56 images of 8 x 8 pixels take 0.0 GB",
        "choose another --out",
    )
    assert left(out.parent) == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("PACS", None, "out"), "--data-dir"),
        (("emoji_styles", None, "out"), "Unknown data set of image files 'emoji_styles'"),
        (("PACS", "nowhere", "out"), "'nowhere' does not exist"),
        (("PACS", "ROOT", "out", "unit8"), "Unknown format 'unit8'; did you mean 'uint8'?"),
        (("PACS", "ROOT", "out", "uint8", 0), "image_size=0 is not positive"),
        (("PACS", "ROOT", "/dev/null/out", "uint8", 8), "/dev/null/out cannot be written"),
    ],
)
def test_bad_input(root, arguments, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    refusal(lambda: prepare(*(str(root) if argument == "ROOT" else argument for argument in arguments)), words)


def test_what_is_prepared_is_not_prepared_again(root, out, tmp_path):
    prepare("PACS", str(root), out, image_size=8)
    refusal(lambda: prepare("PACS", str(out), tmp_path / "again", image_size=8), "is prepared already")
