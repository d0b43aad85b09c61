"""The abilities of a model's chat template, found by rendering small conversations with it when the model is loaded.

Templates are programs, so nothing is read from their source: a stand-in word either comes out where it should or not.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Literal

import jinja2

from mpic.errors import ModelRefused

Render = Callable[..., str]
"""``render(messages, tools=None) -> str``: the template applied, with the generation prompt."""

TEMPLATE_ERRORS = (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError, IndexError)
"""Errors that templates raise when they refuse a conversation."""

IMAGE_SHAPES: tuple[dict[str, Any], ...] = (
    {"type": "image"},
    {"type": "image_url", "image_url": {"url": "image"}},
)

VIDEO_SHAPES: tuple[dict[str, Any], ...] = (
    {"type": "video"},
    {"type": "video_url", "video_url": {"url": "video"}},
)

A, B, C = "aleph7q", "bethel8w", "gimel9z"


@dataclass(frozen=True)
class Abilities:
    """The abilities of a chat template.

    Args:
        strings: roles (system, user, assistant) whose content may be a string.
        parts: roles whose content may be a list of parts.
        system: it renders a system message.
        tools: it prints tools.
        calls: the form of a tool call: ``hermes`` (``<tool_call>`` around JSON of name and arguments; Qwen and
            Hermes), or None for any other way.
        reasoning: its treatment of the reasoning (``...</think>``) of earlier answers: None prints it like the rest,
            ``field`` drops it but prints ``reasoning_content``, ``drop`` drops both.
        documents: it renders ``{"type": "document", "text", "name"}`` parts, label included.
        names: it renders the ``name`` of an image part.
        image: the part it takes for an image, or None.
        order: ``word`` if images stay where they are among the texts of a message, ``first`` if it puts them in front.
        video: the part it takes for a clip, or None; None, too, if it moves clips among the texts of a message.
        image_text: (before, after) the text that it puts around an image token.
        spaced: True where it puts white space (before, after) a chunk between two texts.
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
    video: dict[str, Any] | None = None
    image_text: tuple[str, str] = ("", "\n")
    spaced: tuple[bool, bool] = (False, False)


def probe(render: Render, image_token: str | None, video_token: str | None = None) -> Abilities:
    """Try a template out.

    Args:
        image_token, video_token: what it prints for an image and a clip; None: the model has none.

    Raises:
        ModelRefused: it does not render even a plain user message.
    """
    return _TemplateProbe(render, image_token, video_token).abilities()


class _TemplateProbe:
    """Renders small conversations with one template."""

    def __init__(self, render: Render, image_token: str | None, video_token: str | None) -> None:
        self._render, self._image_token, self._video_token = render, image_token, video_token
        self._errors: list[Exception] = []

    def abilities(self) -> Abilities:
        shapes = {"user": self._shapes("user")}
        if not any(shapes["user"]):
            why = f": {self._errors[0]}" if self._errors else ""
            raise ModelRefused(f"the model's chat template does not render a plain user message{why}")
        user = {"role": "user", "content": C if shapes["user"][0] else [_text(C)]}
        shapes["system"] = self._shapes("system", after=(user,))
        shapes["assistant"] = self._shapes("assistant", user, after=(user,))
        abilities = Abilities(
            strings=frozenset(role for role, (string, _) in shapes.items() if string),
            parts=frozenset(role for role, (_, parts) in shapes.items() if parts),
            system=any(shapes["system"]),
            **self._tools(user),
            reasoning=self._reasoning(user) if shapes["assistant"][0] else None,
        )
        if not shapes["user"][1]:
            return abilities
        return replace(abilities, **(self._documents() | self._images() | self._videos()))

    def _attempt(self, *messages: dict[str, Any], tools: list | None = None) -> str:
        """Render a conversation; empty if the template refuses it."""
        try:
            return self._render(list(messages), tools=tools)
        except TEMPLATE_ERRORS as error:
            self._errors.append(error)
            return ""

    def _parts(self, *content: dict[str, Any]) -> str:
        """Render a user message of parts."""
        return self._attempt({"role": "user", "content": list(content)})

    def _shapes(
        self, role: str, *before: dict[str, Any], after: tuple[dict[str, Any], ...] = ()
    ) -> tuple[bool, bool]:
        """Find out whether the content of a role may be a string, and whether it may be a list of parts."""
        as_string = self._attempt(*before, {"role": role, "content": A}, *after)
        as_parts = self._attempt(*before, {"role": role, "content": [_text(A), _text(B)]}, *after)
        once = as_parts.count(A) == as_parts.count(B) == 1
        return as_string.count(A) == 1, once and "'type'" not in as_parts

    def _tools(self, user: dict[str, Any]) -> dict[str, Any]:
        function = {"name": A, "description": B, "parameters": {"type": "object"}}
        tools = [{"type": "function", "function": function}]
        if A not in self._attempt(user, tools=tools):
            return {"tools": False}
        call = {"type": "function", "function": {"name": A, "arguments": {"place": B}}}
        asked = {"role": "assistant", "content": "", "tool_calls": [call]}
        return {"tools": True, "calls": _calls(self._attempt(user, asked, user, tools=tools))}

    def _reasoning(self, user: dict[str, Any]) -> Literal["field", "drop"] | None:
        thought = {"role": "assistant", "content": f"<think>\n{A}\n</think>\n\n{B}"}
        earlier = self._attempt(user, thought, user)
        apart = self._attempt(user, {"role": "assistant", "content": B, "reasoning_content": A})
        if B not in earlier or A in earlier:
            return None
        return "field" if A in apart else "drop"

    def _documents(self) -> dict[str, Any]:
        named = self._parts({"type": "document", "text": A, "name": B})
        unnamed = self._parts({"type": "document", "text": A})
        if not (named.count(A) == unnamed.count(A) == 1 and B in named and "'type'" not in named):
            return {"documents": False}
        spaced = _spaced(self._parts(_text(A), {"type": "document", "text": C}, _text(B)))
        return {"documents": True, "spaced": spaced}

    def _images(self) -> dict[str, Any]:
        """Find the first shape of an image part that the template accepts, and the effect of the part."""
        token = self._image_token
        if not token:
            return {}
        for image in IMAGE_SHAPES:
            order = _places(self._parts(_text(A), image, _text(B), image, _text(C)), token)
            if order is None:
                continue
            found = {"image": image, "order": {"AIBIC": "word", "IIABC": "first"}.get(order)}
            if found["order"] == "word":
                found["spaced"] = _spaced(self._parts(_text(A), image, _text(B)))
            found["names"] = C in self._parts({**image, "name": C}, _text(A))
            without, with_image = self._parts(_text(A), _text(B)), self._parts(image, _text(A), _text(B))
            return found | {"image_text": _around(without, with_image, token)}
        return {}

    def _videos(self) -> dict[str, Any]:
        token = self._video_token
        if not token:
            return {}
        for video in VIDEO_SHAPES:
            if _places(self._parts(_text(A), video, _text(B), video, _text(C)), token) == "AIBIC":
                return {"video": video}
        return {}


def _calls(rendered: str) -> Literal["hermes"] | None:
    """Return how the template writes a call of A with B."""
    for body in re.findall(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", rendered, re.DOTALL):
        with suppress(ValueError):
            if json.loads(body) == {"name": A, "arguments": {"place": B}}:
                return "hermes"
    return None


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _places(rendered: str, image_token: str) -> str | None:
    """Return the order in which A, B, C and images (I) appear; None unless two images and each text once do."""
    at = [(rendered.find(word), letter) for word, letter in ((A, "A"), (B, "B"), (C, "C"))]
    if rendered.count(image_token) != 2 or any(rendered.count(word) != 1 for word in (A, B, C)):
        return None
    first = rendered.index(image_token)
    at += [(first, "I"), (rendered.index(image_token, first + 1), "I")]
    return "".join(letter for _, letter in sorted(at))


def _spaced(rendered: str) -> tuple[bool, bool]:
    """Return whether there is white space after text A and before text B."""
    after = rendered.partition(A)[2]
    return after[:1].isspace(), after[: after.find(B)][-1:].isspace()


def _around(without: str, with_image: str, image_token: str) -> tuple[str, str]:
    """Return the text that one image adds to a rendering before and after its token."""
    if with_image.count(image_token) != 1:
        return "", "\n"
    at = 0
    while at < len(without) and without[at] == with_image[at] and not with_image.startswith(image_token, at):
        at += 1
    added = with_image[at : len(with_image) - (len(without) - at)]
    before, token, after = added.partition(image_token)
    return (before, after) if token else ("", "\n")
