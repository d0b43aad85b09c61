"""Forms: at most one file, and a few short texts in UTF-8.

Starlette bounds each text of a form by 1 MiB and decodes it, on the event loop, by whatever codec of Python's the
client names. Here the client has no choice, and all texts of a form have one bound.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import aclosing
from typing import Any, cast
from urllib.parse import unquote_to_bytes

from python_multipart.multipart import parse_options_header
from starlette.datastructures import FormData, Headers, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from mpic.errors import BadRequest, TooLarge, cut
from mpic.http import errors
from mpic.library.intake.receive import Arriving

MULTIPART = b"multipart/form-data"
UTF_8 = frozenset({b"utf-8", b"utf8"})
MAX_FILES, MAX_FIELDS = 1, 32
"""Most files and other fields of an upload's form. A file takes a descriptor as it arrives, and one for each connection
is counted on (``descriptors.PER_CONNECTION``). No route knows as many fields: this is so that a refusal can still name
an unknown one."""
EXTENDED_NAME = re.compile(
    rb""""(?:\\.|[^"\\])*+"?|;\s*filename\*\s*=\s*"?(?P<charset>[\w-]*)'[\w-]*'(?P<name>[^;"\s]++)""",
    re.IGNORECASE | re.DOTALL,
)
"""A quoted text, or a file's name with its charset."""
TEXT_BYTES = 1 << 19
"""Bytes that all texts of an upload's form may take together. They are in memory until the answer has ended, with up to
four times as many bytes if they are not ASCII. The largest metadata takes some 410 KiB if its JSON escapes every
character as two halves of a pair."""


class FormCharset:
    """Refuses multipart forms whose header names another charset than UTF-8.

    The name would choose a codec of Python's. Some take time quadratic in the length of a text (``punycode``), on the
    event loop and before any key is checked, and Python never forgets a name that it was asked for.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (error := self._refuse(Headers(scope=scope))):
            return await errors.response(error)(scope, receive, send)
        await self.app(scope, receive, send)

    def _refuse(self, headers: Headers) -> BadRequest | None:
        kind, options = parse_options_header(headers.get("content-type"))  # as Starlette reads it
        charset = options.get(b"charset", b"utf-8")
        if kind != MULTIPART or charset.lower() in UTF_8:  # of other forms nobody reads the charset
            return None
        named = cut(charset.decode("latin-1"))
        return BadRequest(f"the charset of a form is utf-8, not {named!r}", param="Content-Type")


async def read_form(request: Request, arriving: Callable[[str], Arriving]) -> FormData:
    """Read the form of an upload, whose file is written as it arrives. A body of another kind is not read and gives an
    empty one, in which ``form_fields`` then misses the file.

    Args:
        arriving: name of the field -> an upload of which no byte has arrived yet.

    Raises:
        BadRequest: it is malformed, or has too many files or fields, or a text that is not UTF-8.
        TooLarge: its texts take more than ``TEXT_BYTES``, or its file is larger than an upload may be.
        StorageFull, LibraryGone: its file cannot be stored.
    """
    kind, _ = parse_options_header(request.headers.get("content-type"))
    if kind != MULTIPART:
        return FormData()
    async with aclosing(request.stream()) as stream:
        bounds = {"max_files": MAX_FILES, "max_fields": MAX_FIELDS, "max_part_size": TEXT_BYTES}
        try:
            return await _UploadParser(arriving, request.headers, stream, **bounds).parse()
        except MultiPartException as error:
            why = error.message
            if why.startswith("Too many files"):
                why = "a form has one file; all other fields are texts"
            raise BadRequest(why) from error


class FormFile(UploadFile):
    """A file of a form. Its ``file`` is ``Arriving``: the library has what has arrived."""

    file: Any

    async def write(self, data: bytes) -> None:
        await self.file.write(data)

    async def seek(self, offset: int) -> None:
        """Do nothing: the library reads it."""

    async def close(self) -> None:
        self.file.close()


def _with_plain_name(disposition: bytes) -> bytes:
    """Return a Content-Disposition whose ``filename`` is what its ``filename*`` says, if it has one (RFC 5987)."""
    for found in EXTENDED_NAME.finditer(disposition):
        if found["name"] is None:  # a quoted text, in which nothing counts
            continue
        codec = "latin-1" if found["charset"].lower() == b"iso-8859-1" else "utf-8"
        name = unquote_to_bytes(found["name"]).decode(codec, "replace").encode()
        quoted = re.sub(rb'[\\"]', rb"\\\g<0>", name)
        return disposition + b'; filename="' + quoted + b'"'
    return disposition


class _UploadParser(MultiPartParser):
    """Starlette's parser, which gives the bytes of files to the library, with a bound on all texts of a form together,
    each of which has to be UTF-8. Names of files that are not are read as Latin-1, as Starlette does: they are what a
    file happens to be called. ``filename*`` counts too: clients send it for names that are not ASCII, although RFC 7578
    wants none.
    """

    def __init__(self, arriving: Callable[[str], Arriving], *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._arriving = arriving
        self._text_bytes = 0

    def on_headers_finished(self) -> None:
        part = self._current_part
        if part.content_disposition is not None:
            part.content_disposition = _with_plain_name(part.content_disposition)
        super().on_headers_finished()
        if part.file is not None:
            arriving = self._arriving(cut(part.field_name))
            part.file = FormFile(cast(Any, arriving), filename=part.file.filename, headers=part.file.headers)
            self._files_to_close_on_error.append(cast(Any, arriving))

    def on_part_data(self, data: bytes, start: int, end: int) -> None:
        if self._current_part.file is None:
            self._text_bytes += end - start
            if self._text_bytes > TEXT_BYTES:
                raise TooLarge(
                    f"the texts of a form may take {TEXT_BYTES:,} bytes together", limit_bytes=TEXT_BYTES
                )
        super().on_part_data(data, start, end)

    def on_part_end(self) -> None:
        part = self._current_part
        if part.file is None:
            try:
                part.data.decode()
            except UnicodeDecodeError:
                name = cut(part.field_name)
                raise BadRequest(
                    f"the field {name!r} is not UTF-8, as texts of forms are", param=name
                ) from None
        super().on_part_end()
