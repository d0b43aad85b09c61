"""What an upload is, decided by decoding it; the client's word for it is never trusted.

Uploads and inline (data URL) images pass through the same functions.
"""

from __future__ import annotations

import io
import warnings
from typing import Literal

from PIL import Image, ImageOps

from mpic.errors import (
    AnimatedImage,
    EmptyUpload,
    ImageTooLarge,
    InvalidImage,
    InvalidText,
    InvalidUpload,
    TooLarge,
    UnsupportedType,
)
from mpic.library.limits import Limits

FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF")
SIGNATURES = {b"\x89PNG": "PNG", b"\xff\xd8": "JPEG", b"GIF8": "GIF"}

FOREIGN = {
    b"%PDF-": "PDF",
    b"PK\x03\x04": "ZIP (or an Office document)",
    b"\xd0\xcf\x11\xe0": "old Office document",
    b"{\\rtf": "RTF",
    b"II*\x00": "TIFF",
    b"MM\x00*": "TIFF",
    b"8BPS": "Photoshop",
    b"\x00\x00\x01\x00": "ICO",
    b"\xff\x0a": "JPEG XL",
    b"\x00\x00\x00\x0cJXL ": "JPEG XL",
    b"\x00\x00\x00\x0cjP  ": "JPEG 2000",
    b"\x1f\x8b": "gzip",
    b"\x7fELF": "program",
    b"OggS": "Ogg audio or video",
    b"fLaC": "FLAC audio",
    b"ID3\x02": "MP3 audio",
    b"ID3\x03": "MP3 audio",
    b"ID3\x04": "MP3 audio",
    b"\x1aE\xdf\xa3": "Matroska or WebM video",
}
BRANDS = {b"avif": "AVIF", b"heic": "HEIC", b"heix": "HEIC", b"mif1": "HEIF"}
RIFF = {b"WAVE": "WAV audio", b"AVI ": "AVI video"}
BMP_HEADERS = frozenset({12, 40, 52, 56, 64, 108, 124})

warnings.filterwarnings(
    "error", category=Image.DecompressionBombWarning
)  # wherever in the process an image is opened


def sniff(head: bytes) -> Literal["image", "text"]:
    """What the first bytes (32 are enough) claim to be.

    Raises:
        UnsupportedType: a known type that is not accepted; the message names it.
    """
    foreign = next((name for magic, name in FOREIGN.items() if head.startswith(magic)), None)
    if head[4:8] == b"ftyp":
        foreign = BRANDS.get(head[8:12], "MP4 or QuickTime")
    if head.startswith(b"RIFF"):
        foreign = RIFF.get(head[8:12])
        if head[8:12] == b"WEBP":
            return "image"
    if foreign is not None:
        raise UnsupportedType(
            f"{foreign} is not accepted; send an image (PNG, JPEG, WebP, BMP) or text in UTF-8",
            param="file",
            type=foreign,
        )
    bmp = head.startswith(b"BM") and int.from_bytes(head[14:18], "little") in BMP_HEADERS
    return "image" if bmp or any(head.startswith(magic) for magic in SIGNATURES) else "text"


def decode_image(data: bytes, limits: Limits | None = None) -> Image.Image:
    """Decode one still image: upright (EXIF orientation applied), RGB, transparency laid over white.

    Args:
        data: the bytes of a PNG, JPEG, WebP, BMP or (if the limits allow it: its first frame) GIF.

    Raises:
        ImageTooLarge: more pixels than the limits allow; known from the header, before anything is decoded.
        InvalidImage: not an image, truncated, damaged, of no size, or absurdly narrow.
        AnimatedImage: more than one frame.
        UnsupportedType: GIF, unless the limits allow it.
    """
    limits = limits or Limits()
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            _admit(image, limits)
            image.load()
            return _to_rgb(ImageOps.exif_transpose(image))
    except (InvalidUpload, TooLarge):
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise ImageTooLarge(f"the image has more than {limits.image_pixels} pixels", param="file") from error
    except Exception as error:  # a decoder fed with hostile bytes raises nearly anything
        what = type(error).__name__
        raise InvalidImage(f"the image cannot be decoded ({what}: {error})"[:300], param="file") from error


def decode_text(data: bytes, limits: Limits | None = None) -> str:
    """Strict UTF-8, an optional byte order mark removed; nothing else is changed.

    Raises:
        TooLarge: more bytes than the limits allow.
        InvalidText: not UTF-8, contains NUL, or holds nothing but white space.
    """
    limits = limits or Limits()
    if len(data) > limits.text_bytes:
        raise TooLarge(f"the text has {len(data)} bytes, the limit is {limits.text_bytes}", param="file")
    try:
        text = data.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise InvalidText(
            f"neither a known image format nor text in UTF-8 (byte {error.start} is not)", param="file"
        ) from error
    if "\0" in text:
        raise InvalidText(f"the text contains a NUL character at position {text.index(chr(0))}", param="file")
    if not text:
        raise EmptyUpload("the upload is empty", param="file")
    if not text.strip():
        raise InvalidText("the text is nothing but white space", param="file")
    return text


def _admit(image: Image.Image, limits: Limits) -> None:
    """Everything that can be refused from the header."""
    width, height = image.size
    if width < 1 or height < 1:
        raise InvalidImage(f"the image has {width}x{height} pixels", param="file")
    if width * height > limits.image_pixels:
        raise ImageTooLarge(
            f"the image has {width}x{height} pixels, the limit is {limits.image_pixels} in all", param="file"
        )
    if max(width, height) > limits.image_aspect * min(width, height):
        raise InvalidImage(f"an image of {width}x{height} pixels is too narrow", param="file")
    if image.format == "GIF":
        if not limits.gif:
            raise UnsupportedType("GIF is not accepted; send PNG, JPEG, WebP or BMP", param="file")
    elif image.format != "MPO" and getattr(
        image, "is_animated", False
    ):  # MPO: a photo and its depth or thumbnail
        raise AnimatedImage("animated images are not accepted; send one frame", param="file")


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I"):  # 16 bits a pixel, in the low half of mode I
        return image.convert("I").point(lambda value: value / 256).convert("L").convert("RGB")
    if image.has_transparency_data:
        layer = image.convert("RGBA")
        white = Image.new("RGBA", layer.size, (255, 255, 255, 255))
        return Image.alpha_composite(white, layer).convert("RGB")
    return image.convert("RGB")
