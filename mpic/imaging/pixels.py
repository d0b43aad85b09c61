"""Decodes with Pillow: checks whether an image is accepted, and yields its pixels strip by strip.

The pixels are upright (the EXIF orientation is applied) and RGB, with transparency laid over white. Each strip is
turned and converted by itself, so that there is never a second copy of the whole image beside Pillow's own.
"""

from __future__ import annotations

import hashlib
import io
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from PIL import ExifTags, Image, ImageFile, ImageMath

from mpic.errors import (
    AnimatedImage,
    ImageTooLarge,
    InvalidImage,
    InvalidUpload,
    NoImageDecoder,
    OutOfMemory,
    TooLarge,
    cut,
)
from mpic.imaging.clip_header import STILL_BRANDS
from mpic.imaging.stored_file import FileBytes, stream

FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF", "AVIF")
FIRST_ONLY = ("GIF", "TIFF", "MPO", "HEIF")
"""Formats in which a file may hold several images (frames, pages, or a photo and its depth map); the first is used."""
INSTALL_HEIC = "pip install 'mpic[heic]'"
STRIP_PIXELS = 1 << 18
Turn = Image.Transpose
TURNS = {
    2: Turn.FLIP_LEFT_RIGHT,
    3: Turn.ROTATE_180,
    4: Turn.FLIP_TOP_BOTTOM,
    5: Turn.TRANSPOSE,
    6: Turn.ROTATE_270,
    7: Turn.TRANSVERSE,
    8: Turn.ROTATE_90,
}
"""EXIF orientation -> the rotation that makes the image upright."""
SIDEWAYS = (Turn.TRANSPOSE, Turn.ROTATE_270, Turn.TRANSVERSE, Turn.ROTATE_90)
FROM_RIGHT = (Turn.TRANSVERSE, Turn.ROTATE_90)
"""Rotations after which the first row of the upright image is the last column of the stored image."""
FROM_BELOW = (Turn.ROTATE_180, Turn.FLIP_TOP_BOTTOM)
STEPS = {"L;2": (3, 85), "L;4": (15, 17)}
"""The largest shade of a grey PNG with 2 or 4 bits a pixel, and how far apart its shades are in 8 bits."""

# applies to all of Pillow in this process
warnings.filterwarnings("error", category=Image.DecompressionBombWarning)


class ImageRules(NamedTuple):
    """Rules by which images are accepted.

    Args:
        pixels: maximum number of pixels of an image.
        aspect: maximum ratio of its longest side to its shortest.
        believed: number of pixels that memory has been reserved for, or 0. An image with more pixels raises
            ``HeaderMismatch``.
    """

    pixels: int
    aspect: float
    believed: int = 0


class HeaderMismatch(Exception):
    """Pillow finds more pixels in a file than its header states."""


class Identity(NamedTuple):
    """The size of an image in pixels, and the digest of its pixels (``PixelDigest``)."""

    width: int
    height: int
    digest: str


class PixelDigest:
    """SHA-256 of an image's size and pixels, computed from strips. It equals ``mpic.kv.chunk.digest`` of the parts
    ``image``, ``RGB:<width>x<height>`` and all bytes of the pixels. Compiled chunks are looked up by this digest, so
    the computation must never change."""

    def __init__(self, width: int, height: int) -> None:
        self._hash = hashlib.sha256()
        for part in (b"image", f"RGB:{width}x{height}".encode()):
            self._hash.update(len(part).to_bytes(8, "little") + part)
        self._hash.update((3 * width * height).to_bytes(8, "little"))

    @classmethod
    def of(cls, image: Image.Image) -> str:
        """Return the digest of an RGB image."""
        found, (width, height) = cls(*image.size), image.size
        rows = max(1, STRIP_PIXELS // max(width, 1))
        for top in range(0, height, rows):
            found.update(image.crop((0, top, width, min(top + rows, height))).tobytes())
        return found.hexdigest()

    def update(self, pixels: bytes) -> None:
        """Add the next rows from the top, three bytes a pixel."""
        self._hash.update(pixels)

    def hexdigest(self) -> str:
        return self._hash.hexdigest()


class Upright:
    """A decoded image that is read in strips.

    Attributes:
        size: width and height of the upright image.
    """

    def __init__(self, image: Image.Image) -> None:
        self._image = image
        self._turn = _turn(image)
        width, height = image.size
        self.size = (height, width) if self._turn in SIDEWAYS else (width, height)

    def strips(self, mode: str = "RGB", multiple: int = 1) -> Iterator[Image.Image]:
        """Yield the image from top to bottom.

        Args:
            mode: RGB, or RGBA to keep transparency.
            multiple: number that divides the height of every strip but the last.
        """
        width, height = self.size
        rows = max(1, STRIP_PIXELS // width // multiple) * multiple
        for top in range(0, height, rows):
            strip = self._image.crop(self._source(top, min(top + rows, height)))
            if self._turn is not None:
                strip = strip.transpose(self._turn)
            yield converted(strip, mode)

    def _source(self, top: int, bottom: int) -> tuple[int, int, int, int]:
        """Return the box in the stored image that holds rows of the upright one."""
        width, height = self._image.size
        if self._turn in SIDEWAYS:
            if self._turn in FROM_RIGHT:
                top, bottom = width - bottom, width - top
            return top, 0, bottom, height
        if self._turn in FROM_BELOW:
            top, bottom = height - bottom, height - top
        return 0, top, width, bottom


@contextmanager
def opened(data: FileBytes, rules: ImageRules, draft: int = 0) -> Iterator[Upright]:
    """Decode one still image.

    Args:
        data: the bytes of a PNG, JPEG, WebP, BMP, AVIF, HEIC, GIF or TIFF; of the last two the first frame or page is
            decoded.
        draft: side in pixels that is enough for the caller, so that a JPEG may be decoded at a reduced size. 0: full
            size.

    Raises:
        ImageTooLarge: it has more pixels than the rules allow according to its header; nothing is decoded.
        InvalidImage: it is not an image, is truncated or damaged, has no pixels, or is absurdly narrow.
        AnimatedImage: it has more than one frame.
        NoImageDecoder: the package that decodes it is not installed.
        OutOfMemory: there is not enough memory for it now.
        HeaderMismatch: it has more pixels than ``rules.believed``.
    """
    try:
        with Image.open(stream(data), formats=_formats(data)) as image:
            _admit(image, rules)
            if draft:
                image.draft(None, (draft, draft))
            _load(image)
            yield Upright(image)
    except (InvalidUpload, TooLarge, OutOfMemory, HeaderMismatch):
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise ImageTooLarge(f"the image has more than {rules.pixels} pixels", param="file") from error
    except Exception as error:  # a decoder that reads hostile bytes may raise almost any exception
        if isinstance(error, MemoryError) or "out of memory" in str(error):  # the message of Pillow's codecs
            raise OutOfMemory("the server does not have enough memory to decode the image now") from error
        raise InvalidImage(f"the image cannot be decoded{said_by(error)}", param="file") from error


def _formats(data: FileBytes) -> tuple[str, ...]:
    """Return the formats that a file may have. Register the decoder of HEIC if it needs that."""
    if data[4:8] != b"ftyp":
        return FORMATS
    kind = STILL_BRANDS.get(data[8:12])
    if kind == "AVIF":
        from PIL import AvifImagePlugin

        # one thread, because each takes address space, which is limited
        AvifImagePlugin.DEFAULT_MAX_THREADS = 1  # ty: ignore[invalid-assignment] (its type is its value)
    elif kind in ("HEIC", "HEIF"):
        try:
            import pillow_heif
        except ImportError as error:
            raise NoImageDecoder(
                f"{kind} needs a decoder that is not installed here: {INSTALL_HEIC}", param="file"
            ) from error
        pillow_heif.options.DECODE_THREADS = 1  # ty: ignore[invalid-assignment] (as above)
        pillow_heif.register_heif_opener(thumbnails=False)
        return ("HEIF",)
    return FORMATS


def said_by(error: Exception) -> str:
    """Return a decoder's error message in brackets, or nothing if the message is about the decoder's own objects."""
    words = cut(" ".join(str(error).split()))
    return f" ({words})" if words and not re.search("<.*>|0x|Error|None", words) else ""


def identify(data: FileBytes, rules: ImageRules) -> Identity:
    """Return the size and the digest of an image. Raise as ``opened``."""
    with opened(data, rules) as upright:
        found = PixelDigest(*upright.size)
        for strip in upright.strips():
            found.update(strip.tobytes())
        return Identity(*upright.size, found.hexdigest())


def decode(data: FileBytes, rules: ImageRules) -> Image.Image:
    """Return the image itself. Raise as ``opened``."""
    with opened(data, rules) as upright:
        image, top = Image.new("RGB", upright.size), 0
        for strip in upright.strips():
            image.paste(strip, (0, top))
            top += strip.height
        return image


def thumbnail(
    data: FileBytes, rules: ImageRules, side: int, least: int = 0, transparent: bool = False
) -> bytes:
    """Return a small PNG of an image.

    Args:
        side: longest side of the result in pixels.
        least: an image whose longest side is shorter is enlarged to this length, so that its pixels are visible.
        transparent: keep transparency; otherwise the image is laid over white.

    Raises:
        The errors of ``opened``.
    """
    mode = "RGBA" if transparent else "RGB"
    with opened(data, rules, draft=2 * side) as upright:
        width, height = upright.size
        by = max(1, min(max(width, height) // (2 * side), width, height))
        small = Image.new(mode, (-(-width // by), -(-height // by)))
        top = 0
        for strip in upright.strips(mode, by):
            strip = strip.reduce(by)
            small.paste(strip, (0, top))
            top += strip.height
    if max(width, height) < least:
        scale = least / max(width, height)
        size = (max(1, round(width * scale)), max(1, round(height * scale)))
        small = small.resize(size, Image.Resampling.NEAREST)
    small.thumbnail((side, side))
    out = io.BytesIO()
    small.save(out, "PNG")
    return out.getvalue()


def _admit(image: Image.Image, rules: ImageRules) -> None:
    """Refuse an image that its header shows to be unacceptable."""
    width, height = image.size
    if width < 1 or height < 1:
        raise InvalidImage(f"the image has {width}x{height} pixels", param="file")
    if width * height > rules.pixels:
        raise too_large(width, height, rules)
    if 0 < rules.believed < width * height:
        raise HeaderMismatch
    if max(width, height) > rules.aspect * min(width, height):
        raise InvalidImage(f"an image of {width}x{height} pixels is too narrow", param="file")
    if image.format not in FIRST_ONLY and getattr(image, "is_animated", False):
        raise AnimatedImage("animated images are not accepted; send one frame", param="file")


def too_large(width: int, height: int, rules: ImageRules) -> ImageTooLarge:
    return ImageTooLarge(
        f"the image has {width}x{height} pixels, the limit is {rules.pixels} pixels in all", param="file"
    )


def _load(image: ImageFile.ImageFile) -> None:
    """Decode the pixels. Pillow converts PNGs to 8 bits a channel, except 16-bit grey ones, but leaves the transparent
    colour as stored in the file; convert that to 8 bits, too."""
    raw = image.tile[0].args if image.format == "PNG" and image.tile else ""
    image.load()
    key = image.info.get("transparency")
    if raw in STEPS and isinstance(key, int):
        most, step = STEPS[raw]
        image.info["transparency"] = (key & most) * step
    elif raw == "RGB;16B" and isinstance(key, tuple):
        image.info["transparency"] = tuple(value >> 8 for value in key)


def _turn(image: Image.Image) -> Turn | None:
    """Return the rotation that makes an image upright; None if there is none, or its EXIF data cannot be read."""
    try:
        return TURNS.get(image.getexif().get(ExifTags.Base.Orientation, 1))
    except MemoryError:
        raise
    except Exception:  # a reader of hostile bytes may raise almost any exception
        return None


def converted(image: Image.Image, mode: str = "RGB") -> Image.Image:
    """Return an image in RGB, laid over white where it is transparent, or in RGBA."""
    if image.mode.startswith("I"):
        image = _in_8_bits(image)
    if not image.has_transparency_data:
        image = image.convert("RGB")
        return image if mode == "RGB" else image.convert(mode)
    layer = image.convert("RGBA")
    if mode == "RGBA":
        return layer
    white = Image.new("RGBA", layer.size, (255, 255, 255, 255))
    return Image.alpha_composite(white, layer).convert("RGB")


def _in_8_bits(image: Image.Image) -> Image.Image:
    """Return a grey image of 16 bits a pixel, which Pillow would cut off at 255, in L or LA."""
    wide = image.convert("I")
    shades = wide.point(lambda value: value / 256).convert("L")
    key = shades.info.pop("transparency", None)
    if key is not None:
        seen = ImageMath.lambda_eval(
            lambda args: args["convert"]((args["wide"] != key) * 255, "L"), wide=wide
        )
        shades.putalpha(seen)
    return shades
