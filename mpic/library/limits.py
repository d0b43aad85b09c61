"""All bounds of a library."""

from __future__ import annotations

from dataclasses import dataclass

from PIL import Image

from mpic.limits import StorageLimits


@dataclass(frozen=True)
class Limits(StorageLimits):
    """All bounds of a library: those that an operator can set, and the ones below.

    ``image_pixels`` is at most Pillow's own bomb limit; an image that needs more than ``decode_bytes`` by itself is
    decoded alone. A user's own quota (``Library.set_quota``) replaces ``user_files``, ``user_bytes`` and
    ``user_disk_bytes``.

    Args:
        filename_chars: maximum length of a file name; longer names are cut.
        tombstone_seconds: time for which deletions and the reasons why compiled chunks are gone are remembered.
    """

    filename_chars: int = 255
    tombstone_seconds: int = 30 * 86_400

    def __post_init__(self) -> None:
        super().__post_init__()
        bomb = Image.MAX_IMAGE_PIXELS or 0
        if self.image_pixels > bomb:
            raise ValueError(f"image_pixels must lie between 1 and {bomb}, not {self.image_pixels}")
        if self.filename_chars < 1:
            raise ValueError(f"filename_chars must be at least 1, not {self.filename_chars}")
