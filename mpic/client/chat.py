"""Chat in a terminal."""

from __future__ import annotations

import json
from typing import Any

from rich.console import Console

from mpic.client.http import APIError, Client


class Conversation:
    """What was said so far, and how to go on.

    Args:
        options: fields of the request that stay the same (max_tokens, temperature, ...).
        policy: None leaves the choice to the server.
    """

    def __init__(
        self,
        client: Client,
        options: dict[str, Any] | None = None,
        policy: str | None = None,
        system: str | None = None,
    ) -> None:
        self.client = client
        self.options = options or {}
        self.policy = policy
        self.opening = [{"role": "system", "content": system}] if system else []
        self.messages = list(self.opening)

    def reset(self) -> None:
        self.messages = list(self.opening)

    def request_options(self) -> dict[str, Any]:
        return {**self.options, "mpic": {"policy": self.policy} if self.policy else {}}

    def ask(self, text: str, out: Console) -> dict[str, Any]:
        """Print the answer as it comes and return its usage. A question that failed is not remembered."""
        question = {"role": "user", "content": text}
        answer, usage = "", {}
        try:
            for chunk in self.client.stream([*self.messages, question], **self.request_options()):
                usage = chunk.get("usage") or usage
                for choice in chunk["choices"]:
                    piece = choice["delta"].get("content") or ""
                    answer += piece
                    out.print(piece, end="", markup=False, highlight=False, soft_wrap=True)
        finally:
            out.print()
        self.messages += [question, {"role": "assistant", "content": answer}]
        return usage


def summary(usage: dict[str, Any]) -> str:
    """One line: what was reused, what was recomputed, how long the first token took."""
    ours = usage["mpic"]
    tokens = ours["tokens"]
    parts = [
        ours["policy"],
        f"first token {ours['ms']['ttft']:.0f} ms",
        f"prompt {usage['prompt_tokens']}",
        f"reused {tokens['reused']}",
        f"recomputed {tokens['recomputed']}",
    ]
    if tokens["prefix_hit"]:
        parts.append(f"prefix {tokens['prefix_hit']}")
    if tokens["compiled"]:
        parts.append(f"compiled {tokens['compiled']}")
    return " · ".join(parts)


def ask_once(talk: Conversation, text: str, out: Console, as_json: bool = False) -> None:
    """One question, one answer. The summary line goes to the terminal only, so that pipes see the answer alone."""
    if as_json:
        messages = [*talk.messages, {"role": "user", "content": text}]
        print(json.dumps(talk.client.chat(messages, **talk.request_options()), indent=2, ensure_ascii=False))
        return
    usage = talk.ask(text, out)
    Console(stderr=True).print(summary(usage), style="dim", highlight=False)


def converse(talk: Conversation, out: Console) -> None:
    """Read questions until the person has enough. An error ends an answer, not the conversation."""
    health = talk.client.health()
    out.print(
        f"{health['model']['name']}, policy {talk.policy or health['policy']}. /policy NAME, /reset, /quit"
    )
    while True:
        try:
            text = out.input("[bold]> [/bold]").strip()
        except (EOFError, KeyboardInterrupt):
            out.print()
            return
        command, _, rest = text.partition(" ")
        if command == "/quit":
            return
        if command == "/reset":
            talk.reset()
        elif command == "/policy":
            talk.policy = rest.strip() or None
            out.print(
                f"policy {talk.policy or 'as the server likes'}; it knows {', '.join(health['policies'])}"
            )
        elif command.startswith("/"):
            out.print("there is /policy NAME, /reset and /quit")
        elif text:
            try:
                out.print(summary(talk.ask(text, out)), style="dim", highlight=False)
            except APIError as exc:
                out.print(f"error: {exc.message} [{exc.code}]", style="red", markup=False, highlight=False)
            except KeyboardInterrupt:
                out.print("stopped", style="dim")
