"""Clips made here, and tiny random models of the families that take them, with their stock processors."""

from __future__ import annotations

import copy
import functools
import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf
from chat_models import byte_level
from families import Family, make_model
from PIL import Image
from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor
from transformers.video_utils import VideoMetadata

from mpic.imaging.clips import FRAME_PIXELS, ClipRules
from mpic.kv.chunk import Chunk, ChunkKey
from mpic.library.intake.decode import decode_clip
from mpic.model.loaded import LoadedModel

RULES = ClipRules(FRAME_PIXELS, 200.0, 600, 128_000_000)
CONTROL = ("<|im_start|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for c in m.content %}"
    "{% if c.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif c.type == 'video' %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% elif 'text' in c %}{{ c.text }}{% endif %}{% endfor %}{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
PROCESSORS = {
    "qwen2_vl": (tf.Qwen2VLProcessor, Qwen2VLVideoProcessor, {}),
    "qwen2_5_vl": (tf.Qwen2_5_VLProcessor, Qwen2VLVideoProcessor, {}),
    "qwen3_vl": (tf.Qwen3VLProcessor, Qwen3VLVideoProcessor, {"longest_edge": 8 * 48 * 48}),
}
VIDEO_FAMILIES = list(PROCESSORS)


def pictures(seed: int, frames: int, width: int = 40, height: int = 32) -> list[Image.Image]:
    """Frames of few colours, so that a GIF keeps them as they are."""
    generator = np.random.default_rng(seed)
    blocks = generator.integers(0, 2, (frames, height // 8, width // 8, 3)) * 255
    return [Image.fromarray(b.repeat(8, 0).repeat(8, 1).astype(np.uint8)) for b in blocks]


def animation(frames: Sequence[Image.Image], delay: int = 200, format: str = "GIF") -> bytes:
    """An animated image; ``delay`` is in milliseconds."""
    out, options = io.BytesIO(), {"lossless": True} if format == "WEBP" else {}
    first, *others = frames
    first.save(out, format, save_all=True, append_images=others, duration=delay, loop=0, **options)
    return out.getvalue()


def movie(
    frames: Sequence[Image.Image], folder: Path, rate: float = 10.0, code: str = "mp4v", suffix: str = "mp4"
) -> bytes:
    """A video in a container; the test is skipped where nothing here writes one."""
    cv2 = pytest.importorskip("cv2", reason="nothing that writes and reads videos is installed")
    path = str(folder / f"movie.{suffix}")
    writer = cv2.VideoWriter(path, cv2.VideoWriter_fourcc(*code), rate, frames[0].size)
    for frame in frames:
        writer.write(np.ascontiguousarray(np.asarray(frame)[:, :, ::-1]))
    writer.release()
    data = Path(path).read_bytes()
    os.remove(path)
    return data


def clip_chunk(data: bytes, owner: str = "local") -> Chunk:
    return Chunk(
        ChunkKey.of_clip(data), owner, load_clip=lambda sample: decode_clip(data, sample), label="clip"
    )


def make_processor(name: str, images: Any) -> Any:
    cls, videos, more = PROCESSORS[name]
    size = {"shortest_edge": 16 * 16, "longest_edge": 48 * 48, **more}
    tokenizer = byte_level(*CONTROL, eos="<|im_end|>")
    return cls(images, tokenizer, videos(patch_size=8, size=size), chat_template=TEMPLATE)


def make_video_model(name: str, seed: int = 0) -> tuple[Any, Any]:
    """A family's tiny stock model and its processor."""
    vocabulary = len(byte_level(*CONTROL, eos="<|im_end|>"))
    model, images = make_model(name, seed, text={"vocab_size": vocabulary})
    processor = make_processor(name, images)
    for field, token in (
        ("image_token_id", "<|image_pad|>"),
        ("video_token_id", "<|video_pad|>"),
        ("vision_start_token_id", "<|vision_start|>"),
        ("vision_end_token_id", "<|vision_end|>"),
    ):
        setattr(model.config, field, processor.tokenizer.convert_tokens_to_ids(token))
    return model, processor


@functools.cache
def video_family(name: str) -> Family:
    model, processor = make_video_model(name)
    stock = copy.deepcopy(model)
    return Family(name, LoadedModel(model, processor, name), stock)


def save_video_model(folder: Path, name: str = "qwen2_5_vl") -> Path:
    """Write a family's model as ``from_pretrained`` wants it."""
    model, processor = make_video_model(name)
    model.generation_config.eos_token_id = processor.tokenizer.eos_token_id
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


def stock_inputs(
    processor: Any,
    messages: list[dict],
    images: list[Image.Image],
    clips: list[list[Image.Image]],
    rate: float,
) -> dict[str, torch.Tensor]:
    """Return the inputs that a stock processor makes of a conversation whose clips have ``rate`` frames a second. It
    is given all frames and samples them itself."""
    text = processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    metadata = [VideoMetadata(total_num_frames=len(c), fps=rate, duration=len(c) / rate) for c in clips]
    return processor(
        text=[text],
        images=images or None,
        videos=[np.stack([np.asarray(frame) for frame in clip]) for clip in clips],
        video_metadata=metadata,
        do_sample_frames=True,
        fps=2.0,
        return_tensors="pt",
    )


@torch.no_grad()
def stock_answer(model: Any, inputs: dict[str, torch.Tensor], tokens: int) -> tuple[list[int], torch.Tensor]:
    """Greedy ids and log-distributions of the untouched model, one whole forward for every token."""
    model.set_attn_implementation("eager")
    inputs, said, rows = dict(inputs), [], []
    for _ in range(tokens):
        model.model.rope_deltas = None
        rows.append(torch.log_softmax(model(**inputs, use_cache=False).logits[0, -1].float(), -1))
        said.append(int(rows[-1].argmax()))
        for key, value in (("input_ids", said[-1]), ("attention_mask", 1), ("mm_token_type_ids", 0)):
            inputs[key] = torch.cat([inputs[key], torch.tensor([[value]])], 1)
    return said, torch.stack(rows)
