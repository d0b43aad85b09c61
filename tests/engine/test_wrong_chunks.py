"""Chunk files with sound checksums and contents that the model cannot take: the answer is right, the file is moved
aside and compiled again, and nobody else's answer changes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from engine_kit import (
    assert_same,
    family,
    ids,
    image_chunk,
    prompt_of,
    request_of,
    submit,
    text_chunk,
    until,
)
from families import random_image
from library_tools import Remote
from slow_device import SlowDevice
from video_kit import animation, clip_chunk, pictures, video_family

from mpic.errors import CompileFailed
from mpic.kv.chunk import ChunkKV, KVKey
from mpic.kv.expected import all_finite
from mpic.kv.file import ChunkFile, write
from mpic.kv.staging import Staging
from mpic.library import Library
from mpic.link import parse_policy

TEXT, IMAGE, OTHERS = (
    text_chunk(ids(40, 33)),
    image_chunk(random_image(3, 96, 64)),
    text_chunk(ids(41, 21), "bob"),
)
CLIP = clip_chunk(animation(pictures(1, 5)))
BESIDE = prompt_of(ids(7, 6), OTHERS, ids(8, 4))
"""The prompt of another user, whose answer runs meanwhile."""
NAN = float("nan")


def inputs(**changes):
    """Return a change of inputs: each field becomes what a function of the old inputs returns."""
    return lambda old, kv: (replace(old, **{name: change(old) for name, change in changes.items()}), kv)


def put(values, at, value):
    values = values.clone()
    values[at] = value
    return values


def one_token_less(old, kv):
    less = {"token_ids": old.token_ids[1:], "positions": old.positions[:, :-1].contiguous()}
    if old.embeds is not None:
        less["embeds"] = old.embeds[1:]
    if old.deepstack is not None:
        less["deepstack"] = old.deepstack[:, 1:].contiguous()
    return replace(old, **less, rotary_length=int(less["positions"].max()) + 1), kv[:, :, :, 1:]


IDS = {
    "an id that no table has": inputs(token_ids=lambda old: put(old.token_ids, 2, 10**6)),
    "an id below 0": inputs(token_ids=lambda old: put(old.token_ids, 0, -1)),
    "the ids of other tokens": inputs(token_ids=lambda old: (old.token_ids + 1) % 250),
    "ids of another type": inputs(token_ids=lambda old: old.token_ids.double()),
}
EMBEDDINGS = {
    "fewer embeddings": inputs(embeds=lambda old: old.embeds[:-1]),
    "one more embedding": inputs(embeds=lambda old: torch.cat([old.embeds, old.embeds[:1]])),
    "no embeddings": inputs(embeds=lambda old: None),
    "wider embeddings": inputs(embeds=lambda old: old.embeds.repeat(1, 2)),
    "embeddings in float64": inputs(embeds=lambda old: old.embeds.double()),
    "embeddings in float16": inputs(embeds=lambda old: old.embeds.half()),
    "embeddings in int64": inputs(embeds=lambda old: old.embeds.long()),
    "an embedding that is NaN": inputs(embeds=lambda old: put(old.embeds, (1, 1), NAN)),
}
FEATURES = {
    "no features": inputs(deepstack=lambda old: None),
    "features of fewer layers": inputs(deepstack=lambda old: old.deepstack[:-1]),
    "features in float64": inputs(deepstack=lambda old: old.deepstack.double()),
    "a feature that is infinite": inputs(deepstack=lambda old: put(old.deepstack, (0, 0, 0), float("inf"))),
}
POSITIONS = {
    "fewer positions": inputs(positions=lambda old: old.positions[:, 1:].contiguous()),
    "positions of two axes": inputs(positions=lambda old: old.positions[:1].repeat(2, 1)),
    "positions below 0": inputs(positions=lambda old: old.positions - 1),
    "a position beyond counting": inputs(positions=lambda old: put(old.positions, (0, 1), 1 << 62)),
    "positions in float32": inputs(positions=lambda old: old.positions.float()),
    "no rotary length": inputs(rotary_length=lambda old: 0),
    "a rotary length beyond counting": inputs(rotary_length=lambda old: 1 << 70),
}
KV = {
    "a key that is NaN": lambda old, kv: (old, put(kv, (-1, 0, 0, -1, 0), NAN)),
    "an infinite value": lambda old, kv: (old, put(kv, (0, -1, 0, 0, 3), float("-inf"))),
    "one token less": one_token_less,
    "more heads": lambda old, kv: (old, kv.repeat(1, 1, 2, 1, 1)),
    "wider heads": lambda old, kv: (old, kv.repeat(1, 1, 1, 1, 2)),
    "fewer layers": lambda old, kv: (old, kv[:-1]),
}
OF_A_TEXT = IDS | POSITIONS | KV | {"embeddings": inputs(embeds=lambda old: torch.zeros(len(old), 64))}
OF_AN_IMAGE = IDS | EMBEDDINGS | FEATURES | POSITIONS | KV
OF_A_PACKET = {**IDS, "fewer embeddings": EMBEDDINGS["fewer embeddings"], **KV}


def prompt(chunk):
    return prompt_of(ids(1, 5), chunk, ids(2, 4))


@pytest.fixture
def start(make_engine, tmp_path):
    """Return an engine over a library in which the chunks are compiled, nothing of them resident, and the library."""
    libraries = []

    def make(name, chunks, policy="reuse", loaded=None, **options):
        if not libraries:
            libraries.append(Library.open(tmp_path / "library", **options))
            first = make_engine(name, loaded, store=libraries[0].store)
            for chunk in chunks:
                first.compile(chunk, parse_policy(policy).wrapping).result(60)
            first.close()
        return make_engine(name, loaded, store=libraries[0].store), libraries[0]

    yield make
    for library in libraries:
        library.close()


def contents(path) -> ChunkKV:
    file = ChunkFile(path)
    kv = torch.empty(file.shape.extent(file.slots), dtype=file.dtype)
    list(file.read_layers(kv))
    return ChunkKV(file.key, file.inputs, kv)


def rewrite(library, key: KVKey, change) -> None:
    """Replace a chunk's file by one of the same key with other contents and their checksums."""
    old = contents(library.store.path(key))
    changed, kv = change(old.inputs, old.kv)
    write(library.store.path(key), ChunkKV(key, changed, kv.contiguous()))


def beside_of(engine):
    """The answer of the other user: its stream, of which the first token has been read."""
    stream = submit(engine, BESIDE, "mpic-4", 24)
    next(iter(stream))
    return stream


def asked(engine, chunk, policy):
    """The tokens that answer the prompt, and their log-probabilities."""
    answer = engine.submit(request_of(prompt(chunk), policy, 4, logprobs=0)).result()
    return list(answer.token_ids), torch.tensor([one.logprob for one in answer.logprobs])


def check(start, name, chunk, policy, change, fam=None, beside=lambda engine: None):
    """Answer a prompt over a wrong file while another user's answer runs, and once more afterwards.

    Args:
        beside: called with an engine before it is asked.
    """
    loaded = (fam or family(name)).loaded
    engine, library = start(name, [chunk, OTHERS], policy, loaded)
    key = engine.linker.key(chunk, parse_policy(policy).wrapping)
    path = library.store.path(key)
    expected = asked(engine, chunk, policy)
    others = beside_of(engine).result().token_ids
    engine.close()
    good = contents(path)
    rewrite(library, key, change)

    engine, _ = start(name, [], policy, loaded)
    beside(engine)
    running = beside_of(engine)
    answer = submit(engine, prompt(chunk), policy).result()
    assert running.result().token_ids == others
    assert list(answer.token_ids) == expected[0]
    use = answer.usage.chunks[0]
    assert (use.tier, use.reason) == ("compiled", "corrupt")
    engine.close()
    assert library.store.stats()["corrupt"] == 1

    again = contents(path)
    assert torch.equal(again.inputs.token_ids, good.inputs.token_ids)
    assert (again.kv - good.kv).abs().max() < 1e-5
    engine, _ = start(name, [], policy, loaded)
    assert_same(asked(engine, chunk, policy), expected)
    assert library.store.stats()["corrupt"] == 1


@pytest.mark.parametrize("policy", ["reuse", "mpic-4"])
@pytest.mark.parametrize("kind", OF_A_TEXT)
def test_a_text_whose_file_is_wrong_is_compiled_again_beside_anothers_answer(kind, policy, start):
    check(start, "llama", TEXT, policy, OF_A_TEXT[kind])


@pytest.mark.parametrize("kind", OF_AN_IMAGE)
def test_an_image_whose_file_is_wrong_is_compiled_again_beside_anothers_answer(kind, start):
    """Qwen3-VL has rotary positions of three axes and features for several layers."""
    check(start, "qwen3_vl", IMAGE, "mpic-4", OF_AN_IMAGE[kind])


@pytest.mark.parametrize("kind", IDS | EMBEDDINGS | KV)
def test_an_image_of_one_axis_whose_file_is_wrong_is_compiled_again(kind, start):
    check(start, "llava", IMAGE, "reuse", OF_AN_IMAGE[kind])


@pytest.mark.parametrize("kind", OF_A_PACKET)
def test_a_packet_whose_file_is_wrong_is_compiled_again(kind, start):
    check(start, "llama", TEXT, "packet", OF_A_PACKET[kind])


@pytest.mark.parametrize(
    "kind", ["ids of another type", "fewer embeddings", "positions below 0", "a key that is NaN"]
)
def test_a_clip_whose_file_is_wrong_is_compiled_again(kind, start):
    fam = video_family("qwen2_5_vl")
    check(start, "qwen2_5_vl", CLIP, "mpic-4", OF_AN_IMAGE[kind], fam)


@pytest.mark.parametrize("kind", ["the ids of other tokens", *KV])
def test_latents_whose_file_is_wrong_are_compiled_again(kind, start):
    check(start, "deepseek", TEXT, "reuse", KV.get(kind, IDS.get(kind)))


@pytest.mark.parametrize("kind", ["the ids of other tokens", *KV])
def test_a_wrong_file_is_found_on_its_way_to_a_device(kind, start):
    """It is read in parts, through a ring that is smaller than a layer."""
    devices = []

    def copy_beside(engine):
        devices.append(SlowDevice())
        engine.transfers.copy_beside(devices[-1], Staging(2, 512))

    check(start, "llama", TEXT, "reuse", KV.get(kind, IDS.get(kind)), beside=copy_beside)
    for device in devices:
        device.go.set()
        device.close()


@pytest.mark.parametrize("kind", ["an id below 0", "fewer embeddings", "a key that is NaN", "fewer layers"])
@pytest.mark.parametrize("tier", ["host", "remote"])
def test_a_wrong_copy_in_another_tier_is_dropped_or_passed_over(tier, kind, start):
    policy, remote = "reuse", Remote()
    options = {"host": {"host": "plain"}, "remote": {"remote": [remote]}}[tier]
    engine, library = start("llava", [IMAGE, OTHERS], policy, **options)
    expected = asked(engine, IMAGE, policy)
    key = engine.linker.key(IMAGE)
    engine.close()
    old = contents(library.store.path(key))
    changed, kv = OF_AN_IMAGE[kind](old.inputs, old.kv)
    wrong = ChunkKV(key, changed, kv.contiguous())
    if tier == "remote":
        library.store.path(key).unlink()
        remote.chunks[key] = wrong
    else:
        host = library.store._others[0]
        host._remove(key)
        host.save(wrong)
    for used in ("compiled", "host" if tier == "host" else "disk"):
        engine, _ = start("llava", [], policy)
        running = beside_of(engine)
        answer = submit(engine, prompt(IMAGE), policy).result()
        assert running.result().finish_reason == "length"
        assert list(answer.token_ids) == expected[0] and answer.usage.chunks[0].tier == used
        engine.close()


@pytest.mark.parametrize("ring", [False, True])
def test_heads_and_dimensions_that_a_layer_does_not_have_may_hold_anything(ring, start):
    engine, library = start("gemma4", [TEXT])
    key, own = engine.linker.key(TEXT), engine.model.expected(None).own
    expected = asked(engine, TEXT, "reuse")
    engine.close()

    def fill(old, kv):
        for layer, (heads, size) in zip(kv, own, strict=True):
            layer[:, heads:], layer[..., size:] = NAN, NAN
        assert not all_finite(kv)
        return old, kv

    rewrite(library, key, fill)
    engine, _ = start("gemma4", [])
    device = SlowDevice()
    if ring:
        engine.transfers.copy_beside(device, Staging(2, 512))
    answer = submit(engine, prompt(TEXT), "reuse").result()
    assert answer.usage.chunks[0].tier == "disk" and list(answer.token_ids) == expected[0]
    device.go.set()
    engine.close()
    device.close()


def test_a_chunk_that_the_model_computes_as_nan_is_not_stored(start, monkeypatch):
    engine, library = start("llama", [])
    press = engine.memory._presser.press

    def spoil(job):
        press(job)
        engine.pool.view(job.resident.extent)[1, 0, 0, -1, 0] = NAN

    monkeypatch.setattr(engine.memory._presser, "press", spoil)
    with pytest.raises(CompileFailed, match=r"layer 1 of compiled chunk .* not finite"):
        engine.compile(TEXT).result(60)
    assert library.store.find([engine.linker.key(TEXT)]) == {}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_large_numbers_are_finite_and_no_others(dtype):
    large = torch.full((4, 300), torch.finfo(dtype).max, dtype=dtype)  # whose sum is not
    assert all_finite(large) and all_finite(large[:, :0])
    for value in (NAN, float("inf"), float("-inf")):
        for values in (large, torch.zeros_like(large)):
            assert not all_finite(put(values, (3, 299), value))


def test_the_files_of_many_texts_are_not_held_open(start):
    chunks = [text_chunk(ids(50 + i, 5)) for i in range(30)]
    engine, library = start("llama", chunks)
    opened = []
    files = library.store._filesystem
    open_file, close_file = files.open, files.close
    files.open = lambda path: opened.append(open_file(path)) or opened[-1]
    files.close = lambda fd: opened.remove(fd) or close_file(fd)
    parts = [part for chunk in chunks for part in (chunk, ids(1, 2))]
    stream = submit(engine, prompt_of(ids(1, 3), *parts), "reuse", 8)
    next(iter(stream))
    until(lambda: not opened)  # while the request runs
    assert {use.tier for use in stream.result().usage.chunks} == {"disk"}
