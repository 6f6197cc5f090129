"""IDX files, the form in which MNIST and its relatives are published, gzipped or not."""

from __future__ import annotations

import gzip
import math
import os
import re
import zlib
from pathlib import Path
from typing import NamedTuple

import numpy as np

#: How the files are called: MNIST's and Fashion-MNIST's own names, torchvision's, EMNIST's (emnist-digits-test-...).
NAME = re.compile(r"(?P<prefix>.*?)-?(?P<part>train|t10k|test)-(?P<kind>images|labels)[-.]idx[13]-ubyte(\.gz)?")
#: Where they are looked for below the folder that is given; torchvision puts them into MNIST/raw.
PLACES = ("*", "*/*", "*/raw/*")
AXES = {"images": 3, "labels": 1}
PARTS = ("train", "test")


class Files(NamedTuple):
    """The files of one data set."""

    folder: Path
    prefix: str  # before train-...: emnist-digits, or nothing
    paths: dict[tuple[str, str], Path]  # by part (train, test) and kind (images, labels)

    @property
    def name(self) -> str:
        """What can be given as ``data_dir`` to mean this data set."""
        return str(self.folder / self.prefix) if self.prefix else str(self.folder)


def find(data_dir: str | os.PathLike[str]) -> Files:
    """The one data set in a folder or below it; or a folder and the start of its files' names, as ``raw/emnist-digits``.

    Raises ``ValueError`` for no data set, several, or one without all of its four files.
    """
    root, wanted = Path(data_dir), None
    if not root.is_dir() and root.parent.is_dir():
        root, wanted = root.parent, root.name
    sets: dict[tuple[Path, str], Files] = {}
    for path in sorted(path for place in PLACES for path in root.glob(f"{place}-ubyte*")):
        match = NAME.fullmatch(path.name)
        if match is None or wanted not in (None, match["prefix"]):
            continue
        found = sets.setdefault((path.parent, match["prefix"]), Files(path.parent, match["prefix"], {}))
        part = "train" if match["part"] == "train" else "test"
        found.paths.setdefault((part, match["kind"]), path)  # the unpacked one of two, which sorts first
    if not sets:
        raise ValueError(
            f"data_dir={str(data_dir)!r} holds no IDX files, train-images-idx3-ubyte(.gz) and the like, nor MNIST/raw with "
            "them: give the folder of MNIST, Fashion-MNIST or EMNIST."
        )
    if len(sets) > 1:
        raise ValueError(
            f"data_dir={str(data_dir)!r} holds several data sets: give one of "
            f"{', '.join(found.name for found in sets.values())}, or a folder with one of them only."
        )
    (found,) = sets.values()
    missing = [f"{kind} of the {part} images" for part in PARTS for kind in AXES if (part, kind) not in found.paths]
    if missing:
        raise ValueError(
            f"{found.folder} has {', '.join(path.name for path in found.paths.values())}, but lacks the "
            f"{', the '.join(missing)}: put all four IDX files into it."
        )
    return found


def read(path: Path, kind: str) -> np.ndarray:
    """The bytes of an IDX file as an array: uint8 [n, height, width] of ``images``, [n] of ``labels``; gunzipped if need be.

    Raises ``ValueError`` for a file that cannot be opened, is cut off, or is another kind of file.
    """
    axes = AXES[kind]
    try:
        content = path.read_bytes()
        if content[:2] == b"\x1f\x8b":  # by content, as some browsers unpack and keep the name
            content = gzip.decompress(content)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise bad(path, f"is cut off or damaged, it does not unpack ({type(error).__name__})") from None
    except OSError as error:
        raise bad(path, f"cannot be opened ({type(error).__name__})") from None
    magic, header = bytes((0, 0, 8, axes)), 4 + 4 * axes
    if content[:4] != magic:
        raise bad(path, f"starts with the bytes {content[:4].hex()}, and IDX {kind} with {magic.hex()}")
    if len(content) < header:
        raise bad(path, "ends inside its header")
    shape = tuple(int(size) for size in np.frombuffer(content, ">u4", axes, offset=4))
    if len(content) - header != math.prod(shape):
        by = " x ".join(str(size) for size in shape)
        raise bad(path, f"has {len(content) - header:,} bytes after its header, which says {by}")
    if 0 in shape:
        raise bad(path, f"holds no {kind}")
    return np.frombuffer(content, np.uint8, offset=header).reshape(shape)


def read_pairs(files: Files) -> tuple[np.ndarray, np.ndarray]:
    """Train and test joined: images uint8 [M, height, width], labels uint8 [M].

    Raises ``ValueError`` where a file is bad (``read``), or two do not belong together.
    """
    images, labels = ([read(files.paths[part, kind], kind) for part in PARTS] for kind in AXES)
    for part, some, named in zip(PARTS, images, labels):
        if len(some) != len(named):
            path = files.paths[part, "labels"]
            raise bad(path, f"has {len(named):,} labels for the {len(some):,} of {files.paths[part, 'images'].name}")
    if images[0].shape[1:] != images[1].shape[1:]:
        height, width = images[0].shape[1:]
        by = " x ".join(str(side) for side in images[1].shape[1:])
        raise bad(files.paths["test", "images"], f"has images of {by}, and those to train on are {height} x {width}")
    return np.concatenate(images), np.concatenate(labels)


def bad(path: Path, found: str) -> ValueError:
    """Builds, and does not raise, the error for a file that is not what it should be."""
    return ValueError(f"{path} {found}: download the data set's four files again.")
