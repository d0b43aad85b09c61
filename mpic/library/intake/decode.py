"""Decodes uploads. Decoding decides what an upload is; the type that the client states is never trusted.

Uploads and inline images (data URLs) pass through the same functions.
"""

from __future__ import annotations

from PIL import Image

from mpic.errors import EmptyUpload, InvalidText, TooLarge, UnsupportedType
from mpic.imaging.clip_header import STILL_BRANDS, container, is_animated
from mpic.imaging.clips import FRAME_PIXELS, Clip, ClipRules, Sample
from mpic.imaging.decoder import decoder
from mpic.imaging.pixels import ImageRules
from mpic.kv.chunk import ChunkKey, Kind
from mpic.library.limits import Limits

HEAD = 32
"""Bytes that tell what an upload claims to be."""
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
}
RIFF = {b"WAVE": "WAV audio"}
BMP_HEADERS = frozenset({12, 40, 52, 56, 64, 108, 124})


NO_CLIPS = "send an image (PNG, JPEG, WebP, BMP) or text in UTF-8, and of a video the frames you want seen"


def sniff(head: bytes, no_clips: str | None = NO_CLIPS) -> Kind:
    """Tells from the first bytes (``HEAD`` are enough) whether they claim to be an image, a video or text.

    Args:
        no_clips: why videos are not taken, as the end of a sentence; None: they are.

    Raises:
        UnsupportedType: the type is known but not accepted; the message names it.
    """
    if (video := container(head)) is not None:
        if no_clips is None:
            return "video"
        raise UnsupportedType(f"{video} is not accepted; {no_clips}", param="file", type=video)
    foreign = next((name for magic, name in FOREIGN.items() if head.startswith(magic)), None)
    if head[4:8] == b"ftyp":
        foreign = STILL_BRANDS[head[8:12]]
    if head.startswith(b"RIFF"):
        foreign = RIFF.get(head[8:12])
        if head[8:12] == b"WEBP":
            return "image"
    if foreign is not None:
        raise UnsupportedType(f"{foreign} is not accepted; {NO_CLIPS}", param="file", type=foreign)
    bmp = head.startswith(b"BM") and int.from_bytes(head[14:18], "little") in BMP_HEADERS
    return "image" if bmp or any(head.startswith(magic) for magic in SIGNATURES) else "text"


def decode_image(data: bytes, limits: Limits | None = None) -> Image.Image:
    """Decodes one still image: upright (EXIF orientation applied), RGB, transparency laid over white.

    A large image is decoded in another process. Drop one image before decoding the next, because few fit into memory.

    Args:
        data: the bytes of a PNG, JPEG, WebP, BMP or (if the limits allow it: its first frame) GIF.

    Raises:
        ImageTooLarge: it has more pixels than the limits allow according to its header; nothing is decoded.
        ImageTooCostly: it takes far more time or memory than its size explains.
        InvalidImage: it is not an image, is truncated or damaged, has no pixels, or is absurdly narrow.
        AnimatedImage: it has more than one frame.
        UnsupportedType: it is a GIF, and the limits do not allow GIF.
        OutOfMemory: there is not enough memory for it now.
    """
    limits = limits or Limits()
    return decoder().decode(data, _rules(limits), limits.decode_bytes)


def image_key(data: bytes, limits: Limits | None = None) -> ChunkKey:
    """Returns ``ChunkKey.of_image(decode_image(data, limits))``; a large image never enters this process.

    Raises:
        DecoderBusy: too many large images are waiting.
        MPICError: see ``decode_image`` for the other errors.
    """
    limits = limits or Limits()
    return ChunkKey("image", decoder().identify(data, _rules(limits), limits.decode_bytes).digest)


def decode_clip(data: bytes, sample: Sample, limits: Limits | None = None) -> Clip:
    """Decodes the frames of a clip that are seen, in another process. Drop it before you decode the next.

    Args:
        data: the bytes of a video, or of an animated GIF, WebP or PNG.
        sample: chooses the frames.

    Raises:
        VideoTooLarge: it is longer, or has more pixels, than the limits allow.
        VideoTooCostly: it takes far more time or memory than its size explains.
        InvalidVideo: not a clip, truncated or damaged.
        NoVideoDecoder: the package that decodes it is not installed.
        DecoderBusy: too many large files are waiting.
        OutOfMemory: there is not enough memory for it now.
    """
    limits = limits or Limits()
    return decoder().clip(data, _clip_rules(limits), limits.decode_bytes, sample)


def clip_key(data: bytes, limits: Limits | None = None) -> ChunkKey:
    """Returns the identity of a clip, of which every frame was decoded once, to see that it can be. Raises as
    ``decode_clip``."""
    limits = limits or Limits()
    decoder().clip_facts(data, _clip_rules(limits), limits.decode_bytes)
    return ChunkKey.of_clip(data)


def content_key(data: bytes, limits: Limits | None = None, no_clips: str | None = NO_CLIPS) -> ChunkKey:
    """Returns the identity of an image, a clip or a text, whichever the bytes are.

    Args:
        no_clips: why clips are not taken, as the end of a sentence; None: they are, and an animated image is one.

    Raises:
        As ``image_key``, ``clip_key`` and ``decode_text``.
    """
    limits = limits or Limits()
    kind = sniff(data[:HEAD], no_clips)
    if kind == "image" and no_clips is None and is_animated(data):
        kind = "image" if limits.gif and data.startswith(b"GIF8") else "video"
    if kind == "video":
        return clip_key(data, limits)
    return image_key(data, limits) if kind == "image" else ChunkKey.of_text(decode_text(data, limits))


def thumbnail(
    data: bytes, limits: Limits | None = None, *, side: int, least: int = 0, transparent: bool = False
) -> bytes:
    """Returns a small PNG of an image; see ``mpic.imaging.pixels.thumbnail``. Raises as ``image_key``."""
    limits = limits or Limits()
    options = {"side": side, "least": least, "transparent": transparent}
    return decoder().thumbnail(data, _rules(limits), limits.decode_bytes, **options)


def _rules(limits: Limits) -> ImageRules:
    return ImageRules(limits.image_pixels, limits.image_aspect, limits.gif)


def _clip_rules(limits: Limits) -> ClipRules:
    pixels = min(limits.image_pixels, FRAME_PIXELS)
    return ClipRules(pixels, limits.image_aspect, limits.video_seconds, limits.video_pixels)


def check_text_size(size: int, limits: Limits) -> None:
    """Raises TooLarge if a text has more bytes than the limits allow."""
    if size > limits.text_bytes:
        raise TooLarge(f"the text has {size} bytes, the limit is {limits.text_bytes}", param="file")


def decode_text(data: bytes, limits: Limits | None = None) -> str:
    """Decodes strict UTF-8 and removes an optional byte order mark; nothing else is changed.

    Raises:
        TooLarge: more bytes than the limits allow.
        InvalidText: not UTF-8, contains NUL, or holds nothing but white space.
    """
    limits = limits or Limits()
    check_text_size(len(data), limits)
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
