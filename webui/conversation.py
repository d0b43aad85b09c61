"""What was said on one page, and how each answer came to be."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, Literal

HANDLE = re.compile(r"(?<![A-Za-z0-9_])(IMAGE|FILE)#([A-Za-z0-9_.\-]+)")


@dataclass
class Run:
    """One answer: as it is being written, or as it ended.

    Args:
        policy: empty: the server's default.
        state: ``waiting`` for the first token, ``writing``, ``done``, ``stopped`` by a person, ``failed``.
        error: code and message.
        retrieval: ``off``, ``always`` or ``auto``.
        citations: of the references it was given, in order, each with the ``query`` that found it.
    """

    policy: str
    text: str = ""
    usage: dict[str, Any] | None = None
    state: Literal["waiting", "writing", "done", "stopped", "failed"] = "waiting"
    error: tuple[str, str] | None = None
    retrieval: str = "off"
    citations: list[dict[str, Any]] = field(default_factory=list)

    @property
    def running(self) -> bool:
        return self.state in ("waiting", "writing")

    def fail(self, code: str, message: str) -> None:
        self.state, self.error = "failed", (code, message)

    def end(self) -> None:
        """What still runs was stopped."""
        if self.running:
            self.state = "stopped"

    @property
    def name(self) -> str:
        """The policy as the server calls it, once it has said so."""
        return self.usage["mpic"]["policy"] if self.usage else self.policy

    @property
    def searches(self) -> list[dict[str, Any]] | None:
        """``query``, ``error`` and ``citations`` of each search; None while nothing is known of any."""
        rounds = self.usage["mpic"].get("retrieval") if self.usage else None
        if rounds is None:
            queries = dict.fromkeys(citation["query"] for citation in self.citations)
            rounds = [{"query": query, "error": None} for query in queries]
            if not rounds:
                return None
        left = list(self.citations)
        searches = []
        for one in rounds:
            given = [c for c in left if c["query"] == one["query"]]
            left = [c for c in left if c["query"] != one["query"]]  # the same words twice find the same
            searches.append({"query": one["query"], "error": one["error"], "citations": given})
        return searches

    @property
    def trace(self) -> dict[str, Any] | None:
        """What became of every token of the prompt."""
        return self.usage["mpic"].get("trace") if self.usage else None

    @property
    def ttft(self) -> float | None:
        """Milliseconds to the first token."""
        return self.usage["mpic"]["ms"]["ttft"] if self.usage else None


@dataclass
class Turn:
    """A question, its answer, and perhaps the same answer without reuse."""

    text: str
    answer: Run
    again: Run | None = None
    files: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def running(self) -> bool:
        return self.answer.running or (self.again is not None and self.again.running)


class Conversation:
    """The turns of one open page. No dataclass: Gradio would turn one into a dict.

    Args:
        owner: whose page it is; set by the first event.
    """

    def __init__(self, owner: str | None = None) -> None:
        self.owner = owner
        self.turns: list[Turn] = []

    @property
    def running(self) -> bool:
        return any(turn.running for turn in self.turns)

    def messages(self, upto: int) -> list[dict[str, Any]]:
        """The conversation as the API takes it, up to and with the question of turn ``upto``. Questions that were
        never answered are left out."""
        out: list[dict[str, Any]] = []
        for turn in self.turns[:upto]:
            if turn.answer.text and turn.answer.state != "failed":
                out.append({"role": "user", "content": turn.text})
                out.append({"role": "assistant", "content": turn.answer.text})
        out.append({"role": "user", "content": self.turns[upto].text})
        return out

    def end(self) -> None:
        """Mark what runs as stopped."""
        for turn in self.turns:
            for run in filter(None, (turn.answer, turn.again)):
                run.end()


def name_of(file: dict[str, Any]) -> str:
    """How a prompt names a file: ``IMAGE#NAME``; its file name where it has no handle."""
    if not file["handle"]:
        return file["filename"]
    return f"{'IMAGE' if file['kind'] == 'image' else 'FILE'}#{file['handle']}"
