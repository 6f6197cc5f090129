"""Rotated and coloured digits, DomainBed's two protocols: over MNIST's files and the like, or offline over scikit-learn's.

``rotated_*``: six domains, the images turned by 0, 15, ..., 75 degrees. ``colored_*``: three domains, two classes; the
colour tells the class more often than the shape does, and in the third domain it tells the opposite.

All images, train and test joined, are put into one random order, and image i of it goes to domain i mod n: domains share no
image. Pixels are stored as uint8. DomainBed's networks read them divided by 255; ours scale them to [-1, 1], as all images.

Deviations from DomainBed: the order and the noise come from NumPy's generator and a seed of their own, as torch's draws
cannot be repeated without it; so the domains are other halves and sixths of the same images.
Source: Arjovsky et al., 2019, https://arxiv.org/abs/1907.02893 (colours); Ghifary et al., ICCV 2015,
https://arxiv.org/abs/1508.07680 (rotations); Gulrajani, Lopez-Paz, ICLR 2021, https://arxiv.org/abs/2007.01434.
"""

from __future__ import annotations

import os
import string
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from PIL import Image

from fedjax_dg.datasets import idx
from fedjax_dg.datasets.domains import Domains, Summary

ANGLES = (0, 15, 30, 45, 60, 75)
#: How often the colour is not that of the label, and the domain's name: how often it is, over guessing.
COLOUR_NOISE = {"+90%": 0.1, "+80%": 0.2, "-90%": 0.9}
LABEL_NOISE = 0.25

DIGITS = tuple(string.digits)
FASHION = (
    *("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat"),
    *("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
)
MERGED = (*string.digits, *string.ascii_uppercase, *"abdefghnqrt")  # letters whose cases look alike are one class
EMNIST = {
    "emnist-letters": tuple(string.ascii_lowercase),
    "emnist-balanced": MERGED,
    "emnist-bymerge": MERGED,
    "emnist-byclass": (*string.digits, *string.ascii_uppercase, *string.ascii_lowercase),
}

MNIST_LICENCE = "that of your files: CC BY-SA 3.0 (MNIST), MIT (Fashion-MNIST)"
DIGITS_LICENCE = "CC BY 4.0 (UCI optical recognition of handwritten digits), through scikit-learn"
ROTATED, COLORED = tuple(str(angle) for angle in ANGLES), tuple(COLOUR_NOISE)
SUMMARIES = {
    "rotated_mnist": Summary(ROTATED, DIGITS, 70_000, MNIST_LICENCE),
    "colored_mnist": Summary(COLORED, ("5 to 9", "0 to 4"), 70_000, MNIST_LICENCE),
    "rotated_digits": Summary(ROTATED, DIGITS, 1_797, DIGITS_LICENCE),
    "colored_digits": Summary(COLORED, ("5 to 9", "0 to 4"), 1_797, DIGITS_LICENCE),
}


class Pictures(NamedTuple):
    """Grey images before they are given to domains."""

    images: np.ndarray  # uint8 [M, height, width]
    labels: np.ndarray  # int32 [M]
    class_names: tuple[str, ...]
    notice: str


# --- data sets ------------------------------------------------------------------------------------------------------


def rotated_mnist(
    data_dir: str | os.PathLike[str] | None = None, seed: int = 0, image_size: int | None = 28
) -> Domains:
    """RotatedMNIST: uint8 [M, size, size, 1] in six domains ``0``, ``15``, ..., ``75``, by degrees, counter-clockwise.

    Turned by Pillow as torchvision does, bilinear, zeros from outside.

    Args:
      data_dir: folder of the four IDX files of MNIST, Fashion-MNIST or a split of EMNIST, or one that has them in
        ``MNIST/raw`` or the like; of several in one folder, the start of their names (``raw/emnist-digits``).
      seed: of the order in which images go to domains.
      image_size: side of the images, resized by Pillow (bilinear) before they are turned; None as they are.

    Raises:
      ValueError: files are missing, damaged or do not belong together, or no such size.
    """
    return rotated("rotated_mnist", read_mnist(data_dir), seed, image_size)


def colored_mnist(
    data_dir: str | os.PathLike[str] | None = None, seed: int = 0, image_size: int | None = 28
) -> Domains:
    """ColoredMNIST: uint8 [M, size, size, 2] in three domains ``+90%``, ``+80%``, ``-90%``, labels 0 and 1.

    The label is 1 for the first half of the classes (digits below 5), flipped with probability 0.25. The colour is the
    label, flipped with probability 0.1, 0.2, 0.9 by domain; the image is in the channel of that number, the other is 0.
    Arguments and errors as ``rotated_mnist``. The variant is DomainBed's: two channels, full size; IRM's own has 14 x 14
    pixels, and others colour three channels or keep ten classes.
    """
    return colored("colored_mnist", read_mnist(data_dir), seed, image_size)


def rotated_digits(seed: int = 0, image_size: int | None = 28) -> Domains:
    """``rotated_mnist`` of the 1,797 digits that come with scikit-learn: nothing to download, for tests and first tries.

    8 x 8 images with levels 0 to 16, scaled to 0 to 255 and enlarged by Pillow (bilinear) before they are turned.
    Raises ``ValueError`` without scikit-learn.
    """
    return rotated("rotated_digits", read_digits(), seed, image_size)


def colored_digits(seed: int = 0, image_size: int | None = 28) -> Domains:
    """``colored_mnist`` of the digits that come with scikit-learn, as ``rotated_digits`` has them."""
    return colored("colored_digits", read_digits(), seed, image_size)


LOADERS: dict[str, Callable[..., Domains]] = {
    "rotated_mnist": rotated_mnist,
    "colored_mnist": colored_mnist,
    "rotated_digits": rotated_digits,
    "colored_digits": colored_digits,
}

# --- pictures -------------------------------------------------------------------------------------------------------


def read_mnist(data_dir: str | os.PathLike[str] | None) -> Pictures:
    """The images of IDX files, train and test joined. EMNIST's, which are stored transposed, are set upright."""
    if data_dir is None:
        raise ValueError(
            "The MNIST data sets are read from your files: give their folder as --data-dir, in Python data_dir=."
        )
    files = idx.find(data_dir)
    images, labels = idx.read_pairs(files)
    labels = labels.astype(np.int32)
    prefix, upright = files.prefix.lower(), ""
    if prefix.startswith("emnist"):
        images, upright = images.transpose(0, 2, 1), ", set upright"
    if prefix == "emnist-letters":
        labels -= 1  # counts from 1
    names = EMNIST.get(prefix, DIGITS if labels.max() < 10 else tuple(str(i) for i in range(labels.max() + 1)))
    if "fashion" in "/".join((*files.folder.parts[-2:], prefix)).lower():
        names = FASHION
    if labels.min() < 0 or labels.max() >= len(names):
        first = int(prefix == "emnist-letters")
        raise idx.bad(
            files.paths["train", "labels"],
            f"has with its test file labels from {labels.min() + first} to {labels.max() + first}, and {prefix or 'they'} "
            f"should go from {first} to {len(names) - 1 + first}",
        )
    return Pictures(images, labels, names, f"{len(labels):,} images of {files.name}{upright}.")


def read_digits() -> Pictures:
    """scikit-learn's digits, 1,797 of 8 x 8 pixels."""
    try:
        from sklearn.datasets import load_digits  # slow to import, and only needed here
    except ImportError:
        raise ValueError(
            "The digits come with scikit-learn, which is not installed: run `pip install 'fedjax-dg[digits]'`."
        ) from None
    levels, labels = load_digits(return_X_y=True)
    images = np.round(np.reshape(levels, (-1, 8, 8)) * (255 / 16)).astype(np.uint8)
    notice = "The 1,797 digits of scikit-learn, 8 x 8 pixels, enlarged where larger images are asked for."
    return Pictures(images, np.asarray(labels, np.int32), DIGITS, notice)


def resized(images: np.ndarray, size: int | None) -> np.ndarray:
    """Images [M, height, width] as [M, size, size], bilinear with antialiasing; None as they are."""
    if size is None or images.shape[1:] == (size, size):
        return images
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise ValueError(f"image_size={size!r} is no positive whole number: give a side such as 28, or None.")
    resize = lambda image: np.asarray(Image.fromarray(image).resize((size, size), Image.Resampling.BILINEAR))
    return np.stack([resize(image) for image in images])


# --- protocols ------------------------------------------------------------------------------------------------------


def dealt(pictures: Pictures, rng: np.random.Generator, num_domains: int) -> tuple[Pictures, np.ndarray]:
    """The pictures in random order, and their domains: i mod n."""
    order = rng.permutation(len(pictures.labels))
    domain = np.arange(len(order), dtype=np.int32) % num_domains
    return pictures._replace(images=pictures.images[order], labels=pictures.labels[order]), domain


def rotated(name: str, pictures: Pictures, seed: int, image_size: int | None) -> Domains:
    """Six domains of one set of pictures by their angles."""
    pictures, domain = dealt(pictures, np.random.default_rng(seed), len(ANGLES))
    images = resized(pictures.images, image_size)
    turn = lambda image, angle: image.rotate(angle, Image.Resampling.BILINEAR, fillcolor=0)
    turned = [np.asarray(turn(Image.fromarray(image), ANGLES[g])) for image, g in zip(images, domain)]
    inputs = np.stack(turned)[..., None]
    return Domains(
        name, inputs, pictures.labels, domain, None, None, ROTATED, pictures.class_names, notice=pictures.notice
    )


def colored(name: str, pictures: Pictures, seed: int, image_size: int | None) -> Domains:
    """Three domains of one set of pictures by what colour tells of the label; two classes, halves of the pictures'."""
    rng = np.random.default_rng(seed)
    pictures, domain = dealt(pictures, rng, len(COLOUR_NOISE))
    images, names = resized(pictures.images, image_size), pictures.class_names
    flips = rng.random((2, len(domain)))
    labels = (2 * pictures.labels < len(names)) ^ (flips[0] < LABEL_NOISE)
    colour = labels ^ (flips[1] < np.array(list(COLOUR_NOISE.values()))[domain])
    inputs = np.zeros((*images.shape, 2), np.uint8)
    inputs[np.arange(len(images)), :, :, colour.astype(int)] = images
    half = (len(names) + 1) // 2
    class_names = f"{names[half]} to {names[-1]}", f"{names[0]} to {names[half - 1]}"
    return Domains(
        name, inputs, labels.astype(np.int32), domain, None, None, COLORED, class_names, notice=pictures.notice
    )
