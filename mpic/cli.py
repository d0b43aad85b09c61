"""The command line: ``mpic serve``, ``chat``, ``upload``, ``files``, ``demo``, and the tools that come with it.

Only light modules are imported here, so that ``mpic --help`` answers at once.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from rich.table import Column, Table

from mpic import __version__
from mpic.client import DEFAULT_URL, APIError, Client
from mpic.config import SECTIONS, load_config
from mpic.errors import MPICError

out = Console()
err = Console(stderr=True)

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    help="Serve multimodal LLMs with position-independent KV caching.\n\n"
    "Start with `mpic serve`, then in another terminal `mpic upload photo.jpg --handle PHOTO` and "
    "`mpic chat -m 'What is in IMAGE#PHOTO?'`.",
)
files_app = typer.Typer(no_args_is_help=True, help="List and delete uploaded files.")
app.add_typer(files_app, name="files")

Url = Annotated[str, typer.Option(help="where the server listens")]
Json = Annotated[bool, typer.Option("--json", help="print JSON, for scripts")]


def main() -> None:
    """Entry point: errors of ours become one line on stderr and a non-zero exit status."""
    try:
        app()
    except (APIError, MPICError) as exc:
        err.print(
            f"error: {exc.message} [{exc.code}]", style="red", markup=False, highlight=False, soft_wrap=True
        )
        sys.exit(1)


def _version(wanted: bool) -> None:
    if wanted:
        out.print(f"mpic {__version__}", highlight=False)
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="print the version")
    ] = False,
) -> None:
    pass


# ---- serve


def _with_config_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command one flag for every configuration key; its ``flags`` argument receives what was set."""
    fixed = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.name != "flags"]
    generated = []
    for section, cls in SECTIONS.items():
        helps = dict(re.findall(r"^ {8}(\w+): (.+)$", cls.__doc__ or "", re.MULTILINE))
        for name, kind in get_type_hints(cls).items():
            option = typer.Option(
                help=helps[name], rich_help_panel=f"{section} (section of the configuration file)"
            )
            annotation = Annotated[kind | None, option]
            generated.append(
                inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
            )
    names = {p.name for p in generated}

    def run(**values: Any) -> None:
        flags = {k: v for k, v in values.items() if k in names}
        command(**{k: v for k, v in values.items() if k not in names}, flags=flags)

    keyword = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in fixed]
    run.__signature__ = inspect.Signature([*keyword, *generated])  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in [*keyword, *generated]}
    run.__name__, run.__doc__ = command.__name__, command.__doc__
    return run


@app.command()
@_with_config_flags
def serve(
    flags: dict[str, Any],
    config: Annotated[
        Path | None, typer.Option(help="a TOML file with [server], [engine], [library]")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="announce the address as JSON, for scripts")
    ] = False,
) -> None:
    """Start the server.

    Every key of the configuration file is a flag too, and flags win. Without API keys the server listens on this
    machine only.
    """
    settings = load_config(config, flags)
    from mpic.server.run import serve as run

    run(settings, as_json)


# ---- files


@app.command()
def upload(
    paths: Annotated[
        list[Path], typer.Argument(help="images and UTF-8 text files", exists=True, dir_okay=False)
    ],
    handle: Annotated[
        str | None, typer.Option(help="NAME for IMAGE#NAME or FILE#NAME in prompts; one file only")
    ] = None,
    expires: Annotated[int | None, typer.Option(min=1, help="delete after so many seconds")] = None,
    wait: Annotated[bool, typer.Option(help="wait until the KV cache is compiled")] = True,
    url: Url = DEFAULT_URL,
    as_json: Json = False,
) -> None:
    """Upload images and documents; each is compiled once into a KV cache that any prompt can link.

    Without --handle a file is named by its stem in capitals: `eiffel 2025.jpg` becomes EIFFEL_2025.
    """
    if handle and len(paths) > 1:
        raise typer.BadParameter("a handle names one file; leave it out to name each by its stem")
    done = []
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Client(url) as client, Progress(*columns, console=err, transient=True, disable=as_json) as bar:
        for path in paths:
            task = bar.add_task(path.name, total=path.stat().st_size)
            name = handle or stem_handle(path)
            file = client.upload(path, name, expires, lambda n, task=task: bar.advance(task, n))
            if wait:
                bar.update(task, description=f"{path.name} compiling")
                file = client.wait(file["id"])
            done.append(file)
    _show_files(done, as_json)


def stem_handle(path: Path) -> str:
    """A handle made of a file's stem: capitals, digits and underscores."""
    return re.sub(r"[^A-Z0-9]+", "_", path.stem.upper()).strip("_") or "FILE"


@files_app.command("list")
def files_list(url: Url = DEFAULT_URL, as_json: Json = False) -> None:
    """List uploaded files, oldest first."""
    with Client(url) as client:
        _show_files(list(client.files()), as_json)


@files_app.command("delete")
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
        print(json.dumps(deleted, indent=2))
    else:
        out.print(f"deleted {', '.join(names)}", markup=False, highlight=False)


def _show_files(files: list[dict[str, Any]], as_json: bool) -> None:
    if as_json:
        print(json.dumps(files, indent=2))
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


# ---- chat


@app.command()
def chat(
    message: Annotated[
        str | None, typer.Option("--message", "-m", help="ask once, print the answer, end")
    ] = None,
    policy: Annotated[
        str | None, typer.Option(help="what is recomputed: mpic-16, reuse, prefix, full, ...")
    ] = None,
    system: Annotated[str | None, typer.Option(help="system message")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1)] = None,
    temperature: Annotated[float, typer.Option(min=0, max=2, help="0 is greedy")] = 0.0,
    seed: Annotated[int | None, typer.Option(help="makes sampling repeatable")] = None,
    url: Url = DEFAULT_URL,
    as_json: Annotated[bool, typer.Option("--json", help="with -m: print the whole response")] = False,
) -> None:
    """Talk to the model. Name uploads in the text: `Compare IMAGE#EIFFEL with IMAGE#LOUVRE.`

    After each answer one line shows how many tokens of your uploads were reused and how many recomputed. In a
    conversation `/policy NAME` changes the policy, `/reset` forgets what was said, `/quit` ends.
    """
    from mpic.client.chat import Conversation, ask_once, converse

    options = {"max_tokens": max_tokens, "temperature": temperature, "seed": seed}
    with Client(url) as client:
        talk = Conversation(client, {k: v for k, v in options.items() if v is not None}, policy, system)
        if message is None:
            converse(talk, out)
        else:
            ask_once(talk, message, out, as_json)


# ---- demo and tools


@app.command()
def demo(
    policies: Annotated[str, typer.Option(help="comma-separated")] = "prefix,reuse,mpic-16,legolink-16",
    model: Annotated[str | None, typer.Option(help="model folder; default: the bundled demo model")] = None,
    samples: Annotated[
        Path | None, typer.Option(help="folder with manifest.json; default: the bundled one")
    ] = None,
    json_path: Annotated[Path | None, typer.Option("--json", help="write every figure to this file")] = None,
) -> None:
    """Start a server, upload the samples, ask about them under several policies, compare the answers.

    Ends with a non-zero status when an expected answer is missed under mpic-16.
    """
    from mpic.evals.demo import run

    signal.signal(
        signal.SIGTERM, lambda *_: sys.exit(143)
    )  # as an exception, so that the server is ended too
    raise typer.Exit(run(policies.split(","), model, samples, json_path))


def _add_tool(name: str, module: str, help: str) -> None:
    """A command whose own Typer app lives in ``module`` and is imported only when it is used."""
    try:
        if importlib.util.find_spec(module) is None:
            return
    except ModuleNotFoundError:
        return

    settings = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}

    @app.command(name, help=help, context_settings=settings)
    def run(context: typer.Context) -> None:
        importlib.import_module(module).app(context.args, prog_name=f"mpic {name}")


_add_tool("bench", "mpic.evals.bench.cli", "Measure: TTFT, pages, decode speed.")
_add_tool("eval", "mpic.evals.cli", "Compare policies on your model and data.")
_add_tool("analyze", "mpic.evals.analyze.cli", "Look at attention and KV of one prompt.")
_add_tool("train", "mpic.train.cli", "Train the demo models.")

if __name__ == "__main__":
    main()
