"""Long texts of requests whose clients know nothing of chunks (``[engine] link_texts``)."""

from itertools import pairwise

import pytest
from chat_models import processor
from fake_engine import FakeEngine
from server_helpers import fake_server

from mpic.config import Config, EngineConfig, ServerConfig
from mpic.prompt import ChatTemplate

LEAST = 200
LONG = " ".join(f"Sentence {i} says that the answer is {i * 7}." for i in range(30))
OTHER = LONG.replace("Sentence", "Line")
SHORT = LONG[:200]
MARK = {"cache_control": {"type": "ephemeral"}}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": OTHER,
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CALL = {"id": "c", "type": "function", "function": {"name": "get_weather", "arguments": "{}"}}


@pytest.fixture(scope="module")
def template():
    return ChatTemplate(processor("qwen3"))


@pytest.fixture
def serve(tmp_path, template):
    def with_least(least=LEAST):
        config = Config(engine=EngineConfig(policy="mpic-16", link_texts=least))
        return fake_server(tmp_path, template, FakeEngine(context=30_000, pool=30_000), config)

    return with_least


@pytest.fixture
async def server(serve):
    async with serve() as server:
        yield server


def text(text, **fields):
    return {"type": "text", "text": text, **fields}


def user(*parts):
    return {"role": "user", "content": list(parts)}


async def prompt_of(server, messages, policy="mpic-16", path="/v1/chat/completions", **fields):
    body = {"messages": messages, "mpic": {"policy": policy}, **fields}
    answer = await server.http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return server.engine.requests[-1].prompt


def ids_of(prompt):
    return [
        token
        for s in prompt.segments
        for token in (s.token_ids if hasattr(s, "token_ids") else s.chunk.token_ids)
    ]


def labels(prompt):
    return [chunk.label for chunk in prompt.chunks]


CONVERSATION = [
    {"role": "system", "content": LONG},
    user(text(LONG + " A.\n\n"), text("Is it so?")),
    {"role": "assistant", "content": LONG, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c", "content": OTHER},
    {"role": "user", "content": f"Context: <source id='1'>\n{OTHER}\n</source><source>x</source> Why?"},
]


async def test_langchain_and_llama_index_long_texts_are_chunks_and_the_prompt_keeps_its_tokens(server):
    linked = await prompt_of(server, CONVERSATION, tools=[WEATHER])
    exact = await prompt_of(server, CONVERSATION, policy="prefix", tools=[WEATHER])
    assert labels(linked) == ["tools", "system", "user", "tool", "user"] and not exact.chunks
    assert ids_of(linked) == ids_of(exact)
    kinds = [hasattr(segment, "token_ids") for segment in linked.segments]
    assert all(a or b for a, b in pairwise(kinds)) and kinds[0] and kinds[-1]  # no two chunks touch
    linked_tokens = sum(len(chunk.token_ids) for chunk in linked.chunks)
    assert linked_tokens > 0.7 * len(ids_of(exact))  # all but the template, questions and the answer
    assert [c.key for c in linked.chunks][3] == [c.key for c in linked.chunks][4]


@pytest.mark.parametrize("policy", ["full", "prefix", "nocache", "reuse-2step"])
async def test_a_policy_that_reads_no_chunks_or_that_auto_may_not_choose_links_no_text(server, policy):
    assert not (await prompt_of(server, CONVERSATION, policy=policy, tools=[WEATHER])).chunks


async def test_a_text_is_the_same_chunk_wherever_it_stands(server):
    first = await prompt_of(server, [user(text(LONG), text("What?"))])
    for messages in (
        [{"role": "system", "content": "Help."}, user(text("What?"), text(LONG))],
        [
            user(text("Hi")),
            {"role": "assistant", "content": "Yes."},
            {"role": "user", "content": f"\n{LONG} "},
        ],
    ):
        moved = await prompt_of(server, messages)
        assert [chunk.key for chunk in moved.chunks] == [chunk.key for chunk in first.chunks]


async def test_a_text_that_is_tokenized_differently_in_its_place_stays_text(server, monkeypatch, template):
    whole = ChatTemplate.tokenize_alone
    other = lambda self, *given: tuple(reversed(whole(self, *given)))
    monkeypatch.setattr(ChatTemplate, "tokenize_alone", other)
    assert not (await prompt_of(server, CONVERSATION, tools=[WEATHER])).chunks


async def test_anthropic_cache_control_marks_shorter_texts(server):
    turn = lambda **mark: [user(text(SHORT, **mark), text("What?"))]
    assert labels(await prompt_of(server, turn())) == []
    assert labels(await prompt_of(server, turn(**MARK))) == ["user"]
    result = {"type": "tool_result", "tool_use_id": "c", "content": SHORT, **MARK}
    use = {"type": "tool_use", "id": "c", "name": "get_weather", "input": {}}
    messages = [user(text("Hi")), {"role": "assistant", "content": [use]}, user(result)]
    fields = {"path": "/v1/messages", "max_tokens": 9, "system": [text(SHORT + "System.", **MARK)]}
    assert labels(await prompt_of(server, messages, **fields)) == ["system", "tool"]
    assert labels(await prompt_of(server, turn(cache_control={"type": "ephemeral", "ttl": "1h"}))) == ["user"]
    assert labels(await prompt_of(server, [user(text("Hi", **MARK))])) == []


async def test_the_rule_is_switched_off_by_0(serve):
    async with serve(0) as server:
        assert not (await prompt_of(server, [user(text(LONG, **MARK))])).chunks


async def test_a_press_does_not_compress_them(server):
    body = {"messages": [user(text(LONG), {"type": "document", "text": OTHER})]}
    await server.http.post("/v1/chat/completions", json={**body, "mpic": {"press": "snapkv-50"}})
    presses = {chunk.label: chunk.press for chunk in server.engine.requests[-1].prompt.chunks}
    assert presses == {"user": "", None: "snapkv-50"}


async def test_no_more_texts_are_linked_than_a_prompt_may_have_chunks(tmp_path, template):
    config = Config(ServerConfig(max_chunks=2), EngineConfig(policy="mpic-16", link_texts=LEAST))
    async with fake_server(tmp_path, template, FakeEngine(context=30_000, pool=30_000), config) as server:
        assert len((await prompt_of(server, CONVERSATION, tools=[WEATHER])).chunks) == 2
