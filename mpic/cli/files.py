"""``mpic files``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mpic.cli import completion
from mpic.cli.common import (
    KVTTL,
    Json,
    NewTTL,
    Off,
    client_command,
    command_app,
    print_fields,
    print_json,
    print_listing,
    print_result,
    when,
)
from mpic.errors import FileNotFound
from mpic.handles import folded
from mpic.table import COMMANDS

if TYPE_CHECKING:
    from mpic.client import MPIC
    from mpic.client.types import File

app = command_app(
    "Your uploads. Name one by its handle or its id: `mpic files show EIFFEL2025`, `mpic files delete file-4f2a...`."
)

Name = Annotated[str, typer.Argument(help="handle or file id", autocompletion=completion.handles)]
Handle = Annotated[str, typer.Argument(help="NAME for IMAGE#NAME or FILE#NAME in prompts")]


@client_command(app, "list")
def list_(client: MPIC, as_json: Json = False) -> None:
    """List uploads, newest first."""
    show_files(list(client.files.list(limit=1000)), as_json)


@client_command(app)
def show(client: MPIC, name: Name, as_json: Json = False) -> None:
    """Show everything about one upload: state, tokens, tiers, expiry."""
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
            "chunks": file.chunk_count,
            "bytes": f"{file.bytes:,}",
            "compiled KV": ", ".join(file.tiers) or "not below the device",
            "uploaded": when(file.created_at),
            "expires": when(file.expires_at) or "never",
            "KV unused for": file.kv_ttl and f"{file.kv_ttl:,} s at most",
            "pinned": "yes" if file.pinned else None,
        }
    )


@client_command(app)
def content(
    client: MPIC,
    name: Name,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="file to write; left out: standard output")
    ] = None,
) -> None:
    """Write the original, byte by byte: `mpic files content EIFFEL2025 -o eiffel.png`."""
    data = client.files.content(find(client, name).id)
    if output is None:
        if sys.stdout.isatty() and COMMANDS.search(data.decode(errors="replace").replace("\r\n", "\n")):
            raise typer.BadParameter(
                "binary content, or text with control characters, belongs in a file: -o PATH"
            )
        sys.stdout.buffer.write(data)
    else:
        try:
            output.write_bytes(data)
        except OSError as exc:
            raise typer.BadParameter(f"{output}: {exc.strerror}", param_hint="--output") from exc


@client_command(app)
def rename(client: MPIC, name: Name, handle: Handle, as_json: Json = False) -> None:
    """Give an upload another handle: `mpic files rename EIFFEL2025 TOWER`. Nothing is compiled again.

    Prompts find it by the new handle only.
    """
    file = client.files.rename(find(client, name).id, handle)
    print_result(file, f"{name} is {file.mention} now", as_json)


@client_command(app)
def extend(
    client: MPIC,
    name: Name,
    ttl: NewTTL = None,
    as_json: Json = False,
) -> None:
    """Give an upload a new lifetime, from now on: `mpic files extend EIFFEL2025 --ttl 86400`."""
    file = client.files.update(find(client, name).id, ttl)
    print_result(file, f"{file.mention or file.id} expires: {when(file.expires_at) or 'never'}", as_json)


@client_command(app, "kv-ttl")
def kv_ttl(client: MPIC, name: Name, kv_ttl: KVTTL = None, as_json: Json = False) -> None:
    """Let the compiled KV of an upload expire after a time without use: `mpic files kv-ttl EIFFEL2025 --kv-ttl 3600`.

    The original stays, and the next use compiles it again.
    """
    file = client.files.update(find(client, name).id, kv_ttl=kv_ttl)
    kept = f"{file.kv_ttl:,} s" if file.kv_ttl else "as long as the server is configured"
    print_result(file, f"{file.mention or file.id}: its KV is kept unused for {kept}", as_json)


@client_command(app)
def pin(client: MPIC, name: Name, off: Off = False, as_json: Json = False) -> None:
    """Keep the compiled KV of an upload even if it is unused for long or your newer uploads need the room.

    Pinned KV still counts against your share of the disk.
    """
    file = client.files.pin(find(client, name).id, not off)
    print_result(file, f"{file.mention or file.id} is {'not ' * off}pinned", as_json)


@client_command(app)
def prefetch(client: MPIC, name: Name, as_json: Json = False) -> None:
    """Bring the compiled KV of an upload closer to the device, ahead of questions that are about to come. Expired KV is
    compiled again."""
    file = client.files.prefetch(find(client, name).id)
    print_result(file, f"{file.mention or file.id} is being prefetched", as_json)


@client_command(app)
def delete(
    client: MPIC,
    names: Annotated[
        list[str], typer.Argument(help="handles or file ids", autocompletion=completion.handles)
    ],
    as_json: Json = False,
) -> None:
    """Delete uploads and everything compiled from them. Running answers finish.

    If any name matches no upload, nothing is deleted.
    """
    ids = dict.fromkeys(find(client, name).id for name in names)
    deleted = [client.files.delete(id) for id in ids]
    print_result(deleted, f"deleted {', '.join(names)}", as_json)


def find(client: MPIC, name: str) -> File:
    """Return an upload by its id or its handle (also in the form ``IMAGE#NAME``), ignoring case. Raise
    FileNotFound."""
    if name.startswith("file-"):
        with suppress(FileNotFound):  # a handle may begin like an id
            return client.files.retrieve(name)
    handle = name.removeprefix("IMAGE#").removeprefix("FILE#")
    for file in client.files.list(limit=1000):
        if file.handle and folded(file.handle) == folded(handle):
            return file
    raise FileNotFound(f"no upload is called {name!r}; `mpic files list` shows them all")


def show_files(files: Sequence[File], as_json: bool) -> None:
    """Print uploads as a table, or as JSON."""
    columns = ("state", "tokens", "chunks", "in prompts", "id")  # the columns that fit into 80 characters
    rows = ((f.state, f.tokens, f.chunk_count, f.mention or f.filename, f.id) for f in files)
    print_listing(files, as_json, columns, rows, "no files yet: mpic upload PATH")
