"""Deterministic weights and inputs for parity checks, from nothing but a name and a shape.

A parity fixture stores only a model's *outputs*; both sides rebuild the *weights* with this
module, so no checkpoint has to be shipped.  Needs numpy only.
"""

import zlib

import numpy as np


def wave(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """float32 values, uniform in [-1, 1), of the given shape, determined by `name` alone.

    SplitMix64 over the element's index, so the values depend on no library's random stream.
    """
    size = int(np.prod(shape, dtype=np.int64))
    with np.errstate(over="ignore"):
        z = np.arange(1, size + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        z += np.uint64(zlib.crc32(name.encode()))
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z ^= z >> np.uint64(31)
    unit = (z >> np.uint64(40)).astype(np.float64) / 2.0**24
    return (2.0 * unit - 1.0).astype(np.float32).reshape(shape)


def parameter(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Value of the PyTorch state-dict entry `name` (PyTorch's own layout, e.g. OIHW)."""
    leaf = name.rsplit(".", 1)[-1]
    if leaf == "num_batches_tracked":
        return np.zeros(shape, np.int64)
    if leaf == "running_var":
        return 1.0 + 0.5 * np.abs(wave(name, shape))
    if leaf == "running_mean":
        return 0.1 * wave(name, shape)
    if leaf in ("bias", "q_bias", "v_bias"):
        return 0.1 * wave(name, shape)
    if leaf == "weight" and len(shape) == 1:  # a norm layer's scale
        return 1.0 + 0.2 * wave(name, shape)
    fan_in = int(np.prod(shape[1:]))
    if "embeddings" in name:
        return wave(name, shape)
    return wave(name, shape) * np.float32(np.sqrt(6.0 / fan_in))


def image_batch(batch: int = 2, size: int = 224) -> np.ndarray:
    """A float32 NCHW batch of distinct smooth-plus-noise 'images', about zero mean, unit scale."""
    row, col = np.meshgrid(np.linspace(0, 1, size), np.linspace(0, 1, size), indexing="ij")
    frames = [
        [np.sin(6.0 * (b + 1) * row + c) + np.cos(9.0 * (c + 1) * col - b) for c in range(3)] for b in range(batch)
    ]
    return np.asarray(frames, np.float32) + 0.5 * wave("image_batch", (batch, 3, size, size))
