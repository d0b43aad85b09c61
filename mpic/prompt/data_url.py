"""Images, clips and files inside a request: ``data:image/...;base64,...``."""

from __future__ import annotations

import binascii

from mpic.cancel import checkpoint
from mpic.errors import InvalidImage, InvalidUpload, InvalidVideo

HEAD = 256
"""The data of a data URL must begin within so many characters."""
SLICE = 1 << 20
"""Characters that are decoded before other threads may run."""


def decode_data_url(url: str, param: str | None = None) -> bytes:
    """Decode an image that is given as a data URL. White space in the data is ignored.

    Raises:
        InvalidImage: it is not a data URL of an image, or its data are not base64; ``param`` is the request field.
    """
    return _decode(url, ("image",), InvalidImage, param)


def decode_clip_url(url: str, param: str | None = None) -> bytes:
    """Decode a video, or an animated image, that is given as a data URL. White space in the data is ignored.

    Raises:
        InvalidVideo: it is no such data URL, or its data are not base64; ``param`` is the request field.
    """
    return _decode(url, ("video", "image"), InvalidVideo, param)


def decode_file_url(url: str, param: str | None = None) -> bytes:
    """Decode a file of any type that is given as a data URL. White space in the data is ignored.

    Raises:
        InvalidUpload: it is no data URL, or its data are not base64; ``param`` is the request field.
    """
    return _decode(url, ("",), InvalidUpload, param)


def _decode(url: str, kinds: tuple[str, ...], invalid: type[InvalidUpload], param: str | None) -> bytes:
    comma = url.find(",", 0, HEAD)
    head = url[: max(0, comma)]
    begins = tuple(f"data:{kind}/" if kind else "data:" for kind in kinds)
    if not head.startswith(begins) or not head.endswith(";base64"):
        raise invalid(f"a data URL must read {begins[0]}...;base64,...", param=param)
    try:
        return decode_base64(url, comma + 1)
    except ValueError as error:
        raise invalid(f"the data URL is not base64: {error}", param=param) from error


def decode_base64(text: str, start: int = 0) -> bytes:
    """Decode base64 from ``start`` on, strictly except that white space is ignored.

    Raises:
        ValueError: it is not base64.
    """
    decoded: list[bytes] = []
    rest = ""  # 7 characters at most; the last 4 of the text may be padded
    while start < len(text):
        checkpoint()
        piece = rest + "".join(text[start : start + SLICE].split())
        start += SLICE
        kept = max(0, len(piece) // 4 * 4 - 4)
        if 0 <= piece.find("=") < kept:
            raise ValueError("padding may stand only at the end")
        decoded.append(binascii.a2b_base64(piece[:kept], strict_mode=True))
        rest = piece[kept:]
    if len(rest) % 4:
        raise ValueError("its length is not a multiple of 4 characters")
    decoded.append(binascii.a2b_base64(rest, strict_mode=True))
    return b"".join(decoded)
