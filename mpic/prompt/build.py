"""From an OpenAI-shaped conversation to a prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mpic.errors import BadRequest
from mpic.prompt.messages import Resolver, parse_messages
from mpic.prompt.segments import Prompt
from mpic.prompt.template import ChatTemplate


def build_prompt(
    messages: Any, template: ChatTemplate, resolver: Resolver, tools: Sequence[Mapping] | None = None
) -> Prompt:
    """The prompt of an OpenAI-shaped conversation, ready for the model's answer; its last segment is text.

    Args:
        messages: the request's ``messages``, as parsed from JSON.
        template: of the model that will answer.
        resolver: finds the chunks of the user who asks.
        tools: the request's ``tools``.

    Raises:
        BadRequest: and its children, see ``parse_messages`` and ``ChatTemplate.prompt``; ``param`` names the field.
        MPICError: what the resolver raises.
    """
    parsed = parse_messages(messages, resolver)
    for i, tool in enumerate(tools or ()):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise BadRequest("a tool must have a function with a name", param=f"tools[{i}].function")
    return template.prompt(parsed, tools)
