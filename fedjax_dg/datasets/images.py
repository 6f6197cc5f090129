"""Image files as an array that is decoded when it is indexed."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

#: What torchvision's ImageFolder takes for an image, by the end of its name in lower case.
EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")

#: A filter of ``warnings``: nothing that Pillow's modules warn of is shown, nor turned into an error.
_QUIET = ("ignore", None, Warning, re.compile(r"PIL\b"), 0)


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

    def subset(self, rows: NDArray[np.integer]) -> Images:
        return Images(self.root, tuple(self.files[row] for row in rows), self.size)

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

    As ``Resize((size, size))`` of torchvision on what its ImageFolder reads, but for what ``to_rgb`` names. A rotation
    noted in the file (EXIF) is not applied, and of several frames the first is read, as there. Raises
    ``UnreadableImage`` also for more pixels than twice ``PIL.Image.MAX_IMAGE_PIXELS``, the limit Pillow sets.
    """
    try:
        with quietly(), Image.open(path) as image:
            return np.asarray(to_rgb(image).resize((size, size), Image.Resampling.BILINEAR))
    # Pillow's readers raise some ten types of error on a damaged file, none of which would tell a user more.
    except Exception as error:
        why = "it is none" if isinstance(error, UnidentifiedImageError) else getattr(error, "strerror", None)
        why = why or f"{error}" or type(error).__name__
        raise UnreadableImage(f"{path} cannot be read as an image ({why}): replace it or remove it.") from None


def to_rgb(image: Image.Image) -> Image.Image:
    """RGB of any mode of 8 or 16 bits; transparency is dropped, CMYK taken without a profile, as torchvision does.

    Greyscale of 16 bits is scaled by 255 / 65535, where torchvision clips all above 255 to white. Raises ``ValueError``
    for integers of 32 bits and floats, whose white is not known.
    """
    image.load()
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format == "PPM"):  # PPM's are scaled to 16 bits
        return Image.fromarray(((np.asarray(image).astype(np.uint32) + 128) // 257).astype(np.uint8)).convert("RGB")
    if image.mode in ("I", "F"):
        raise ValueError(f"pixels of 32 bits, mode {image.mode}, whose white is not known; save it with 8 or 16 bits")
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


@contextmanager
def quietly() -> Iterator[None]:
    """Pillow warns of broken EXIF data and large images: not shown inside.

    Not ``warnings.catch_warnings``, which puts back the filters that it found: threads would undo each other's.
    """
    filters: Any = warnings.filters
    filters.insert(0, _QUIET)
    try:
        yield
    finally:
        filters.remove(_QUIET)
