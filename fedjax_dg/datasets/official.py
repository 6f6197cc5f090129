"""Official splits: text files that list the images of each domain to train on and to validate on."""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fedjax_dg.datasets.layouts import Layout, composed, lookup, shown, some

#: An image, however its folders are spelled: domain, label, name below the class folder.
_Key = tuple[int, int, str]


def official_split(
    layout: Layout, root: str, files: Sequence[str], labels: NDArray[np.integer], domain: NDArray[np.integer]
) -> NDArray[np.bool_]:
    """bool [M], True for what the official lists validate on.

    Looked for in the root, its parent and the folders directly in them. Checked: labels, that no image is trained and
    validated on, and that the lists hold exactly the files that are there.

    Raises:
      ValueError: the data set has no lists, some are missing, or they do not fit each other or the files.
    """
    lists = layout.lists
    if lists is None:
        raise ValueError(f"{layout.name} has no official split: leave official out, and a split is drawn.")
    folder = find_lists(layout, root)
    rows: dict[_Key, int] = {}
    for row, (file, label, number) in enumerate(zip(files, labels.tolist(), domain.tolist())):
        rows[number, label, composed(file.split("/", 2)[2])] = row
    validation = np.zeros(len(files), bool)
    for number, name in enumerate(layout.domain_names):
        parts = [_read(layout, os.path.join(folder, kind.format(name)), number) for kind in lists.kinds]
        train, held = parts[0], parts[1]
        if both := sorted(train & held):
            raise ValueError(
                f"{_name(layout, both)} {_are(both)} in both {lists.train.format(name)} and "
                f"{lists.validation.format(name)} in {folder}: take the official lists, of {layout.home}."
            )
        if len(parts) > 2 and (differ := sorted((train | held) ^ parts[2])):
            raise ValueError(
                f"{_name(layout, differ)} {_are(differ)} in {lists.whole and lists.whole.format(name)} but in neither other "
                f"list of {name} in {folder}, or the other way round: take the official lists of {layout.home}."
            )
        here = {key for key in rows if key[0] == number}
        if absent := sorted((train | held) - here):
            raise ValueError(
                f"{_name(layout, absent)} {_are(absent)} in the official lists in {folder} but not on disk: complete the "
                "images, or leave official out."
            )
        if unlisted := sorted(here - train - held):
            raise ValueError(
                f"{_name(layout, unlisted)} {_are(unlisted)} on disk but not in the official lists in {folder}{lists.hint}."
            )
        validation[[rows[key] for key in held]] = True
    return validation


def has_lists(layout: Layout, root: str) -> bool:
    """Whether any of the official lists is there."""
    return any(present for _, present in _candidates(layout, root))


def find_lists(layout: Layout, root: str) -> str:
    """The folder that holds the official lists. Raises ``ValueError`` where none holds all of them."""
    candidates = list(_candidates(layout, root))
    wanted = _file_names(layout)
    folder, present = max(candidates, key=lambda candidate: len(candidate[1]))
    if len(present) == len(wanted):
        return folder
    if present:
        missing = [name for name in wanted if name not in present]
        raise ValueError(
            f"{folder} lacks the official lists {some(missing)} of {layout.name}: add them, or leave official out."
        )
    raise ValueError(
        f"No official lists of {layout.name} in {root}, beside it, or one folder below these: put the {len(wanted)} files "
        f"{wanted[0]}, ... there, or leave official out."
    )


def _file_names(layout: Layout) -> list[str]:
    kinds = layout.lists.kinds if layout.lists is not None else ()
    return [kind.format(name) for name in layout.domain_names for kind in kinds]


def _candidates(layout: Layout, root: str):
    """Each folder where lists may be, and those that are in it."""
    wanted = _file_names(layout)
    for top in (root, os.path.dirname(os.path.abspath(root))):
        try:
            below = sorted(entry.path for entry in os.scandir(top) if entry.is_dir())
        except OSError:
            below = []
        for folder in (top, *below):
            yield folder, [name for name in wanted if os.path.isfile(os.path.join(folder, name))]


def _read(layout: Layout, path: str, number: int) -> set[_Key]:
    """The images of one list, all of one domain. Raises ``ValueError`` for a line that is not right."""
    assert layout.lists is not None
    name, first = layout.domain_names[number], layout.lists.first_label
    domain_of, class_of = lookup(layout.domains, layout.exact), lookup(layout.classes, layout.exact)
    try:
        with open(path, encoding="utf-8-sig") as file:
            lines = file.read().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read ({type(error).__name__}): take the list of {layout.home}.") from None
    keys: set[_Key] = set()
    wrong: list[tuple[int, int]] = []
    for line_number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        image, _, given = line.strip().replace("\\", "/").rpartition(" ")
        parts = image.strip().split("/")
        label = class_of(parts[-2]) if len(parts) > 2 else None
        if label is None or not given.isdecimal() or domain_of(parts[-3]) != number:
            raise ValueError(
                f"{path} line {line_number} is {shown(line.strip())!r}, expected {name}/class/image and a label: take the "
                f"list of {layout.home}."
            )
        if int(given) - first != label:
            wrong.append((int(given), label))
        key = number, label, composed(parts[-1])
        if key in keys:
            raise ValueError(
                f"{path} names {shown(image)} twice, in line {line_number} again: take the list of {layout.home}."
            )
        keys.add(key)
    if wrong and len(wrong) == len(keys) and all(given == label for given, label in wrong):
        raise ValueError(
            f"{path} counts labels from 0, the official list from {first}; copies that do so also give the whole domain to "
            f"train on and to test on: take the lists of {layout.home}."
        )
    if wrong:
        given, label = wrong[0]
        raise ValueError(
            f"{path} gives {layout.class_names[label]} the label {given}, expected {label + first}: take the list of "
            f"{layout.home}."
        )
    return keys


def _name(layout: Layout, keys: Sequence[_Key]) -> str:
    return some([f"{layout.domain_names[g]}/{layout.class_names[k]}/{name}" for g, k, name in keys])


def _are(keys: Sequence[_Key]) -> str:
    return "is" if len(keys) == 1 else "are"
