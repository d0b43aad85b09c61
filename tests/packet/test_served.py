"""The bundled models with their adapters, as a server loads them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from small_models import SMALL, SMALL_PLAIN, SMALL_SAMPLES

from mpic.config import EngineConfig
from mpic.engine import load_engine
from mpic.engine.base import GenerationRequest, Sampling
from mpic.library import Limits, decode_image
from mpic.link import parse_policy
from mpic.packet.adapter import PLACE
from mpic.prompt import ChatTemplate, build_prompt
from mpic_lab.eval.resolve import LocalResolver
from mpic_lab.generator.client import data_url


def picture(name: str) -> dict[str, str]:
    image = decode_image((SMALL_SAMPLES / f"{name.lower()}.png").read_bytes(), Limits())
    return {"type": "image", "image": data_url(image), "name": name}


@pytest.mark.parametrize("folder", [SMALL, SMALL_PLAIN], ids=lambda folder: folder.name)
def test_a_bundled_model_answers_over_packets(folder):
    config = EngineConfig(model=str(folder), policy="packet", pool_bytes=1 << 26)
    engine, processor = load_engine(config)
    try:
        assert (folder / PLACE).exists() and {"packet", "packet-K"} <= set(engine.policies())
        template = ChatTemplate(processor)
        resolver = LocalResolver(template, "local")
        question = "What is the colour of the ring in image LOUVRE2025?"  # the README's
        parts = [picture("EIFFEL2025"), picture("LOUVRE2025"), {"type": "text", "text": question}]
        prompt = build_prompt([{"role": "user", "content": parts}], template, resolver, [])
        said = {}
        for policy in ("full", "packet", "packet-16"):
            request = GenerationRequest(policy, prompt, parse_policy(policy), Sampling(max_tokens=8), policy)
            said[policy] = engine.submit(request).result()
        usage = said["packet"].usage
        assert usage.packet == 32 and usage.recomputed == 0 and usage.reused == 2 * (64 + 16)
        assert {answer.text.strip() for answer in said.values()} == {"yellow"}
        other = replace(request, id="other", user="another")
        assert engine.submit(other).result().text == said["full"].text
    finally:
        engine.close()
