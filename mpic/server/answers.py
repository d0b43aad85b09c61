"""From the engine's deltas to OpenAI's chat completion objects."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, Protocol

from mpic.engine.base import Delta, TokenLogprob, Usage


class Tokens(Protocol):
    """What is needed of a tokenizer to show log-probabilities."""

    def decode(self, ids: list[int], **options: Any) -> str: ...


class Answer:
    """Writes the objects of one completion.

    Args:
        trace: say where every token of the prompt came from.
    """

    def __init__(self, id: str, model: str, created: int, tokens: Tokens, trace: bool = False) -> None:
        self.id = id
        self.model = model
        self.created = created
        self.tokens = tokens
        self.trace = trace

    def whole(self, answers: list[list[Delta]], usage: Usage, logprobs: bool) -> dict[str, Any]:
        """The ``chat.completion`` of finished answers."""
        choices = [self._choice(i, deltas, logprobs) for i, deltas in enumerate(answers)]
        return {**self._envelope("chat.completion", choices), "usage": self.usage(usage)}

    def _choice(self, index: int, deltas: list[Delta], logprobs: bool) -> dict[str, Any]:
        text = "".join(d.text for d in deltas)
        return {
            "index": index,
            "message": {"role": "assistant", "content": text, "refusal": None},
            "finish_reason": deltas[-1].finish_reason,
            "logprobs": self._logprobs([p for d in deltas for p in d.logprobs]) if logprobs else None,
        }

    def opening(self, index: int = 0) -> dict[str, Any]:
        """The first chunk of a stream: the role."""
        return self._chunk({"role": "assistant", "content": ""}, index)

    def piece(self, delta: Delta, logprobs: bool, index: int = 0) -> dict[str, Any]:
        """A chunk of a stream. The last one of an answer has the finish reason."""
        shown = self._logprobs(delta.logprobs) if logprobs and delta.logprobs else None
        return self._chunk({"content": delta.text} if delta.text else {}, index, delta.finish_reason, shown)

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
        return {"token": text, "logprob": max(logprob, -9999.0), "bytes": list(text.encode())}
