"""``mpic references``: the reference library of a running server."""

from __future__ import annotations

import base64
import json
import mimetypes
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Column, Table

from mpic.cli.common import DEFAULT_URL, Json, Url, err, noun, out, print_json
from mpic.client import APIError, Client

if TYPE_CHECKING:
    from mpic.library.bulk import Item, There

app = noun(
    "Images and texts that a model may look up while it answers (`mpic.retrieval` in a chat request). Everybody reads "
    "and searches, administrators write.\n\nTry it: `mpic references import-samples`, then `mpic references search "
    "'code of ladder'`."
)

Title = Annotated[str | None, typer.Option(help="what people and prompts call it")]
Description = Annotated[str | None, typer.Option(help="for people")]
Metadata = Annotated[
    list[str] | None,
    typer.Option("--meta", help="key=value, to filter searches by; numbers and true/false count"),
]


@app.command("add")
def add(
    paths: Annotated[list[Path], typer.Argument(help="images and UTF-8 texts", exists=True, dir_okay=False)],
    title: Title = None,
    description: Description = None,
    meta: Metadata = None,
    id: Annotated[str | None, typer.Option(help="ref_...; one file only")] = None,
    url: Url = DEFAULT_URL,
    as_json: Json = False,
) -> None:
    """Add references. A title is the file's name unless given."""
    if (id or title) and len(paths) > 1:
        raise typer.BadParameter("an id or a title names one file")
    with Client(url) as client:
        form = _form(title, description, meta)
        made = [_send(client, "POST", "", path, {"title": path.stem, **form}, id) for path in paths]
        _show([_wait(client, one["id"]) for one in made], as_json)


@app.command("replace")
def replace(
    id: Annotated[str, typer.Argument(help="the reference")],
    path: Annotated[Path, typer.Argument(help="its new content", exists=True, dir_okay=False)],
    title: Title = None,
    description: Description = None,
    meta: Metadata = None,
    url: Url = DEFAULT_URL,
    as_json: Json = False,
) -> None:
    """Put new content in the place of a reference, as its next version."""
    with Client(url) as client:
        one = _send(client, "PUT", f"/{id}", path, _form(title, description, meta))
        _show([_wait(client, one["id"])], as_json)


@app.command("list")
def list_references(
    kind: Annotated[str | None, typer.Option(help="image or text")] = None,
    url: Url = DEFAULT_URL,
    as_json: Json = False,
) -> None:
    """List references, oldest first."""
    with Client(url) as client:
        query: dict[str, Any] = {"order": "asc", "limit": 1000} | ({"kind": kind} if kind else {})
        found = []
        while True:
            page = client.request("GET", "/v1/references", params=query)
            found += page["data"]
            if not page["has_more"]:
                break
            query["after"] = page["last_id"]
    _show(found, as_json)


@app.command("show")
def show(id: str, url: Url = DEFAULT_URL, as_json: Json = False) -> None:
    """One reference, all that is known of it."""
    with Client(url) as client:
        found = client.request("GET", f"/v1/references/{id}")
    if as_json:
        print_json(found)
        return
    for key, value in found.items():
        out.print(f"{key:>12}  {value}", markup=False, highlight=False)


@app.command("remove")
def remove(ids: list[str], url: Url = DEFAULT_URL, as_json: Json = False) -> None:
    """Remove references: gone from searches at once; answers that use them end well."""
    with Client(url) as client:
        removed = [client.request("DELETE", f"/v1/references/{id}") for id in ids]
    if as_json:
        print_json(removed)
    else:
        out.print(f"removed {', '.join(ids)}", markup=False, highlight=False)


@app.command("search")
def search(
    text: Annotated[str, typer.Argument(help="what to look for")] = "",
    image: Annotated[Path | None, typer.Option(help="look for what is like this image", exists=True)] = None,
    top_k: Annotated[int, typer.Option(help="at most so many, 1 to 100")] = 5,
    min_score: Annotated[float | None, typer.Option(help="leave out what is less similar, -1 to 1")] = None,
    filter: Annotated[
        str | None, typer.Option(help='JSON, e.g. \'{"kind": "image", "year": {"gte": 2020}}\'')
    ] = None,
    url: Url = DEFAULT_URL,
    as_json: Json = False,
) -> None:
    """Find references by text, by image, or by both."""
    body: dict[str, Any] = {"query": text, "top_k": top_k, "min_score": min_score}
    if image is not None:
        mime = mimetypes.guess_type(image.name)[0] or "application/octet-stream"
        body["image"] = f"data:{mime};base64,{base64.b64encode(image.read_bytes()).decode()}"
    if filter is not None:
        body["filter"] = _json(filter, "--filter")
    with Client(url) as client:
        found = client.request("POST", "/v1/references/search", json=body)["data"]
    if as_json:
        print_json(found)
        return
    table = Table(Column("score", justify="right"), "kind", "title", Column("id", no_wrap=True))
    for one in found:
        table.add_row(f"{one['score']:.3f}", one["kind"], one["title"], one["id"])
    out.print(table if found else "nothing found", markup=False)


@app.command("import")
def import_(
    source: Annotated[Path, typer.Argument(help="a folder or a .jsonl file", exists=True)],
    url: Url = DEFAULT_URL,
    as_json: Json = False,
) -> None:
    """Add many references: every file of a folder, or the lines of a JSONL file (`path` or `text`, and `title`, `id`,
    `description`, `metadata`).

    Run it again to resume: what is there already is left as it is, what has changed is replaced.
    """
    import asyncio

    from mpic.cli.library import show_results
    from mpic.library.bulk import import_references

    columns = (TextColumn("importing"), BarColumn(), TextColumn("{task.completed:.0f}"))
    with Client(url) as client, Progress(*columns, console=err, transient=True, disable=as_json) as bar:
        task = bar.add_task("", total=None)
        target = IntoServer(client)
        results = asyncio.run(import_references(source, target, lambda result: bar.advance(task)))
    show_results(results, as_json)


@app.command("import-samples")
def import_samples(url: Url = DEFAULT_URL, as_json: Json = False) -> None:
    """Add the bundled set of the demo model's world: 90 pictures, 40 descriptions, 70 facts."""
    from mpic.data.generator.references import FOLDER

    import_(FOLDER / "references.jsonl", url, as_json)


@app.command("reindex")
def reindex(
    wait: Annotated[bool, typer.Option(help="show the progress until it is done")] = True,
    url: Url = DEFAULT_URL,
    as_json: Json = False,
) -> None:
    """Embed everything that has no vector of the configured embedder: after changing it, or after an error.

    The server works in the background, and goes on where an interrupted run stopped.
    """
    with Client(url) as client:
        state = client.request("POST", "/v1/references/reindex")
        columns = (TextColumn("embedding"), BarColumn(), MofNCompleteColumn())
        with Progress(*columns, console=err, transient=True, disable=as_json or not wait) as bar:
            task = bar.add_task("", total=state["references"])
            while wait and state["reindexing"]:
                bar.update(task, completed=state["references"] - state["missing"])
                time.sleep(0.2)
                state = client.request("GET", "/v1/references/index")
    if as_json:
        print_json(state)
    else:
        name = f"{state['embedder']['architecture']} ({str(state['embedder']['weights'])[:12]})"
        out.print(
            f"{state['vectors']:,} of {state['references']:,} references indexed by {name}", highlight=False
        )
        if state["problem"]:
            err.print(f"problem: {state['problem']}", style="red", markup=False, highlight=False)
    if wait and state["missing"]:
        raise typer.Exit(1)


@app.command("evaluate")
def evaluate(
    json_path: Annotated[Path | None, typer.Option("--json", help="write the figures here")] = None,
    questions: Annotated[int, typer.Option(min=1, help="of each kind, at most")] = 1000,
    policy: Annotated[str, typer.Option(help="of all answers")] = "mpic-16",
    model: Annotated[str | None, typer.Option(help="default: the bundled demo model")] = None,
) -> None:
    """Measure retrieval on the bundled set, in this process: recall, and answers with `auto` against the right
    reference in the prompt; how often the model searches when it must, and when it need not."""
    from mpic.evals.retrieval import evaluate as run
    from mpic.evals.retrieval import print_report

    report = run(policy=policy, limit=questions, model=model)
    print_report(report, out)
    if json_path is not None:
        json_path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


class IntoServer:
    """``mpic.library.bulk.Target`` over HTTP."""

    def __init__(self, client: Client) -> None:
        self._client = client

    async def there(self, id: str) -> There | None:
        from mpic.library.bulk import There

        try:
            found = self._client.request("GET", f"/v1/references/{id}")
        except APIError as error:
            if error.status == 404:
                return None
            raise
        return There(found["sha256"], found["title"], found["description"], found["metadata"])

    async def add(self, item: Item, content: bytes) -> str:
        return self._put("POST", "", item, content, {"id": item.id} if item.id else {})

    async def replace(self, item: Item, content: bytes) -> str:
        return self._put("PUT", f"/{item.id}", item, content, {})

    def _put(self, method: str, path: str, item: Item, content: bytes, form: dict[str, str]) -> str:
        from mpic.errors import BadRequest, Unavailable

        form |= {"title": item.title, "description": item.description, "metadata": json.dumps(item.metadata)}
        try:
            made = self._client.request(
                method, f"/v1/references{path}", data=form, files={"file": (item.filename, content)}
            )
        except APIError as error:
            if error.status == 0 or error.status >= 500:
                raise Unavailable(error.message) from error
            raise BadRequest(f"{error.message} [{error.code}]") from error
        return made["kind"]


def _send(
    client: Client, method: str, where: str, path: Path, form: dict[str, str], id: str | None = None
) -> dict[str, Any]:
    mime = mimetypes.guess_type(path.name)[0] or "application/octet-stream"
    files = {"file": (path.name, path.read_bytes(), mime)}
    form = form | ({"id": id} if id else {})
    return client.request(method, f"/v1/references{where}", data=form, files=files)


def _wait(client: Client, id: str) -> dict[str, Any]:
    """The reference once it is compiled, or has failed."""
    while (found := client.request("GET", f"/v1/references/{id}"))["state"] == "compiling":
        time.sleep(0.05)
    return found


def _form(title: str | None, description: str | None, meta: list[str] | None) -> dict[str, str]:
    form = {"title": title, "description": description}
    if meta:
        pairs = [entry.partition("=") for entry in meta]
        if any(not sign for _, sign, _ in pairs):
            raise typer.BadParameter("write --meta key=value")
        form["metadata"] = json.dumps({key: _scalar(value) for key, _, value in pairs})
    return {key: value for key, value in form.items() if value is not None}


def _scalar(text: str) -> str | int | float | bool:
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return value if isinstance(value, int | float | bool) else text


def _json(text: str, option: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise typer.BadParameter(f"not JSON: {error}", param_hint=option) from error


def _show(found: list[dict[str, Any]], as_json: bool) -> None:
    if as_json:
        print_json(found)
        return
    numbers = [Column(name, justify="right") for name in ("version", "tokens", "bytes")]
    table = Table("kind", "state", *numbers, "title", Column("id", no_wrap=True))
    for one in found:
        tokens = str(one["tokens"] or "-")
        state = one["state"] if not one["error"] else f"{one['state']}: {one['error']}"
        size = f"{one['bytes']:,}"
        table.add_row(one["kind"], state, str(one["version"]), tokens, size, one["title"], one["id"])
    empty = "no references yet: mpic references add PATH, or mpic references import-samples"
    out.print(table if found else empty, markup=False)
