"""Rebuilds the data set `emoji_styles` from the npm packages that its icons come from.

    python -m pip install numpy resvg-py==0.5.0 Pillow
    python experiments/build_emoji_styles.py --out emoji_styles.npz                   # fetches the packages with npm
    python experiments/build_emoji_styles.py --packages DIR --out emoji_styles.npz    # offline

Made with Python 3.11.7, numpy 2.4.6, Pillow 13.0.0, resvg-py 0.5.0, npm 11.19.1: 2 s on one CPU core, and 6.9 MB of
packages to fetch. The checksums of the arrays are compared with the published ones; where one differs nothing is
written and the exit status is 1. Licences of the icons: `fedjax_dg/datasets/_data/NOTICE`.
"""

import argparse
import hashlib
import io
import json
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import resvg_py
from PIL import Image


class Source(NamedTuple):
    domain: str
    package: str
    version: str
    sha256: str

    @property
    def stem(self) -> str:
        """The name that `npm pack` gives the tarball, without its ending."""
        return f"iconify-json-{self.package}-{self.version}"


class Pack(NamedTuple):
    glyphs: dict[str, Any]
    categories: dict[str, list[str]]
    name_of: dict[str, str]


class Icon(NamedTuple):
    label: int
    name: str
    codepoints: str


SOURCES = (
    Source("noto", "noto", "1.2.9", "3e918d88fc945c0bb3d468dbace6f88caef67f01c9f0e7bcae0915a042e8f1ad"),
    Source("twemoji", "twemoji", "1.2.5", "19046dff7d8707ce96212ec86468b36ac5f8e60409629dd13f809265c6d0ebb7"),
    Source(
        "fluent_flat",
        "fluent-emoji-flat",
        "1.2.6",
        "7d064769dee690815f823bc5bcc511d957198caf9f5edd8dd9c1aa48a6aeb175",
    ),
    Source(
        "fluent_mono",
        "fluent-emoji-high-contrast",
        "1.2.6",
        "0b92d48c90d2200bd499e3cdd09a127ca6a8c8ddefd34c35eb5a1e4994012ae0",
    ),
)
CLASS_NAMES = (
    "Activities",
    "Animals & Nature",
    "Food & Drink",
    "Objects",
    "Smileys & Emotion",
    "Travel & Places",
)
SPLIT_NAMES = ("train", "validation")
IMAGES_SHA256 = {
    32: "08957f4c4763969416876154057dd7b9c2f70d34057cfe1483ce372515413c61",
    64: "135c850ad239b8429be9af7b29c57c26d917767525281bf85d6113854848ec29",
}
SHA256 = {
    "labels": "63fb1e860441ea5b50d8a6e7881c9f6b5427588ae60df0a36cb668007a439dd7",
    "split": "889ae7a8f2cb48472b7dca68f6aa90b4b498631f5210d6854ce2af1c5adc3ba5",
    "icon_names": "ca3133161f884be7bc707725a6fd232d670f16daf6066200300b35f2441e78e9",
    "codepoints": "f4362b94b7fd85876d5b5b07ac3f916d042cf4b21b84395b50ec67328479b3e2",
}


def npm_pack(folder: Path) -> None:
    """Fetches the tarballs of all packages into a folder."""
    if shutil.which("npm") is None:
        sys.exit("npm is not installed; install Node.js, or give the packages' folder with --packages.")
    names = [f"@iconify-json/{source.package}@{source.version}" for source in SOURCES]
    try:
        subprocess.run(["npm", "pack", "--silent", "--pack-destination", str(folder), *names], check=True)
    except subprocess.CalledProcessError as error:
        sys.exit(f"npm pack ended with status {error.returncode}; fetch {' '.join(names)} and give --packages.")


def read_pack(folder: Path, source: Source) -> Pack:
    """Reads a package from its tarball, `STEM.tgz`, or where that is not there from an unpacked `STEM/package/`."""
    tarball = folder / f"{source.stem}.tgz"
    unpacked = folder / source.stem / "package"
    if tarball.is_file():
        files = read_tarball(tarball, source.sha256)
    elif unpacked.is_dir():
        files = {path.name: path.read_bytes() for path in unpacked.glob("*.json")}
    else:
        sys.exit(f"Neither {tarball} nor {unpacked} is there; make the first with npm pack.")
    missing = {"package.json", "icons.json", "metadata.json", "chars.json"} - set(files)
    if missing:
        sys.exit(f"{source.stem}: no {', '.join(sorted(missing))} in the package; fetch it again with npm pack.")
    version = json.loads(files["package.json"])["version"]
    if version != source.version:
        sys.exit(f"{source.stem}: found version {version}, expected {source.version}.")
    return Pack(
        glyphs=json.loads(files["icons.json"]),
        categories=json.loads(files["metadata.json"])["categories"],
        name_of=json.loads(files["chars.json"]),
    )


def read_tarball(tarball: Path, sha256: str) -> dict[str, bytes]:
    """Reads the JSON files at the top of an npm tarball, once its checksum is the expected one."""
    content = tarball.read_bytes()
    found = hashlib.sha256(content).hexdigest()
    if found != sha256:
        sys.exit(f"{tarball}: found SHA-256 {found}, expected {sha256}; fetch it again with npm pack.")
    files = {}
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        for member in archive:
            opened = archive.extractfile(member)
            if opened is not None and member.name.endswith(".json"):
                files[Path(member.name).name] = opened.read()
    return files


def select_icons(packs: list[Pack]) -> list[Icon]:
    """Finds the icons that all packs draw and that belong to one of the classes, sorted by label and name.

    Packs are matched by codepoints: six icons have another name in another pack. The first pack gives name and class.
    """
    noto = packs[0]
    label_of = {name: label for label, class_name in enumerate(CLASS_NAMES) for name in noto.categories[class_name]}
    in_all_packs = set.intersection(*(set(pack.name_of) for pack in packs))
    icons = [
        Icon(label_of[noto.name_of[codepoints]], noto.name_of[codepoints], codepoints)
        for codepoints in in_all_packs
        if noto.name_of[codepoints] in label_of
    ]
    return sorted(icons)


def validation_icons(icons: list[Icon]) -> set[str]:
    """Draws a fifth of each class by a hash of the codepoints, which stays the same when other icons come or go."""
    chosen: set[str] = set()
    for label in range(len(CLASS_NAMES)):
        members = [icon.codepoints for icon in icons if icon.label == label]
        members.sort(key=lambda codepoints: hashlib.sha256(f"emoji-styles-0:{codepoints}".encode()).hexdigest())
        chosen.update(members[: round(0.2 * len(members))])
    return chosen


def svg_of(pack: Pack, name: str, size: int) -> str:
    """Writes a glyph as a whole SVG document. Aspect ratio is kept, which matters where the box is not square."""
    glyph = pack.glyphs["icons"][name]
    defaults = {"left": 0, "top": 0, "width": 16, "height": 16}
    box = [glyph.get(key, pack.glyphs.get(key, default)) for key, default in defaults.items()]
    body = glyph["body"].replace("currentColor", "#000000")
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
        f'width="{size}" height="{size}" viewBox="{box[0]} {box[1]} {box[2]} {box[3]}">{body}</svg>'
    )


def draw(svg: str, size: int) -> np.ndarray:
    """Draws an SVG on white: uint8 [size, size, 3]. Drawn at this size, so nothing is resized afterwards."""
    png = bytes(resvg_py.svg_to_bytes(svg_string=svg, width=size, height=size))
    image = Image.open(io.BytesIO(png)).convert("RGBA")
    white = Image.new("RGBA", image.size, (255, 255, 255, 255))
    return np.asarray(Image.alpha_composite(white, image).convert("RGB"))


def build(packs: list[Pack], size: int) -> dict[str, np.ndarray]:
    """Makes the arrays of the archive from the packs, which are in the order of `SOURCES`."""
    icons = select_icons(packs)
    validation = validation_icons(icons)
    glyph_names = [[pack.name_of[icon.codepoints] for icon in icons] for pack in packs]
    images = [
        [draw(svg_of(pack, name, size), size) for name in names] for pack, names in zip(packs, glyph_names, strict=True)
    ]
    return {
        "images": np.array(images, np.uint8),
        "labels": np.array([icon.label for icon in icons], "<i4"),
        "split": np.array([icon.codepoints in validation for icon in icons], np.uint8),
        "icon_names": np.array([icon.name for icon in icons]),
        "glyph_names": np.array(glyph_names),
        "codepoints": np.array([icon.codepoints for icon in icons]),
        "class_names": np.array(CLASS_NAMES),
        "domain_names": np.array([source.domain for source in SOURCES]),
        "split_names": np.array(SPLIT_NAMES),
    }


def checksum(array: np.ndarray) -> str:
    """SHA-256 of the array's bytes, or of its lines where it holds text."""
    content = "\n".join(array).encode() if array.dtype.kind == "U" else array.tobytes()
    return hashlib.sha256(content).hexdigest()


def compare(arrays: dict[str, np.ndarray], size: int) -> bool:
    """Prints the checksums beside the published ones, and says whether none differs."""
    expected = {"images": IMAGES_SHA256.get(size), **SHA256}
    same = True
    for name, published in expected.items():
        found = checksum(arrays[name])
        if published is None:
            verdict = f"none published at {size}x{size}"
        elif found == published:
            verdict = "as published"
        else:
            verdict = f"DIFFERS from {published}"
            same = False
        print(f"{name:<12}{found}  {verdict}")
    return same


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Rebuilds the data set emoji_styles from npm packages.")
    parser.add_argument(
        "--packages",
        type=Path,
        help="folder with the four packages, as .tgz or unpacked each into a folder of its tarball's name; "
        "by default npm fetches them",
    )
    parser.add_argument("--size", type=int, default=32, help="height and width; fedjax_dg itself reads 32 only")
    parser.add_argument("--out", type=Path, required=True, help="the .npz file to write")
    arguments = parser.parse_args()
    if arguments.size < 1:
        parser.error(f"--size {arguments.size}: give at least 1.")
    if not arguments.out.parent.is_dir():
        parser.error(f"--out {arguments.out}: there is no folder {arguments.out.parent}.")
    return arguments


def main() -> None:
    arguments = parse_arguments()
    with tempfile.TemporaryDirectory() as fetched:
        if arguments.packages is None:
            npm_pack(Path(fetched))
        packs = [read_pack(arguments.packages or Path(fetched), source) for source in SOURCES]
    arrays = build(packs, arguments.size)
    if not compare(arrays, arguments.size):
        sys.exit("Nothing was written: compare the versions of the tools with those in the head of this script.")
    with arguments.out.open("wb") as file:
        np.savez_compressed(file, allow_pickle=False, **arrays)
    print(f"{arguments.out}: {arguments.out.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
