"""Arrays that took long to make, kept on disk with a digest: read again, or found to be damaged and made again."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from fedjax_dg.datasets import stored


def folder(kind: str) -> Path:
    """``fedjax_dg/<kind>`` in ``XDG_CACHE_HOME``, by default ``~/.cache``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fedjax_dg" / kind


def read(path: Path) -> tuple[np.ndarray, dict[str, Any]] | None:
    """The array in ``path.npy``, mapped into memory, and what was kept about it; None where it is not what was written."""
    array_file, about_file = _files(path)
    try:
        about = json.loads(about_file.read_bytes())
        if about.pop("sha256") != stored.digest(about) or about.pop("array") != _sum_of(array_file):
            return None
        return np.load(array_file, mmap_mode="r"), about
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def keep(path: Path, array: np.ndarray, about: dict[str, Any]) -> str | None:
    """Writes an array and what is about it; where that fails, a sentence that says so."""
    array_file, about_file = _files(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _replace(array_file, lambda file: np.save(file, array))
        about = about | {"array": _sum_of(array_file)}
        about["sha256"] = stored.digest(about)
        _replace(about_file, lambda file: file.write(json.dumps(about).encode()))
    except OSError as error:
        return f"could not be kept in {path.parent} ({error.strerror}): the next run makes them again."
    return None


def _files(path: Path) -> tuple[Path, Path]:
    return path.with_name(f"{path.name}.npy"), path.with_name(f"{path.name}.json")


def _sum_of(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _replace(path: Path, write: Callable[[BinaryIO], Any]) -> None:
    """Writes a file whole: others, and a run killed half way, leave the old one or the new one."""
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            write(file)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
