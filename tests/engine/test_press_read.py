"""A chunk that is stored uncompressed is pressed when it has been read, instead of being compiled again."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from engine_kit import (
    TOKENS,
    MemoryChunk,
    MemoryStore,
    assert_same,
    expected_of,
    ids,
    logits_of,
    prompt_of,
    submit,
    text_chunk,
    until,
)
from extend_kit import chunks_of

from mpic.errors import StorageFull
from mpic.kv.chunk import Chunk
from mpic.press import PRESSES, parse_press

DOCUMENT, OTHER = text_chunk(ids(7, 41)), text_chunk(ids(8, 90))
FROM_FILES = [cls(50, 5).name for cls in PRESSES if not cls.needs_queries] + ["cur-50-5-4"]


def pressed(chunk: Chunk, press: str) -> Chunk:
    return replace(chunk, press=press)


def over(*chunks: Chunk):
    parts = [part for i, chunk in enumerate(chunks) for part in (ids(i, 6), chunk)]
    return prompt_of(*parts, ids(9, 4))


def answer(engine, prompt, policy: str):
    """Return tokens and log-distributions, and the tiers and reasons of the chunks."""
    answered = submit(engine, prompt, policy).result()
    uses = [(use.tier, use.reason, use.press) for use in answered.usage.chunks]
    return logits_of(SimpleNamespace(result=lambda: answered), TOKENS), uses


def form(store: MemoryStore, press: str, n: int):
    """The chunk of n tokens that is stored under a press."""
    (found,) = (c for key, c in store.chunks.items() if key.recipe.press == press and len(c.inputs) == n)
    return found


def close(got, expected):
    """Compare float32 values of one computation in steps of another size, which some processors round otherwise."""
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("policy", ["mpic-5", "legolink-0", "packet-5"])
@pytest.mark.parametrize("press", FROM_FILES)
def test_it_is_read_and_pressed_and_saved_as_if_it_had_been_compiled_so(press, policy, make_engine):
    whole, fresh = MemoryStore(), MemoryStore()
    chunks = [pressed(chunk, press) for chunk in (DOCUMENT, OTHER, DOCUMENT)]
    answer(make_engine(store=whole), over(DOCUMENT, OTHER), policy)
    until(lambda: len(whole.chunks) == 2)
    expected, uses = answer(make_engine(store=fresh), over(*chunks), policy)
    assert {tier for tier, _, _ in uses} == {"compiled"}
    engine = make_engine(store=whole)
    got, uses = answer(engine, over(*chunks), policy)
    assert got[0] == expected[0]
    close(got[1], expected[1])
    assert {tier for tier, _, _ in uses} == {"disk"} and {name for _, _, name in uses} == {press}
    assert "tokens_compiled" not in engine.stats()["counters"]
    until(lambda: len(whole.chunks) == 4 and len(fresh.chunks) == 2)
    for key, chunk in fresh.chunks.items():
        close(whole.chunks[key].kv, chunk.kv)
    engine.check()
    reads = whole.reads
    later = make_engine(store=whole)  # what was saved is read now
    close(answer(later, over(*chunks), policy)[0][1], expected[1])
    assert whole.reads == reads + 2 and len(whole.chunks) == 4
    (resident, *_) = later.device.chunks.values()
    assert resident.extent.tokens == resident.first + resident.slots
    later.check()


@pytest.mark.parametrize(
    ("press", "name"),
    [
        (press, name)
        for press in FROM_FILES
        for name in ("rotaries", "qwen2_vl", "llava")
        if name != "qwen2_vl" or not parse_press(press).needs_positions  # refused for M-RoPE
    ],
)
def test_families_with_images_and_several_rotations_are_pressed_as_when_compiled(press, name, make_engine):
    whole, fresh, chunks = MemoryStore(), MemoryStore(), chunks_of(name)
    _, uses = answer(make_engine(name, store=whole), over(*chunks), "mpic-5")
    different = sum(tier == "compiled" for tier, _, _ in uses)  # images of five tokens are recomputed whole
    until(lambda: len(whole.chunks) == different)
    for store in (fresh, whole):
        answer(make_engine(name, store=store), over(*(pressed(chunk, press) for chunk in chunks)), "mpic-5")
    until(lambda: len(fresh.chunks) == different and len(whole.chunks) == 2 * different)
    for key, chunk in fresh.chunks.items():
        close(whole.chunks[key].kv, chunk.kv)


def test_images_are_pressed_without_the_vision_encoder(make_engine):
    name = "llava"
    store, images = MemoryStore(), chunks_of(name)
    answer(make_engine(name, store=store), over(*images), "mpic-5")
    until(lambda: len(store.chunks) == len(set(c.key for c in images)))
    engine = make_engine(name, store=store)
    unreadable = [replace(c, load_image=None) if c.load_image else c for c in images]
    prompt = over(*(pressed(chunk, "knorm-50-5") for chunk in unreadable))
    _, uses = answer(engine, prompt, "mpic-5")
    assert {tier for tier, _, _ in uses} == {"disk"}


def test_no_link_may_follow_the_layers_of_a_chunk_that_is_pressed_after_them(make_engine, monkeypatch):
    store = MemoryStore()
    answer(make_engine(store=store), over(DOCUMENT, OTHER), "mpic-5")
    until(lambda: len(store.chunks) == 2)
    prompt = over(pressed(DOCUMENT, "knorm-50-5"), OTHER, pressed(OTHER, "streaming-50-5"))
    expected, _ = answer(make_engine(), prompt, "mpic-5")
    engine, follows, read = make_engine(store=store), {}, MemoryChunk.read_layers

    def watched(stored, destination):
        for resident in list(engine.device.chunks.values()):
            if not resident.ready:
                follows[resident.key.recipe.press] = resident.progress is not None
        yield from read(stored, destination)

    monkeypatch.setattr(MemoryChunk, "read_layers", watched)
    got, uses = answer(engine, prompt, "mpic-5")
    assert_same(got, expected)
    assert [tier for tier, _, _ in uses] == ["disk"] * 3
    assert not follows["knorm-50-5"] and not follows["streaming-50-5"]


@pytest.mark.parametrize("press", ["tova-50-5", "snapkv-50-5"])
def test_presses_that_look_at_queries_compile_again_and_say_so(press, make_engine):
    store = MemoryStore()
    answer(make_engine(store=store), over(DOCUMENT), "mpic-5")
    until(lambda: store.chunks)
    _, uses = answer(make_engine(store=store), over(pressed(DOCUMENT, press)), "mpic-5")
    assert uses == [("compiled", "new", press)]  # this store has no other reasons


@pytest.mark.parametrize("how", ["damaged", "failing"])
def test_what_cannot_be_read_or_pressed_is_compiled(how, make_engine, monkeypatch):
    store = MemoryStore()
    answer(make_engine(store=store), over(DOCUMENT), "mpic-5")
    until(lambda: store.chunks)
    prompt = over(pressed(DOCUMENT, "knorm-50-5"))
    expected, _ = answer(make_engine(), prompt, "mpic-5")
    engine = make_engine(store=store)
    if how == "damaged":
        store.damage(next(iter(store.chunks)))
    else:
        monkeypatch.setattr(engine.transfers._presser, "press_read", lambda resident: 1 / 0)
    got, uses = answer(engine, prompt, "mpic-5")
    assert_same(got, expected)
    assert [tier for tier, _, _ in uses] == ["compiled"]
    assert engine.stats()["counters"]["load_failures"] == 1
    until(lambda: any(key.recipe.press for key in store.chunks))


def test_an_upload_that_waits_for_such_a_load_ends_when_the_pressed_form_is_stored_or_with_its_error(
    make_engine,
):
    chunk = pressed(DOCUMENT, "knorm-50-5")
    for full in (False, True):
        store = MemoryStore()
        make_engine(store=store).compile(DOCUMENT).result(60)
        store.full, store.delay = full, 0.3
        engine = make_engine(store=store)
        stream = submit(engine, over(chunk), "mpic-5")
        future = engine.compile(chunk)  # it joins the load
        if full:
            assert isinstance(future.exception(30), StorageFull)
        else:
            assert future.result(60) == 41 and any(key.recipe.press for key in store.chunks)
        assert stream.result().usage.chunks[0].tier == "disk"


def test_uncompressed_chunks_are_never_made_of_compressed_ones(make_engine):
    store = MemoryStore()
    answer(make_engine(store=store), over(pressed(DOCUMENT, "knorm-50-5")), "mpic-5")
    until(lambda: store.chunks)
    for press in ("", "streaming-50-5"):
        prompt = over(pressed(DOCUMENT, press))
        engine = make_engine(store=store)
        got, uses = answer(engine, prompt, "mpic-5")
        assert uses[0][0] == "compiled"
        if not press:
            assert_same(got, expected_of("llama", prompt, "mpic-5"))
        store.chunks = {key: c for key, c in store.chunks.items() if key.recipe.press == "knorm-50-5"}
