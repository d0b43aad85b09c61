"""``mpic.retrieval`` of a chat completion: references found before the answer begins, or while the model answers."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any

from mpic.api.requests import RetrievalOptions
from mpic.engine.base import Hit, Retrieval, RetrievalRound, SearchResult, Trigger
from mpic.errors import BadRequest, MPICError, UnsupportedParameter
from mpic.kv.chunk import Chunk
from mpic.link import Policy
from mpic.prompt import build_prompt
from mpic.prompt.calls import LINE, NOTHING, PROTOCOL, TOOL, CallStyle, find_style, turn_style
from mpic.prompt.guarded_tokenizer import Trusted
from mpic.prompt.messages import Handles, Ref, Text, parse_messages
from mpic.prompt.segments import Prompt, Segment, TextSegment
from mpic.prompt.template import ChatTemplate
from mpic.retriever import Query, Retriever, SearchHit

if TYPE_CHECKING:
    from mpic.config import RetrievalConfig
    from mpic.engine.base import Engine
    from mpic.server.resolver import LibraryResolver
    from mpic.server.state import State

PREFETCHED = 2
"""References that the user's own words find, whose KV is loaded in case that the model searches for them."""


@cache
def call_style(template: ChatTemplate, config: RetrievalConfig) -> CallStyle:
    """Return the form in which the served model calls a search. Raise UnsupportedParameter if it cannot."""
    return find_style(template, config.call_opens, config.call_closes)


def check_options(options: RetrievalOptions) -> None:
    """Refuse options that would have no effect. Raise UnsupportedParameter."""
    for name, needs, has in (
        ("trigger", "mode 'auto'", options.trigger is None or options.mode == "auto"),
        ("confidence", "trigger 'confidence'", options.trigger == "confidence"),
    ):
        if name in options.model_fields_set and not has:
            raise UnsupportedParameter(
                f"{name} has an effect only with {needs}", param=f"mpic.retrieval.{name}"
            )


def citation(hit: SearchHit) -> dict[str, Any]:
    """Return the citation of a reference that was used, for clients."""
    reference = hit.reference
    return {
        "reference_id": reference.id,
        "version": reference.version,
        "title": reference.title,
        "kind": reference.kind,
        "score": round(hit.score, 4),
        "words": None if hit.words is None else round(hit.words, 4),
        "found_by": list(hit.found_by),
        "thumbnail": f"/v1/references/{reference.id}/thumbnail" if reference.kind == "image" else None,
    }


def token_call_style(template: ChatTemplate, config: RetrievalConfig) -> CallStyle | None:
    """Return the call style of a model with search tokens; None for any other model."""
    with suppress(UnsupportedParameter):
        style = call_style(template, config)
        return None if style.tool else style
    return None


@dataclass
class Searcher:
    """Searches for one request, with its options. ``press`` compresses the references that it finds; empty: none."""

    retriever: Retriever
    options: RetrievalOptions
    press: str = ""

    def find(self, query: Query) -> list[SearchHit]:
        """Return the best references. Raise the errors of the retriever."""
        options = self.options
        try:
            return self.retriever.search(query, options.top_k, options.min_score, options.filter)
        except BadRequest as error:
            if error.param and error.param.startswith("filter"):
                error.param = f"mpic.retrieval.{error.param}"
            raise

    def chunk(self, hit: SearchHit) -> Chunk:
        """Return the chunk of a reference. Raise ReferenceNotFound if it was removed meanwhile."""
        return self.retriever.library.references.chunk(hit.reference).pressed(self.press)

    def round(self, query: Query) -> tuple[list[SearchHit], RetrievalRound]:
        """Search before the answer; return the references and the record of the search."""
        began = time.monotonic()
        hits = self.find(query)
        ms = (time.monotonic() - began) * 1e3
        citations = tuple(citation(hit) for hit in hits)
        error = None if hits else "nothing_found"
        return hits, RetrievalRound(query.text, citations, search_ms=ms, error=error)


class AutoRetrieval(Retrieval):
    """Lets the model search while it answers.

    Args:
        trigger: what asks (``Retrieval.trigger``).
        question: what is searched for with ``confidence``.
    """

    def __init__(
        self,
        searcher: Searcher,
        template: ChatTemplate,
        style: CallStyle,
        trigger: Trigger = "call",
        question: Query | None = None,
    ) -> None:
        self._searcher, self._template, self.style = searcher, template, style
        self._question, self._call, self._query = question, "", ""
        self._eos = template.tokenizer.eos_token or ""
        self.trigger = trigger
        self.opens, self.closes = (style.opens, style.closes) if trigger == "call" else (LINE, "")
        self.confidence = searcher.options.confidence
        self.rounds = searcher.options.rounds
        self.nothing = None if style.tool else NOTHING

    def search(self, call: str) -> SearchResult:
        query = self._asked(call)
        self._call, self._query = call, "" if query is None else query.text
        if query is None:
            return SearchResult(call, (), "bad_call")
        hits = []
        for hit in self._searcher.find(query):
            with suppress(MPICError):  # the reference was removed meanwhile
                hits.append(Hit(self._searcher.chunk(hit), citation(hit)))
        return SearchResult(query.text, tuple(hits))

    def _asked(self, call: str) -> Query | None:
        """Return what a call asks for; None if it is malformed."""
        if self.trigger == "confidence":
            return self._question
        if self.trigger == "call":
            words = self.style.query(call)
        else:
            line, *_ = call.lstrip()[len(LINE) :].removesuffix(self._eos).lstrip().split("\n")
            words = line.strip()
        return Query(words) if words else None

    def insert(self, hits: Sequence[Hit], number: int) -> tuple[Segment, ...]:
        references = [(str(hit.citation["title"]), hit.chunk) for hit in hits]
        style = self.style
        if self.trigger == "call":
            return style.spell(self._template, references, number)
        if self._eos and self._call.endswith(self._eos):  # the model has ended its turn itself
            style = replace(style, before=style.before.removeprefix(self._eos))
        made = () if style.tool else called(self._template, style, self._query)
        return (*made, *style.spell(self._template, references, number))


def query_of(messages: Sequence[Mapping[str, Any]], resolver: LibraryResolver, handles: Handles) -> Query:
    """Return the text and the images of the last user message as a query."""
    last = [m for m in messages if m["role"] == "user"][-1:]
    parsed = parse_messages(last, resolver, handles=handles) if last else []
    items = [item for message in parsed for item in message.content]
    texts = [item.text for item in items if isinstance(item, Text)]
    loaders = [item.chunk.load_image for item in items if isinstance(item, Ref)]
    return Query("\n".join(texts), tuple(load for load in loaders if load is not None))


def insert_references(messages: Sequence[dict[str, Any]], hits: Sequence[SearchHit]) -> list[dict[str, Any]]:
    """Return the conversation with references as the first parts of the last user message."""
    at = max(i for i, m in enumerate(messages) if m["role"] == "user")
    content = messages[at]["content"]
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else list(content)
    found = [{"type": "file", "file_id": hit.reference.id} for hit in hits]
    return [*messages[:at], {**messages[at], "content": [*found, *parts]}, *messages[at + 1 :]]


def with_simulated_call(
    prompt: Prompt,
    template: ChatTemplate,
    style: CallStyle,
    query: Query,
    hits: Sequence[SearchHit],
    library: Any,
) -> Prompt:
    """Return a prompt whose answer begins with a search, which the model did not make, and its result.

    That is where a model with search tokens expects references.
    """
    made = called(template, style, query.text)
    found = [(hit.reference.title, library.chunk(hit.reference)) for hit in hits]
    segments: list[Segment] = []
    for segment in (*prompt.segments, *made, *style.spell(template, found, 1)):
        if segments and isinstance(segment, TextSegment) and isinstance(segments[-1], TextSegment):
            segments[-1] = TextSegment(segments[-1].token_ids + segment.token_ids)
        else:
            segments.append(segment)
    return Prompt(tuple(segments))


def called(template: ChatTemplate, style: CallStyle, query: str) -> tuple[Segment, ...]:
    """Return the call of a model with search tokens for a query."""
    return template.continuation([Trusted(style.opens + " "), query, Trusted(style.closes)])


def prompt_with_references(
    messages: Sequence[dict[str, Any]],
    searcher: Searcher,
    query: Query,
    state: State,
    resolver: LibraryResolver,
    handles: Handles,
) -> tuple[Prompt, RetrievalRound]:
    """Search, and return a prompt with the references that were found (mode ``always``)."""
    hits, round = searcher.round(query)
    style = token_call_style(state.template, state.config.retrieval)
    if style is None:
        messages = insert_references(messages, hits)
    values = state.config.server.max_body_values
    prompt = build_prompt(messages, state.template, resolver, [], values, handles)
    if style is not None and hits:
        prompt = with_simulated_call(prompt, state.template, style, query, hits, state.library.references)
    return prompt, round


def prompt_with_search(
    messages: Sequence[dict[str, Any]],
    searcher: Searcher,
    query: Query,
    state: State,
    resolver: LibraryResolver,
    policy: Policy,
    handles: Handles,
) -> tuple[Prompt, AutoRetrieval]:
    """Return a prompt that offers the search, and the search itself (mode ``auto``).

    Raises:
        UnsupportedParameter: the model cannot call a search, or not in the way that was asked for.
    """
    template = state.template
    search = search_of(searcher, template, state.config.retrieval, query)
    tools = [TOOL] if search.trigger == "call" and search.style.tool else []
    values = state.config.server.max_body_values
    if search.trigger == "prompted":
        messages = with_protocol(messages)
    prompt = build_prompt(messages, template, resolver, tools, values, handles)
    state.retriever.soon(prefetch_likely, searcher, query, state.engine, policy)
    return prompt, search


def search_of(
    searcher: Searcher, template: ChatTemplate, config: RetrievalConfig, question: Query
) -> AutoRetrieval:
    """Return the search of a request by the trigger that its options name. Where they name none, it is the model's own
    call if it has one, else the prompted line, and for a model without a chat template, which has not learnt to follow
    instructions, its confidence.

    Raises:
        UnsupportedParameter: the model cannot do so.
    """
    trigger = searcher.options.trigger
    if trigger in (None, "call"):
        try:
            return AutoRetrieval(searcher, template, call_style(template, config))
        except UnsupportedParameter:
            if trigger == "call":
                raise
            trigger = "prompted" if template.own else "confidence"
    style = token_call_style(template, config) or turn_style(template)
    return AutoRetrieval(searcher, template, style, trigger, question)


def with_protocol(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a conversation whose system message says how to ask for a search."""
    first = messages[0]
    if first["role"] not in ("system", "developer"):
        return [{"role": "system", "content": PROTOCOL}, *messages]
    content = first["content"]
    if isinstance(content, str):
        content = f"{content}\n\n{PROTOCOL}"
    else:
        content = [*content, {"type": "text", "text": PROTOCOL}]
    return [{**first, "content": content}, *messages[1:]]


def prefetch_likely(searcher: Searcher, query: Query, engine: Engine, policy: Policy) -> None:
    """Start loading the KV of references that match the user's message, because the model is likely to search for
    those."""
    if not policy.uses_chunks or not (query.text.strip() or query.images):
        return
    with suppress(MPICError):  # prefetching is optional, and the model's own search will report the error
        for hit in searcher.find(query)[:PREFETCHED]:
            engine.prefetch(searcher.chunk(hit), policy.wrapping)
