"""Decodes uploads. Decoding decides what an upload is; the type that the client states is never trusted.

Uploads and inline images (data URLs) pass through the same functions.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from PIL import Image

from mpic.errors import EmptyUpload, InvalidText, TooLarge, UnsupportedType
from mpic.imaging.clip_header import STILL_BRANDS, container, is_animated
from mpic.imaging.clips import FRAME_PIXELS, Clip, ClipRules, Sample
from mpic.imaging.decoder import decoder
from mpic.imaging.documents import SIGNATURES as DOCUMENTS
from mpic.imaging.documents import WRITTEN, DocumentRules, DocumentText, written
from mpic.imaging.pixels import ImageRules
from mpic.imaging.stored_file import FileBytes
from mpic.kv.chunk import ChunkKey, Kind
from mpic.library.limits import Limits

if TYPE_CHECKING:
    from charset_normalizer import CharsetMatch

DEFAULT = Limits()
HEAD = 32
"""Bytes that tell what an upload claims to be."""
SIGNATURES = (b"\x89PNG", b"\xff\xd8", b"GIF8", b"II*\x00", b"MM\x00*")

MARKS = {
    codecs.BOM_UTF32_LE: "utf_32",
    codecs.BOM_UTF32_BE: "utf_32",
    codecs.BOM_UTF16_LE: "utf_16",
    codecs.BOM_UTF16_BE: "utf_16",
}
ENCODINGS = [
    *("utf_16_le", "utf_16_be", "cp1250", "cp1251", "cp1252", "cp1253", "cp1254", "cp1255", "cp1256"),
    *("koi8_r", "cp932", "euc_jp", "gb18030", "big5", "cp949"),
]
"""Encodings that are looked for in a text without a byte order mark. Rare ones would explain the bytes of others."""
ALPHABETS = {
    "cp1250": ("áčďéěíňóřšťúůýž", "áäčďéíĺľňóôŕšťúýž", "ąćęłńóśźż", "áéíóöőúüű", "ăâîşţ", "čćđšž"),
    "cp1252": (
        "äöüßé",
        "àâæçéèêëîïôœùûüÿ",
        "áéíóúüñºª",
        "áâãàçéêíóôõúºª",
        "àèéìòù",
        "åäöé",
        "æøåé",
        "éèëïöü",
        "áðéíóúýþæö",
    ),
    "cp1254": ("çğıöşüâî",),
}
"""Letters beyond ASCII of the languages that are written in encodings which differ in a few letters. The words of a
text look equally likely in all of them."""
SAMPLE = 64 << 10
"""Bytes of a text by which its encoding is told."""
COHERENT = 0.1
"""Least share of what a language's words are made of that a text in an encoding must have."""

FOREIGN = {
    b"{\\rtf": "RTF",
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


NO_CLIPS = (
    "send an image (PNG, JPEG, WebP, BMP, GIF, TIFF, AVIF, HEIC), a document (PDF, DOCX, PPTX, XLSX) or text, and of a "
    "video the frames you want seen"
)


def sniff(head: bytes, no_clips: str | None = NO_CLIPS) -> Kind:
    """Tell from the first bytes (``HEAD`` are enough) whether they claim to be an image, a video or text.

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
        if foreign in ("AVIF", "HEIC", "HEIF"):
            return "image"
    if head.startswith(b"RIFF"):
        foreign = RIFF.get(head[8:12])
        if head[8:12] == b"WEBP":
            return "image"
    if foreign is not None:
        raise UnsupportedType(f"{foreign} is not accepted; {NO_CLIPS}", param="file", type=foreign)
    bmp = head.startswith(b"BM") and int.from_bytes(head[14:18], "little") in BMP_HEADERS
    return "image" if bmp or head.startswith(SIGNATURES) else "text"


def decode_image(data: FileBytes, limits: Limits = DEFAULT) -> Image.Image:
    """Decode one still image: upright (EXIF orientation applied), RGB, transparency laid over white.

    A large image is decoded in another process. Drop one image before decoding the next, because few fit into memory.

    Args:
        data: the bytes of a PNG, JPEG, WebP, BMP, AVIF, HEIC, GIF or TIFF; of the last two the first frame or page is
            decoded.

    Raises:
        ImageTooLarge: it has more pixels than the limits allow according to its header; nothing is decoded.
        ImageTooCostly: it takes far more time or memory than its size explains.
        InvalidImage: it is not an image, is truncated or damaged, has no pixels, or is absurdly narrow.
        AnimatedImage: it has more than one frame.
        NoImageDecoder: the package that decodes it is not installed.
        OutOfMemory: there is not enough memory for it now.
    """
    return decoder().decode(data, _rules(limits), limits.decode_bytes)


def image_key(data: FileBytes, limits: Limits = DEFAULT) -> ChunkKey:
    """Return ``ChunkKey.of_image(decode_image(data, limit))``; a large image never enters this process.

    Raises:
        DecoderBusy: too many large images are waiting.
        MPICError: see ``decode_image`` for the other errors.
    """
    return ChunkKey("image", decoder().identify(data, _rules(limits), limits.decode_bytes).digest)


def decode_clip(data: FileBytes, sample: Sample, limits: Limits = DEFAULT) -> Clip:
    """Decode the frames of a clip that are seen, in another process. Drop it before you decode the next.

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
    return decoder().clip(data, _clip_rules(limits), limits.decode_bytes, sample)


def clip_key(data: FileBytes, limits: Limits = DEFAULT) -> ChunkKey:
    """Return the identity of a clip, of which every frame was decoded once, to see that it can be. Raise as
    ``decode_clip``."""
    decoder().clip_facts(data, _clip_rules(limits), limits.decode_bytes)
    return ChunkKey.of_clip(data)


class Content(NamedTuple):
    """The identity of a file's content, the form in which a file holds its text (``File.format``), and how many pages
    it has (``File.pages``)."""

    key: ChunkKey
    format: str = ""
    pages: int | None = None


def content_of(data: FileBytes, limits: Limits = DEFAULT, no_clips: str | None = NO_CLIPS) -> Content:
    """Return the identity of an image, a clip or a text, whichever the bytes are.

    Args:
        no_clips: why clips are not taken, as the end of a sentence; None: they are, and an animated image is one.

    Raises:
        As ``image_key``, ``clip_key``, ``read_document``, ``encoding_of`` and ``decode_text``.
    """
    kind = sniff(data[:HEAD], no_clips)
    if kind == "image" and no_clips is None and is_animated(data):
        kind = "image" if limits.gif and data.startswith(b"GIF8") else "video"
    if kind == "video":
        return Content(clip_key(data, limits))
    if kind == "image":
        return Content(image_key(data, limits))
    if is_document(data):
        document = read_document(data, limits)
        key = ChunkKey.of_text("".join(document.pages))
        return Content(key, document.format, len(document.pages) if document.paged else None)
    check_text_size(len(data), limits)  # before all of it is read
    text = data[:]
    encoding = encoding_of(text)
    return Content(ChunkKey.of_text(decode_text(text, limits, encoding)), encoding)


def thumbnail(
    data: FileBytes, limits: Limits = DEFAULT, *, side: int, least: int = 0, transparent: bool = False
) -> bytes:
    """Return a small PNG of an image; see ``mpic.imaging.pixels.thumbnail``. Raise as ``image_key``."""
    options = {"side": side, "least": least, "transparent": transparent}
    return decoder().thumbnail(data, _rules(limits), limits.decode_bytes, **options)


def _rules(limits: Limits) -> ImageRules:
    return ImageRules(limits.image_pixels, limits.image_aspect)


def _clip_rules(limits: Limits) -> ClipRules:
    pixels = min(limits.image_pixels, FRAME_PIXELS)
    return ClipRules(pixels, limits.image_aspect, limits.video_seconds, limits.video_pixels)


def check_text_size(size: int, limits: Limits) -> None:
    """Raise TooLarge if a text has more bytes than the limits allow."""
    if size > limits.text_bytes:
        raise TooLarge(f"the text has {size} bytes, the limit is {limits.text_bytes}", param="file")


def is_document(data: FileBytes) -> bool:
    """Return whether a text begins as a PDF, a ZIP, an old Office document, a web page or an e-mail."""
    return data.startswith(DOCUMENTS) or bool(written(data))


def read_document(data: FileBytes, limits: Limits = DEFAULT, patient: bool = False) -> DocumentText:
    """Return the text of a document, which another process reads.

    Args:
        patient: wait even if too many others do.

    Raises:
        As ``mpic.imaging.decoder.Decoder.document``.
    """
    rules = DocumentRules(limits.document_pages, limits.text_bytes)
    return decoder().document(data, rules, limits.decode_bytes, patient)


def read_pages(data: FileBytes, limits: Limits, format: str = "") -> list[str]:
    """Return the text of an original, by page; of one without pages all of it.

    Args:
        format: how it holds its text (``File.format``). Web pages and e-mails of earlier versions have none, and are
            read as they are.

    Raises:
        As ``read_document`` and ``decode_text``.
    """
    if data.startswith(DOCUMENTS) or format in WRITTEN:
        return read_document(data, limits, patient=True).pages
    return [decode_text(data[:], limits, format)]


def encoding_of(data: bytes) -> str:
    """Return Python's name of the encoding of a text; empty if it is UTF-8. UTF-16 and UTF-32 are known by their byte
    order mark, others by ``charset-normalizer``, which looks for the letters of a language in each reading of a text.

    Raises:
        InvalidText: it is none, or several encodings explain it equally well.
    """
    mark = next((name for mark, name in MARKS.items() if data.startswith(mark)), None)
    if mark is not None:
        return mark
    at = _not_utf8(data)
    if at is None:
        return ""
    sample = data[:SAMPLE]
    if len(data) > SAMPLE and b"\0" not in sample:  # no character is cut at the end of a line
        sample = sample[: sample.rfind(b"\n") + 1] or sample
    found = [(match, name) for match in _matches(sample) if (name := _fitting(match))]
    best = max((match.coherence for match, _ in found), default=0)
    likely = [name for match, name in found if match.coherence == best]
    if len(likely) != 1:
        raise InvalidText(
            f"neither a known format nor text in UTF-8 (byte {at} is not), and no other encoding of text can be told "
            "with certainty: save it as UTF-8, or as UTF-16 with a byte order mark",
            param="file",
        )
    return likely[0]


def _not_utf8(data: bytes) -> int | None:
    """Return the first byte that is not part of a text in UTF-8."""
    try:
        data.decode("utf-8")
    except UnicodeDecodeError as error:
        return error.start
    at = data.find(b"\0")
    return None if at < 0 else at


def _fitting(match: CharsetMatch) -> str | None:
    """Return the encoding of a reading of a text, if it looks like words, in letters of one language."""
    if match.coherence < COHERENT:
        return None
    letters = {c for c in str(match).lower() if c.isalpha() and not c.isascii()}
    for name in match.could_be_from_charset:
        if name not in ALPHABETS or any(letters.issubset(alphabet) for alphabet in ALPHABETS[name]):
            return name
    return None


def _matches(sample: bytes) -> Iterable[CharsetMatch]:
    from charset_normalizer import from_bytes  # imported here, because most texts are in UTF-8

    return from_bytes(sample, cp_isolation=ENCODINGS, enable_fallback=False)


def decode_text(data: bytes, limits: Limits = DEFAULT, encoding: str = "") -> str:
    """Decode a text strictly and remove an optional byte order mark; nothing else is changed.

    Args:
        encoding: Python's name of its encoding; empty: UTF-8.

    Raises:
        TooLarge: more bytes than the limits allow, in the file or in UTF-8.
        InvalidText: not in this encoding, contains NUL, or holds nothing but white space.
    """
    check_text_size(len(data), limits)
    try:
        text = data.decode(encoding or "utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise InvalidText(
            f"neither a known format nor text in {encoding or 'UTF-8'} (byte {error.start} is not)",
            param="file",
        ) from error
    if encoding:
        try:
            check_text_size(len(text.encode()), limits)
        except UnicodeEncodeError as error:
            raise InvalidText("the text contains half of a surrogate pair", param="file") from error
    if "\0" in text:
        raise InvalidText(f"the text contains a NUL character at position {text.index(chr(0))}", param="file")
    if not text:
        raise EmptyUpload("the upload is empty", param="file")
    if not text.strip():
        raise InvalidText("the text is nothing but white space", param="file")
    return text
