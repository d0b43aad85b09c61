"""The form that a request asks of its answer, as one grammar: ``response_format``, ``structured_outputs``,
``tool_choice`` and strict tools. A call is written as ``tool_parser.py`` reads it."""

from __future__ import annotations

import json
from typing import Any

from llguidance import regex_to_lark

from mpic.api.requests import ChatRequest, NamedTool, Tool
from mpic.engine.grammar import Grammar
from mpic.errors import InvalidGrammar
from mpic.server.schema_costs import FormCosts
from mpic.server.tool_parser import CLOSE, OPEN

STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""JSON is written in one line, as chat templates print it. White space wherever JSON allows it has no end: a model may
write nothing else."""
WORDS = f"words: WORDS\nopens[lazy]: WORDS {json.dumps(OPEN)}\nWORDS: /(.|\\n)*/"
"""Free text, which the mark that opens a call ends."""


def form_of(body: ChatRequest) -> Grammar | None:
    """Return the grammar that a request asks for; None if its answer is free.

    Raises:
        InvalidGrammar: a schema is no object's where it has to be, or too large; ``param`` names it.
    """
    rules = _Rules()
    answer = _answer(body, rules)
    tools = [] if body.tool_choice == "none" else list(enumerate(body.tools or ()))
    if isinstance(body.tool_choice, NamedTool):
        tools = [(i, tool) for i, tool in tools if tool.function.name == body.tool_choice.function.name]
    forced = bool(tools) and body.tool_choice not in (None, "auto")
    if tools and (forced or answer or any(tool.function.strict for _, tool in tools)):
        rules.lines.append(f"call: {' | '.join(_call(rules, i, tool, forced) for i, tool in tools)}")
        whole, ends = f'{json.dumps(OPEN)} "\\n" call', json.dumps(f"\n{CLOSE}")
        more = "" if body.parallel_tool_calls is False else f'("\\n" {whole} {ends})*'
        calls = f"{whole} {ends} {more}"
        if answer or forced:
            return rules.grammar(calls if forced else f"{answer} | {calls}")
        called = f'opens "\\n" call {ends}'
        rules.lines.append(WORDS)
        return rules.grammar(f"words | {called}" if not more else f"({called})* words")
    return rules.grammar(answer) if answer else None


class _Rules:
    """The rules of a grammar, and the field that each of them came from."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.costs = FormCosts()
        self._parts: list[tuple[str, str]] = []

    def add(self, name: str, text: str, param: str) -> str:
        self.lines.append(f"{name}: {text}")
        self._parts.append((param, f"start: {text}"))
        return name

    def schema(self, name: str, schema: dict[str, Any], param: str) -> str:
        self.costs.schema(schema, param)
        return self.add(name, f"%json {self.costs.text({**schema, 'x-guidance': STYLE}, param)}", param)

    def grammar(self, start: str) -> Grammar:
        return Grammar("\n".join([f"start: {start}", *self.lines]), tuple(self._parts))


def _answer(body: ChatRequest, rules: _Rules) -> str | None:
    """Return the rule of an answer that is no call."""
    form, outputs = body.response_format, body.structured_outputs
    if outputs is not None and outputs.regex is not None:
        param = "structured_outputs.regex"
        rules.costs.text(outputs.regex, param)
        rules.costs.regex(outputs.regex, param)
        return rules.add("ANSWER", f"/{regex_to_lark(outputs.regex, '')}/", param)
    if outputs is not None and outputs.choice is not None:
        param = "structured_outputs.choice"
        return rules.add("ANSWER", " | ".join(rules.costs.text(one, param) for one in outputs.choice), param)
    if form is None or form.type == "text":
        return None
    if form.json_schema is None:
        return rules.schema("answer", {"type": "object"}, "response_format")
    return rules.schema("answer", form.json_schema.schema_, "response_format.json_schema.schema")


def _call(rules: _Rules, i: int, tool: Tool, forced: bool) -> str:
    """Add the rules of a tool's call, and return its name. The arguments of a tool that is not strict follow its
    schema only where the request wants a call."""
    param = f"tools[{i}].function.parameters"
    schema = {"type": "object"}
    if (forced or tool.function.strict) and tool.function.parameters:
        schema |= tool.function.parameters
    if schema["type"] != "object":
        raise InvalidGrammar(f"{param}: the arguments of a tool are an object", param=f"{param}.type")
    arguments = rules.schema(f"arguments{i}", schema, param)
    begins = f'{{"name": {json.dumps(tool.function.name)}, "arguments": '
    rules.lines.append(f'call{i}: {json.dumps(begins)} {arguments} "}}"')
    return f"call{i}"
