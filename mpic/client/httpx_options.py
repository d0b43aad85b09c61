"""Sets up httpx for both clients, and converts an ``ApiRequest`` to arguments of httpx."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import httpx

from mpic.client.endpoints import ApiRequest
from mpic.client.sources import BodyStream
from mpic.errors import BadRequest
from mpic.version import VERSION

DEFAULT_URL = "http://127.0.0.1:8000"
CONNECTIONS = 256
"""Maximum connections of one client: half of what a server allows one address by default. Further requests wait for a
free connection."""
LIMITS = httpx.Limits(max_connections=CONNECTIONS, max_keepalive_connections=64)
TIMEOUT = httpx.Timeout(10, read=600, write=600, pool=600)
KEY_VARIABLE, URL_VARIABLE = "MPIC_API_KEY", "MPIC_URL"
LOCAL_HOSTS = ("127.0.0.1", "localhost", "::1")
H = TypeVar("H", httpx.Client, httpx.AsyncClient)


def server_address(url: str | None) -> str:
    """Return the address of a server, without a final ``/v1``.

    Args:
        url: the address; ``host:port`` and ``:port`` (on this machine) are accepted, too. None reads the environment
            variable MPIC_URL; the default is ``DEFAULT_URL``.

    Raises:
        BadRequest: it is not an address.
    """
    given = (os.environ.get(URL_VARIABLE) or DEFAULT_URL) if url is None else url
    address = given.strip().rstrip("/").removesuffix("/v1")
    if "://" not in given:
        address = f"http://{'127.0.0.1' if address.startswith(':') else ''}{address}"
    try:
        parsed = httpx.URL(address)
        right = parsed.scheme in ("http", "https") and re.fullmatch(r"[^\s%]+", parsed.host)
    except httpx.InvalidURL:
        right = False
    if not right:
        raise BadRequest(f"{given!r} is not the address of a server, such as {DEFAULT_URL}", param="base_url")
    return address


def client_options(
    base_url: str | None, api_key: str | None, timeout: float | httpx.Timeout | None
) -> dict[str, Any]:
    """Return the arguments of an httpx client.

    Args:
        base_url: see ``server_address``.
        api_key: None reads the environment variable MPIC_API_KEY; "" sends none. White space around it, such as the
            line feed at the end of a file, is stripped.
        timeout: see ``TIMEOUT`` for the default. Waiting for a free connection of the client's own pool is not such a
            step, so a number does not shorten that wait.

    Raises:
        BadRequest: the address or the key cannot be one.
    """
    url = server_address(base_url)
    key = ((os.environ.get(KEY_VARIABLE) if api_key is None else api_key) or "").strip()
    if not (key.isascii() and key.isprintable()):
        raise BadRequest("the API key has characters that a key cannot have", param="api_key")
    headers = {"User-Agent": f"mpic-python/{VERSION}"}
    if key:
        headers["Authorization"] = f"Bearer {key}"
    return {
        "base_url": url,
        "headers": headers,
        "timeout": _timeout(timeout),
        "limits": LIMITS,
        "trust_env": httpx.URL(url).host not in LOCAL_HOSTS,  # a proxy cannot reach this machine
    }


def http_client(kind: Callable[..., H], **options: Any) -> H:
    """Return an httpx client, which reads the proxies and certificates of the environment while it is made.

    Args:
        kind: its class.
        options: see ``client_options``; and ``transport``.

    Raises:
        BadRequest: the environment names a proxy or certificates that httpx cannot use.
    """
    try:
        return kind(**options)
    except (ImportError, ValueError, OSError, httpx.InvalidURL) as error:
        raise BadRequest(
            f"the proxy or the certificates that the environment names cannot be used: {error} (HTTP_PROXY, "
            "HTTPS_PROXY, ALL_PROXY, NO_PROXY, SSL_CERT_FILE, SSL_CERT_DIR)"
        ) from error


def _timeout(timeout: float | httpx.Timeout | None) -> httpx.Timeout:
    if timeout is None or isinstance(timeout, httpx.Timeout):
        return timeout or TIMEOUT
    return httpx.Timeout(timeout, pool=TIMEOUT.pool)


@contextmanager
def request_options(request: ApiRequest[Any]) -> Iterator[dict[str, Any]]:
    """Yield the arguments of an httpx request; the file of an upload is open meanwhile."""
    options: dict[str, Any] = {"params": request.params or None}
    if request.json is not None:
        options["json"] = request.json
    if request.upload is None:
        yield options
    elif request.upload.field is None:
        with request.upload.read() as body:
            headers = {"Content-Type": "application/octet-stream"}
            if body.size is not None:
                headers["Content-Length"] = str(body.size)
            yield {**options, "content": BodyStream(body), "headers": headers}
    else:
        with request.upload.opened() as file:
            yield {**options, "data": request.form, "files": {request.upload.field: file}}


def unsendable(request: ApiRequest[Any], error: Exception) -> BadRequest:
    """Return the error, naming the field at fault, for a request that httpx cannot encode."""
    for fields in (request.json, request.form, request.params):
        for name, value in fields.items() if isinstance(fields, Mapping) else ():
            why = _no_json(value)
            if why is not None:
                return BadRequest(f"{name} cannot be sent: {why}", param=str(name))
    return BadRequest(f"the request cannot be sent: {error}")


def _no_json(value: Any) -> str | None:
    """Return the reason why JSON in UTF-8 cannot hold a value, or None."""
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False, default=str).encode()
    except UnicodeEncodeError:
        return "it has text that is not Unicode (bytes that are not UTF-8, or half of a surrogate pair)"
    except ValueError as error:
        return str(error)
    return None
