"""The bounds of a library that an operator can set.

They are in a module of their own, so that the configuration can use them without importing the library.
"""

from __future__ import annotations

from dataclasses import dataclass

MiB = 1 << 20
GiB = 1 << 30
LONGEST_LIFE = 10 * 366 * 86_400
"""Seconds after which anything expires that expires at all."""

POSITIVE = (
    "upload_bytes",
    "text_bytes",
    "image_pixels",
    "video_seconds",
    "video_pixels",
    "document_pages",
    "decode_bytes",
    "disk_bytes",
)


@dataclass(frozen=True)
class StorageLimits:
    """Bounds that hold for every user; the ``[library]`` section of the configuration.

    Args:
        upload_bytes: largest upload of any kind.
        text_bytes: largest text, in bytes of UTF-8; of a PDF or Office document the text that is read from it.
        image_pixels: most pixels of an image; checked before it is decoded.
        image_aspect: longest side of an image over its shortest.
        video_seconds: longest clip.
        video_pixels: most pixels of the frames that a model is shown of a clip, all together; each takes three bytes.
        document_pages: most pages of a PDF, slides of a presentation, or sheets of a table.
        decode_bytes: memory that decoding images, clips and documents may take at a time, all together.
        gif: take the first frame of an animated GIF where the model takes clips, too; elsewhere that is all that is
            taken of it.
        user_files: maximum number of files of one user; 0: no quota.
        user_bytes: maximum number of bytes of one user's originals; 0: no quota.
        user_disk_bytes: maximum number of bytes of one user's compiled chunks on disk; 0: a fair share of the budget.
        disk_bytes: budget of compiled chunks on disk. When it is full, every user keeps a fair share.
        host_bytes: budget of compiled chunks in host memory, the staging ring included; used when the engine runs on an
            accelerator.
        user_host_bytes: most bytes of one user there; 0: a fair share.
        kv_ttl: seconds for which compiled chunks are kept that nobody uses, unless they are pinned or their file says
            otherwise; the originals stay, and the next use compiles them again. 0: as long as there is room.
        shared_fraction: part of each budget that is kept for references while any are stored.

    Raises:
        ValueError: a value is not valid.
    """

    upload_bytes: int = 64 * MiB
    text_bytes: int = 8 * MiB
    image_pixels: int = 40_000_000
    image_aspect: float = 200.0
    video_seconds: int = 600
    video_pixels: int = 128_000_000
    document_pages: int = 1000
    decode_bytes: int = 1 * GiB
    gif: bool = False
    user_files: int = 50_000
    user_bytes: int = 16 * GiB
    user_disk_bytes: int = 0
    disk_bytes: int = 64 * GiB
    host_bytes: int = 8 * GiB
    user_host_bytes: int = 0
    kv_ttl: int = 0
    shared_fraction: float = 0.5

    def __post_init__(self) -> None:
        for name in POSITIVE:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if not self.image_aspect >= 1:  # NaN is refused, too
            raise ValueError(f"image_aspect must be at least 1, not {self.image_aspect}")
        for name in (
            "user_files",
            "user_bytes",
            "user_disk_bytes",
            "host_bytes",
            "user_host_bytes",
            "kv_ttl",
        ):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, not {getattr(self, name)}")
        if not 0 <= self.shared_fraction <= 1:
            raise ValueError(f"shared_fraction must lie between 0 and 1, not {self.shared_fraction}")
