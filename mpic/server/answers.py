"""From the engine's deltas to OpenAI's chat completion objects."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Protocol

from mpic.engine.base import Delta, RetrievalRound, TokenLogprob, Usage
from mpic.server.tools import CallReader

PART = "\ufffd"
"""What decoding makes of bytes that are part of a character."""


def _alphabet() -> dict[str, int]:
    """The characters byte-level BPE (GPT-2's) writes bytes as: the visible ones of Latin-1 stand for themselves."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(256 + i): byte for i, byte in enumerate(others)}


BYTES = _alphabet()


class Tokens(Protocol):
    """What is needed of a tokenizer to show log-probabilities."""

    def decode(self, ids: list[int], **options: Any) -> str: ...

    def convert_ids_to_tokens(self, ids: int) -> str: ...


class Answer:
    """Writes the objects of one completion.

    Args:
        trace: say where every token of the prompt came from.
        given: searches made before the answer; None when the request wants no retrieval.
        tools: read calls of tools out of the text.
    """

    def __init__(
        self,
        id: str,
        model: str,
        created: int,
        tokens: Tokens,
        trace: bool = False,
        given: tuple[RetrievalRound, ...] | None = None,
        tools: bool = False,
    ) -> None:
        self.id = id
        self.model = model
        self.created = created
        self.tokens = tokens
        self.trace = trace
        self.given = given
        self.tools = tools
        self._readers: dict[int, CallReader] = {}

    def whole(self, answers: list[list[Delta]], usage: Usage, logprobs: bool) -> dict[str, Any]:
        """The ``chat.completion`` of finished answers."""
        choices = [self._choice(i, deltas, logprobs) for i, deltas in enumerate(answers)]
        return {**self._envelope("chat.completion", choices), "usage": self.usage(usage)}

    def _choice(self, index: int, deltas: list[Delta], logprobs: bool) -> dict[str, Any]:
        text = "".join(d.text for d in deltas)
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if self.tools:
            message |= {"content": None, **self._read(index, text, True)}
            for call in message.get("tool_calls", ()):
                del call["index"]  # of streams only
        if self.given is not None:
            found = [d.retrieval for d in deltas if d.retrieval is not None]
            message["annotations"] = annotations((*self.given, *found))
        return {
            "index": index,
            "message": message,
            "finish_reason": self._finish(index, deltas[-1].finish_reason),
            "logprobs": self._logprobs([p for d in deltas for p in d.logprobs]) if logprobs else None,
        }

    def opening(self, index: int = 0) -> dict[str, Any]:
        """The first chunk of a stream: the role, and what was found before the answer."""
        found = {"annotations": annotations(self.given)} if self.given else {}
        return self._chunk({"role": "assistant", "content": "", **found}, index)

    def piece(self, delta: Delta, logprobs: bool, index: int = 0) -> dict[str, Any]:
        """A chunk of a stream. The last one of an answer has the finish reason."""
        shown = self._logprobs(delta.logprobs) if logprobs and delta.logprobs else None
        said: dict[str, Any] = {"content": delta.text} if delta.text else {}
        if self.tools:
            said = self._read(index, delta.text, delta.finish_reason is not None)
        if delta.retrieval is not None:
            said["annotations"] = annotations((delta.retrieval,))
        return self._chunk(said, index, self._finish(index, delta.finish_reason), shown)

    def _read(self, index: int, text: str, last: bool) -> dict[str, Any]:
        """What a piece of text says and calls."""
        reader = self._readers.setdefault(index, CallReader())
        first = len(reader.calls)
        found = [*reader.push(text), *(reader.finish() if last else [])]
        words = "".join(item for item in found if isinstance(item, str))
        calls = [{"index": first + i, **call.shown()} for i, call in enumerate(reader.calls[first:])]
        return {**({"content": words} if words else {}), **({"tool_calls": calls} if calls else {})}

    def _finish(self, index: int, reason: str | None) -> str | None:
        called = index in self._readers and self._readers[index].calls
        return "tool_calls" if called and reason == "stop" else reason

    def closing(self, usage: Usage) -> dict[str, Any]:
        """The chunk with the usage and no choices, which OpenAI sends last."""
        return {**self._envelope("chat.completion.chunk", []), "usage": self.usage(usage)}

    def usage(self, usage: Usage) -> dict[str, Any]:
        ours: dict[str, Any] = {
            "policy": usage.policy,
            "tokens": {
                name: getattr(usage, name)
                for name in ("reused", "recomputed", "prefix_hit", "computed", "compiled")
            },
            "ms": {
                name: round(getattr(usage, f"{name}_ms"), 3)
                for name in ("queue", "load", "link", "ttft", "total")
            },
            "preemptions": usage.preemptions,
            "chunks": [{**asdict(c), "ms": round(c.ms, 3)} for c in usage.chunks],
        }
        if self.given is not None:
            ours["retrieval"] = [_round(one) for one in (*self.given, *usage.retrieval)]
        if self.trace:
            ours["trace"] = self._trace(usage)
        return {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": usage.reused + usage.prefix_hit},
            "mpic": ours,
        }

    def _trace(self, usage: Usage) -> dict[str, Any]:
        times = {
            "queue_ms": usage.queue_ms,
            "load_ms": usage.load_ms,
            "link_ms": usage.link_ms,
            "first_token_ms": usage.ttft_ms,
        }
        return {
            "tokens": usage.trace[-1].end if usage.trace else usage.prompt_tokens,
            "spans": [span._asdict() for span in usage.trace],
            "times": {name: round(ms, 3) for name, ms in times.items()},
        }

    def _chunk(
        self,
        delta: dict[str, Any],
        index: int,
        finish: str | None = None,
        logprobs: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "finish_reason": finish, "logprobs": logprobs}
        return self._envelope("chat.completion.chunk", [choice])

    def _envelope(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }

    def _logprobs(self, logprobs: tuple[TokenLogprob, ...] | list[TokenLogprob]) -> dict[str, Any]:
        content = []
        for p in logprobs:
            top = [self._token(id, logprob) for id, logprob in p.top]
            content.append({**self._token(p.token_id, p.logprob), "top_logprobs": top})
        return {"content": content, "refusal": None}

    def _token(self, id: int, logprob: float) -> dict[str, Any]:
        text = self.tokens.decode([id], skip_special_tokens=False)
        true = list(text.encode()) if PART not in text else self._bytes(id)
        return {"token": text, "logprob": max(logprob, -9999.0), "bytes": true}

    def _bytes(self, id: int) -> list[int] | None:
        """What a token stands for that is no text by itself; None where its name does not tell."""
        name = self.tokens.convert_ids_to_tokens(id)
        if byte := re.fullmatch("<0x([0-9A-F]{2})>", name):  # SentencePiece
            return [int(byte[1], 16)]
        return [BYTES[c] for c in name] if BYTES.keys() >= set(name) else None  # byte-level BPE


def annotations(rounds: Sequence[RetrievalRound]) -> list[dict[str, Any]]:
    """What the model was given, as annotations of its message."""
    return [
        {"type": "reference_citation", "reference_citation": {**citation, "query": one.query}}
        for one in rounds
        for citation in one.citations
    ]


def _round(one: RetrievalRound) -> dict[str, Any]:
    fields = {name: getattr(one, name) for name in ("query", "at", "tokens", "reused", "error")}
    times = {name: round(getattr(one, name), 3) for name in ("search_ms", "link_ms")}
    return {**fields, **times, "references": [c["reference_id"] for c in one.citations]}
