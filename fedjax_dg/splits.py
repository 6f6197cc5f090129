"""Which examples of a data set models are judged on during training, by the conventions of the field."""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
from jaxtyping import Bool, Int

from fedjax_dg.datasets.domains import Domains
from fedjax_dg.errors import unknown

Chosen = Bool[np.ndarray, " M"]


def own(domains: Domains, fraction: float | None, seed: int) -> Chosen:
    """The data set's own: emoji styles' by icon; the published lists where they were read (``load(..., official=True)``)."""
    if domains.validation is None:
        raise ValueError(
            f"split=official is given, but {domains.name} was read without a split of its own: choose another."
        )
    return domains.validation


def at_random(domains: Domains, fraction: float | None, seed: int) -> Chosen:
    """``fraction`` (0.2) of every domain's examples, from ``seed``; where examples belong to items, of its items; where
    these recur in several domains, of all items. Items go with all their examples."""
    fraction = check_fraction(0.2 if fraction is None else fraction)
    identity = np.arange(len(domains.labels)) if domains.identity is None else domains.identity
    chosen = np.zeros(len(domains.labels), bool)
    for domain in [None] if _recur(domains) else np.unique(domains.domain):
        here = np.arange(len(identity)) if domain is None else np.flatnonzero(domains.domain == domain)
        items = np.random.default_rng(seed).permutation(np.unique(identity[here]))
        chosen[here] = np.isin(identity[here], items[: int(fraction * len(items))])
    return chosen


def domainbed(domains: Domains, fraction: float | None, seed: int) -> Chosen:
    """DomainBed's hold-out, item for item: ``fraction`` (0.2) of every domain, drawn by (``seed``, domain), its trial seed.

    Needs the rows of a domain in the order of torchvision's ImageFolder, in which image folders are read, and domains in
    DomainBed's order, which the benchmark data sets have.

    Source: Gulrajani and Lopez-Paz, ICLR 2021, https://arxiv.org/abs/2007.01434, and their released code.
    """
    _refuse_recurring(domains, "domainbed")
    fraction = check_fraction(0.2 if fraction is None else fraction)
    chosen = np.zeros(len(domains.labels), bool)
    for index in range(len(domains.domain_names)):
        here = np.flatnonzero(domains.domain == index)
        chosen[here[domainbed_holdout(len(here), seed, index, fraction)[0]]] = True
    return chosen


def ninety_ten(domains: Domains, fraction: float | None, seed: int) -> Chosen:
    """The last ``fraction`` (0.1) of every domain's list, shuffled by Python's generator with seed 0, whatever ``seed``.

    The recipe of FedDG-GA (Zhang et al., CVPR 2023). Its lists begin in an order that was not published: the proportions
    are theirs, the items need not be.
    """
    _refuse_recurring(domains, "90/10")
    fraction = check_fraction(0.1 if fraction is None else fraction)
    chosen = np.zeros(len(domains.labels), bool)
    for index in range(len(domains.domain_names)):
        here = np.flatnonzero(domains.domain == index).tolist()
        random.Random(0).shuffle(here)
        chosen[here[len(here) - round(fraction * len(here)) :]] = True
    return chosen


#: (domains, fraction or None, seed) -> the validation examples [M].
SPLITS: dict[str, Callable[..., Chosen]] = {
    "official": own,
    "random": at_random,
    "domainbed": domainbed,
    "90/10": ninety_ten,
}


def draw(domains: Domains, split: str | None, fraction: float | None, seed: int) -> Chosen:
    """The validation examples by a split's name; None: the data set's own, else ``random``.

    Raises ``ValueError`` for a split that does not exist or that the data set does not have, or a fraction outside [0, 1).
    """
    if split is None:
        split = "random" if domains.validation is None else "official"
    if split not in SPLITS:
        raise unknown("split", split, SPLITS)
    return SPLITS[split](domains, fraction, seed)


def seed_hash(*parts: Any) -> int:
    """DomainBed's seed of several numbers: the MD5 of them as a printed tuple, below 2**31.

    >>> seed_hash(0, 0)
    894182419
    """
    return int(hashlib.md5(str(parts).encode()).hexdigest(), 16) % 2**31


def domainbed_holdout(
    num: int, trial_seed: int, domain: int, fraction: float = 0.2
) -> tuple[Int[np.ndarray, " h"], Int[np.ndarray, " t"]]:
    """DomainBed's two parts of a domain of ``num`` items, each in its order: held out, and trained on.

    Its generator is NumPy's legacy Mersenne Twister, whose numbers NumPy has frozen.

    >>> domainbed_holdout(20, 0, 0)[0].tolist()
    [7, 6, 10, 17]
    """
    keys = list(range(num))
    np.random.RandomState(seed_hash(trial_seed, domain)).shuffle(keys)
    held = int(num * fraction)
    return np.array(keys[:held], np.int64), np.array(keys[held:], np.int64)


def digest(domains: Domains, validation: Chosen) -> str:
    """SHA-256 of which example is on which side: of files by their names, of others by row, domain, label, and of texts by
    their tokens."""
    whole = hashlib.sha256()
    for row, side in enumerate(validation):
        name = f"{row}/{domains.domain[row]}/{domains.labels[row]}" if domains.files is None else domains.files[row]
        if domains.vocab_size is not None:
            name += f"/{hashlib.sha256(np.ascontiguousarray(domains.inputs[row]).data).hexdigest()}"
        whole.update(f"{name}\t{int(side)}\n".encode("utf-8", "surrogateescape"))
    return whole.hexdigest()


def describe(domains: Domains, validation: Chosen) -> dict[str, Any]:
    """What a run folder keeps of a split: the digest, and examples by domain on either side."""
    sizes = {}
    for index, name in enumerate(domains.domain_names):
        here = validation[domains.domain == index]
        sizes[name] = {"train": int((~here).sum()), "validation": int(here.sum())}
    return {"digest": digest(domains, validation), "domains": sizes}


def check_fraction(fraction: float) -> float:
    """The fraction. ``ValueError`` for one outside [0, 1)."""
    if not (math.isfinite(fraction) and 0 <= fraction < 1):
        raise ValueError(f"validation_fraction={fraction} is not in [0, 1): give a share such as 0.2.")
    return fraction


def _recur(domains: Domains) -> bool:
    """Whether an item has examples in several domains."""
    if domains.identity is None:
        return False
    places = np.unique(np.stack([domains.identity, domains.domain]), axis=1)[0]
    return len(np.unique(places)) < len(places)


def _refuse_recurring(domains: Domains, split: str) -> None:
    if domains.identity is not None and not _recur(domains):
        raise ValueError(
            f"split={split} divides every domain example by example, but in {domains.name} several may be parts of one "
            "item, so a model would be judged on items that it has seen: choose split=random, which keeps them whole."
        )
    if domains.identity is not None:
        raise ValueError(
            f"split={split} divides every domain by itself, but in {domains.name} the same items recur in several domains, "
            "so a model would be judged on what it has seen: choose split=random or official."
        )
