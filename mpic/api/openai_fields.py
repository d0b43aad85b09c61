"""The fields of OpenAI's chat completions that have no effect here: the values that are accepted, because they would
change nothing, and the reasons why others are refused.

This one table is the source of the fields of ``ChatRequest`` that check them, the messages of refusals, the table in
``docs/openai.md`` and the tests (``tests/server/test_openai_fields.py``).
``null`` is always accepted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field, StrictBool

Empty = (
    Literal[False]
    | Annotated[list[Any], Field(max_length=0)]
    | Annotated[dict[str, Any], Field(max_length=0)]
)
Name = Annotated[str, Field(max_length=1024)]
Names = Annotated[dict[str, Name], Field(max_length=64)]
Retention = Literal["in_memory", "in-memory", "24h"]
Tier = Literal["auto", "default", "flex", "scale", "priority", "fast"]
CacheOptions = dict[Literal["mode", "ttl"], Literal["implicit", "explicit", "30m"]]
Verbosity = Literal["low", "medium", "high"]
Prediction = dict[Literal["type", "content"], str | list[Any]]
Detail = Literal["auto", "low", "high", "original"]


@dataclass(frozen=True)
class OpenAIField:
    """A field of OpenAI's API, or one that vLLM has beside them.

    Args:
        kind: the type of the accepted values; None: only null is accepted.
        taken: the accepted values in words.
        why: the reason, for refusals and the documentation.
        yes: accepted values, for tests.
        no: refused values, for tests.
        inside: the field that holds it; None: the request itself.
    """

    name: str
    kind: Any
    taken: str
    why: str
    yes: tuple[Any, ...] = ()
    no: tuple[Any, ...] = ()
    inside: str | None = None

    @property
    def annotation(self) -> Any:
        """Return the type of the field in a model of pydantic."""
        return self.kind | None if self.kind is not None else None


LEGACY = "use tools"
ONE_TIER = "there is one tier"


OPENAI_FIELDS: tuple[OpenAIField, ...] = (
    OpenAIField("audio", None, "", "text comes out, nothing else", no=({"voice": "alloy"},)),
    OpenAIField("function_call", None, "", LEGACY, no=("auto",)),
    OpenAIField("functions", Empty, "an empty list", LEGACY, ([],), ([{"name": "f"}],)),
    OpenAIField(
        "metadata",
        Names,
        "an object of texts",
        "answers are not kept, so neither is it",
        ({}, {"a": "b"}),
        ({"a": 1}, {"a": "x" * 2000}, "a"),
    ),
    OpenAIField(
        "modalities",
        Annotated[list[Literal["text"]], Field(fail_fast=True)],
        '`["text"]`',
        "text comes out, nothing else",
        (["text"],),
        (["text", "audio"],),
    ),
    OpenAIField("moderation", None, "", "nothing is moderated", no=({},)),
    OpenAIField(
        "prediction",
        Prediction,
        "a text",
        "answers are not predicted, and would be the same",
        (
            {"type": "content", "content": "a"},
            {"type": "content", "content": [{"type": "text", "text": "a"}]},
        ),
        ({"type": "content", "more": "a"}, "a"),
    ),
    OpenAIField(
        "prompt_cache_key", Name, "a text", "chunks are found by their content", ("x", ""), (5, "x" * 2000)
    ),
    OpenAIField(
        "prompt_cache_options",
        CacheOptions,
        "an object with `mode` and `ttl`",
        "chunks are found by their content",
        ({}, {"mode": "implicit", "ttl": "30m"}),
        ({"mode": "none"}, []),
    ),
    OpenAIField(
        "prompt_cache_retention",
        Retention,
        "in_memory or 24h",
        "chunks are kept as long as there is room",
        ("in_memory", "24h"),
        ("1y",),
    ),
    OpenAIField("safety_identifier", Name, "a text", "who asks is known from the key", ("x",), (5,)),
    OpenAIField(
        "service_tier",
        Tier,
        "OpenAI's names",
        ONE_TIER,
        ("auto", "default", "flex", "priority"),
        ("gold",),
    ),
    OpenAIField(
        "store",
        StrictBool,
        "true or false",
        "answers are not kept (`usage.mpic.ignored` says so to true); those of `/v1/responses` are",
        (False, True),
        ("no", 1),
    ),
    OpenAIField("user", Name, "a text", "who asks is known from the key", ("someone", ""), (5, {})),
    OpenAIField(
        "verbosity",
        Verbosity,
        "low, medium or high",
        "say it in the prompt (`usage.mpic.ignored` names it unless it is medium)",
        ("low", "medium", "high"),
        ("none", 1),
    ),
    OpenAIField("web_search_options", None, "", "references are searched with mpic.retrieval", no=({},)),
    OpenAIField(
        "detail",
        Detail,
        "auto, low, high or original",
        "images are always read at the model's own resolution",
        ("auto", "low", "high", "original"),
        ("huge", 1),
        inside="image_url",
    ),
    OpenAIField(
        "include_obfuscation",
        Literal[False],
        "false",
        "streams are not padded",
        (False,),
        (True,),
        inside="stream_options",
    ),
)
BY_NAME = {field.name: field for field in OPENAI_FIELDS}
"""Their names are unique, wherever they stand."""


def annotation(name: str) -> Any:
    """Return the type of a field that stands within another one."""
    return BY_NAME[name].annotation


def of_the_request() -> dict[str, Any]:
    """Return the fields of the request itself, as ``pydantic.create_model`` takes them."""
    fields = {}
    for field in OPENAI_FIELDS:
        if field.inside is None:
            words = f"only {field.taken or 'null'}: {field.why}"
            fields[field.name] = (field.annotation, Field(None, description=words))
    return fields


def table(fields: Sequence[OpenAIField] = OPENAI_FIELDS) -> str:
    """Return the table of the documentation, in Markdown."""
    lines = ["| field | accepted values | why |", "|---|---|---|"]
    for field in fields:
        name = f"`{field.inside}.{field.name}`" if field.inside else f"`{field.name}`"
        lines.append(f"| {name} | {field.taken or 'null alone'} | {field.why} |")
    return "\n".join(lines)
