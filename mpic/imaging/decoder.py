"""Decoding for the whole process: small images are decoded in it, large ones in workers, a few at a time.

All of a process's libraries and pages share one decoder, because they share its memory.
"""

from __future__ import annotations

import os
from typing import Any

from PIL import Image

from mpic import memory
from mpic.imaging import pixels
from mpic.imaging.budget import Budget
from mpic.imaging.claims import Claim, MiB, read_claim
from mpic.imaging.pixels import Identity, Rules
from mpic.imaging.processes import CPU_SECONDS, Processes

MOST_WORKERS = 4
MOST_WAITING = 16
"""This is less than half of the threads that answer requests, so that a flood of large images leaves threads for the
rest."""
MARGIN = 96 * MiB
"""A worker may take this much beyond its estimate, for text and colour profiles that are unpacked before the pixels."""
RESULT = 4
"""Bytes that Pillow takes for a pixel of a decoded image."""


class Decoder:
    """Decides where and when an image is decoded. Thread-safe.

    Args:
        workers: the most processes at a time; 0 means one for each core, but at most four.

    Attributes:
        here: counts what is being decoded in this process, which has a quarter of the budget.
        away: counts what is being decoded in workers, which have the rest. Small images never wait for large ones.
    """

    def __init__(self, workers: int = 0) -> None:
        self.here = Budget(places=64, most_waiting=1 << 20)
        self.away = Budget(workers or min(MOST_WORKERS, os.cpu_count() or 1), MOST_WAITING)
        self.processes = Processes()

    def identify(self, data: bytes, rules: Rules, budget: int) -> Identity:
        """Size and digest of an image.

        Args:
            budget: bytes that all decoding may take at a time.

        Raises:
            InvalidUpload, TooLarge: the image is not accepted; see ``pixels.opened``.
            ImageTooCostly: it takes far more time or memory than its size explains.
            DecoderBusy: too many large images are waiting.
            OutOfMemory: there is not enough memory for it now.
        """
        return self._run("identify", data, rules, budget)

    def decode(self, data: bytes, rules: Rules, budget: int) -> Image.Image:
        """The image, upright and in RGB. The caller must let go of it before it takes another.

        Raises the same as ``identify`` except DecoderBusy: it waits even when too many others do.
        """
        return self._run("decode", data, rules, budget)

    def thumbnail(self, data: bytes, rules: Rules, budget: int, **options: Any) -> bytes:
        """A small PNG of the image. ``options`` are those of ``pixels.thumbnail``. Raises the same as ``identify``."""
        return self._run("thumbnail", data, rules, budget, **options)

    def _run(self, do: str, data: bytes, rules: Rules, budget: int, **options: Any) -> Any:
        claim = read_claim(data)
        if claim.format in ("PNG", "JPEG", "WEBP") and claim.pixels > rules.pixels:
            raise pixels.too_large(claim.width, claim.height, rules)
        try:
            where = self._here if claim.small(len(data)) else self._away
            return where(do, data, rules._replace(believed=claim.pixels), budget, claim, options)
        except pixels.Contradiction:
            return self._away(do, data, rules, budget, Claim(), options)

    def _here(self, do: str, data: bytes, rules: Rules, budget: int, claim: Claim, options: dict) -> Any:
        needed = claim.bytes_needed(len(data), rules.pixels) + RESULT * claim.pixels
        task = getattr(pixels, do)
        with (
            self.here.taken(needed, budget // 4, patient=True),
            memory.set_aside(needed, "decoding the image"),
        ):
            return task(data, rules, **options)

    def _away(self, do: str, data: bytes, rules: Rules, budget: int, claim: Claim, options: dict) -> Any:
        needed = claim.bytes_needed(len(data), rules.pixels)
        most = (
            min(claim.pixels, rules.pixels) if claim.known else rules.pixels
        )  # one with more will be refused
        result = RESULT * most if do == "decode" else 0
        order = {"do": do, "rules": rules, "options": options, "seconds": CPU_SECONDS}
        order["memory"] = needed + needed // 2 + MARGIN
        with (
            self.away.taken(needed + result, budget - budget // 4, patient=do == "decode"),
            memory.set_aside(result, "the decoded image"),
            self.processes.one() as worker,
        ):
            reply = worker.run(order, data)
        if do == "decode":
            return reply.image
        return Identity(*reply.result) if do == "identify" else reply.result


_own = Decoder()
os.register_at_fork(after_in_child=_own.processes.forget)


def decoder() -> Decoder:
    """The decoder that all of this process shares."""
    return _own
