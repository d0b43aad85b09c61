"""From the engine's deltas to OpenAI's chat completion objects."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, Protocol

from mpic.engine.base import Delta, TokenLogprob, Usage
from mpic.prompt.segments import ChunkSegment, Prompt


class Tokens(Protocol):
    """What is needed of a tokenizer to show log-probabilities."""

    def decode(self, ids: list[int], **options: Any) -> str: ...


class Answer:
    """Writes the objects of one completion.

    Args:
        prompt: given when the request asked for a trace.
    """

    def __init__(
        self, id: str, model: str, created: int, tokens: Tokens, prompt: Prompt | None = None
    ) -> None:
        self.id = id
        self.model = model
        self.created = created
        self.tokens = tokens
        self.prompt = prompt

    def whole(self, deltas: list[Delta], logprobs: bool) -> dict[str, Any]:
        """The ``chat.completion`` of a finished answer."""
        last = deltas[-1]
        choice: dict[str, Any] = {
            "index": 0,
            "message": {"role": "assistant", "content": "".join(d.text for d in deltas), "refusal": None},
            "finish_reason": last.finish_reason,
            "logprobs": None,
        }
        if logprobs:
            choice["logprobs"] = self._logprobs([p for d in deltas for p in d.logprobs])
        body = self._envelope("chat.completion", [choice])
        body["usage"] = self.usage(last.usage or Usage())
        return body

    def opening(self) -> dict[str, Any]:
        """The first chunk of a stream: the role."""
        return self._chunk({"role": "assistant", "content": ""})

    def piece(self, delta: Delta, logprobs: bool) -> dict[str, Any]:
        """A chunk of a stream. The last one has the finish reason."""
        shown = self._logprobs(delta.logprobs) if logprobs and delta.logprobs else None
        return self._chunk({"content": delta.text} if delta.text else {}, delta.finish_reason, shown)

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
        if self.prompt is not None:
            ours["layout"] = layout(self.prompt, usage)
        return {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": usage.reused + usage.prefix_hit},
            "mpic": ours,
        }

    def _chunk(
        self, delta: dict[str, Any], finish: str | None = None, logprobs: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "finish_reason": finish, "logprobs": logprobs}
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
        return {"token": text, "logprob": max(logprob, -9999.0), "bytes": list(text.encode())}


def layout(prompt: Prompt, usage: Usage) -> list[dict[str, Any]]:
    """The prompt in order: pieces of text with their lengths, and which entry of ``chunks`` stands between them."""
    out: list[dict[str, Any]] = []
    chunk = 0
    for segment in prompt.segments:
        if isinstance(segment, ChunkSegment):
            tokens = usage.chunks[chunk].tokens if chunk < len(usage.chunks) else None
            out.append({"kind": segment.chunk.kind, "tokens": tokens, "chunk": chunk})
            chunk += 1
        else:
            out.append({"kind": "own", "tokens": len(segment)})
    return out
