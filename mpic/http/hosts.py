"""Host names in URLs and headers."""

from __future__ import annotations

import ipaddress
import re


def is_loopback(host: str) -> bool:
    """Return whether ``host`` is this machine and nothing else: ``localhost``, or an address such as 127.0.0.1."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def seen_from_here(url: str) -> str:
    """Return the URL at which a browser on this machine reaches a server that listens on ``url``, which may stand for
    all addresses."""
    return url.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")


def is_address(name: str) -> bool:
    """Return whether ``name`` is an IP address."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def host_name(host: str) -> str | None:
    """Return the name in ``localhost:8000``; None unless the text is exactly a name with or without a port."""
    match = re.fullmatch(r"(?:\[([0-9a-f:]+)\]|([a-z0-9.-]+))(?::\d+)?", host.lower())
    return match and (match[1] or match[2])
