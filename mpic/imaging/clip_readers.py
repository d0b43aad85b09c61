"""Readers of clips: one walk over a file's frames, whichever library decodes it.

Pillow, which is always installed, reads animated GIF, WebP and PNG. OpenCV (its FFmpeg), which the extra ``video``
installs and vLLM brings along, reads containers, from a stream, in one thread, and only files that begin with the
signature of a known container. FFmpeg looks at more than the signature, and would follow the addresses in a playlist or
listen for the stream that a session description announces, so it is told which containers it may open, and to use no
protocols.
"""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

from PIL import Image

from mpic.errors import InvalidVideo, NoVideoDecoder
from mpic.imaging.clip_header import container, is_animated, is_fragmented, movie_seconds
from mpic.imaging.pixels import converted
from mpic.imaging.stored_file import FileBytes, stream

INSTALL = "pip install 'mpic[video]'"
ALLOWED = "format_whitelist;mov,matroska,avi|protocol_whitelist;none"
"""Options of FFmpeg, as OpenCV reads them: the containers that may be opened, and no protocols."""
OLDEST = 5
"""Oldest version of OpenCV with which clips are tested."""
SHORTEST_DELAY = 0.02
DELAY = 0.1
"""Seconds that a frame of an animated image is shown if the file states a delay below the minimum, as in browsers."""


class Shown(NamedTuple):
    """One frame of a walk.

    Args:
        start: seconds at which it is shown, or None where the file does not tell.
        end: seconds at which it ends, or None.
        image: function that returns the frame in RGB; call it before the walk goes on.
    """

    start: float | None
    end: float | None
    image: Callable[[], Image.Image]


class ClipReader(NamedTuple):
    """An opened clip.

    Args:
        width, height: size of its frames as stored in the file, in pixels.
        rate: frames a second that the file states, or 0.
        claimed: number of frames that the file declares, or 0 if that is an estimate.
        length: duration in seconds that the file declares, edits included, or 0 if it declares none.
        walk: its frames in display order; can be iterated once.
    """

    width: int
    height: int
    rate: float
    claimed: int
    length: float
    walk: Iterator[Shown]


@contextmanager
def reader(data: FileBytes) -> Iterator[ClipReader]:
    """Open a clip.

    Raises:
        InvalidVideo: the file is not a clip.
        NoVideoDecoder: no decoder for it is installed.
        Exception: whatever a decoder raises for hostile bytes.
    """
    kind = container(data[:16])
    if kind is None:
        if not is_animated(data):
            raise InvalidVideo(
                "neither a video that is accepted (MP4, QuickTime, WebM, Matroska, AVI) nor an animated GIF, WebP or "
                "PNG; a still image is sent as an image",
                param="file",
            )
        with Image.open(stream(data), formats=("GIF", "WEBP", "PNG")) as image:
            yield ClipReader(*image.size, 0.0, 0, 0.0, _animation(image))
        return
    if not installed():
        raise NoVideoDecoder(f"{kind} needs a decoder that is not installed here: {INSTALL}", param="file")
    with _opencv(data) as opened:
        yield opened._replace(**_account(kind, data))


def installed() -> bool:
    """Return whether the package that decodes containers is installed."""
    return importlib.util.find_spec("cv2") is not None


def load() -> None:
    """Import the package that decodes containers, if it is installed. Silence its messages on standard error, and limit
    it to the ``ALLOWED`` files."""
    os.environ["OPENCV_FFMPEG_CAPTURE_OPTIONS"] = ALLOWED
    os.environ.setdefault("OPENCV_FFMPEG_LOGLEVEL", "-8")
    os.environ.setdefault("OPENCV_LOG_LEVEL", "SILENT")
    with suppress(ImportError):
        importlib.import_module("cv2")


def _account(kind: str, data: FileBytes) -> dict[str, Any]:
    """Return the fields of a ``ClipReader`` that OpenCV gets wrong: it estimates the number of frames of Matroska and
    of fragmented MP4, which do not state it."""
    if kind == "AVI video":
        return {}
    if kind != "MP4 or QuickTime" or is_fragmented(data):
        return {"claimed": 0}
    return {"length": movie_seconds(data)}


def _animation(image: Image.Image) -> Iterator[Shown]:
    at = 0.0
    for number in itertools.count():
        try:
            image.seek(number)
        except EOFError:
            return
        image.load()
        delay = image.info.get("duration", 0) / 1000
        end = at + (delay if delay >= SHORTEST_DELAY else DELAY)
        yield Shown(at, end, lambda: converted(image))
        at = end


@contextmanager
def _opencv(data: FileBytes) -> Iterator[ClipReader]:
    load()
    try:
        import cv2
    except ImportError as error:
        raise NoVideoDecoder(f"OpenCV cannot be loaded here ({error}): {INSTALL}", param="file") from error
    if int(cv2.__version__.split(".")[0]) < OLDEST:
        raise NoVideoDecoder(f"OpenCV {cv2.__version__} is too old to decode a clip: {INSTALL}", param="file")
    source = stream(data)  # OpenCV keeps no reference of its own
    opened = cv2.VideoCapture(source, cv2.CAP_FFMPEG, [cv2.CAP_PROP_N_THREADS, 1])  # ty: ignore[no-matching-overload] (its stubs lack buffers)
    try:
        if not opened.isOpened():
            raise InvalidVideo(
                "the video cannot be opened: it is damaged, or of an unknown kind", param="file"
            )
        width, height, rate, frames = (
            opened.get(which)
            for which in (
                cv2.CAP_PROP_FRAME_WIDTH,
                cv2.CAP_PROP_FRAME_HEIGHT,
                cv2.CAP_PROP_FPS,
                cv2.CAP_PROP_FRAME_COUNT,
            )
        )
        yield ClipReader(int(width), int(height), rate, max(0, int(frames)), 0.0, _captured(opened))
    finally:
        opened.release()
        source.close()


def _captured(opened: Any) -> Iterator[Shown]:
    import cv2

    def image() -> Image.Image:
        good, pixels = opened.retrieve()
        if not good:
            raise InvalidVideo("a frame of the video cannot be decoded", param="file")
        return Image.fromarray(cv2.cvtColor(pixels, cv2.COLOR_BGR2RGB))

    while opened.grab():
        yield Shown(opened.get(cv2.CAP_PROP_POS_MSEC) / 1000, None, image)
