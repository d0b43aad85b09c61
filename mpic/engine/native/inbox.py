"""Messages to the engine's thread, from any thread."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable

from mpic.errors import EngineStopped

log = logging.getLogger(__name__)


class Inbox:
    """A queue of calls that the engine's thread makes between two steps. Once it is ``closed`` it takes only quiet
    ones; ``lock`` is held while that changes."""

    def __init__(self) -> None:
        self.lock = threading.Condition()
        self.closed = False
        self._messages: deque[Callable[[], None]] = deque()

    def __bool__(self) -> bool:
        return bool(self._messages)

    def post(self, message: Callable[[], None], quiet: bool = False) -> None:
        """Queue a call for the engine's thread. Raise EngineStopped when the engine stops, unless the call is
        quiet."""
        with self.lock:
            if self.closed and not quiet:
                raise EngineStopped("the engine has been stopped")
            self._messages.append(message)
            self.lock.notify_all()

    def wait(self, work_left: Callable[[], bool]) -> bool:
        """Wait for a message, for work or for the engine to stop. Return whether the engine stops."""
        with self.lock:
            self.lock.wait_for(lambda: self._messages or self.closed or work_left())
            return self.closed

    def handle(self) -> None:
        """Make the queued calls. A call that fails does not prevent the others."""
        with self.lock:
            messages = list(self._messages)
            self._messages.clear()
        for message in messages:
            try:
                message()
            except Exception:
                log.exception("a message to the engine failed")

    def close(self) -> bool:
        """Close the inbox. Return False if it was closed already."""
        with self.lock:
            if self.closed:
                return False
            self.closed = True
            self.lock.notify_all()
            return True
