"""The trace shows the source of every token of a prompt, and agrees with the plan and the counts."""

import dataclasses
import re

import pytest
from engine_kit import MemoryStore, ids, image_chunk, prompt_of, request_of, text_chunk
from families import random_image

from mpic.link import parse_policy, policy_names

POLICIES = [re.sub("-[KNR]$", "-5", name) for name in policy_names()]


def ask(engine, prompt, policy, tokens=2):
    request = dataclasses.replace(request_of(prompt, policy, tokens), trace=True)
    return engine.submit(request).result()


def states(usage):
    """Return the state of every token, after checking that the spans tile the prompt."""
    out = []
    for span in usage.trace:
        assert span.start == len(out) < span.end
        out += [span.state] * (span.end - span.start)
    assert len(out) == usage.prompt_tokens
    return out


@pytest.fixture
def content():
    document = dataclasses.replace(text_chunk(ids(7, 21)), file_id="file-doc")
    return image_chunk(random_image(1)), document


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_is_traced_as_planned(make_engine, content, policy):
    image, document = content
    engine = make_engine("llava")
    prompt = prompt_of(ids(1, 6), image, ids(2, 3), document, document, ids(3, 20))
    usage = ask(engine, prompt, policy).usage
    got = states(usage)
    n, m = (usage.chunks[0].tokens, usage.chunks[1].tokens) if usage.chunks else (0, 21)
    text = [*range(6), *range(6 + n, 9 + n), *range(9 + n + 2 * m, len(got))]
    assert {got[i] for i in text} == {"new"}
    bounds = [(6, 6 + n), (9 + n, 9 + n + m), (9 + n + m, 9 + n + 2 * m)]
    for (lo, hi), use in zip(bounds, usage.chunks, strict=True):
        assert got[lo:hi].count("recomputed") == use.recomputed
        assert got[lo:hi].count("compiled") == use.reused
    shown = {(s.kind, s.label, s.file_id) for s in usage.trace if s.kind != "text"}
    if parse_policy(policy).context:  # under nocache the prompt is without its chunks
        assert shown == {("image", "image", None), ("document", "doc21", "file-doc")}
    again = ask(engine, prompt, policy).usage
    got = states(again)
    assert got.count("prefix") == again.prefix_hit
    assert got.count("device") == again.reused
    assert got.count("new") + got.count("recomputed") == again.computed
    if again.prefix_hit:
        own = [state for state in got if state != "device"]
        assert own == ["prefix"] * again.prefix_hit + own[again.prefix_hit :]


def test_mpic_k_recomputes_the_head_of_each_chunk(make_engine, content):
    _, document = content
    usage = ask(make_engine("llava"), prompt_of(ids(1, 6), document, ids(2, 3)), "mpic-5").usage
    assert [(s.end - s.start, s.state, s.kind) for s in usage.trace] == [
        (6, "new", "text"),
        (5, "recomputed", "document"),
        (16, "compiled", "document"),
        (3, "new", "text"),
    ]


def test_a_chunk_read_from_disk_is_traced_as_such(make_engine, content):
    _, document = content
    store = MemoryStore()
    first = make_engine("llama", store=store)
    first.compile(document).result(60)
    first.close()
    second = make_engine("llama", store=store)
    usage = ask(second, prompt_of(ids(1, 6), document, ids(2, 3)), "reuse").usage
    assert states(usage).count("disk") == 21


def test_nothing_is_traced_unless_asked(make_engine, content):
    answer = make_engine().submit(request_of(prompt_of(ids(1, 6)), "full", 2)).result()
    assert answer.usage.trace == ()
