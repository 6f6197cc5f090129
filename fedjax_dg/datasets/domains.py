"""The records that every data set is handed over in. Host memory only: nothing here or beside it imports JAX."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np


class Domains(NamedTuple):
    """A labelled data set over several domains, before it is given to clients.

    `M` counts the examples of all domains together. Rows may be in any order; `domain` says where each belongs.

    Attributes:
      name: name of the data set, as in `fedjax_dg.datasets.DATASETS`.
      inputs: [M, ...], images are uint8 [M, height, width, channels], texts int32 [M, length], ids of tokens and then -1
        where there is none; in memory, memory-mapped, or `Images` or `Records`, which are read from their files when
        they are indexed.
      labels: int32 [M], index into `class_names`.
      domain: int32 [M], index into `domain_names`.
      identity: int32 [M], the item that an example shows, in one style or another (once in each of several domains,
        always with the same label), or is a part of (sentences of one review, within a domain): a split keeps items
        whole. None where every example is an item of its own.
      validation: bool [M], True for the data set's own validation split. None where it has none, so that one must
        be drawn.
      domain_names: names of the domains, in the order of their ids.
      class_names: names of the classes, in the order of their labels.
      files: where each example was read from, a path below the data set's folder; None where examples are no files.
      notice: what a user should know about how the files were read, in a sentence or two; None for nothing.
      vocab_size: of texts, how many tokens there are; ids are below it. None where inputs are no tokens.
    """

    name: str
    inputs: Any
    labels: np.ndarray
    domain: np.ndarray
    identity: np.ndarray | None
    validation: np.ndarray | None
    domain_names: tuple[str, ...]
    class_names: tuple[str, ...]
    files: tuple[str, ...] | None = None
    notice: str | None = None
    vocab_size: int | None = None


def few(domain: np.ndarray, most: int) -> np.ndarray:
    """Rows, in order, of at most ``most`` examples of every domain [M], drawn by NumPy's generator of seed 0."""
    generator, kept = np.random.default_rng(0), []
    for index in range(domain.max() + 1):
        here = np.flatnonzero(domain == index)
        kept.append(here if len(here) <= most else generator.choice(here, most, replace=False))
    return np.sort(np.concatenate(kept))


def thinned(domains: Domains, most: int) -> Domains:
    """The same data set with ``few`` examples."""
    rows = few(domains.domain, most)
    of = lambda values: None if values is None else values[rows]
    told = f"Drawn: at most {most:,} examples of every domain, {len(rows):,} of {len(domains.labels):,}."
    return domains._replace(
        inputs=domains.inputs.subset(rows) if hasattr(domains.inputs, "subset") else domains.inputs[rows],
        labels=domains.labels[rows],
        domain=domains.domain[rows],
        identity=of(domains.identity),
        validation=of(domains.validation),
        files=None if domains.files is None else tuple(domains.files[row] for row in rows),
        notice=told if domains.notice is None else f"{domains.notice} {told}",
    )


class Summary(NamedTuple):
    """What there is to know about a data set without reading it.

    Attributes:
      domain_names: names of the domains, in the order of their ids.
      class_names: names of the classes, in the order of their labels.
      num_examples: examples of all domains together.
      licence: the terms the examples may be used under, in one line.
      own: of a user's own examples, what they are and how they are stored; None for a data set.
    """

    domain_names: tuple[str, ...]
    class_names: tuple[str, ...]
    num_examples: int
    licence: str
    own: str | None = None
