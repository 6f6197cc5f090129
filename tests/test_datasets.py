"""Data sets: what ships is what was published, and damage or a wrong name is told in one sentence."""

import doctest
import hashlib
import zipfile
from importlib import resources
from pathlib import Path

import numpy as np
import pytest

from fedjax_dg import datasets, errors
from fedjax_dg.datasets import emoji_styles

FIX = "reinstall it with `python -m pip install --force-reinstall fedjax_dg`"


@pytest.fixture(scope="module")
def domains():
    return datasets.load("emoji_styles")


@pytest.fixture(scope="module")
def archive() -> bytes:
    return (resources.files("fedjax_dg.datasets") / "_data" / "emoji_styles.npz").read_bytes()


@pytest.fixture
def stored(archive, tmp_path) -> dict[str, np.ndarray]:
    """All arrays of the archive, to be changed and written again."""
    path = tmp_path / "stored.npz"
    path.write_bytes(archive)
    with np.load(path, allow_pickle=False) as opened:
        return dict(opened)


def failure(path: Path) -> str:
    """Loads a bad file; gives the message once it is one sentence and no other traceback would be shown with it."""
    with pytest.raises(ValueError) as caught:
        emoji_styles.load(path)
    message = str(caught.value)
    assert caught.value.__context__ is None or caught.value.__suppress_context__
    assert "\n" not in message and message.endswith(f"build_emoji_styles.py --out {path}`.")
    assert message.startswith(f"Data file {path} ") and FIX in message
    return message


def test_shapes_and_types(domains):
    assert domains.name == "emoji_styles"
    assert domains.inputs.shape == (4084, 32, 32, 3) and domains.inputs.dtype == np.uint8
    for array, dtype in [
        (domains.labels, np.int32),
        (domains.domain, np.int32),
        (domains.identity, np.int32),
        (domains.validation, np.bool_),
    ]:
        assert array.shape == (4084,) and array.dtype == dtype


def test_checksums(domains):
    def sha256(array):
        return hashlib.sha256(array.tobytes()).hexdigest()

    assert sha256(domains.inputs) == "08957f4c4763969416876154057dd7b9c2f70d34057cfe1483ce372515413c61"
    for rows in domains.labels.reshape(4, 1021):
        assert sha256(rows) == "63fb1e860441ea5b50d8a6e7881c9f6b5427588ae60df0a36cb668007a439dd7"
    for rows in domains.validation.reshape(4, 1021):
        assert sha256(rows.astype(np.uint8)) == "889ae7a8f2cb48472b7dca68f6aa90b4b498631f5210d6854ce2af1c5adc3ba5"


def test_rows_are_domain_major(domains):
    np.testing.assert_array_equal(domains.domain, np.repeat([0, 1, 2, 3], 1021))
    np.testing.assert_array_equal(domains.identity, np.tile(np.arange(1021), 4))


def test_an_icon_has_one_label_and_one_side_of_the_split_in_every_domain(domains):
    for icon in range(1021):
        rows = domains.identity == icon
        assert sorted(domains.domain[rows]) == [0, 1, 2, 3]
        assert len(set(domains.labels[rows])) == len(set(domains.validation[rows])) == 1


def test_counts_in_every_domain(domains):
    for domain in range(4):
        labels = domains.labels[domains.domain == domain]
        validation = domains.validation[domains.domain == domain]
        assert np.bincount(labels).tolist() == [85, 158, 130, 262, 168, 218]
        assert np.bincount(labels[validation]).tolist() == [17, 32, 26, 52, 34, 44]
        assert np.bincount(labels[~validation]).tolist() == [68, 126, 104, 210, 134, 174]


def test_pixels_of_the_training_rows_have_the_published_mean(domains):
    expected = [[0.857, 0.809, 0.740], [0.821, 0.767, 0.716], [0.855, 0.804, 0.766], [0.688, 0.688, 0.688]]
    for domain, mean in enumerate(expected):
        images = domains.inputs[(domains.domain == domain) & ~domains.validation]
        np.testing.assert_allclose(images.mean((0, 1, 2)) / 255, mean, atol=5e-4)


def test_names_are_those_of_the_archive(domains, stored):
    assert domains.domain_names == tuple(stored["domain_names"])
    assert domains.class_names == tuple(stored["class_names"])


def test_split_follows_the_published_rule(stored):
    drawn = [hashlib.sha256(f"emoji-styles-0:{text}".encode()).hexdigest() for text in stored["codepoints"]]
    order = np.argsort(drawn)
    for label in range(6):
        members = [icon for icon in order if stored["labels"][icon] == label]
        cut = round(0.2 * len(members))
        assert stored["split"][members[:cut]].all() and not stored["split"][members[cut:]].any()


def test_licences_ship_beside_the_data():
    folder = resources.files("fedjax_dg.datasets") / "_data"
    notice = (folder / "NOTICE").read_text(encoding="utf-8")
    for file, words in [
        ("LICENSE-APACHE-2.0.txt", "Apache License"),
        ("LICENSE-CC-BY-4.0.txt", "Attribution 4.0 International"),
        ("LICENSE-MIT-fluent-emoji.txt", "Copyright (c) Microsoft Corporation"),
    ]:
        assert file in notice and words in (folder / file).read_text(encoding="utf-8")


def test_reads_a_given_file(archive, tmp_path, domains):
    path = tmp_path / "copy.npz"
    path.write_bytes(archive)
    np.testing.assert_array_equal(datasets.load("emoji_styles", path=path).inputs, domains.inputs)


def test_missing_file(tmp_path):
    assert "is missing" in failure(tmp_path / "none.npz")


def test_folder_in_place_of_the_file(tmp_path):
    assert "cannot be opened" in failure(tmp_path)


@pytest.mark.parametrize("kept", [0, 3, 100, 0.1, 0.5, 0.999])
def test_truncated_file(archive, tmp_path, kept):
    num_bytes = int(kept * len(archive)) if isinstance(kept, float) else kept
    path = tmp_path / "truncated.npz"
    path.write_bytes(archive[:num_bytes])
    assert f"holds {num_bytes:,} bytes that cannot be read" in failure(path)


@pytest.mark.parametrize("name", ["images", "labels", "split"])
def test_flipped_byte_in_an_array(archive, tmp_path, name):
    path = tmp_path / "flipped.npz"
    path.write_bytes(archive)
    with zipfile.ZipFile(path) as opened:
        member = opened.getinfo(f"{name}.npy")
    content = bytearray(archive)
    content[member.header_offset + 60 + member.compress_size // 2] ^= 0xFF
    path.write_bytes(content)
    assert "cannot be read as its arrays" in failure(path)


@pytest.mark.parametrize("place", [0, -22])
def test_flipped_byte_in_the_structure_of_the_file(archive, tmp_path, place):
    content = bytearray(archive)
    content[place] ^= 0xFF
    path = tmp_path / "flipped.npz"
    path.write_bytes(content)
    assert "cannot be read as its arrays" in failure(path)


@pytest.mark.parametrize("content", [b"no archive at all\n", b"PK\x03\x04 nor this"])
def test_another_kind_of_file(tmp_path, content):
    path = tmp_path / "other.npz"
    path.write_bytes(content)
    assert "cannot be read as its arrays" in failure(path)


def test_single_array_in_place_of_the_archive(tmp_path):
    path = tmp_path / "array.npz"
    with path.open("wb") as file:
        np.save(file, np.zeros(3))
    assert "cannot be read as its arrays" in failure(path)


@pytest.mark.parametrize("name", ["images", "labels", "split"])
def test_changed_array_in_a_sound_archive(stored, tmp_path, name):
    stored[name].flat[0] ^= 1
    path = tmp_path / "changed.npz"
    np.savez(path, **stored)
    message = failure(path)
    # The second of the two is the expected one, which differs in the checksum alone.
    assert message.count(f"{name} {stored[name].dtype} {list(stored[name].shape)} with SHA-256 ") == 2


@pytest.mark.parametrize("change", [lambda labels: labels.reshape(1, -1), lambda labels: labels.astype(np.int64)])
def test_array_of_another_shape_or_type(stored, tmp_path, change):
    stored["labels"] = change(stored["labels"])
    path = tmp_path / "changed.npz"
    np.savez(path, **stored)
    assert "expected labels int32 [1021]" in failure(path)


def test_absent_array(stored, tmp_path):
    del stored["split"]
    path = tmp_path / "absent.npz"
    np.savez(path, **stored)
    assert "cannot be read as its arrays (KeyError)" in failure(path)


@pytest.mark.parametrize("call", [datasets.load, datasets.describe])
def test_unknown_data_set_gives_the_nearest_name(call):
    with pytest.raises(ValueError) as caught:
        call("emoji_stles")
    available = ", ".join(datasets.DATASETS)
    assert str(caught.value) == f"Unknown data set 'emoji_stles'; did you mean 'emoji_styles'? Available: {available}."


def test_unknown_option_gives_the_nearest_name():
    with pytest.raises(ValueError, match="Unknown option of data set emoji_styles 'pth'; did you mean 'path'"):
        datasets.load("emoji_styles", pth="x")


def test_unknown_names():
    assert doctest.testmod(errors).failed == 0
    assert str(errors.unknown("algorithm", "zzz", ["mean", "ga"])) == "Unknown algorithm 'zzz'; available: mean, ga."
    assert "did you mean 'PACS'?" in str(errors.unknown("data set", "pacs", ["PACS"]))
    assert str(errors.unknown("domain", "x", [])) == "Unknown domain 'x'; available: none."


def test_every_data_set_has_a_summary():
    assert set(datasets.SUMMARIES) == set(datasets.DATASETS)


def test_summary_agrees_with_the_data(domains):
    summary = datasets.SUMMARIES["emoji_styles"]
    assert summary.num_examples == len(domains.inputs)
    assert (summary.domain_names, summary.class_names) == (domains.domain_names, domains.class_names)
    text = datasets.describe("emoji_styles")
    for words in ["emoji_styles", "4,084 examples", "4 domains: noto, twemoji", "6 classes", "CC-BY-4.0"]:
        assert words in text
