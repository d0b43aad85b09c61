"""Where the rows of a request find what they do not compute: prefix nodes and chunks, as mapped spans."""

from __future__ import annotations

from mpic.engine.native.lanes import LinkedChunk, MappedSpan, Sequence


def namespace(sequence: Sequence) -> tuple[str, ...]:
    """Exact KV of a user, or what a user linked under one policy (and so one recipe); never found through the other."""
    policy, user = sequence.request.policy, sequence.request.user
    return ("exact", user) if policy.exact else ("linked", user, policy.name)


def map_spans(sequence: Sequence) -> list[MappedSpan]:
    """Where the request's rows find what they do not compute: its prefix nodes at base 0, then its chunks. To be asked
    when the nodes have just been matched: one that is split later is only the rest of what was mapped."""
    spans = [
        MappedSpan(node.shared.extent, node.lo, node.lo + node.own_tokens, 0, 0)
        for node in sequence.path
        if node.own_tokens
    ]
    return spans + chunk_spans(sequence, sequence.needed)


def chunk_spans(sequence: Sequence, chunks: list[LinkedChunk]) -> list[MappedSpan]:
    """Where the request's rows find what its plan maps of some of its chunks."""
    spans, last = [], sequence.prompt_own - 1
    wanted = {id(linked) for linked in chunks}
    for span in sequence.plan.spans:
        linked = sequence.linked[span.chunk]
        if id(linked) not in wanted:
            continue
        first, sink = linked.resident.first, linked.key.recipe.sink
        row = last if sequence.request.policy.two_step else span.row
        spans.append(
            MappedSpan(linked.resident.extent, first + span.lo, first + span.hi, span.base - sink, row)
        )
    return spans
