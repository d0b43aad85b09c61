"""Headers of image files, read before a decoder sees the file, to estimate the memory and time of decoding.

The header alone never gets an image accepted or refused, with one exception: a header that states too many pixels is
believed.
"""

from __future__ import annotations

import math
import re
from typing import NamedTuple

from mpic.imaging.stored_file import WINDOW, FileBytes

MiB = 1 << 20
SMALL_PIXELS = 2 << 20
SMALL_BYTES = 4 * MiB
"""Images up to this many pixels and bytes are decoded in the server's own process."""
LARGE_PIXELS = 4 << 20
"""Above this many pixels, freed memory is given back to the system after an image has been used."""
MANY_PARTS = 1000
"""A PNG with more chunks or a JPEG with more segments counts as odd, because Pillow walks them in Python."""
MANY_SCANS = 32
"""A JPEG with more scans counts as odd, because each covers the whole image, however few bytes it has."""
MOST_SCANS, SCANNED_PIXELS = 256, 1 << 30
"""A JPEG with more scans, or more pixels over all scans, is refused: a file of 300 KB can have a thousand scans, which
take minutes. Programs write about ten scans, which is 400 million pixels for the largest image."""
SCAN_MARKERS = 16
"""Maximum markers per scan of a JPEG; a scan has two or three. A JPEG with more is treated like one with too many
scans, because each marker is a step in Python."""
MUCH_EXIF = 16 << 10
"""EXIF data of n bytes can unpack to n * n / 12 bytes, because each entry may point at all of the data."""

SIZES, HEIF_PROPERTIES = re.compile(rb"ispe"), 64 << 10
"""The name of the size property in an AVIF or HEIC, and the number of bytes of the file that are searched for it."""
MARKER = re.compile(rb"\xff[^\x00\xff\xd0-\xd7]", re.S)
"""A JPEG marker other than those inside a scan."""

PER_PIXEL = {"PNG": 4, "JPEG": 4, "WEBP": 16, "BMP": 4, "GIF": 8, "TIFF": 16, "AVIF": 16, "HEIF": 24}
"""Bytes per pixel that decoding takes: Pillow's own four plus those that the format's library holds."""
SLACK = 16 * MiB


class ImageHeader(NamedTuple):
    """The header of an image file, as far as it could be read.

    Args:
        format: Pillow's name of the format, or "" for a format that is not accepted.
        width, height: in pixels; 0 if they could not be read.
        per_pixel: bytes of memory that decoding takes for each pixel.
        odd: decoding may take far more work than an image of this size should.
        scans: how often decoding passes over the pixels; counting ends above ``MOST_SCANS``.
    """

    format: str = ""
    width: int = 0
    height: int = 0
    per_pixel: int = max(PER_PIXEL.values())
    odd: bool = False
    scans: int = 1

    @property
    def costly(self) -> bool:
        """Return whether decoding would take far more work than any real picture needs."""
        return self.scans > MOST_SCANS or self.scans * self.pixels > max(SCANNED_PIXELS, 16 * self.pixels)

    @property
    def pixels(self) -> int:
        return self.width * self.height

    @property
    def known(self) -> bool:
        return self.pixels > 0

    def small(self, size: int) -> bool:
        """Return whether decoding a file of ``size`` bytes takes less time than sending it to another process."""
        return self.known and not self.odd and self.pixels <= SMALL_PIXELS and size <= SMALL_BYTES

    def bytes_needed(self, held: int, most_pixels: int) -> int:
        """Estimate the bytes of memory that decoding takes.

        Args:
            held: bytes of memory that the content of the file takes.
            most_pixels: maximum accepted pixels; assumed for a file whose header has no size.
        """
        pixels = min(self.pixels, most_pixels) if self.known else most_pixels
        return pixels * self.per_pixel + held + SLACK


def read_header(data: FileBytes) -> ImageHeader:
    """Read the header of a file; an empty one if it cannot be read."""
    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        return _png(data)
    if data.startswith(b"\xff\xd8"):
        return _jpeg(data)
    if data.startswith(b"RIFF") and data[8:12] == b"WEBP":
        return _webp(data)
    if data.startswith(b"BM"):
        return _bmp(data)
    if data.startswith(b"GIF8"):
        return ImageHeader("GIF", _little(data, 6, 2), _little(data, 8, 2), PER_PIXEL["GIF"], odd=True)
    if data.startswith((b"II*\0", b"MM\0*")):
        return _tiff(data)
    if data[4:8] == b"ftyp":
        return _heif(data)
    return ImageHeader()


def _png(data: FileBytes) -> ImageHeader:
    if len(data) < 33 or data[12:16] != b"IHDR":
        return ImageHeader()
    width, height = _big(data, 16, 4), _big(data, 20, 4)
    at, odd = 8, True
    for _ in range(MANY_PARTS):
        kind, size = data[at + 4 : at + 8], _big(data, at, 4)
        if kind in (b"zTXt", b"iTXt") or (kind == b"IHDR" and at > 8):
            break  # compressed text is unpacked before the pixels are
        if kind in (b"eXIf", b"tEXt") and size > MUCH_EXIF:
            break
        at += 12 + size
        if kind == b"IEND" or at >= len(data):
            odd = False
            break
    return ImageHeader("PNG", width, height, PER_PIXEL["PNG"], odd)


def _jpeg(data: FileBytes) -> ImageHeader:
    at, exif, frame = 2, 0, b""
    for _ in range(MANY_PARTS):
        marker, size = data[at : at + 2], _big(data, at + 2, 2)
        if marker == b"\xff\xda":  # pixel data begins
            return _jpeg_frame(frame, _scans(data, at), exif > MUCH_EXIF) if frame else ImageHeader()
        if marker[:1] != b"\xff":
            break
        if marker == b"\xff\xff":  # padding byte
            at += 1
            continue
        if b"\xc0" <= marker[1:] <= b"\xcf" and marker[1:] not in b"\xc4\xc8\xcc":
            frame = marker[1:] + data[at + 5 : at + 10]
        if data[at + 4 : at + 8] in (b"Exif", b"MPF\0"):
            exif += size
        at += 2 + size
    return ImageHeader()


def _scans(data: FileBytes, at: int) -> int:
    """Count the scans of a JPEG from the first on, up to its end or just above ``MOST_SCANS``. Images that cameras
    append to it do not count."""
    scans = 0
    for _ in range(SCAN_MARKERS * MOST_SCANS):
        scans += data[at + 1] == 0xDA
        at = _marker(data, at + 2 + _big(data, at + 2, 2))
        if scans > MOST_SCANS or at < 0 or data[at + 1] == 0xD9:
            return scans
    return MOST_SCANS + 1


def _marker(data: FileBytes, at: int) -> int:
    """Return the offset of the next marker of a JPEG, or -1."""
    for begin in range(at, len(data), WINDOW - 1):  # a marker is two bytes long
        found = MARKER.search(data[begin : begin + WINDOW])
        if found is not None:
            return begin + found.start()
    return -1


def _jpeg_frame(frame: bytes, scans: int, odd: bool) -> ImageHeader:
    """Read the header of a frame: its kind, then height, width and components."""
    height, width, components = _big(frame, 1, 2), _big(frame, 3, 2), _big(frame, 5, 1)
    whole = scans > 1 or frame[:1] not in b"\xc0\xc1"  # all coefficients are held until the last scan
    per_pixel = PER_PIXEL["JPEG"] + (2 * min(components, 4) if whole else 0)
    return ImageHeader("JPEG", width, height, per_pixel, odd or scans > MANY_SCANS, scans)


def _webp(data: FileBytes) -> ImageHeader:
    kind = data[12:16]
    if kind == b"VP8X":
        size = 1 + _little(data, 24, 3), 1 + _little(data, 27, 3)
    elif kind == b"VP8L" and data[20:21] == b"\x2f":
        bits = _little(data, 21, 4)
        size = 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    elif kind == b"VP8 " and data[23:26] == b"\x9d\x01\x2a":
        size = _little(data, 26, 2) & 0x3FFF, _little(data, 28, 2) & 0x3FFF
    else:
        return ImageHeader()
    exif = kind == b"VP8X" and bool(_little(data, 20, 1) & 8)  # its size is at the end of the file
    return ImageHeader("WEBP", *size, PER_PIXEL["WEBP"], exif)


def _bmp(data: FileBytes) -> ImageHeader:
    if _little(data, 14, 4) == 12:
        return ImageHeader("BMP", _little(data, 18, 2), _little(data, 20, 2), PER_PIXEL["BMP"])
    height = int.from_bytes(data[22:26], "little", signed=True)  # negative: from top to bottom
    compressed = _little(data, 30, 4) in (1, 2)  # run lengths, which are read in Python
    return ImageHeader("BMP", _little(data, 18, 4), abs(height), PER_PIXEL["BMP"], compressed)


def _tiff(data: FileBytes) -> ImageHeader:
    """Read the size in the first directory (TIFF 6.0, section 2). TIFF is always decoded in another process."""
    number = _little if data.startswith(b"II") else _big
    first, sizes = number(data, 4, 4), {}
    for at in range(first + 2, first + 2 + 12 * number(data, first, 2), 12):
        kind, width = number(data, at, 2), {3: 2, 4: 4}.get(number(data, at + 2, 2), 0)
        sizes[kind] = number(data, at + 8, width)
    return ImageHeader("TIFF", sizes.get(256, 0), sizes.get(257, 0), PER_PIXEL["TIFF"], odd=True)


def _heif(data: FileBytes) -> ImageHeader:
    """Read the largest size among the properties of an AVIF or HEIC (``ispe``, ISO/IEC 23008-12, section 6.5.3),
    which is that of the image, not of its tiles or thumbnail."""
    kind = "AVIF" if data[8:12] == b"avif" else "HEIF"
    found = [data[at.end() + 4 : at.end() + 12] for at in SIZES.finditer(data[:HEIF_PROPERTIES])]
    width, height = max(((_big(s, 0, 4), _big(s, 4, 4)) for s in found), key=math.prod, default=(0, 0))
    return ImageHeader(kind, width, height, PER_PIXEL[kind], odd=True)


def _big(data: FileBytes, at: int, size: int) -> int:
    return int.from_bytes(data[at : at + size], "big")


def _little(data: FileBytes, at: int, size: int) -> int:
    return int.from_bytes(data[at : at + size], "little")
