"""The checks that every upload has to pass: names, ids, metadata, and the content itself."""

from __future__ import annotations

import math
import secrets
import string
from collections.abc import Mapping

from mpic.errors import BadRequest, cut
from mpic.handles import LONGEST, canonical, is_handle
from mpic.library.folder.originals import Incoming
from mpic.library.intake.decode import NO_CLIPS, Content, content_of
from mpic.library.limits import Limits
from mpic.library.records import Scalar
from mpic.limits import LONGEST_LIFE

ID_ALPHABET = string.ascii_letters + string.digits
METADATA_KEYS, METADATA_KEY_CHARS, METADATA_VALUE_CHARS = 32, 64, 1024


def new_id(prefix: str) -> str:
    """Return ``prefix`` and 24 random letters and digits."""
    return prefix + "".join(secrets.choice(ID_ALPHABET) for _ in range(24))


def identify(incoming: Incoming, limits: Limits, no_clips: str | None = NO_CLIPS) -> Content:
    """Return the identity of an upload's content, found by decoding it.

    Args:
        no_clips: why clips are not taken, see ``content_of``.

    Raises:
        InvalidUpload, TooLarge: the content is not accepted.
        DecoderBusy: too many large uploads are waiting.
        OutOfMemory: there is not enough memory to decode it now.
        StorageFailed: it cannot be read back.
    """
    with incoming.open() as written:
        return content_of(written.content(), limits, no_clips)


def clean_name(name: str, limits: Limits) -> str:
    """Return a client's file name in a form that is safe to show."""
    return "".join(c for c in name if c.isprintable())[: limits.filename_chars] or "upload"


def check_life(name: str, seconds: int | None) -> None:
    """Check a lifetime that a request asks for.

    Args:
        name: name of the request field.
        seconds: the lifetime; None means for ever.

    Raises:
        BadRequest: the lifetime is too short or too long.
    """
    if seconds is not None and not 0 < seconds <= LONGEST_LIFE:
        raise BadRequest(f"{name} must be 1 to {LONGEST_LIFE} seconds", param=name)


def check_metadata(metadata: Mapping[str, Scalar]) -> dict[str, Scalar]:
    """Check that metadata is a flat object of at most 32 scalars, with texts of at most 1,024 characters and names of
    at most 64, and return a copy.

    Raises:
        BadRequest: it is not.
    """
    if not isinstance(metadata, Mapping) or len(metadata) > METADATA_KEYS:
        raise BadRequest(f"metadata must be an object of at most {METADATA_KEYS} values", param="metadata")
    for name, value in metadata.items():
        if not isinstance(name, str) or not 0 < len(name) <= METADATA_KEY_CHARS:
            raise BadRequest(
                f"a name in metadata has 1 to {METADATA_KEY_CHARS} characters, not {cut(str(name))!r}",
                param="metadata",
            )
        finite = not isinstance(value, float) or math.isfinite(value)
        short = not isinstance(value, str) or len(value) <= METADATA_VALUE_CHARS
        if not is_text(name) or (isinstance(value, str) and not is_text(value)):
            raise BadRequest("metadata contains half of a surrogate pair", param="metadata")
        whole = not isinstance(value, int) or abs(value) < 1 << 63
        if not isinstance(value, (str, int, float, bool)) or not (finite and short and whole):
            raise BadRequest(
                f"metadata[{name!r}] must be a text of at most {METADATA_VALUE_CHARS} characters, a finite number, "
                "true or false",
                param="metadata",
            )
    return dict(metadata)


def is_text(value: str) -> bool:
    """Return whether a string can be written in UTF-8: half of a surrogate pair, which JSON can escape, cannot."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def check_page(order: str, limit: int) -> None:
    """Check the order and the length of a page of a listing.

    Raises:
        BadRequest: the order is neither ``asc`` nor ``desc``, or the page is to have less than one entry.
    """
    if order not in ("asc", "desc"):
        raise BadRequest(f"order must be asc or desc, not {cut(order)!r}", param="order")
    if limit < 1:
        raise BadRequest(f"limit must be at least 1, not {limit}", param="limit")


def checked_handle(handle: str | None) -> str | None:
    """Return the canonical form of a name that prompts may call a file by; None is no name.

    Raises:
        BadRequest: it cannot be one.
    """
    if handle is None:
        return None
    name = canonical(handle)
    if not is_handle(name):
        raise BadRequest(
            f"a handle is 1 to {LONGEST} letters of any script, digits, '_', '.' or '-', with a letter or digit at "
            f"least, not {cut(handle)!r}",
            param="handle",
        )
    return name
