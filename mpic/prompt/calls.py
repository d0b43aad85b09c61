"""Calls by which a model asks for references while it answers, and the text that gives it the references.

There are two styles, which are found by inspecting the model, never by its name:

- *search tokens*: the tokenizer has the control tokens ``<search>`` and ``</search>`` (the bundled demo model). The
  text between them is the query; ``reference one:CHUNK end of reference one.`` follows.
- *tool call*: the chat template prints tools and gets one, ``search_references``. A call and its response are rendered
  once with stand-ins; the text that the template puts around them starts and ends a call, and goes before and after the
  references.

For the calls of any other model, which are prompted or made by the engine for it (``mpic.engine.base.Retrieval``), the
references are a turn of the user's (``turn_style``).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mpic.errors import UnsupportedParameter
from mpic.kv.chunk import Chunk
from mpic.prompt.guarded_tokenizer import Trusted
from mpic.prompt.probes import TEMPLATE_ERRORS, A, B, C
from mpic.prompt.segments import Segment
from mpic.prompt.template import ChatTemplate

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "search_references",
        "description": "Find images and texts in the reference library. Use it when the conversation lacks a fact.",
        "parameters": {
            "type": "object",
            "properties": {"query": {"type": "string", "description": "what to look for, in a few words"}},
            "required": ["query"],
        },
    },
}
OPENS, CLOSES = "<search>", "</search>"
LINE = "SEARCH:"
PROTOCOL = (
    "There is a library of images and texts. When you lack a fact for the answer, write nothing but one line:\n"
    f"{LINE} what to look for, in a few words\n"
    "You will be given what the library has. When you lack nothing, just answer."
)
FOUND, ANSWER = "From the library:\n", "\nAnswer the question now."
NUMBERS = (
    *("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"),
    *("eleven", "twelve", "thirteen", "fourteen", "fifteen"),
    *("sixteen", "seventeen", "eighteen", "nineteen", "twenty"),
)
NOTHING = "No reference was found."


@dataclass(frozen=True)
class CallStyle:
    """A style of calls; see the module.

    Args:
        opens, closes: text before and after a call.
        tool: True if the template must get ``TOOL`` and a call is JSON.
        before, after: text of the template between a call and its references, and after them.
    """

    opens: str
    closes: str
    tool: bool
    before: str = ""
    after: str = ""

    def query(self, call: str) -> str | None:
        """Return the query of a call; None if the call is malformed."""
        if not self.tool:
            return call.strip() or None
        try:
            parsed = json.loads(call)
            arguments = parsed.get("arguments", parsed.get("parameters"))
            arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
            query = arguments["query"]
            query.encode()  # an escape can spell half of a surrogate pair
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return None
        named = parsed.get("name") == TOOL["function"]["name"]
        return query.strip() or None if named and isinstance(query, str) else None

    def spell(
        self, template: ChatTemplate, references: Sequence[tuple[str, Chunk]], number: int
    ) -> tuple[Segment, ...]:
        """Return the segments that the model reads after a call.

        Args:
            references: (title, content) best first; may be empty.
            number: number of the first reference, counted from 1 over the request.
        """
        pieces: list[Trusted | str | Chunk] = [Trusted(self.before)]
        for i, (title, chunk) in enumerate(references, start=number):
            if self.tool:
                pieces += self._listed(template, i, title, chunk)
            else:
                label = NUMBERS[i - 1] if i <= len(NUMBERS) else str(i)
                pieces += [Trusted(f" reference {label}:"), chunk, Trusted(f" end of reference {label}.")]
        if not references and self.tool:
            pieces.append(Trusted(NOTHING))
        pieces.append(Trusted(self.after))
        return template.continuation(pieces)

    @staticmethod
    def _listed(template: ChatTemplate, i: int, title: str, chunk: Chunk) -> list[Trusted | str | Chunk]:
        before, after = template.abilities.image_text if chunk.kind == "image" else ("", "")
        head = [Trusted("\n" if i > 1 else ""), Trusted(f"reference {i}: "), title, Trusted("\n" + before)]
        return [*head, chunk, Trusted(f"{after}\nend of reference {i}.")]


def find_style(template: ChatTemplate, opens: str = "", closes: str = "") -> CallStyle:
    """Find the style of a model.

    Args:
        opens, closes: text that starts and ends a tool call, for templates in which it cannot be found.

    Raises:
        UnsupportedParameter: the model has neither style.
    """
    if not opens and all(template.is_control(token) for token in (OPENS, CLOSES)):
        return CallStyle(OPENS, CLOSES, tool=False)
    style = _tool_style(template, opens, closes) if template.abilities.tools else None
    if style is None:
        raise UnsupportedParameter(
            "the model cannot ask for references: it has no <search> tokens, and its chat template prints no tool "
            "calls that could be recognised (call_opens and call_closes in [retrieval] set what starts and ends one); "
            "use trigger 'prompted' or 'confidence', or mode 'always'",
            param="mpic.retrieval.trigger",
        )
    return style


def turn_style(template: ChatTemplate) -> CallStyle:
    """Return the style in which references are a turn of the user's, in answer to a call that is not the model's own.

    Raises:
        UnsupportedParameter: the model takes no second turn.
    """
    strings = template.abilities.strings
    spell = lambda role, text: text if role in strings else [{"type": "text", "text": text}]
    turns = (("user", A), ("assistant", B), ("user", C))
    try:
        rendered = template.render([{"role": role, "content": spell(role, text)} for role, text in turns])
    except TEMPLATE_ERRORS:
        rendered = ""
    at, end = rendered.find(B) + len(B), rendered.find(C)
    if at < len(B) or end < at:
        raise UnsupportedParameter(
            "the model cannot be given references while it answers, because its chat template takes no second turn; "
            "use mode 'always'",
            param="mpic.retrieval.mode",
        )
    return CallStyle(
        "", "", tool=True, before=rendered[at:end] + FOUND, after=ANSWER + rendered[end + len(C) :]
    )


def _tool_style(template: ChatTemplate, opens: str, closes: str) -> CallStyle | None:
    function = {"name": TOOL["function"]["name"], "arguments": {"query": B}}
    user = {"role": "user", "content": A}
    call = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "call00001", "type": "function", "function": function}],
    }
    response = {
        "role": "tool",
        "content": C,
        "name": function["name"],
        "tool_call_id": "call00001",
    }
    try:
        asked = template.render([user], [TOOL])
        answered = template.render([user, call, response], [TOOL])
    except TEMPLATE_ERRORS:
        return None
    at, end = answered.find(B, len(asked) - len(A) if A in asked else 0), answered.find(C)
    if min(at, end) < 0 or end < at:
        return None
    turn = answered[:at].rfind(A) + len(A)
    found = _json_at(answered, turn, at)
    eos = template.tokenizer.eos_token
    if found is None or not eos:
        return None
    start, stop = found
    rest, after = answered[stop:end], answered[end + len(C) :]
    closing, sign, between = rest.partition(eos)
    opens = opens or answered[turn:start].rstrip().rpartition("\n")[2].strip()
    closes = closes or closing.strip()
    if not sign or not opens or not closes:
        return None
    return CallStyle(opens, closes, tool=True, before=sign + between, after=after)


def _json_at(text: str, lo: int, inside: int) -> tuple[int, int] | None:
    """Return (start, end) of the outermost JSON object that begins in ``[lo, inside)`` and reaches beyond
    ``inside``."""
    at = text.find("{", lo, inside)
    while at >= 0:
        try:
            _, end = json.JSONDecoder().raw_decode(text, at)
        except ValueError:
            end = -1
        if end > inside:
            return at, end
        at = text.find("{", at + 1, inside)
    return None
