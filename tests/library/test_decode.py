"""Decoding decides what an upload is."""

import io
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from library_tools import encoded, picture
from odd_images import png
from PIL import Image, ImageFile

from mpic.errors import (
    AnimatedImage,
    BadRequest,
    InvalidImage,
    InvalidText,
    InvalidUpload,
    TooLarge,
)
from mpic.kv.chunk import ChunkKey
from mpic.library.intake.decode import content_of, decode_image, decode_text, sniff
from mpic.library.limits import Limits


@pytest.mark.parametrize("format, options", [("PNG", {}), ("BMP", {}), ("WEBP", {"lossless": True})])
def test_lossless_formats_come_back_exactly(format, options):
    data = encoded(format=format, **options)
    image = decode_image(data)
    assert sniff(data[:32]) == "image"
    assert image.mode == "RGB" and np.array_equal(image, picture())


def test_transparent_pixels_become_white():
    image = Image.new("RGBA", (4, 4), (0, 0, 0, 0))
    image.putpixel((1, 1), (10, 20, 30, 255))
    decoded = decode_image(encoded(image))
    assert decoded.getpixel((0, 0)) == (255, 255, 255)
    assert decoded.getpixel((1, 1)) == (10, 20, 30)


def test_sixteen_bits_keep_their_shades():
    shades = (np.arange(16, dtype=np.uint16) * 4096 + 255).reshape(4, 4)
    decoded = np.asarray(decode_image(encoded(Image.fromarray(shades))))
    assert np.array_equal(decoded[..., 0], shades >> 8)


@pytest.mark.parametrize("format", ["PNG", "WEBP"])
def test_animations_are_refused(format):
    frames = [picture(i) for i in range(3)]
    data = encoded(frames[0], format, save_all=True, append_images=frames[1:])
    with pytest.raises(AnimatedImage):
        decode_image(data)


@pytest.mark.parametrize("format", ["GIF", "TIFF"])
def test_of_several_frames_or_pages_the_first_is_taken(format):
    frames = [Image.new("RGB", (5, 5), color) for color in ((255, 0, 0), (0, 0, 255))]
    data = encoded(frames[0], format, save_all=True, append_images=frames[1:])
    assert sniff(data[:32]) == "image" and decode_image(data).getpixel((0, 0)) == (255, 0, 0)


@pytest.mark.filterwarnings("error::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("side", [7_000, 10_000, 12_000, 100_000])
def test_too_many_pixels_are_refused_before_decoding(side, monkeypatch):
    monkeypatch.setattr(ImageFile.ImageFile, "load", lambda self: pytest.fail("decoded"))
    with pytest.raises(TooLarge):
        decode_image(png(side, side, 8, 2, b""))


def test_the_limit_counts_pixels():
    with pytest.raises(TooLarge, match="16x12"):
        decode_image(encoded(), Limits(image_pixels=16 * 12 - 1))
    assert decode_image(encoded(), Limits(image_pixels=16 * 12))


def test_absurdly_narrow_images_are_refused():
    with pytest.raises(InvalidImage, match="narrow"):
        decode_image(encoded(Image.new("RGB", (1, 300))))


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_damaged_images_are_an_error_of_the_request(data):
    format = data.draw(st.sampled_from(["PNG", "JPEG", "WEBP", "BMP"]))
    raw = bytearray(encoded(format=format))
    for _ in range(data.draw(st.integers(0, 8))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    raw = raw[: data.draw(st.integers(0, len(raw)))]
    with suppress(InvalidImage, TooLarge):
        assert decode_image(bytes(raw)).mode == "RGB"


def test_a_header_that_claims_more_pixels_than_memory_could_hold_is_an_error_of_the_request():
    raw = bytearray(encoded(format="BMP"))
    raw[18:22] = (1 << 28).to_bytes(4, "little")  # the width
    with pytest.raises((InvalidImage, TooLarge)):
        decode_image(bytes(raw[:26]))
    with pytest.raises((InvalidImage, TooLarge)):
        decode_image(bytes(raw))


@pytest.mark.parametrize("format", ["ICO", "PPM", "TGA", "PCX"])
def test_formats_off_the_list_are_refused_even_if_pillow_knows_them(format):
    data = encoded(picture(size=(16, 16)), format)
    with pytest.raises(InvalidImage):
        decode_image(data)
    with pytest.raises(InvalidUpload):
        if sniff(data[:32]) == "text":
            decode_text(data)


@pytest.mark.parametrize(
    "head, name",
    [
        (b"\0\0\0\x20ftypjxl ", "JPEG XL"),
        (b"\0\0\0\x20ftypisom", "MP4"),
        (b"RIFF\0\0\0\0WAVEfmt ", "WAV"),
        *((b"ID3" + version, "MP3") for version in (b"\x02\0", b"\x03\0", b"\x04\0")),
    ],
)
def test_other_known_formats_are_refused_by_name(head, name):
    with pytest.raises(InvalidUpload, match=name):
        sniff(head.ljust(32, b"\0"))


@pytest.mark.parametrize(
    "text",
    [
        "BMW builds cars, and they have headers too",
        "RIFF",
        "GIF is a format",
        "ftyp",
        "%PD",
        "ID3 tags are data",
    ],
)
def test_text_that_starts_like_something_else_is_text(text):
    assert sniff(text.encode()[:32]) == "text"


def test_text_is_strict_utf8():
    assert decode_text("Žluťoučký kůň 🐎\r\n\tend".encode()) == "Žluťoučký kůň 🐎\r\n\tend"
    assert decode_text(b"\xef\xbb\xbfwith a mark") == "with a mark"
    for bad in (b"caf\xe9", "text".encode("utf-16"), b"\xed\xa0\x80", b"a\0b", b"", b" \n\t", b"\xc0\x80"):
        with pytest.raises(InvalidText):
            decode_text(bad)
    with pytest.raises(TooLarge):
        decode_text(b"x" * 11, Limits(text_bytes=10))


RUSSIAN = "Привет, как дела? Сегодня хорошая погода, и мы пошли гулять в парк.\n" * 4
FRENCH = "Hier nous sommes allés dans la forêt, mais nous n'avons rien trouvé car c'était trop sec. Où dîner après ?\n"
JAPANESE = "これは日本語の文章です。今日は天気が良いので、公園へ散歩に行きました。\n" * 10


@pytest.mark.parametrize(
    "encoding, text",
    [
        *(("utf-16", text) for text in ("text", RUSSIAN, JAPANESE * 3000)),
        ("utf-16-be", "\ufeffBefore it a mark."),
        ("utf-32", RUSSIAN),
        ("utf-16-le", "A longer text in English, without a mark.\n" * 4000),
        *(("cp1251", RUSSIAN), ("koi8-r", RUSSIAN), ("cp1252", FRENCH), ("cp1252", FRENCH * 2000)),
        ("cp1254", "Dün arkadaşlarımızla ormana gittik, ama hiçbir şey bulamadık çünkü hava çok kuruydu.\n"),
        ("cp1250", "Včera jsme šli s přáteli do lesa, ale nic jsme nenašli, protože bylo příliš sucho.\n"),
        ("cp1252", "Igår gick vi med våra vänner till skogen för att plocka svamp, men det var för torrt.\n"),
        ("cp1252", "Später aßen wir in der Stadt, für zwölf Euro. Wärmer wäre es „schöner“ gewesen.\n"),
        *(("shift-jis", JAPANESE), ("euc-jp", JAPANESE * 2000)),
    ],
)
def test_texts_in_other_encodings_are_read_as_they_were_written(encoding, text):
    data = text.encode(encoding)
    found = content_of(data)
    assert decode_text(data, encoding=found.format) == text.removeprefix("\ufeff")
    assert found.key == ChunkKey.of_text(text.removeprefix("\ufeff")) and found.format


@pytest.mark.parametrize(
    "data",
    [
        "Straße".encode("latin-1"),  # nothing tells it from Polish or Greek
        b"text \xff\xfe\xfd " * 300,
        bytes(range(256)) * 10,
        b"\xff\xfe" + b"\x00\xd8" * 9,
        b"\xff\xfea",
        "a\0b".encode("utf-16"),
        *(np.random.default_rng(seed).bytes(size) for seed in range(20) for size in (40, 4000, 90_000)),
    ],
)
def test_what_may_be_several_encodings_or_none_is_refused_not_guessed(data):
    with pytest.raises(InvalidText):
        content_of(data)


def test_the_limit_of_a_text_is_one_of_utf8_too():
    data = FRENCH.encode("cp1252")
    with pytest.raises(TooLarge):
        content_of(data, Limits(text_bytes=len(data)))
    assert content_of(data, Limits(text_bytes=len(FRENCH.encode()))).format == "cp1252"


def test_the_users_own_special_tokens_are_text_like_any_other():
    assert decode_text(b"<image> <|im_start|>") == "<image> <|im_start|>"


def test_impossible_limits_are_refused():
    for wrong in ({"image_pixels": 0}, {"image_pixels": 1 << 40}, {"disk_bytes": 0}, {"upload_bytes": -1}):
        with pytest.raises(ValueError):
            Limits(**wrong)


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=64))
def test_any_bytes_are_decoded_or_refused_as_an_error_of_the_request(data):
    try:
        content_of(data)
    except BadRequest as error:
        assert error.status == 400


def test_decoding_reads_only_what_it_is_given():
    data = encoded()
    assert decode_image(data + b"trailing bytes").size == (16, 12)
    assert Image.open(io.BytesIO(data)).size == (16, 12)
