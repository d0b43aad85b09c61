"""``mpic caches``."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from mpic.cli.common import (
    KVTTL,
    TTL,
    Json,
    NewTTL,
    Off,
    client_command,
    command_app,
    print_listing,
    print_result,
    when,
)

if TYPE_CHECKING:
    from mpic.client import MPIC
    from mpic.client.types import Cache

app = command_app(
    "Explicit context caching: texts, cut and compiled once, linked by id in any order.\n\n"
    "`mpic caches create manual.txt --split paragraph` prints ids; a message links them with content parts "
    '`{"type": "cache", "cache_id": ID}`.'
)

Group = Annotated[str, typer.Argument(help="group-...")]
Id = Annotated[str, typer.Argument(help="group-... (all of it) or cache-... (one chunk)")]


@client_command(app)
def create(
    client: MPIC,
    paths: Annotated[
        list[Path] | None, typer.Argument(help="UTF-8 texts; none, or -: standard input", show_default=False)
    ] = None,
    split: Annotated[
        Literal["none", "fixed", "sentence", "paragraph", "section"], typer.Option(help="how texts are cut")
    ] = "none",
    tokens: Annotated[int, typer.Option(min=1, help="most tokens of a chunk")] = 512,
    overlap: Annotated[int, typer.Option(min=0, help="most tokens that neighbours share")] = 0,
    name: Annotated[
        str | None, typer.Option(help="shown in lists and traces; default: the file's name")
    ] = None,
    ttl: TTL = None,
    wait: Annotated[bool, typer.Option(help="wait until all is compiled")] = True,
    as_json: Json = False,
) -> None:
    """Cache texts; each file becomes its own cache.

    Examples: `mpic caches create manual.txt --split paragraph --tokens 512 --ttl 86400`,
    `echo "some text" | mpic caches create --name note`.
    """
    cut = {"mode": split, "tokens": tokens, "overlap": overlap}
    made: list[Cache] = []
    try:
        for path in paths or [Path("-")]:
            piped = str(path) == "-"
            text = _text(path, piped)
            called = name or (None if piped else path.name)
            made.append(client.caches.create(text, split=cut, name=called, ttl=ttl, wait=wait))
    finally:
        # also print the caches made before one failed: their ids are the only way to refer to them
        if made:
            _show_made(made, as_json)


def _show_made(made: list[Cache], as_json: bool) -> None:
    rows = []
    for cache in made:
        rows.append((cache.id, cache.state, cache.tokens, cache.bytes, cache.name))
        rows += [(f"  {c.id}", c.state, c.tokens, c.bytes, c.name) for c in cache.chunks]
    print_listing(made, as_json, ("id", "state", "tokens", "bytes", "name"), rows, "")


@client_command(app, "list")
def list_(client: MPIC, as_json: Json = False) -> None:
    """List caches, newest first."""
    caches = list(client.caches.list(limit=1000))
    columns = ("id", "chunks", "state", "tokens", "bytes", "expires", "name")
    rows = [
        (c.id, len(c.chunks), c.state, c.tokens, c.bytes, when(c.expires_at) or "never", c.name)
        for c in caches
    ]
    print_listing(caches, as_json, columns, rows, "no caches yet: mpic caches create PATH")


@client_command(app)
def show(client: MPIC, id: Id, as_json: Json = False) -> None:
    """Show one cache and its chunks, or one chunk."""
    from mpic.client.types import Cache

    cache = client.caches.retrieve(id)
    columns = ("id", "text", "state", "tokens", "bytes", "kept in", "expires")
    rows = []
    for c in cache.chunks if isinstance(cache, Cache) else (cache,):
        state = c.state if c.error is None else f"{c.state}: {c.error}"
        kept = ", ".join(c.tiers), when(c.expires_at) or "never"
        rows.append((c.id, f"{c.start}-{c.end}", state, c.tokens, c.bytes, *kept))
    print_listing(cache, as_json, columns, rows, "it has no chunks left")


@client_command(app, "kv-ttl")
def kv_ttl(client: MPIC, id: Group, kv_ttl: KVTTL = None, as_json: Json = False) -> None:
    """Let the compiled KV of a cache expire after a time without use. Its texts stay, and the next use compiles them
    again."""
    cache = client.caches.update(id, kv_ttl=kv_ttl)
    kept = f"{cache.kv_ttl:,} s" if cache.kv_ttl else "as long as the server is configured"
    print_result(cache, f"{cache.id}: its KV is kept unused for {kept}", as_json)


@client_command(app)
def pin(client: MPIC, id: Group, off: Off = False, as_json: Json = False) -> None:
    """Keep the compiled KV of a cache even if it is unused for long or your newer caches need the room.

    Pinned KV still counts against your share of the disk.
    """
    cache = client.caches.pin(id, not off)
    print_result(cache, f"{cache.id} is {'not ' * off}pinned", as_json)


@client_command(app)
def prefetch(client: MPIC, id: Group, as_json: Json = False) -> None:
    """Bring the compiled KV of a cache closer to the device, ahead of questions that are about to come. Expired KV is
    compiled again."""
    cache = client.caches.prefetch(id)
    print_result(cache, f"{cache.id} is being prefetched", as_json)


@client_command(app)
def extend(
    client: MPIC,
    id: Group,
    ttl: NewTTL = None,
    as_json: Json = False,
) -> None:
    """Give a cache and all its chunks a new lifetime, from now on."""
    cache = client.caches.update(id, ttl)
    print_result(cache, f"{cache.id} expires: {when(cache.expires_at) or 'never'}", as_json)


@client_command(app)
def delete(
    client: MPIC,
    ids: Annotated[list[str], typer.Argument(help="group-... or cache-...")],
    as_json: Json = False,
) -> None:
    """Delete caches or single chunks, and everything compiled from them."""
    deleted = [client.caches.delete(id) for id in ids]
    print_result(deleted, f"deleted {', '.join(ids)}", as_json)


def _text(path: Path, piped: bool) -> str:
    """Return the text of a file or of standard input, whatever the locale's encoding is."""
    try:
        data = sys.stdin.buffer.read() if piped else path.read_bytes()
        return io.TextIOWrapper(io.BytesIO(data), encoding="utf-8").read()
    except (OSError, UnicodeDecodeError) as exc:
        raise typer.BadParameter(f"{'standard input' if piped else path}: {exc}") from None
