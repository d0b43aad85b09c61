"""Gemma 3 and PaliGemma, tiny and random, through the HTTP server: images that attend to themselves in both
directions."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import families
import pytest
import torch
import transformers as tf
from PIL import Image
from server_helpers import CHATML, gemma3_processor, png, real_server, with_bos

SIZE = {"height": 32, "width": 32}
BETWEEN = "<|im_start|>user\n{}(RED) and {}(BLUE) differ in<|im_end|>\n<|im_start|>assistant\n"
"""The prompt that the template makes of the question below."""


def _gemma3() -> tuple[str, Any, str]:
    """Return a family, its processor, and the text of one image in a prompt."""
    image = "\n\n<start_of_image>" + 16 * "<image_soft_token>" + "<end_of_image>\n\n"
    return "gemma3_images", gemma3_processor(), image


def _paligemma() -> tuple[str, Any, str]:
    images = tf.SiglipImageProcessor(size=SIZE)
    images.image_seq_length = 16
    return "paligemma", tf.PaliGemmaProcessor(images, with_bos(), chat_template=CHATML), 16 * "<image>"


def save(folder: Path, name: str, processor: Any) -> Path:
    """Write a family's model, with a vocabulary as large as the processor's, as ``from_pretrained`` wants it."""
    [image] = set(processor.image_token_ids)
    ids = {"bos_token_id": None, "eos_token_id": processor.tokenizer.eos_token_id, "pad_token_id": None}
    sizes = {"vocab_size": len(processor.tokenizer), **ids}
    model, _ = families.make_model(name, text=sizes, image_token=image)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


@torch.no_grad()
def stock_answer(model: Path, text: str, images: list[bytes], is_prefix: bool, tokens: int = 4) -> str:
    """Return transformers' answer to a prompt in which every image has all of its tokens."""
    processor = tf.AutoProcessor.from_pretrained(model)
    stock = tf.AutoModelForImageTextToText.from_pretrained(model, attn_implementation="eager")
    pictures = [Image.open(io.BytesIO(data)).convert("RGB") for data in images]
    ids = processor.tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
    types = torch.isin(ids, torch.tensor(processor.image_token_ids)).long() * (not is_prefix)
    pixels = processor.image_processor(images=pictures, return_tensors="pt")["pixel_values"]
    said = stock.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        token_type_ids=types,
        pixel_values=pixels,
        max_new_tokens=tokens,
        min_new_tokens=tokens,
        do_sample=False,
    )
    return processor.tokenizer.decode(said[0, -tokens:], skip_special_tokens=True)


async def answers_of(folder: Path, model: Path, images: dict[str, bytes]) -> dict[str, tuple[str, int, int]]:
    """Return the server's answer under each policy, with the tokens that were reused and recomputed."""
    found = {}
    async with real_server(folder / "data", model, pool_bytes=1 << 22) as server:
        for handle, data in images.items():
            await server.uploaded(data, f"{handle}.png", handle=handle)
        for policy in ("full", "mpic-4", "reuse"):
            asked = {"mpic": {"policy": policy, "ignore_eos": True}, "max_tokens": 4, "temperature": 0}
            answer = await server.ask("IMAGE#RED and IMAGE#BLUE differ in", **asked)
            assert answer.status_code == 200, answer.text
            body = answer.json()
            used = body["usage"]["mpic"]["tokens"]
            found[policy] = (body["choices"][0]["message"]["content"], used["reused"], used["recomputed"])
    return found


@pytest.mark.parametrize("build", [_gemma3, _paligemma])
async def test_images_that_attend_to_themselves_are_served_as_the_stock_model_answers(tmp_path, build):
    name, processor, image = build()
    model = save(tmp_path / "model", name, processor)
    images = {"RED": png("red"), "BLUE": png("blue", (40, 30))}
    found = await answers_of(tmp_path, model, images)
    expected = stock_answer(model, BETWEEN.format(image, image), list(images.values()), name == "paligemma")
    assert found["full"] == (expected, 0, 32)
    assert [used[1:] for used in found.values()] == [(0, 32), (24, 8), (32, 0)]
