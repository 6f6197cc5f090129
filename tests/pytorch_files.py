"""A writer of PyTorch's files of weights, byte by byte, without PyTorch."""

import io
import pickle
import sys
import types
import zipfile
from collections import OrderedDict
from dataclasses import dataclass
from unittest import mock

import jax.numpy as jnp
import numpy as np
import safetensors.numpy


@dataclass(eq=False)
class Storage:
    kind: str
    values: np.ndarray
    part_of: tuple["Storage", int] | None = None  # files from before PyTorch 0.4 know parts of storages


@dataclass(eq=False)
class Tensor:
    storage: Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    rebuild: str = "_rebuild_tensor_v2"


@dataclass(eq=False)
class Parameter:
    data: Tensor


def stand_in(module, name, **attributes):
    """Something that pickles as ``module.name``."""
    return type(name, (), {"__module__": module, "__qualname__": name, **attributes})


KINDS = ("Float", "Double", "Half", "BFloat16", "Long", "Bool", "ComplexFloat")
TORCH = types.ModuleType("torch")
TORCH_UTILS = types.ModuleType("torch._utils")
for name in KINDS:
    setattr(TORCH, f"{name}Storage", stand_in("torch", f"{name}Storage"))
for name in ("_rebuild_tensor", "_rebuild_tensor_v2", "_rebuild_parameter"):
    setattr(TORCH_UTILS, name, stand_in("torch._utils", name, __new__=lambda cls, *_: None))


class Pickler(pickle.Pickler):
    def __init__(self, file, protocol, legacy=False):
        super().__init__(file, protocol)
        self.legacy, self.storages = legacy, []

    def key(self, storage):
        if storage not in self.storages:
            self.storages.append(storage)
        return str(self.storages.index(storage))

    def persistent_id(self, obj):
        if not isinstance(obj, Storage):
            return None
        kind = getattr(TORCH, f"{obj.kind}Storage")
        if obj.part_of:
            root, start = obj.part_of
            view = (f"view{start}", start, len(obj.values))
            return "storage", kind, self.key(root), "cpu", len(root.values), view
        end = (None,) if self.legacy else ()
        return "storage", kind, self.key(obj), "cuda:0", len(obj.values), *end

    def reducer_override(self, obj):
        if isinstance(obj, Tensor):
            rest = (False, OrderedDict()) if obj.rebuild == "_rebuild_tensor_v2" else ()
            return getattr(TORCH_UTILS, obj.rebuild), (obj.storage, obj.offset, obj.shape, obj.strides, *rest)
        if isinstance(obj, Parameter):
            return TORCH_UTILS._rebuild_parameter, (obj.data, True, OrderedDict())
        return NotImplemented


def pickled(obj, protocol=2, legacy=False):
    """The pickle and the storages it names, in order of their keys 0, 1, ..."""
    file = io.BytesIO()
    pickler = Pickler(file, protocol, legacy)
    with mock.patch.dict(sys.modules, {"torch": TORCH, "torch._utils": TORCH_UTILS}):
        pickler.dump(obj)
    return file.getvalue(), pickler.storages


def zip_of(pickle_bytes, storages=(), byteorder="little"):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("archive/data.pkl", pickle_bytes)
        if byteorder:
            archive.writestr("archive/byteorder", byteorder)
        for key, storage in enumerate(storages):
            swapped = storage.values.byteswap() if byteorder == "big" else storage.values
            archive.writestr(f"archive/data/{key}", swapped.tobytes())
        archive.writestr("archive/version", "3\n")
    return file.getvalue()


def legacy_of(pickle_bytes, storages=(), protocol=2):
    keys = [str(key) for key in reversed(range(len(storages)))]  # any order
    system = {"protocol_version": 1001, "little_endian": False, "type_sizes": {"int": 4}}
    parts = [pickle.dumps(x, protocol) for x in (0x1950A86A20F9469CFC6C, 1001, system)]
    parts += [pickle_bytes, pickle.dumps(keys, protocol)]
    for storage in reversed(storages):
        parts += [len(storage.values).to_bytes(8, "little"), storage.values.tobytes()]
    return b"".join(parts)


def dense(tensor, as_stored=False):
    """What a tensor means: value by value, floats as float32."""
    tensor = tensor.data if isinstance(tensor, Parameter) else tensor
    values = tensor.storage.values
    array = np.empty(tensor.shape, values.dtype)
    for place in np.ndindex(tensor.shape):
        array[place] = values[tensor.offset + sum(i * stride for i, stride in zip(place, tensor.strides))]
    return array.astype(np.float32) if jnp.issubdtype(array.dtype, jnp.floating) and not as_stored else array


def whole(values, kind="Float"):
    """A contiguous tensor with a storage of its own."""
    values = np.asarray(values)
    strides = tuple(s // values.itemsize for s in np.empty(values.shape, values.dtype).strides)
    return Tensor(Storage(kind, values.ravel()), 0, values.shape, strides)


def written(kind, tensors, protocol=2):
    """The bytes of a file of that kind."""
    if kind == "zip":
        return zip_of(*pickled(tensors, protocol))
    if kind == "legacy":
        return legacy_of(*pickled(tensors, protocol, legacy=True), protocol=protocol)
    file = io.BytesIO()
    if kind == "npz":
        np.savez(file, **{name: dense(tensor) for name, tensor in tensors.items()})
        return file.getvalue()
    return safetensors.numpy.save({name: dense(tensor, as_stored=True) for name, tensor in tensors.items()})
