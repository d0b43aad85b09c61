"""``mpic.retrieval`` auto, from the request to the citation: the demo model by its search tokens, and a model with a
Qwen-like template by a tool call in it (its words are put into its mouth)."""

from __future__ import annotations

import math
from dataclasses import replace
from unittest.mock import Mock

import chat_models
import pytest
import torch
from server_helpers import CONFIG, events, png, real_server, running, wait_until
from small_models import SMALL
from transformers import LlamaConfig, LlamaForCausalLM

from mpic.engine.base import TokenLogprob
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
    """A random model that is made to say ``server.words`` whatever it thinks, with ``server.probability``, then goes on
    freely."""
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
    probability: list[float] = []

    def sequence(request, stream, arrived):
        made = prepare(request, stream, arrived)
        script = [i for text in words for i in tokenizer(text, add_special_tokens=False)["input_ids"]]
        scripts[made] = script
        return made

    def speak(request, choice, now):
        if scripts[request]:
            token = scripts[request].pop(0)
            choice = token, TokenLogprob(token, math.log(probability[0]), ()) if probability else None
        take(request, choice, now)

    take, scripts = engine.outputs.take, {}
    engine.outputs.take, engine.builder.build = speak, sequence
    library = Library.open(tmp_path)
    async with running(create_app(engine, library, ChatTemplate(tokenizer), CONFIG)) as server:
        server.words, server.probability, server.add = (
            words,
            probability,
            lambda *a, **k: add(server, *a, **k),
        )
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


def mode(trigger=None, **options):
    return {"mode": "auto", **({"trigger": trigger} if trigger else {}), **options}


async def test_a_model_that_was_told_how_asks_by_a_line_and_is_given_references_in_a_turn(qwen):
    await qwen.add("ref_lamp", b"The lamp is in the hall. Its code is 123.", title="Lamp")
    qwen.words += ["SEARCH: code of the lamp\n", "It is 123.<|im_end|>"]
    submitted, submit = [], qwen.engine.submit
    qwen.engine.submit = lambda request: submitted.append(request) or submit(request)
    _, message, (round,) = await asked(qwen, "What is the code?", 60, mode("prompted"), trace=True)
    assert message["content"] == "It is 123."
    assert [one["title"] for one in cited(message)] == ["Lamp"]
    assert (round["query"], round["trigger"], round["error"]) == ("code of the lamp", "prompted", None)
    text = text_of(qwen, submitted[0].prompt)
    assert text.count("SEARCH:") == 1 and "search_references" not in text
    inserted = text_of(qwen, submitted[0].retrieval.insert([], 1))
    assert inserted.startswith("<|im_end|>\n<|im_start|>user\n") and "assistant" in inserted


async def test_the_line_may_end_the_models_turn_which_is_then_not_ended_twice(qwen):
    await qwen.add("ref_lamp", b"The lamp is in the hall.", title="Lamp")
    qwen.words += ["  search: the lamp<|im_end|>", "In the hall.<|im_end|>"]
    submitted, submit = [], qwen.engine.submit
    qwen.engine.submit = lambda request: submitted.append(request) or submit(request)
    _, message, (round,) = await asked(qwen, "Where?", 60, mode("prompted"))
    assert message["content"] == "In the hall." and round["query"] == "the lamp"
    assert text_of(qwen, submitted[0].retrieval.insert([], 1)).startswith("\n<|im_start|>user\n")


async def test_a_system_message_of_the_client_stays_before_the_protocol(qwen):
    qwen.words.append("Yes.<|im_end|>")
    submitted, submit = [], qwen.engine.submit
    qwen.engine.submit = lambda request: submitted.append(request) or submit(request)
    system = {"role": "system", "content": [{"type": "text", "text": "Be brief."}]}
    messages = [system, {"role": "user", "content": "Well?"}]
    body = {"messages": messages, "max_tokens": 20, "mpic": {"retrieval": mode("prompted")}}
    answer = await qwen.http.post("/v1/chat/completions", json=body)
    assert answer.json()["choices"][0]["message"]["content"] == "Yes."
    assert answer.json()["usage"]["mpic"]["retrieval"] == []
    text = text_of(qwen, submitted[0].prompt)
    assert text.index("Be brief.") < text.index("SEARCH:") and text.count("<|im_start|>system") == 1


async def test_a_line_later_in_an_answer_is_part_of_it(qwen):
    qwen.words.append("Write\nSEARCH: lamp\nthen.<|im_end|>")
    _, message, rounds = await asked(qwen, "How?", 60, mode("prompted"))
    assert message["content"] == "Write\nSEARCH: lamp\nthen." and rounds == []


async def test_improbable_first_tokens_search_with_the_question_and_are_not_shown(qwen):
    await qwen.add("ref_lamp", b"The lamp is in the hall.", title="Lamp")
    qwen.words += ["Maybe the cellar", "In the hall.<|im_end|>"]
    qwen.probability.append(0.4)
    _, message, (round,) = await asked(qwen, "Where is the lamp?", 60, mode("confidence"), trace=True)
    assert "Mayb" not in message["content"] and [one["title"] for one in cited(message)] == ["Lamp"]
    assert (round["query"], round["trigger"], round["at"]) == ("Where is the lamp?", "confidence", 4)
    assert "logprobs" not in message


@pytest.mark.parametrize(("probability", "least"), [(0.6, 0.5), (0.4, 0.3)])
async def test_an_answer_that_the_model_is_sure_of_is_given_as_it_is(probability, least, qwen):
    for words in ("In the hall, I am sure.<|im_end|>", "No.<|im_end|>"):
        qwen.words[:] = [words]
        qwen.probability[:] = [probability]
        _, message, rounds = await asked(qwen, "Where?", 60, mode("confidence", confidence=least))
        assert message["content"] == words.removesuffix("<|im_end|>") and rounds == []


async def test_a_model_without_calls_is_told_of_the_line_unless_another_trigger_is_named(qwen, monkeypatch):
    monkeypatch.setattr(qwen.app.state.mpic.template, "abilities", replace(
        qwen.app.state.mpic.template.abilities, tools=False
    ))  # fmt: skip
    qwen.words[:] = ["SEARCH: lamp\n", "No.<|im_end|>"]
    _, _, (round,) = await asked(qwen, "Where?", 60, "auto")
    assert (round["trigger"], round["error"]) == ("prompted", "nothing_found")
    answer = await qwen.ask("Where?", mpic={"retrieval": mode("call")})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "mpic.retrieval.trigger"


async def test_a_model_without_a_chat_template_is_asked_by_its_confidence(qwen, monkeypatch):
    template = qwen.app.state.mpic.template
    monkeypatch.setattr(template, "abilities", replace(template.abilities, tools=False))
    monkeypatch.setattr(type(template), "own", False)
    qwen.words[:], qwen.probability[:] = ["Perhaps it is", "No.<|im_end|>"], [0.2]
    _, _, (round,) = await asked(qwen, "Where?", 60, "auto")
    assert (round["trigger"], round["query"], round["error"]) == ("confidence", "Where?", "nothing_found")


async def test_always_and_the_models_own_call_are_named_too(demo):
    await add(demo, "ref_ladder", b"The code of the ladder is 104.", title="Ladder")
    for how, name in (("always", "always"), ("auto", "call")):
        _, message, (round,) = await asked(demo, QUESTION, 32, how)
        assert round["trigger"] == name and message["content"].strip() == "104"
        assert cited(message)[0]["found_by"] == ["vector", "words"] and cited(message)[0]["words"] >= 0


async def test_the_demo_model_is_given_a_call_of_its_own_kind_where_the_server_searches_for_it(demo):
    await add(demo, "ref_ladder", b"The code of the ladder is 104.", title="Ladder")
    _, message, (round,) = await asked(demo, QUESTION, 32, mode("confidence", confidence=1))
    assert round["trigger"] == "confidence" and [c["title"] for c in cited(message)] == ["Ladder"]
    assert "search" not in message["content"]


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"mode": "always", "trigger": "prompted"}, "trigger"),
        ({"mode": "auto", "confidence": 0.3}, "confidence"),
        ({"mode": "auto", "trigger": "prompted", "confidence": 0.3}, "confidence"),
        ({"mode": "auto", "trigger": "sometimes"}, "trigger"),
        ({"mode": "auto", "trigger": "confidence", "confidence": 0}, "confidence"),
        ({"mode": "auto", "trigger": "confidence", "confidence": 1.5}, "confidence"),
    ],
)
async def test_options_of_a_trigger_that_have_no_effect_or_no_meaning_are_refused(options, param, qwen):
    answer = await qwen.ask("x", mpic={"retrieval": options})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, f"mpic.retrieval.{param}")


def text_of(server, segments) -> str:
    parts = getattr(segments, "segments", segments)
    return server.engine.model.tokenizer.decode([i for s in parts for i in s.token_ids])
