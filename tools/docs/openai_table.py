"""Lists the parameters of OpenAI's chat completions that are supported, ignored and refused, by the server's own
validation."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from tables import code

from mpic.api.openai_fields import table
from mpic.api.requests import ChatRequest

USED = {
    "messages", "model", "stream", "stream_options", "max_tokens", "max_completion_tokens", "temperature", "top_p",
    "n", "seed", "stop", "logprobs", "top_logprobs", "tools", "parallel_tool_calls", "tool_choice", "response_format",
    "structured_outputs", "reasoning_effort", "top_k", "chat_template_kwargs",
    "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "min_p",
}  # fmt: skip
"""Parameters that do here what they do at OpenAI, or in vLLM."""

TOOL = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "answer", "schema": {}}}
PROBES: dict[str, tuple[Any, ...]] = {
    "audio": ({"voice": "alloy", "format": "wav"},),
    "chat_template_kwargs": ({"enable_thinking": False},),
    "frequency_penalty": (0.5, 0),
    "function_call": ("none",),
    "functions": ([{"name": "look_up"}], []),
    "logit_bias": ({"5": -100}, {}),
    "logprobs": (True,),
    "max_completion_tokens": (16,),
    "max_tokens": (16,),
    "messages": ([{"role": "user", "content": "Hello"}],),
    "min_p": (0.1, 0),
    "metadata": ({"project": "one"}, {}),
    "modalities": (["text", "audio"], ["text"]),
    "model": ("demo",),
    "moderation": ({"mode": "off"},),
    "n": (2,),
    "parallel_tool_calls": (False, True),
    "prediction": ({"type": "content", "content": "Hello"},),
    "presence_penalty": (0.5, 0),
    "prompt_cache_key": ("one",),
    "prompt_cache_options": ({"mode": "explicit"},),
    "prompt_cache_retention": ("24h",),
    "reasoning_effort": ("low",),
    "repetition_penalty": (1.1, 1),
    "response_format": (SCHEMA,),
    "safety_identifier": ("one",),
    "seed": (1,),
    "service_tier": ("flex", "auto"),
    "stop": (["END"],),
    "store": (True, False),
    "stream": (True,),
    "stream_options": ({"include_usage": True},),
    "structured_outputs": ({"choice": ["yes", "no"]},),
    "temperature": (0.7,),
    "tool_choice": ("none",),
    "tools": ([TOOL],),
    "top_k": (5,),
    "top_logprobs": (2,),
    "top_p": (0.9,),
    "user": ("alice",),
    "verbosity": ("low", "medium"),
    "web_search_options": ({},),
}
"""For each parameter a value that asks for something and, after it, values that ask for the usual."""

NEEDS = {"stream_options": {"stream": True}, "top_logprobs": {"logprobs": True}}


def openai() -> Iterator[str]:
    """Yield the lines of the page."""
    yield (Path(__file__).parent / "openai.head.md").read_text(encoding="utf-8").rstrip()
    yield f"\nSupported: {', '.join(code(name) for name in sorted(USED))}."
    yield "Of the others, values that would change nothing are accepted (null always is):\n"
    yield table()


def verdict(name: str) -> str:
    """Return ``supported``, ``ignored``, ``refused`` or ``only the usual value``."""
    active, *usual = PROBES[name]
    if accepted(name, active):
        return "supported" if name in USED else "ignored"
    return "only the usual value" if any(accepted(name, value) for value in usual) else "refused"


def accepted(name: str, value: Any) -> bool:
    """Return whether a request with this value passes the server's validation."""
    body = {"messages": PROBES["messages"][0], **NEEDS.get(name, {}), name: value}
    try:
        ChatRequest.model_validate(body)
    except ValidationError:
        return False
    return True
