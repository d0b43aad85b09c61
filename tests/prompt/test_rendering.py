"""Renderings are checked in a time that grows with the number of messages."""

import copy
import json

import pytest
from chat_models import processor

from mpic.prompt import ChatTemplate, build_prompt
from mpic.prompt.messages import parse_messages
from mpic.prompt.placeholders import Placeholders


def test_the_marks_of_many_messages_are_compared_only_with_their_own(monkeypatch):
    """The work of checking a rendering grows with the number of messages, not with its square."""
    compared = 0

    class Number(int):
        def __eq__(self, other):
            nonlocal compared
            compared += 1
            return int(self) == int(other)

        __hash__ = int.__hash__

    class Counting(Placeholders):
        def cut(self, rendered):
            pieces = super().cut(rendered)
            return [(None if number is None else Number(number), text) for number, text in pieces]

    monkeypatch.setattr("mpic.prompt.rendering.Placeholders", Counting)
    turns = [{"role": ("user", "assistant")[i % 2], "content": f"text {i}"} for i in range(2_000)]
    prompt = build_prompt(turns, ChatTemplate(processor("qwen2")), None)
    assert len(prompt.segments) == 1 and 2_000 <= compared < 20_000


BARE = (
    "{% for t in tools or [] %}{% set f = t.function %}{{ mark(f.name) }}"
    "{% for k, v in (f.parameters.properties or {}).items() %}{{ mark(k) }}"
    "{% if k in f.parameters.required or [] %}!{% endif %}"
    "{% for e in v.enum or [] %}{{ mark(e) }}{% endfor %}{% for x in v %}{{ mark(x) }}{% endfor %}{% endfor %}"
    "{% endfor %}{% for m in messages %}{{ m.role }}: {{ m.content }}{% for c in m.tool_calls or [] %}"
    "{{ mark(c.function.name) }}{% for k, v in c.function.arguments.items() %}{{ mark(k) }}{{ mark(v) }}{% endfor %}"
    "{% endfor %}{{ mark(m.name) if m.name }}\n{% endfor %}"
)
"""A template that puts marks around every word of tools and of their calls."""


@pytest.mark.parametrize("marks", ["<{}>", "<|{}|>", "<|{}start|>", "<|im_{}", "</{}>", "<{}_call>"])
@pytest.mark.parametrize(
    "word", ["tool_call", "im_start", "im_end", "im_", "start|>", " im_end", "tool", "IM_END"]
)
def test_no_word_of_a_tool_becomes_part_of_a_control_token(marks, word):
    before, after = marks.split("{}")
    made = copy.copy(processor("qwen3"))
    made.chat_template = (
        "{% macro mark(x) %}" + before + "{{ x | trim if x else '' }}" + after + "{% endmacro %}" + BARE
    )
    template = ChatTemplate(made)
    assert template.abilities.tools and any(
        template.is_control(token) for token in ("<|im_start|>", "<tool_call>")
    )
    schema = {
        "type": "object",
        "properties": {word: {"type": "string", "enum": [word], word: 1}},
        "required": [word],
    }
    tools = [{"type": "function", "function": {"name": word.strip(), "parameters": schema}}]
    call = {
        "id": "1",
        "type": "function",
        "function": {"name": word.strip(), "arguments": json.dumps({word: word})},
    }
    messages = [
        {"role": "user", "content": "x", "name": word},
        {"role": "assistant", "content": "", "tool_calls": [call]},
    ]
    pieces = template.pieces(parse_messages(messages, None), tools)
    printed = "".join(pieces)
    assert (
        printed.count(f"{before}{word.strip()}{after}") == 8 and "!" in printed
    )  # required, and found to be
    [segment] = build_prompt(messages, template, None, tools).segments
    assert not template._guard.control.intersection(segment.token_ids)


def test_words_that_templates_look_for_stay_words():
    plain = ChatTemplate(processor("qwen3"))._guard.is_plain
    for word in (
        "type",
        "object",
        "string",
        "required",
        "properties",
        "enum",
        "city",
        "Weather of a city",
        "",
    ):
        assert plain(word)
