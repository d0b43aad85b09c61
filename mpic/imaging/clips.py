"""Clips: the facts about a video and some of its frames, both within bounds. Frames are counted by decoding them,
because headers may be wrong. They are upright and in RGB. All this runs in a worker process (``worker``);
``mpic.imaging.decoder`` sends the order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
from PIL import Image

from mpic.errors import InvalidUpload, InvalidVideo, OutOfMemory, TooLarge, VideoTooLarge
from mpic.imaging.clip_readers import ClipReader, reader
from mpic.imaging.pixels import said_by
from mpic.imaging.stored_file import FileBytes

FRAME_PIXELS = 4096 * 2304
"""Maximum pixels of one frame; a decoder may hold more than a dozen frames at a time."""
MOST_RATE = 240.0
"""Maximum frames a second. A container that states more has given the ticks of its clock as the rate."""
USUAL_RATE = 24.0
"""Frames a second assumed for a clip without timestamps, as in transformers."""
AGREES = 0.01
"""The declared rate is used if it differs from the rate of the frames' timestamps by at most this share."""
LOST = 0.05
"""A file is damaged if more than this share of its frames, and more than two, cannot be decoded."""


class ClipRules(NamedTuple):
    """Rules by which clips are accepted.

    Args:
        frame_pixels: maximum pixels of one frame.
        aspect: maximum ratio of a frame's longest side to its shortest.
        seconds: maximum duration of a clip.
        pixels: maximum pixels of all requested frames together.
    """

    frame_pixels: int
    aspect: float
    seconds: float
    pixels: int


class ClipFacts(NamedTuple):
    """The size, length and rate of a clip.

    Args:
        width, height: of its upright frames, in pixels.
        frames: number of its frames.
        rate: frames a second, on average.
    """

    width: int
    height: int
    frames: int
    rate: float


Sample = Callable[[ClipFacts], Iterable[int]]
"""Chooses the frames of a clip that the model sees: returns their numbers, ascending."""


class Clip(NamedTuple):
    """Frames of a clip.

    Args:
        facts: of the whole clip.
        indices: numbers of the frames that were sampled, ascending.
        frames: ``[len(indices), height, width, 3]`` uint8, RGB.
    """

    facts: ClipFacts
    indices: tuple[int, ...]
    frames: np.ndarray


@contextmanager
def _opened(data: FileBytes, rules: ClipRules) -> Iterator[ClipReader]:
    """Open a clip within the rules.

    Raises:
        VideoTooLarge: its frames have more pixels than the rules allow; known before one is decoded.
        InvalidVideo: not a clip, truncated, damaged, of no size, or absurdly narrow.
        NoVideoDecoder: nothing that decodes it is installed.
        OutOfMemory: there is not enough memory for it now.
    """
    try:
        with reader(data) as found:
            _admit(found.width, found.height, rules)
            yield found
    except (InvalidUpload, TooLarge, OutOfMemory):
        raise
    except MemoryError as error:
        raise OutOfMemory("the server does not have enough memory to decode the clip now") from error
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise VideoTooLarge(
            f"the clip's frames have more than {rules.frame_pixels} pixels", param="file"
        ) from error
    except Exception as error:  # a decoder fed with hostile bytes raises nearly anything
        raise InvalidVideo(f"the clip cannot be decoded{said_by(error)}", param="file") from error


def facts(data: FileBytes, rules: ClipRules) -> ClipFacts:
    """Decode a whole clip, frame by frame, and return its facts. Raise as ``_opened``."""
    with _opened(data, rules) as found:
        count, first, last, size = 0, None, None, (0, 0)
        for count, shown in enumerate(found.walk, 1):
            if count == 1:
                first, size = shown.start, shown.image().size
                _admit(*size, rules)
            last = shown.end if shown.end is not None else shown.start
            if count > rules.seconds * MOST_RATE or (
                last is not None and last - (first or 0) > rules.seconds
            ):
                raise _too_long(rules)
            ends = shown.end is not None
        if not count:
            raise InvalidVideo("the clip has no frames", param="file")
        if _is_damaged(found, count, (last or 0.0) - (first or 0.0)):
            raise InvalidVideo(
                f"the clip is damaged: {count} of {found.claimed} frames can be decoded", param="file"
            )
        spaces = count if ends else count - 1
        known = first is not None and last is not None and last > first
        measured = spaces / (last - first) if known else 0.0
        rate = _rate(found.rate, measured)
        if count / rate > rules.seconds:
            raise _too_long(rules)
        return ClipFacts(*size, count, rate)


def _is_damaged(found: ClipReader, count: int, seconds: float) -> bool:
    """Return whether frames are missing. Frames that an edit leaves out do not count as missing: without them, the clip
    lasts as long as the file declares."""
    if found.claimed - count <= max(2, LOST * found.claimed):
        return False
    return not found.length or seconds + 1 / (found.rate or USUAL_RATE) < (1 - LOST) * found.length


def frames(
    data: FileBytes, rules: ClipRules, indices: Sequence[int], size: tuple[int, int] | None = None
) -> Iterator[bytes]:
    """Yield the frames of these numbers, which ascend, as ``height * width * 3`` bytes each.

    Args:
        size: width and height that every frame must have; None: those of the first frame.

    Raises:
        InvalidVideo: there are fewer frames, or they change their size; and as ``_opened``.
    """
    with _opened(data, rules) as found:
        wanted = iter(indices)
        following = next(wanted, None)
        for number, shown in enumerate(found.walk):
            if following is None:
                return
            if number != following:
                continue
            image = shown.image()
            size = tuple(size or image.size)
            if image.size != size:
                raise InvalidVideo("the frames of the clip change their size", param="file")
            pixels = image.tobytes()
            while following == number:  # the same frame may be requested more than once
                yield pixels
                following = next(wanted, None)
        if following is not None:
            raise InvalidVideo(f"the clip has no frame {following}", param="file")


def _admit(width: int, height: int, rules: ClipRules) -> None:
    if width < 1 or height < 1:
        raise InvalidVideo(f"the clip's frames have {width}x{height} pixels", param="file")
    if width * height > rules.frame_pixels:
        raise VideoTooLarge(
            f"the clip's frames have {width}x{height} pixels, the limit is {rules.frame_pixels} pixels in all",
            param="file",
        )
    if max(width, height) > rules.aspect * min(width, height):
        raise InvalidVideo(f"a clip of {width}x{height} pixels is too narrow", param="file")


def _too_long(rules: ClipRules) -> VideoTooLarge:
    return VideoTooLarge(
        f"the clip is longer than {rules.seconds:g} seconds, which is the limit", param="file"
    )


def _rate(claimed: float, measured: float) -> float:
    """Return the frames a second, from the rate that a file declares (exact, or nonsense) and the timestamps of its
    frames (rounded)."""
    good = math.isfinite(claimed) and 0 < claimed <= MOST_RATE
    if not math.isfinite(measured) or measured <= 0:
        return claimed if good else USUAL_RATE
    return claimed if good and abs(claimed - measured) <= AGREES * measured else measured
