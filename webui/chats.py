"""Chats in the form that the browser keeps and sends with every event. They are checked like any other input."""

from __future__ import annotations

import time
from typing import Any, Literal, Self

import pydantic
from pydantic import BaseModel, ConfigDict, Field

from mpic.client.types import RetrievalRound, Usage
from mpic.errors import BadRequest

State = Literal["waiting", "writing", "done", "stopped", "failed"]
ID = Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")


class Part(BaseModel):
    model_config = ConfigDict(extra="ignore")


class Wishes(Part):
    """The options of an answer. Empty texts leave them to the server."""

    policy: str = Field("", max_length=80)
    press: str = Field("", max_length=80)
    retrieval: Literal["off", "always", "auto"] = "off"
    system: str = Field("", max_length=100_000)
    temperature: float = Field(0.0, ge=0, le=2)
    length: int = Field(256, ge=1, le=1_000_000)


class TokenSpan(Part):
    """Tokens of the prompt, one after the other, that came from the same place (``usage.mpic.trace``)."""

    state: str
    tokens: int
    kind: str = "text"
    label: str = ""
    file: str = ""


class Facts(Part):
    """The source of the prompt's tokens, and the parts of the time to the first token in ms."""

    prompt: int
    saved: int
    ttft: float
    queue: float = 0.0
    load: float = 0.0
    link: float = 0.0
    spans: list[TokenSpan] = []

    @classmethod
    def of(cls, usage: Usage) -> Self:
        ours, trace = usage.mpic, usage.mpic.trace
        spans = [
            TokenSpan(
                state=s.state, tokens=s.end - s.start, kind=s.kind, label=s.label or "", file=s.file_id or ""
            )
            for s in (trace.spans if trace else ())
        ]
        saved = ours.tokens.reused + ours.tokens.prefix_hit
        times = {name: getattr(ours.ms, name) for name in ("ttft", "queue", "load", "link")}
        return cls(prompt=usage.prompt_tokens, saved=saved, spans=spans, **times)


class Cited(Part):
    """A reference that the model was given."""

    reference_id: str
    title: str = ""
    kind: str = "text"
    score: float = 0.0
    query: str = ""


class SearchMade(Part):
    """A search of the references."""

    query: str
    error: str | None = None

    @classmethod
    def of(cls, made: RetrievalRound) -> Self:
        return cls(query=made.query, error=made.error)


class StoredAnswer(Part):
    """One answer to a question."""

    wishes: Wishes = Wishes()
    text: str = ""
    state: State = "waiting"
    error: str = ""
    policy: str = ""
    facts: Facts | None = None
    cited: list[Cited] = []
    searches: list[SearchMade] = []

    @property
    def running(self) -> bool:
        return self.state in ("waiting", "writing")


class StoredTurn(Part):
    """A question with its answer, and the answer without reuse if one was asked for.

    Attributes:
        at: time of the question in ms, which orders the turns.
        changed: time of the last change in ms; if two tabs differ, the later version is kept.
        files: handles in the question, in capitals, with the ids that they had at the time.
    """

    id: str = ID
    at: int = 0
    changed: int = 0
    question: str = ""
    files: dict[str, str] = {}
    answer: StoredAnswer = StoredAnswer()
    again: StoredAnswer | None = None

    def touch(self) -> None:
        self.changed = max(now(), self.changed + 1)


class StoredChat(Part):
    """A chat.

    Attributes:
        removed: turns that were deleted, with the time in ms, so that no other tab brings them back.
    """

    id: str = ID
    title: str = ""
    updated: int = 0
    turns: list[StoredTurn] = []
    removed: dict[str, int] = {}

    def turn(self, id: str) -> StoredTurn:
        """Return a turn. Raise BadRequest if there is none of this id."""
        found = next((turn for turn in self.turns if turn.id == id), None)
        if found is None:
            raise BadRequest("this turn is no longer in the chat", param="turn")
        return found

    def remove(self, turn: StoredTurn) -> None:
        self.removed[turn.id] = max(now(), turn.changed)
        self.turns.remove(turn)


class OpenChat(Part):
    """The message that the page's store and its events exchange.

    Attributes:
        user: whose chat it is.
        chat: the open chat.
        ms_per_token: milliseconds that this server takes per prompt token.
        answering: whether an answer of this page is being written; None leaves that as it is.
        asked: the turn that was created from the question in the box.
    """

    user: str = ""
    chat: StoredChat
    ms_per_token: float | None = None
    answering: bool | None = None
    asked: str = ""


def open_chat(value: Any) -> OpenChat:
    """Return the message that a browser has sent. Raise BadRequest if it is not valid."""
    try:
        return OpenChat.model_validate(value)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise BadRequest(f"the chat cannot be read: {where}: {first['msg']}", param=where) from None


def now() -> int:
    return int(1000 * time.time())
