"""What a frozen encoder makes of every text, computed once: a federation then trains the classifier on it."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
from jaxtyping import Float, Int

from fedjax_dg.alignment.groups import leaves_of
from fedjax_dg.backbones.backbone import Backbone
from fedjax_dg.datasets import kept
from fedjax_dg.types import Variables

#: Tokens that one pass reads, and what lengths are rounded up to: one program a length.
PASS_TOKENS, STEP = 8192, 16
#: Of the kept states; those of another one are made again.
SCHEMA = 1


def encode(
    backbone: Backbone,
    variables: Variables,
    inputs: Int[np.ndarray, "M L"],
    report: Callable[[int, int], None] = lambda done, total: None,
) -> Float[np.ndarray, "M d"]:
    """The last layer's state of every text's first token, in evaluation mode: what the classifier reads (``on_encoded``).

    Texts are passed in order of their lengths and cut to one of few lengths, so short ones cost little. ``variables``
    may lack the classifier. ``report(done, total)`` is told of progress, in texts.
    """
    first = jax.jit(lambda variables, ids: backbone.hidden_states(variables, ids)[:, 0])
    lengths = (np.asarray(inputs) >= 0).sum(1)
    order = np.argsort(lengths, kind="stable")
    out = np.empty((len(inputs), backbone.num_features), np.float32)
    done = 0
    while done < len(order):
        # the shortest that is left, rounded up, and as many more as are no longer than that
        length = min(-(-max(int(lengths[order[done]]), 1) // STEP) * STEP, inputs.shape[1])
        size = max(PASS_TOKENS // length, 1)
        rows = order[done : done + size]
        rows = rows[lengths[rows] <= length]
        ids = np.full((size, length), -1, np.int32)  # always whole, so that a length is one program
        ids[: len(rows)] = inputs[rows, :length]
        out[rows] = np.asarray(first(variables, ids))[: len(rows)]
        done += len(rows)
        report(done, len(order))
    return out


def encoded(
    backbone: Backbone,
    variables: Variables,
    inputs: Int[np.ndarray, "M L"],
    cache: str | os.PathLike[str],
    report: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[Float[np.ndarray, "M d"], str | None]:
    """``encode``, kept in the folder ``cache`` under a digest of texts, weights and sizes, and read from there if it is.

    And where it could not be kept, a sentence that says so.
    """
    path = Path(cache) / _digest(backbone, variables, inputs)
    shape = (len(inputs), backbone.num_features)
    if (found := kept.read(path)) is not None and found[0].shape == shape:
        return found[0], None
    made = encode(backbone, variables, inputs, report)
    failed = kept.keep(path, made, {})
    return made, None if failed is None else f"What the encoder made of the texts {failed}"


def _digest(backbone: Backbone, variables: Variables, inputs: np.ndarray) -> str:
    whole = hashlib.sha256(repr((SCHEMA, backbone.module, np.dtype(backbone.dtype), inputs.shape)).encode())
    whole.update(np.ascontiguousarray(inputs).data)
    for leaf, x in sorted(leaves_of(variables).items()):
        if leaf.startswith("params/encoder/"):
            whole.update(leaf.encode())
            whole.update(np.ascontiguousarray(x).data)
    return whole.hexdigest()[:32]
