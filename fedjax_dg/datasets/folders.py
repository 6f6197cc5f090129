"""Image files in folders, ``domain/class/image``: found, listed and checked by name before anything is decoded."""

from __future__ import annotations

import filecmp
import os
import stat
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from fedjax_dg.datasets.domains import Domains
from fedjax_dg.datasets.images import EXTENSIONS, Images, quietly
from fedjax_dg.datasets.layouts import Layout, Version, composed, lookup, shown, some, spelled
from fedjax_dg.datasets.official import official_split

#: Folders below ``data_dir`` that are searched for the one that holds the domains.
DEPTH = 3

_JUNK = {"thumbs.db", "desktop.ini", "__macosx", "@eadir"}


class Tree(NamedTuple):
    """The image files below one folder, in torchvision's order within each domain.

    Attributes:
      root: the folder that holds the domains.
      files: [M] paths below it, with "/".
      sizes: [M] bytes.
      labels, domain: [M].
      problems: what keeps it from being loaded, one sentence each, without the full stop.
      notes: what a user should know, one sentence each.
    """

    root: str
    files: tuple[str, ...]
    sizes: NDArray[np.int64]
    labels: NDArray[np.int32]
    domain: NDArray[np.int32]
    problems: tuple[str, ...]
    notes: tuple[str, ...]


def load_folder(layout: Layout, data_dir: str, image_size: int = 224, official: bool = False) -> Domains:
    """The images of a data set of known layout, not decoded yet: ``inputs`` are ``Images`` of ``image_size``.

    Rows: domain 0 first; within a domain in the order of torchvision's ImageFolder (class folders by their names on
    disk, then paths), into which DomainBed's splits index. Labels are indices into the layout's own list of classes,
    and so need not grow with the rows. ``validation`` is None, or the official split with ``official``. Numbers of
    images of no published version are accepted, and told in ``notice``. Hidden files are left out, where torchvision
    reads them if they end like images.

    Raises:
      ValueError: no such folder, or two; a domain is missing, unknown, twice there or without any image; a class is
        unknown or twice there; a file is empty, a broken link, misplaced or an image under another kind of name; the
        official lists are missing or do not fit the files.
    """
    return domains_of(layout, scan(layout, find_root(layout, data_dir)), image_size, official)


def own_layout(data_dir: str) -> Layout:
    """The layout of any tree ``domain/class/image``: its folders in plain sorted order.

    Raises:
      ValueError: no folder, or fewer than two domains in it.
    """
    root = existing("a folder for each domain", data_dir)
    domains = folders_in(root)
    if len(domains) < 2:
        found = f"only the folder {shown(domains[0])}" if domains else "no folder"
        raise ValueError(
            f"{root} holds {found}, but one of two or more domains is held out: give a folder of domain/class/image."
        )
    classes = sorted({composed(name) for domain in domains for name in folders_in(os.path.join(root, domain))})
    spellings: dict[str, str] = {}
    for name in classes:
        if (other := spellings.setdefault(spelled(name, exact=True), name)) != name:
            raise ValueError(
                f"{root} has the classes {shown(other)!r} and {shown(name)!r}: give both folders one spelling."
            )
    return Layout(
        name="folder",
        folders=(),
        domains=tuple(dict.fromkeys((composed(name),) for name in domains)),
        classes=tuple((name,) for name in classes),
        licence="your own",
        exact=True,
    )


def domains_of(layout: Layout, tree: Tree, image_size: int, official: bool = False) -> Domains:
    """``load_folder`` of a tree that is listed already. Raises ``ValueError`` with its first problem."""
    if image_size < 1:
        raise ValueError(
            f"image_size={image_size} is not positive: give the side of the images in pixels, such as 224."
        )
    if tree.problems:
        others = len(tree.problems) - 1
        command = f"`fedjax-dg data check {layout.name} --data-dir {tree.root}`"
        more = f"; {others} more problem{'s' * (others > 1)}: see {command}" if others else ""
        raise ValueError(f"{layout.name} in {tree.root}: {tree.problems[0]}{more}.")
    validation = None
    if official:
        validation = official_split(layout, tree.root, tree.files, tree.labels, tree.domain)
    return Domains(
        name=layout.name,
        inputs=Images(tree.root, tree.files, image_size),
        labels=tree.labels,
        domain=tree.domain,
        identity=None,
        validation=validation,
        domain_names=layout.domain_names,
        class_names=layout.class_names,
        files=tree.files,
        notice=" ".join((*version_note(layout, counts_of(layout, tree)), *tree.notes)) or None,
    )


def counts_of(layout: Layout, tree: Tree) -> NDArray[np.int64]:
    """Images of each domain and class, [G, K]."""
    shape = len(layout.domains), len(layout.classes)
    return np.bincount(tree.domain * shape[1] + tree.labels, minlength=shape[0] * shape[1]).reshape(shape)


def version_of(layout: Layout, counts: NDArray[np.integer]) -> Version | None:
    """The version with these numbers of images by domain."""
    by_domain = tuple(counts.sum(1).tolist())
    return next((version for version in layout.versions if version.by_domain == by_domain), None)


def version_note(layout: Layout, counts: NDArray[np.integer]) -> tuple[str, ...]:
    """Which of several versions it is, or that it is none; nothing where there is nothing to say."""
    version = version_of(layout, counts)
    if version is not None:
        return (f"{layout.name}: {version.name}, {version.total:,} {layout.unit}.",) if len(layout.versions) > 1 else ()
    if not layout.versions:
        return ()
    known = " or ".join(f"{version.total:,}" for version in layout.versions)
    return (f"{layout.name}: {counts.sum():,} {layout.unit}; the published set has {known}.",)


# --- finding ---------------------------------------------------------------------------------------------------------


def find_root(layout: Layout, data_dir: str) -> str:
    """The folder that holds more than half of the domains: ``data_dir`` or the shallowest of those up to three below.

    Raises:
      ValueError: there is none, or there are several at one depth.
    """
    level = [existing(layout.name, data_dir)]
    if layout.exact:
        return level[0]
    domain_of = lookup(layout.domains)
    seen: set[str] = set()
    nearest: tuple[int, str, list[str]] = (0, "", [])
    for _ in range(DEPTH + 1):
        below, found = [], []
        for folder in level:
            if (real := os.path.realpath(folder)) in seen:
                continue
            seen.add(real)
            names = folders_in(folder)
            held = sorted({place for name in names if (place := domain_of(name)) is not None})
            if 2 * len(held) > len(layout.domains):
                found.append(folder)
            if len(held) > nearest[0]:
                nearest = len(held), folder, [layout.domain_names[place] for place in held]
            below += [os.path.join(folder, name) for name in names]
        if len(found) > 1:
            raise ValueError(
                f"{found[0]} and {found[1]} both hold domains of {layout.name}: give one of them as --data-dir."
            )
        if found:
            return found[0]
        level = below
    almost = f" ({nearest[1]} holds only {', '.join(nearest[2])})" if nearest[0] else ""
    raise ValueError(
        f"No {layout.name} in {os.fspath(data_dir)}{almost}: expected the folders {', '.join(layout.domain_names)} in it or "
        f"up to {DEPTH} folders below, such as {layout.folders[0]}/{layout.domain_names[0]}; get it from {layout.home}."
    )


def existing(what: str, data_dir: str) -> str:
    """The folder that was given. Raises ``ValueError`` if it is none."""
    path = os.fspath(data_dir)
    if not os.path.isdir(path):
        kind = "is no folder" if os.path.lexists(path) else "does not exist"
        raise ValueError(f"data_dir={path!r} {kind}: give the folder that holds {what} as --data-dir.")
    return path


def folders_in(folder: str) -> list[str]:
    """Names of the folders in a folder, sorted; none where it cannot be opened."""
    try:
        with os.scandir(folder) as entries:
            return sorted(entry.name for entry in entries if not _junk(entry.name) and _is_folder(entry))
    except OSError:
        return []


def _junk(name: str) -> bool:
    """What operating systems leave behind."""
    return name.startswith(".") or name.casefold() in _JUNK


def _is_image(name: str) -> bool:
    return name.lower().endswith(EXTENSIONS)


# --- listing ---------------------------------------------------------------------------------------------------------


class _Found(NamedTuple):
    """What is gathered on the way."""

    problems: list[str]
    notes: list[str]
    unread: list[str]  # files in class folders that are no images
    loops: list[str]  # links to a folder that they lie in


class _File(NamedTuple):
    path: str  # below the root, with "/"
    size: int
    name: str  # below the class folder


def scan(layout: Layout, root: str) -> Tree:
    """All image files of a data set below its root, with whatever is wrong with their names, sizes and places."""
    gathered = _Found([], [], [], [])
    folders = _assigned(root, "", "domain", layout, gathered)
    rows: list[tuple[_File, int, int]] = []
    empty: list[str] = []
    for number, name in enumerate(layout.domain_names):
        if number not in folders:
            gathered.problems.append(f"the domain {shown(name)} is missing: add its folder")
            continue
        if not folders[number]:
            continue
        counts: Counter[int] = Counter()
        for label, files in _domain(layout, root, folders[number], gathered):
            rows += [(file, label, number) for file in files]
            counts[label] += len(files)
        if not counts.total():
            gathered.problems.append(f"the domain {shown(name)} holds no image: expected class/image in it")
        else:
            empty += [f"{kind} ({name})" for label, kind in enumerate(layout.class_names) if not counts[label]]
    notes = gathered.notes
    if empty:
        notes.append(f"No image of {some(empty)}.")
    if gathered.unread:
        notes.append(f"Not read, as no images by name: {some(gathered.unread)} ({len(gathered.unread)} in all).")
    if gathered.loops:
        notes.append(f"Not followed, as links to a folder above: {some(gathered.loops)}.")
    return Tree(
        root=root,
        files=tuple(file.path for file, _, _ in rows),
        sizes=np.asarray([file.size for file, _, _ in rows], np.int64),
        labels=np.asarray([label for _, label, _ in rows], np.int32),
        domain=np.asarray([number for _, _, number in rows], np.int32),
        problems=tuple(gathered.problems),
        notes=tuple(notes),
    )


def _assigned(root: str, inside: str, kind: str, layout: Layout, gathered: _Found) -> dict[int, str]:
    """The folders directly in ``inside`` by the domain or class (``kind``) they are of, "" for a broken link.

    All else is a problem or junk.
    """
    table, names = (layout.domains, layout.domain_names) if kind == "domain" else (layout.classes, layout.class_names)
    place_of = lookup(table, layout.exact)
    folders: dict[int, str] = {}
    for entry in _entries(root, inside, gathered):
        path = _join(inside, entry.name)
        place = place_of(entry.name)
        if _is_folder(entry):
            if place is None and (kind == "class" or _holds_images(entry.path)):
                gathered.problems.append(
                    f"{shown(path)} is no {kind} of it ({some(names)}): rename or remove the folder"
                )
            elif place in folders:
                both = f"{shown(folders[place])} and {shown(path)}"
                gathered.problems.append(f"{both} are both the {kind} {shown(names[place])}: join the folders")
            elif place is not None:
                folders[place] = path
        elif _broken(entry) and (place is not None or kind == "class"):
            gathered.problems.append(f"{shown(path)} is a link to nothing: repair or remove it")
            if place is not None:
                folders.setdefault(place, "")
        elif _is_image(entry.name) and kind == "class":
            gathered.problems.append(f"{shown(path)} lies in no class folder: move or remove it")
        elif _is_image(entry.name):
            gathered.notes.append(f"Not read, as in no domain: {shown(path)}.")
    return folders


def _domain(layout: Layout, root: str, domain: str, gathered: _Found) -> Iterator[tuple[int, list[_File]]]:
    """The label and files of each class folder of a domain, in the order of their names on disk."""
    below = [name.casefold() for name in folders_in(os.path.join(root, domain))]
    if not layout.levels or not below or not set(below) <= set(layout.levels):
        yield from _classes(layout, root, domain, domain, gathered)
        return
    levels = [_join(domain, name) for name in folders_in(os.path.join(root, domain))]
    by_level = {level: dict(_classes(layout, root, domain, level, gathered)) for level in levels}
    full = next((level for level in levels if level.rsplit("/", 1)[1].casefold() == "full"), None)
    labels = {label for found in by_level.values() for label in found}
    for label in sorted(labels, key=lambda label: layout.class_names[label]):
        parts = {level: found.get(label, []) for level, found in by_level.items() if level != full}
        if full is None:
            yield label, _once(root, [file for files in parts.values() for file in files], gathered)
            continue
        whole = by_level[full].get(label, [])
        names = {file.name for files in parts.values() for file in files}
        total = sum(len(files) for files in parts.values())
        # copies number the files of each folder anew: then the numbers of files must do
        if not names <= {file.name for file in whole} and total != len(whole):
            gathered.problems.append(
                f"{shown(full)} holds {len(whole)} images of {layout.class_names[label]}, the folders beside it {total}: "
                "it must hold all of theirs, so complete or remove it"
            )
        yield label, whole


def _once(root: str, files: list[_File], gathered: _Found) -> list[_File]:
    """Without files that are there twice, by name and content."""
    kept: dict[tuple[str, int], list[_File]] = {}
    out = []
    for file in files:
        same = kept.setdefault((file.name, file.size), [])
        where = os.path.join(root, file.path)
        twin = next((f for f in same if filecmp.cmp(os.path.join(root, f.path), where, shallow=False)), None)
        if twin is None:
            same.append(file)
            out.append(file)
        else:
            gathered.notes.append(f"Read once: {shown(twin.path)}, the same as {shown(file.path)}.")
    return out


def _classes(layout: Layout, root: str, domain: str, level: str, gathered: _Found) -> Iterator[tuple[int, list[_File]]]:
    """The label and files of each class folder in ``level``, in the order of their names on disk."""
    folders = _assigned(root, level, "class", layout, gathered)
    for label, folder in sorted(folders.items(), key=lambda item: item[1]):
        if folder:
            yield label, _files(root, (root, os.path.join(root, domain), os.path.join(root, level)), folder, gathered)


def _files(root: str, above: tuple[str, ...], folder: str, gathered: _Found) -> list[_File]:
    """Image files in a class folder and below it, as ``sorted(os.walk(folder, followlinks=True))`` gives them."""
    todo = [(folder, tuple(os.path.realpath(path) for path in (*above, os.path.join(root, folder))))]
    found: list[tuple[str, list[_File]]] = []
    while todo:
        inside, chain = todo.pop()
        files = []
        for entry in _entries(root, inside, gathered):
            path = _join(inside, entry.name)
            if _is_folder(entry):
                real = os.path.realpath(entry.path)
                if entry.is_symlink() and any(
                    place == real or place.startswith(real.rstrip(os.sep) + os.sep) for place in chain
                ):
                    gathered.loops.append(path)
                else:
                    todo.append((path, (*chain, real)))
            elif _broken(entry):
                gathered.problems.append(f"{shown(path)} is a link to nothing: repair or remove it")
            elif not stat.S_ISREG((status := entry.stat()).st_mode):
                gathered.problems.append(f"{shown(path)} is no file: remove it")
            elif not _is_image(entry.name):
                if _opens(entry.path):
                    gathered.problems.append(
                        f"{shown(path)} is an image but not named as one: rename it ({', '.join(EXTENSIONS)})"
                    )
                else:
                    gathered.unread.append(path)
            elif not status.st_size:
                gathered.problems.append(f"{shown(path)} is empty (0 bytes): copy it again or remove it")
            else:
                files.append(_File(path, status.st_size, path[len(folder) + 1 :]))
        found.append((inside.replace("/", os.sep), files))
    return [file for _, files in sorted(found) for file in files]


def _entries(root: str, inside: str, gathered: _Found) -> list[os.DirEntry[str]]:
    """What is in a folder without junk, by name."""
    try:
        with os.scandir(os.path.join(root, inside)) as entries:
            return sorted((entry for entry in entries if not _junk(entry.name)), key=lambda entry: entry.name)
    except OSError as error:
        gathered.problems.append(
            f"{shown(inside or root)} cannot be opened ({type(error).__name__}): check its permissions"
        )
        return []


def _join(inside: str, name: str) -> str:
    return f"{inside}/{name}" if inside else name


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself
        return False


def _broken(entry: os.DirEntry[str]) -> bool:
    try:
        entry.stat()
    except OSError:
        return True
    return False


def _opens(path: str) -> bool:
    """Whether a file is an image by its content."""
    try:
        with quietly(), Image.open(path):
            return True
    except Exception:
        return False


def _holds_images(folder: str) -> bool:
    """Whether a folder holds images one or two folders below, as a domain does."""
    inner = [os.path.join(folder, name) for name in folders_in(folder)]
    deeper = [os.path.join(path, name) for path in inner for name in folders_in(path)]
    return any(_is_image(name) for path in (folder, *inner, *deeper) for name in _names(path))


def _names(folder: str) -> list[str]:
    try:
        return [name for name in os.listdir(folder) if not _junk(name)]
    except OSError:
        return []
