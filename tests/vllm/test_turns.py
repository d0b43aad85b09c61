"""Users take turns inside vLLM: whatever one of them does, another's first token is at most two steps later than alone.
Steps of vLLM's own scheduler are counted: it runs in this process, and steps when the engine's loop has nothing else
to do."""

from __future__ import annotations

import asyncio
import itertools
import queue
import threading
from contextlib import suppress

import pytest
import vllm_kit as kit
from engine_kit import ids, prompt_of, request_of, text_chunk, until

from mpic.config import EngineConfig
from mpic.engine import load_engine
from mpic.engine.vllm.frontend import engine as module
from mpic.engine.vllm.frontend.client import VLLMClient
from mpic.engine.vllm.frontend.loop_thread import LoopThread
from mpic.engine.vllm.frontend.prompts import token_prompt
from mpic.engine.vllm.plugin.admission import Admission
from mpic.errors import QueueFull
from mpic.server.parallel_sampling import ParallelSampling

ROWS, LONG = 64, 700
"""Rows of a step, and tokens of a long prompt."""


class Stepped(LoopThread):
    """Takes the place of ``VLLMClient``, with vLLM in this process.

    Attributes:
        steps: that vLLM's scheduler has made.
        at: what is called before a step, by its number.
    """

    processor, dead, attention = None, False, "cpu"
    gauges = ()
    execute = VLLMClient.execute

    def __init__(self, args, image, soft=0) -> None:
        from vllm.v1.engine.llm_engine import LLMEngine

        kit.staying.close()
        kit.look_at("LlamaForCausalLM")
        self.llm = LLMEngine.from_engine_args(args)
        config = self.llm.vllm_config
        self.context, self.block_size = config.model_config.max_model_len, config.cache_config.block_size
        self.blocks = config.cache_config.num_gpu_blocks
        self.steps, self.at, self._outputs = 0, {}, {}
        super().__init__("vllm-stepped")
        self._stepping = self.submit(self._step())

    def wait(self, work):
        """Also on the loop itself, where nothing that is waited for here waits."""
        if threading.current_thread() is not self._thread:
            return super().wait(work)
        try:
            work.send(None)
        except StopIteration as done:
            return done.value
        raise AssertionError("it waits")

    async def render(self, parts, salt):
        texts = (part if isinstance(part, (list, tuple)) else part.token_ids for part in parts)
        return token_prompt([id for text in texts for id in text], salt)

    async def generate(self, prompt, params):
        name = f"r{len(self._outputs)}"
        mine = self._outputs[name] = asyncio.Queue()
        self.llm.add_request(name, prompt.prompt, params)
        ended = False
        try:
            while not ended:
                output = await mine.get()
                ended = output.finished
                yield output
        finally:
            if not ended:
                self.llm.abort_request([name])

    async def _step(self):
        while True:
            for _ in range(100):  # whoever can go on goes on
                await asyncio.sleep(0)
            self.at.pop(self.steps, lambda: None)()
            if not self.llm.has_unfinished_requests():
                await asyncio.sleep(0.001)
                continue
            self.steps += 1
            for output in self.llm.step():
                self._outputs[output.request_id].put_nowait(output)

    def close(self):
        self._stepping.cancel()
        self.stop()
        self.llm.engine_core.shutdown()


async def on_the_loop(call, *args, **options):
    """Take the place of ``asyncio.to_thread``, so that no step depends on how fast a thread is."""
    return call(*args, **options)


def decide_when_read(self, tracked, decide=Admission._decide):
    """Wait for a link's files, which are read on threads beside the steps."""
    until(lambda: tracked.load.done)
    return decide(self, tracked)


@pytest.fixture(scope="module", params=[2000, 40], ids=["much memory", "little memory"])
def engine(request, tmp_path_factory):
    """vLLM with 16 places; in little memory, for one long prompt and a few short ones."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(module, "VLLMClient", Stepped)
        for test in ("link_test", "shift_test"):
            patched.setattr(module, test, lambda *_: None)
        patched.setattr(asyncio, "to_thread", on_the_loop)
        patched.setattr(Admission, "_decide", decide_when_read)
        patched.setattr("mpic.engine.stream.UNREAD", 1 << 20)  # nobody reads the floods
        folder = kit.checkpoint("llama")
        page = 3 * 2 * 2 * 32 * 4 * kit.BLOCK
        settings = EngineConfig(
            engine="vllm",
            model=str(folder),
            dtype="float32",
            pool_bytes=request.param * page,
            step_tokens=ROWS,
            max_running=16,
            max_waiting=100,
            vllm_args=f'{{"block_size": {kit.BLOCK}}}',
        )
        made = load_engine(settings)[0]
        yield made
        made.close()


def streams(engine):
    return [engine.submit(request_of(prompt_of(ids(i, 12)), "full", 100, "a")) for i in range(80)]


def several_answers(engine):
    """24 requests for 16 answers each, of which as many are refused as do not fit the queue."""
    started = []
    for i in range(24):
        asked = request_of(prompt_of(ids(i, 12)), "full", 100, "a", temperature=1.0)
        with suppress(QueueFull):
            started += ParallelSampling.submit(engine.submit, [asked], 16).streams
    return started


def fresh_prompts(engine):
    return [engine.submit(request_of(prompt_of(ids(i, 200)), "full", 40, "a")) for i in range(60)]


def long_prompts(engine):
    return [engine.submit(request_of(prompt_of(ids(i, LONG)), "full", 40, "a")) for i in range(20)]


def fresh_chunks(engine):
    prompts = [prompt_of(ids(i, 5), text_chunk(ids(next(_new), 200), "a"), ids(i, 3)) for i in range(40)]
    return [engine.submit(request_of(prompt, "mpic-4", 40, "a")) for prompt in prompts]


def uploads(engine):
    for _ in range(60):
        engine.compile(text_chunk(ids(next(_new), 200), "a"))
    return []


_new = itertools.count(10_000)
FLOODS = (streams, several_answers, fresh_prompts, long_prompts, fresh_chunks, uploads)
ASKED = {
    "a line": lambda: prompt_of(ids(next(_new), 9)),
    "three steps": lambda: prompt_of(ids(next(_new), 3 * ROWS - 10)),
    "a new chunk": lambda: prompt_of(ids(501, 5), text_chunk(ids(next(_new), 100), "b"), ids(502, 3)),
}


def steps_to_first_token(engine, prompt, flood=lambda engine: []) -> int:
    """Return how many steps a request takes that comes when a flood has had three."""
    client, policy = engine.client, "mpic-4" if prompt.chunks else "full"
    found, flooded, came = queue.SimpleQueue(), [], []

    def ask():
        stream = engine.submit(request_of(prompt, policy, 4, "b"))
        began, put, came[:] = client.steps, stream.put, [stream]

        def counted(item):
            put(item)
            found.put(item if isinstance(item, BaseException) else client.steps - began)

        stream.put = counted

    def begin():
        flooded[:] = flood(engine)
        client.at[client.steps + (3 if flood in FLOODS else 0)] = ask

    client.post(begin)
    steps = found.get(timeout=120)
    for stream in flooded:
        stream.abort()
    until(lambda: not engine._active and not engine.compiler._tasks)
    return steps


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("flood", FLOODS)
def test_whatever_one_user_does_inside_vllm_anothers_first_token_is_at_most_two_steps_late(
    engine, flood, asked
):
    baseline = steps_to_first_token(engine, ASKED[asked]())
    assert steps_to_first_token(engine, ASKED[asked](), flood) <= baseline + 2
