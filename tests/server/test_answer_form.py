"""The form that a request asks for becomes a grammar, and all that the grammar lets pass has that form."""

from __future__ import annotations

import json
import random
import re

import jsonschema
import numpy as np
import pytest
from server_helpers import byte_tokenizer, invalid, refusal

from mpic.api.requests import ChatRequest
from mpic.engine.grammar import Constraints
from mpic.errors import GrammarTooComplex, InvalidGrammar
from mpic.server.answer_form import form_of
from mpic.server.tool_parser import ParsedToolCall, ToolCallParser

TOKENIZER = byte_tokenizer()
EOS = TOKENIZER.eos_token_id
CONSTRAINTS = Constraints(TOKENIZER, [EOS], len(TOKENIZER))
HELLO = [{"role": "user", "content": "hello"}]
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def form(**fields):
    return form_of(ChatRequest.model_validate({"messages": HELLO, **fields}))


def of_schema(schema):
    named = {"name": "answer", "schema": schema, "strict": True}
    return form(response_format={"type": "json_schema", "json_schema": named})


def tool(name="get_weather", parameters=PERSON, strict=None):
    return {"type": "function", "function": {"name": name, "parameters": parameters, "strict": strict}}


def walk(grammar, seed, most=4000):
    """An answer drawn from all that the grammar allows; None if it does not end by itself."""
    chance, constraint = random.Random(seed), CONSTRAINTS.begin(grammar)
    tokens: list[int] = []
    for _ in range(most):
        words = CONSTRAINTS.mask([constraint]).numpy().view(np.uint8)
        allowed = np.nonzero(np.unpackbits(words, bitorder="little"))[0].tolist()
        ends = EOS in allowed
        # what closes things is taken more often, so that walks end
        closing = [t for t in allowed if TOKENIZER.decode([t]) in '"]}'] if len(tokens) > 40 else []
        token = EOS if ends and chance.random() < 0.5 else chance.choice(closing or allowed)
        if constraint.take(token):
            return TOKENIZER.decode([*tokens, token], skip_special_tokens=True)
        tokens.append(token)
    return None


def accepts(grammar, text):
    constraint = CONSTRAINTS.begin(grammar)
    ids = TOKENIZER(text, add_special_tokens=False)["input_ids"]
    return constraint.matcher.validate_tokens([*ids, EOS]) == len(ids) + 1


def obj(required=None, **properties):
    required = list(properties) if required is None else required
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


NUMBER, TEXT, FLAG = {"type": "number"}, {"type": "string", "maxLength": 8}, {"type": "boolean"}
SCHEMAS = [
    {"type": "null"},
    FLAG,
    {"type": "integer"},
    {"type": "integer", "minimum": -5, "maximum": 12},
    {"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 3},
    {"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 100},
    {"type": "number", "minimum": 0.5, "maximum": 2.25},
    TEXT,
    {"type": "string", "minLength": 2, "maxLength": 4},
    {"type": "string", "pattern": "^[a-z]{3}(-[0-9]{2})?$"},
    *(
        {"type": "string", "format": f}
        for f in ("date", "time", "date-time", "uuid", "ipv4", "email", "duration")
    ),
    {"enum": ["a", 1, None, True, 1.5, [1, {"a": []}], '"quoted" \\ ü 😀']},
    {"const": {"a": [1, 2]}},
    {"type": ["string", "null"], "maxLength": 3},
    {"anyOf": [{"type": "integer", "maximum": 9, "minimum": 0}, {"const": "none"}]},
    {"allOf": [{"type": "integer"}, {"minimum": 3}, {"maximum": 5}]},
    {"type": "array", "items": FLAG, "minItems": 1, "maxItems": 4},
    {"type": "array", "prefixItems": [TEXT, FLAG], "items": False, "minItems": 2},
    obj(),
    PERSON,
    obj(a=obj(b=obj(c={"type": "array", "items": obj(d=FLAG), "maxItems": 2}))),
    obj(["a"], a=FLAG, b=FLAG, c=TEXT),
    obj([], a=FLAG, b=FLAG),
    {"type": "object", "additionalProperties": {"type": "integer"}, "maxProperties": 3},
    {"type": "object", "patternProperties": {"^x[0-9]$": FLAG}, "additionalProperties": False},
    {"$defs": {"P": obj(n={"anyOf": [{"$ref": "#/$defs/P"}, {"type": "null"}]})}, "$ref": "#/$defs/P"},
    {"$defs": {"E": {"enum": ["x", "y"]}, "Q": obj(e={"$ref": "#/$defs/E"})}, "$ref": "#/$defs/Q"},
    {"definitions": {"a/b": FLAG}, "type": "array", "items": {"$ref": "#/definitions/a~1b"}, "maxItems": 2},
    {
        "type": "object",
        "title": "T",
        "description": "d",
        "default": {},
        "properties": {"a": {"examples": [1]}},
    },
    obj(**{"ключ": FLAG, 'a"b': FLAG, "a\nb": FLAG}),
    {"oneOf": [obj(kind={"const": "a"}, x=FLAG), obj(kind={"const": "b"}, y=NUMBER)]},
    {},
]
"""Schemas that together use every keyword that pydantic writes, and more."""


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda schema: json.dumps(schema)[:60])
def test_all_that_a_schema_lets_pass_is_valid(schema):
    dialect = jsonschema.Draft202012Validator
    checked = dialect(schema, format_checker=dialect.FORMAT_CHECKER)
    ended = [answer for answer in (walk(of_schema(schema), seed) for seed in range(12)) if answer is not None]
    assert len(ended) > 1
    for answer in ended:
        checked.validate(json.loads(answer))
        assert "\n" not in answer


def test_white_space_is_that_of_one_line():
    assert accepts(of_schema(PERSON), '{"name": "a", "age": 1}')
    for other in ('{"name":"a","age":1}', '{ "name": "a", "age": 1}', '{"name": "a",  "age": 1}', ' {"name"'):
        assert not accepts(of_schema(PERSON), other)


def test_without_a_schema_any_object_is_json():
    grammar = form(response_format={"type": "json_object"})
    assert accepts(grammar, '{"a": [1, {"b": null}]}') and not accepts(grammar, "[1]")


def test_the_free_form_has_no_grammar():
    for fields in ({}, {"response_format": {"type": "text"}}, {"tools": [tool()]}, {"tool_choice": "auto"}):
        assert form(**fields) is None
    assert form(tools=[tool(strict=True)], tool_choice="none") is None


@pytest.mark.parametrize(
    "regex", [r"[A-Z]{2}/\d+", "a|b\nc", r"(yes|no) ?\.", r'"[^"]{0,3}"', r"\p{Lu}é", r"/\*x\*/", r"\w\\n"]
)
def test_an_answer_matches_the_whole_regular_expression(regex):
    answers = {walk(form(structured_outputs={"regex": regex}), seed) for seed in range(8)} - {None}
    assert answers
    for answer in answers:
        assert re.fullmatch(regex.replace(r"\p{Lu}", "[^\\W\\d_]"), answer)


def test_an_answer_is_one_of_the_choices():
    choice = ["yes", "no", "yes, but", 'say "x"', "a\nb", "\\d", "ü😀", "/x/", " "]
    grammar = form(structured_outputs={"choice": choice})
    assert {walk(grammar, seed) for seed in range(60)} <= set(choice)
    assert all(accepts(grammar, one) for one in choice) and not accepts(grammar, "yes, ")


def calls_in(text):
    parser = ToolCallParser()
    found = [*parser.push(text), *parser.finish()]
    return [(c.name, json.loads(c.arguments)) if isinstance(c, ParsedToolCall) else c for c in found]


@pytest.mark.parametrize("parallel", [None, False])
@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "now"}}], ids=["required", "named"]
)
def test_a_call_that_has_to_be_made_is_one_that_the_parser_reads(choice, parallel):
    tools = [
        tool(),
        tool("now", None),
        tool("f-1", {"properties": {"x": FLAG}, "additionalProperties": False}),
    ]
    grammar = form(tools=tools, tool_choice=choice, parallel_tool_calls=parallel)
    answers = [a for a in (walk(grammar, seed) for seed in range(25)) if a is not None]
    assert len(answers) > 5
    for answer in answers:
        calls = calls_in(answer)
        assert calls and (parallel is None or len(calls) == 1)
        for name, arguments in calls:
            assert name == "now" or choice == "required"
            [one] = [t for t in tools if t["function"]["name"] == name]
            jsonschema.validate(arguments, one["function"]["parameters"] or {"type": "object"})


GOOD = '<tool_call>\n{"name": "get_weather", "arguments": {"name": "x", "age": 3}}\n</tool_call>'
WILD = '<tool_call>\n{"name": "now", "arguments": {"anything": [1]}}\n</tool_call>'


@pytest.mark.parametrize("parallel", [None, False])
def test_strict_tools_leave_the_words_free_and_the_calls_not(parallel):
    grammar = form(tools=[tool(strict=True), tool("now", PERSON)], parallel_tool_calls=parallel)
    for fine in (
        "It rains.",
        "",
        "<tool",
        "<think>\n{x</think> y",
        GOOD,
        f"Let me see.\n{GOOD}",
        WILD,
        "ü\n\n",
    ):
        assert accepts(grammar, fine), fine
    for wrong in (
        "<tool_call>no",
        GOOD.replace("3", '"3"'),
        GOOD.replace("get_weather", "other"),
        f"a{GOOD[:-1]}!",
    ):
        assert not accepts(grammar, wrong), wrong
    assert accepts(grammar, f"{GOOD}\n{WILD} done") is (parallel is None)


def test_beside_tools_an_answer_has_its_format_or_is_a_call():
    grammar = form(tools=[tool()], response_format={"type": "json_object"})
    assert accepts(grammar, '{"a": 1}') and accepts(grammar, f"{GOOD}\n{GOOD}")
    assert not accepts(grammar, "words") and not accepts(grammar, f'{{"a": 1}}{GOOD}')
    alone = form(tools=[tool()], response_format={"type": "json_object"}, tool_choice="none")
    assert accepts(alone, '{"a": 1}') and not accepts(alone, GOOD)


def chained(links, **more):
    defs = {f"d{i}": {"type": "array", "items": {"$ref": f"#/$defs/d{i + 1}"}} for i in range(links)}
    return {"$defs": {**defs, f"d{links}": FLAG}, "$ref": "#/$defs/d0", **more}


def nested(levels):
    return {"type": "array", "items": nested(levels - 1)} if levels else FLAG


COSTLY = [
    {"type": "array", "minItems": 100_000_000},
    {"type": "array", "maxItems": 1e9},
    {"anyOf": [{"type": "array", "minItems": 200 + i} for i in range(60)]},
    chained(2000),
    {"type": "string", "pattern": "^(a{1000}){1000}$"},
    {"type": "object", "patternProperties": {"^b{300000}$": FLAG}},
    {"enum": [f"{i:050}" for i in range(2000)]},
]


@pytest.mark.parametrize("schema", COSTLY, ids=lambda schema: json.dumps(schema)[:40])
def test_a_schema_that_costs_too_much_is_refused_before_it_is_compiled(schema):
    with pytest.raises(GrammarTooComplex) as refused:
        of_schema(schema)
    assert refused.value.param == "response_format.json_schema.schema"
    with pytest.raises(GrammarTooComplex) as refused:
        form(tools=[tool(), tool("f", {**schema, "type": "object"}, strict=True)])
    assert refused.value.param == "tools[1].function.parameters"


@pytest.mark.parametrize("schema", [chained(150), nested(50), obj(**{f"p{i}": TEXT for i in range(500)})])
def test_a_large_schema_within_the_bounds_is_compiled(schema):
    CONSTRAINTS.begin(of_schema(schema))


@pytest.mark.parametrize(
    "schema", [nested(200), {"$ref": "other.json"}, {"$ref": "#here"}, {"$ref": "#/$defs/x"}]
)
def test_what_a_schema_cannot_say_is_refused(schema):
    with pytest.raises(InvalidGrammar) as refused:
        CONSTRAINTS.begin(of_schema(schema))
    assert refused.value.param == "response_format.json_schema.schema" and len(refused.value.message) < 400


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            {"response_format": {"type": "json_object", "json_schema": {"name": "a"}}},
            "response_format.json_schema",
        ),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.name"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": []}}},
            "response_format.json_schema.schema",
        ),
        ({"response_format": "json"}, "response_format"),
        ({"structured_outputs": {}}, "structured_outputs.regex"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs.regex"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"choice": ["a", ""]}}, "structured_outputs.choice[1]"),
        ({"structured_outputs": {"grammar": "x"}}, "structured_outputs.grammar"),
        (
            {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
            "structured_outputs",
        ),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "always", "tools": [tool()]}, "tool_choice"),
        ({"tool_choice": {"type": "function"}, "tools": [tool()]}, "tool_choice.function"),
        (
            {"tool_choice": {"type": "function", "function": {"name": "other"}}, "tools": [tool()]},
            "tool_choice.function.name",
        ),
        ({"tools": [tool(strict="yes")]}, "tools[0].function.strict"),
    ],
)
def test_a_form_that_is_asked_for_wrongly_is_named(fields, param):
    error = invalid({"messages": HELLO, **fields})
    assert (error.status, error.param) == (400, param)


def test_arguments_that_are_no_object_are_refused_by_name():
    with pytest.raises(InvalidGrammar) as refused:
        form(tools=[tool(parameters={"type": "string"}, strict=True)])
    assert refused.value.param == "tools[0].function.parameters.type"


async def test_the_engine_is_given_the_form(server):
    regex = {"regex": "[a-z]+"}
    assert (await server.ask("x", structured_outputs=regex)).status_code == 200
    assert server.engine.requests[-1].grammar == form(structured_outputs=regex)
    assert (await server.ask("x")).status_code == 200 and server.engine.requests[-1].grammar is None
    answer = await server.ask("x", structured_outputs={"regex": "a{300000}"})
    assert refusal(answer)[:2] == (400, "grammar_too_complex")
