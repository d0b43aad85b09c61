"""When a request is sent again, and how long to wait before."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from email.utils import parsedate_to_datetime

import httpx

REFUSED = (429, 503)
"""Said before anything was done: whatever was asked may be asked again."""

NEVER_SENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)
BROKEN = (httpx.ReadError, httpx.WriteError, httpx.CloseError, httpx.RemoteProtocolError)


@dataclass(frozen=True)
class Retry:
    """Exponential backoff with jitter.

    A refusal (429, 503) and a connection that was never made are tried again whatever was asked. A connection that
    broke later leaves open whether the server has done it: only what may be done twice is tried again. An answer that
    did not come in time is not: it would not come sooner the second time.

    Args:
        most: how often to try again.
        first: seconds before the first repetition; doubled for each further one.
        longest: most seconds to wait. When the server asks for a longer wait (Retry-After) its refusal is raised.
    """

    most: int = 2
    first: float = 0.5
    longest: float = 60.0

    def wait(
        self, attempt: int, repeatable: bool, outcome: httpx.Response | httpx.TransportError
    ) -> float | None:
        """Seconds to wait before the next attempt; None to give up.

        Args:
            attempt: 0 for the first.
            repeatable: whether doing it twice is harmless.
        """
        if attempt >= self.most:
            return None
        if isinstance(outcome, httpx.Response):
            if outcome.status_code not in REFUSED:
                return None
            asked = retry_after(outcome)
            if asked is not None:
                return asked if asked <= self.longest else None
        elif not isinstance(outcome, NEVER_SENT) and not (repeatable and isinstance(outcome, BROKEN)):
            return None
        pause = min(self.first * 2**attempt, 8.0, self.longest)
        return pause * random.uniform(0.75, 1.0)


def retry_after(response: httpx.Response) -> float | None:
    """Seconds the server asks to wait; the header is a number of seconds or a date."""
    value = response.headers.get("retry-after")
    if value is None:
        return None
    if value.isdecimal():
        return float(value)
    try:
        return max(0.0, parsedate_to_datetime(value).timestamp() - time.time())
    except ValueError:
        return None
