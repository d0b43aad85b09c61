"""``mpic demo``."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Annotated

import typer

from mpic.cli import completion
from mpic.cli.common import command_app

app = command_app()


@app.command()
def demo(
    policies: Annotated[
        str, typer.Option(help="comma-separated", autocompletion=completion.policies)
    ] = "prefix,reuse,mpic-16,legolink-16",
    model: Annotated[str | None, typer.Option(help="model folder; default: the bundled demo model")] = None,
    samples: Annotated[
        Path | None, typer.Option(help="folder with manifest.json; default: the bundled one")
    ] = None,
    engine: Annotated[str, typer.Option(help="native or vllm")] = "native",
    quantize: Annotated[
        str, typer.Option(help="int8 or int4: round the weights when they are loaded (native)")
    ] = "",
    json_path: Annotated[Path | None, typer.Option("--json", help="write every figure to this file")] = None,
) -> None:
    """Start a server, upload the samples, ask about them under several policies, compare the answers.

    Questions over eight images come last, in an order of their own each: by how much sooner the first token comes than
    with prefix caching is the headline.

    The exit status is not zero if an expected answer is missed under mpic-16.
    """
    from mpic_lab.demo import run

    # raised as an exception, so that the server is ended, too
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    raise typer.Exit(run(policies.split(","), model, samples, json_path, engine=engine, quantize=quantize))
