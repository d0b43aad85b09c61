"""Self-tests that have passed, kept in a file, so that a start need not prove again what an earlier one has proved.

A proof is kept under a digest of everything that it depends on (``proof_subject``). Only tests that passed are kept.
The file decides whether a test is skipped, so it holds numbers and times, never code, and is used only where nobody but
its owner can write. Whatever else is found in its place is ignored, with a line in the log, and the test runs.
"""

from __future__ import annotations

import json
import logging
import math
import os
import stat
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from mpic.durable import FileSystem, write_durably
from mpic.errors import MPICError
from mpic.model.loaded import LoadedModel
from mpic.model.proof_subject import subject

log = logging.getLogger(__name__)

NAME = "self-tests.json"
"""The name of the file that keeps proofs, in the folder of a library."""
FORMAT = 1
MOST = 32
"""The number of proofs that are kept; they are the newest ones."""
MOST_BYTES = 1 << 16
"""The size in bytes up to which a file is read."""

_AS_IT_IS = os.O_NOFOLLOW | os.O_NONBLOCK
"""Flags with which no link is followed, and no pipe waited for."""


@dataclass(frozen=True)
class Proof:
    """A self-test that has passed: its relative error, and the time (ISO 8601, UTC)."""

    error: float
    passed: str


class Untrusted(Exception):
    """The file is not one that this program has written and nobody else can change; the message says why."""


class Proofs:
    """The proofs of one start.

    Args:
        path: the file; None keeps nothing.
        always: run every test, whatever is kept.
    """

    def __init__(self, path: Path | None = None, always: bool = False) -> None:
        self.path, self.always = path, always
        self.earlier: list[Proof] = []
        self._new = 0

    def error_of(self, loaded: LoadedModel, name: str, test: Callable[[LoadedModel], float]) -> float:
        """Return the relative error of a self-test, which is run unless a proof of it is kept.

        Raises:
            ModelRefused: the test has failed; nothing is kept.
        """
        key = subject(loaded, name) if self.path is not None else None
        if key is not None and not self.always and (known := self._read().get(key)):
            self.earlier.append(known)
            return known.error
        if self.path is not None and key is None:
            log.info(
                "self-test of %s: sources have changed since this process began, so it is not kept", name
            )
        error = test(loaded)
        self._new += 1
        if key is not None:
            self._keep(key, Proof(error, datetime.now(UTC).isoformat(timespec="seconds")))
        return error

    @property
    def summary(self) -> str:
        """Say when the tests of this start have passed."""
        if not self.earlier:
            return "passed at this start"
        oldest = min(proof.passed for proof in self.earlier)
        rest = f"; {self._new} ran again at this start" if self._new else ""
        return f"passed at {oldest}, and nothing it depends on has changed{rest}"

    def _read(self) -> dict[str, Proof]:
        assert self.path is not None
        try:
            return _parsed(_bytes_of(self.path))
        except FileNotFoundError:
            return {}
        except Untrusted as reason:
            log.warning("%s is ignored, and the self-tests run: %s", self.path, reason)
            return {}

    def _keep(self, key: str, proof: Proof) -> None:
        assert self.path is not None
        try:
            _refuse_folder(self.path.parent)
        except Untrusted as reason:
            log.warning("the self-tests run at every start: %s", reason)
            return
        kept = {**self._read(), key: proof}
        newest = sorted(kept.items(), key=lambda item: item[1].passed)[-MOST:]
        body = {"format": FORMAT, "proofs": {one: asdict(found) for one, found in newest}}
        try:
            write_durably(FileSystem(), self.path, [memoryview(json.dumps(body, indent=1).encode())])
        except (OSError, MPICError) as error:
            # a full disk does not keep a model that passed from being served
            log.warning("the self-tests run again at the next start: %s cannot be written: %s", NAME, error)


def _bytes_of(path: Path) -> bytes:
    """Return the file's content. Raise FileNotFoundError, Untrusted."""
    _refuse_folder(path.parent)
    try:
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | _AS_IT_IS)) as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode):
                raise Untrusted("it is not a file")
            if _others_can_write(found):
                raise Untrusted("it belongs to another user, or others can write it")
            content = file.read(MOST_BYTES + 1)
    except FileNotFoundError:
        raise
    except OSError as error:  # a link, a folder, or a file that cannot be read
        raise Untrusted(f"it cannot be read: {error}") from None
    if len(content) > MOST_BYTES:
        raise Untrusted(f"it is larger than {MOST_BYTES} bytes")
    return content


def _refuse_folder(folder: Path) -> None:
    """Raise Untrusted if others can write in a folder, FileNotFoundError if there is none."""
    if _others_can_write(os.stat(folder)):
        raise Untrusted(f"{folder} belongs to another user, or others can write there (chmod go-w)")


def _others_can_write(found: os.stat_result) -> bool:
    return found.st_uid != os.geteuid() or bool(found.st_mode & 0o022)


def _parsed(content: bytes) -> dict[str, Proof]:
    """Return the proofs in a file. Raise Untrusted if it does not hold proofs alone."""
    try:
        body = json.loads(content)
    except (ValueError, RecursionError):
        raise Untrusted("it is not JSON") from None
    if not isinstance(body, dict) or body.get("format") != FORMAT or not isinstance(body.get("proofs"), dict):
        raise Untrusted("it has another form")
    return {key: _proof(value) for key, value in body["proofs"].items()}


def _proof(value: Any) -> Proof:
    if not isinstance(value, dict) or value.keys() != {"error", "passed"}:
        raise Untrusted("a proof in it has another form")
    error, passed = value["error"], value["passed"]
    if type(error) is not float or not math.isfinite(error) or not 0 <= error < 1:
        raise Untrusted("a proof in it has an error that no test passes with")
    try:
        datetime.fromisoformat(passed)
    except (TypeError, ValueError):
        raise Untrusted("a proof in it has no time") from None
    return Proof(error, passed)
