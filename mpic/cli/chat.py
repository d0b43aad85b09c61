"""``mpic chat``."""

from __future__ import annotations

from typing import Annotated

import typer

from mpic.cli.common import DEFAULT_URL, Url, noun, out
from mpic.client import Client

app = noun()


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
