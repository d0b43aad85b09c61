"""Runs vLLM's ``AsyncLLM`` on the event loop of a ``LoopThread``, and converts its errors to those of
``mpic.errors``."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from vllm.exceptions import VLLMClientError
from vllm.outputs import RequestOutput
from vllm.renderers.inputs.preprocess import parse_model_prompt
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.metrics.loggers import StatLoggerBase

from mpic import memory
from mpic.config import ConfigError
from mpic.engine.vllm.frontend.loop_thread import LoopThread
from mpic.engine.vllm.frontend.prompts import VLLMPrompt, accept_soft_ids, token_prompt
from mpic.engine.vllm.wire import FIELD, USER, CompileOrder
from mpic.errors import (
    BadRequest,
    CompileFailed,
    ContextLengthExceeded,
    EngineStopped,
    InvalidImage,
    MPICError,
    OutOfMemory,
    StorageFull,
    UnsupportedModality,
)
from mpic.imaging.image_header import LARGE_PIXELS
from mpic.kv.chunk import Chunk, digest

if TYPE_CHECKING:
    from vllm.engine.arg_utils import AsyncEngineArgs

log = logging.getLogger(__name__)
NO_CLIPS = (
    "clips cannot be linked inside vLLM: use --engine native, or send the frames you want seen as images"
)
RENDERED_AT_ONCE = 2
"""Maximum prompts with images that are rendered at once; each holds all of its decoded images in this process."""
REPORTED = {kind.code: kind for kind in (StorageFull, OutOfMemory)}
"""Errors that a connector's report may name by code and after which, unlike after others, a caller may try again."""


class Gauges(StatLoggerBase):
    """The newest statistics of vLLM's scheduler: preemptions so far, and the share of the KV cache in use."""

    def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
        self.preemptions = 0
        self.kv_usage = 0.0

    def record(
        self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
    ) -> None:
        if scheduler_stats is not None:
            self.kv_usage = scheduler_stats.kv_cache_usage
        if iteration_stats is not None:
            self.preemptions += iteration_stats.num_preempted_reqs

    def log_engine_initialized(self) -> None:
        """Log nothing."""


class VLLMClient(LoopThread):
    """Starts vLLM and sends it requests.

    Args:
        image: the token that stands for an image in a prompt; None for a model that takes no images.
        soft: trained tokens of the model's adapter, whose ids prompts may have (``wire.FIRST_SOFT``).

    Attributes:
        context: maximum tokens of a prompt and its answer together.
        blocks, block_size: blocks of the KV cache, and tokens of a block.

    Raises:
        ConfigError: vLLM did not start; the message is vLLM's, and its log has more.
    """

    def __init__(self, args: AsyncEngineArgs, image: int | None, soft: int = 0) -> None:
        self._image = image
        self._pictures = asyncio.Semaphore(RENDERED_AT_ONCE)
        self.gauges: list[Gauges] = []
        super().__init__("mpic-vllm")
        try:
            self._llm: Any = self.wait(self._start(args))
        except BaseException as error:
            self.stop()
            if not isinstance(error, Exception) or isinstance(error, MPICError):
                raise
            raise ConfigError(f"vLLM did not start: {error}", param="engine") from error
        accept_soft_ids(self._llm.renderer, soft)
        config = self._llm.vllm_config
        self.context: int = config.model_config.max_model_len
        self.block_size: int = config.cache_config.block_size
        self.blocks: int = config.cache_config.num_gpu_blocks or 0
        self.attention = str(getattr(config.attention_config.backend, "name", None) or "auto")

    async def _start(self, args: AsyncEngineArgs) -> AsyncLLM:
        def gauges(vllm_config: Any, engine_index: int = 0) -> Gauges:
            self.gauges.append(Gauges(vllm_config, engine_index))
            return self.gauges[-1]

        return AsyncLLM.from_engine_args(args, stat_loggers=[gauges])

    # ---- from any thread

    @property
    def dead(self) -> bool:
        return self._llm is None or self._llm.errored

    @property
    def processor(self) -> Any:
        """vLLM's own image processor; None for a model without images."""
        processor = self._llm.renderer.mm_processor
        return getattr(processor.info.get_hf_processor(), "image_processor", None) if processor else None

    def ask_workers(self, method: str) -> list[Any]:
        """Call a method of ``LinkWorker`` without arguments, and return the answer of each worker."""
        return self.wait(self._llm.collective_rpc(method))

    def close(self) -> None:
        """End vLLM's processes and the loop."""
        self.wait(self._shutdown())
        self.stop()

    async def _shutdown(self) -> None:
        llm, self._llm = self._llm, None
        llm.shutdown()

    # ---- on the loop

    async def render(self, parts: Sequence[Sequence[int] | Chunk], salt: str) -> VLLMPrompt:
        """Return a prompt of token ids and chunks.

        Args:
            salt: cache salt for its blocks in the prefix cache. vLLM identifies an image by owner, content and salt, so
                no request gets an image that was encoded for another user.

        Raises:
            InvalidImage: vLLM's processor refuses an image.
            UnsupportedModality: the model takes no images.
            EngineStopped: vLLM has died or was stopped.
        """
        ids: list[int] = []
        loaders, names = [], []
        for part in parts:
            text = part.token_ids if isinstance(part, Chunk) else part
            if text is not None:
                ids += text
                continue
            if part.kind == "video":
                raise UnsupportedModality(NO_CLIPS)
            if self._image is None or part.load_image is None:
                raise UnsupportedModality(f"chunk {part.key} is an image, and the model takes none")
            ids.append(self._image)
            loaders.append(part.load_image)
            names.append(digest("image", salt, part.owner, part.key.digest))
        if not loaders:
            return token_prompt(ids, salt)
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
                    # vLLM would refuse it, too, but with a less clear message
                    replace(renderer.default_cmpl_tok_params, max_total_tokens=None),
                )
            large = max(image.width * image.height for image in images) > LARGE_PIXELS
            del images, prompt
            if large:
                await asyncio.to_thread(memory.give_back)
        places = made["mm_placeholders"]["image"]
        return VLLMPrompt(made["prompt_token_ids"], tuple((p.offset, p.length) for p in places), made)

    async def generate(self, prompt: VLLMPrompt, params: SamplingParams) -> AsyncIterator[RequestOutput]:
        """Yield vLLM's outputs as they come. Closing the iterator aborts the request."""
        if self.dead:
            raise EngineStopped("vLLM's engine has died; start the server again")
        with _as_ours(BadRequest):
            async with aclosing(self._llm.generate(prompt.prompt, params, uuid.uuid4().hex)) as outputs:
                async for output in outputs:
                    yield output

    async def forget_prompts(self) -> bool:
        """Empty vLLM's prefix cache and its caches of processed and encoded images, for measurements; a connector
        keeps what it has. Return False if a running request still holds blocks."""
        done = await self._llm.reset_prefix_cache()
        await self._llm.reset_mm_cache()
        await self._llm.reset_encoder_cache()
        return bool(done)

    async def execute(self, prompt: VLLMPrompt, order: CompileOrder, user: str) -> None:
        """Compute a user's prompt only for the side effect of its order.

        Raises:
            CompileFailed: vLLM did not follow the order.
            StorageFull, OutOfMemory: a worker found the disk full, or ran out of memory.
            EngineStopped: vLLM has died or is shutting down.
        """
        params = SamplingParams(
            max_tokens=1,
            temperature=0.0,
            detokenize=False,
            ignore_eos=True,
            # an image found in the prefix cache would not be encoded, but its embeddings have to be exported
            skip_reading_prefix_cache=True,
            output_kind=RequestOutputKind.FINAL_ONLY,
            extra_args={"kv_transfer_params": order.params(), USER: user},
        )
        last = None
        async for output in self.generate(prompt, params):
            last = output
        report = report_of(last)
        if report.get("error") or last is None or last.outputs[0].finish_reason not in ("length", "stop"):
            raise unfinished("the chunk was not computed to its end", last, report, CompileFailed)


def report_of(output: RequestOutput | None) -> dict[str, Any]:
    """Return the connector's report in an output; empty if there is none."""
    params = (output.kv_transfer_params if output is not None else None) or {}
    return params.get(FIELD) or {}


def unfinished(
    what: str, last: RequestOutput | None, report: Mapping[str, Any], otherwise: type[MPICError]
) -> MPICError:
    """Return the error of a request that vLLM did not compute to its end.

    Args:
        what: a clause for the message that says what is missing.
        last: its last output; None if there was none.
        report: the connector's newest report.
        otherwise: type of the error when the report names none that has a type of its own.
    """
    code = report.get("error")
    if not code and last is not None and last.outputs[0].finish_reason == "abort":
        # aborted requests send no more outputs, so this one means that vLLM's processes are ending
        return EngineStopped("vLLM is being stopped")
    why = report.get("message") or code or "vLLM ended the request"
    return REPORTED.get(code, otherwise)(f"{what}: {why}", reason=code)


@contextmanager
def _as_ours(refusal: type[MPICError]) -> Any:
    """Convert vLLM's errors to those of ``mpic.errors``; an error that the request caused becomes ``refusal``."""
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
