"""``mpic files``."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mpic.cli.common import (
    DEFAULT_URL,
    Json,
    Key,
    Url,
    connect,
    noun,
    out,
    print_fields,
    print_json,
    print_table,
    when,
)
from mpic.errors import FileNotFound

if TYPE_CHECKING:
    from mpic.client import MPIC
    from mpic.client.types import File

app = noun(
    "Your uploads. Name one by its handle or its id: `mpic files show EIFFEL2025`, `mpic files delete file-4f2a...`."
)

Name = Annotated[str, typer.Argument(help="handle or file id")]


@app.command("list")
def list_(url: Url = DEFAULT_URL, api_key: Key = None, as_json: Json = False) -> None:
    """List uploads, oldest first."""
    with connect(url, api_key) as client:
        show_files(list(client.files.list(order="asc", limit=1000)), as_json)


@app.command()
def show(name: Name, url: Url = DEFAULT_URL, api_key: Key = None, as_json: Json = False) -> None:
    """Everything about one upload: state, tokens, tiers, expiry."""
    with connect(url, api_key) as client:
        file = find(client, name)
    if as_json:
        print_json(file)
        return
    print_fields(
        {
            "id": file.id,
            "in prompts": file.mention or file.id,
            "file name": file.filename,
            "kind": file.kind,
            "state": file.state,
            "why": file.status_details,
            "tokens": file.tokens,
            "bytes": f"{file.bytes:,}",
            "compiled KV": ", ".join(file.tiers) or "not below the device",
            "uploaded": when(file.created_at),
            "expires": when(file.expires_at) or "never",
        }
    )


@app.command()
def content(
    name: Name,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="file to write; left out: standard output")
    ] = None,
    url: Url = DEFAULT_URL,
    api_key: Key = None,
) -> None:
    """The original, byte by byte: `mpic files content EIFFEL2025 -o eiffel.png`."""
    with connect(url, api_key) as client:
        data = client.files.content(find(client, name).id)
    if output is None:
        if sys.stdout.isatty() and b"\0" in data:
            raise typer.BadParameter("binary content belongs in a file: -o PATH")
        sys.stdout.buffer.write(data)
    else:
        try:
            output.write_bytes(data)
        except OSError as exc:
            raise typer.BadParameter(f"{output}: {exc.strerror}", param_hint="--output") from exc


@app.command()
def extend(
    name: Name,
    ttl: Annotated[int | None, typer.Option(min=1, help="seconds from now; left out: for ever")] = None,
    url: Url = DEFAULT_URL,
    api_key: Key = None,
    as_json: Json = False,
) -> None:
    """Give an upload a new life from now on: `mpic files extend EIFFEL2025 --ttl 86400`."""
    with connect(url, api_key) as client:
        file = client.files.update(find(client, name).id, ttl)
    if as_json:
        print_json(file)
    else:
        out.print(f"{file.mention or file.id} expires: {when(file.expires_at) or 'never'}", highlight=False)


@app.command()
def delete(
    names: Annotated[list[str], typer.Argument(help="handles or file ids")],
    url: Url = DEFAULT_URL,
    api_key: Key = None,
    as_json: Json = False,
) -> None:
    """Delete uploads and everything compiled from them. Answers under way end well."""
    with connect(url, api_key) as client:
        deleted = [client.files.delete(find(client, name).id) for name in names]
    if as_json:
        print_json(deleted)
    else:
        out.print(f"deleted {', '.join(names)}", markup=False, highlight=False)


def find(client: MPIC, name: str) -> File:
    """An upload by id or handle (``IMAGE#NAME`` too; handles ignore case). Raises FileNotFound."""
    if name.startswith("file-"):
        return client.files.retrieve(name)
    handle = name.removeprefix("IMAGE#").removeprefix("FILE#")
    for file in client.files.list(limit=1000):
        if file.handle and file.handle.upper() == handle.upper():
            return file
    raise FileNotFound(f"no upload is called {name!r}; `mpic files list` shows what there is")


def show_files(files: Iterable[File], as_json: bool) -> None:
    """A table, or JSON."""
    if as_json:
        print_json(list(files))
        return
    print_table(
        ("state", "tokens", "bytes", "in prompts", "id"),
        ((f.state, f.tokens, f.bytes, f.mention or f.filename, f.id) for f in files),
        "no files yet: mpic upload PATH",
    )
