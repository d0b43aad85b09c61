"""The chat in a terminal, which reads questions and prints answers."""

from __future__ import annotations

import contextlib
import glob
import os
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from mpic.cli.common import err, error_line, print_json
from mpic.cli.files import show_files
from mpic.errors import BadRequest, MPICError
from mpic.handles import of_file
from mpic.link import named_policy
from mpic.table import printable

if TYPE_CHECKING:
    from mpic.client import MPIC
    from mpic.client.types import Usage

COMMANDS = {
    "/upload": ("PATH [HANDLE]", "upload an image or a document, to be named in the next question"),
    "/files": ("", "list your uploads; name one in a question: IMAGE#NAME or FILE#NAME"),
    "/policy": (
        "[NAME]",
        "which tokens of uploads are computed again from now on; alone: as the server has chosen",
    ),
    "/again": (
        "[NAME]",
        "answer the last question once more under another policy; alone: full, without reuse",
    ),
    "/retrieval": ("[MODE]", "search the references: off, always (before the answer), auto (the model asks)"),
    "/reset": ("", "forget the conversation; uploads stay"),
    "/help": ("", "show this list"),
    "/quit": ("", "end; so does Ctrl-D. Ctrl-C cancels the line, or stops the answer"),
}
"""Name -> what follows it, and what it does."""
MODES = ("off", "always", "auto")
SHOWN = 3
"""Most handles of an answer that are shown because they stayed text."""


class ReplSession:
    """The messages so far, and the options of the next request.

    Args:
        options: fields of every request (max_tokens, temperature, ...).
        policy: the policy of the next requests; None: the server's default.
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
        """Forget everything but the system message."""
        self.messages = list(self.opening)

    def request_options(self) -> dict[str, Any]:
        """Return the options of the next request."""
        return {**self.options, "policy": self.policy}

    def ask(self, text: str, out: Console) -> Usage:
        """Print the answer as it arrives and return its usage. A question that failed is not remembered."""
        question = {"role": "user", "content": text}
        answer = ""
        completions = self.client.chat.completions
        try:
            with completions.create(
                [*self.messages, question], stream=True, **self.request_options()
            ) as stream:
                for piece in stream.texts():
                    answer += piece
                    _write(piece, out)
        finally:
            out.print()
        self.messages += [question, {"role": "assistant", "content": answer}]
        assert stream.usage is not None  # the stream has ended
        return stream.usage

    def again(self, policy: str, out: Console) -> Usage:
        """Answer the last question again under another policy; the new answer replaces the old one."""
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


def _write(piece: str, out: Console) -> None:
    """Write a piece of an answer as it is. A terminal gets no control characters from it: a document may have told the
    model to send commands to the terminal."""
    out.file.write(printable(piece) if out.is_terminal else piece)
    out.file.flush()


def summary(usage: Usage) -> str:
    """Return one line: tokens reused and recomputed, the time to the first token, and handles that named nothing."""
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


def ask_once(session: ReplSession, text: str, out: Console, as_json: bool = False) -> None:
    """Print the answer to one question. The summary goes to stderr, so that pipes receive the answer alone."""
    if as_json:
        messages = [*session.messages, {"role": "user", "content": text}]
        print_json(session.client.chat.completions.create(messages, **session.request_options()))
        return
    usage = session.ask(text, out)
    err.print(summary(usage), style="dim")


def show_help(out: Console) -> None:
    """Explain the commands."""
    from rich.table import Table

    table = Table(box=None, show_header=False, padding=(0, 2, 0, 1))
    table.add_column(no_wrap=True)
    table.add_column()
    for name, (follows, does) in COMMANDS.items():
        table.add_row(f"{name} {follows}", does)
    out.print(table)


def run_repl(session: ReplSession, out: Console) -> None:
    """Read questions until the user quits. An error ends an answer, not the session."""
    health = session.client.health()
    out.print(
        f"{health.model['name']}, policy {session.policy or health.policy}. /help explains the commands; Tab completes"
    )
    with tab_completion(session.client, health.policies):
        while True:
            try:
                text = input("> ").strip()  # not printed by rich, because readline must know the prompt
            except KeyboardInterrupt:
                out.print()
                continue
            except EOFError:
                out.print()
                return
            except UnicodeDecodeError:
                out.print("error: the line is not in this terminal's encoding", style="red")
                continue
            if text == "/quit":
                return
            try:
                run_line(session, text, out, health.policies)
            except MPICError as exc:
                out.print(error_line(exc), style="red")
            except KeyboardInterrupt:
                out.print("stopped", style="dim")


def run_line(session: ReplSession, text: str, out: Console, policies: tuple[str, ...]) -> None:
    """Run one line: a command or a question."""
    command, _, rest = text.partition(" ")
    rest = rest.strip()
    if command == "/reset":
        session.reset()
    elif command == "/files":
        show_files(list(session.client.files.list(limit=1000)), as_json=False)
    elif command == "/upload":
        upload(session, rest, out)
    elif command == "/policy":
        session.policy = known_policy(rest, policies) if rest else None
        out.print(f"policy {session.policy or 'of the server'}; available: {', '.join(policies)}")
    elif command == "/retrieval":
        if rest and rest not in MODES:
            raise BadRequest(f"unknown mode {rest!r}; available: {', '.join(MODES)}")
        session.options["retrieval"] = rest or "off"
        out.print(f"retrieval {rest or 'off'}")
    elif command == "/again":
        policy = known_policy(rest or "full", policies)
        out.print(summary(session.again(policy, out)), style="dim")
    elif command == "/help":
        show_help(out)
    elif command.startswith("/"):
        out.print(f"unknown command {command}; there is")
        show_help(out)
    elif text:
        out.print(summary(session.ask(text, out)), style="dim")


def known_policy(name: str, policies: tuple[str, ...]) -> str:
    """Return a policy's name. Raise UnknownPolicy if it does not exist, which is better reported before the next
    question."""
    if name not in policies:
        named_policy(name)
    return name


def upload(session: ReplSession, arguments: str, out: Console) -> None:
    """Upload a file and wait until it is compiled. Raise BadRequest if it cannot be read."""
    try:
        words = shlex.split(arguments)
    except ValueError as error:  # a quotation mark or backslash without its counterpart
        raise BadRequest(f"{arguments}: {error}; a path with quotation marks goes between others") from error
    if not 1 <= len(words) <= 2:
        raise BadRequest("write /upload PATH, or /upload PATH HANDLE")
    path = Path(os.path.expanduser(words[0]))  # a user that is not known stays as it is written
    handle = words[1] if len(words) == 2 else of_file(path.name)
    try:
        file = session.client.files.create(path, handle, wait=True)
    except OSError as error:
        raise BadRequest(f"{path}: {error.strerror}") from error
    out.print(f"{file.mention}: {file.outcome}, {file.tokens} tokens")


@contextlib.contextmanager
def tab_completion(client: MPIC, policies: tuple[str, ...]) -> Iterator[None]:
    """Let Tab complete commands, policies and handles of uploads, if the system has readline."""
    try:
        import readline
    except ImportError:  # not available on Windows
        yield
        return
    old, delimiters = readline.get_completer(), readline.get_completer_delims()
    found: list[str] = []

    def complete(word: str, state: int) -> str | None:
        if state == 0:
            found[:] = tab_matches(client, policies, readline.get_line_buffer(), word)
        return found[state] if state < len(found) else None

    readline.set_completer(complete)
    readline.set_completer_delims(" \t\n,.;:?!()\"'")
    readline.parse_and_bind("tab: complete")
    try:
        yield
    finally:
        readline.set_completer(old)
        readline.set_completer_delims(delimiters)


def tab_matches(client: MPIC, policies: tuple[str, ...], line: str, word: str) -> list[str]:
    """Return the commands, policies or handles that may replace ``word``, the last word of ``line``."""
    command, space, _ = line.partition(" ")
    if command.startswith("/"):
        names = [f"{name} " if follows else name for name, (follows, _) in COMMANDS.items()]
        values = {"/policy": policies, "/again": policies, "/retrieval": MODES}.get(command, ())
        if command == "/upload" and space:
            return sorted(glob.glob(f"{glob.escape(word)}*"))
        return [c for c in (values if space else names) if c.startswith(word)]
    try:
        handles = [f.mention for f in client.files.list(limit=1000) if f.mention]
    except MPICError:  # the next question will report the error
        return []
    name = word.removeprefix("IMAGE#").removeprefix("FILE#")
    return sorted(h for h in handles if h.startswith(word) or (word and h.partition("#")[2].startswith(name)))
