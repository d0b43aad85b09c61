"""What every upload passes through, whoever sends it: names, ids, metadata, and what its bytes turn out to be."""

from __future__ import annotations

import json
import math
import secrets
import string
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

from mpic.errors import BadRequest
from mpic.imaging.budget import Budget
from mpic.imaging.claims import SMALL_BYTES
from mpic.imaging.decoder import MOST_WAITING
from mpic.kv.chunk import ChunkKey
from mpic.library.decode import decode_text, image_key, sniff
from mpic.library.limits import Limits
from mpic.library.originals import Incoming
from mpic.library.records import Scalar

ID_ALPHABET = string.ascii_letters + string.digits
PIECE = 1 << 20
"""Bytes read from a client at a time."""

ACCEPTING = ThreadPoolExecutor(24, "mpic-accept")
"""Threads on which uploads are checked and committed. Large files wait on them to be decoded, but no more of them may
wait than leave threads for other uploads; everything else in the server has threads of its own."""

READ_BYTES = 128 << 20
READING = Budget(places=64, most_waiting=MOST_WAITING)
"""Bounds the bytes of large uploads that are in memory at a time while they wait to be decoded."""

LONGEST_LIFE = 10 * 366 * 86_400
METADATA_KEYS, METADATA_KEY_CHARS, METADATA_VALUE_CHARS = 32, 64, 1024


def new_id(prefix: str) -> str:
    """``prefix`` and 24 random letters and digits."""
    return prefix + "".join(secrets.choice(ID_ALPHABET) for _ in range(24))


def identify(incoming: Incoming, limits: Limits) -> ChunkKey:
    """What an upload is, found by decoding it.

    Raises:
        InvalidUpload, TooLarge: it is not accepted.
        DecoderBusy: too many large uploads are waiting.
        OutOfMemory: there is not enough for it now.
    """
    large = incoming.bytes > SMALL_BYTES
    with READING.taken(incoming.bytes, READ_BYTES) if large else nullcontext():
        data = incoming.content()
        if sniff(data[:32]) == "image":
            return image_key(data, limits)
        return ChunkKey.of_text(decode_text(data, limits))


def clean_name(name: str, limits: Limits) -> str:
    """A client's file name, fit to be shown."""
    return "".join(c for c in name if c.isprintable())[: limits.filename_chars] or "upload"


def check_life(name: str, seconds: int | None) -> None:
    """Whether something may live so long; None: for ever. ``name`` is what the client calls it. Raises BadRequest."""
    if seconds is not None and not 0 < seconds <= LONGEST_LIFE:
        raise BadRequest(f"{name} must be 1 to {LONGEST_LIFE} seconds, not {seconds}", param=name)


def check_metadata(metadata: Mapping[str, Scalar]) -> dict[str, Scalar]:
    """A flat object of at most 32 scalars; text of at most 1,024 characters, names of at most 64.

    Raises:
        BadRequest: something else.
    """
    if not isinstance(metadata, Mapping) or len(metadata) > METADATA_KEYS:
        raise BadRequest(f"metadata is an object of at most {METADATA_KEYS} values", param="metadata")
    for name, value in metadata.items():
        if not isinstance(name, str) or not 0 < len(name) <= METADATA_KEY_CHARS:
            raise BadRequest(
                f"a name in metadata has 1 to {METADATA_KEY_CHARS} characters, not {str(name)[:80]!r}",
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
    """Whether it can be written in UTF-8: half of a surrogate pair, which JSON can escape, cannot."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def dump_metadata(metadata: Mapping[str, Scalar]) -> str:
    return json.dumps(dict(metadata), ensure_ascii=True, sort_keys=True)
