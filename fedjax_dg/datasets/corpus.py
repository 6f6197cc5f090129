"""Labelled texts over several domains, read and checked by name before anything is tokenised."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from fedjax_dg.datasets.layouts import shown

#: Problems of one file after which no more of it is read.
MOST_PROBLEMS = 20


class Corpus(NamedTuple):
    """The texts of a data set, in the order of their domains.

    Attributes:
      name: as in ``fedjax_dg.datasets.DATASETS``.
      root: the folder or file that they were read from.
      texts: [M].
      labels, domain, identity: int32 [M], as in ``Domains``.
      domain_names, class_names: as in ``Domains``.
      problems: what keeps it from being loaded, one sentence each, without the full stop.
      notes: what a user should know, one sentence each.
    """

    name: str
    root: str
    texts: tuple[str, ...]
    labels: np.ndarray
    domain: np.ndarray
    identity: np.ndarray | None
    domain_names: tuple[str, ...]
    class_names: tuple[str, ...]
    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def counts(self) -> np.ndarray:
        """Texts of each domain and class, [G, K]."""
        shape = len(self.domain_names), len(self.class_names)
        return np.bincount(self.domain * shape[1] + self.labels, minlength=shape[0] * shape[1]).reshape(shape)


class Malformed(ValueError):
    """A file whose rest cannot be read, after which line, and what to do: a sentence without the full stop."""


def sound(corpus: Corpus) -> Corpus:
    """The corpus. Raises ``ValueError`` with the first of its problems."""
    if not corpus.problems:
        return corpus
    others = len(corpus.problems) - 1
    command = f"`fedjax-dg data check {corpus.name} --data-dir {shown(corpus.root)}`"
    more = f"; {others} more problem{'s' * (others > 1)}: see {command}" if others else ""
    raise ValueError(f"{corpus.name} in {shown(corpus.root)}: {corpus.problems[0]}{more}.")


def int32(values) -> np.ndarray:
    """A list of whole numbers as an array, also an empty one."""
    return np.asarray(values, np.int32).reshape(-1)


def decoded(content: bytes, name: str) -> str:
    """UTF-8, with or without a byte order mark. Raises ``Malformed`` for anything else."""
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise Malformed(
            f"{shown(name)} line {line} is not UTF-8 (byte 0x{content[error.start]:02x}): save the file as UTF-8"
        ) from None
