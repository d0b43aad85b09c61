"""``mpic chat``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from mpic.cli import completion
from mpic.cli.common import client_command, command_app, out, read_json
from mpic.cli.repl import ReplSession, ask_once, run_repl
from mpic.link import policy_names
from mpic.press import press_names

if TYPE_CHECKING:
    from mpic.client import MPIC

app = command_app()


@client_command(app)
def chat(
    client: MPIC,
    message: Annotated[
        str | None, typer.Option("--message", "-m", help="ask once, print the answer, end")
    ] = None,
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
    as_json: Annotated[bool, typer.Option("--json", help="with -m: print the whole response")] = False,
) -> None:
    """Talk to the model. Name uploads in the text: `Compare IMAGE#EIFFEL with IMAGE#LOUVRE.`

    After each answer one line shows how many tokens of your uploads were reused and how many recomputed. In a
    conversation the Tab key completes handles and commands; `/help` explains them: `/upload PATH`, `/files`,
    `/policy NAME`, `/again NAME`, `/retrieval MODE`, `/reset`, `/quit`.

    Examples: `mpic chat`, `mpic chat -m "What is in IMAGE#PHOTO?" --policy full`,
    `mpic chat -m "Summarize FILE#NOTES" --json`.
    """
    if as_json and message is None:
        raise typer.BadParameter("--json needs --message")
    options: dict[str, Any] = {"max_tokens": max_tokens, "temperature": temperature, "seed": seed}
    options["press"] = press
    options["retrieval"] = (
        read_json(retrieval, "--retrieval") if retrieval and retrieval.startswith("{") else retrieval
    )
    session = ReplSession(client, {k: v for k, v in options.items() if v is not None}, policy, system)
    if message is None:
        run_repl(session, out)
    else:
        ask_once(session, message, out, as_json)
