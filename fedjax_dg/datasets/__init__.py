"""Data sets as host arrays: `load("emoji_styles")` gives `Domains`, which `federate()` hands to clients."""

import inspect
from collections.abc import Callable
from typing import Any

from fedjax_dg.datasets import benchmarks, digits, emoji_styles, texts
from fedjax_dg.datasets.domains import Domains, Summary
from fedjax_dg.errors import unknown

__all__ = ["DATASETS", "SUMMARIES", "Domains", "Summary", "describe", "load"]

DATASETS: dict[str, Callable[..., Domains]] = {
    "emoji_styles": emoji_styles.load,
    **benchmarks.LOADERS,
    **digits.LOADERS,
    **texts.LOADERS,
}
SUMMARIES: dict[str, Summary] = {
    "emoji_styles": emoji_styles.SUMMARY,
    **benchmarks.SUMMARIES,
    **digits.SUMMARIES,
    **texts.SUMMARIES,
}
#: Names of classes that `describe` gives.
MOST_CLASSES = 10


def load(name: str, **options: Any) -> Domains:
    """Loads a data set by name.

    Args:
      name: a key of `DATASETS`.
      **options: keyword arguments of that data set's own `load`.

    Raises:
      ValueError: no such data set, no such option, or the files of the data set are missing or damaged.
    """
    if name not in DATASETS:
        raise unknown("data set", name, DATASETS)
    allowed = inspect.signature(DATASETS[name]).parameters
    for option in options:
        if option not in allowed:
            raise unknown(f"option of data set {name}", option, allowed)
    return DATASETS[name](**options)


def describe(name: str) -> str:
    """Says in a few lines what a data set holds, without reading it.

    Raises:
      ValueError: no such data set.
    """
    if name not in SUMMARIES:
        raise unknown("data set", name, SUMMARIES)
    summary = SUMMARIES[name]
    if summary.own is not None:
        return f"{name}: {summary.own}"
    shown = summary.class_names[:MOST_CLASSES]
    more = ", ..." if len(shown) < len(summary.class_names) else ""
    return (
        f"{name}: {summary.num_examples:,} examples\n"
        f"  {len(summary.domain_names)} domains: {', '.join(summary.domain_names)}\n"
        f"  {len(summary.class_names)} classes: {', '.join(shown)}{more}\n"
        f"  licence: {summary.licence}"
    )
