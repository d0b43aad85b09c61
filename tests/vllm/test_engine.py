"""The vLLM engine behind ``mpic.engine.base``, on the demo model and samples: one engine for all tests here."""

from __future__ import annotations

import asyncio
import json
from contextlib import aclosing, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import psutil
import pytest
import torch
from engine_kit import until
from library_tools import Remote, drop
from PIL import Image as PILImage
from small_models import SMALL
from transformers import AutoProcessor, LlavaForConditionalGeneration
from vllm_facade import MANIFEST, WRAPPINGS, compile_the_same, damage, idle, lost, of, whole

import mpic.engine.stream as stream_module
from mpic.api.requests import RetrievalOptions
from mpic.config import RetrievalConfig
from mpic.engine.grammar import Grammar
from mpic.engine.vllm.frontend.gate import Gate
from mpic.engine.vllm.frontend.linktest import OWNER, link_test
from mpic.errors import (
    ContextLengthExceeded,
    CorruptFile,
    EmptyPrompt,
    EngineStopped,
    FileNotFound,
    GrammarTooComplex,
    InvalidGrammar,
    InvalidImage,
    ModelRefused,
    QueueFull,
    StorageFull,
    UnsupportedParameter,
)
from mpic.kv.chunk import Chunk, ChunkKey, ChunkKV
from mpic.kv.file import write
from mpic.library.store.tiers import TieredStore
from mpic.link import parse_policy
from mpic.prompt.segments import Prompt, TextSegment
from mpic.retriever import SearchHit
from mpic.server.retrieval import AutoRetrieval, Searcher, call_style
from mpic_lab.generator import EVAL_TASKS, Generator, Image, messages
from mpic_lab.generator.client import messages_of


@pytest.fixture(autouse=True)
def nothing_left_behind(bench):
    yield
    if not bench.engine._stopping:
        idle(bench)
        bench.engine.check()


@pytest.mark.parametrize("policy", ["full", "mpic-16", "packet-4"])
def test_both_engines_give_the_same_greedy_answers_to_the_demos_questions(bench, native, policy):
    prompts = [bench.prompt(question["messages"]) for question in MANIFEST["questions"]]
    streams = [bench.submit(p, policy, trace=True) for p in prompts]
    for question, prompt, stream in zip(MANIFEST["questions"], prompts, streams):
        ours = stream.result()
        theirs = bench.ask(prompt, policy, native, trace=True)
        assert ours.token_ids == theirs.token_ids, question["id"]
        assert ours.text == theirs.text and ours.finish_reason == theirs.finish_reason
        a, b = ours.usage, theirs.usage
        assert whole(a)
        counts = lambda usage: (usage.prompt_tokens, usage.reused, usage.recomputed, usage.packet)
        assert counts(a) == counts(b) and a.packet == 16 * len(a.chunks) * (policy == "packet-4")
        fields = lambda c: (c.key, c.tokens, c.reused, c.reason or "")
        stored = [(fields(c), fields(d)) for c, d in zip(a.chunks, b.chunks) if c.tier != "compiled"]
        assert all(c == d for c, d in stored)
        assert [s.end for s in a.trace[:-1]] == [s.start for s in a.trace[1:]]
        assert a.trace[-1].end == a.prompt_tokens
    # the native engine has read what vLLM compiled, and compiled nothing itself
    if policy != "full":
        assert native.stats()["counters"].get("tokens_compiled", 0) == 0
        assert bench.counters()["tokens_compiled"] > 0


def test_fifty_held_out_questions_get_the_greedy_answers_of_transformers(bench):
    """With nothing linked."""
    processor = AutoProcessor.from_pretrained(SMALL)
    model = LlavaForConditionalGeneration.from_pretrained(SMALL, dtype=torch.float32).eval()
    generator, tasks = Generator(1234, "eval"), sorted(EVAL_TASKS)
    right = 0
    for number in range(50):
        conversation = generator.task(tasks[number % len(tasks)], 1 + number % 5)
        asked = messages(conversation)[:-1]
        text = processor.apply_chat_template(asked, add_generation_prompt=True)
        parts = [part for turn in conversation.turns for part in turn.user]
        images = [PILImage.fromarray(part.pixels) for part in parts if isinstance(part, Image)]
        inputs = processor(text=text, images=images or None, return_tensors="pt", add_special_tokens=False)
        with torch.no_grad():
            generated = model.generate(**inputs, do_sample=False, max_new_tokens=24)
        expected = tuple(generated[0, inputs.input_ids.shape[1] :].tolist())
        answer = bench.ask(bench.prompt(messages_of(conversation)), "full", tokens=24)
        assert answer.usage.prompt_tokens == inputs.input_ids.shape[1]
        assert answer.token_ids == expected, (conversation.task, answer.text)
        right += answer.text.strip() == conversation.turns[-1].answer
    assert right > 50 / 2  # they are questions that it can answer, not noise that happens to agree


def test_an_engine_whose_links_differ_from_a_plain_prefill_is_refused(bench, monkeypatch):
    link_test(bench.engine.model, bench.engine.submit)

    def damaged(path, made, *args):
        write(path, ChunkKV(made.key, made.inputs, made.kv * 1.5), *args)

    monkeypatch.setattr("mpic.engine.vllm.frontend.spool.write", damaged)
    with pytest.raises(ModelRefused, match="does not give what a plain prefill gives"):
        link_test(bench.engine.model, bench.engine.submit)


def test_an_engine_that_computes_a_chunk_instead_of_linking_it_is_refused(bench, monkeypatch):
    """Its answer is that of a plain prefill, which says nothing about links."""

    def cut_off(path, made, *args):
        write(path, made, *args)
        path.write_bytes(path.read_bytes()[:-1])

    monkeypatch.setattr("mpic.engine.vllm.frontend.spool.write", cut_off)
    with pytest.raises(ModelRefused, match=r"0 of 45 tokens.*corrupt"):
        link_test(bench.engine.model, bench.engine.submit)


def test_the_chunk_of_the_self_test_is_kept_nowhere(bench):
    link_test(bench.engine.model, bench.engine.submit)
    idle(bench)
    assert not bench.library.catalog.read("SELECT * FROM chunks WHERE owner = ?", OWNER)
    assert not list((bench.library.root / "spool").iterdir())


@pytest.mark.parametrize("policy", ["legolink-0", "packet"])
def test_a_file_of_the_native_engine_is_linked_by_vllm(bench, native, policy):
    prompt = bench.prompt("IMAGE#TOWER In image TOWER, which digit do you see?")
    tokens = native.compile(prompt.chunks[0], parse_policy(policy).wrapping).result(60)
    before = bench.counters()["tokens_compiled"]
    ours = bench.ask(prompt, policy, logprobs=3)
    theirs = bench.ask(prompt, policy, native, logprobs=3)
    assert bench.counters()["tokens_compiled"] == before
    assert [(c.tier, c.reused) for c in ours.usage.chunks] == [("disk", tokens)]
    assert ours.token_ids == theirs.token_ids
    for a, b in zip(ours.logprobs, theirs.logprobs):
        assert a.logprob == pytest.approx(b.logprob, abs=1e-3)
        assert [t for t, _ in a.top] == [t for t, _ in b.top]


@pytest.mark.parametrize("wrapping", WRAPPINGS)
def test_both_engines_compile_the_same(bench, native, wrapping):
    compile_the_same(bench, native, wrapping)


@pytest.mark.parametrize("policy", ["prefix", "mpic-16", "packet"])
def test_a_second_turn_finds_the_users_own_blocks_and_no_others(bench, policy):
    first = of(bench, "Some words to begin with", bench.text("A tale of a cat. " * 12), "and a question?")
    answer = bench.ask(first, policy, ignore_eos=True)
    assert answer.usage.prefix_hit == 0
    said = TextSegment((*first.segments[-1].token_ids, *answer.token_ids, 40, 41))
    second = Prompt((*first.segments[:-1], said))
    again, other = bench.ask(second, policy), bench.ask(second, policy, user="another")
    assert again.usage.prefix_hit > 0 and whole(again.usage)
    assert other.usage.prefix_hit == 0
    assert again.token_ids == other.token_ids
    assert bench.ask(second, "full").usage.prefix_hit == 0


def test_streams_end_by_abort_and_leave_nothing(bench):
    stream = bench.submit(of(bench, "Tell me"), "full", tokens=1500, ignore_eos=True)
    seen = 0
    for delta in stream:
        seen += len(delta.token_ids)
        if seen >= 3:
            stream.abort()
            stream.abort()
    assert delta.finish_reason == "abort" and delta.usage.completion_tokens < 1500
    idle(bench)
    assert bench.engine.stats()["running"] == 0


def test_stop_strings_seeds_and_limits(bench):
    prompt = of(bench, "Tell me")
    free = bench.ask(prompt, "full", tokens=12, ignore_eos=True)
    assert free.finish_reason == "length" and len(free.token_ids) == 12
    stop = next(word for word in free.text.split() if len(word) > 1)
    cut = bench.ask(prompt, "full", tokens=12, ignore_eos=True, stop=(stop,))
    assert cut.finish_reason == "stop" and cut.text == free.text[: free.text.index(stop)]
    hot = dict(tokens=12, temperature=1.5, top_p=0.9, top_k=50, ignore_eos=True)
    one, two = (bench.ask(prompt, "full", seed=5, **hot).token_ids for _ in range(2))
    assert one == two != bench.ask(prompt, "full", seed=6, **hot).token_ids


def test_a_chunk_of_many_requests_is_compiled_once(bench):
    chunk = bench.text("The lighthouse keeper has a boat and a goat. " * 9)
    before = bench.counters()["tokens_compiled"]
    asked = [bench.submit(of(bench, f"Number {i}", chunk, "who?"), "mpic-16", tokens=2) for i in range(6)]
    done = bench.engine.compile(chunk)
    uses = [stream.result().usage.chunks[0] for stream in asked]
    assert done.result(60) == len(chunk.token_ids)
    assert bench.counters()["tokens_compiled"] - before == len(chunk.token_ids)
    assert "compiled" in (tiers := {use.tier for use in uses}) and tiers <= {"compiled", "disk"}


def test_nothing_of_a_deleted_chunk_is_found_again(bench):
    content = ("The gardener grows pears and plums. " * 12).encode()

    def linked(policy):
        chunk = bench.library.files.chunk("local", file)
        answer = bench.ask(of(bench, "It says", chunk, "What grows?"), policy, tokens=2)
        return answer.usage

    file = bench.library.files.add("local", content, "garden.txt")
    for policy in ("mpic-16", "prefix"):
        linked(policy)
        assert linked(policy).prefix_hit > 0
    gone = bench.library.files.chunk("local", file)
    removed = bench.library.files.delete("local", file.id)
    bench.engine.forget(*removed.chunks)
    assert not bench.file_of(gone).exists()
    with pytest.raises(FileNotFound):
        bench.library.files.chunk("local", file.id)
    file = bench.library.files.add("local", content, "garden.txt")
    assert linked("prefix").prefix_hit == 0
    usage = linked("mpic-16")
    assert usage.prefix_hit == 0 and usage.chunks[0].tier == "compiled"


def test_a_chunk_deleted_while_it_is_linked_is_not_stored_again(bench):
    file = bench.library.files.add("local", b"The baker sells bread and rolls. " * 12, "baker.txt")
    chunk = bench.library.files.chunk("local", file)
    stream = bench.submit(of(bench, "It says", chunk, "What?"), "mpic-16")
    bench.engine.forget(*bench.library.files.delete("local", file.id).chunks)
    assert stream.result().finish_reason in ("stop", "length")
    assert not bench.file_of(chunk).exists()


@pytest.mark.parametrize("handle, how", [("BEACH", Path.unlink), ("PARTY", damage)])
@pytest.mark.parametrize("policy", ["legolink-0", "packet"])
def test_a_lost_image_is_compiled_again_for_the_request_that_needs_it(bench, handle, how, policy):
    prompt, reason = lost(bench, f"IMAGE#{handle} How many shapes do you see?", how, policy)
    met = bench.ask(prompt, policy)
    [use] = met.usage.chunks
    assert (use.tier, use.reason) == ("compiled", reason)
    assert whole(met.usage) and met.usage.compiled == use.tokens
    after = bench.ask(prompt, policy, user="another")
    assert after.usage.chunks[0].tier == "disk" and after.token_ids == met.token_ids


@pytest.mark.parametrize("handle, how", [("VERA", Path.unlink), ("NICO", damage)])
@pytest.mark.parametrize(("policy", "whole_policy"), [("legolink-0", "full"), ("packet", "packet-1000000")])
def test_a_lost_document_is_computed_in_place_as_the_usage_says_and_compiled_by_the_next_request(
    bench, native, handle, how, policy, whole_policy
):
    prompt, reason = lost(bench, f"FILE#{handle} Where is it?", how, policy)
    failures = bench.counters().get("load_failures", 0)
    met = bench.ask(prompt, policy, trace=True, logprobs=1)
    [use] = met.usage.chunks
    assert (use.tier, use.reason) == ("none", reason)
    assert (use.reused, use.recomputed, met.usage.reused) == (0, use.tokens, 0) and whole(met.usage)
    assert {span.state for span in met.usage.trace} == {"new", "recomputed"}
    expected = bench.ask(prompt, whole_policy, native, logprobs=1)
    assert met.token_ids == expected.token_ids
    for a, b in zip(met.logprobs, expected.logprobs):
        assert a.logprob == pytest.approx(b.logprob, abs=1e-3)
    idle(bench)
    until(lambda: not bench.engine.compiler.files.rechecks)
    assert bench.counters()["load_failures"] == failures + 1
    second, third = (bench.ask(prompt, policy, user=user) for user in ("second", "third"))
    for answer, outcome in ((second, ("compiled", "corrupt")), (third, ("disk", None))):
        [use] = answer.usage.chunks
        assert (use.tier, use.reason) == outcome and use.reused == use.tokens and whole(answer.usage)
    assert second.token_ids == third.token_ids


@pytest.mark.parametrize("damaged", [False, True])
@pytest.mark.parametrize("handle", ["IMAGE#MAP7", "FILE#TOMA"])
def test_a_chunk_that_only_a_farther_tier_has_is_copied_to_the_disk_or_compiled(
    bench, monkeypatch, handle, damaged
):
    remote, store = Remote(), bench.library.store
    prompt = bench.prompt(f"{handle} What is there?")
    [chunk] = prompt.chunks
    expected = bench.ask(prompt, "reuse", user=f"before {damaged}")
    key = bench.engine.compiler.key(chunk)
    stored = store.open(key)
    kv = torch.empty(bench.engine.model.shape.extent(len(stored.inputs)))
    assert len(list(stored.read_layers(kv))) == len(kv)
    remote.save(ChunkKV(key, stored.inputs, kv))
    drop(store, key, bench.library.catalog)
    if damaged:
        monkeypatch.setattr(Remote.Chunk, "read_layers", Mock(side_effect=CorruptFile("gone bad")))
    for owner in (bench.engine.compiler, bench.engine.compiler.files):
        monkeypatch.setattr(owner, "_store", TieredStore(store, (), [remote]))
    answer = bench.ask(prompt, "reuse", user=f"after {damaged}")
    [use] = answer.usage.chunks
    assert use.tier == ("compiled" if damaged else "remote")
    assert bench.file_of(chunk).exists() and answer.token_ids == expected.token_ids
    assert (use.reused, answer.usage.recomputed) == (use.tokens, 0) and whole(answer.usage)


def test_an_answer_that_ends_by_a_stop_string_says_what_became_of_its_chunks(bench):
    prompt, reason = lost(bench, "FILE#KARO Where is it?", damage)
    free = bench.ask(prompt, "full", tokens=6, ignore_eos=True)
    met = bench.ask(prompt, "legolink-0", tokens=6, ignore_eos=True, stop=(free.text[:1],))
    [use] = met.usage.chunks
    assert met.finish_reason == "stop" and (use.tier, use.reason, use.reused) == ("none", reason, 0)


def test_a_full_store_costs_no_answer(bench, monkeypatch):
    chunk = bench.text("The postman walks up the hill with a bag. " * 6)
    prompt = of(bench, "Read", chunk, "who?")
    monkeypatch.setattr(bench.library.store, "save", Mock(side_effect=StorageFull("no room")))
    answer = bench.ask(prompt, "reuse", ignore_eos=True)
    assert answer.usage.chunks[0].tier == "compiled" and answer.usage.reused == len(chunk.token_ids)
    with pytest.raises(StorageFull):
        bench.engine.compile(chunk).result(60)
    monkeypatch.undo()
    kept = bench.ask(prompt, "reuse", user="another", ignore_eos=True)
    assert bench.file_of(chunk).exists() and answer.token_ids == kept.token_ids


def test_a_prompt_whose_images_exceed_the_users_room_in_the_store_is_answered(bench, monkeypatch):
    """Each of them that is saved evicts another one."""
    monkeypatch.setattr(
        bench.engine.compiler, "_slots", Gate(1, rows=1)
    )  # so that none is saved beside another
    found = bench.prompt("IMAGE#BEACH IMAGE#PARTY IMAGE#MAP7 How many shapes do you see?")
    own = lambda part: (
        replace(part, chunk=replace(part.chunk, owner="crowded")) if hasattr(part, "chunk") else part
    )
    prompt = Prompt(tuple(map(own, found.segments)))
    bench.engine.compile(found.chunks[0]).result(60)
    size = bench.file_of(found.chunks[0]).stat().st_size
    bench.library.set_quota("crowded", disk=size + size // 2)
    failures = bench.counters().get("load_failures", 0)
    met = bench.ask(prompt, "reuse", user="crowded")
    assert all((use.tier, use.reused) == ("compiled", use.tokens) for use in met.usage.chunks)
    assert met.usage.saved == met.usage.prefix_hit  # nothing that it compiled itself
    assert whole(met.usage) and met.token_ids == bench.ask(found, "reuse", user="roomy").token_ids
    assert sum(bench.file_of(chunk).exists() for chunk in prompt.chunks) == 1
    assert bench.counters()["load_failures"] == failures + 1


@pytest.mark.parametrize("behind", [0.0, 0.2])
@pytest.mark.parametrize("policy", ["mpic-16", "packet"])
def test_an_answer_whose_image_is_lost_when_it_is_preempted_goes_on_as_if_it_had_not_been(
    bench, monkeypatch, policy, behind
):
    """``behind``: seconds by which the answer's reader is slower than vLLM."""
    prompt = bench.prompt("IMAGE#BEACH FILE#VERA How many shapes do you see?")
    asked = {"tokens": 12, "ignore_eos": True, "logprobs": 1}
    expected = bench.ask(prompt, policy, user="undisturbed", **asked)
    generate, orders = bench.engine.client.generate, []

    async def preempted(given, params):
        """Play what vLLM says when a link that is preempted after three tokens finds that a file has gone. An output
        has more than one token when its reader is behind, so that the third output need not be the third token."""
        cut = params.max_tokens > 1 and not orders
        orders.extend([given] if params.max_tokens > 1 else [])
        params.max_tokens = 3 if cut else params.max_tokens
        async with aclosing(generate(given, params)) as outputs:
            async for output in outputs:
                if cut:
                    output.outputs[0].finish_reason = None
                yield output
                await asyncio.sleep(behind)
        if cut:
            bench.file_of(prompt.chunks[0], parse_policy(policy).wrapping).unlink()
            output.outputs = [SimpleNamespace(token_ids=[], finish_reason="error", logprobs=None)]
            output.kv_transfer_params = {"mpic": {"error": "missing", "message": "it does not exist"}}
            yield output

    monkeypatch.setattr(bench.engine.client, "generate", preempted)
    met = bench.ask(prompt, policy, user="preempted", **asked)
    assert met.token_ids == expected.token_ids and met.text == expected.text
    for a, b in zip(met.logprobs, expected.logprobs, strict=True):
        assert a.logprob == pytest.approx(b.logprob, abs=1e-3)
    assert len(orders) == 2 and len(orders[1].ids) == len(orders[0].ids) + 3
    assert whole(met.usage) and met.usage.prompt_tokens == expected.usage.prompt_tokens
    assert [use.tier for use in met.usage.chunks] == ["compiled", "disk"]


@pytest.mark.parametrize("policy", ["mpic-16", "prefix"])
def test_the_model_searches_reads_and_answers_as_on_the_native_engine(bench, native, policy):
    shelf = bench.library.references
    reference = next((r for r in shelf.listing().references if r.title == "Ladder"), None) or asyncio.run(
        shelf.add(b"The code of the ladder is 104.", "x.txt", title="Ladder")
    )
    search = lambda query, *rest: [SearchHit(shelf.get(reference.id), 0.9)]
    retriever = SimpleNamespace(library=bench.library, search=search)
    style = call_style(bench.template, RetrievalConfig())
    prompt = bench.prompt("What code does the ladder have?")
    got = []
    for engine in (bench.engine, native):
        searching = Searcher(retriever, RetrievalOptions(mode="auto"))
        retrieval = AutoRetrieval(searching, bench.template, style)
        deltas = list(bench.submit(prompt, policy, engine, tokens=32, trace=True, retrieval=retrieval))
        got.append(("".join(d.text for d in deltas), deltas[-1].usage, deltas))
    (ours, usage, deltas), (theirs, other, _) = got
    assert ours == theirs and ours.strip() == "104"
    [round], [expected] = usage.retrieval, other.retrieval
    assert [c["reference_id"] for c in round.citations] == [reference.id] and round.error is None
    assert (round.tokens, round.reused, round.at) == (expected.tokens, expected.reused, expected.at)
    assert whole(usage) and usage.prompt_tokens == other.prompt_tokens
    assert reference.id in [span.file_id for span in usage.trace]
    cited = next(i for i, d in enumerate(deltas) if d.retrieval)
    assert not any(d.text.strip() for d in deltas[:cited]) and round.link_ms > 0


def test_impossible_requests_are_refused_at_once_and_by_name(bench):
    prompt = of(bench, "Tell me")
    for policy, says in (("cacheblend-10", "engine = native"), ("reuse-2step", "two steps")):
        with pytest.raises(UnsupportedParameter, match=says) as caught:
            bench.ask(prompt, policy)
        assert caught.value.param == "mpic.policy"
    with pytest.raises(ContextLengthExceeded, match="context is 2048"):
        bench.ask(prompt, "full", tokens=4000)
    with pytest.raises(ContextLengthExceeded):
        bench.ask(of(bench, bench.text("word " * 3000), "so?"), "mpic-16")
    with pytest.raises(EmptyPrompt):
        bench.ask(Prompt(()), "full")
    with pytest.raises(UnsupportedParameter):
        bench.ask(prompt, "full", top_p=0.0)

    broken = Mock(side_effect=InvalidImage("it has no pixels"))
    chunk = Chunk(ChunkKey("image", "0" * 64), "local", load_image=broken)
    for policy in ("full", "mpic-16"):
        with pytest.raises(InvalidImage, match="no pixels"):
            bench.ask(of(bench, "See", chunk, "what?"), policy)


def test_a_flood_is_refused_and_the_others_are_answered(bench, monkeypatch):
    config = bench.engine._config
    monkeypatch.setattr(bench.engine, "_config", config.__class__(max_waiting=1))
    monkeypatch.setattr(bench.engine._gate, "places", 2)
    streams = [bench.submit(of(bench, "Go"), "full", tokens=200, ignore_eos=True) for _ in range(3)]
    with pytest.raises(QueueFull):
        bench.ask(of(bench, "Go"), "full")
    for stream in streams:
        assert len(stream.result().token_ids) == 200


def test_stats_and_info_describe_what_runs(bench):
    info, stats = bench.engine.info, bench.engine.stats()
    assert info.details["engine"] == "vllm" and info.details["verified"] and info.dtype == "float32"
    assert stats["pages"]["total"] > 0 and stats["pages"]["page_size"] == 32
    assert stats["counters"]["generated"] > 0 and stats["counters"]["chunk_requests"] > 0
    assert (bench.library.root / "models.json").exists()
    assert info.details["packet"] == bench.engine.model.adapter.digest
    assert {"packet", "packet-K", "legolink-K"} <= set(bench.engine.policies())


def runs(process: psutil.Process) -> bool:
    """Return whether a process has not ended. Python's tracker of shared memory never counts: it ends with ours."""
    with suppress(psutil.NoSuchProcess):
        return process.status() != psutil.STATUS_ZOMBIE and "tracker" not in str(process.cmdline())
    return False


@pytest.mark.parametrize("policy", ["full", "mpic-16"])
def test_an_answer_that_nobody_reads_leaves_vllm_and_goes_on_as_if_it_had_been_read(
    bench, monkeypatch, policy
):
    prompt = bench.prompt("IMAGE#MAP7 FILE#VERA What?")
    options = {"tokens": 80, "ignore_eos": True}
    whole_answer = bench.ask(prompt, policy, **options)
    waiting, put = [], stream_module.DeltaStream.put

    def watched(stream, item):
        waiting.append(stream._written - stream._read)
        put(stream, item)

    monkeypatch.setattr(stream_module, "UNREAD", 8)
    monkeypatch.setattr(stream_module.DeltaStream, "put", watched)
    stream, left = bench.submit(prompt, policy, **options), bench.submit(prompt, policy, **options)
    until(
        lambda: len(bench.engine._active) == 2 and all(one.stream.full for one in list(bench.engine._active))
    )
    until(lambda: not bench.engine._gate.inside())
    # the last of what was written may be the tokens of several steps, in which this process was not running
    assert max(waiting) <= 8 and all(9 <= len(one._generated) < 80 for one in bench.engine._active)
    left.abort()
    assert left.result().finish_reason == "abort"
    answer = stream.result()
    assert (answer.text, answer.token_ids) == (whole_answer.text, whole_answer.token_ids)
    assert whole(answer.usage) and answer.usage.prompt_tokens == whole_answer.usage.prompt_tokens
    assert answer.usage.completion_tokens == 80


GRAMMAR = Grammar(
    'start: "[" item (", " item){11} "]"\nitem: %json {"enum": ["red", "green", 12, null]}',
    (("response_format", ""),),
)


@pytest.mark.parametrize("policy", ["full", "mpic-16"])
def test_both_engines_give_the_same_answer_in_a_form(bench, native, policy):
    """Also one that leaves vLLM in its middle, because nobody reads it: it goes on in its grammar."""
    prompt = bench.prompt("IMAGE#MAP7 FILE#VERA What?")
    ours, theirs = (
        bench.ask(prompt, policy, engine, tokens=100, grammar=GRAMMAR) for engine in (bench.engine, native)
    )
    assert (ours.text, ours.finish_reason) == (theirs.text, theirs.finish_reason)
    assert len(json.loads(ours.text)) == 12 and ours.finish_reason == "stop"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stream_module, "UNREAD", 8)
        stream = bench.submit(prompt, policy, tokens=100, grammar=GRAMMAR)
        until(lambda: bench.engine._active and all(one.stream.full for one in list(bench.engine._active)))
        until(lambda: not bench.engine._gate.inside())
        assert stream.result().text == ours.text
    [plain] = [bench.ask(prompt, policy, tokens=6, ignore_eos=True)]
    assert plain.usage.completion_tokens == 6


def test_a_form_that_cannot_be_followed_is_refused_before_vllm_sees_it(bench):
    lark = "start: /(a/"
    with pytest.raises(InvalidGrammar, match="unclosed") as refused:
        bench.submit(of(bench, "Go"), "full", grammar=Grammar(lark, (("structured_outputs.regex", lark),)))
    assert refused.value.param == "structured_outputs.regex"
    wide = Grammar("start: /(a|b)c{100000000}/", (("structured_outputs.regex", "start: /a/"),))
    with pytest.raises(GrammarTooComplex):
        bench.ask(of(bench, "Go"), "full", grammar=wide, tokens=1000)
    assert bench.ask(of(bench, "Go"), "full", tokens=2).token_ids


def test_closing_ends_what_runs_and_leaves_no_process(bench):
    stream = bench.submit(of(bench, "Go"), "full", tokens=1500, ignore_eos=True)
    next(iter(stream))
    bench.engine.close()
    with pytest.raises(EngineStopped):
        stream.result()
    with pytest.raises(EngineStopped):
        bench.ask(of(bench, "Go"), "full")
    with pytest.raises(EngineStopped):
        bench.engine.ready()
    bench.engine.close()
    until(lambda: not any(map(runs, bench.processes)))
    assert not (bench.library.root / "spool").exists()
