"""Decoding: every kind of file that the sets hold comes out as RGB, and what does not is refused by name."""

import io
import pickle
import struct
import threading
import warnings
import zlib

import numpy as np
import pytest
from PIL import Image
from trees import picture, write

from fedjax_dg.datasets.images import Images, UnreadableImage, decode, quietly
from fedjax_dg.datasets.reading import read, read_all

PIXELS = np.random.default_rng(0).integers(0, 256, (8, 8, 3), np.uint8)


def saved(tmp_path, image, name="image.png", **options):
    path = tmp_path / name
    image.save(path, **options)
    return str(path)


def gray(values, mode):
    """A picture with these values in all rows."""
    return Image.fromarray(np.tile(np.asarray(values), (8, 1)).astype(mode))


def test_rgb_is_kept_as_it_is(tmp_path):
    for name in ("a.png", "a.bmp", "a.ppm", "a.tif", "a.webp"):
        path = saved(tmp_path, Image.fromarray(PIXELS), name, **({"lossless": True} if name == "a.webp" else {}))
        np.testing.assert_array_equal(decode(path, 8), PIXELS)
        assert decode(path, 8).dtype == np.uint8


def test_resizing_is_bilinear_with_antialiasing_on_both_sides(tmp_path):
    """Halved: weights 1/8, 3/8, 3/8, 1/8 of a triangle of twice the width, by one side and then by the other."""
    pixels = np.zeros((8, 16, 3), np.uint8)
    pixels[:, 7:9] = 200
    out = decode(saved(tmp_path, Image.fromarray(pixels)), 8)
    assert out.shape == (8, 8, 3)
    np.testing.assert_array_equal(out[..., 0], np.tile([0, 0, 0, 100, 100, 0, 0, 0], (8, 1)))


@pytest.mark.parametrize("transparency", [None, 0, bytes([0, 128, 255])])
def test_palette_gives_its_colours(tmp_path, transparency):
    image = Image.fromarray(np.tile([0, 1, 2, 2], (8, 2)).astype(np.uint8), "L")
    image = Image.frombytes("P", (8, 8), image.tobytes())
    image.putpalette([255, 0, 0, 0, 200, 0, 10, 20, 30])
    options = {} if transparency is None else {"transparency": transparency}
    out = decode(saved(tmp_path, image, **options), 8)
    np.testing.assert_array_equal(out[0, :4], [[255, 0, 0], [0, 200, 0], [10, 20, 30], [10, 20, 30]])


def test_transparency_is_dropped_and_not_blended(tmp_path):
    alpha = np.random.default_rng(1).integers(0, 256, (8, 8, 1), np.uint8)
    path = saved(tmp_path, Image.fromarray(np.concatenate([PIXELS, alpha], -1)))
    np.testing.assert_array_equal(decode(path, 8), PIXELS)
    path = saved(tmp_path, Image.fromarray(np.concatenate([PIXELS[..., :1], alpha], -1)))
    np.testing.assert_array_equal(decode(path, 8), np.repeat(PIXELS[..., :1], 3, -1))
    path = saved(tmp_path, Image.fromarray(PIXELS), transparency=(1, 2, 3))
    np.testing.assert_array_equal(decode(path, 8), PIXELS)


def test_greyscale_and_black_and_white(tmp_path):
    path = saved(tmp_path, Image.fromarray(PIXELS[..., 0]))
    np.testing.assert_array_equal(decode(path, 8), np.repeat(PIXELS[..., :1], 3, -1))
    bits = PIXELS[..., 0] > 127
    out = decode(saved(tmp_path, Image.fromarray(bits), "b.png"), 8)
    np.testing.assert_array_equal(out, np.repeat(255 * bits[..., None].astype(np.uint8), 3, -1))


@pytest.mark.parametrize("name", ["a.png", "a.tif", "a.pgm"])
def test_greyscale_of_16_bits_is_scaled(tmp_path, name):
    values = np.asarray([0, 128, 129, 257, 32767, 32896, 65406, 65535])
    path = saved(tmp_path, gray(values, np.uint16), name)
    expected = np.rint(values / 65535 * 255).astype(int)
    assert expected.tolist() == [0, 0, 1, 1, 127, 128, 254, 255]
    np.testing.assert_array_equal(decode(path, 8), np.tile(expected[:, None], (8, 1, 3)))


def test_big_endian_greyscale_of_16_bits(tmp_path):
    image = Image.frombytes("I;16B", (8, 8), np.full(64, 51400, ">u2").tobytes())
    assert (decode(saved(tmp_path, image, "a.tif"), 8) == 200).all()


@pytest.mark.parametrize(("mode", "word"), [(np.int32, "mode I"), (np.float32, "mode F")])
def test_pixels_of_32_bits_are_refused(tmp_path, mode, word):
    path = saved(tmp_path, gray(range(8), mode), "a.tif")
    with pytest.raises(UnreadableImage, match=f"a.tif cannot be read as an image .*{word}, whose white is not known"):
        decode(path, 8)


def test_cmyk(tmp_path):
    image = Image.new("CMYK", (8, 8), (0, 255, 0, 0))
    out = decode(saved(tmp_path, image, "a.tif"), 8)
    np.testing.assert_array_equal(out, np.broadcast_to([255, 0, 255], (8, 8, 3)))
    out = decode(saved(tmp_path, image, "a.jpg", quality=100), 8)
    assert np.abs(out.astype(int) - [255, 0, 255]).max() <= 3


def test_progressive_jpeg_and_a_rotation_that_is_ignored(tmp_path):
    pixels = np.zeros((16, 8, 3), np.uint8)
    pixels[:8] = 255
    exif = Image.Exif()
    exif[0x0112] = 6  # turn right
    for progressive in (False, True):
        path = saved(tmp_path, Image.fromarray(pixels), "a.jpg", progressive=progressive, exif=exif, quality=95)
        out = decode(path, 16)
        assert (out[:7] > 240).all() and (out[9:] < 15).all()


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "BMP", "TIFF", "WEBP", "PPM"])
def test_truncated_files_are_refused(tmp_path, kind):
    content = picture(1, kind, 64)
    for kept in (0, 1, 10, len(content) // 2, len(content) - 40):
        path = write(tmp_path / "a.jpg", content[:kept])
        with pytest.raises(UnreadableImage) as caught:
            decode(str(path), 8)
        message = str(caught.value)
        assert message.startswith(f"{path} cannot be read as an image (") and "\n" not in message
        assert message.endswith("): replace it or remove it.") and caught.value.__suppress_context__


@pytest.mark.parametrize("content", [b"no image", b"<svg></svg>"])
def test_other_files_are_refused(tmp_path, content):
    with pytest.raises(UnreadableImage, match="a.png cannot be read as an image .it is none.: replace"):
        decode(str(write(tmp_path / "a.png", content)), 8)
    with pytest.raises(UnreadableImage, match="none.png cannot be read as an image .No such file or directory."):
        decode(str(tmp_path / "none.png"), 8)
    with pytest.raises(UnreadableImage):
        decode(str(tmp_path), 8)


def solid_png(width, height):
    """A black PNG of one bit a pixel, small however many pixels it has."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows = zlib.compress(bytes(height * (1 + (width + 7) // 8)), 1)
    header = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def test_large_images(tmp_path, monkeypatch):
    """Pillow warns beyond its limit, which would be an error here, and refuses beyond twice that."""
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10_000)
    path = str(write(tmp_path / "a.png", solid_png(100, 150)))
    assert (decode(path, 8) == 0).all()
    path = str(write(tmp_path / "b.png", solid_png(100, 250)))
    with pytest.raises(UnreadableImage, match="b.png cannot be read as an image .*25000 pixels"):
        decode(path, 8)


def test_pillows_warnings_are_not_shown_and_all_others_are(tmp_path):
    exif = b"Exif\0\0MM\0*\0\0\0\x08\0\x02\x01\x1a\0\x05\0\0\0\x01\0\0\xff\xff"  # cut off in its directory
    out = io.BytesIO()
    Image.fromarray(PIXELS).save(out, "JPEG", exif=exif)
    path = str(write(tmp_path / "a.jpg", out.getvalue()))
    with pytest.warns(UserWarning), Image.open(path) as image:
        image.getexif().get(0x0128)
    before = list(warnings.filters)
    assert decode(path, 8).shape == (8, 8, 3)
    with quietly(), pytest.raises(UserWarning, match="another"):
        warnings.warn("another", UserWarning, stacklevel=1)
    assert warnings.filters == before


def test_threads_leave_the_filters_as_they_were():
    before = list(warnings.filters)
    inside, leave = threading.Event(), threading.Event()

    def hold():
        with quietly():
            inside.set()
            leave.wait()

    thread = threading.Thread(target=hold)
    with quietly():
        thread.start()
        inside.wait()
    leave.set()
    thread.join()
    assert warnings.filters == before


def test_images_are_an_array(tmp_path):
    for number in range(5):
        write(tmp_path / "deep" / f"{number}.png", picture(number))
    images = Images(str(tmp_path), tuple(f"deep/{number}.png" for number in range(5)), 8)
    every = np.stack([np.asarray(Image.open(tmp_path / file)) for file in images.files])
    assert images.shape == (5, 8, 8, 3) and len(images) == 5 and images.dtype == np.uint8
    masked = np.array([True, False, True, True, False])
    for rows in (slice(1, 4), slice(None, None, -2), [3, 3, 0], np.array([4]), masked, np.zeros(0, int)):
        np.testing.assert_array_equal(images[rows], every[rows])
    np.testing.assert_array_equal(images[-1], every[-1])
    copy = pickle.loads(pickle.dumps(images))
    np.testing.assert_array_equal(copy[2], every[2])
    np.testing.assert_array_equal(read_all(images, size=2), every)


def test_a_bad_file_among_those_read_ahead_is_named(tmp_path):
    for number in range(8):
        write(tmp_path / f"{number}.png", picture(number) if number != 5 else picture(5)[:50])
    images = Images(str(tmp_path), tuple(f"{number}.png" for number in range(8)), 8)
    blocks = read(images, list(np.arange(8).reshape(4, 2)))
    for number in range(2):
        np.testing.assert_array_equal(next(blocks), images[2 * number : 2 * number + 2])
    with pytest.raises(UnreadableImage, match="5.png cannot be read as an image"):
        list(blocks)
