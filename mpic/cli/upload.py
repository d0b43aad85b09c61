"""``mpic upload``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import typer

from mpic.cli.common import (
    KVTTL,
    TTL,
    Json,
    OldTTL,
    client_command,
    command_app,
    err,
    error_line,
    print_json,
    print_table,
    ttl_of,
)
from mpic.errors import BadRequest, MPICError
from mpic.handles import of_file
from mpic.press import press_names
from mpic.table import printable

if TYPE_CHECKING:
    from mpic.client import MPIC
    from mpic.client.types import File

app = command_app()
IN_PARTS = 16 << 20
"""Files above this many bytes are sent in parts, so that a broken connection repeats only one part."""


class FileOutcome(NamedTuple):
    """The outcome for one file of a batch."""

    path: Path
    handle: str
    file: File | None = None
    error: MPICError | None = None


@client_command(app)
def upload(
    client: MPIC,
    paths: Annotated[list[Path], typer.Argument(help="images, clips, documents and texts")],
    handle: Annotated[
        str | None, typer.Option(help="NAME for IMAGE#NAME or FILE#NAME in prompts; one file only")
    ] = None,
    replace: Annotated[
        bool, typer.Option("--replace", help="take the handle from another file, which is deleted")
    ] = False,
    split: Annotated[
        Literal["auto", "none", "fixed", "sentence", "paragraph", "section"],
        typer.Option(
            help="how documents are cut into chunks; auto: at paragraphs, if they are too long for one"
        ),
    ] = "auto",
    split_tokens: Annotated[
        int, typer.Option(min=1, help="most tokens of a chunk, with --split other than auto")
    ] = 512,
    press: Annotated[
        str | None,
        typer.Option(help=f"how it is compressed: none, {', '.join(press_names())} (R percent removed)"),
    ] = None,
    ttl: TTL = None,
    kv_ttl: KVTTL = None,
    expires: OldTTL = None,
    wait: Annotated[bool, typer.Option(help="wait until the KV cache is compiled")] = True,
    as_json: Json = False,
) -> None:
    """Upload images, clips and documents; each is compiled once into a KV cache that any prompt can link.

    A document that is too long for one chunk is cut into several, all behind its one handle.

    Without --handle a file is named by its stem in capitals, in any script: `eiffel 2025.jpg` becomes EIFFEL_2025.

    A file that was already uploaded (the same bytes under the same handle) is left as it is ("unchanged"). A file that
    fails does not stop the others; the exit status is then 1.

    Examples: `mpic upload photo.jpg`, `mpic upload *.png notes.txt --ttl 86400`,
    `mpic upload big.txt --handle BOOK --no-wait`.
    """
    if handle and len(paths) > 1:
        raise typer.BadParameter("a handle names one file; leave it out to name each by its stem")
    cut = {"mode": split, "tokens": split_tokens} if split not in ("auto", "none") else split
    options = {
        "ttl": ttl_of(ttl, expires),
        "replace": replace,
        "split": cut,
        "press": press,
        "kv_ttl": kv_ttl,
    }
    named = [(path, handle or of_file(path.name)) for path in dict.fromkeys(paths)]
    _refuse_same_handles(named)
    with _progress(quiet=as_json) as show:
        done = [_upload(client, path, name, options, wait, show) for path, name in named]
    if as_json:
        print_json([_plain(one) for one in done])
    else:
        _show(done)
    if any(one.error for one in done):
        raise typer.Exit(1)


Show = Callable[[str, int, int], None]
"""Called with the current stage of a file, the bytes sent so far, and the total bytes."""


def _upload(
    client: MPIC, path: Path, handle: str, options: dict[str, Any], wait: bool, show: Show
) -> FileOutcome:
    """Upload one file. A failure becomes its result, unless every other file would fail the same way."""
    from mpic.client import BadResponse, Unreachable
    from mpic.client.sources import unicode_name
    from mpic.errors import Forbidden, StorageQuotaExceeded, Unauthorized

    try:
        name = unicode_name(path.name)
        show(name, 0, size := path.stat().st_size)
        sent = lambda done, total: show(name, done, total)
        if size > IN_PARTS:
            upload = client.uploads.create(name, size, handle, **options)
            file = _send_parts(client, upload.id, path, sent)
        else:
            file = client.files.create(path, handle, **options, progress=sent)
        if wait and file.state == "compiling":
            show(f"{name} compiling", 1, 1)
            outcome = file.outcome
            file = client.files.wait(file.id).model_copy(update={"outcome": outcome})
    except OSError as error:
        return FileOutcome(path, handle, error=BadRequest(error.strerror or str(error)))
    except MPICError as error:
        denied = isinstance(error, Forbidden) and not isinstance(error, StorageQuotaExceeded)
        if denied or isinstance(error, (Unreachable, BadResponse, Unauthorized)):
            raise
        return FileOutcome(path, handle, error=error)
    return FileOutcome(path, handle, file)


def _send_parts(client: MPIC, upload_id: str, path: Path, sent: Callable[[int, int], None]) -> File:
    """Send a file as an upload in parts. If that fails, cancel the upload, so that the server keeps nothing of it."""
    try:
        return client.uploads.send(upload_id, path, progress=sent)
    except BaseException:
        with suppress(MPICError):  # the server lets it expire
            client.uploads.cancel(upload_id)
        raise


@contextmanager
def _progress(quiet: bool) -> Iterator[Show]:
    """Show a progress bar of the current file on stderr."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
    )
    with Progress(*columns, console=err, transient=True, disable=quiet or not err.is_terminal) as bar:
        task = bar.add_task("", total=None)

        def show(what: str, done: int, total: int) -> None:
            bar.update(task, description=printable(what), completed=done, total=total)

        yield show


def _show(done: list[FileOutcome]) -> None:
    """Print the files as a table, failures with their reasons, and the sums if there are several."""
    from mpic.client.sources import unicode_name

    files = [one.file for one in done if one.file]
    if files:
        rows = [(f.outcome, f.state, f.tokens, f.chunk_count, f.bytes, f.mention or f.id) for f in files]
        print_table(("outcome", "state", "tokens", "chunks", "bytes", "in prompts"), rows, "")
    for file in files:
        if file.status_details:
            err.print(file.status_details, style="yellow", soft_wrap=True)
    for one in done:
        if one.error:
            line = f"{unicode_name(str(one.path))}: {error_line(one.error)}"
            if one.error.code == "handle_taken":
                line += " (--replace takes its place, --handle gives another name)"
            err.print(line, style="red", soft_wrap=True)
    if len(done) > 1:
        counts = {"failed": sum(one.error is not None for one in done)}
        for one in done:
            if one.file:
                counts[one.file.outcome or "uploaded"] = counts.get(one.file.outcome or "uploaded", 0) + 1
        order = ("created", "unchanged", "replaced", "uploaded", "failed")
        line = ", ".join(f"{counts[name]} {name}" for name in order if counts.get(name))
        err.print(f"{len(done)} files: {line}", style="dim")


def _plain(one: FileOutcome) -> dict[str, object]:
    """Return a result as JSON: the file, or the error with the path."""
    if one.file is not None:
        return one.file.model_dump(mode="json")
    assert one.error is not None
    from mpic.client.sources import unicode_name

    named = {"path": unicode_name(str(one.path)), "handle": unicode_name(one.handle)}
    return {**named, **one.error.body()}


def _refuse_same_handles(named: list[tuple[Path, str]]) -> None:
    """Raise BadParameter if two files would get one handle: with --replace the second would delete the first."""
    first: dict[str, Path] = {}
    for path, handle in named:
        if (other := first.setdefault(handle, path)) is not path:
            raise typer.BadParameter(
                f"{other} and {path} would both get the handle {handle}: upload them one by one with --handle"
            )
