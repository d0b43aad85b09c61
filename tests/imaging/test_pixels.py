"""Every path gives the pixels, the key and the refusal that decoding an image at once gives."""

import io
import struct
import sys
from contextlib import suppress

import numpy as np
import pytest
from odd_images import FILES, SHADES, flat_png, photo, saved
from PIL import Image, ImageOps

from mpic.errors import AnimatedImage, ImageTooLarge, InvalidImage, MPICError, NoImageDecoder
from mpic.imaging import image_header, pixels
from mpic.imaging.pixels import ImageRules, PixelDigest
from mpic.kv.chunk import ChunkKey, digest
from mpic.library import Limits, decode_image
from mpic.library.intake.decode import image_key

RULES = ImageRules(40_000_000, 200.0)
BUDGET = 1 << 30


def at_once(data, rules=RULES):
    """Decode in one piece, without regard to memory, as the reference for strips."""
    try:
        with Image.open(io.BytesIO(data), formats=pixels.FORMATS) as image:
            width, height = image.size
            if width < 1 or height < 1:
                raise InvalidImage("")
            if width * height > rules.pixels:
                raise ImageTooLarge("")
            if max(width, height) > rules.aspect * min(width, height):
                raise InvalidImage("")
            if image.format not in ("GIF", "TIFF", "MPO") and getattr(image, "is_animated", False):
                raise AnimatedImage("")
            image.load()
            with suppress(SyntaxError, struct.error):  # EXIF data that nobody can read
                image = ImageOps.exif_transpose(image)
            if image.mode.startswith("I"):
                return image.convert("I").point(lambda value: value / 256).convert("L").convert("RGB")
            if image.has_transparency_data:
                layer = image.convert("RGBA")
                white = Image.new("RGBA", layer.size, (255, 255, 255, 255))
                return Image.alpha_composite(white, layer).convert("RGB")
            return image.convert("RGB")
    except MPICError:
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise ImageTooLarge("") from error
    except Exception as error:
        raise InvalidImage("") from error


def outcome(decode, data, rules=RULES):
    """Return size and pixels of an image, or the code with which it is refused."""
    try:
        image = decode(data, rules)
    except MPICError as error:
        return error.code
    assert image.mode == "RGB"
    return image.size, image.tobytes()


@pytest.fixture
def few_rows(monkeypatch):
    """Make strips of a few rows, so that small pictures have many."""
    monkeypatch.setattr(pixels, "STRIP_PIXELS", 200)


@pytest.mark.parametrize("name", FILES)
def test_strips_give_what_decoding_at_once_gives(name, few_rows):
    assert outcome(pixels.decode, FILES[name]) == outcome(at_once, FILES[name])


@pytest.mark.parametrize("name", FILES)
def test_a_worker_gives_what_decoding_at_once_gives(name, decoder, monkeypatch):
    monkeypatch.setattr(image_header.ImageHeader, "small", lambda self, size: False)
    data = FILES[name]
    expected = outcome(at_once, data)
    assert outcome(lambda data, rules: decoder.decode(data, rules, BUDGET), data) == expected
    try:
        found = decoder.identify(data, RULES, BUDGET)
    except MPICError as error:
        assert error.code == expected and error.param == "file"
    else:
        image = Image.frombytes("RGB", *expected)
        assert (found.width, found.height) == image.size and found.digest == ChunkKey.of_image(image).digest


@pytest.mark.parametrize("name", FILES)
def test_the_path_a_request_takes_gives_what_decoding_at_once_gives(name):
    data, limits = FILES[name], Limits()
    expected = outcome(at_once, data)
    assert outcome(lambda data, rules: decode_image(data, limits), data) == expected
    if not isinstance(expected, str):
        assert image_key(data, limits) == ChunkKey.of_image(Image.frombytes("RGB", *expected))


@pytest.mark.parametrize("size", [(61, 43), (1700, 1300)])
def test_a_photo_of_a_telephone_is_decoded_in_another_process(size, decoder):
    pillow_heif = pytest.importorskip("pillow_heif")
    out = io.BytesIO()
    pillow_heif.from_pillow(photo(size)).save(out, quality=100, chroma=444)
    data = out.getvalue()
    header = image_header.read_header(data)
    assert header.format == "HEIF" and header.pixels >= size[0] * size[1], "stored in whole blocks"
    decoded = decoder.decode(data, RULES, BUDGET)
    assert decoded.size == size and decoder.in_process.most_running == 0
    assert np.abs(np.asarray(decoded, int) - np.asarray(photo(size), int)).mean() < 4
    assert "HEIF" not in Image.OPEN, "nothing is registered in this process"
    with pytest.raises(InvalidImage):
        decoder.identify(data[: len(data) // 2], RULES, BUDGET)


def test_a_photo_whose_decoder_is_missing_is_refused_by_the_command_that_installs_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "pillow_heif", None)
    with pytest.raises(NoImageDecoder, match=r"HEIC needs .* pip install 'mpic\[heic\]'"):
        pixels.decode(b"\0\0\0\x18ftypheic" + bytes(40), RULES)


@pytest.mark.parametrize("name", ["gif", "tiff RGB", "avif", "avif RGBA", "tiff of two pages"])
def test_formats_of_large_libraries_are_decoded_in_another_process_by_the_size_in_their_header(name, decoder):
    assert image_header.read_header(FILES[name])[1:3] == photo().size
    decoder.identify(FILES[name], RULES, BUDGET)
    assert (decoder.workers.started, decoder.in_process.most_running) == (1, 0)


def test_keys_of_images_never_change():
    """Compiled chunks of existing libraries are found by these."""
    values = np.arange(300 * 200 * 3, dtype=np.uint32).reshape(200, 300, 3).astype(np.uint8)
    keys = (ChunkKey.of_image(Image.fromarray(values)), image_key(saved(photo(), "PNG")))
    assert [key.digest for key in (*keys, image_key(flat_png(1700)))] == [
        "0f6b22761cca7d8c53ed214da491bee3dff71017bc8f8969634cd82314478b27",
        "46c7b842aeccc1fb33366d435688aa9ecefb9a770c470d42d149ddb44ba91fa3",
        "4ba8cf8290e04e152a65a00555a75e65f25ed7700a89482dfcb89a1ada3fa420",
    ]


def test_a_key_is_the_digest_of_size_and_pixels():
    image = photo((700, 500))
    assert ChunkKey.of_image(image).digest == digest("image", "RGB:700x500", image.tobytes())
    assert PixelDigest.of(image) == ChunkKey.of_image(image).digest
    with pytest.raises(ValueError, match="RGB"):
        ChunkKey.of_image(image.convert("L"))


@pytest.mark.parametrize("transparent", [False, True])
@pytest.mark.parametrize("name", ["png RGBA", "jpeg turned 6", "jpeg CMYK", "png P with alpha", "bmp RGB"])
def test_thumbnails_look_like_the_image(name, transparent):
    whole = at_once(FILES[name])
    small = Image.open(io.BytesIO(pixels.thumbnail(FILES[name], RULES, 16, transparent=transparent)))
    assert max(small.size) == 16 and small.mode == ("RGBA" if transparent else "RGB")
    white = Image.new("RGBA", small.size, "white")
    seen = Image.alpha_composite(white, small.convert("RGBA")).convert("RGB")
    expected = whole.resize(small.size, Image.Resampling.BOX)
    assert np.abs(np.asarray(seen, float) - np.asarray(expected, float)).mean() < 12


@pytest.mark.parametrize("name", SHADES)
def test_every_kind_of_png_has_the_pixels_that_the_standard_gives_it(name, few_rows):
    """Samples are brought to 8 bits, and the pixels of one colour are transparent."""
    data, expected = SHADES[name]
    over_white = np.where(expected[..., 3:] == 0, 255, expected[..., :3])
    assert np.array_equal(np.asarray(pixels.decode(data, RULES)), over_white)
    side = max(expected.shape)
    small = Image.open(io.BytesIO(pixels.thumbnail(data, RULES, side, transparent=True)))
    assert np.array_equal(np.asarray(small), expected)
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(pixels.thumbnail(data, RULES, side)))), over_white)


@pytest.mark.parametrize("name", [name for name in FILES if not name.startswith("jpeg")])
def test_a_thumbnail_at_full_size_has_the_pixels_of_the_image(name, few_rows):
    expected = outcome(pixels.decode, FILES[name])
    if isinstance(expected, str):
        with pytest.raises(MPICError) as refused:
            pixels.thumbnail(FILES[name], RULES, 600)
        assert refused.value.code == expected
        return
    small = Image.open(io.BytesIO(pixels.thumbnail(FILES[name], RULES, max(expected[0]))))
    assert (small.size, small.tobytes()) == expected
    clear = Image.open(io.BytesIO(pixels.thumbnail(FILES[name], RULES, max(expected[0]), transparent=True)))
    white = Image.new("RGBA", clear.size, "white")
    assert Image.alpha_composite(white, clear).convert("RGB").tobytes() == expected[1]


@pytest.mark.parametrize(
    "exif", [b"Exif\0\0garbage", b"Exif\0\0II", b"Exif\0\0MM\0*\0\0\0\x08\xff\xff", b"\0" * 9, b"II*\0\1"]
)
@pytest.mark.parametrize("format", ["PNG", "WEBP", "JPEG"])
def test_exif_data_that_cannot_be_read_means_no_orientation(format, exif):
    options = {"lossless": True} if format == "WEBP" else {}
    plain = saved(photo(), format, **options)
    assert outcome(pixels.decode, saved(photo(), format, exif=exif, **options)) == outcome(
        pixels.decode, plain
    )
    assert pixels.thumbnail(plain, RULES, 16)


def test_a_thumbnail_of_a_tiny_image_is_shown_larger_only_when_asked():
    data = saved(Image.new("RGB", (4, 2), "red"), "PNG")
    assert Image.open(io.BytesIO(pixels.thumbnail(data, RULES, 16))).size == (4, 2)
    assert Image.open(io.BytesIO(pixels.thumbnail(data, RULES, 16, least=8))).size == (8, 4)


HONEST = [name for name in FILES if name.split()[0] in ("png", "jpeg", "webp", "bmp", "one", "wider")]


@pytest.mark.parametrize("name", HONEST)
def test_the_header_of_an_honest_file_has_its_size(name):
    with Image.open(io.BytesIO(FILES[name])) as image:
        claim = image_header.read_header(FILES[name])
        assert (claim.width, claim.height) == image.size
        assert claim.format == image.format.replace("MPO", "JPEG")


def test_files_that_cost_more_than_their_size_are_not_decoded_in_the_servers_process():
    many = ("many iTXt", "many pieces", "many pieces behind", "many scans")
    for name in ("zTXt bomb", "iTXt bomb", *many, "two headers"):
        assert not image_header.read_header(FILES[name]).small(len(FILES[name])), name
    assert not image_header.read_header(FILES["BMP in run lengths"]).small(2000)
    for name in ("png RGBA", "jpeg", "jpeg progressive", "webp", "bmp RGB"):
        assert image_header.read_header(FILES[name]).small(len(FILES[name])), name
