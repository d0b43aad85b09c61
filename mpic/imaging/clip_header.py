"""Recognises videos and animated images by their headers. This runs in the server's process, so nothing is decoded and
at most ``MOST_PARTS`` parts of a file are read."""

from __future__ import annotations

from collections.abc import Iterator

from mpic.imaging.stored_file import FileBytes

NO_CLIPS = "this model takes no videos; send the frames you want seen as images"
CONTAINERS = {b"\x1aE\xdf\xa3": "Matroska or WebM video"}
STILL_BRANDS = {
    b"avif": "AVIF", **dict.fromkeys((b"heic", b"heix", b"heim", b"heis"), "HEIC"), b"mif1": "HEIF",
    b"jp2 ": "JPEG 2000", b"jpx ": "JPEG 2000", b"jxl ": "JPEG XL",
}  # fmt: skip
MOST_PARTS = 400_000
"""Maximum number of parts of a file that are read: about the number of blocks in a GIF of 100 MB."""


def container(head: bytes) -> str | None:
    """Return the name of the video container whose signature a file begins with, or None; its first 16 bytes are
    enough."""
    if head[4:8] == b"ftyp" and head[8:12] not in STILL_BRANDS:
        return "MP4 or QuickTime"
    if head.startswith(b"RIFF") and head[8:12] == b"AVI ":
        return "AVI video"
    return next((name for magic, name in CONTAINERS.items() if head.startswith(magic)), None)


def is_animated(data: FileBytes) -> bool:
    """Return whether a GIF, WebP or PNG declares more than one frame."""
    if data.startswith(b"GIF8"):
        return _frames_of_gif(data) > 1
    if data.startswith(b"RIFF") and data[8:16] == b"WEBPVP8X":
        return bool(data[20:21] and data[20] & 2) and _frames_of_webp(data) > 1
    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        return _frames_of_png(data) > 1
    return False


def is_fragmented(data: FileBytes) -> bool:
    """Return whether an MP4 is fragmented, in which case its header does not state the number of frames."""
    return any(kind == b"moof" for kind, _, _ in _boxes(data, 0, len(data)))


def movie_seconds(data: FileBytes) -> float:
    """Return the duration that the header of an MP4 states, edits included, or 0 if it states none."""
    for kind, lo, hi in _boxes(data, 0, len(data)):
        if kind != b"moov":
            continue
        for inner, at, _ in _boxes(data, lo, hi):
            if inner == b"mvhd":
                first, width = (at + 20, 8) if data[at : at + 1] == b"\1" else (at + 12, 4)  # by its version
                ticks = int.from_bytes(data[first : first + 4], "big")
                length = int.from_bytes(data[first + 4 : first + 4 + width], "big")
                return length / ticks if ticks else 0.0
    return 0.0


def _boxes(data: FileBytes, at: int, end: int) -> Iterator[tuple[bytes, int, int]]:
    """Yield type, begin and end of the boxes of an MP4 (ISO/IEC 14496-12, section 4.2)."""
    for _ in range(MOST_PARTS):
        if at + 8 > end:
            return
        size, kind, head = int.from_bytes(data[at : at + 4], "big"), data[at + 4 : at + 8], 8
        if size == 1:
            size, head = int.from_bytes(data[at + 8 : at + 16], "big"), 16
        until = end if size == 0 else at + size
        if size and size < head:
            return
        yield kind, at + head, min(until, end)
        at = until


def _frames_of_png(data: FileBytes) -> int:
    """Return the number of frames that ``acTL`` of a PNG declares, or 0."""
    at = 8
    for _ in range(MOST_PARTS):
        kind = data[at + 4 : at + 8]
        if kind == b"acTL":
            return int.from_bytes(data[at + 8 : at + 12], "big")
        if not kind or kind == b"IDAT":
            break
        at += 12 + int.from_bytes(data[at : at + 4], "big")
    return 0


def _frames_of_webp(data: FileBytes) -> int:
    """Count the frames of an animated WebP up to two."""
    at, frames = 12, 0
    for _ in range(MOST_PARTS):
        if at + 8 > len(data) or frames == 2:
            break
        frames += data[at : at + 4] == b"ANMF"
        size = int.from_bytes(data[at + 4 : at + 8], "little")
        at += 8 + size + size % 2
    return frames


def _frames_of_gif(data: FileBytes) -> int:
    """Count the frames of a GIF up to two; also return 2 if it has too many parts to read here, so that a decoding
    process counts them."""
    flags = data[10] if len(data) > 10 else 0
    at, frames, parts = 13 + _colours(flags), 0, 0
    while at < len(data) and frames < 2:
        mark = data[at]
        if mark == 0x2C and at + 9 < len(data):
            frames += 1
            at += 11 + _colours(data[at + 9])
        elif mark == 0x21:
            at += 2
        else:
            break
        while at < len(data) and data[at]:  # blocks of at most 255 bytes, until one is empty
            at, parts = at + 1 + data[at], parts + 1
            if parts > MOST_PARTS:
                return 2
        at, parts = at + 1, parts + 1
        if parts > MOST_PARTS:
            return 2
    return frames


def _colours(flags: int) -> int:
    """Return the bytes of a GIF's table of colours."""
    return 3 << (1 + (flags & 7)) if flags & 0x80 else 0
