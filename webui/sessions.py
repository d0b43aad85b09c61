"""Finds out who makes a request to the interface: a cookie stands for a login, which the key store keeps."""

from __future__ import annotations

import re
from typing import NamedTuple

from mpic.keys import Key, Role

COOKIE = "mpic_session"
COOKIE_VALUE = re.compile(rb"[A-Za-z0-9_-]{1,128}")


class Visitor(NamedTuple):
    """The user who makes a request. ``key`` is None if the server needs none."""

    user: str
    role: Role
    key: Key | None
