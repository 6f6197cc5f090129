"""Decode and resize a data set of image files once, into a folder that is read without decoding."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from fedjax_dg.datasets.benchmarks import LAYOUTS, given, layout_of
from fedjax_dg.datasets.domains import Domains
from fedjax_dg.datasets.folders import Tree, domains_of, find_root, scan
from fedjax_dg.datasets.official import official_split
from fedjax_dg.datasets.reading import read
from fedjax_dg.datasets.records import source_of
from fedjax_dg.datasets.stored import (
    EXAMPLES,
    FORMATS,
    LOCK,
    PIXELS,
    PLACES,
    RECORDS,
    SCHEMA,
    digest,
    file_sums,
    is_prepared,
    load_prepared,
    read_manifest,
    write_manifest,
)
from fedjax_dg.errors import unknown

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

#: Images read at a time.
BLOCK = 64

Report = Callable[[int, int], None]


def prepare(
    name: str,
    data_dir: str | None,
    out: str | os.PathLike[str],
    format: str = "uint8",
    image_size: int = 224,
    workers: int = 0,
    report: Report | None = None,
    overwrite: bool = False,
) -> Path:
    """Writes the images of a data set, decoded and resized, with all that ``load`` needs; gives the folder.

    ``load(name, data_dir=out)`` then gives the same rows, labels, files and official split, without decoding. The
    folder is written under another name and renamed when it is whole; what a killed run left is removed by the next.
    The same content again (by names and sizes of the files) is left as it is.

    Args:
      name: a key of ``benchmarks.LAYOUTS``, or ``folder``.
      data_dir: the folder of the data set, or one up to three above it.
      out: the folder to write.
      format: ``uint8``, one array that is mapped into memory, image_size^2 * 3 bytes an image; ``array_record``,
        deflated records that tensorflow_datasets reads too, domains as splits: hardly smaller for photographs, far
        smaller for drawings, and read some nine times slower.
      image_size: both sides of the images in pixels.
      workers: processes that decode; 0 = threads of this one.
      report: told how many of how many images are done.
      overwrite: replace a prepared data set of other content.

    Raises:
      ValueError: the data set cannot be loaded, an image cannot be decoded, the disk is full, ``out`` is something
        else, of other content or inside the data set, or another process is writing it.
    """
    if name not in (*LAYOUTS, "folder"):
        raise unknown("data set of image files", name, (*LAYOUTS, "folder"))
    if format not in FORMATS:
        raise unknown("format", format, FORMATS)
    path = given(name, data_dir)
    if is_prepared(path):
        raise ValueError(f"{path} is prepared already: give the folder of the images as --data-dir.")
    layout = layout_of(name, path)
    tree = scan(layout, find_root(layout, path))
    domains = domains_of(layout, tree, image_size)
    official, validation = None, None
    try:
        validation = official_split(layout, tree.root, tree.files, tree.labels, tree.domain)
    except ValueError as error:
        official = str(error)
    examples = json.dumps(
        {
            "labels": domains.labels.tolist(),
            "domain": domains.domain.tolist(),
            "files": tree.files,
            "validation": None if validation is None else np.flatnonzero(validation).tolist(),
        }
    )
    manifest: dict[str, Any] = {
        "schema": SCHEMA,
        "data_set": name,
        "format": format,
        "image_size": image_size,
        "num_examples": len(tree.files),
        "domain_names": list(domains.domain_names),
        "class_names": list(domains.class_names),
        "notice": domains.notice,
        "official": official,
        "content": digest([tree.files, tree.sizes.tolist(), hashlib.sha256(examples.encode()).hexdigest()]),
    }
    out = Path(out)
    _outside(out, tree, name)
    try:
        if _exists(out, manifest, overwrite):
            return out
        with _whole_or_not_at_all(out) as partial:
            (partial / EXAMPLES).write_text(examples, encoding="utf-8")
            write = _write_records if format == "array_record" else _write_array
            manifest |= write(partial, domains, workers, report or (lambda done, total: None))
            write_manifest(str(partial), manifest | {"files": file_sums(str(partial))})
    except OSError as error:
        raise ValueError(f"{out} cannot be written ({error.strerror or error}): choose another --out.") from None
    return out


def _outside(out: Path, tree: Tree, name: str) -> None:
    """Raises ``ValueError`` where what is written would be taken for a part of the data set."""
    inside = os.path.relpath(os.path.realpath(out), os.path.realpath(tree.root)).split(os.sep)
    domains = {file.split("/", 1)[0] for file in tree.files}
    if inside[0] == "." or inside[0] in domains or (name == "folder" and inside[0] != ".."):
        raise ValueError(f"{out} lies among the images of {tree.root}: choose an --out beside them.")


def _exists(out: Path, manifest: dict[str, Any], overwrite: bool) -> bool:
    """Whether the same is there, whole. Raises ``ValueError`` for anything else that must not be replaced."""
    if not os.path.lexists(out) or (out.is_dir() and not any(out.iterdir())):
        return False
    if not is_prepared(str(out)):
        raise ValueError(f"{out} exists and is no prepared data set: choose another --out.")
    try:
        found = read_manifest(str(out))
        load_prepared(str(out))
    except ValueError as error:
        if overwrite:
            return False
        raise ValueError(f"{error}".removesuffix(".") + ", or choose another --out.") from None
    differ = [key for key in manifest if found.get(key) != manifest[key]]
    if not differ:
        return True
    if not overwrite:
        raise ValueError(
            f"{out} holds a prepared data set with another {', '.join(differ)}: pass --overwrite to replace it, or "
            "another --out."
        )
    return False


@contextlib.contextmanager
def _whole_or_not_at_all(out: Path) -> Iterator[Path]:
    """A folder to write in, which becomes ``out`` in one step when nothing was raised, and is removed otherwise."""
    here = out.absolute()
    here.parent.mkdir(parents=True, exist_ok=True)
    partial, old = here.with_name(f".{here.name}.partial"), here.with_name(f".{here.name}.old")
    if partial.exists():
        with _locked(partial / LOCK) as free:
            if not free:
                raise ValueError(f"Another process is writing {out}: wait for it, or choose another --out.")
        shutil.rmtree(partial)
    shutil.rmtree(old, ignore_errors=True)
    partial.mkdir()
    try:
        with _locked(partial / LOCK):
            yield partial
            (partial / LOCK).unlink(missing_ok=True)
            if here.exists():
                here.rename(old)
            partial.rename(here)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    shutil.rmtree(old, ignore_errors=True)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[bool]:
    """Whether this process holds the lock, which the system lets go of when a process dies."""
    if fcntl is None:
        yield True
        return
    with open(path, "a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        except OSError:  # some network file systems have no locks
            pass
        yield True


# --- what is written --------------------------------------------------------------------------------------------------


def _blocks(domains: Domains, rows: NDArray[np.integer], workers: int) -> Iterator[np.ndarray]:
    """The images of these rows, some at a time."""
    padded = np.full(-(-len(rows) // BLOCK) * BLOCK, -1)
    padded[: len(rows)] = rows
    left = len(rows)
    for block in read(domains.inputs, list(padded.reshape(-1, BLOCK)), workers):
        yield block[: min(left, BLOCK)]
        left -= BLOCK


def _write_array(folder: Path, domains: Domains, workers: int, report: Report) -> dict[str, Any]:
    """``images.npy``, written through: a disk that fills up is an error, where a mapped file would end the process."""
    shape = domains.inputs.shape
    needed, free = int(np.prod(shape, dtype=np.int64)), shutil.disk_usage(folder).free
    if needed > free:
        raise ValueError(
            f"{shape[0]:,} images of {shape[1]} x {shape[2]} pixels take {needed / 1e9:.1f} GB, and {free / 1e9:.1f} GB are "
            f"free in {folder.parent}: choose another --out, a smaller image size, or format array_record."
        )
    with open(folder / PIXELS, "wb") as file:
        header = {"descr": "|u1", "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(file, header)
        done = 0
        for block in _blocks(domains, np.arange(shape[0]), workers):
            file.write(block.tobytes())
            done += len(block)
            report(done, shape[0])
    return {}


def _write_records(folder: Path, domains: Domains, workers: int, report: Report) -> dict[str, Any]:
    """``images/``: one split a domain, and ``places.npy``: where each row went, as the records are shuffled."""
    splits = _split_names(domains.domain_names)
    total = len(domains.labels)
    # what tensorflow_datasets prints is not for the user, what the report prints is; rich's bars are drawn by a thread
    out, swallowed = sys.stdout, io.StringIO()
    cast(Any, swallowed).rich_proxied_file = getattr(out, "rich_proxied_file", out)

    def told(done: int, total: int) -> None:
        with contextlib.redirect_stdout(out):
            report(done, total)

    with contextlib.redirect_stdout(swallowed), contextlib.redirect_stderr(io.StringIO()):
        records = _build(folder / RECORDS, domains, splits, workers, told)
    shutil.rmtree(folder / RECORDS / "downloads", ignore_errors=True)
    source = source_of(str(records), splits, pixels=False)
    places = np.full(total, -1)
    for place in range(total):
        places[source[place]["index"]] = place
    source_of.cache_clear()
    np.save(folder / PLACES, places)
    return {"records": records.relative_to(folder).as_posix(), "splits": list(splits)}


def _build(folder: Path, domains: Domains, splits: tuple[str, ...], workers: int, report: Report) -> Path:
    """The folder of the data set that tensorflow_datasets wrote.

    Pixels are deflated tensors: of 224 x 224 noisy pictures 130 a second are written and 500 read on one core, in 0.9
    of their size; as PNG 70 and 210, in 0.7.
    """
    import tensorflow_datasets as tfds  # takes half a second

    total, shape = len(domains.labels), domains.inputs.shape[1:]
    features = {
        "image": tfds.features.Tensor(shape=shape, dtype=np.uint8, encoding="zlib"),
        "label": tfds.features.ClassLabel(names=list(domains.class_names)),
        "index": np.int64,
    }

    class Builder(tfds.core.GeneratorBasedBuilder, skip_registration=True):
        """Images of one data set, a split for each domain."""

        VERSION = tfds.core.Version("1.0.0")
        name = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", domains.name).lower()

        def _info(self):
            return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict(features))

        def _split_generators(self, dl_manager):
            return {split: self._generate_examples(number) for number, split in enumerate(splits)}

        def _generate_examples(self, number):
            rows = np.flatnonzero(domains.domain == number)
            done = 0
            for block in _blocks(domains, rows, workers):
                for image in block:
                    row = int(rows[done])
                    yield row, {"image": image, "label": int(domains.labels[row]), "index": row}
                    done += 1
                report(int((domains.domain < number).sum()) + done, total)

    builder = Builder(data_dir=str(folder), file_format="array_record")
    builder.download_and_prepare()
    return Path(str(builder.data_path))


def _split_names(domain_names: tuple[str, ...]) -> tuple[str, ...]:
    """Names of splits that tensorflow_datasets takes: those of the domains, or numbered ones."""
    names = tuple(re.sub(r"[^A-Za-z0-9]+", "_", name).strip("_").lower() for name in domain_names)
    if len(set(names)) < len(names) or not all(names) or "all" in names:
        return tuple(f"domain_{number}" for number in range(len(names)))
    return names
