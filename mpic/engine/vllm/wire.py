"""The interface between frontend and plugin: orders to link or to compile, as JSON in ``kv_transfer_params["mpic"]``.

An order is self-contained: it names chunk files and says where their tokens stand, so a plain vLLM server that runs
our connector can take it over HTTP. Nothing in it is trusted: ``parse`` checks everything that can be checked without a
file, and paths are only opened below the folders that the connector was given.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from mpic.errors import BadRequest
from mpic.link import LinkPlan

FIELD = "mpic"
ANSWERED = "mpic_answered"
"""Key in a request's ``extra_args``: the number of tokens at the end of its prompt that its grammar has already
produced."""
USER = "mpic_user"
"""Key in a request's ``extra_args``: the request's user, for the scheduler (``plugin.turns``)."""
VERSION = 1
KNOWN_VERSIONS = ("0.32", "0.33")
"""Versions of vLLM in which every private interface that the plugin uses has been checked (docs/vllm.md lists what
ran)."""
MAX_CHUNKS = 4096
FIRST_SOFT = 1 << 30
"""The id of an adapter's first trained token. Header and trailer tokens take the ids from here upwards in prompts:
above every vocabulary, and within the int32 that vLLM uses for ids. The workers' embedding layer gives them the
adapter's vectors, so that to vLLM they are tokens like any other."""
DISK_FULL, NO_MEMORY, NOT_WRITTEN = "-full.failed", "-memory.failed", "-error.failed"
"""Suffixes of the empty files that stand for parts of a compiled chunk that could not be written."""


def unknown_version(version: str) -> str | None:
    """Return the reason why a version of vLLM is not supported, or None if it is."""
    if ".".join(version.split(".")[:2]) in KNOWN_VERSIONS:
        return None
    known = " and ".join(KNOWN_VERSIONS)
    return f"vLLM {version} is installed, and links are known to be right in {known} only"


class BadOrder(BadRequest):
    """An order that contradicts itself or its prompt, or breaks the rules."""

    code = "bad_link_order"


class ChunkRef(NamedTuple):
    """A chunk's place in a prompt and the file its KV is in.

    Args:
        path: path of the chunk file (``mpic.kv.file``), relative to one of the connector's folders.
        key: digest of the ``KVKey`` that the file must hold.
        start: sequence index of its first token.
        length: number of its tokens.
        base: rotary position of its first token (equal to ``start`` except with M-RoPE).
    """

    path: str
    key: str
    start: int
    length: int
    base: int


@dataclass(frozen=True)
class LinkOrder:
    """An order to link chunks into a prompt of token ids.

    Args:
        length: tokens of the prompt.
        extent: the prompt's rotary length, under its name in the order.
        rows: half-open ranges of the prompt that are computed, ascending, not touching each other; the last one ends
            at ``length``. Every other token is mapped from a chunk.
        chunks: in prompt order. An image that is recomputed whole is listed too, because its embeddings are in its
            file.
        shared: True if the request maps the engine's one copy of each chunk (``plugin.shared_chunks``). Its token ids
            are then only the computed tokens; all positions still refer to the whole prompt.
    """

    length: int
    extent: int
    rows: tuple[tuple[int, int], ...]
    chunks: tuple[ChunkRef, ...]
    shared: bool = False

    @property
    def own(self) -> int:
        """The number of computed tokens."""
        return sum(hi - lo for lo, hi in self.rows)

    def ids(self, whole: Sequence[int]) -> list[int]:
        """Return the token ids that vLLM is given for a prompt whose ids are ``whole``."""
        if not self.shared:
            return list(whole)
        return [token for lo, hi in self.rows for token in whole[lo:hi]]

    def salt(self, salt: str) -> str:
        """Return the cache salt of a request. If vLLM gets only the computed tokens, their ids do not determine their
        positions, so the salt must: it is the same for two prompts if one begins with the other."""
        if not self.shared:
            return salt
        layout = [self.rows[:-1], self.rows[-1][0], [ref[1:] for ref in self.chunks]]
        return hashlib.sha256(json.dumps([salt, layout]).encode()).hexdigest()

    def params(self) -> dict[str, Any]:
        """Return the value of ``kv_transfer_params``."""
        body = asdict(self)
        if not self.shared:
            del body["shared"]
        return {FIELD: {"version": VERSION, "link": body}}


@dataclass(frozen=True)
class CompileOrder:
    """An order to write the KV of a prompt's tokens from ``skip`` on, and its inputs, to a folder, one file per worker.

    Args:
        folder: path relative to one of the connector's folders; the sender creates it.
        skip: sink tokens in front, which are not written.
    """

    folder: str
    skip: int = 0

    def params(self) -> dict[str, Any]:
        """Return the value of ``kv_transfer_params``."""
        return {FIELD: {"version": VERSION, "compile": asdict(self)}}


Order = LinkOrder | CompileOrder


def packet_ids(ids: Sequence[int], header: int, trailer: int) -> tuple[int, ...]:
    """Return the ids of a chunk's packet (``mpic.packet``) in a prompt.

    Args:
        ids: of the chunk's own tokens.
        header, trailer: trained tokens before and behind them.
    """
    middle = FIRST_SOFT + header
    return (*range(FIRST_SOFT, middle), *ids, *range(middle, middle + trailer))


def part_name(tensor: int, pipeline: int) -> str:
    """Return the stem of the file that a worker writes its part of a compiled chunk to.

    Args:
        tensor, pipeline: the worker's tensor-parallel and pipeline-parallel ranks.
    """
    return f"rank-{tensor}-{pipeline}"


def make_link_order(
    plan: LinkPlan, files: Sequence[tuple[str, str] | None], shared: bool = False
) -> LinkOrder:
    """Return the link order of a plan.

    Args:
        files: ``(path, key digest)`` for each chunk of the plan, or None for one that needs no file (text that is
            recomputed whole).
        shared: as in ``LinkOrder``.
    """
    rows: list[tuple[int, int]] = []
    for own in plan.own_ranges:
        lo, hi = own.start, own.start + own.hi - own.lo
        if rows and rows[-1][1] == lo:
            rows[-1] = (rows[-1][0], hi)
        else:
            rows.append((lo, hi))
    chunks = tuple(
        ChunkRef(*file, place.start, place.length, place.base)
        for place, file in zip(plan.places, files, strict=True)
        if file is not None
    )
    return LinkOrder(plan.length, plan.rotary_length, tuple(rows), chunks, shared)


def parse(params: Mapping[str, Any] | None, prompt_tokens: int) -> Order | None:
    """Return the order in ``kv_transfer_params``; None when there is none.

    Raises:
        BadOrder: the order is not as ``LinkOrder`` and ``CompileOrder`` say; the message names the field.
    """
    body = (params or {}).get(FIELD)
    if body is None:
        return None
    if not isinstance(body, Mapping) or body.get("version") != VERSION:
        raise BadOrder(f"kv_transfer_params.{FIELD} must be an object of version {VERSION}")
    kinds = [kind for kind in ("link", "compile") if isinstance(body.get(kind), Mapping)]
    if len(kinds) != 1 or len(body) != 2:
        raise BadOrder("an order has a version and either link or compile")
    if kinds[0] == "compile":
        return _compile_order(body["compile"], prompt_tokens)
    return _link_order(body["link"], prompt_tokens)


def _compile_order(body: Mapping[str, Any], tokens: int) -> CompileOrder:
    _fields(body, CompileOrder.__dataclass_fields__)
    skip = body.get("skip", 0)
    if not _is_int(skip) or not 0 <= skip < tokens:
        raise BadOrder(f"skip must be between 0 and {tokens - 1}, not {skip!r}")
    return CompileOrder(_path(body.get("folder")), skip)


def _link_order(body: Mapping[str, Any], tokens: int) -> LinkOrder:
    _fields(body, LinkOrder.__dataclass_fields__)
    length, extent, shared = body.get("length"), body.get("extent"), body.get("shared", False)
    if not isinstance(shared, bool):
        raise BadOrder(f"shared must be true or false, not {shared!r:.100}")
    if not _is_int(length) or (length < tokens if shared else length != tokens):
        raise BadOrder(f"the order is for {length!r} tokens, the prompt has {tokens}")
    if not _is_int(extent) or not 0 < extent <= length:
        raise BadOrder(f"extent must be between 1 and {length}, not {extent!r}")
    chunks = _chunks(body.get("chunks"), length, extent)
    rows = _rows(body.get("rows"), length)
    _check_covered(rows, chunks)
    order = LinkOrder(length, extent, rows, chunks, shared)
    if shared and order.own != tokens:
        raise BadOrder(f"the order computes {order.own} tokens, and the prompt of a shared link has {tokens}")
    return order


def _rows(value: Any, length: int) -> tuple[tuple[int, int], ...]:
    rows, end = [], -1
    for row in _list("rows", value):
        if not isinstance(row, list | tuple) or len(row) != 2 or not all(_is_int(x) for x in row):
            raise BadOrder(f"rows must be pairs of numbers, not {row!r}")
        lo, hi = row
        if not end < lo < hi <= length:
            raise BadOrder(f"rows must ascend within {length} tokens and not touch, not {row!r}")
        rows.append((lo, hi))
        end = hi
    if not rows or end != length:
        raise BadOrder("the prompt's last token must be computed")
    return tuple(rows)


def _gaps(rows: Iterable[tuple[int, int]]) -> Iterable[tuple[int, int]]:
    at = 0
    for lo, hi in rows:
        if lo > at:
            yield at, lo
        at = hi


def mapped(order: LinkOrder) -> Iterator[tuple[int, int, int, int]]:
    """Yield the tokens that an order does not compute, cut at the bounds of its chunks: the number of the chunk, the
    half-open range of sequence indices, and the number of computed tokens before it."""
    number, own, at = 0, 0, 0
    for lo, hi in order.rows:
        while at < lo:
            while order.chunks[number].start + order.chunks[number].length <= at:
                number += 1
            end = min(lo, order.chunks[number].start + order.chunks[number].length)
            yield number, at, end, own
            at = end
        own, at = own + hi - lo, hi


def _check_covered(rows: Iterable[tuple[int, int]], chunks: Sequence[ChunkRef]) -> None:
    """Raise BadOrder unless every token that is not computed is in a chunk. Use one pass over both, because an order
    may have as many ranges as tokens and the scheduler that checks it has one thread."""
    following = iter(chunks)
    start = end = 0
    for lo, hi in _gaps(rows):
        at = lo
        while at < hi:
            while end <= at and (chunk := next(following, None)) is not None:
                start, end = chunk.start, chunk.start + chunk.length
            if not start <= at < end:
                raise BadOrder(f"tokens {lo} to {hi} are neither computed nor in a chunk")
            at = end


def _chunks(value: Any, length: int, extent: int) -> tuple[ChunkRef, ...]:
    chunks: list[ChunkRef] = []
    end = base = 0
    listed = _list("chunks", value)
    if len(listed) > MAX_CHUNKS:
        raise BadOrder(f"at most {MAX_CHUNKS} chunks, not {len(listed)}")
    for item in listed:
        if isinstance(item, Mapping):
            _fields(item, ChunkRef._fields)
            item = [item.get(name) for name in ChunkRef._fields]
        if not isinstance(item, list | tuple) or len(item) != len(ChunkRef._fields):
            raise BadOrder(f"a chunk is {', '.join(ChunkRef._fields)}")
        chunk = ChunkRef(_path(item[0]), *item[1:])
        if not isinstance(chunk.key, str) or not all(_is_int(x) for x in chunk[2:]):
            raise BadOrder(f"a chunk's key is a string and its places are numbers, not {item!r}")
        if chunk.length < 1 or chunk.start < end or chunk.start + chunk.length > length:
            raise BadOrder(f"chunks must follow each other within {length} tokens")
        if not base <= chunk.base <= extent:
            raise BadOrder(f"bases must ascend within {extent} positions")
        end, base = chunk.start + chunk.length, chunk.base
        chunks.append(chunk)
    return tuple(chunks)


def _path(value: Any) -> str:
    if not isinstance(value, str) or not value or len(value) > 4096 or "\0" in value:
        raise BadOrder(f"a path is a short text, not {value!r:.100}")
    if value.startswith(("/", "\\")) or ".." in value.replace("\\", "/").split("/"):
        raise BadOrder("a path is relative to one of the connector's folders")
    return value


def _list(name: str, value: Any) -> Sequence[Any]:
    if not isinstance(value, list | tuple):
        raise BadOrder(f"{name} must be a list")
    return value


def _fields(body: Mapping[str, Any], known: Iterable[str]) -> None:
    unknown = set(body) - set(known)
    if unknown:
        raise BadOrder(f"unknown field {sorted(map(str, unknown))[0]!r}; known: {', '.join(known)}")


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def cache_salt(secret: bytes, user: str, *parts: str) -> str:
    """Return the cache salt of a request. Blocks are only found by requests with the same salt.

    The hashes of a link's blocks know neither its images (its prompt is token ids) nor its policy, so the salt must. It
    is the same for the turns of a conversation that link the same chunks with the same policy, and for nothing else.

    Args:
        secret: the engine's secret, which clients never see.
        parts: policy, recipe digest, and chunk keys in order; none of these for exact requests.
    """
    return hmac.new(secret, json.dumps([user, *parts]).encode(), hashlib.sha256).hexdigest()
