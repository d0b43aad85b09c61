"""The end of the process: in order where that is possible, by force where it is not.

A thread can be blocked for ever, in a read of a file system that has gone or in a library that never returns, and so
can the event loop. Python waits for such threads when it exits. A watchdog, woken by the first signal, ends the process
when its time is over. Nothing that was acknowledged is lost, as nothing is by ``kill -9``.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import select
import sys
import threading
import time
import traceback
from types import FrameType

FORCED = 70
"""Exit status of a process whose engine or library could not be closed in time (``EX_SOFTWARE`` of sysexits.h)."""
AFTERWARDS = 2.0
"""Seconds that threads may still take when everything has been closed."""
TELLING = 1.0
"""Seconds for the last words in the log: whoever holds the log's lock may be the one that is blocked."""
FRAMES = 3
STDERR = 2
log = logging.getLogger("mpic.server")


class Watchdog:
    """Ends the process when it has not ended by itself.

    Args:
        grace: seconds that running answers have after the first signal.
        closing: seconds for what comes after them. A second signal ends the grace.
    """

    def __init__(self, grace: float, closing: float) -> None:
        self.grace = grace
        self.closing = closing
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        threading.Thread(target=self._watch, name="mpic-watchdog", daemon=True).start()

    def signalled(self) -> None:
        """The process was told to end. Safe in a signal handler: it takes no lock."""
        self._say(b"s")

    def closed(self) -> None:
        """Everything has been closed in order; only threads can keep the process from ending now."""
        self._say(b"c")

    def _say(self, word: bytes) -> None:
        try:
            os.write(self._writer, word)
        except BlockingIOError:  # thousands of signals; the first few were enough
            return

    def _watch(self) -> None:
        os.read(self._reader, 1)
        deadline = time.monotonic() + self.grace + self.closing
        status = FORCED
        # This timer needs no lock of the interpreter's, which a thread may be holding when the time is over.
        last = self.grace + self.closing + TELLING + AFTERWARDS
        faulthandler.dump_traceback_later(last, exit=True, file=STDERR)
        while (left := deadline - time.monotonic()) > 0:
            if not select.select([self._reader], [], [], left)[0]:
                continue
            if os.read(self._reader, 1) == b"c":
                status, deadline = 0, min(deadline, time.monotonic() + AFTERWARDS)
            else:
                deadline = min(deadline, time.monotonic() + self.closing)
        telling = threading.Thread(target=_tell, args=(status,), name="mpic-last-words", daemon=True)
        telling.start()
        telling.join(TELLING)
        os._exit(status)


def _tell(status: int) -> None:
    """Name the threads that are still there."""
    if status:
        log.error(
            "The server could not be closed in time, so it ends by force. What was acknowledged is on disk."
        )
    else:
        log.warning("The server is closed; threads that are still blocked are left behind.")
    for line in threads():
        log.warning("%s", line)


def threads() -> list[str]:
    """One line about each running thread: its name and the innermost frames of its stack."""
    stacks = sys._current_frames()
    here = threading.current_thread()
    return [
        f"thread {one.name}: {_where(stacks[one.ident])}"
        for one in threading.enumerate()
        if one.ident in stacks and one is not here and one.name != "mpic-watchdog"
    ]


def _where(frame: FrameType) -> str:
    frames = traceback.extract_stack(frame)[-FRAMES:]
    return " > ".join(f"{os.path.basename(f.filename)}:{f.lineno} {f.name}" for f in frames)
