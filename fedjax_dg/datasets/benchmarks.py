"""PACS, OfficeHome, TerraIncognita, DomainNet, VLCS, and any folder of images: what they hold and how they are loaded.

Counts are those of the published sets, counted in their lists of files; a comment says where they are not.
"""

from __future__ import annotations

import os
from functools import partial
from importlib import resources

from fedjax_dg.datasets.domains import Domains, Summary
from fedjax_dg.datasets.folders import load_folder, own_layout
from fedjax_dg.datasets.layouts import Layout, Lists, Version
from fedjax_dg.datasets.stored import find_prepared, load_prepared


def _stored_classes(file: str) -> tuple[tuple[str, ...], ...]:
    """Names of classes, one a line, in the order of their labels."""
    text = (resources.files("fedjax_dg.datasets") / "_data" / file).read_text(encoding="utf-8")
    return tuple((name,) for name in text.split())


PACS = Layout(
    name="PACS",
    folders=("PACS", "kfold", "pacs_data", "raw_images", "pacs_v1.0"),
    domains=(("art_painting", "art"), ("cartoon",), ("photo",), ("sketch",)),
    classes=(("dog",), ("elephant",), ("giraffe",), ("guitar",), ("horse",), ("house",), ("person",)),
    versions=(
        Version(
            "as published",
            (2048, 2344, 1670, 3929),
            (
                (379, 255, 285, 184, 201, 295, 449),
                (389, 457, 346, 135, 324, 288, 405),
                (189, 202, 182, 186, 199, 280, 432),
                (772, 740, 753, 608, 816, 80, 160),
            ),
        ),
    ),
    licence="none stated; research use, not to be passed on",
    home="https://dali-dl.github.io/project_iccv2017",
    lists=Lists(
        "{}_train_kfold.txt", "{}_crossval_kfold.txt", "{}_test_kfold.txt", 1, ": remove it, or leave official out"
    ),
)

OFFICE_HOME = Layout(
    name="OfficeHome",
    folders=("office_home", "OfficeHomeDataset_10072016", "OfficeHome"),
    domains=(("Art",), ("Clipart",), ("Product",), ("Real World", "Real")),
    # The authors' order: an ASCII sort, as in DomainBed, has TV before Table and ruler last.
    classes=_stored_classes("officehome_classes.txt"),
    versions=(Version("as published", (2427, 4365, 4439, 4357)),),  # from memory; their sum is what DomainBed prints
    licence="fair use notice of the authors: non-commercial research and education only",
    home="https://hemanthdv.github.io",
)

TERRA_INCOGNITA = Layout(
    name="TerraIncognita",
    folders=("terra_incognita", "TerraIncognita", "Terra"),
    domains=tuple((f"L{number}", f"location_{number}", f"{number}") for number in (100, 38, 43, 46)),
    classes=(
        ("bird",),
        ("bobcat",),
        ("cat",),
        ("coyote",),
        ("dog",),
        ("empty", "landscape"),  # one copy in circulation calls it so; that its images are the same is not known
        ("opossum",),
        ("rabbit",),
        ("raccoon",),
        ("squirrel",),
    ),
    versions=(
        Version(
            "the first download, which DomainBed's tables are of",
            (4879, 9767, 4020, 6122),
            (
                (54, 57, 227, 12, 384, 181, 989, 92, 2552, 331),
                (3, 12, 2295, 48, 360, 194, 4500, 1396, 198, 761),
                (72, 1104, 3, 834, 195, 562, 777, 73, 390, 10),
                (90, 999, 21, 873, 30, 726, 1339, 566, 1464, 14),
            ),
        ),
        Version("the download from its later host", (4741, 9736, 3970, 5883)),  # by location: from memory
    ),
    licence="Community Data License Agreement, permissive (Caltech Camera Traps, LILA)",
    home="https://lila.science/datasets/caltech-camera-traps",
)

DOMAIN_NET = Layout(
    name="DomainNet",
    folders=("domain_net", "DomainNet"),
    domains=tuple((name,) for name in ("clipart", "infograph", "painting", "quickdraw", "real", "sketch")),
    # In the order of the official ids, which is no sort: The_Eiffel_Tower is 308, t-shirt 327.
    classes=_stored_classes("domainnet_classes.txt"),
    versions=(
        Version("the cleaned set", (48129, 51605, 72266, 172500, 172947, 69128)),
        Version("the set before cleaning", (48833, 53201, 75759, 172500, 175327, 70386)),
    ),
    licence="fair use notice of the authors: research only",
    home="http://csr.bu.edu/ftp/visda/2019/multi-source",
    lists=Lists(
        "{}_train.txt",
        "{}_test.txt",
        None,
        0,
        ", which are of the cleaned set: take the cleaned archives (groundtruth/), or leave official out",
    ),
)

VLCS = Layout(
    name="VLCS",
    folders=("VLCS",),
    domains=(
        ("Caltech101", "Caltech", "C"),
        ("LabelMe", "L"),
        ("SUN09", "SUN", "S"),
        ("VOC2007", "VOC", "Pascal", "PascalVOC", "V"),
    ),
    classes=(("bird", "0"), ("car", "1"), ("chair", "2"), ("dog", "3"), ("person", "4")),
    versions=(Version("as published", (1415, 2656, 3282, 3376)),),  # from memory
    licence="none stated; research use, of four sets with terms of their own",
    home="the archive that DomainBed's download script names",
    levels=("train", "crossval", "val", "valid", "validation", "test", "full"),
)

LAYOUTS: dict[str, Layout] = {layout.name: layout for layout in (PACS, OFFICE_HOME, TERRA_INCOGNITA, DOMAIN_NET, VLCS)}

SUMMARIES: dict[str, Summary] = {
    layout.name: Summary(layout.domain_names, layout.class_names, layout.versions[0].total, layout.licence)
    for layout in LAYOUTS.values()
} | {"folder": Summary((), (), 0, "your own", "images of your own, in folders domain/class/image")}


def layout_of(name: str, data_dir: str) -> Layout:
    """The layout of a benchmark, or of the user's own folder for ``folder``. Raises as ``own_layout``."""
    return own_layout(data_dir) if name == "folder" else LAYOUTS[name]


def load(name: str, data_dir: str | None = None, image_size: int | None = None, official: bool = False) -> Domains:
    """A data set of image files, see ``folders.load_folder``, or what ``prepare`` made of it.

    Args:
      name: a key of ``LAYOUTS``, or ``folder``: any tree domain/class/image, its folders in sorted order.
      data_dir: the folder of the data set, or one up to three above it; for ``folder`` the one that holds the
        domains. If it is a prepared data set, or holds one of that name, that is read instead.
      image_size: both sides of the images in pixels; by default 224, or what it was prepared with.
      official: take the data set's own validation split from its lists.

    Raises:
      ValueError: as ``load_folder``, or the prepared set is damaged or of another size.
    """
    path = given(name, data_dir)
    if (prepared := find_prepared(name, path, image_size)) is not None:
        return load_prepared(prepared, official)
    return load_folder(layout_of(name, path), path, 224 if image_size is None else image_size, official)


def given(name: str, data_dir: str | None) -> str:
    """The folder that was given. Raises ``ValueError`` if none was."""
    if data_dir is None:
        raise ValueError(f"{name} is read from your own folder, and none is given: name it with --data-dir (data_dir).")
    return os.fspath(data_dir)


LOADERS = {name: partial(load, name) for name in (*LAYOUTS, "folder")}
