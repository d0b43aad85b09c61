"""Decoding for the whole process: small images where they are, large ones in workers, few at a time.

All of a process's libraries and pages share one decoder, because they share its memory.
"""

from __future__ import annotations

import os
from functools import cache
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
"""Below the number of threads that answer requests, so that a flood of large images leaves some for everything else."""
MARGIN = 96 * MiB
"""Of a worker's memory limit: text and colour profiles that are unpacked before the pixels."""
RESULT = 4
"""Bytes that a pixel of a decoded image takes."""


class Decoder:
    """Thread-safe.

    Args:
        workers: most processes; 0: one a core, at most four.

    Attributes:
        here: what is being decoded in this process; ``away``: in workers. A quarter and three quarters of the budget,
            so that small images never wait for large ones.
    """

    def __init__(self, workers: int = 0) -> None:
        self.here = Budget(places=64, most_waiting=1 << 20)
        self.away = Budget(workers or min(MOST_WORKERS, os.cpu_count() or 1), MOST_WAITING)
        self.processes = Processes()

    def identify(self, data: bytes, rules: Rules, budget: int) -> Identity:
        """Size and digest of an image.

        Args:
            budget: bytes that decoding may take at a time, all together.

        Raises:
            InvalidUpload, TooLarge: it is not accepted; see ``pixels.opened``. ImageTooCostly: it takes too much.
            DecoderBusy: too many large images are waiting.
            OutOfMemory: there is not enough for it now.
        """
        return self._run("identify", data, rules, budget)

    def decode(self, data: bytes, rules: Rules, budget: int) -> Image.Image:
        """The image, upright and RGB: for a caller who lets go of it before taking another. It waits however many
        others do. Raises as ``identify``, but DecoderBusy."""
        return self._run("decode", data, rules, budget)

    def thumbnail(self, data: bytes, rules: Rules, budget: int, **options: Any) -> bytes:
        """A small PNG; ``options`` as of ``pixels.thumbnail``. Raises as ``identify``."""
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


@cache
def decoder() -> Decoder:
    """This process's own."""
    return Decoder()
