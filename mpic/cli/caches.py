"""``mpic caches``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from mpic.cli.common import (
    DEFAULT_URL,
    Json,
    Key,
    Url,
    connect,
    noun,
    out,
    print_json,
    print_table,
    when,
)

app = noun(
    "Explicit context caching: texts, cut and compiled once, linked by id in any order.\n\n"
    "`mpic caches create manual.txt --split paragraph` prints ids; a message links them with content parts "
    '`{"type": "cache", "cache_id": ID}`.'
)

Id = Annotated[str, typer.Argument(help="group-... (all of it) or cache-... (one chunk)")]


@app.command()
def create(
    paths: Annotated[
        list[Path] | None, typer.Argument(help="UTF-8 texts; none, or -: standard input", show_default=False)
    ] = None,
    split: Annotated[
        Literal["none", "fixed", "sentence", "paragraph", "section"], typer.Option(help="how a text is cut")
    ] = "none",
    tokens: Annotated[int, typer.Option(min=1, help="most tokens of a piece")] = 512,
    overlap: Annotated[int, typer.Option(min=0, help="most tokens that neighbours share")] = 0,
    name: Annotated[
        str | None, typer.Option(help="shown in lists and traces; default: the file's name")
    ] = None,
    ttl: Annotated[int | None, typer.Option(min=1, help="seconds until it expires")] = None,
    wait: Annotated[bool, typer.Option(help="wait until all is compiled")] = True,
    url: Url = DEFAULT_URL,
    api_key: Key = None,
    as_json: Json = False,
) -> None:
    """Cache texts; every file becomes a cache of its own.

    Examples: `mpic caches create manual.txt --split paragraph --tokens 512 --ttl 86400`,
    `echo "some text" | mpic caches create --name note`.
    """
    how = {"mode": split, "tokens": tokens, "overlap": overlap}
    with connect(url, api_key) as client:
        made = []
        for path in paths or [Path("-")]:
            piped = str(path) == "-"
            text = sys.stdin.read() if piped else _text(path)
            called = name or (None if piped else path.name)
            made.append(client.caches.create(text, split=how, name=called, ttl=ttl, wait=wait))
    if as_json:
        print_json(made)
        return
    rows = [row for cache in made for row in ((cache, cache.id), *((c, f"  {c.id}") for c in cache.chunks))]
    print_table(
        ("id", "state", "tokens", "bytes", "name"),
        ((id, c.state, c.tokens, c.bytes, c.name) for c, id in rows),
        "",
    )


@app.command("list")
def list_(url: Url = DEFAULT_URL, api_key: Key = None, as_json: Json = False) -> None:
    """List caches, oldest first."""
    with connect(url, api_key) as client:
        caches = list(client.caches.list(order="asc", limit=1000))
    if as_json:
        print_json(caches)
        return
    print_table(
        ("id", "chunks", "state", "tokens", "bytes", "expires", "name"),
        (
            (c.id, len(c.chunks), c.state, c.tokens, c.bytes, when(c.expires_at) or "never", c.name)
            for c in caches
        ),
        "no caches yet: mpic caches create PATH",
    )


@app.command()
def show(id: Id, url: Url = DEFAULT_URL, api_key: Key = None, as_json: Json = False) -> None:
    """One cache and its chunks, or one chunk."""
    with connect(url, api_key) as client:
        cache = client.caches.retrieve(id)
    if as_json:
        print_json(cache)
        return
    print_table(
        ("id", "text", "state", "tokens", "bytes", "kept in", "expires"),
        (
            (
                c.id,
                f"{c.start}-{c.end}",
                c.state if c.error is None else f"{c.state}: {c.error}",
                c.tokens,
                c.bytes,
                ", ".join(c.tiers),
                when(c.expires_at) or "never",
            )
            for c in getattr(cache, "chunks", (cache,))
        ),
        "it has no chunks any more",
    )


@app.command()
def extend(
    id: Annotated[str, typer.Argument(help="group-...")],
    ttl: Annotated[int | None, typer.Option(min=1, help="seconds from now; left out: for ever")] = None,
    url: Url = DEFAULT_URL,
    api_key: Key = None,
    as_json: Json = False,
) -> None:
    """Give a cache and all its chunks a new life from now on."""
    with connect(url, api_key) as client:
        cache = client.caches.update(id, ttl)
    if as_json:
        print_json(cache)
    else:
        out.print(f"{cache.id} expires: {when(cache.expires_at) or 'never'}", highlight=False)


@app.command()
def delete(
    ids: Annotated[list[str], typer.Argument(help="group-... or cache-...")],
    url: Url = DEFAULT_URL,
    api_key: Key = None,
    as_json: Json = False,
) -> None:
    """Delete caches or single chunks, and everything compiled from them."""
    with connect(url, api_key) as client:
        deleted = [client.caches.delete(id) for id in ids]
    if as_json:
        print_json(deleted)
    else:
        out.print(f"deleted {', '.join(ids)}", markup=False, highlight=False)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        raise typer.BadParameter(f"{path}: {exc}") from None
