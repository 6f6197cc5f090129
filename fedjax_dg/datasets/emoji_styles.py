"""Emoji styles: the same 1,021 icons in four art styles (domains), six classes, 32x32 RGB. Ships with the library.

Source: npm packages `@iconify-json/` noto 1.2.9, twemoji 1.2.5, fluent-emoji-flat 1.2.6 and
fluent-emoji-high-contrast 1.2.6, rasterised by `experiments/build_emoji_styles.py`.
Licence: Apache-2.0 (noto), CC-BY-4.0 (twemoji), MIT (both fluent); see `_data/NOTICE`.
"""

import hashlib
import io
import os
import shlex
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fedjax_dg.datasets.domains import Domains, Summary

NUM_ICONS = 1021

SUMMARY = Summary(
    domain_names=("noto", "twemoji", "fluent_flat", "fluent_mono"),
    class_names=(
        "Activities",
        "Animals & Nature",
        "Food & Drink",
        "Objects",
        "Smileys & Emotion",
        "Travel & Places",
    ),
    num_examples=4 * NUM_ICONS,
    licence="Apache-2.0 (noto), CC-BY-4.0 (twemoji), MIT (fluent_flat, fluent_mono)",
)


class _Array(NamedTuple):
    dtype: str
    shape: tuple[int, ...]
    sha256: str


# The arrays are checked and not the file, whose compressed bytes may differ with another zlib.
_ARRAYS = {
    "images": _Array(
        "uint8", (4, NUM_ICONS, 32, 32, 3), "08957f4c4763969416876154057dd7b9c2f70d34057cfe1483ce372515413c61"
    ),
    "labels": _Array("int32", (NUM_ICONS,), "63fb1e860441ea5b50d8a6e7881c9f6b5427588ae60df0a36cb668007a439dd7"),
    "split": _Array("uint8", (NUM_ICONS,), "889ae7a8f2cb48472b7dca68f6aa90b4b498631f5210d6854ce2af1c5adc3ba5"),
}


def load(path: str | os.PathLike[str] | None = None) -> Domains:
    """Loads the 4 * 1,021 = 4,084 images, all of the first domain before all of the second, and so on.

    Shapes: inputs uint8 [4084, 32, 32, 3], RGB on white; every other array [4084]. `identity` is the icon's index
    0..1020, which has one label and one side of the validation split in all four domains: 816 icons to train on
    and 205 to validate on.

    Args:
      path: the archive to read; by default the one inside the installed package.

    Raises:
      ValueError: the archive is missing, damaged or another one.
    """
    source = resources.files("fedjax_dg.datasets") / "_data" / "emoji_styles.npz" if path is None else Path(path)
    arrays = _read(source)
    num_domains = len(SUMMARY.domain_names)
    return Domains(
        name="emoji_styles",
        inputs=arrays["images"].reshape(-1, 32, 32, 3),
        labels=np.tile(arrays["labels"], num_domains),
        domain=np.repeat(np.arange(num_domains, dtype=np.int32), NUM_ICONS),
        identity=np.tile(np.arange(NUM_ICONS, dtype=np.int32), num_domains),
        validation=np.tile(arrays["split"] == 1, num_domains),
        domain_names=SUMMARY.domain_names,
        class_names=SUMMARY.class_names,
    )


def _read(source: Path | Traversable) -> dict[str, np.ndarray]:
    """Reads the arrays of `_ARRAYS` and checks type, shape and checksum of each."""
    try:
        content = source.read_bytes()
    except FileNotFoundError:
        raise _bad_file(source, "is missing") from None
    except OSError as error:
        raise _bad_file(source, f"cannot be opened ({type(error).__name__})") from None
    try:
        with np.load(io.BytesIO(content), allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in _ARRAYS}
    # A damaged archive fails in zipfile, zlib, struct or NumPy, with some ten types of error, none of which would
    # tell the reader more than that.
    except Exception as error:
        found = f"holds {len(content):,} bytes that cannot be read as its arrays ({type(error).__name__})"
        raise _bad_file(source, found) from None
    for name, expected in _ARRAYS.items():
        array = arrays[name]
        found = _Array(str(array.dtype), array.shape, hashlib.sha256(array.tobytes()).hexdigest())
        if found != expected:
            raise _bad_file(source, f"has {_in_words(name, found)}", _in_words(name, expected))
    return arrays


def _in_words(name: str, array: _Array) -> str:
    return f"{name} {array.dtype} {list(array.shape)} with SHA-256 {array.sha256[:16]}..."


def _bad_file(
    source: Path | Traversable, found: str, expected: str = "the emoji_styles archive of fedjax_dg"
) -> ValueError:
    return ValueError(
        f"Data file {source} {found}, expected {expected}; reinstall it with "
        "`python -m pip install --force-reinstall fedjax_dg` or, in a checkout, rebuild it with "
        f"`python experiments/build_emoji_styles.py --out {shlex.quote(str(source))}`."
    )
