"""Decides whether to send a request again, and how long to wait first."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from email.utils import parsedate_to_datetime

import httpx

REFUSED = (429, 503)
"""Statuses by which a server refuses a request before doing anything, so that any request may be sent again."""

NEVER_SENT = (httpx.ConnectError, httpx.ConnectTimeout)
BROKEN = (httpx.ReadError, httpx.WriteError, httpx.CloseError, httpx.RemoteProtocolError)


@dataclass(frozen=True)
class Retry:
    """Exponential backoff with jitter.

    Any request is sent again after a refusal (429, 503) or if the connection was never made. After a connection that
    broke later, the server may have done the work: only repeatable requests are sent again. A request that timed out is
    not sent again, because it would not be faster the second time.

    Args:
        most: maximum number of times that a request is sent again.
        first: seconds before the first repetition; doubled for each further one.
        longest: maximum number of seconds to wait. If the server asks for a longer wait (Retry-After), its refusal is
            raised.
    """

    most: int = 2
    first: float = 0.5
    longest: float = 60.0

    def wait(
        self, attempt: int, repeatable: bool, outcome: httpx.Response | httpx.RequestError
    ) -> float | None:
        """Return the seconds to wait before the next attempt; None to give up.

        Args:
            attempt: 0 for the first.
            repeatable: True if the request can be done twice without harm.
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
    """Return the seconds the server asks to wait; the header is a number of seconds or a date."""
    value = response.headers.get("retry-after")
    if value is None:
        return None
    if value.isdecimal():
        return float(value)
    try:
        return max(0.0, parsedate_to_datetime(value).timestamp() - time.time())
    except ValueError:
        return None
