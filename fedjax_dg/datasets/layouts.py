"""What the folders of an image data set are called and hold: the record, and how names on disk are matched with it."""

from __future__ import annotations

import functools
import re
import unicodedata
from collections.abc import Callable, Sequence
from typing import NamedTuple

#: Names that an error or a notice gives before it says how many more there are.
FEW = 3


class Version(NamedTuple):
    """One published state of a data set's files.

    Attributes:
      name: what tells it from the others, in words.
      by_domain: images of each domain.
      by_class: images of each domain and class, where known.
    """

    name: str
    by_domain: tuple[int, ...]
    by_class: tuple[tuple[int, ...], ...] | None = None

    @property
    def total(self) -> int:
        return sum(self.by_domain)


class Lists(NamedTuple):
    """The files of an official split, lines ``domain/class/image label``; ``{}`` in their names is a domain's name.

    Attributes:
      train, validation: lists that share no image and hold all of a domain together.
      whole: a third list, of all of the domain; None where there is none.
      first_label: the label of the first class.
      hint: what to tell who has files that are in no list.
    """

    train: str
    validation: str
    whole: str | None
    first_label: int
    hint: str

    @property
    def kinds(self) -> tuple[str, ...]:
        return (self.train, self.validation) if self.whole is None else (self.train, self.validation, self.whole)


class Layout(NamedTuple):
    """What a data set's folders are called and hold.

    Attributes:
      name: as in ``fedjax_dg.datasets.DATASETS``.
      folders: names of the folder that holds the domains, as people have it.
      domains: in the order of their ids; of each its name, then other names of its folder.
      classes: in the order of their labels; of each its name, then other names of its folder.
      versions: what is in circulation, the usual one first.
      licence: the terms the images may be used under, in one line.
      home: where it is to be had.
      lists: its official split; None where it has none.
      levels: names of folders that may lie between a domain and its classes; ``full`` holds what all others do.
      exact: names may differ in case, Unicode form and kind of separator, but not in having one.
      unit: what is counted.
    """

    name: str
    folders: tuple[str, ...]
    domains: tuple[tuple[str, ...], ...]
    classes: tuple[tuple[str, ...], ...]
    versions: tuple[Version, ...] = ()
    licence: str = ""
    home: str = ""
    lists: Lists | None = None
    levels: tuple[str, ...] = ()
    exact: bool = False
    unit: str = "images"

    @property
    def domain_names(self) -> tuple[str, ...]:
        return tuple(names[0] for names in self.domains)

    @property
    def class_names(self) -> tuple[str, ...]:
        return tuple(names[0] for names in self.classes)


def lookup(table: tuple[tuple[str, ...], ...], exact: bool = False) -> Callable[[str], int | None]:
    """What finds the place in a layout's domains or classes that a folder's name stands for."""
    places = {spelled(name, exact): place for place, names in reversed([*enumerate(table)]) for name in names}
    return functools.cache(lambda name: places.get(spelled(name, exact)))


def composed(name: str) -> str:
    """A name in the Unicode form in which an accent is part of its letter; some file systems take it apart."""
    return unicodedata.normalize("NFC", name)


def shown(name: str) -> str:
    """A name that can be printed, whatever its bytes."""
    return name.encode("utf-8", "backslashreplace").decode("utf-8")


def some(names: Sequence[str]) -> str:
    """The first few of many names."""
    more = f" and {len(names) - FEW} more" if len(names) > FEW else ""
    return shown(", ".join(names[:FEW])) + more


def spelled(name: str, exact: bool = False) -> str:
    """What is compared of a name: case, Unicode form, spaces, underscores and hyphens make no difference."""
    return re.sub(r"[\s_-]+", "_" if exact else "", composed(composed(name).casefold()))
