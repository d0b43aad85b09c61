"""Writes OpenAI's chat completion objects (``mpic.api.completion``) from the engine's deltas."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, asdict, dataclass, field, replace
from itertools import islice
from typing import Any, Protocol

from mpic.engine.base import Delta, GenerationUsage, RetrievalRound, TokenLogprob, linked_at_once
from mpic.server.tool_parser import ToolCallParser

REPLACEMENT = "\ufffd"
"""The character that tokenizers decode an incomplete character to."""


def _byte_alphabet() -> dict[str, int]:
    """Return the characters that byte-level BPE (GPT-2's) writes bytes as; visible Latin-1 stands for itself."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(256 + i): byte for i, byte in enumerate(others)}


BYTE_OF = _byte_alphabet()


class TokenDecoder(Protocol):
    """The part of a tokenizer that log-probabilities need."""

    def decode(self, ids: list[int], **options: Any) -> str: ...

    def convert_ids_to_tokens(self, ids: int) -> str: ...


@dataclass
class CompletionWriter:
    """Writes the objects of one completion.

    Args:
        logprobs: True includes the log-probabilities of tokens.
        trace: True includes the source of every token of the prompt.
        rounds: searches made before the answer; None when the request wants no retrieval.
        tools: finds calls of tools in the text.
        unlinked: handles in the request that stayed text, and why.
        ignored: fields of the request that had no effect.
    """

    id: str
    model: str
    created: int
    decoder: TokenDecoder
    _: KW_ONLY
    logprobs: bool = False
    trace: bool = False
    rounds: tuple[RetrievalRound, ...] | None = None
    tools: bool = False
    unlinked: Mapping[str, str] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    _parsers: dict[int, ToolCallParser] = field(init=False, default_factory=dict)
    _tokens: dict[int, tuple[str, list[int] | None]] = field(init=False, default_factory=dict)

    def completion(self, answers: list[list[Delta]], usage: GenerationUsage) -> dict[str, Any]:
        """Return the ``chat.completion`` of finished answers."""
        choices = [self._choice(i, deltas) for i, deltas in enumerate(answers)]
        return {**self._envelope("chat.completion", choices), "usage": self.usage(usage)}

    def _choice(self, index: int, deltas: list[Delta]) -> dict[str, Any]:
        text = "".join(d.text for d in deltas)
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if self.tools:
            message |= {"content": None, **self._parse(index, text, True)}
            for call in message.get("tool_calls", ()):
                del call["index"]  # only streams have an index
        if self.rounds is not None:
            later = [d.retrieval for d in deltas if d.retrieval is not None]
            message["annotations"] = citation_annotations((*self.rounds, *later))
        return {
            "index": index,
            "message": message,
            "finish_reason": self._finish_reason(index, deltas[-1]),
            "logprobs": self._logprobs([p for d in deltas for p in d.logprobs]) if self.logprobs else None,
        }

    def first_chunk(self, index: int = 0) -> dict[str, Any]:
        """Return the first event of a stream: the role, and the references found before the answer."""
        found = {"annotations": citation_annotations(self.rounds)} if self.rounds else {}
        return self._chunk({"role": "assistant", "content": "", **found}, index)

    def chunk(self, delta: Delta, index: int = 0) -> dict[str, Any]:
        """Return an event of a stream. The last one of an answer has the finish reason."""
        content: dict[str, Any] = {"content": delta.text} if delta.text else {}
        if self.tools:
            content = self._parse(index, delta.text, delta.finish_reason is not None)
        if delta.retrieval is not None:
            content["annotations"] = citation_annotations((delta.retrieval,))
        logprobs = self._logprobs(delta.logprobs) if self.logprobs and delta.logprobs else None
        return self._chunk(content, index, self._finish_reason(index, delta), logprobs)

    def _parse(self, index: int, text: str, last: bool) -> dict[str, Any]:
        """Return the words and the tool calls that a piece of an answer completes."""
        parser = self._parsers.setdefault(index, ToolCallParser())
        first = len(parser.calls)
        found = [*parser.push(text), *(parser.finish() if last else [])]
        words = "".join(item for item in found if isinstance(item, str))
        calls = [{"index": first + i, **call.as_json()} for i, call in enumerate(parser.calls[first:])]
        return {**({"content": words} if words else {}), **({"tool_calls": calls} if calls else {})}

    def _finish_reason(self, index: int, delta: Delta) -> str | None:
        called = index in self._parsers and self._parsers[index].calls
        return "tool_calls" if called and delta.finish_reason == "stop" else delta.finish_reason

    def usage_chunk(self, usage: GenerationUsage) -> dict[str, Any]:
        """Return the chunk with the usage and no choices, which OpenAI sends last."""
        return {**self._envelope("chat.completion.chunk", []), "usage": self.usage(usage)}

    def usage(self, usage: GenerationUsage) -> dict[str, Any]:
        """Return the ``usage`` of an answer, with our own fields in ``mpic``."""
        ours: dict[str, Any] = {
            "policy": usage.policy,
            "tokens": {
                "reused": usage.found,
                "recomputed": usage.recomputed,
                "prefix_hit": usage.prefix_hit,
                "computed": usage.spent,
                "packet": usage.packet,
                "compiled": usage.compiled,
            },
            "ms": {
                name: round(getattr(usage, f"{name}_ms"), 3)
                for name in ("queue", "load", "link", "ttft", "total")
            },
            "preemptions": usage.preemptions,
            "chunks": [{**asdict(c), "ms": round(c.ms, 3)} for c in usage.chunks],
        }
        if self.unlinked:
            ours["unlinked_handles"] = [{"handle": h, "reason": why} for h, why in self.unlinked.items()]
        if self.ignored:
            ours["ignored"] = list(self.ignored)
        if self.rounds is not None:
            ours["retrieval"] = [*map(_round, self.rounds), *_later_rounds(usage)]
        if self.trace:
            ours["trace"] = self._trace(usage)
        return {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": usage.saved},
            "mpic": ours,
        }

    def _trace(self, usage: GenerationUsage) -> dict[str, Any]:
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

    def _logprobs(self, logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
        content = []
        for p in logprobs:
            top = [self._token(id, logprob) for id, logprob in p.top]
            content.append({**self._token(p.token_id, p.logprob), "top_logprobs": top})
        return {"content": content, "refusal": None}

    def _token(self, id: int, logprob: float) -> dict[str, Any]:
        if id not in self._tokens:  # the alternatives of an answer are mostly the same tokens again
            text = self.decoder.decode([id], skip_special_tokens=False)
            bytes_ = list(text.encode()) if REPLACEMENT not in text else self._bytes(id)
            self._tokens[id] = text, bytes_
        text, bytes_ = self._tokens[id]
        # in this order, because what is no number becomes the least one, too: JSON has neither
        return {"token": text, "logprob": max(-9999.0, logprob), "bytes": bytes_}

    def _bytes(self, id: int) -> list[int] | None:
        """Return the bytes of a token that is no text by itself; None where its name does not show them."""
        name = self.decoder.convert_ids_to_tokens(id)
        if byte := re.fullmatch("<0x([0-9A-F]{2})>", name):  # SentencePiece
            return [int(byte[1], 16)]
        return [BYTE_OF[c] for c in name] if BYTE_OF.keys() >= set(name) else None  # byte-level BPE


def citation_annotations(rounds: Sequence[RetrievalRound]) -> list[dict[str, Any]]:
    """Return the references the model was given, as annotations of its message."""
    return [
        {"type": "reference_citation", "reference_citation": {**citation, "query": one.query}}
        for one in rounds
        for citation in one.citations
    ]


def _later_rounds(usage: GenerationUsage) -> Iterator[dict[str, Any]]:
    """Yield the searches made during the answer. The chunks that they inserted, one for each citation, are the last of
    the prompt."""
    inserted = sum(len(one.citations) for one in usage.retrieval)
    chunks = iter(usage.chunks[len(usage.chunks) - inserted :])
    for one in usage.retrieval:
        new = linked_at_once(islice(chunks, len(one.citations)))
        yield _round(replace(one, reused=one.reused - new))


def _round(one: RetrievalRound) -> dict[str, Any]:
    fields = {name: getattr(one, name) for name in ("query", "at", "tokens", "reused", "error", "trigger")}
    times = {name: round(getattr(one, name), 3) for name in ("search_ms", "link_ms")}
    return {**fields, **times, "references": [c["reference_id"] for c in one.citations]}
