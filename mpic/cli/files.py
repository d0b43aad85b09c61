"""``mpic files``."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.table import Column, Table

from mpic.cli.common import DEFAULT_URL, Json, Url, noun, out, print_json
from mpic.client import Client

app = noun("List and delete uploaded files.")


@app.command("list")
def files_list(url: Url = DEFAULT_URL, as_json: Json = False) -> None:
    """List uploaded files, oldest first."""
    with Client(url) as client:
        show_files(list(client.files()), as_json)


@app.command("delete")
def files_delete(
    names: Annotated[list[str], typer.Argument(help="file ids or handles")],
    url: Url = DEFAULT_URL,
    as_json: Json = False,
) -> None:
    """Delete files and everything compiled from them."""
    with Client(url) as client:
        ids = {f["handle"]: f["id"] for f in client.files() if f["handle"]}
        deleted = [client.delete(ids.get(name, name)) for name in names]
    if as_json:
        print_json(deleted)
    else:
        out.print(f"deleted {', '.join(names)}", markup=False, highlight=False)


def show_files(files: list[dict[str, Any]], as_json: bool) -> None:
    if as_json:
        print_json(files)
        return
    table = Table("kind", "state", Column("tokens", justify="right"), Column("bytes", justify="right"))
    for column in ("handle", "id"):
        table.add_column(column, no_wrap=True)
    for f in files:
        prompt_form = (
            f"{'IMAGE' if f['kind'] == 'image' else 'FILE'}#{f['handle']}" if f["handle"] else f["filename"]
        )
        table.add_row(f["kind"], f["state"], str(f["tokens"] or "-"), f"{f['bytes']:,}", prompt_form, f["id"])
    out.print(table if files else "no files yet: mpic upload PATH", markup=False)
