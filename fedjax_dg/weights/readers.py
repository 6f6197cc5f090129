"""Readers of PyTorch state dicts that need no PyTorch and run nothing that a file asks for."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import re
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import jax.numpy as jnp  # also gives NumPy the name bfloat16, by which safetensors asks for it
import numpy as np
import safetensors
import safetensors.numpy

LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
#: torchvision's file names end in the first eight digits of the content's SHA-256.
HASHED_NAME = re.compile(r"-([0-9a-f]{8})\.(pth|pt|safetensors)$")
#: Files of weights in a folder of the model hub, the better first.
HUB_FILES = ("model.safetensors", "pytorch_model.bin")
#: Checkpoints of training scripts hold the state dict under one of these names.
WRAPPERS = ("state_dict", "model")
#: Under which ``save`` puts what it is told of a model into a ``.safetensors`` file, as JSON.
METADATA = "fedjax_dg"
STORAGES = {
    "FloatStorage": np.float32,
    "DoubleStorage": np.float64,
    "HalfStorage": np.float16,
    "BFloat16Storage": jnp.bfloat16,
    "LongStorage": np.int64,
    "IntStorage": np.int32,
    "ShortStorage": np.int16,
    "CharStorage": np.int8,
    "ByteStorage": np.uint8,
    "BoolStorage": np.bool_,
}


def read(path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """Reads a state dict: PyTorch's names and layouts, floats as float32; a pickle's tied tensors share memory.

    Of a folder, the first of ``HUB_FILES`` in it.

    Kinds, told apart by content and not by suffix: ``.safetensors``; ``torch.save`` (``.pth``, ``.pt``, ``.bin``) as a zip
    and as it was before PyTorch 1.6, pickles in a row; ``.npz``. A checkpoint's ``state_dict`` or ``model`` is unwrapped,
    and a ``module.`` before every name (``DataParallel``) is dropped. Pickles may ask for tensors, dicts and plain values;
    anything else is refused, never imported. Where a file's name ends in ``-<8 hex digits>`` as torchvision's do, its
    SHA-256 must begin with them.

    Raises ``ValueError`` for a file that is missing, damaged, of another kind, or refused.
    """
    path = Path(path)
    try:
        path = _file_of(path)
        with path.open("rb") as file:
            promised = HASHED_NAME.search(path.name)
            found = hashlib.file_digest(file, "sha256").hexdigest() if promised else ""
            if promised and not found.startswith(promised[1]):
                raise ValueError(f"its SHA-256 begins with {found[:8]}, not as its name says: damaged or another file")
            file.seek(0)
            return _state_dict(_content(file))
    # A damaged file fails in pickle, zipfile, zlib or NumPy, with some ten types of error; an answer is one sentence.
    except Exception as error:
        words = f"{type(error).__name__}: {error}"
        reason = error if isinstance(error, ValueError) else getattr(error, "strerror", None) or words
        raise ValueError(
            f"Weights file {path} cannot be read ({reason}); give a PyTorch state dict as .pth, .pt, .bin, .safetensors "
            "or .npz, downloaded or saved anew."
        ) from None


def metadata(path: str | os.PathLike[str]) -> dict[str, Any]:
    """What ``save`` wrote beside the arrays of a ``.safetensors`` file; empty for all that it did not write."""
    try:
        with safetensors.safe_open(path, framework="numpy") as file:
            told = file.metadata() or {}
        return json.loads(told.get(METADATA, "{}"))
    except (OSError, ValueError, safetensors.SafetensorError):
        return {}


def _file_of(path: Path) -> Path:
    """The file itself, or the one of weights in a folder."""
    if not path.is_dir():
        return path
    for name in HUB_FILES:
        if (path / name).exists():
            return path / name
    raise ValueError(
        f"it is a folder without {' and '.join(HUB_FILES)}, of which it needs one, whole and not in shards"
    )


def _content(file: BinaryIO) -> Any:
    """What the file holds, by the reader of its kind."""
    start = file.read(16)
    file.seek(0)
    if start.startswith(b"PK"):
        return _read_zip(file)
    if start[8:9] == b"{":  # after the header's length
        return safetensors.numpy.load_file(file.name)
    if start.startswith(b"\x80"):
        return _read_legacy(file)
    raise ValueError(f"it begins with {start!r}, like none of the kinds")


def _state_dict(found: Any) -> dict[str, np.ndarray]:
    """The named arrays within what a file held."""
    for name in 2 * WRAPPERS:  # either may be inside the other
        if isinstance(found, dict) and isinstance(found.get(name), dict):
            found = found[name]
    if not isinstance(found, dict):
        raise ValueError(f"it holds a {type(found).__name__}, not named tensors")
    for name, value in found.items():
        if not (isinstance(name, str) and isinstance(value, np.ndarray)):
            raise ValueError(f"its entry {name!r:.80} is a {type(value).__name__}, not a named tensor")
    prefix = "module." if all(name.startswith("module.") for name in found) else ""
    return {name.removeprefix(prefix): _float32(value) for name, value in found.items()}


def _float32(array: np.ndarray) -> np.ndarray:
    return array.astype(np.float32, copy=False) if jnp.issubdtype(array.dtype, jnp.floating) else array


def _decode(data: bytes, storage: str, byteorder: str = "little") -> np.ndarray:
    array = np.frombuffer(data, STORAGES[storage])
    return _float32(array if byteorder == sys.byteorder else array.byteswap())


class _Unpickler(pickle.Unpickler):
    """Unpickles tensors; ``storage_of(kind, key, size) -> array`` [size] finds their values."""

    def __init__(self, file, storage_of: Callable[[str, str, int], np.ndarray]):
        super().__init__(file, encoding="utf-8")  # of strings that Python 2 wrote
        self._storage_of = storage_of

    def find_class(self, module: str, name: str) -> Any:
        """Stand-ins, made anew each time: a pickle may set attributes of what it is given."""
        match module, name:
            case "collections", "OrderedDict":
                return OrderedDict
            case "torch", _ if name in STORAGES:
                return name
            case "torch._utils", "_rebuild_tensor" | "_rebuild_tensor_v2":
                return lambda storage, offset, shape, strides, *_: _view(storage, offset, shape, strides)
            case "torch._utils", "_rebuild_parameter":
                return lambda data, *_: data
        raise ValueError(f"it asks for {module}.{name}, which no tensor needs and which was not run")

    def persistent_load(self, pid: Any) -> np.ndarray:
        kind, storage, key, _, size, *view = pid
        if kind != "storage":
            raise ValueError(f"it asks for a stored {kind!r:.80}, not a storage")
        array = self._storage_of(storage, key, size)
        if view and view[0]:  # before PyTorch 0.4, part of another storage
            _, start, length = view[0]
            return _view(array, start, (length,), (1,))
        return array


def _view(storage: np.ndarray, offset: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> np.ndarray:
    """A tensor's view of its storage; NumPy raises where it would reach outside."""
    width = storage.itemsize
    return np.ndarray(shape, storage.dtype, storage, offset * width, tuple(s * width for s in strides))


def _read_zip(file: BinaryIO) -> Any:
    """``*/data.pkl`` and its storages ``*/data/<key>`` (PyTorch since 1.6), or the arrays of an ``.npz``."""
    with zipfile.ZipFile(file) as archive:
        names = archive.namelist()
        root = next((name[: -len("data.pkl")] for name in names if re.fullmatch("[^/]+/data.pkl", name)), None)
        if root is None:
            file.seek(0)
            with np.load(file, allow_pickle=False) as arrays:
                return dict(arrays)
        byteorder = archive.read(f"{root}byteorder").decode() if f"{root}byteorder" in names else "little"
        storages: dict[str, np.ndarray] = {}

        def storage_of(storage, key, size):
            if key not in storages:
                storages[key] = _decode(archive.read(f"{root}data/{key}"), storage, byteorder)
            if len(storages[key]) != size:
                raise ValueError(f"its storage {key} holds {len(storages[key])} values, not {size}")
            return storages[key]

        with archive.open(f"{root}data.pkl") as pickled:
            return _Unpickler(pickled, storage_of).load()


def _read_legacy(file: BinaryIO) -> Any:
    """Pickles in a row: magic, version, system, object, storage keys; then each storage's size (int64) and values.

    The storages come last, so tensors are views of memory that is filled afterwards; all of it little-endian, whatever
    the system says.
    """
    storages: dict[str, tuple[str, np.ndarray]] = {}
    bytes_left = os.fstat(file.fileno()).st_size

    def storage_of(storage, key, size):
        nonlocal bytes_left
        if key not in storages:
            bytes_left -= size * np.dtype(STORAGES[storage]).itemsize
            if bytes_left < 0:
                raise ValueError("its storages are larger than the file: damaged")
            storages[key] = storage, np.empty(size, _decode(b"", storage).dtype)
        return storages[key][1]

    def take(count):
        data = file.read(count)
        if len(data) < count:
            raise ValueError("it ends too early: damaged")
        return data

    def load():
        return _Unpickler(file, storage_of).load()

    if load() != LEGACY_MAGIC:
        raise ValueError("it is a pickle, but none of PyTorch's")
    _version, _system, found, keys = load(), load(), load(), load()
    if set(keys) != set(storages):
        raise ValueError("its storages are not those that its tensors name: damaged")
    for key in keys:
        storage, values = storages[key]
        if int.from_bytes(take(8), "little", signed=True) != len(values):
            raise ValueError(f"its storage {key} is of another size than its tensors say: damaged")
        values[:] = _decode(take(len(values) * np.dtype(STORAGES[storage]).itemsize), storage)
    return found
