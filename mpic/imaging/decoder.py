"""Decodes for the whole process: small images in the process itself, large images and clips in worker processes, a few
at a time.

All libraries and pages of a process share one decoder, because they share its memory.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
from PIL import Image

from mpic import memory
from mpic.errors import ImageTooCostly, VideoTooLarge
from mpic.imaging import pixels
from mpic.imaging.budget import Budget
from mpic.imaging.clip_header import container
from mpic.imaging.clips import Clip, ClipFacts, ClipRules, Sample
from mpic.imaging.documents import DocumentRules, DocumentText
from mpic.imaging.image_header import ImageHeader, MiB, read_header
from mpic.imaging.pixels import Identity, ImageRules
from mpic.imaging.stored_file import FileBytes, StoredFile
from mpic.imaging.worker import CLIP, DOCUMENT, IMAGE
from mpic.imaging.worker_pool import CLIP_CPU_SECONDS, CPU_SECONDS, DOCUMENT_CPU_SECONDS, Reply, WorkerPool

MOST_WORKERS = 4
MOST_WAITING = 16
"""Less than half of the threads that answer requests, so that a flood of large images leaves threads for other
requests."""
MOST_CLIPS_WAITING = 4
"""Clips may wait for minutes, so together with waiting images they must leave threads for other requests."""
MARGIN = 96 * MiB
"""Bytes that a worker may use beyond its estimate, for text and colour profiles that are unpacked before the pixels."""
RESULT = 4
"""Bytes that Pillow takes for a pixel of a decoded image."""
CLIP_PER_PIXEL = 40
"""Bytes of memory for each pixel of a clip's frame: H.264 may refer to 16 frames of 1.5 bytes a pixel, or two bytes and
more in finer formats; the frame itself is held a few times, in RGB."""
CLIP_SLACK = 128 * MiB
PER_BYTE = 3
"""Bytes of memory for each byte of a file that its decoder reads as a whole."""
STREAMED = (b"\xff\xd8", b"GIF8", b"BM")
"""First bytes of the image formats that are decoded while they are read; videos always are."""
DOCUMENT_PER_BYTE, DOCUMENT_SLACK = 4, 256 * MiB
"""Bytes of memory for each byte of a document, and bytes for its unpacked content."""


class Decoder:
    """Decide where and when an image is decoded. Thread-safe.

    Args:
        workers: maximum number of worker processes at a time; 0 means one for each core, but at most four.

    Attributes:
        in_process: counts what is being decoded in this process, which has a quarter of the budget.
        in_workers: counts what is being decoded in worker processes, which have the rest of it. Small images never wait
            for large ones.
        clips: lets one clip be decoded at a time, so that images find a worker while minutes of film are walked over.
        documents: lets one document be read at a time, for the same reason.
        workers: the worker processes.
    """

    def __init__(self, workers: int = 0) -> None:
        self.in_process = Budget(most=64, most_waiting=1 << 20)
        self.in_workers = Budget(workers or min(MOST_WORKERS, os.cpu_count() or 1), MOST_WAITING)
        self.clips = Budget(1, MOST_CLIPS_WAITING)
        self.documents = Budget(1, MOST_WAITING)
        self.workers = WorkerPool()

    def identify(self, data: FileBytes, rules: ImageRules, budget: int) -> Identity:
        """Return the size and the digest of an image.

        Args:
            budget: bytes that all decoding may take at a time.

        Raises:
            InvalidUpload, TooLarge: the image is not accepted; see ``pixels.opened``.
            ImageTooCostly: it takes far more time or memory than its size explains.
            DecoderBusy: too many large images are waiting.
            OutOfMemory: there is not enough memory for it now.
        """
        return self._run("identify", data, rules, budget)

    def decode(self, data: FileBytes, rules: ImageRules, budget: int) -> Image.Image:
        """Return the image, upright and in RGB. The caller must drop it before it decodes another.

        Raises:
            The errors of ``identify``, except DecoderBusy: it waits even if too many others do.
        """
        return self._run("decode", data, rules, budget)

    def thumbnail(self, data: FileBytes, rules: ImageRules, budget: int, **options: Any) -> bytes:
        """Return a small PNG of the image. ``options`` are those of ``pixels.thumbnail``. Raise as ``identify``."""
        return self._run("thumbnail", data, rules, budget, **options)

    def _run(self, do: str, data: FileBytes, rules: ImageRules, budget: int, **options: Any) -> Any:
        header = read_header(data)
        if header.format in ("PNG", "JPEG", "WEBP") and header.pixels > rules.pixels:
            raise pixels.too_large(header.width, header.height, rules)
        if header.costly:
            raise ImageTooCostly(
                f"the image is stored in so many passes over its {header.pixels:,} pixels that decoding it takes far "
                "too long; save it again as an ordinary JPEG",
                param="file",
            )
        try:
            run = self._run_here if header.small(len(data)) else self._run_in_worker
            return run(do, data, rules._replace(believed=header.pixels), budget, header, options)
        except pixels.HeaderMismatch:
            return self._run_in_worker(do, data, rules, budget, ImageHeader(), options)

    def _run_here(
        self, do: str, data: FileBytes, rules: ImageRules, budget: int, header: ImageHeader, options: dict
    ) -> Any:
        needed = header.bytes_needed(_held(data), rules.pixels) + RESULT * header.pixels
        task = getattr(pixels, do)
        with (
            self.in_process.taken(needed, budget // 4, patient=True),
            memory.set_aside(needed, "decoding the image"),
        ):
            return task(data, rules, **options)

    def _run_in_worker(
        self, do: str, data: FileBytes, rules: ImageRules, budget: int, header: ImageHeader, options: dict
    ) -> Any:
        needed = header.bytes_needed(_held(data), rules.pixels)
        # an image with more pixels will be refused anyway
        most = min(header.pixels, rules.pixels) if header.known else rules.pixels
        result = RESULT * most if do == "decode" else 0
        order = {"do": do, "what": IMAGE, "rules": rules, "options": options, "seconds": CPU_SECONDS}
        order["memory"] = needed + needed // 2 + MARGIN
        with (
            self.in_workers.taken(needed + result, budget - budget // 4, patient=do == "decode"),
            memory.set_aside(result, "the decoded image"),
            self.workers.one() as worker,
        ):
            reply = worker.run(order, data)
        if do == "decode":
            return reply.image
        return Identity(*reply.result) if do == "identify" else reply.result

    # -- clips, which are always decoded in a worker process

    def clip_facts(self, data: FileBytes, rules: ClipRules, budget: int, patient: bool = False) -> ClipFacts:
        """Return the facts about a clip, by decoding all of it, a frame at a time.

        Args:
            budget: bytes that all decoding may take at a time.
            patient: wait even if too many others do.

        Raises:
            InvalidUpload, TooLarge: the clip is not accepted; see ``clips.facts``.
            VideoTooCostly: it takes far more time or memory than its size explains.
            DecoderBusy: too many large files are waiting.
            OutOfMemory: there is not enough memory for it now.
        """
        order = {"do": "facts", "rules": rules, "options": {}}
        return ClipFacts(*self._run_clip(order, data, budget, rules.frame_pixels, patient=patient).result)

    def clip(self, data: FileBytes, rules: ClipRules, budget: int, sample: Sample) -> Clip:
        """Return the frames of a clip that ``sample`` chooses. The caller must drop them before it decodes others.

        Raises:
            VideoTooLarge: they have too many pixels together.
            Others: as ``clip_facts``, except DecoderBusy: it waits even if too many others do.
        """
        facts = self.clip_facts(data, rules, budget, patient=True)
        indices, size = tuple(sample(facts)), facts.width * facts.height
        if len(indices) * size > rules.pixels:
            raise VideoTooLarge(
                f"{len(indices)} frames of {facts.width}x{facts.height} pixels would be seen of the clip, the limit is "
                f"{rules.pixels} pixels in all: send a shorter or a smaller one",
                param="file",
            )
        result = 3 * size * len(indices)
        with memory.set_aside(result, "the decoded clip"):
            frames = np.empty((len(indices), facts.height, facts.width, 3), np.uint8)
            targets = [memoryview(frame).cast("B") for frame in frames]  # ty: ignore[invalid-argument-type] (NumPy declares it from Python 3.12 on)
            order = {"do": "frames", "rules": rules, "options": {"indices": indices, "size": facts[:2]}}
            self._run_clip(order, data, budget, size, result, targets, patient=True)
        return Clip(facts, indices, frames)

    def _run_clip(
        self,
        order: dict[str, Any],
        data: FileBytes,
        budget: int,
        pixels: int,
        result: int = 0,
        targets: Sequence[memoryview] = (),
        patient: bool = False,
    ) -> Reply:
        """Send a worker an order about a clip whose frames have at most ``pixels`` pixels; ``result`` bytes of the
        frames are kept."""
        needed = CLIP_PER_PIXEL * pixels + _held(data) + CLIP_SLACK
        order |= {"what": CLIP, "seconds": CLIP_CPU_SECONDS, "memory": needed + needed // 2 + MARGIN}
        with (
            self.clips.taken(0, 1, patient=patient),
            self.in_workers.taken(needed + result, budget - budget // 4, patient=patient),
            self.workers.one() as worker,
        ):
            return worker.run(order, data, targets)

    # -- documents, too

    def document(
        self, data: FileBytes, rules: DocumentRules, budget: int, patient: bool = False
    ) -> DocumentText:
        """Return the text of a PDF or Office document.

        Args:
            budget: bytes that all decoding may take at a time.
            patient: wait even if too many others do.

        Raises:
            InvalidUpload, TooLarge: the document is not accepted; see ``documents.read``.
            DocumentTooCostly: it takes far more time or memory than its size explains.
            DecoderBusy: too many large files are waiting.
            OutOfMemory: there is not enough memory for it now.
        """
        needed = DOCUMENT_PER_BYTE * len(data) + DOCUMENT_SLACK
        order = {
            "do": "read",
            "what": DOCUMENT,
            "rules": rules,
            "options": {},
            "seconds": DOCUMENT_CPU_SECONDS,
        }
        order["memory"] = needed
        with (
            self.documents.taken(0, 1, patient=patient),
            self.in_workers.taken(needed + rules.bytes, budget - budget // 4, patient=patient),
            memory.set_aside(rules.bytes, "the text of the document"),
            self.workers.one() as worker,
        ):
            reply = worker.run(order, data)
        return DocumentText(reply.result, reply.pages)


def _held(data: FileBytes) -> int:
    """Return the bytes of memory that the content of a file takes, apart from the decoded result."""
    streamed = data.startswith(STREAMED) or container(data[:16]) is not None
    return 0 if streamed and isinstance(data, StoredFile) else PER_BYTE * len(data)


_own = Decoder()
os.register_at_fork(after_in_child=_own.workers.forget)


def decoder() -> Decoder:
    """Return the decoder that the whole process shares."""
    return _own
