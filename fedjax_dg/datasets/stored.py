"""Data sets that ``prepare`` wrote: images decoded and resized once, to be mapped into memory or read by row.

A folder holds ``manifest.json``, written last; ``examples.json``, everything about the rows but their pixels; and the
pixels, ``images.npy`` (format ``uint8``) or ``images/`` (format ``array_record``, a data set of tensorflow_datasets).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from typing import Any

import numpy as np

from fedjax_dg.datasets.domains import Domains
from fedjax_dg.datasets.layouts import shown
from fedjax_dg.datasets.records import Records

#: Of the files of a prepared data set; another one cannot be read.
SCHEMA = 1
MANIFEST, EXAMPLES, PIXELS, RECORDS, PLACES = "manifest.json", "examples.json", "images.npy", "images", "places.npy"
#: Held while a data set is written, and gone afterwards.
LOCK = "lock"
FORMATS = ("uint8", "array_record")
#: Files up to so many bytes are checked by their content, larger ones by their size.
SMALL = 2**20


def is_prepared(folder: str) -> bool:
    """Whether a folder is a prepared data set, sound or not."""
    return all(os.path.isfile(os.path.join(folder, name)) for name in (MANIFEST, EXAMPLES))


def find_prepared(name: str, data_dir: str, image_size: int | None) -> str | None:
    """The prepared data set of that name and size that ``data_dir`` is or holds, if any; without a size the only one.

    Raises:
      ValueError: all there are have another size, or several have different ones and none is asked for, or
        ``data_dir`` is one that is damaged or of another name.
    """
    if is_prepared(data_dir):
        folders = {data_dir: read_manifest(data_dir)}
        if (found := folders[data_dir]["data_set"]) != name:
            raise ValueError(f"{data_dir} is a prepared {found}, not {name}: give the folder of {name} as --data-dir.")
    else:
        folders = _prepared_in(data_dir, name)
    sizes = {folder: manifest["image_size"] for folder, manifest in folders.items()}
    if image_size is None and len(sizes) > 1:
        raise ValueError(
            f"{data_dir} holds {name} prepared several times: give one of {', '.join(sizes)} as --data-dir."
        )
    fitting = [folder for folder, size in sizes.items() if image_size in (None, size)]
    if fitting or not sizes:
        return fitting[0] if fitting else None
    folder, size = next(iter(sizes.items()))
    raise ValueError(
        f"{folder} holds {name} prepared with image_size={size}, and {image_size} is asked for: give image_size={size}, or "
        "prepare it again."
    )


def _prepared_in(data_dir: str, name: str) -> dict[str, dict[str, Any]]:
    """The manifests of the prepared data sets of that name directly in a folder."""
    try:
        inside = sorted(os.listdir(data_dir))
    except OSError:  # told by what looks for the images
        return {}
    found = {}
    for folder in (os.path.join(data_dir, entry) for entry in inside if entry[0] != "."):
        # a damaged one may be of another data set: it is told when it is named itself
        with contextlib.suppress(ValueError):
            if is_prepared(folder) and (manifest := read_manifest(folder))["data_set"] == name:
                found[folder] = manifest
    return found


def read_manifest(folder: str) -> dict[str, Any]:
    """What a prepared data set says of itself. Raises ``ValueError`` if it is damaged or of another version."""
    path = os.path.join(folder, MANIFEST)
    try:
        with open(path, encoding="utf-8") as file:
            manifest = json.load(file)
        sum_of_all = manifest.pop("sha256")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise _damaged(folder, f"{MANIFEST} cannot be read ({type(error).__name__})") from None
    if manifest.get("schema") != SCHEMA:
        raise _damaged(folder, f"{MANIFEST} is of version {manifest.get('schema')}, expected {SCHEMA}")
    if sum_of_all != digest(manifest):
        raise _damaged(folder, f"{MANIFEST} was changed")
    return manifest


def write_manifest(folder: str, manifest: dict[str, Any]) -> None:
    """Writes ``manifest``, which says what the folder holds."""
    with open(os.path.join(folder, MANIFEST), "w", encoding="utf-8") as file:
        json.dump(manifest | {"sha256": digest(manifest)}, file, indent=1)


def digest(content: Any) -> str:
    """SHA-256 of what JSON can hold."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def file_sums(folder: str) -> dict[str, list]:
    """Size of every file in a prepared data set by its path, and SHA-256 of the small ones."""
    sums = {}
    for inside, _, names in os.walk(folder):
        for name in names:
            path = os.path.join(inside, name)
            relative = os.path.relpath(path, folder).replace(os.sep, "/")
            if relative in (MANIFEST, LOCK):
                continue
            size = os.path.getsize(path)
            sums[relative] = [size, _sha256(path) if size <= SMALL or relative == EXAMPLES else None]
    return dict(sorted(sums.items()))


def load_prepared(folder: str, official: bool = False) -> Domains:
    """The data set in a prepared folder: as it was before, but ``inputs`` are mapped into memory or ``Records``.

    Raises:
      ValueError: a file is missing or was changed, or the official split is asked for and was not there.
    """
    manifest = read_manifest(folder)
    for name, expected in manifest["files"].items():
        path = os.path.join(folder, name)
        if not os.path.isfile(path):
            raise _damaged(folder, f"{name} is missing")
        if (size := os.path.getsize(path)) != expected[0]:
            raise _damaged(folder, f"{name} has {size:,} bytes, expected {expected[0]:,}")
        if expected[1] is not None and _sha256(path) != expected[1]:
            raise _damaged(folder, f"{name} was changed")
    with open(os.path.join(folder, EXAMPLES), encoding="utf-8") as file:
        examples = json.load(file)
    if official and examples["validation"] is None:
        raise ValueError(manifest["official"])
    labels = np.asarray(examples["labels"], np.int32)
    validation = None
    if official:
        validation = np.zeros(len(labels), bool)
        validation[examples["validation"]] = True
    return Domains(
        name=manifest["data_set"],
        inputs=_pixels(folder, manifest, len(labels)),
        labels=labels,
        domain=np.asarray(examples["domain"], np.int32),
        identity=None,
        validation=validation,
        domain_names=tuple(manifest["domain_names"]),
        class_names=tuple(manifest["class_names"]),
        files=tuple(examples["files"]),
        notice=manifest["notice"],
    )


def _pixels(folder: str, manifest: dict[str, Any], num_examples: int) -> np.ndarray | Records:
    size = manifest["image_size"]
    if manifest["format"] == "array_record":
        places = np.load(os.path.join(folder, PLACES), allow_pickle=False)
        return Records(os.path.join(folder, manifest["records"]), tuple(manifest["splits"]), places, size)
    try:
        pixels = np.load(os.path.join(folder, PIXELS), mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as error:
        raise _damaged(folder, f"{PIXELS} cannot be read ({type(error).__name__})") from None
    if pixels.dtype != np.uint8 or pixels.shape != (num_examples, size, size, 3):
        raise _damaged(folder, f"{PIXELS} holds {pixels.dtype} {list(pixels.shape)}")
    return pixels


def _sha256(path: str) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _damaged(folder: str, what: str) -> ValueError:
    return ValueError(
        f"{shown(folder)} is no whole prepared data set, {what}: write it again with `fedjax-dg data prepare` and "
        "--overwrite."
    )
