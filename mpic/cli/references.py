"""``mpic references``: the reference library of a running server."""

from __future__ import annotations

import json
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from mpic.cli.common import (
    TTL,
    Json,
    NewTTL,
    Off,
    client_command,
    command_app,
    err,
    out,
    plain,
    print_fields,
    print_json,
    print_listing,
    print_result,
    print_table,
    progress,
    read_json,
    when,
)
from mpic.cli.laboratory import group_with
from mpic.errors import MPICError, ReferenceNotFound, Unavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mpic.client import MPIC
    from mpic.client.types import Reference
    from mpic.library.copies.bulk_import import ImportItem, ImportResult, KnownReference

_LABORATORY = {"evaluate": "Measure retrieval on the bundled set, in this process."}

app = command_app(
    "Images and texts that a model may look up while it answers (`mpic.retrieval` in a chat request). Everybody reads "
    "and searches, administrators write.\n\nTry it: `mpic references import-samples`, then `mpic references search "
    "'code of piano'`.",
    cls=group_with("references", _LABORATORY),
)

Id = Annotated[str, typer.Argument(help="the reference")]
Title = Annotated[str | None, typer.Option(help="what people and prompts call it")]
Description = Annotated[str | None, typer.Option(help="for people")]
Metadata = Annotated[
    list[str] | None,
    typer.Option("--meta", help="key=value, to filter searches by; numbers and true/false count"),
]
Kind = Annotated[Literal["image", "text"] | None, typer.Option(help="only these")]


@client_command(app, "add")
def add(
    client: MPIC,
    paths: Annotated[
        list[Path], typer.Argument(help="images, documents and texts", exists=True, dir_okay=False)
    ],
    title: Title = None,
    description: Description = None,
    meta: Metadata = None,
    id: Annotated[str | None, typer.Option(help="ref_...; one file only")] = None,
    ttl: TTL = None,
    as_json: Json = False,
) -> None:
    """Add references. A title is the file's name without its ending, unless given."""
    from mpic.client.sources import unicode_name

    if (id or title) and len(paths) > 1:
        raise typer.BadParameter("an id or a title names one file")
    fields: dict[str, Any] = {"description": description, "metadata": _metadata(meta), "id": id, "ttl": ttl}
    added = []
    try:
        for path in paths:
            added.append(
                client.references.create(path, title or unicode_name(path.stem), wait=True, **fields)
            )
    finally:
        if added:  # also print the references added before one failed
            _show(added, as_json)


@client_command(app, "replace")
def replace(
    client: MPIC,
    id: Id,
    path: Annotated[Path, typer.Argument(help="its new content", exists=True, dir_okay=False)],
    title: Title = None,
    description: Description = None,
    meta: Metadata = None,
    as_json: Json = False,
) -> None:
    """Replace a reference by a new version; values that are left out stay as they were."""
    fields: dict[str, Any] = {"description": description, "metadata": _metadata(meta), "wait": True}
    _show([client.references.replace(id, path, title, **fields)], as_json)


@client_command(app, "list")
def list_references(client: MPIC, kind: Kind = None, as_json: Json = False) -> None:
    """List references, newest first."""
    _show(list(client.references.list(limit=1000, kind=kind)), as_json)


@client_command(app, "show")
def show(client: MPIC, id: Id, as_json: Json = False) -> None:
    """Show everything about one reference."""
    found = client.references.retrieve(id)
    if as_json:
        print_json(found)
    else:
        print_fields(plain(found))


@client_command(app, "extend")
def extend(client: MPIC, id: Id, ttl: NewTTL = None, as_json: Json = False) -> None:
    """Give a reference a new lifetime, from now on."""
    found = client.references.update(id, ttl)
    print_result(found, f"{found.id} expires: {when(found.expires_at) or 'never'}", as_json)


@client_command(app, "pin")
def pin(client: MPIC, id: Id, off: Off = False, as_json: Json = False) -> None:
    """Keep the compiled KV of a reference even if it is unused for long or newer references need the room."""
    found = client.references.pin(id, not off)
    print_result(found, f"{found.id} is {'not ' * off}pinned", as_json)


@client_command(app, "prefetch")
def prefetch(client: MPIC, id: Id, as_json: Json = False) -> None:
    """Bring the compiled KV of a reference closer to the device, ahead of questions that are about to come. Expired KV
    is compiled again."""
    found = client.references.prefetch(id)
    print_result(found, f"{found.id} is being prefetched", as_json)


@client_command(app, "sync")
def sync(
    client: MPIC,
    start: Annotated[bool, typer.Option("--start", help="begin a run now, in the background")] = False,
    as_json: Json = False,
) -> None:
    """Show the result of the server's last sync of references with its folder ([retrieval] sync_references).

    Exit status 1 if the last run had a problem.
    """
    state = client.references.sync(start)
    if as_json:
        print_json(state)
    else:
        counts = ("added", "replaced", "removed", "unchanged")
        done = ", ".join(f"{getattr(state, name):,} {name}" for name in counts)
        out.print(f"{state.source}: {done if state.at else 'not synced yet'}", soft_wrap=True)
        out.print("running" if state.running else f"last run: {when(state.at)}", soft_wrap=True)
        for note in state.notes:
            err.print(f"{note.where}: {note.message} [{note.code}]", style="red", soft_wrap=True)
        if state.problem:
            err.print(f"problem: {state.problem}", style="red", soft_wrap=True)
    if state.problem:
        raise typer.Exit(1)


@client_command(app, "remove")
def remove(
    client: MPIC, ids: Annotated[list[str], typer.Argument(help="references")], as_json: Json = False
) -> None:
    """Remove references. Searches no longer find them; answers that use them finish."""
    removed = [client.references.delete(id) for id in ids]
    print_result(removed, f"removed {', '.join(ids)}", as_json)


@client_command(app, "search")
def search(
    client: MPIC,
    text: Annotated[str | None, typer.Argument(help="what to look for")] = None,
    image: Annotated[
        Path | None, typer.Option(help="look for references like this image", exists=True, dir_okay=False)
    ] = None,
    top_k: Annotated[int, typer.Option(help="most references, 1 to 100")] = 5,
    min_score: Annotated[
        float | None, typer.Option(help="leave out less similar references, -1 to 1")
    ] = None,
    filter: Annotated[
        str | None, typer.Option(help='JSON, e.g. \'{"kind": "image", "year": {"gte": 2020}}\'')
    ] = None,
    as_json: Json = False,
) -> None:
    """Find references by text, by image, or by both."""
    wanted = None if filter is None else read_json(filter, "--filter")
    found = client.references.search(text, image=image, top_k=top_k, min_score=min_score, filter=wanted)
    rows = [(f"{one.score:.3f}", " + ".join(one.found_by), one.kind, one.title, one.id) for one in found]
    print_listing(found, as_json, ("score", "found by", "kind", "title", "id"), rows, "nothing found")


@client_command(app, "import")
def import_(
    client: MPIC,
    source: Annotated[Path, typer.Argument(help="a folder or a .jsonl file", exists=True)],
    as_json: Json = False,
) -> None:
    """Add many references: every file of a folder, or the lines of a JSONL file (`path` or `text`, and `title`, `id`,
    `description`, `metadata`).

    Links out of the folder are refused. Run it again to resume: references that exist are left as they are, those that
    have changed are replaced.
    """
    from mpic.client.io import finish
    from mpic.library.copies.bulk_import import import_references

    with progress("importing", None, as_json) as advance:
        # not asyncio.run: its event loop would take the first Ctrl-C, and nothing here ever waits for that loop
        results = finish(import_references(source, IntoServer(client), lambda result: advance(1)))
    _show_results(results, as_json)


def _show_results(results: list[ImportResult], as_json: bool) -> None:
    """Show the results of an import. Exit status 1 if anything was refused."""
    count = Counter(result.outcome for result in results)
    refused = [result for result in results if result.outcome == "refused" or result.why]
    value = {"counts": dict(count), "noted": [result._asdict() for result in refused]}
    rows = [(result.where, result.outcome, result.why, result.code) for result in refused]
    line = ", ".join(f"{n:,} {what}" for what, n in sorted(count.items())) or "nothing to import"
    if rows and not as_json:
        print_table(("where", "outcome", "why", "code"), rows, "")
    print_result(value, line, as_json)
    if count["refused"]:
        raise typer.Exit(1)


@client_command(app, "import-samples")
def import_samples(client: MPIC, as_json: Json = False) -> None:
    """Add the bundled set of the demo model's world: 90 pictures, 40 descriptions, 70 facts.

    There are two sets; the command adds the one that matches the server's model.
    """
    from mpic.data.bundled import REFERENCES, generation_for

    folder = REFERENCES[generation_for(client.health().model.context_length)]
    import_(client, folder / "references.jsonl", as_json)


@client_command(app, "reindex")
def reindex(
    client: MPIC,
    wait: Annotated[bool, typer.Option(help="show the progress until it is done")] = True,
    as_json: Json = False,
) -> None:
    """Embed everything that has no vector of the configured embedder: after changing it, or after an error.

    The server works in the background and continues where an interrupted run stopped. After an error, which ends the
    command, it tries again by itself.
    """
    columns = (TextColumn("embedding"), BarColumn(), MofNCompleteColumn())
    state = client.references.reindex()
    with Progress(*columns, console=err, transient=True, disable=as_json or not wait) as bar:
        task = bar.add_task("", total=state.references)
        while wait and state.reindexing and state.problem is None:
            bar.update(task, completed=state.references - state.missing)
            time.sleep(0.2)
            state = client.references.index()
    if as_json:
        print_json(state)
    else:
        name = f"{state.embedder['architecture']} ({state.embedder['weights'][:12]})"  # ty: ignore[not-subscriptable] (the digest is a string)
        out.print(f"{state.vectors:,} of {state.references:,} references indexed by {name}, {state.kind}")
        if state.words is None:
            out.print("found by vectors alone: the server's SQLite has no FTS5, which finds words")
    if state.problem:
        err.print(f"problem: {state.problem}", style="red")
    for failed in state.failed:
        err.print(f"{failed['id']}: {failed['message']} [{failed['code']}]", style="red")
    if wait and state.missing:
        raise typer.Exit(1)


class IntoServer:
    """``mpic.library.copies.bulk_import.ImportTarget`` over HTTP."""

    largest = None  # the server says so

    def __init__(self, client: MPIC) -> None:
        self._references = client.references

    async def there(self, id: str) -> KnownReference | None:
        from mpic.library.copies.bulk_import import KnownReference

        try:
            found = _ask(lambda: self._references.retrieve(id))
        except ReferenceNotFound:
            return None
        return KnownReference(found.sha256, found.title, found.description, found.metadata)

    async def add(self, item: ImportItem, content: bytes) -> str:
        return _ask(
            lambda: self._references.create((item.filename, content), id=item.id, **_fields(item))
        ).kind

    async def replace(self, item: ImportItem, content: bytes) -> str:
        return _ask(lambda: self._references.replace(item.id, (item.filename, content), **_fields(item))).kind


def _fields(item: ImportItem) -> dict[str, Any]:
    return {"title": item.title, "description": item.description, "metadata": item.metadata}


def _ask(ask: Callable[[], Reference]) -> Reference:
    try:
        return ask()
    except MPICError as error:
        if error.status == 0 or error.status >= 500:
            raise Unavailable(error.message) from error  # such an error ends the import
        raise


def _metadata(meta: list[str] | None) -> dict[str, Any] | None:
    if not meta:
        return None
    pairs = [entry.partition("=") for entry in meta]
    if any(not sign for _, sign, _ in pairs):
        raise typer.BadParameter("write --meta key=value")
    return {key: _scalar(value) for key, _, value in pairs}


def _scalar(text: str) -> str | int | float | bool:
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return value if isinstance(value, int | float | bool) else text


def _show(found: Sequence[Reference], as_json: bool) -> None:
    rows = [
        (r.kind, f"{r.state}: {r.error}" if r.error else r.state, r.version, r.tokens, r.bytes, r.title, r.id)
        for r in found
    ]
    columns = ("kind", "state", "version", "tokens", "bytes", "title", "id")
    empty = "no references yet: mpic references add PATH, or mpic references import-samples"
    print_listing(found, as_json, columns, rows, empty)
