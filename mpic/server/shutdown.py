"""Ends the process in an orderly way where that is possible, and by force where it is not.

A thread can be blocked for ever, in a read of a file system that has gone or in a library that never returns, and so
can the event loop. Python waits for such threads when it exits. A timer, started by the first signal, ends the process
when the time is over. Nothing that was acknowledged is lost, just as with ``kill -9``.
"""

from __future__ import annotations

import faulthandler
import os
import select
import sys
import threading
import time
import traceback
from contextlib import suppress
from types import FrameType

FORCED = 70
"""Exit status of a process whose engine or library could not be closed in time (``EX_SOFTWARE`` of sysexits.h)."""
THREAD_SECONDS = 2.0
"""Seconds that threads may still take after everything has been closed."""
LAST_SECONDS = 1.0
"""Seconds for the last lines on stderr; who should read it may be blocked, too."""
FRAMES = 3
SAID = {
    FORCED: "The server could not be closed in time, so it ends by force. Everything that was acknowledged is on disk.",
    0: "The server is closed; threads that are still blocked are left behind.",
}
STDERR = 2


class ShutdownTimer:
    """Ends the process when it has not ended by itself.

    Args:
        grace: seconds that running answers have to finish after the first signal.
        closing: seconds for closing the rest. A second signal ends the grace period.
    """

    def __init__(self, grace: float, closing: float) -> None:
        self.grace = grace
        self.closing = closing
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        threading.Thread(target=self._watch, name="mpic-shutdown", daemon=True).start()

    def signalled(self) -> None:
        """Start the timer. It may be called in a signal handler, because it takes no lock."""
        self._send(b"s")

    def closed(self) -> None:
        """Report that everything has been closed in order, so that only threads can keep the process from ending."""
        self._send(b"c")

    def _send(self, message: bytes) -> None:
        try:
            os.write(self._writer, message)
        except BlockingIOError:  # thousands of signals have come; the first few are enough
            return

    def _watch(self) -> None:
        os.read(self._reader, 1)
        deadline = time.monotonic() + self.grace + self.closing
        status = FORCED
        # This second timer does not need the lock of the interpreter, which a blocked thread may hold.
        last = self.grace + self.closing + LAST_SECONDS + THREAD_SECONDS
        faulthandler.dump_traceback_later(last, exit=True, file=STDERR)
        while (left := deadline - time.monotonic()) > 0:
            if not select.select([self._reader], [], [], left)[0]:
                continue
            if os.read(self._reader, 1) == b"c":
                status, deadline = 0, min(deadline, time.monotonic() + THREAD_SECONDS)
            else:
                deadline = min(deadline, time.monotonic() + self.closing)
        # not through the log, whose lock a blocked thread may hold
        with suppress(OSError):  # its reader has gone
            _say("".join(f"{line}\n" for line in (SAID[status], *threads())).encode())
        os._exit(status)


def _say(text: bytes) -> None:
    """Write as much to stderr as its reader takes. A pipe that is ready takes ``PIPE_BUF`` bytes without blocking."""
    for start in range(0, len(text), select.PIPE_BUF):
        if not select.select([], [STDERR], [], LAST_SECONDS)[1]:
            return
        os.write(STDERR, text[start : start + select.PIPE_BUF])


def threads() -> list[str]:
    """Return a line about each running thread: its name and the innermost frames of its stack."""
    stacks = sys._current_frames()
    own = threading.current_thread()
    return [
        f"thread {one.name}: {_where(stacks[one.ident])}"
        for one in threading.enumerate()
        if one.ident in stacks and one is not own and one.name != "mpic-shutdown"
    ]


def _where(frame: FrameType) -> str:
    walk = traceback.walk_stack(frame)  # from the innermost frame outwards
    frames = traceback.StackSummary.extract(walk, limit=FRAMES, lookup_lines=False)  # no source is read
    return " > ".join(f"{os.path.basename(f.filename)}:{f.lineno} {f.name}" for f in reversed(frames))
