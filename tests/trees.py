"""Trees of tiny images, domain/class/image, for the tests of what reads them."""

import io
from pathlib import Path

import numpy as np
from PIL import Image


def picture(number: int, kind: str = "PNG", size: int = 8) -> bytes:
    """An image file's bytes; every number gives other pixels."""
    pixels = np.random.default_rng(number).integers(0, 256, (size, size, 3), np.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, kind)
    return out.getvalue()


def write(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def grow(root: Path, domains, classes, images: int = 2, name: str = "pic_{:03d}.png") -> Path:
    """``images`` images in every class of every domain, all different."""
    number = 0
    for domain in domains:
        for kind in classes:
            for image in range(1, images + 1):
                write(root / domain / kind / name.format(image), picture(number))
                number += 1
    return root


PACS_DOMAINS = ("art_painting", "cartoon", "photo", "sketch")
PACS_CLASSES = ("dog", "elephant", "giraffe", "guitar", "horse", "house", "person")


def kfold_lists(folder: Path, images: int = 2, first_label: int = 1, change=lambda domain, kind, lines: lines) -> Path:
    """PACS lists of a tree that ``grow`` made: the last image of each class is validated on."""
    folder.mkdir(parents=True, exist_ok=True)
    for domain in PACS_DOMAINS:
        lines = {"train": [], "crossval": [], "test": []}
        for label, kind in enumerate(PACS_CLASSES, first_label):
            for image in range(1, images + 1):
                line = f"{domain}/{kind}/pic_{image:03d}.png {label}"
                lines["crossval" if image == images else "train"].append(line)
                lines["test"].append(line)
        for kind, listed in lines.items():
            (folder / f"{domain}_{kind}_kfold.txt").write_text("\n".join(change(domain, kind, listed)) + "\n")
    return folder
