"""Image files as an array that is decoded when it is indexed."""

from __future__ import annotations

import os
from dataclasses import dataclass

import numpy as np
from PIL import Image

#: What torchvision's ImageFolder takes for an image, by the end of its name in lower case.
EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")


class UnreadableImage(ValueError):
    """A file that is no image, or a damaged one; the message names it."""


@dataclass(frozen=True)
class Images:
    """uint8 RGB [M, size, size, 3] of M files; ``images[rows]`` decodes those rows.

    Files are paths below ``root``. Can be pickled: worker processes decode.
    """

    root: str
    files: tuple[str, ...]
    size: int

    dtype = np.dtype(np.uint8)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return len(self.files), self.size, self.size, 3

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, rows) -> np.ndarray:
        if isinstance(rows, int | np.integer):
            return decode(os.path.join(self.root, self.files[rows]), self.size)
        rows = np.arange(len(self.files))[rows]
        out = np.empty((len(rows), *self.shape[1:]), np.uint8)
        for place, row in enumerate(rows):
            out[place] = decode(os.path.join(self.root, self.files[row]), self.size)
        return out


def decode(path: str, size: int) -> np.ndarray:
    """An image file as uint8 RGB [size, size, 3]: both sides resized, bilinear with antialiasing, aspect not kept.

    As ``Resize((size, size))`` of torchvision on what its ImageFolder reads. Raises ``UnreadableImage``.
    """
    try:
        with Image.open(path) as image:
            return np.asarray(to_rgb(image).resize((size, size), Image.Resampling.BILINEAR))
    except Exception as error:
        raise UnreadableImage(f"{path} cannot be read as an image ({type(error).__name__}): {error}") from None


def to_rgb(image: Image.Image) -> Image.Image:
    """RGB of any mode."""
    return image.convert("RGB")


def resize(inputs: np.ndarray, size: int) -> np.ndarray:
    """uint8 images [M, H, W, C] of an array with both sides ``size``, as ``decode`` resizes. ``ValueError`` for others."""
    if inputs.ndim != 4 or inputs.dtype != np.uint8:
        raise ValueError(f"Inputs of shape {inputs.shape} and type {inputs.dtype} are no images: leave image_size out.")
    if inputs.shape[1:3] == (size, size):
        return inputs
    out = np.empty((len(inputs), size, size, inputs.shape[3]), np.uint8)
    for place, image in enumerate(inputs):
        for channel in range(inputs.shape[3]):
            plane = Image.fromarray(image[:, :, channel])
            out[place, :, :, channel] = np.asarray(plane.resize((size, size), Image.Resampling.BILINEAR))
    return out
