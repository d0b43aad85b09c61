"""``mpic.retrieval`` auto, from the request to the citation: the demo model by its search tokens, and a model with a
Qwen-like template by a tool call in it (its words are put into its mouth)."""

from __future__ import annotations

from unittest.mock import Mock

import chat_models
import pytest
import torch
from server_helpers import CONFIG, events, png, real_server, running, wait_until
from small_models import SMALL
from transformers import LlamaConfig, LlamaForCausalLM

from mpic.engine.native.engine import NativeEngine
from mpic.library import Library
from mpic.link import BARE
from mpic.model.loaded import LoadedModel
from mpic.prompt import ChatTemplate
from mpic.server.app import create_app
from mpic_lab.generator import references

CALL = '<tool_call>\n{"name": "search_references", "arguments": {"query": "the lamp"}}\n</tool_call>'
QUESTION = "What code does the ladder have?"


@pytest.fixture
async def demo(tmp_path):
    async with real_server(tmp_path, SMALL, pool_bytes=1 << 27) as server:
        yield server


async def add(server, id, content, name="x.txt", **form):
    files = {"file": (name, content)}
    answer = await server.http.post("/v1/references", data={"id": id, **form}, files=files)
    assert answer.status_code == 200, answer.text


async def asked(server, text, max_tokens=200, mode="auto", **options):
    """The body of an answer, its message, and the rounds of its search."""
    mpic = {"retrieval": mode, **options}
    body = (await server.ask(text, max_tokens=max_tokens, mpic=mpic)).json()
    return body, body["choices"][0]["message"], body["usage"]["mpic"].get("retrieval")


def cited(message):
    return [note["reference_citation"] for note in message["annotations"]]


async def test_the_demo_model_searches_answers_and_cites(demo):
    entries, queries = references.load(references.REFERENCES[1])
    facts = [e for e in entries if e["id"].startswith("fact")][60:64]
    for entry in facts:
        await add(demo, f"ref_{entry['id']}", entry["text"].encode(), title=entry["title"])
    known = {fact["id"] for fact in facts}
    for query in [q for q in queries if q["form"] == "question" and q["truth"] in known]:
        body, message, (round,) = await asked(demo, query["text"], 32, trace=True)
        id, usage = f"ref_{query['truth']}", body["usage"]
        assert message["content"].strip() == query["answer"]
        assert [one["reference_id"] for one in cited(message)] == [id]
        assert round["references"] == [id] and round["error"] is None
        tokens = usage["mpic"]["tokens"]
        assert usage["prompt_tokens"] == tokens["reused"] + tokens["prefix_hit"] + tokens["computed"]
        found = [c["reused"] for c in usage["mpic"]["chunks"] if c["tier"] != "compiled"]
        assert round["reused"] == tokens["reused"] == sum(found)
        spans = usage["mpic"]["trace"]["spans"]
        assert [s["start"] for s in spans[1:]] == [s["end"] for s in spans[:-1]]
        assert id in [s["file_id"] for s in spans]
        _, message, _ = await asked(demo, query["text"], 32, "always")
        assert message["content"].strip() == query["answer"]


async def test_an_empty_library_ends_the_demo_models_answer_with_a_clear_text(demo):
    body, message, (round,) = await asked(demo, QUESTION, 32)
    assert message["content"] == "No reference was found."
    assert body["choices"][0]["finish_reason"] == "stop" and round["error"] == "nothing_found"


async def test_citations_come_in_the_stream_before_the_text_they_led_to(demo):
    await add(demo, "ref_ladder", b"The code of the ladder is 104.", title="Ladder")
    answer = await demo.ask(QUESTION, max_tokens=32, stream=True, mpic={"retrieval": "auto"})
    deltas = [frame["choices"][0]["delta"] for frame in events(answer.text)[0]]
    cited = [i for i, delta in enumerate(deltas) if "annotations" in delta]
    spoken = [i for i, delta in enumerate(deltas) if delta.get("content")]
    assert len(cited) == 1 and spoken and cited[0] < spoken[0]
    assert "code of" not in "".join(delta.get("content", "") for delta in deltas)


@pytest.fixture
async def qwen(tmp_path):
    """A random model that is made to say ``server.words`` whatever it thinks, then goes on freely."""
    tokenizer = chat_models.processor("qwen3")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=4096,
    )
    model = LlamaForCausalLM(config).eval()
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    engine = NativeEngine(LoadedModel(model, tokenizer, "qwen-like"), pages=512)
    prepare = engine.builder.build
    words: list[str] = []

    def sequence(request, stream, arrived):
        made = prepare(request, stream, arrived)
        script = [i for text in words for i in tokenizer(text, add_special_tokens=False)["input_ids"]]
        scripts[made] = script
        return made

    def speak(request, choice, now):
        take(request, (scripts[request].pop(0), None) if scripts[request] else choice, now)

    take, scripts = engine.outputs.take, {}
    engine.outputs.take, engine.builder.build = speak, sequence
    library = Library.open(tmp_path)
    async with running(create_app(engine, library, ChatTemplate(tokenizer), CONFIG)) as server:
        server.words, server.add = words, lambda *a, **k: add(server, *a, **k)
        yield server


async def test_a_tool_call_in_the_models_own_template_is_answered_with_linked_references(qwen):
    await qwen.add("ref_lamp", b"The lamp is in the hall. Its code is 123.", title="Lamp")
    qwen.words.append("Let me see. " + CALL)
    submitted, submit = [], qwen.engine.submit
    qwen.engine.submit = lambda request: submitted.append(request) or submit(request)
    _, message, (round,) = await asked(qwen, "Where is the lamp?", 150, trace=True)
    assert message["content"].startswith("Let me see. ") and "tool_call" not in message["content"]
    assert [one["title"] for one in cited(message)] == ["Lamp"]
    assert round["query"] == "the lamp" and round["error"] is None and round["tokens"] > 20
    tokenizer = qwen.engine.model.tokenizer
    text = tokenizer.decode([i for s in submitted[0].prompt.segments for i in s.token_ids])
    assert "search_references" in text  # the template was told of the tool


async def test_auto_prefetches_what_the_users_own_words_find(qwen):
    await qwen.add("ref_lamp", b"The lamp is in the hall.", title="Lamp")
    await qwen.add("ref_boat", b"The boat is at sea.", title="Boat")
    qwen.words.append("No need.<|im_end|>")
    hinted = []
    qwen.engine.prefetch = lambda chunk, wrapping: hinted.append((chunk.file_id, wrapping))
    only = {"mode": "auto", "filter": {"title": "Lamp"}}
    await qwen.ask("The lamp is in the hall?", mpic={"retrieval": only})
    await wait_until(lambda: hinted)
    assert hinted == [("ref_lamp", BARE)]


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (CALL.replace("the lamp", "  "), "bad_call"),
        (CALL.replace("{", "["), "bad_call"),
        (CALL, "nothing_found"),
    ],
)
async def test_the_model_learns_of_a_bad_call_or_an_empty_library_and_continues(call, error, qwen):
    qwen.words += [call, "I do not know.<|im_end|>"]
    _, message, (round,) = await asked(qwen, "Where is the lamp?")
    assert message["content"] == "I do not know."
    assert round["error"] == error and round["tokens"] > 0


async def test_an_answer_continues_after_a_failed_search_and_reports_it(qwen):
    await qwen.add("ref_lamp", b"words", title="Lamp")
    qwen.words += [CALL, "Well.<|im_end|>"]

    qwen.app.state.mpic.retriever.search = Mock(side_effect=OSError("the disk is gone"))
    _, message, (round,) = await asked(qwen, "Where?")
    assert message["content"] == "Well." and round["error"] == "internal_error"


async def test_an_answer_finishes_although_its_reference_is_deleted(qwen):
    await qwen.add("ref_lamp", b"The lamp is in the hall, it is said.", title="Lamp")
    qwen.words += [CALL]
    retriever = qwen.app.state.mpic.retriever
    retriever.soon = lambda *work: None  # no speculation, which would search too
    search = retriever.search

    def search_then_lose(*args, **options):
        hits = search(*args, **options)
        qwen.library.references.remove("ref_lamp")
        return hits

    retriever.search = search_then_lose
    body, _, rounds = await asked(qwen, "Where?", 80)
    assert body["choices"][0]["finish_reason"] in ("stop", "length")
    assert rounds[0]["error"] == "nothing_found"
    retriever.search = search
    chunk_of = qwen.library.references.chunk
    await qwen.add("ref_two", b"The lamp is in the cellar.", title="Lamp two")
    await qwen.settled("ref_two", "references")
    held = []

    def hold_then_lose(reference):
        held.append(chunk_of(reference))
        qwen.library.references.remove(reference.id)
        return held[-1]

    qwen.library.references.chunk = hold_then_lose
    _, _, rounds = await asked(qwen, "Where?", 80)
    assert rounds[0]["references"] == ["ref_two"], rounds[0]
    found = await qwen.http.post("/v1/references/search", json={"query": "the lamp"})
    assert found.json()["data"] == []
    qwen.engine.check()


async def test_images_are_refused_by_a_text_model_when_a_search_finds_them(qwen):
    await qwen.add("ref_red", png("red"), "red.png", title="Red")
    qwen.words += [CALL, "No.<|im_end|>"]
    _, message, (round,) = await asked(qwen, "Where?")
    assert message["content"] == "No." and round["error"] == "unsupported_modality"
