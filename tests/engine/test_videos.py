"""Clips in the native engine, in fp32, against the untouched model, called as its users call it, and the oracle."""

from __future__ import annotations

import threading
from unittest.mock import Mock

import pytest
import torch
from engine_kit import (
    TOKENS,
    assert_same,
    expected_of,
    image_chunk,
    inputs_of,
    logits_of,
    prompt_of,
    request_of,
)
from families import random_image
from server_helpers import data_url
from video_kit import (
    VIDEO_FAMILIES,
    animation,
    clip_chunk,
    make_video_model,
    pictures,
    stock_answer,
    stock_inputs,
    video_family,
)

from mpic.engine.native.engine import NativeEngine
from mpic.errors import (
    ContextLengthExceeded,
    EngineStopped,
    InvalidVideo,
    ModelRefused,
    OutOfMemory,
    UnsupportedModality,
)
from mpic.imaging.clips import Clip, ClipFacts
from mpic.kv.chunk import Chunk, ChunkKey
from mpic.link import BARE
from mpic.model import load, vision
from mpic.model.clip_sampling import bytes_needed, sampler, sampling_digest
from mpic.model.loaded import LoadedModel
from mpic.model.video_selftest import video_self_test
from mpic.prompt import ChatTemplate
from mpic.prompt.template import build_prompt
from mpic_lab.eval.resolve import LocalResolver

FIRST, SECOND = pictures(1, 13), pictures(2, 10, 32, 48)
RATE = 5.0
"""Frames a second of both clips; the families see two of them."""
CLIPS = {name: animation(frames) for name, frames in (("first", FIRST), ("second", SECOND))}
PICTURE = random_image(5)


class Resolver(LocalResolver):
    """Takes clips beside images."""

    def inline_image(self, data: bytes) -> Chunk:
        return image_chunk(PICTURE, self._owner)

    def inline_clip(self, data: bytes) -> Chunk:
        return clip_chunk(data, self._owner)


def conversation() -> list[dict]:
    text = lambda words: {"type": "text", "text": words}
    return [
        {
            "role": "user",
            "content": [
                text("First "),
                {"type": "video_url", "video_url": {"url": data_url(CLIPS["first"], "video/gif")}},
                text(" then "),
                {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
                text(" and "),
                {"type": "video_url", "video_url": {"url": data_url(CLIPS["second"], "video/gif")}},
                text(" differ?"),
            ],
        }
    ]


def made_of(loaded, chunk):
    """The inputs of a clip."""
    return loaded.clip_inputs(chunk.load_clip(loaded.clip_sampler))


def prompt_for(name: str):
    template = ChatTemplate(video_family(name).loaded.processor)
    return build_prompt(conversation(), template, Resolver(template, "local"))


def expected_of_stock(name: str):
    content = conversation()[0]["content"]
    for part in content:
        part["type"] = part["type"].removesuffix("_url")
    processor = video_family(name).loaded.processor
    made = stock_inputs(processor, [{"role": "user", "content": content}], [PICTURE], [FIRST, SECOND], RATE)
    return made, stock_answer(video_family(name).stock, made, TOKENS)


@pytest.fixture
def make(make_engine):
    return lambda name: make_engine(loaded=video_family(name).loaded, adapter=None)


def run(engine: NativeEngine, prompt, policy: str):
    vocabulary = engine.model.text_config.vocab_size
    return logits_of(
        engine.submit(request_of(prompt, policy, TOKENS, logprobs=vocabulary)), TOKENS, vocabulary
    )


@pytest.mark.parametrize("name", VIDEO_FAMILIES)
def test_two_clips_and_an_image_answer_as_the_untouched_model_does(name, make):
    """Token ids, the logits of the prefill and of every token after it."""
    made, expected = expected_of_stock(name)
    prompt, loaded = prompt_for(name), video_family(name).loaded
    ids = []
    for segment in prompt.segments:
        if not hasattr(segment, "chunk"):
            ids += segment.token_ids
        elif segment.chunk.kind == "video":
            ids += made_of(loaded, segment.chunk).token_ids.tolist()
        else:
            ids += loaded.image_inputs(segment.chunk.load_image()).token_ids.tolist()
    assert ids == made["input_ids"][0].tolist()
    for policy in ("full", "mpic-1000000"):
        assert_same(run(make(name), prompt, policy), expected)


def expected_of_oracle(name: str, prompt, policy: str):
    made = lambda loaded, chunk: (made_of if chunk.load_clip else inputs_of)(loaded, chunk)
    return expected_of(name, prompt, policy, TOKENS, (), video_family(name), made)


@pytest.mark.parametrize("policy", ["reuse", "mpic-16", "mpic-5", "legolink-0", "random-30", "cacheblend-25"])
@pytest.mark.parametrize("name", VIDEO_FAMILIES)
def test_linked_clips_equal_the_oracle(name, policy, make):
    prompt, engine = prompt_for(name), make(name)
    expected = expected_of_oracle(name, prompt, policy)
    for _ in range(2):  # compiled in this request, then found on the device
        assert_same(run(engine, prompt, policy), expected)
    engine.check()


def test_a_clip_is_compiled_once_and_linked_at_other_places(make):
    engine, first = make("qwen2_5_vl"), clip_chunk(CLIPS["first"])
    compiled = []
    for before in (3, 9):
        prompt = prompt_of(list(range(10, 10 + before)), first, [40, 41])
        compiled.append(engine.submit(request_of(prompt, "mpic-4")).result().usage.compiled)
        assert_same(run(engine, prompt, "mpic-4"), expected_of_oracle("qwen2_5_vl", prompt, "mpic-4"))
    assert compiled[0] > 0 and compiled[1] == 0


@pytest.mark.parametrize("name", VIDEO_FAMILIES)
def test_the_load_time_self_test_passes(name):
    assert video_self_test(video_family(name).loaded) < 2e-5


def test_a_model_that_lays_its_clips_out_in_another_way_is_found_out(monkeypatch):
    """This selects the positions of time."""
    loaded = video_family("qwen2_5_vl").loaded
    right = loaded.clip_inputs

    def still(clip):
        inputs = right(clip)
        inputs.positions[0] = 0
        return inputs

    monkeypatch.setattr(loaded, "clip_inputs", still)
    with pytest.raises(Exception, match="differ from the stock model's"):
        video_self_test(loaded)


def test_positions_of_time_follow_the_clip_and_what_comes_behind_is_the_models_own_choice():
    """Two frames of a second apart are 4 positions apart, as ``tokens_per_second`` of the model says; the text behind
    goes on where the model lets it."""
    loaded = video_family("qwen2_5_vl").loaded
    inputs = made_of(loaded, clip_chunk(CLIPS["first"]))
    assert loaded.config.vision_config.tokens_per_second == 4
    times = sorted(set(inputs.positions[0].tolist()))
    assert len(times) > 1 and set(torch.tensor(times).diff().tolist()) <= {4, 5}
    assert inputs.rotary_length == max(inputs.positions[1].max(), inputs.positions[2].max()) + 1


def test_a_recipe_of_clips_covers_the_sampling_and_leaves_images_alone(make):
    name = "qwen2_vl"
    loaded, engine = video_family(name).loaded, make(name)
    clip, image = clip_chunk(CLIPS["first"]), Chunk(ChunkKey.of_image(PICTURE), "local")
    assert engine.linker.key(clip, BARE).recipe.preprocessing == loaded.sampling
    assert engine.linker.key(image, BARE).recipe.preprocessing == loaded.preprocessing
    videos = loaded.processor.video_processor
    videos.fps, before = 1.0, getattr(videos, "fps", None)
    try:
        assert sampling_digest(loaded.processor, loaded.preprocessing) != loaded.sampling
    finally:
        videos.fps = before
    assert sampling_digest(loaded.processor, loaded.preprocessing) == loaded.sampling


@pytest.mark.parametrize("name", VIDEO_FAMILIES)
def test_the_same_processor_made_twice_gives_the_same_recipe(name):
    made = [make_video_model(name)[1] for _ in range(2)]
    assert sampling_digest(made[0], "x") == sampling_digest(made[1], "x") != sampling_digest(made[0], "y")


def test_a_model_whose_clips_fail_the_self_test_takes_none_and_says_why(monkeypatch):
    monkeypatch.setattr(load, "video_self_test", Mock(side_effect=ModelRefused("qwen2_vl: logits differ")))
    loaded = LoadedModel(*make_video_model("qwen2_vl"), "tiny")
    assert loaded.info.modalities == ("text", "image", "video") and loaded.info.no_clips is None
    load._clips_tested(loaded)
    assert loaded.info.modalities == ("text", "image")
    with pytest.raises(
        UnsupportedModality, match=r"takes no videos \(qwen2_vl: logits differ\); send the frames"
    ):
        made_of(loaded, clip_chunk(CLIPS["first"]))
    assert loaded.info.no_clips == loaded.no_clips


def test_the_key_of_a_clip_is_of_its_bytes():
    key = clip_chunk(CLIPS["first"]).key
    assert key.kind == "video" and key == clip_chunk(bytes(CLIPS["first"])).key
    assert key != clip_chunk(CLIPS["first"] + b"\0").key


def test_a_clip_that_cannot_fit_is_refused_before_its_frames_are_decoded():
    videos = video_family("qwen2_vl").loaded.processor.video_processor
    sample = sampler(videos, 100)
    assert len(sample(ClipFacts(32, 32, 10, 5.0))) == 4
    with pytest.raises(ContextLengthExceeded, match="model's context is 100"):
        sample(ClipFacts(32, 32, 4000, 5.0))


def test_a_clip_of_fewer_frames_than_are_read_at_a_time_is_refused():
    sample = sampler(video_family("qwen2_vl").loaded.processor.video_processor, 1000)
    with pytest.raises(InvalidVideo, match="the clip has 1 frames"):
        sample(ClipFacts(32, 32, 1, 5.0))


def test_a_model_without_clips_says_what_to_send(make):
    from engine_kit import family

    loaded = family("llava").loaded
    assert "video" not in loaded.info.modalities
    with pytest.raises(UnsupportedModality, match="takes no videos; send the frames"):
        loaded.clip_inputs(Clip(ClipFacts(1, 1, 1, 1.0), (0,), None))
    with pytest.raises(UnsupportedModality, match="takes no videos; send the frames"):
        made_of(loaded, clip_chunk(CLIPS["first"]))


def test_a_clip_that_is_being_decoded_keeps_neither_others_waiting_nor_the_engine_from_closing(make):
    engine, waits, done = make("qwen2_vl"), threading.Event(), threading.Event()

    def load_clip(sample):
        waits.set()
        done.wait(60)
        raise InvalidVideo("it was not to be decoded")

    clips = [Chunk(ChunkKey.of_clip(bytes([n])), "local", load_clip=load_clip) for n in range(2)]
    decoded, queued = (engine.compile(clip) for clip in clips)
    assert waits.wait(60)
    text = Chunk(ChunkKey.of_text("words"), "local", token_ids=(5, 6, 7))
    assert engine.compile(text).result(60) == 3 and not decoded.done()
    engine.close()
    for future in (decoded, queued):
        with pytest.raises(EngineStopped):
            future.result(0)
    done.set()


def test_a_clip_for_whose_enlarged_frames_there_is_no_memory_is_a_passing_error(make, monkeypatch):
    engine = make("qwen2_5_vl")
    clip = Clip(ClipFacts(48, 32, 10, RATE), tuple(range(0, 10, 2)), None)
    assert bytes_needed(engine.model.processor.video_processor, clip) >= 3 * 3 * 4 * 5 * 48 * 32
    monkeypatch.setattr(vision, "bytes_needed", lambda processor, clip: 1 << 50)
    with pytest.raises(OutOfMemory, match="encoding the clip needs"):
        engine.compile(clip_chunk(CLIPS["first"])).result(60)
