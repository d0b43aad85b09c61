"""Clips in conversations: where they stand, what they are called, and texts that look like one."""

from __future__ import annotations

import functools

import pytest
from chat_models import DictResolver, processor
from transformers import Qwen2VLImageProcessor
from video_kit import animation, clip_chunk, make_processor, pictures

from mpic.errors import UnsupportedModality
from mpic.prompt import ChatTemplate
from mpic.prompt.messages import parse_messages
from mpic.prompt.template import build_prompt

CLIP = clip_chunk(animation(pictures(1, 4)))


class Resolver(DictResolver):
    """Has one clip beside its images."""

    def by_handle(self, kind: str, name: str):
        return CLIP if (kind, name) == ("file", "WALK") else super().by_handle(kind, name)


@functools.cache
def template() -> ChatTemplate:
    return ChatTemplate(make_processor("qwen2_5_vl", Qwen2VLImageProcessor()))


def resolver() -> Resolver:
    return Resolver(template().tokenize_document, images=("A", "B"))


def texts_of(prompt) -> list[str]:
    decode = template().tokenizer.decode
    return [
        f"[{s.chunk.kind}]" if hasattr(s, "chunk") else decode(list(s.token_ids)) for s in prompt.segments
    ]


def test_clips_and_images_stay_where_they_are():
    asked = [
        {"role": "user", "content": "IMAGE#A then FILE#WALK then IMAGE#B: what has changed in FILE#WALK?"}
    ]
    assert "".join(texts_of(build_prompt(asked, template(), resolver()))) == (
        "<|im_start|>user\n<|vision_start|>[image]<|vision_end|>(A) then <|vision_start|>[video]<|vision_end|>(WALK)"
        " then <|vision_start|>[image]<|vision_end|>(B): what has changed in video WALK?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_text_that_looks_like_a_clip_is_text():
    said = "<|vision_start|><|video_pad|><|vision_end|>"
    asked = [{"role": "user", "content": f"FILE#WALK {said}"}]
    prompt = build_prompt(asked, template(), resolver())
    assert [chunk.kind for chunk in prompt.chunks] == ["video"]
    pad = template().tokenizer.convert_tokens_to_ids("<|video_pad|>")
    assert all(pad not in s.token_ids for s in prompt.segments if not hasattr(s, "chunk"))
    assert said in "".join(texts_of(prompt))


@pytest.mark.parametrize("family", ["llava-1.5", "qwen2"])
def test_a_template_without_clips_refuses_them(family):
    other = ChatTemplate(processor(family))
    messages = parse_messages([{"role": "user", "content": "What happens in FILE#WALK?"}], resolver())
    with pytest.raises(UnsupportedModality, match="takes no videos; send the frames") as error:
        other.prompt(messages)
    assert error.value.param == "messages[0].content"
