"""Whether a data set on disk is whole: what is there, what should be, and all that is wrong at once."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from fedjax_dg import datasets
from fedjax_dg.datasets import texts
from fedjax_dg.datasets.benchmarks import LAYOUTS, given, layout_of
from fedjax_dg.datasets.domains import Domains
from fedjax_dg.datasets.folders import Tree, counts_of, find_root, scan, version_of
from fedjax_dg.datasets.images import UnreadableImage, decode
from fedjax_dg.datasets.layouts import Layout, Version, shown, some
from fedjax_dg.datasets.official import has_lists, official_split
from fedjax_dg.datasets.reading import read
from fedjax_dg.datasets.stored import find_prepared, is_prepared, load_prepared, read_manifest
from fedjax_dg.errors import unknown

#: Files that are decoded at a time.
BLOCK = 64


class Report(NamedTuple):
    """What ``check`` found.

    Attributes:
      name: of the data set.
      root: the folder that holds its domains, or the prepared set; None where none was found or it has no folder.
      layout: how it is stored, in words.
      version: which of its published versions it is; None for none of them.
      domain_names, class_names: as in ``Domains``.
      counts: images by domain and class.
      expected: images by domain of the version, or of the one nearest to it; None where there is none.
      problems: what is wrong, a sentence each that says what to do.
      notes: what else a user should know.
      unit: what is counted.
    """

    name: str
    root: str | None
    layout: str
    version: str | None = None
    domain_names: tuple[str, ...] = ()
    class_names: tuple[str, ...] = ()
    counts: tuple[tuple[int, ...], ...] = ()
    expected: tuple[int, ...] | None = None
    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    unit: str = "images"

    @property
    def ok(self) -> bool:
        return not self.problems


def check(
    name: str,
    data_dir: str | None = None,
    workers: int = 0,
    report: Callable[[int, int], None] | None = None,
) -> Report:
    """Looks through a data set without stopping at the first problem; every image file is decoded.

    For the benchmarks numbers of images of no published version are a problem here, where ``load`` accepts them. A
    prepared data set is checked against its manifest, any other by loading it.

    Args:
      name: a key of ``fedjax_dg.datasets.DATASETS``.
      data_dir: as for ``load``.
      workers: processes that decode; 0 = threads of this one.
      report: told how many of how many files are decoded.

    Raises:
      ValueError: no such data set, or no folder is given where one is needed.
    """
    if name not in datasets.DATASETS:
        raise unknown("data set", name, datasets.DATASETS)
    if name in texts.READERS:
        return _check_texts(name, given(name, data_dir))
    if name not in (*LAYOUTS, "folder"):
        return _check_other(name, data_dir)
    path = given(name, data_dir)
    try:
        prepared = path if is_prepared(path) else find_prepared(name, path, None)
        if prepared is not None:
            return _check_prepared(name, prepared)
        layout = layout_of(name, path)
        root = find_root(layout, path)
    except ValueError as error:
        return Report(name, None, "domain/class/image", problems=(str(error),))
    tree = scan(layout, root)
    counts = counts_of(layout, tree)
    nearest, wrong_counts = compare(layout, counts)
    official, notes = _check_lists(layout, tree)
    version = version_of(layout, counts)
    return Report(
        name=name,
        root=root,
        layout="domain/class/image",
        version=version and version.name,
        domain_names=layout.domain_names,
        class_names=layout.class_names,
        counts=tuple(map(tuple, counts.tolist())),
        expected=nearest and nearest.by_domain,
        problems=(
            *(f"{problem}." for problem in tree.problems),
            *_unreadable(tree, workers, report or (lambda done, total: None)),
            *wrong_counts,
            *official,
        ),
        notes=(*tree.notes, *notes),
    )


def compare(layout: Layout, counts: np.ndarray) -> tuple[Version | None, tuple[str, ...]]:
    """The published version nearest to these numbers [G, K], and a sentence for each domain that differs from it."""
    if not layout.versions:
        return None, ()
    by_domain = counts.sum(1)
    nearest = min(layout.versions, key=lambda version: int(np.abs(np.asarray(version.by_domain) - by_domain).sum()))
    problems = []
    for number, name in enumerate(layout.domain_names):
        found, expected = int(by_domain[number]), nearest.by_domain[number]
        differ = []
        if nearest.by_class is not None:
            pairs = zip(layout.class_names, counts[number].tolist(), nearest.by_class[number])
            differ = [f"{kind} {n:,} for {m:,}" for kind, n, m in pairs if n != m]
        if found and (found != expected or differ):
            which = f" ({some(differ)})" if differ else ""
            problems.append(
                f"{name} has {found:,} {layout.unit}{which}, expected {expected:,} of {layout.name} ({nearest.name}): "
                f"complete it from {layout.home}, or use it as the part that it is."
            )
    return nearest, tuple(problems)


@dataclass(frozen=True)
class Verdicts:
    """bool [M]: whether a file is an image that can be decoded; read like an array."""

    root: str
    files: tuple[str, ...]

    dtype = np.dtype(bool)

    @property
    def shape(self) -> tuple[int]:
        return (len(self.files),)

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, rows) -> np.ndarray:
        return np.asarray([_why_not(os.path.join(self.root, self.files[row])) is None for row in rows], bool)


def _why_not(path: str) -> str | None:
    try:
        decode(path, 8)
    except UnreadableImage as error:
        return str(error)
    return None


def _unreadable(tree: Tree, workers: int, report: Callable[[int, int], None]) -> list[str]:
    """A sentence for each file that cannot be decoded."""
    total = len(tree.files)
    rows = np.full(-(-total // BLOCK) * BLOCK, -1)
    rows[:total] = np.arange(total)
    bad: list[int] = []
    blocks = read(Verdicts(tree.root, tree.files), list(rows.reshape(-1, BLOCK)), workers)
    for number, block in enumerate(blocks):
        start = number * BLOCK
        bad += (start + np.flatnonzero(~block[: total - start])).tolist()
        report(min(start + BLOCK, total), total)
    reasons = (_why_not(os.path.join(tree.root, tree.files[row])) for row in bad)
    return [shown(reason).replace(os.path.join(shown(tree.root), ""), "") for reason in reasons if reason is not None]


def _check_lists(layout: Layout, tree: Tree) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Problems of the official lists, and notes."""
    if layout.lists is None:
        return (), ()
    if not has_lists(layout, tree.root):
        return (), ("The official lists of its split are not there.",)
    try:
        validation = official_split(layout, tree.root, tree.files, tree.labels, tree.domain)
    except ValueError as error:
        return (str(error),), ()
    return (), (
        f"The official lists fit: {(~validation).sum():,} images to train on, {validation.sum():,} to validate on.",
    )


def _check_prepared(name: str, folder: str) -> Report:
    kind = "prepared"
    try:
        manifest = read_manifest(folder)
        kind = f"prepared, {manifest['format']}, image_size {manifest['image_size']}"
        if manifest["data_set"] != name:
            raise ValueError(f"{folder} is a prepared {manifest['data_set']}, not {name}: check it under that name.")
        domains = load_prepared(folder)
        domains.inputs[np.asarray([0, len(domains.labels) - 1])]
    except ValueError as error:
        return Report(name, folder, kind, problems=(str(error),))
    layout = LAYOUTS.get(name)
    counts = _counts(domains)
    nearest, problems = (None, ()) if layout is None else compare(layout, counts)
    version = None if layout is None else version_of(layout, counts)
    return _of_domains(domains, folder, kind)._replace(
        version=version and version.name, expected=nearest and nearest.by_domain, problems=problems
    )


def _check_texts(name: str, path: str) -> Report:
    """Texts, without tokenising them."""
    try:
        corpus = texts.READERS[name](path)
    except ValueError as error:
        return Report(name, None, "", problems=(str(error),))
    layout = texts.LAYOUTS.get(name)
    nearest, wrong_counts = (None, ()) if layout is None else compare(layout, corpus.counts)
    version = None if layout is None else version_of(layout, corpus.counts)
    return Report(
        name=name,
        root=corpus.root,
        layout="texts",
        version=version and version.name,
        domain_names=corpus.domain_names,
        class_names=corpus.class_names,
        counts=tuple(map(tuple, corpus.counts.tolist())),
        expected=nearest and nearest.by_domain,
        problems=(*(f"{problem}." for problem in corpus.problems), *wrong_counts),
        notes=corpus.notes,
        unit="texts" if layout is None else layout.unit,
    )


def _check_other(name: str, data_dir: str | None) -> Report:
    """A data set that is no folder of images: it loads, or not."""
    takes_folder = "data_dir" in inspect.signature(datasets.DATASETS[name]).parameters
    if data_dir is not None and not takes_folder:
        raise ValueError(f"data_dir={data_dir!r} is given, but {name} comes with the library: leave data_dir out.")
    options = {} if data_dir is None else {"data_dir": data_dir}
    try:
        domains = datasets.load(name, **options)
    except ValueError as error:
        return Report(name, data_dir, "", problems=(str(error),))
    kind = "its own files" if takes_folder and data_dir is not None else "comes with the library"
    return _of_domains(domains, data_dir, kind)


def _of_domains(domains: Domains, root: str | None, layout: str) -> Report:
    return Report(
        name=domains.name,
        root=root,
        layout=layout,
        domain_names=domains.domain_names,
        class_names=domains.class_names,
        counts=tuple(map(tuple, _counts(domains).tolist())),
        notes=() if domains.notice is None else (domains.notice,),
    )


def _counts(domains: Domains) -> np.ndarray:
    shape = len(domains.domain_names), len(domains.class_names)
    return np.bincount(domains.domain * shape[1] + domains.labels, minlength=shape[0] * shape[1]).reshape(shape)
