"""Rotated and coloured digits: the protocols against a written-out reading, IDX files sound and damaged, networks."""

import gzip
import struct
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from PIL import Image
from sklearn.datasets import load_digits

from fedjax_dg import datasets, federate
from fedjax_dg.backbones import BACKBONES, lenet5, resnet18_cifar
from fedjax_dg.backbones.layers import imagenet_pixels
from fedjax_dg.cli import main
from fedjax_dg.config import RunConfig, build_backbone, check
from fedjax_dg.experiment import resolve, round_of
from fedjax_dg.types import Variables

KINDS = [(part, kind) for part in ("train", "t10k") for kind in ("images", "labels")]


def idx_bytes(array) -> bytes:
    """An IDX file as its format says: two zeros, the type, the number of axes, the sizes, the bytes; big-endian."""
    return struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.astype(np.uint8).tobytes()


def arrays(train=40, test=20, side=28, classes=10, first=0, seed=0):
    """Random images and labels by (part, kind); every class occurs."""
    rng = np.random.default_rng(seed)
    out = {}
    for part, count in (("train", train), ("t10k", test)):
        out[part, "images"] = rng.integers(0, 256, (count, side, side), dtype=np.uint8)
        out[part, "labels"] = (np.arange(count) % classes + first).astype(np.uint8)
    return out


def write(folder, content, pattern="{part}-{kind}-idx{axes}-ubyte", pack=lambda x: x):
    folder.mkdir(parents=True, exist_ok=True)
    for (part, kind), array in content.items():
        name = pattern.format(part=part, kind=kind, axes=3 if kind == "images" else 1)
        (folder / name).write_bytes(pack(idx_bytes(array)))
    return folder


def joined(content):
    return tuple(np.concatenate([content[part, kind] for part in ("train", "t10k")]) for kind in ("images", "labels"))


def multiset(images, labels):
    """Images with their labels, in no order."""
    return sorted((image.tobytes(), int(label)) for image, label in zip(images, labels))


# --- reading ---------------------------------------------------------------------------------------------------------

LAYOUTS = {
    "published": ("", "{part}-{kind}-idx{axes}-ubyte", False),
    "zipped": ("", "{part}-{kind}-idx{axes}-ubyte.gz", True),
    "dots": ("", "{part}-{kind}.idx{axes}-ubyte", False),
    "torchvision": ("MNIST/raw", "{part}-{kind}-idx{axes}-ubyte", False),
    "torchvision, fashion": ("FashionMNIST/raw", "{part}-{kind}-idx{axes}-ubyte", False),
    "one folder below": ("digits", "{part}-{kind}-idx{axes}-ubyte", False),
    "unpacked by a browser": ("", "{part}-{kind}-idx{axes}-ubyte.gz", False),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_files_are_found_by_their_usual_names(tmp_path, layout):
    place, pattern, packed = LAYOUTS[layout]
    content = arrays()
    write(tmp_path / place, content, pattern, gzip.compress if packed else bytes)
    (tmp_path / "notes-ubyte.txt").write_text("no data")
    domains = datasets.load("colored_mnist", data_dir=tmp_path)
    images, _ = joined(content)
    assert sorted(x.tobytes() for x in domains.inputs.max(-1)) == sorted(x.tobytes() for x in images)
    assert str(tmp_path / place) in domains.notice and "60 images" in domains.notice
    expected = ("Sandal to Ankle boot", "T-shirt/top to Coat") if "Fashion" in place else ("5 to 9", "0 to 4")
    assert domains.class_names == expected


def test_of_a_packed_and_an_unpacked_file_either_will_do(tmp_path):
    write(tmp_path, arrays())
    write(tmp_path, arrays(), "{part}-{kind}-idx{axes}-ubyte.gz", gzip.compress)
    assert len(datasets.load("rotated_mnist", data_dir=tmp_path).labels) == 60


EMNIST_SPLITS = {
    "digits": (10, 0, "0", "9"),
    "letters": (26, 1, "a", "z"),
    "balanced": (47, 0, "0", "t"),
    "byclass": (62, 0, "0", "z"),
}


@pytest.mark.parametrize("split", EMNIST_SPLITS)
def test_emnist_is_set_upright_and_its_labels_count_from_zero(tmp_path, split):
    classes, first, first_name, last_name = EMNIST_SPLITS[split]
    content = arrays(train=70, test=70, classes=classes, first=first)
    names = {"train": "train", "t10k": "test"}
    content = {(names[part], kind): x for (part, kind), x in content.items()}
    write(tmp_path, content, f"emnist-{split}-{{part}}-{{kind}}-idx{{axes}}-ubyte.gz", gzip.compress)
    domains = datasets.load("rotated_mnist", data_dir=tmp_path)
    assert len(domains.class_names) == classes
    assert (domains.class_names[0], domains.class_names[-1]) == (first_name, last_name)
    images, labels = (np.concatenate([content[part, kind] for part in names.values()]) for kind in ("images", "labels"))
    upright = {image.T.tobytes(): int(label) - first for image, label in zip(images, labels)}
    still = domains.domain == 0  # turned by no angle
    for image, label in zip(domains.inputs[still, :, :, 0], domains.labels[still]):
        assert upright[image.tobytes()] == label


def test_other_labels_get_their_numbers_as_names(tmp_path):
    write(tmp_path, arrays(classes=12))
    assert datasets.load("rotated_mnist", data_dir=tmp_path).class_names == tuple(str(i) for i in range(12))


def message_of(function, *args, **options):
    """One sentence, without another traceback beside it."""
    with pytest.raises(ValueError) as caught:
        function(*args, **options)
    message = str(caught.value)
    assert "\n" not in message and message.endswith(".")
    assert caught.value.__context__ is None or caught.value.__suppress_context__
    return message


def test_no_folder():
    for name in ("rotated_mnist", "colored_mnist"):
        assert "--data-dir" in message_of(datasets.load, name)


def test_a_folder_without_files(tmp_path):
    for place in (tmp_path, tmp_path / "none", tmp_path / "none" / "below"):
        message = message_of(datasets.load, "rotated_mnist", data_dir=place)
        assert message.startswith(f"data_dir='{place}' holds no IDX files") and "MNIST/raw" in message


def test_several_data_sets_are_named_and_each_can_be_chosen(tmp_path):
    write(tmp_path / "MNIST/raw", arrays())
    write(tmp_path / "FashionMNIST/raw", arrays(seed=1))
    message = message_of(datasets.load, "rotated_mnist", data_dir=tmp_path)
    for name in ("MNIST", "FashionMNIST"):
        assert str(tmp_path / name / "raw") in message
        assert len(datasets.load("rotated_mnist", data_dir=tmp_path / name).labels) == 60
    raw = tmp_path / "EMNIST/raw"
    for split in ("digits", "mnist"):
        write(raw, arrays(seed=2), f"emnist-{split}-{{part}}-{{kind}}-idx{{axes}}-ubyte")
    message = message_of(datasets.load, "rotated_mnist", data_dir=raw)
    for split in ("digits", "mnist"):
        assert str(raw / f"emnist-{split}") in message
        assert f"emnist-{split}" in datasets.load("rotated_mnist", data_dir=raw / f"emnist-{split}").notice


@pytest.mark.parametrize("lost", KINDS, ids="-".join)
def test_a_missing_file(tmp_path, lost):
    content = arrays()
    del content[lost]
    message = message_of(datasets.load, "rotated_mnist", data_dir=write(tmp_path, content))
    part, kind = lost
    assert f"lacks the {kind} of the {'train' if part == 'train' else 'test'} images" in message


DAMAGE = {
    "cut off": (lambda content: content[:-5], "has 31,355 bytes after its header, which says 40 x 28 x 28"),
    "too long": (lambda content: content + b"\0", "has 31,361 bytes after its header, which says 40 x 28 x 28"),
    "wrong sizes": (lambda content: content[:4] + struct.pack(">I", 41) + content[8:], "which says 41 x 28 x 28"),
    "labels for images": (
        lambda content: idx_bytes(np.zeros(40)),
        "starts with the bytes 00000801, and IDX images with 00000803",
    ),
    "floats": (lambda content: b"\0\0\x0d\3" + content[4:], "starts with the bytes 00000d03"),
    "no header": (lambda content: content[:9], "ends inside its header"),
    "nothing": (lambda content: b"", "starts with the bytes , and"),
    "no images": (lambda content: idx_bytes(np.zeros((0, 28, 28))), "holds no images"),
    "gz cut off": (
        lambda content: gzip.compress(content)[:-20],
        "is cut off or damaged, it does not unpack (EOFError)",
    ),
    "gz cut short": (
        lambda content: gzip.compress(content)[:12],
        "is cut off or damaged, it does not unpack (EOFError)",
    ),
    "gz damaged": (
        lambda content: (lambda x: x[:500] + bytes([x[500] ^ 255]) + x[501:])(gzip.compress(content)),
        "is cut off or damaged, it does not unpack",
    ),
    "gz of another kind": (lambda content: b"\x1f\x8b\x07" + content, "does not unpack (BadGzipFile)"),
    "web page": (lambda content: b"<html>404</html>", "starts with the bytes 3c68746d"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file(tmp_path, damage):
    change, expected = DAMAGE[damage]
    write(tmp_path, arrays())
    path = tmp_path / "train-images-idx3-ubyte"
    path.write_bytes(change(path.read_bytes()))
    message = message_of(datasets.load, "rotated_mnist", data_dir=tmp_path)
    assert message.startswith(f"{path} ") and expected in message and "download" in message


def test_a_folder_in_place_of_a_file(tmp_path):
    content = arrays()
    del content["t10k", "labels"]
    write(tmp_path, content)
    (tmp_path / "t10k-labels-idx1-ubyte").mkdir()
    message = message_of(datasets.load, "rotated_mnist", data_dir=tmp_path)
    assert "t10k-labels-idx1-ubyte cannot be opened" in message


def test_files_that_do_not_belong_together(tmp_path):
    content = arrays()
    content["t10k", "labels"] = content["t10k", "labels"][:19]
    message = message_of(datasets.load, "rotated_mnist", data_dir=write(tmp_path / "a", content))
    assert "t10k-labels-idx1-ubyte has 19 labels for the 20 of t10k-images-idx3-ubyte" in message
    content = arrays() | {("t10k", "images"): np.zeros((20, 14, 28))}
    message = message_of(datasets.load, "rotated_mnist", data_dir=write(tmp_path / "b", content))
    assert "has images of 14 x 28, and those to train on are 28 x 28" in message


def test_labels_that_do_not_exist(tmp_path):
    names = "emnist-letters-{part}-{kind}-idx{axes}-ubyte"
    message = message_of(datasets.load, "rotated_mnist", data_dir=write(tmp_path / "a", arrays(classes=26), names))
    assert "labels from 0 to 25, and emnist-letters should go from 1 to 26" in message
    fashion = write(tmp_path / "fashion", arrays(classes=11))
    message = message_of(datasets.load, "rotated_mnist", data_dir=fashion)
    assert "labels from 0 to 10, and they should go from 0 to 9" in message


# --- protocols -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def mnist(tmp_path_factory):
    """A folder with 3,000 different images of random digits, and these."""
    content = arrays(train=2000, test=1000)
    return write(tmp_path_factory.mktemp("mnist"), content), *joined(content)


def test_rotated_mnist_by_its_definition(mnist):
    folder, images, labels = mnist
    domains = datasets.load("rotated_mnist", data_dir=folder)
    assert domains.name == "rotated_mnist"
    assert domains.inputs.shape == (3000, 28, 28, 1) and domains.inputs.dtype == np.uint8
    assert (domains.labels.dtype, domains.domain.dtype) == (np.int32, np.int32)
    assert domains.identity is None and domains.validation is None
    assert domains.domain_names == ("0", "15", "30", "45", "60", "75") and domains.class_names == tuple("0123456789")
    assert np.bincount(domains.domain).tolist() == [500] * 6
    # what torchvision does: PIL's rotate, counter-clockwise, bilinear, zeros from outside
    turned = {}
    for number, image in enumerate(images):
        for angle in domains.domain_names:
            view = Image.fromarray(image).rotate(int(angle), resample=Image.Resampling.BILINEAR, fillcolor=0)
            turned[np.asarray(view).tobytes()] = (number, angle)
    found = [turned[image.tobytes()] for image in domains.inputs[..., 0]]
    assert sorted(number for number, _ in found) == list(range(3000))  # everyone once
    assert [angle for _, angle in found] == [domains.domain_names[g] for g in domains.domain]
    np.testing.assert_array_equal(domains.labels, labels[[number for number, _ in found]])
    # train and test, and the classes, spread over the domains
    shares = [np.mean([number < 2000 for (number, _), g in zip(found, domains.domain) if g == h]) for h in range(6)]
    assert max(abs(share - 2 / 3) for share in shares) < 4 * np.sqrt(2 / 9 / 500)


def test_rotation_is_counter_clockwise():
    """A bar right of the middle goes up."""
    image = np.zeros((2, 28, 28), np.uint8)
    image[:, 13:15, 14:28] = 255
    pictures = datasets.digits.Pictures(image.repeat(3, 0), np.zeros(6, np.int32), tuple("0123456789"), "")
    turned = datasets.digits.rotated("x", pictures, 0, None)
    (by_75,) = turned.inputs[turned.domain == 5, :, :, 0].astype(float)
    assert by_75[:13].sum() > 20 * by_75[15:].sum()
    assert by_75[:, 14:].sum() > by_75[:, :14].sum()


def test_colored_mnist_by_its_definition(mnist):
    folder, images, labels = mnist
    domains = datasets.load("colored_mnist", data_dir=folder)
    assert domains.inputs.shape == (3000, 28, 28, 2) and domains.inputs.dtype == np.uint8
    assert domains.identity is None and domains.validation is None
    assert (domains.labels.dtype, domains.domain.dtype) == (np.int32, np.int32)
    assert domains.domain_names == ("+90%", "+80%", "-90%") and domains.class_names == ("5 to 9", "0 to 4")
    assert np.bincount(domains.domain).tolist() == [1000] * 3
    of_image = {image.tobytes(): label for image, label in zip(images, labels)}
    colour = (domains.inputs.sum((1, 2)) > 0).argmax(1)
    rows = np.arange(3000)
    assert not domains.inputs[rows, :, :, 1 - colour].any()
    digits = np.array([of_image[image.tobytes()] for image in domains.inputs[rows, :, :, colour]])
    near = lambda share, expected, n: abs(share - expected) < 4 * np.sqrt(expected * (1 - expected) / n)
    flipped = domains.labels != (digits < 5)
    other = domains.labels != colour
    for g, noise in enumerate((0.1, 0.2, 0.9)):
        here = domains.domain == g
        assert near(flipped[here].mean(), 0.25, 1000)
        assert near(other[here].mean(), noise, 1000)
        # the two kinds of noise are independent: the colour tells of the label, not of the digit
        assert near(other[here & flipped].mean(), noise, (here & flipped).sum())
    for digit in range(10):
        assert near(flipped[digits == digit].mean(), 0.25, (digits == digit).sum())


def test_label_halves_of_an_odd_number_of_classes(tmp_path):
    write(tmp_path, arrays(train=2000, test=100, classes=11))
    domains = datasets.load("colored_mnist", data_dir=tmp_path)
    assert domains.class_names == ("6 to 10", "0 to 5")
    images, labels = joined(arrays(train=2000, test=100, classes=11))
    of_image = {image.tobytes(): label for image, label in zip(images, labels)}
    found = np.array([of_image[image.tobytes()] for image in domains.inputs.max(-1)])
    for label in range(11):  # three of four have the label of their half
        assert (domains.labels[found == label].mean() > 0.5) == (label < 5.5)


@pytest.mark.parametrize("name", ["rotated_digits", "colored_digits"])
def test_the_seed_decides_who_is_where(name):
    one, same, other = (datasets.load(name, seed=seed) for seed in (0, 0, 1))
    np.testing.assert_array_equal(one.inputs, same.inputs)
    np.testing.assert_array_equal(one.labels, same.labels)
    assert (one.labels != other.labels).any() and (one.inputs != other.inputs).any()


@pytest.mark.parametrize("name", list(datasets.digits.LOADERS))
def test_summaries_agree_with_the_data(name, tmp_path):
    options = {"data_dir": write(tmp_path, arrays())} if "mnist" in name else {}
    domains, summary = datasets.load(name, **options), datasets.SUMMARIES[name]
    assert (domains.domain_names, domains.class_names) == (summary.domain_names, summary.class_names)
    assert summary.num_examples == (70_000 if "mnist" in name else len(domains.labels))
    assert f"{name}: {summary.num_examples:,} examples" in datasets.describe(name)


# --- scikit-learn's digits -------------------------------------------------------------------------------------------


def test_digits_are_scikit_learns_at_full_range():
    digits = load_digits()
    original = np.rint(digits.images / 16 * 255).astype(np.uint8)
    small = datasets.load("colored_digits", image_size=None)
    assert small.inputs.shape == (1797, 8, 8, 2) and small.inputs.max() == 255
    assert sorted(x.tobytes() for x in small.inputs.max(-1)) == sorted(x.tobytes() for x in original)
    domains = datasets.load("rotated_digits")
    assert domains.inputs.shape == (1797, 28, 28, 1)
    enlarged = {}
    for image, label in zip(original, digits.target):
        view = np.asarray(Image.fromarray(image).resize((28, 28), Image.Resampling.BILINEAR))
        enlarged[view.tobytes()] = label
    for image, label in zip(domains.inputs[domains.domain == 0], domains.labels[domains.domain == 0]):
        assert enlarged[image.tobytes()] == label


def test_digits_without_scikit_learn(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    for name in ("rotated_digits", "colored_digits"):
        assert "`pip install 'fedjax-dg[digits]'`" in message_of(datasets.load, name)


@pytest.mark.parametrize(("size", "shape"), [(32, (32, 32)), (None, (28, 28)), (14, (14, 14))])
def test_images_of_another_size(mnist, size, shape):
    folder, images, _ = mnist
    domains = datasets.load("rotated_mnist", data_dir=folder, image_size=size)
    assert domains.inputs.shape == (3000, *shape, 1)
    views = {np.asarray(Image.fromarray(x).resize(shape, Image.Resampling.BILINEAR)).tobytes() for x in images}
    assert all(image.tobytes() in views for image in domains.inputs[domains.domain == 0])


@pytest.mark.parametrize("size", [0, -3, True])
def test_a_size_that_is_none(size):
    assert f"image_size={size!r} is no positive" in message_of(datasets.load, "rotated_digits", image_size=size)


def test_digits_are_dealt_to_clients():
    federation = federate(datasets.load("colored_digits"), held_out="-90%", stations=2, clients_per_station=2)
    assert federation.inputs.shape[3:] == (28, 28, 2)
    counts = federation.counts().sum((0, 1))
    assert counts[2] == 0 and abs(counts[:2] - 0.8 * 599).max() <= 1
    evaluation = federation.evaluation.examples
    assert int((evaluation.domain == 2).sum()) == 599


# --- networks --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "channels", "flat"), [(28, 1, 256), (32, 2, 400)])
def test_lenet5_on_other_images(size, channels, flat):
    """Against the network written out with Linen's convolution and pool; the flatten's places are those of its groups."""
    backbone = lenet5(5, image_size=size, channels=channels)
    assert backbone.input_shape == (size, size, channels)
    rng = np.random.default_rng(0)
    shapes = jax.eval_shape(backbone.init, jax.random.key(0)).params
    params = jax.tree.map(lambda x: jnp.asarray(0.1 * rng.normal(size=x.shape), jnp.float32), shapes)
    assert params["conv1"]["kernel"].shape == (5, 5, channels, 6) and params["dense1"]["kernel"].shape == (flat, 120)
    images = jnp.asarray(rng.integers(0, 256, (3, size, size, channels)), jnp.uint8)

    def by_the_book(params, x):
        for name, filters in (("conv1", 6), ("conv2", 16)):
            conv = nn.Conv(filters, (5, 5), padding="VALID")
            x = nn.max_pool(nn.relu(conv.apply({"params": params[name]}, x)), (2, 2), (2, 2))
        x = x.reshape(len(x), flat)
        for name in ("dense1", "dense2"):
            x = nn.relu(x @ params[name]["kernel"] + params[name]["bias"])
        return x @ params["head"]["kernel"] + params["head"]["bias"]

    both = jax.jit(lambda p, x: (backbone.apply(Variables(p, {}), x), by_the_book(p, x / 127.5 - 1.0)))
    actual, expected = both(params, images)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-5 * float(abs(expected).max()))
    assert [axis.positions for axis in backbone.groups[1].consumers] == [flat // 16]


def test_residual_nets_read_other_images_without_imagenets_means():
    channels = 2
    backbone = resnet18_cifar(4, image_size=8, channels=channels)
    shapes = jax.eval_shape(backbone.init, jax.random.key(0))
    assert shapes.params["conv1"]["kernel"].shape == (3, 3, channels, 64)
    inputs = jnp.array([0, 255], jnp.uint8).reshape(2, 1, 1, 1) * jnp.ones((1, 8, 8, channels), jnp.uint8)
    np.testing.assert_allclose(backbone.transform(inputs)[:, 0, 0], np.repeat([[-1.0], [1.0]], channels, axis=1))
    assert resnet18_cifar(4).transform is imagenet_pixels


@pytest.mark.parametrize("name", BACKBONES)
def test_a_network_has_the_data_sets_channels_or_says_which_do(name):
    size = (64, 64) if name in ("alexnet", "vgg11", "vgg11_bn") else (28, 28)
    given = RunConfig(backbone=name, dataset="rotated_digits")
    assert build_backbone(given, 4, size, 3).input_shape == (*size, 3)
    if name in ("alexnet", "vgg11", "vgg11_bn"):
        message = message_of(build_backbone, given, 4, size, 1)
        assert message == (
            f"{name} takes images of 3 channels, but those of rotated_digits have 1: choose one of lenet5, resnet18, "
            "resnet18_cifar, resnet50."
        )
    else:
        assert build_backbone(given, 4, size, 1).input_shape == (*size, 1)


@pytest.mark.parametrize("make", [lenet5, resnet18_cifar])
def test_a_network_without_channels(make):
    assert "channels=0 is not positive" in message_of(make, 4, channels=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--dataset", "rotated_mnist", "--held-out", "75"], "--data-dir"),
        (["--dataset", "rotated_digits", "--held-out", "75", "--data-dir", "x"], "leave data_dir out"),
        (["--dataset", "rotated_digits", "--held-out", "90"], "Unknown held-out domain '90'"),
        (["--dataset", "rotated_digits", "--held-out", "75", "--backbone", "vgg11"], "3 channels"),
        (["--dataset", "colored_digits", "--held-out=-90%", "--augment", "fl"], "RGB images [B, H, W, 3]"),
    ],
)
def test_what_does_not_fit_is_one_sentence_on_the_command_line(options, message, tmp_path, capsys):
    assert main(["run", "--out", str(tmp_path / "run"), *options]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1 and not (tmp_path / "run").exists()


@pytest.mark.parametrize(("name", "held_out"), [("rotated_digits", "75"), ("colored_digits", "-90%")])
def test_a_configuration_on_digits_fits_together(name, held_out):
    """Data, network, method and the rule's Grams, by name; a client's images through the network. Nothing is compiled."""
    options = {"stations": 2, "clients_per_station": 2, "rounds": 1, "seeds": 1, "aggregator": "mean,hfedatm"}
    grid = resolve(check(RunConfig(dataset=name, held_out=held_out, **options)))
    (federation,) = grid.federations.values()
    for rule in ("mean", "hfedatm"):
        backbone = round_of(grid, rule).backbone
    variables = jax.eval_shape(backbone.init, jax.random.key(0))
    assert variables.params["conv1"]["kernel"].shape == (5, 5, grid.domains.inputs.shape[-1], 6)
    examples = jax.tree.map(lambda x: x[0, 0], federation.clients)
    forward = jax.eval_shape(backbone.forward, variables, examples.inputs, examples.mask, jax.random.key(0))
    assert forward.logits.shape == (examples.mask.shape[0], len(grid.domains.class_names))
