"""vLLM's ``AsyncLLM`` on an event loop in a thread of its own; its errors in the words of our tree."""

from __future__ import annotations

import asyncio
import logging
import threading
import uuid
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from vllm.exceptions import VLLMClientError
from vllm.inputs.engine import tokens_input
from vllm.outputs import RequestOutput
from vllm.renderers.inputs.preprocess import parse_model_prompt
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.metrics.loggers import StatLoggerBase

from mpic import memory
from mpic.config import ConfigError
from mpic.engine.vllm.wire import FIELD, Order
from mpic.errors import (
    BadRequest,
    CompileFailed,
    ContextLengthExceeded,
    EngineStopped,
    InvalidImage,
    MPICError,
    StorageFull,
    UnsupportedModality,
)
from mpic.imaging.claims import LARGE_PIXELS
from mpic.kv.chunk import Chunk, digest

if TYPE_CHECKING:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.inputs.engine import EngineInput

log = logging.getLogger(__name__)
T = TypeVar("T")
RENDERED_AT_ONCE = 2
"""Prompts with images, which are all decoded in this process while a prompt is rendered."""


class Rendered(NamedTuple):
    """A prompt as vLLM takes it.

    Args:
        ids: its tokens, images expanded.
        images: ``(first token, tokens)`` of every image.
    """

    ids: Sequence[int]
    images: tuple[tuple[int, int], ...]
    prompt: EngineInput


class Gauges(StatLoggerBase):
    """What the scheduler said last."""

    def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
        self.preemptions = 0
        self.usage = 0.0

    def record(
        self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
    ) -> None:
        if scheduler_stats is not None:
            self.usage = scheduler_stats.kv_cache_usage
        if iteration_stats is not None:
            self.preemptions += iteration_stats.num_preempted_reqs

    def log_engine_initialized(self) -> None:
        """Nothing to say."""


class Talk:
    """Starts vLLM and speaks with it.

    Args:
        image: the token that stands for an image in a prompt; None: the model takes none.

    Attributes:
        loop: of everything here that is ``async``.
        context: most tokens of a prompt and its answer.

    Raises:
        ConfigError: vLLM did not start; the message is vLLM's, and its log has more.
    """

    def __init__(self, args: AsyncEngineArgs, image: int | None) -> None:
        self._image = image
        self._pictures = asyncio.Semaphore(RENDERED_AT_ONCE)
        self.gauges: list[Gauges] = []
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name="mpic-vllm", daemon=True)
        self._thread.start()
        try:
            self._llm: Any = self.wait(self._start(args))
        except BaseException as error:
            self._stop()
            if not isinstance(error, Exception) or isinstance(error, MPICError):
                raise
            raise ConfigError(f"vLLM did not start: {error}", param="engine") from error
        config = self._llm.vllm_config
        self.context: int = config.model_config.max_model_len
        self.block_size: int = config.cache_config.block_size
        self.blocks: int = config.cache_config.num_gpu_blocks or 0
        self.attention = str(getattr(config.attention_config.backend, "name", None) or "auto")

    def _serve(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()

    async def _start(self, args: AsyncEngineArgs) -> AsyncLLM:
        def gauges(vllm_config: Any, engine_index: int = 0) -> Gauges:
            self.gauges.append(Gauges(vllm_config, engine_index))
            return self.gauges[-1]

        return AsyncLLM.from_engine_args(args, stat_loggers=[gauges])

    # ---- from any thread

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of something that runs on the loop."""
        try:
            return asyncio.run_coroutine_threadsafe(work, self.loop).result()
        except RuntimeError as error:
            if not self.loop.is_closed():
                raise
            work.close()
            raise EngineStopped("the engine has been stopped") from error

    @property
    def dead(self) -> bool:
        return self._llm is None or self._llm.errored

    @property
    def processor(self) -> Any:
        """vLLM's own image processor, or None."""
        processor = self._llm.renderer.mm_processor
        return getattr(processor.info.get_hf_processor(), "image_processor", None) if processor else None

    def close(self) -> None:
        """End vLLM's processes and the loop."""
        self.wait(self._shutdown())
        self._stop()

    async def _shutdown(self) -> None:
        llm, self._llm = self._llm, None
        llm.shutdown()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _stop(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()

    # ---- on the loop

    async def render(self, parts: Sequence[Sequence[int] | Chunk], salt: str) -> Rendered:
        """A prompt of token ids and chunks.

        Args:
            salt: of its blocks in the prefix cache. An image is known to vLLM by its owner, content and salt, so that
                nobody meets another's encoded image.

        Raises:
            InvalidImage: vLLM's processor refuses an image.
            UnsupportedModality: the model takes none.
            EngineStopped: vLLM is no more.
        """
        ids: list[int] = []
        loaders, names = [], []
        for part in parts:
            text = part.token_ids if isinstance(part, Chunk) else part
            if text is not None:
                ids += text
                continue
            if self._image is None or part.load_image is None:
                raise UnsupportedModality(f"chunk {part.key} is an image, and the model takes none")
            ids.append(self._image)
            loaders.append(part.load_image)
            names.append(digest("image", salt, part.owner, part.key.digest))
        if not loaders:
            return Rendered(ids, (), tokens_input(ids, cache_salt=salt))
        async with self._pictures:
            images = [await asyncio.to_thread(load) for load in loaders]
            prompt = {
                "prompt_token_ids": ids,
                "multi_modal_data": {"image": images},
                "multi_modal_uuids": {"image": names},
                "cache_salt": salt,
            }
            renderer = self._llm.renderer
            with _as_ours(InvalidImage), memory.as_errors():
                [made] = await renderer.render_cmpl_async(
                    [parse_model_prompt(self._llm.model_config, prompt)],
                    replace(renderer.default_cmpl_tok_params, max_total_tokens=None),  # we say it better
                )
            large = max(image.width * image.height for image in images) > LARGE_PIXELS
            del images, prompt
            if large:
                await asyncio.to_thread(memory.give_back)
        places = made["mm_placeholders"]["image"]
        return Rendered(made["prompt_token_ids"], tuple((p.offset, p.length) for p in places), made)

    def tokens(self, ids: Sequence[int], salt: str) -> Rendered:
        """A prompt that is token ids alone, those of images among them: a link."""
        return Rendered(ids, (), tokens_input(list(ids), cache_salt=salt))

    async def speak(self, prompt: Rendered, params: SamplingParams) -> AsyncIterator[RequestOutput]:
        """What vLLM says, as it says it. Closing the iterator aborts the request."""
        if self.dead:
            raise EngineStopped("vLLM's engine has died; start the server again")
        with _as_ours(BadRequest):
            async with aclosing(self._llm.generate(prompt.prompt, params, uuid.uuid4().hex)) as outputs:
                async for output in outputs:
                    yield output

    async def run(self, prompt: Rendered, order: Order) -> None:
        """A prompt that is computed for what the order does alone.

        Raises:
            CompileFailed, StorageFull: vLLM said that it did not.
        """
        params = SamplingParams(
            max_tokens=1,
            temperature=0.0,
            detokenize=False,
            ignore_eos=True,
            skip_reading_prefix_cache=True,  # what is not computed is not encoded
            output_kind=RequestOutputKind.FINAL_ONLY,
            extra_args={"kv_transfer_params": order.params()},
        )
        last = None
        async for output in self.speak(prompt, params):
            last = output
        report = report_of(last)
        if report.get("error"):
            kind = StorageFull if report["error"] == StorageFull.code else CompileFailed
            raise kind(str(report.get("message") or report["error"]))
        if last is None or last.outputs[0].finish_reason not in ("length", "stop"):
            raise CompileFailed("vLLM did not compute the chunk to its end")


def report_of(output: RequestOutput | None) -> dict[str, Any]:
    """What the connector says about a request that has ended."""
    params = (output.kv_transfer_params if output is not None else None) or {}
    return params.get(FIELD) or {}


@contextmanager
def _as_ours(refusal: type[MPICError]) -> Any:
    """vLLM's errors, in our tree: what a request is to blame for becomes ``refusal``."""
    try:
        yield
    except MPICError:
        raise
    except EngineDeadError as error:
        raise EngineStopped("vLLM's engine has died; start the server again") from error
    except (VLLMClientError, ValueError) as error:
        if "maximum model length" in str(error):
            raise ContextLengthExceeded(str(error), param="messages") from error
        raise refusal(f"vLLM: {error}") from error
