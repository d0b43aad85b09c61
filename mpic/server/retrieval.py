"""``mpic.retrieval`` of a chat completion: references found before the answer begins, or while the model speaks."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from mpic.engine.base import Found, Hit, Retrieval, RetrievalRound
from mpic.errors import MPICError, UnsupportedParameter
from mpic.link.plan import Policy
from mpic.prompt.calls import NOTHING, CallStyle, find_style
from mpic.prompt.messages import Ref, Text, parse_messages
from mpic.prompt.segments import Prompt, Segment, TextSegment
from mpic.prompt.template import ChatTemplate
from mpic.prompt.tokens import Trusted
from mpic.retriever import Query, Retriever, SearchHit
from mpic.server.schemas import RetrievalOptions

if TYPE_CHECKING:
    from mpic.config import RetrievalConfig
    from mpic.engine.base import Engine
    from mpic.server.resolver import LibraryResolver

GUESSES = 2
"""References whose KV is fetched on suspicion, from the user's own words, when the model may search."""


@cache
def style_of(template: ChatTemplate, config: RetrievalConfig) -> CallStyle:
    """How the served model calls. Raises UnsupportedParameter: it cannot."""
    return find_style(template, config.call_opens, config.call_closes)


def citation(hit: SearchHit) -> dict[str, Any]:
    """What a reader is told of a reference that was used."""
    reference = hit.reference
    return {
        "reference_id": reference.id,
        "version": reference.version,
        "title": reference.title,
        "kind": reference.kind,
        "score": round(hit.score, 4),
        "thumbnail": f"/v1/references/{reference.id}/thumbnail" if reference.kind == "image" else None,
    }


def search_tokens(template: ChatTemplate, config: RetrievalConfig) -> CallStyle | None:
    """The style of a model with search tokens; None of any other."""
    with suppress(UnsupportedParameter):
        style = style_of(template, config)
        return None if style.tool else style
    return None


@dataclass
class Searching:
    """Searches of one request, with its options."""

    retriever: Retriever
    options: RetrievalOptions

    def find(self, query: Query) -> list[SearchHit]:
        options = self.options
        return self.retriever.search(query, options.top_k, options.min_score, options.filter)


class AutoRetrieval(Retrieval):
    """The model asks while it speaks."""

    def __init__(self, searching: Searching, template: ChatTemplate, style: CallStyle) -> None:
        self._searching, self._template, self._style = searching, template, style
        self.opens, self.closes = style.opens, style.closes
        self.rounds = searching.options.rounds
        self.nothing = None if style.tool else NOTHING

    def search(self, call: str) -> Found:
        query = self._style.query(call)
        if query is None:
            return Found(call, (), "bad_call")
        library = self._searching.retriever.library.references
        hits = []
        for hit in self._searching.find(Query(query)):
            with suppress(MPICError):  # removed since it was found
                hits.append(Hit(library.chunk(hit.reference), citation(hit)))
        return Found(query, tuple(hits))

    def insert(self, hits: Sequence[Hit], number: int) -> tuple[Segment, ...]:
        references = [(str(hit.citation["title"]), hit.chunk) for hit in hits]
        return self._style.spell(self._template, references, number)


def query_of(messages: Sequence[Mapping[str, Any]], resolver: LibraryResolver) -> Query:
    """The last user message, its text and its images, as something to look for."""
    last = [m for m in messages if m["role"] == "user"][-1:]
    items = [item for message in parse_messages(last, resolver) for item in message.content] if last else []
    texts = [item.text for item in items if isinstance(item, Text)]
    loaders = [item.chunk.load_image for item in items if isinstance(item, Ref)]
    return Query("\n".join(texts), tuple(load for load in loaders if load is not None))


def with_references(messages: Sequence[dict[str, Any]], hits: Sequence[SearchHit]) -> list[dict[str, Any]]:
    """The conversation with references in front of the last user message, as parts."""
    at = max(i for i, m in enumerate(messages) if m["role"] == "user")
    content = messages[at]["content"]
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else list(content)
    found = [{"type": "file", "file_id": hit.reference.id} for hit in hits]
    return [*messages[:at], {**messages[at], "content": [*found, *parts]}, *messages[at + 1 :]]


def as_if_asked(
    prompt: Prompt,
    template: ChatTemplate,
    style: CallStyle,
    query: Query,
    hits: Sequence[SearchHit],
    library: Any,
) -> Prompt:
    """A prompt whose answer begins with a call that the model did not make and what it found: where a model with search
    tokens expects references."""
    called = template.continuation([Trusted(style.opens + " "), query.text, Trusted(style.closes)])
    found = [(hit.reference.title, library.chunk(hit.reference)) for hit in hits]
    segments: list[Segment] = []
    for segment in (*prompt.segments, *called, *style.spell(template, found, 1)):
        if segments and isinstance(segment, TextSegment) and isinstance(segments[-1], TextSegment):
            segments[-1] = TextSegment(segments[-1].token_ids + segment.token_ids)
        else:
            segments.append(segment)
    return Prompt(tuple(segments))


def look_up(searching: Searching, query: Query) -> tuple[list[SearchHit], RetrievalRound]:
    """The search of mode ``always``, before the answer. Raises what the retriever raises."""
    began = time.monotonic()
    hits = searching.find(query)
    ms = (time.monotonic() - began) * 1e3
    error = None if hits else "nothing_found"
    citations = tuple(citation(hit) for hit in hits)
    return hits, RetrievalRound(query.text, citations, search_ms=ms, error=error)


def guess(searching: Searching, query: Query, engine: Engine, policy: Policy) -> None:
    """Start loading the KV of what the user's own words find: the model may ask for just that."""
    if not policy.uses_chunks or not (query.text.strip() or query.images):
        return
    library = searching.retriever.library.references
    with suppress(MPICError):  # nothing depends on it, and the model's own search will say what is wrong
        for hit in searching.find(query)[:GUESSES]:
            engine.prefetch(library.chunk(hit.reference), policy.sink)
