"""``mpic chat``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from mpic.cli import completion
from mpic.cli.common import client_command, command_app, err, out, print_json, read_json
from mpic.link import policy_names
from mpic.press import press_names
from mpic.table import printable

if TYPE_CHECKING:
    from mpic.client import MPIC
    from mpic.client.types import Usage

SHOWN = 3
"""Maximum number of unresolved handles that are listed after an answer."""

app = command_app()


@client_command(app)
def chat(
    client: MPIC,
    message: Annotated[str | None, typer.Option("--message", "-m", help="the question")] = None,
    policy: Annotated[
        str | None,
        typer.Option(
            help=f"which chunk tokens are recomputed: {', '.join(policy_names())}; left out: the server's choice",
            autocompletion=completion.policies,
        ),
    ] = None,
    press: Annotated[
        str | None,
        typer.Option(
            help=f"how uploads are compressed: none, {', '.join(press_names())} (R percent removed)"
        ),
    ] = None,
    retrieval: Annotated[
        str | None,
        typer.Option(help="search the references: always (before the answer), auto (the model asks)"),
    ] = None,
    system: Annotated[str | None, typer.Option(help="system message")] = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="longest answer; left out: as long as the context allows")
    ] = None,
    temperature: Annotated[float, typer.Option(min=0, max=2, help="0 is greedy")] = 0.0,
    seed: Annotated[int | None, typer.Option(help="makes sampling repeatable")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print the whole response")] = False,
) -> None:
    """Ask the model. Name uploads in the text: `Compare IMAGE#EIFFEL with IMAGE#LOUVRE.`

    After the answer one line on stderr shows how many tokens of your uploads were reused and how many recomputed. For a
    conversation open the server's page (`/ui`), or use any client for OpenAI's API.

    Examples: `mpic chat -m "What is in IMAGE#PHOTO?" --policy full`, `mpic chat -m "Summarize FILE#NOTES" --json`.
    """
    if message is None:
        raise typer.BadParameter(
            "ask with -m; for a conversation open the server's page (/ui), or use a client for OpenAI's API"
        )
    options: dict[str, Any] = {"max_tokens": max_tokens, "temperature": temperature, "seed": seed}
    options["press"] = press
    options["retrieval"] = (
        read_json(retrieval, "--retrieval") if retrieval and retrieval.startswith("{") else retrieval
    )
    options = {name: value for name, value in options.items() if value is not None} | {"policy": policy}
    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": message})
    if as_json:
        print_json(client.chat.completions.create(messages, **options))
        return
    try:
        with client.chat.completions.create(messages, stream=True, **options) as stream:
            for piece in stream.texts():
                write(piece, out)
    finally:
        out.print()
    assert stream.usage is not None  # the stream has ended
    err.print(summary(stream.usage), style="dim")


def write(piece: str, out: Console) -> None:
    """Write a piece of an answer as it is. A terminal gets no control characters from it: a document may have told the
    model to send commands to the terminal."""
    out.file.write(printable(piece) if out.is_terminal else piece)
    out.file.flush()


def summary(usage: Usage) -> str:
    """Return one line: tokens reused and recomputed, the time to the first token, and handles that did not match a
    file."""
    ours = usage.mpic
    parts = [
        ours.policy,
        f"first token {ours.ms.ttft:.0f} ms",
        f"prompt {usage.prompt_tokens}",
        f"reused {ours.tokens.reused}",
        f"recomputed {ours.tokens.recomputed}",
    ]
    if ours.tokens.prefix_hit:
        parts.append(f"prefix {ours.tokens.prefix_hit}")
    if ours.tokens.compiled:
        parts.append(f"compiled {ours.tokens.compiled}")
    if ours.retrieval:
        parts.append(
            f"found {', '.join(r for found in ours.retrieval for r in found.references) or 'nothing'}"
        )
    parts += [f"{one.handle} stayed text: {one.reason}" for one in (ours.unlinked_handles or ())[:SHOWN]]
    return " · ".join(parts)
