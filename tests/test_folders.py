"""Image folders: where they are found, in which order rows come, which labels they get, and what is refused by name."""

import os
import unicodedata
from importlib import resources
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from trees import PACS_CLASSES, PACS_DOMAINS, grow, kfold_lists, picture, write

from fedjax_dg import datasets
from fedjax_dg.datasets import benchmarks
from fedjax_dg.datasets.benchmarks import DOMAIN_NET, LAYOUTS, OFFICE_HOME, TERRA_INCOGNITA, VLCS
from fedjax_dg.datasets.folders import version_note
from fedjax_dg.datasets.layouts import lookup, spelled
from fedjax_dg.datasets.reading import read_all


def pacs(data_dir, **options):
    return datasets.load("PACS", data_dir=str(data_dir), image_size=8, **options)


def refusal(call, *words) -> str:
    """The message of a ``ValueError``, once it is one sentence with these words and no other traceback."""
    with pytest.raises(ValueError) as caught:
        call()
    message = str(caught.value)
    assert caught.value.__context__ is None or caught.value.__suppress_context__
    assert "\n" not in message and message.endswith(".") and ". " not in message.replace("...", "")
    for word in words:
        assert word in message, message
    return message


@pytest.fixture
def root(tmp_path) -> Path:
    """A small PACS with two images a class."""
    return grow(tmp_path / "PACS", PACS_DOMAINS, PACS_CLASSES)


# --- the published sets -----------------------------------------------------------------------------------------------


def test_published_counts_add_up():
    totals = {"PACS": [9991], "OfficeHome": [15588], "TerraIncognita": [24788, 24330], "VLCS": [10729]}
    totals["DomainNet"] = [586575, 596006]
    for name, layout in LAYOUTS.items():
        assert [version.total for version in layout.versions] == totals[name]
        for version in layout.versions:
            assert len(version.by_domain) == len(layout.domains)
            for by_class, count in zip(version.by_class or (), version.by_domain):
                assert len(by_class) == len(layout.classes) and sum(by_class) == count
        assert {len(layout.class_names)} <= {7, 65, 10, 345, 5}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_no_two_names_of_a_layout_read_alike(layout):
    for table in (layout.domains, layout.classes):
        names = [spelled(name) for names in table for name in names]
        assert len(set(names)) == len(names)


def test_ids_that_no_sort_gives():
    names = DOMAIN_NET.class_names
    assert len(names) == 345 and names[0] == "aircraft_carrier" and names[344] == "zigzag"
    assert names[308:311] == ("The_Eiffel_Tower", "The_Great_Wall_of_China", "The_Mona_Lisa")
    assert names[66:68] == ("cello", "cell_phone") and names[205:207] == ("paintbrush", "paint_can")
    assert names[327] == "t-shirt" and names[303] == "teddy-bear"
    names = OFFICE_HOME.class_names
    assert len(names) == 65 and names[49:51] == ("ruler", "Scissors") and names[62:] == ("Trash_Can", "TV", "Webcam")
    assert names[:2] == ("Alarm_Clock", "Backpack") and names[58] == "Table"
    assert TERRA_INCOGNITA.domain_names == ("L100", "L38", "L43", "L46")
    assert VLCS.class_names == ("bird", "car", "chair", "dog", "person")


def test_class_lists_ship():
    folder = resources.files("fedjax_dg.datasets") / "_data"
    assert (folder / "domainnet_classes.txt").is_file() and (folder / "officehome_classes.txt").is_file()


def test_versions_are_recognised_by_their_counts():
    for layout, version, words in [
        (TERRA_INCOGNITA, 0, "the first download, which DomainBed's tables are of, 24,788 images"),
        (TERRA_INCOGNITA, 1, "the download from its later host, 24,330 images"),
        (DOMAIN_NET, 0, "the cleaned set, 586,575 images"),
        (DOMAIN_NET, 1, "the set before cleaning, 596,006 images"),
    ]:
        counts = np.zeros((len(layout.domains), len(layout.classes)), int)
        counts[:, 1] = layout.versions[version].by_domain
        assert version_note(layout, counts) == (f"{layout.name}: {words}.",)
        counts[0, 0] = 1
        (note,) = version_note(layout, counts)
        assert "images; the published set has" in note and f"{layout.versions[1].total:,}" in note
    counts = np.asarray(benchmarks.PACS.versions[0].by_class)
    assert version_note(benchmarks.PACS, counts) == ()


# --- finding ----------------------------------------------------------------------------------------------------------

PLACES = ["", "PACS", "kfold", "PACS/kfold", "pacs_data", "raw_images", "a/b/c", "pacs_v1.0"]


@pytest.mark.parametrize("place", PLACES)
def test_the_folder_of_the_domains_is_found_below(tmp_path, place):
    root = grow(tmp_path / place, PACS_DOMAINS, PACS_CLASSES, 1)
    (tmp_path / "other" / "folder").mkdir(parents=True)
    write(tmp_path / "__MACOSX" / "PACS" / "photo" / "dog" / "._pic_001.png", b"")
    domains = pacs(tmp_path)
    assert os.path.samefile(domains.inputs.root, root) and len(domains.labels) == 28
    assert domains.domain_names == PACS_DOMAINS and domains.class_names == PACS_CLASSES
    assert domains.name == "PACS" and domains.identity is None and domains.validation is None


def test_other_data_sets_in_the_folder_do_not_disturb(root):
    grow(root.parent / "domain_net", DOMAIN_NET.domain_names, DOMAIN_NET.class_names[:2], 1)
    grow(root.parent / "x" / "office_home", ["Art", "Clipart", "Product", "Real"], ["Bed"], 1)
    assert len(pacs(root.parent).labels) == 56
    home = datasets.load("OfficeHome", data_dir=str(root.parent), image_size=8)
    assert home.files == tuple(f"{domain}/Bed/pic_001.png" for domain in ("Art", "Clipart", "Product", "Real"))
    assert len(datasets.load("DomainNet", data_dir=str(root.parent), image_size=8).labels) == 12


def test_the_shallowest_is_taken_and_two_at_one_depth_are_refused(root):
    deeper = grow(root.parent / "x" / "y", PACS_DOMAINS, PACS_CLASSES, 1)
    assert len(pacs(root.parent).labels) == 56
    grow(root.parent / "PACS copy", PACS_DOMAINS, PACS_CLASSES, 1)
    refusal(lambda: pacs(root.parent), str(root), str(root.parent / "PACS copy"), "give one of them as --data-dir")
    assert len(pacs(deeper).labels) == 28


def test_one_folder_by_two_ways_is_one(root):
    (root.parent / "link").symlink_to(root, target_is_directory=True)
    assert len(pacs(root.parent).labels) == 56


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda path: None, "does not exist"),
        (lambda path: write(path, b""), "is no folder"),
        (lambda path: path.mkdir(), "expected the folders art_painting, cartoon, photo, sketch"),
        (lambda path: grow(path / "a/b/c/d", PACS_DOMAINS, PACS_CLASSES, 1), "up to 3 folders below"),
        (lambda path: grow(path / "a", PACS_DOMAINS[2:], PACS_CLASSES, 1), "a holds only photo, sketch)"),
    ],
)
def test_nothing_found(tmp_path, make, words):
    make(tmp_path / "data")
    refusal(lambda: pacs(tmp_path / "data"), words, str(tmp_path / "data"))


@pytest.mark.parametrize("name", [*LAYOUTS, "folder"])
def test_no_folder_given(name):
    refusal(lambda: datasets.load(name), f"{name} is read from your own folder", "--data-dir")


@pytest.mark.parametrize("size", [0, -8])
def test_image_size_is_positive(root, size):
    refusal(lambda: datasets.load("PACS", data_dir=str(root), image_size=size), f"image_size={size} is not positive")


@pytest.mark.parametrize("name", ["pacs", "office_home", "Domainnet"])
def test_other_spellings_of_a_data_sets_name_are_refused_with_the_nearest(name):
    nearest = {"pacs": "PACS", "office_home": "OfficeHome", "Domainnet": "DomainNet"}[name]
    with pytest.raises(ValueError, match=f"Unknown data set '{name}'; did you mean '{nearest}'"):
        datasets.load(name, data_dir=".")


# --- rows and labels --------------------------------------------------------------------------------------------------


def image_folder(domain: Path) -> list[Path]:
    """What torchvision's ImageFolder lists, in its order."""
    files = []
    for kind in sorted(entry.name for entry in os.scandir(domain) if entry.is_dir()):
        for folder, _, names in sorted(os.walk(domain / kind, followlinks=True)):
            for name in sorted(names):
                if name.lower().endswith((".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")):
                    files.append(Path(folder) / name)
    return files


def test_rows_are_torchvisions_within_each_domain_and_labels_the_explicit_lists(tmp_path):
    root = tmp_path / "office_home"
    on_disk = ["TV", "Table", "ruler", "Alarm_Clock", "Bed"]
    grow(root, ["Art", "Clipart", "Product", "Real World"], on_disk, 1)
    number = 1000
    for name in (
        "10.png",
        "9.JPG",
        "Z.Tiff",
        "a b.png",
        "a_b.png",
        "sub/1.png",
        "sub-2/1.png",
        "sub/deep/0.webp",
        "s.ppm",
    ):
        write(root / "Product" / "Table" / name, picture(number := number + 1))
    domains = datasets.load("OfficeHome", data_dir=str(root), image_size=8)
    listed = [path for domain in ("Art", "Clipart", "Product", "Real World") for path in image_folder(root / domain)]
    assert [root / file for file in domains.files] == listed and len(listed) == 29
    assert all("\\" not in file for file in domains.files)
    names = [domains.class_names[label] for label in domains.labels]
    assert names == [path.relative_to(root).parts[1] for path in listed]
    assert [domains.domain_names[g] for g in domains.domain] == [path.relative_to(root).parts[0] for path in listed]
    # on disk TV comes before Table and ruler last; by label neither
    art = domains.labels[domains.domain == 0].tolist()
    assert art == [0, 3, 62 + 1, 58, 49]
    assert domains.labels.dtype == np.int32 and domains.domain.dtype == np.int32
    pixels = read_all(domains.inputs)
    for row, path in enumerate(listed):
        with Image.open(path) as image:
            np.testing.assert_array_equal(pixels[row], np.asarray(image))


def test_domainnet_labels_are_the_official_ids(tmp_path):
    classes = ["zigzag", "The_Mona_Lisa", "t-shirt", "cell_phone", "cello", "airplane"]
    root = grow(tmp_path / "domain_net", DOMAIN_NET.domain_names, classes, 1)
    domains = datasets.load("DomainNet", data_dir=str(root), image_size=8)
    first = [file.split("/")[1] for file in domains.files[:6]]
    assert first == ["The_Mona_Lisa", "airplane", "cell_phone", "cello", "t-shirt", "zigzag"]
    assert domains.labels[:6].tolist() == [310, 1, 67, 66, 327, 344]


@pytest.mark.parametrize("real", ["Real World", "Real_World", "RealWorld", "Real", "real_world"])
def test_spellings_of_folders(tmp_path, real):
    root = grow(
        tmp_path / "data", ["art", "CLIPART", "Product", real], ["alarm clock", "tv", "Ruler", "Post-it_Notes"], 1
    )
    domains = datasets.load("OfficeHome", data_dir=str(root), image_size=8)
    assert domains.domain_names == ("Art", "Clipart", "Product", "Real World")
    names = ["Alarm_Clock", "Postit_Notes", "TV", "ruler"]
    assert sorted({domains.class_names[label] for label in domains.labels}) == names
    assert domains.files[-1] == f"{real}/tv/pic_001.png" and len(domains.files) == 16


@pytest.mark.parametrize("tenth", ["empty", "landscape"])
def test_terra_incognita(tmp_path, tenth):
    root = grow(tmp_path, [f"location_{number}" for number in (38, 43, 46, 100)], ["bird", tenth, "squirrel"], 1)
    domains = datasets.load("TerraIncognita", data_dir=str(root), image_size=8)
    assert domains.files[0] == "location_100/bird/pic_001.png" and domains.files[-1].startswith("location_46/")
    assert domains.labels.tolist() == [0, 5, 9] * 4
    assert "12 images; the published set has 24,788 or 24,330" in domains.notice


def test_vlcs_with_plain_folders(tmp_path):
    root = grow(tmp_path / "VLCS", ["Caltech101", "LabelMe", "SUN09", "VOC2007"], VLCS.class_names, 1)
    domains = datasets.load("VLCS", data_dir=str(root), image_size=8)
    assert domains.labels.tolist() == [0, 1, 2, 3, 4] * 4


VLCS_COPY = ("CALTECH", "LABELME", "PASCAL", "SUN")


def test_vlcs_with_levels_and_numbered_classes_reads_each_image_once(tmp_path):
    root = tmp_path / "VLCS"
    for number, domain in enumerate(VLCS_COPY):
        for place, level in enumerate(("train", "crossval", "test")):
            for kind in range(5):
                write(
                    root / domain / level / f"{kind}" / f"imgs_{place}.png", picture(100 * number + 10 * place + kind)
                )
    domains = datasets.load("VLCS", data_dir=str(root), image_size=8)
    assert domains.domain_names == ("Caltech101", "LabelMe", "SUN09", "VOC2007")
    assert np.bincount(domains.domain).tolist() == [15] * 4 and np.bincount(domains.labels).tolist() == [12] * 5
    assert domains.files[:3] == (
        "CALTECH/crossval/0/imgs_1.png",
        "CALTECH/test/0/imgs_2.png",
        "CALTECH/train/0/imgs_0.png",
    )
    assert domains.files[30].startswith("SUN/") and domains.files[45].startswith("PASCAL/")


@pytest.mark.parametrize("numbered_anew", [False, True])
def test_vlcs_full_is_the_union_of_the_others(tmp_path, numbered_anew):
    root = tmp_path / "VLCS"
    for domain in VLCS_COPY:
        for kind in range(5):
            for place, level in enumerate(("train", "val")):
                for image in range(2):
                    name = f"{image}.png" if numbered_anew else f"{2 * place + image}.png"
                    write(root / domain / level / f"{kind}" / name, picture(kind))
            for image in range(4):
                write(root / domain / "full" / f"{kind}" / f"{image}.png", picture(kind))
    domains = datasets.load("VLCS", data_dir=str(root), image_size=8)
    assert len(domains.files) == 80 and all("/full/" in file for file in domains.files)
    write(root / "SUN" / "val" / "3" / "9.png", picture(9))
    if numbered_anew:
        refusal(lambda: datasets.load("VLCS", data_dir=str(root)), "SUN/full holds 4 images of dog", "beside it 5")
    (root / "SUN" / "full" / "3" / "9.png").write_bytes(picture(9))
    assert len(datasets.load("VLCS", data_dir=str(root)).files) == 81
    if not numbered_anew:
        (root / "SUN" / "val" / "3" / "9.png").unlink()  # full may hold more than all others
        assert len(datasets.load("VLCS", data_dir=str(root)).files) == 81


def test_vlcs_without_full_counts_a_file_that_is_there_twice_once(tmp_path):
    root = tmp_path / "VLCS"
    for domain in VLCS_COPY:
        for level, number in (("train", 1), ("test", 2)):
            write(root / domain / level / "0" / "1.png", picture(number if domain == "SUN" else 1))
    domains = datasets.load("VLCS", data_dir=str(root), image_size=8)
    assert np.bincount(domains.domain).tolist() == [1, 1, 2, 1]
    assert "Read once: CALTECH/test/0/1.png, the same as CALTECH/train/0/1.png." in domains.notice


# --- what is refused, left out or told --------------------------------------------------------------------------------

# what is done to a PACS tree, and words of the refusal
REFUSED = {
    "empty file": (lambda r: write(r / "photo/dog/pic_003.jpg", b""), "photo/dog/pic_003.jpg is empty (0 bytes)"),
    "broken link": (lambda r: (r / "photo/dog/x.jpg").symlink_to(r / "none"), "photo/dog/x.jpg is a link to nothing"),
    "link to itself": (
        lambda r: (r / "photo/dog/x.jpg").symlink_to(r / "photo/dog/x.jpg"),
        "x.jpg is a link to nothing",
    ),
    "broken class": (lambda r: (r / "photo/cat").symlink_to(r / "none"), "photo/cat is a link to nothing"),
    "broken known class": (
        lambda r: (r / "photo/dog").rename(r.parent / "dogs") and (r / "photo/dog").symlink_to(r / "none"),
        "photo/dog is a link to nothing",
    ),
    "broken domain": (
        lambda r: (r / "photo").rename(r.parent / "p") and (r / "photo").symlink_to(r / "n"),
        "photo is a l",
    ),
    "unknown class": (
        lambda r: write(r / "photo/cat/1.png", picture(1)),
        "photo/cat is no class of it (dog, elephant, ",
    ),
    "unknown empty class": (lambda r: (r / "photo/cat").mkdir(), "photo/cat is no class of it"),
    "class twice": (
        lambda r: write(r / "photo/Dog/1.png", picture(1)),
        "photo/Dog and photo/dog are both the class dog",
    ),
    "unknown domain": (
        lambda r: write(r / "clipart/dog/1.png", picture(1)),
        "clipart is no domain of it (art_painting, ",
    ),
    "flat unknown domain": (lambda r: write(r / "clipart/1.png", picture(1)), "clipart is no domain of it"),
    "domain twice": (
        lambda r: write(r / "art/dog/1.png", picture(1)),
        "art and art_painting are both the domain art_pain",
    ),
    "missing domain": (lambda r: (r / "sketch").rename(r.parent / "else"), "the domain sketch is missing"),
    "empty domain": (
        lambda r: [path.unlink() for path in (r / "cartoon").rglob("*.png")],
        "the domain cartoon holds no image",
    ),
    "image in a domain": (lambda r: write(r / "photo/pic.PNG", picture(1)), "photo/pic.PNG lies in no class folder"),
    "image by content": (
        lambda r: write(r / "photo/dog/pic.dat", picture(1)),
        "photo/dog/pic.dat is an image but not nam",
    ),
    "a gif": (
        lambda r: write(r / "photo/dog/pic.gif", picture(1, "GIF")),
        "photo/dog/pic.gif is an image but not named",
    ),
    "a pipe": (lambda r: os.mkfifo(r / "photo/dog/pipe.png"), "photo/dog/pipe.png is no file"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_by_name(root, case, monkeypatch):
    spoil, words = REFUSED[case]
    spoil(root)
    monkeypatch.setattr("fedjax_dg.datasets.images.decode", lambda *_: pytest.fail("decoded"))
    message = refusal(lambda: pacs(root), f"PACS in {root}: ", words)
    assert "more problem" not in message


def test_the_first_of_several_problems_says_how_many_more(root):
    for case in ("empty file", "unknown class", "unknown domain"):
        REFUSED[case][0](root)
    message = refusal(
        lambda: pacs(root), "clipart is no domain of it", "; 2 more problems: see `fedjax-dg data check PACS --d"
    )
    assert message.endswith(f"--data-dir {root}`.")


def test_junk_is_left_out_silently(root):
    before = pacs(root)
    for name in (".DS_Store", "Thumbs.db", "desktop.ini", "._pic_001.png", ".hidden/pic.png", "__MACOSX/pic.png"):
        write(root / "photo" / "dog" / name, b"junk")
        write(root / "photo" / name, b"junk")
        write(root / name, b"junk")
    for name in ("photo.txt", "list.csv", "readme.txt"):
        write(root / name, b"text")
        write(root / "photo" / name, b"text")
    write(root / "txt" / "photo_train_kfold.txt", b"text")
    after = pacs(root)
    assert after.files == before.files and after.notice == before.notice


def test_what_is_no_image_by_name_is_counted(root):
    for number in range(5):
        write(root / "photo" / "dog" / f"notes_{number}.xml", b"<xml>")
    domains = pacs(root)
    assert len(domains.files) == 56
    names = ", ".join(f"photo/dog/notes_{number}.xml" for number in range(3))
    assert f"Not read, as no images by name: {names} and 2 more (5 in all)." in domains.notice


def test_an_image_beside_the_domains_is_told(root):
    write(root / "overview.png", picture(1))
    assert "Not read, as in no domain: overview.png." in pacs(root).notice


def test_a_class_may_be_empty_or_absent_in_a_domain(root):
    for path in (root / "photo" / "dog").iterdir():
        path.unlink()
    (root / "sketch" / "person").rename(root.parent / "person")
    domains = pacs(root)
    assert len(domains.files) == 52 and domains.class_names == PACS_CLASSES
    assert "No image of dog (photo), person (sketch)." in domains.notice


def test_other_counts_are_accepted_and_told(root):
    assert pacs(root).notice == "PACS: 56 images; the published set has 9,991."


def test_links_are_followed_but_not_in_circles(root, tmp_path):
    apart = grow(tmp_path / "apart", ["more"], ["inner"], 2)
    (root / "photo" / "dog" / "link.png").symlink_to(apart / "more" / "inner" / "pic_001.png")
    (root / "photo" / "dog" / "linked").symlink_to(apart / "more", target_is_directory=True)
    for target, name in [("photo/dog", "self"), ("photo", "domain"), (".", "root"), ("..", "above")]:
        (root / "photo" / "dog" / name).symlink_to(root / target, target_is_directory=True)
    (apart / "more" / "back").symlink_to(root / "photo" / "dog", target_is_directory=True)
    domains = pacs(root)
    assert [file for file in domains.files if file.startswith("photo/dog/")] == [
        "photo/dog/link.png",
        "photo/dog/pic_001.png",
        "photo/dog/pic_002.png",
        "photo/dog/linked/inner/pic_001.png",
        "photo/dog/linked/inner/pic_002.png",
    ]
    assert "Not followed, as links to a folder above: photo/dog/" in domains.notice and "and 2 more." in domains.notice


def test_a_linked_class_and_a_linked_domain_are_read(root, tmp_path):
    (root / "photo" / "dog").rename(tmp_path / "dogs")
    (root / "photo" / "dog").symlink_to(tmp_path / "dogs", target_is_directory=True)
    (root / "sketch").rename(tmp_path / "sketches")
    (root / "sketch").symlink_to(tmp_path / "sketches", target_is_directory=True)
    assert len(pacs(root).files) == 56


@pytest.mark.parametrize("form", ["NFC", "NFD"])
def test_accents_in_either_unicode_form(tmp_path, form):
    def spell(name):
        return unicodedata.normalize(form, name)

    grow(tmp_path, [spell("städte"), "übersee land"], ["café", spell("öl"), "東京"], 1, spell("größe {}.png"))
    domains = datasets.load("folder", data_dir=str(tmp_path), image_size=8)
    assert domains.domain_names == tuple(unicodedata.normalize("NFC", name) for name in sorted(os.listdir(tmp_path)))
    assert domains.class_names == ("café", "öl", "東京")
    assert read_all(domains.inputs).shape == (6, 8, 8, 3)


def test_one_name_in_two_unicode_forms_is_refused(root):
    assert lookup((("café",),))(unicodedata.normalize("NFD", "CAFÉ")) == 0
    both = [unicodedata.normalize(form, "café") for form in ("NFC", "NFD")]
    grow(root.parent / "own", ["a", "b"], both, 1)
    refusal(lambda: datasets.load("folder", data_dir=str(root.parent / "own")), "are both the class café")


def test_a_name_that_is_no_text_can_be_told(root):
    path = os.path.join(os.fsencode(root), b"photo", b"dog", b"\xff.png")
    Path(os.fsdecode(path)).write_bytes(b"")
    refusal(lambda: pacs(root), "photo/dog/\\udcff.png is empty").encode()


# --- a folder of one's own --------------------------------------------------------------------------------------------


def test_any_tree_of_folders(tmp_path):
    grow(tmp_path, ["summer", "winter", "Autumn"], ["b", "A"], 2)
    grow(tmp_path, ["winter"], ["only here", "1-1", "11"], 1)
    domains = datasets.load("folder", data_dir=str(tmp_path), image_size=8)
    assert domains.domain_names == ("Autumn", "summer", "winter") and domains.name == "folder"
    assert domains.class_names == ("1-1", "11", "A", "b", "only here")
    assert np.bincount(domains.domain).tolist() == [4, 4, 7]
    assert domains.files[:2] == ("Autumn/A/pic_001.png", "Autumn/A/pic_002.png")
    assert domains.notice.startswith("No image of 1-1 (Autumn), ") and "published" not in domains.notice


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda path: path.mkdir(), "holds no folder"),
        (lambda path: grow(path, ["only"], ["a", "b"]), "holds only the folder only, but one of two or more domains"),
        (lambda path: grow(path / "deeper", ["a", "b"], ["x"]), "holds only the folder deeper"),
        (lambda path: grow(path, ["a", "b"], ["Dog", "dog"]), "has the classes 'Dog' and 'dog'"),
        (lambda path: (grow(path, ["a"], ["t shirt"]), grow(path, ["b"], ["t_shirt"])), "'t shirt' and 't_shirt'"),
        (lambda path: (grow(path, ["a", "b"], ["x"]), (path / "c").mkdir()), "the domain c holds no image"),
        (lambda path: (grow(path, ["a"], ["x"]), write(path / "b/1.png", picture(1))), "b/1.png lies in no class"),
        (lambda path: (grow(path, ["a", "b"], ["x"]), write(path / "b/x/1.jpg", b"")), "b/x/1.jpg is empty"),
    ],
)
def test_folders_that_are_no_data_set(tmp_path, make, words):
    make(tmp_path / "data")
    refusal(lambda: datasets.load("folder", data_dir=str(tmp_path / "data")), words)


# --- official splits --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", [".", "lists", "..", "../Train val splits and h5py files pre-read"])
def test_pacs_official_split(root, place):
    kfold_lists(root / place)
    domains = pacs(root, official=True)
    assert domains.validation.dtype == np.bool_
    assert [file.endswith("2.png") for file in domains.files] == domains.validation.tolist()
    assert pacs(root).validation is None


def test_lists_are_read_however_the_folders_are_spelled(root):
    (root / "art_painting").rename(root / "Art Painting")
    change = lambda domain, kind, lines: [
        f"PACS/kfold/{line}\r" if domain == "photo" else line for line in [*lines, ""]
    ]
    lists = kfold_lists(root / "lists", change=change)
    (lists / "photo_test_kfold.txt").write_bytes(b"\xef\xbb\xbf" + (lists / "photo_test_kfold.txt").read_bytes())
    for path in lists.iterdir():
        path.write_text("\n".join(line for line in path.read_text().split("\n") if line.strip("\r") != "PACS/kfold/"))
    assert pacs(root, official=True).validation.sum() == 28


def edit(domain, kind, new):
    """Changes the lines of one list."""
    return lambda d, k, lines: new(lines) if (d, k) == (domain, kind) else lines


SPOILED_LISTS = {
    "a label": (edit("photo", "train", lambda x: [x[0][:-1] + "3", *x[1:]]), "gives dog the label 3, expected 1"),
    "in both": (
        edit("photo", "train", lambda x: [*x, "photo/dog/pic_002.png 1"]),
        "photo/dog/pic_002.png is in both photo_t",
    ),
    "in none": (
        edit("photo", "train", lambda x: x[1:]),
        "photo/dog/pic_001.png is in photo_test_kfold.txt but in neither o",
    ),
    "not in test": (edit("photo", "test", lambda x: x[1:]), "photo/dog/pic_001.png is in photo_test_kfold.txt but"),
    "twice": (edit("photo", "train", lambda x: [*x, x[0]]), "names photo/dog/pic_001.png twice, in line 8"),
    "other class": (
        edit("photo", "train", lambda x: ["photo/cat/pic_001.png 1"]),
        "line 1 is 'photo/cat/pic_001.png 1'",
    ),
    "other domain": (edit("photo", "train", lambda x: ["sketch/dog/pic_001.png 1"]), "expected photo/class/image"),
    "no label": (edit("photo", "train", lambda x: ["photo/dog/pic_001.png"]), "line 1 is 'photo/dog/pic_001.png'"),
    "no number": (edit("photo", "train", lambda x: ["photo/dog/pic_001.png one"]), "and a label"),
}


@pytest.mark.parametrize("case", SPOILED_LISTS)
def test_lists_that_are_not_right(root, case):
    change, words = SPOILED_LISTS[case]
    kfold_lists(root / "lists", change=change)
    refusal(lambda: pacs(root, official=True), words)
    assert pacs(root).validation is None


def test_lists_counted_from_0_with_train_and_test_alike(root):
    def whole(domain, kind, lines):
        return [f"{domain}/{k}/pic_00{i}.png {n}" for n, k in enumerate(PACS_CLASSES) for i in (1, 2)]

    kfold_lists(root / "lists", change=whole)
    refusal(lambda: pacs(root, official=True), "counts labels from 0, the official list from 1")


def test_lists_and_files_must_agree(root):
    kfold_lists(root / "lists")
    write(root / "photo/dog/pic_009.png", picture(9))
    refusal(lambda: pacs(root, official=True), "photo/dog/pic_009.png is on disk but not in the official lists")
    (root / "photo/dog/pic_009.png").unlink()
    (root / "sketch/horse/pic_001.png").unlink()
    refusal(lambda: pacs(root, official=True), "sketch/horse/pic_001.png is in the official lists", "but not on disk")
    assert len(pacs(root).files) == 55


def test_missing_lists(root):
    refusal(
        lambda: pacs(root, official=True), "No official lists of PACS", "the 12 files art_painting_train_kfold.txt, ..."
    )
    (kfold_lists(root / "lists") / "photo_test_kfold.txt").unlink()
    refusal(
        lambda: pacs(root, official=True), f"{root / 'lists'} lacks the official lists photo_test_kfold.txt of PACS"
    )


def test_data_sets_without_lists(tmp_path):
    grow(tmp_path, ["a", "b"], ["x"])
    refusal(lambda: datasets.load("folder", data_dir=str(tmp_path), official=True), "folder has no official split")


def test_domainnet_official_split(tmp_path):
    root = grow(tmp_path / "domain_net", DOMAIN_NET.domain_names, ["zigzag", "The_Mona_Lisa", "t-shirt"], 2)
    (root / "txt").mkdir()
    for domain in DOMAIN_NET.domain_names:
        for image, kind in ((1, "train"), (2, "test")):
            lines = [
                f"{domain}/{k}/pic_00{image}.png {n}"
                for k, n in (("The_Mona_Lisa", 310), ("t-shirt", 327), ("zigzag", 344))
            ]
            (root / "txt" / f"{domain}_{kind}.txt").write_text("\n".join(lines))
    load = lambda: datasets.load("DomainNet", data_dir=str(tmp_path), image_size=8, official=True)
    domains = load()
    assert domains.validation.tolist() == [False, True] * 18
    write(root / "real/zigzag/pic_003.png", picture(1))
    refusal(load, "real/zigzag/pic_003.png is on disk but not in the official lists", "are of the cleaned set")
    (root / "real/zigzag/pic_003.png").unlink()
    text = (root / "txt" / "clipart_test.txt").read_text()
    (root / "txt" / "clipart_test.txt").write_text(text.replace(" 310", " 0"))
    refusal(load, "gives The_Mona_Lisa the label 0, expected 310")
