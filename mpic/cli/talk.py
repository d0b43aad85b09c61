"""Chat in a terminal."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from rich.console import Console

from mpic.cli.common import err, error_line, print_json
from mpic.cli.files import show_files
from mpic.errors import BadRequest, MPICError

if TYPE_CHECKING:
    from mpic.client import MPIC
    from mpic.client.types import Usage

COMMANDS = ("/again ", "/files", "/policy ", "/quit", "/reset")  # a blank where a name follows
HELP = "there is /files, /policy NAME, /again NAME, /reset and /quit"


class Conversation:
    """What was said so far, and how to go on.

    Args:
        options: fields of the request that stay the same (max_tokens, temperature, ...).
        policy: None leaves the choice to the server.
    """

    def __init__(
        self,
        client: MPIC,
        options: dict[str, Any] | None = None,
        policy: str | None = None,
        system: str | None = None,
    ) -> None:
        self.client = client
        self.options = options or {}
        self.policy = policy
        self.opening = [{"role": "system", "content": system}] if system else []
        self.messages: list[dict[str, Any]] = list(self.opening)

    def reset(self) -> None:
        self.messages = list(self.opening)

    def request_options(self) -> dict[str, Any]:
        return {**self.options, "policy": self.policy}

    def ask(self, text: str, out: Console) -> Usage:
        """Print the answer as it comes and return its usage. A question that failed is not remembered."""
        question = {"role": "user", "content": text}
        answer = ""
        completions = self.client.chat.completions
        try:
            with completions.create(
                [*self.messages, question], stream=True, **self.request_options()
            ) as stream:
                for piece in stream.texts():
                    answer += piece
                    out.print(piece, end="", markup=False, highlight=False, soft_wrap=True)
        finally:
            out.print()
        self.messages += [question, {"role": "assistant", "content": answer}]
        assert stream.usage is not None  # asked for
        return stream.usage

    def again(self, policy: str, out: Console) -> Usage:
        """Answer the last question once more under another policy; the new answer takes the place of the old."""
        if len(self.messages) < len(self.opening) + 2:
            raise BadRequest("nothing was asked yet")
        before, own = self.messages, self.policy
        self.messages, self.policy = self.messages[:-2], policy
        try:
            return self.ask(before[-2]["content"], out)
        except BaseException:
            self.messages = before
            raise
        finally:
            self.policy = own


def summary(usage: Usage) -> str:
    """One line: what was reused, what was recomputed, how long the first token took."""
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
    return " · ".join(parts)


def ask_once(talk: Conversation, text: str, out: Console, as_json: bool = False) -> None:
    """One question, one answer. The summary line goes to the terminal only, so that pipes see the answer alone."""
    if as_json:
        messages = [*talk.messages, {"role": "user", "content": text}]
        print_json(talk.client.chat.completions.create(messages, **talk.request_options()))
        return
    usage = talk.ask(text, out)
    err.print(summary(usage), style="dim", highlight=False)


def converse(talk: Conversation, out: Console) -> None:
    """Read questions until the person has enough. An error ends an answer, not the conversation."""
    health = talk.client.health()
    out.print(
        f"{health.model['name']}, policy {talk.policy or health.policy}. /files, /policy NAME, /again NAME, /reset, "
        "/quit; Tab completes",
        highlight=False,
    )
    with completion(talk.client, health.policies):
        while True:
            try:
                text = input("> ").strip()  # not rich: readline must know the prompt to draw it again
            except (EOFError, KeyboardInterrupt):
                out.print()
                return
            if text == "/quit":
                return
            try:
                answer(talk, text, out, health.policies)
            except MPICError as exc:
                out.print(error_line(exc), style="red", markup=False, highlight=False)
            except KeyboardInterrupt:
                out.print("stopped", style="dim")


def answer(talk: Conversation, text: str, out: Console, policies: tuple[str, ...]) -> None:
    """What one line of the person does."""
    command, _, rest = text.partition(" ")
    rest = rest.strip()
    if command == "/reset":
        talk.reset()
    elif command == "/files":
        show_files(list(talk.client.files.list(order="asc", limit=1000)), as_json=False)
    elif command == "/policy":
        talk.policy = rest or None
        out.print(
            f"policy {talk.policy or 'as the server likes'}; it knows {', '.join(policies)}", highlight=False
        )
    elif command == "/again":
        out.print(summary(talk.again(rest or "full", out)), style="dim", highlight=False)
    elif command.startswith("/"):
        out.print(HELP, highlight=False)
    elif text:
        out.print(summary(talk.ask(text, out)), style="dim", highlight=False)


@contextlib.contextmanager
def completion(client: MPIC, policies: tuple[str, ...]) -> Iterator[None]:
    """Tab completes commands, policies and the handles of uploads, where the system has readline."""
    try:
        import readline
    except ImportError:  # Windows
        yield
        return
    old, delimiters = readline.get_completer(), readline.get_completer_delims()
    found: list[str] = []

    def complete(word: str, state: int) -> str | None:
        if state == 0:
            found[:] = completions(client, policies, readline.get_line_buffer(), word)
        return found[state] if state < len(found) else None

    readline.set_completer(complete)
    readline.set_completer_delims(" \t\n,.;:?!()\"'")
    readline.parse_and_bind("tab: complete")
    try:
        yield
    finally:
        readline.set_completer(old)
        readline.set_completer_delims(delimiters)


def completions(client: MPIC, policies: tuple[str, ...], line: str, word: str) -> list[str]:
    """What may stand in place of ``word``, the last one of ``line``: a command, a policy, or an upload."""
    command, space, _ = line.partition(" ")
    if command.startswith("/"):
        return [c for c in (policies if space else COMMANDS) if c.startswith(word)]
    try:
        handles = [f.mention for f in client.files.list(limit=1000) if f.mention]
    except MPICError:  # nothing to complete with; the next question will say what is wrong
        return []
    name = word.removeprefix("IMAGE#").removeprefix("FILE#")
    return sorted(h for h in handles if h.startswith(word) or (word and h.partition("#")[2].startswith(name)))
