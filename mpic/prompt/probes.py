"""What a model's chat template can do, learnt by rendering small conversations with it at load.

Templates are programs, so nothing is read from their source: a stand-in word either comes out where it should, or not.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

import jinja2

from mpic.errors import ModelRefused

Render = Callable[..., str]
"""``render(messages, tools=None) -> str``: the template applied, with the generation prompt."""

TEMPLATE_ERRORS = (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError, IndexError)
"""What templates raise when a conversation is not to their liking."""

IMAGE_SHAPES: tuple[dict[str, Any], ...] = (
    {"type": "image"},
    {"type": "image_url", "image_url": {"url": "image"}},
)

A, B, C = "aleph7q", "bethel8w", "gimel9z"


@dataclass(frozen=True)
class Abilities:
    """What a chat template can do.

    Args:
        strings: roles (system, user, assistant) whose content may be a string.
        parts: roles whose content may be a list of parts.
        system: it has a place for a system message.
        tools: it prints tools.
        calls: how it writes a call of a tool: ``hermes`` (``<tool_call>`` around JSON of name and arguments; Qwen and
            Hermes), or None, which is another way or none.
        reasoning: what it does with the reasoning (``...</think>``) of earlier answers: None, it prints it like the
            rest; ``field``, it drops it and takes it apart as ``reasoning_content``; ``drop``, it just drops it.
        documents: it renders ``{"type": "document", "text", "name"}`` parts, label included.
        names: it renders the ``name`` of an image part.
        image: the part it takes for an image, or None.
        order: ``word`` if images stay where they are among the texts of a message, ``first`` if it puts them in front.
        image_text: (before, after) what it puts around an image's placeholder.
        spaced: it puts white space (before, after) a chunk that stands between two texts.
    """

    strings: frozenset[str]
    parts: frozenset[str]
    system: bool
    tools: bool
    calls: Literal["hermes"] | None = None
    reasoning: Literal["field", "drop"] | None = None
    documents: bool = False
    names: bool = False
    image: dict[str, Any] | None = None
    order: Literal["word", "first"] | None = None
    image_text: tuple[str, str] = ("", "\n")
    spaced: tuple[bool, bool] = (False, False)


def probe(render: Render, image_token: str | None) -> Abilities:
    """Try a template out.

    Raises:
        ModelRefused: it does not render even a plain user message.
    """

    errors: list[Exception] = []

    def attempt(*messages: dict[str, Any], tools: list | None = None) -> str:
        try:
            return render(list(messages), tools=tools)
        except TEMPLATE_ERRORS as error:
            errors.append(error)
            return ""

    def shapes(
        role: str, *before: dict[str, Any], after: tuple[dict[str, Any], ...] = ()
    ) -> tuple[bool, bool]:
        """Whether content of a role may be a string, and whether it may be parts."""
        as_string = attempt(*before, {"role": role, "content": A}, *after)
        as_parts = attempt(*before, {"role": role, "content": [_text(A), _text(B)]}, *after)
        return as_string.count(A) == 1, as_parts.count(A) == as_parts.count(
            B
        ) == 1 and "'type'" not in as_parts

    found = {"user": shapes("user")}
    if not any(found["user"]):
        why = f": {errors[0]}" if errors else ""
        raise ModelRefused(f"the model's chat template does not render a plain user message{why}")
    user = {"role": "user", "content": C if found["user"][0] else [_text(C)]}
    found["system"] = shapes("system", after=(user,))
    found["assistant"] = shapes("assistant", user, after=(user,))
    tool = {"type": "function", "function": {"name": A, "description": B, "parameters": {"type": "object"}}}
    abilities: dict[str, Any] = {
        "strings": frozenset(role for role, (string, _) in found.items() if string),
        "parts": frozenset(role for role, (_, parts) in found.items() if parts),
        "system": any(found["system"]),
        "tools": A in attempt(user, tools=[tool]),
    }
    if abilities["tools"]:
        call = {"type": "function", "function": {"name": A, "arguments": {"place": B}}}
        asked = {"role": "assistant", "content": "", "tool_calls": [call]}
        abilities["calls"] = _calls(attempt(user, asked, user, tools=[tool]))
    if found["assistant"][0]:
        thought = {"role": "assistant", "content": f"<think>\n{A}\n</think>\n\n{B}"}
        earlier = attempt(user, thought, user)
        apart = attempt(user, {"role": "assistant", "content": B, "reasoning_content": A})
        if B in earlier and A not in earlier:
            abilities["reasoning"] = "field" if A in apart else "drop"
    if not found["user"][1]:
        return Abilities(**abilities)

    def parts(*content: dict[str, Any]) -> str:
        return attempt({"role": "user", "content": list(content)})

    named = parts({"type": "document", "text": A, "name": B})
    unnamed = parts({"type": "document", "text": A})
    abilities["documents"] = named.count(A) == unnamed.count(A) == 1 and B in named and "'type'" not in named
    if abilities["documents"]:
        abilities["spaced"] = _spaced(parts(_text(A), {"type": "document", "text": C}, _text(B)))
    for image in IMAGE_SHAPES if image_token else ():
        found_at = _places(parts(_text(A), image, _text(B), image, _text(C)), image_token)
        if found_at is None:
            continue
        abilities["image"] = image
        abilities["order"] = {"AIBIC": "word", "IIABC": "first"}.get(found_at)
        if abilities["order"] == "word":
            abilities["spaced"] = _spaced(parts(_text(A), image, _text(B)))
        abilities["names"] = C in parts({**image, "name": C}, _text(A))
        abilities["image_text"] = _around(
            parts(_text(A), _text(B)), parts(image, _text(A), _text(B)), image_token
        )
        break
    return Abilities(**abilities)


def _calls(rendered: str) -> Literal["hermes"] | None:
    """How A was called with B."""
    for body in re.findall(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", rendered, re.DOTALL):
        with suppress(ValueError):
            if json.loads(body) == {"name": A, "arguments": {"place": B}}:
                return "hermes"
    return None


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _places(rendered: str, image_token: str) -> str | None:
    """The order in which A, B, C and images (I) appear; None unless there are two images and each text once."""
    at = [(rendered.find(word), letter) for word, letter in ((A, "A"), (B, "B"), (C, "C"))]
    if rendered.count(image_token) != 2 or any(rendered.count(word) != 1 for word in (A, B, C)):
        return None
    first = rendered.index(image_token)
    at += [(first, "I"), (rendered.index(image_token, first + 1), "I")]
    return "".join(letter for _, letter in sorted(at))


def _spaced(rendered: str) -> tuple[bool, bool]:
    """Whether there is white space after text A and before text B."""
    after = rendered.partition(A)[2]
    return after[:1].isspace(), after[: after.find(B)][-1:].isspace()


def _around(without: str, with_image: str, image_token: str) -> tuple[str, str]:
    """What one image adds to a rendering, before and after its placeholder."""
    if with_image.count(image_token) != 1:
        return "", "\n"
    at = 0
    while at < len(without) and without[at] == with_image[at] and not with_image.startswith(image_token, at):
        at += 1
    added = with_image[at : len(with_image) - (len(without) - at)]
    before, token, after = added.partition(image_token)
    return (before, after) if token else ("", "\n")
