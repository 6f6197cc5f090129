"""Published weights into a backbone's variables, and a file of our own for any backbone."""

from __future__ import annotations

import json
import math
import os
import warnings
from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy
from jaxtyping import Array

from fedjax_dg.alignment.groups import from_leaves, leaves_of
from fedjax_dg.backbones.backbone import Backbone
from fedjax_dg.types import Key, Variables
from fedjax_dg.weights.readers import METADATA, metadata, read

#: What PyTorch calls a leaf, where it has another name; old files of encoders have TensorFlow's gamma and beta.
PYTORCH = {
    "kernel": ("weight",),
    "scale": ("weight", "gamma"),
    "bias": ("bias", "beta"),
    "embedding": ("weight",),
    "mean": ("running_mean",),
    "var": ("running_var",),
}
MOST_SHOWN = 3


def load(backbone: Backbone, path: str | os.PathLike[str], key: Key | None = None) -> Variables:
    """A backbone's variables from a file of weights: PyTorch's, or a folder of the model hub with one (see ``read``), or
    one that ``save`` wrote.

    PyTorch's names come from ``backbone.weight_names``. Kernels of convolutions go from [out, in, h, w] to [h, w, in, out],
    those of dense layers from [out, in] to [in, out]; behind a flatten of P positions, which ``backbone.groups`` tells,
    PyTorch's inputs run (channel, position) and ours (position, channel). A dense kernel may also be stored as a
    convolution [out, channels, h, w] over all positions (timm's VGG). ``num_batches_tracked`` is ignored, and names that
    begin as one of ``backbone.ignored_weights``. What the file lacks starts as ``backbone.starts`` says.

    Only the head may have another number of classes, or be absent, together with what else is ``backbone.drawn``: it is
    then drawn with ``key``, by default ``jax.random.key(0)``, and a ``UserWarning`` says so.

    Raises ``ValueError`` for a file that ``read`` refuses, for PyTorch's names and a backbone without ``weight_names``, and
    for weights that are missing, left over or of another shape.
    """
    leaves, notice = find_leaves(backbone, path)
    if notice is not None:
        warnings.warn(notice, stacklevel=2)
        features = jnp.zeros((1, backbone.num_features))
        method = "top" if hasattr(backbone.module, "top") else "classify"
        drawn = backbone.module.init(jax.random.key(0) if key is None else key, features, method=method)
        leaves = leaves_of(Variables(drawn["params"], {})) | leaves
    return from_leaves(leaves)


def find_leaves(backbone: Backbone, path: str | os.PathLike[str]) -> tuple[dict[str, Array], str | None]:
    """The leaves that ``load`` takes from a file, and where the head is not among them, a sentence that says why.

    Then other layers of ``backbone.drawn`` may lack too. What a method added to the model of a file that ``save`` wrote
    (``added`` in its metadata) is left out where ``backbone`` does not have it.
    """
    state = read(path)
    shapes = {leaf: x.shape for leaf, x in leaves_of(jax.eval_shape(backbone.init, jax.random.key(0))).items()}
    own = any(name.startswith("params/") for name in state)
    for leaf in metadata(path).get("added", ()):
        if leaf not in shapes:
            state.pop(leaf, None)
    if not (own or backbone.weight_names):
        raise ValueError(
            f"Weights file {path} has PyTorch's names, but this backbone has no weight_names, because no weights for it "
            "were published; give a file that fedjax_dg.weights.save wrote."
        )
    positions = {axis.leaf: axis.positions for group in backbone.groups for axis in group.consumers}
    names = {leaf: leaf if own else _pytorch_name(leaf, backbone.weight_names, state) for leaf in shapes}
    found = {}
    for leaf, name in names.items():
        if name in state:
            array = state.pop(name)  # so that a model is not held twice
            found[leaf] = array if own else _our_layout(array, leaf, shapes[leaf], positions.get(leaf, 1))
    found = backbone.complete(found)
    ignored = () if own else backbone.ignored_weights

    layer_of = lambda leaf: leaf.split("/")[1]
    head = {leaf: x.shape for leaf, x in found.items() if layer_of(leaf) == "head"}
    others = [shape for leaf, shape in head.items() if shape != shapes[leaf]]
    same_features = all(shape and shape[:-1] == shapes[leaf][:-1] for leaf, shape in head.items())
    redraw = same_features and (others or not head)
    given = {layer_of(leaf) for leaf in found} - {"head"}
    fresh = set(backbone.drawn) - given if redraw else set()
    expected = {leaf: shape for leaf, shape in shapes.items() if layer_of(leaf) not in fresh}
    _check(
        path,
        missing=[names[leaf] for leaf in expected if leaf not in found],
        left_over=[
            name for name in state if not name.endswith(".num_batches_tracked") and not name.startswith(ignored)
        ],
        other_shape=[
            f"{leaf} {list(found[leaf].shape)} instead of {list(shape)}"
            for leaf, shape in expected.items()
            if leaf in found and found[leaf].shape != shape
        ],
    )
    leaves = {leaf: jnp.asarray(found.pop(leaf), jnp.float32) for leaf in expected}
    if not redraw:
        return leaves, None
    has = f"tells {others[0][-1]} classes apart" if others else "has no head"
    more = "".join(f", with {layer} before it," for layer in backbone.drawn if layer in fresh - {"head"})
    return leaves, f"Weights file {path} {has}, so the head for {backbone.num_classes} classes{more} is freshly drawn."


def save(variables: Variables, path: str | os.PathLike[str], told: Mapping[str, Any] | None = None) -> None:
    """Writes a model as ``.safetensors`` or ``.npz``, float32, one array a leaf (``params/conv1/kernel``), which ``load``
    reads.

    ``told`` goes into the metadata of a ``.safetensors`` file (``metadata`` reads it), as JSON. The file is replaced whole:
    a reader, or a run killed half way, sees the old one or the new one. Its folder must exist.
    """
    path = Path(path)
    arrays: dict[str, Any] = {leaf: np.asarray(x, np.float32) for leaf, x in leaves_of(variables).items()}
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        if path.suffix == ".safetensors":
            words = {METADATA: json.dumps(dict(told or {})), "format": "np"}
            safetensors.numpy.save_file({k: np.ascontiguousarray(x) for k, x in arrays.items()}, temporary, words)
        else:
            with temporary.open("wb") as file:
                np.savez(file, **arrays)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _pytorch_name(leaf: str, weight_names: Mapping[str, tuple[str, ...]], state: Container[str]) -> str:
    """Under which of its names the file holds a leaf; the first of them where it holds none."""
    _, *layer, kind = leaf.split("/")
    kinds = PYTORCH.get(kind, (kind,))
    names = [f"{name}.{theirs}" for name in weight_names.get("/".join(layer), ()) for theirs in kinds]
    return next((name for name in names if name in state), names[0] if names else leaf)


def _our_layout(array: np.ndarray, leaf: str, shape: tuple[int, ...], positions: int) -> np.ndarray:
    """PyTorch's array in our layout, a view where no flatten is undone; of a wrong shape where it had one."""
    if not leaf.endswith("/kernel"):
        return array
    if len(shape) == array.ndim == 4:
        return array.transpose(2, 3, 1, 0)
    num_inputs = math.prod(array.shape[1:])
    if len(shape) == 2 and array.ndim in (2, 4) and num_inputs % positions == 0:
        blocks = array.reshape(len(array), num_inputs // positions, positions)
        return blocks.swapaxes(1, 2).reshape(len(array), num_inputs).T
    return array


def _check(path: str | os.PathLike[str], **problems: list[str]) -> None:
    """Raises where weights and backbone do not fit, naming the first few of each problem."""
    words = [
        f"{problem.replace('_', ' ')}: {', '.join(names[:MOST_SHOWN])}"
        + (f" and {len(names) - MOST_SHOWN} more" if len(names) > MOST_SHOWN else "")
        for problem, names in problems.items()
        if names
    ]
    if words:
        raise ValueError(
            f"Weights file {path} does not fit this backbone ({'; '.join(words)}); give the file of the same architecture "
            "or choose the file's."
        )
