"""A vLLM engine with a stub in vLLM's place that computes nothing."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import torch
from engine_kit import ids, prompt_of, request_of, text_chunk, until
from library_tools import make_chunk
from vllm_kit import make_tokenizer

from mpic.config import EngineConfig
from mpic.engine.vllm.frontend import compiled as exported
from mpic.engine.vllm.frontend import engine as module
from mpic.engine.vllm.frontend.loop_thread import LoopThread
from mpic.engine.vllm.frontend.model import ModelDescription
from mpic.engine.vllm.frontend.prompts import VLLMPrompt
from mpic.kv.chunk import KVKey, KVShape
from mpic.kv.expected import Expected
from mpic.link import BARE

CHUNK = text_chunk(ids(3, 5))
READ = exported.read_compiled


class Stub(LoopThread):
    """Takes the place of ``VLLMClient``. A compile waits for ``go``."""

    context, processor, dead, ending = 1024, None, False, False
    answer = make_tokenizer("llama").encode("abcdefgh", add_special_tokens=False)

    def __init__(self, *_: object) -> None:
        super().__init__("vllm-stub")
        self.go = threading.Event()
        self.compiles = 0
        self.fallbacks = [[(0, "corrupt")]]  # of the requests to come

    close = LoopThread.stop

    async def render(self, parts: list, salt: str) -> VLLMPrompt:
        return VLLMPrompt(range(5), (), None)

    async def generate(self, prompt: VLLMPrompt, params: object) -> AsyncIterator[SimpleNamespace]:
        """Answers a, b, c, ...; the first output has a report. While ``ending``, every answer is cut short."""
        fallback = self.fallbacks.pop(0) if self.fallbacks else []
        report = {"mpic": {"error": None, "fallback": fallback}}
        for i, token in enumerate(self.answer):
            cut = self.ending and i == 1
            one = SimpleNamespace(
                token_ids=[] if cut else [token], finish_reason="abort" if cut else None, logprobs=None
            )
            rest = {"metrics": None, "num_cached_tokens": 0}
            yield SimpleNamespace(outputs=[one], kv_transfer_params=None if i else report, **rest)
            if cut:
                return

    async def execute(self, prompt: VLLMPrompt, order: object, user: str) -> None:
        self.compiles += 1
        await asyncio.to_thread(self.go.wait, 20)


@contextmanager
def stubbed_engine(monkeypatch) -> Iterator[module.VLLMEngine]:
    """Make an engine over a ``Stub``, whose compiles all give ``CHUNK``, and close it."""
    shape = KVShape(3, 2, 4)
    ends = (shape, frozenset(), 1, None, make_tokenizer("llama"), Expected(shape, torch.float32, 8, 0))
    model = ModelDescription("m", "llama", "a1" * 32, "p", "float32", 1024, *ends)
    monkeypatch.setattr(module, "describe_model", lambda *_: model)
    monkeypatch.setattr(module, "engine_args", lambda *_: None)
    monkeypatch.setattr(module, "VLLMClient", Stub)
    monkeypatch.setattr(module, "_info", lambda *_: SimpleNamespace())
    for test in ("link_test", "shift_test"):  # a stub has no model to test
        monkeypatch.setattr(module, test, lambda *_: None)
    key = KVKey.of(CHUNK.owner, CHUNK.key, model.digest, model.recipe(BARE))
    made = make_chunk(key)
    made = replace(made, inputs=replace(made.inputs, token_ids=torch.tensor(CHUNK.token_ids)))
    monkeypatch.setattr(exported, "read_compiled", lambda folder, **_: (made.inputs, made.kv))
    engine = module.VLLMEngine(EngineConfig(engine="vllm"), None, cpu=True)
    yield engine
    engine.client.go.set()
    if not engine._stopping:
        until(lambda: not engine._active)
        engine.check()
        engine.close()


def hold(engine) -> threading.Event:
    """Blocks the loop until the event is set, so that everything posted by then runs at once."""
    go = threading.Event()
    engine.client.loop.call_soon_threadsafe(go.wait, 20)
    return go


def request():
    return request_of(prompt_of(ids(1, 9)), "mpic-4")
