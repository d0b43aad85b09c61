"""Measures the time to the first token over resident images, on models with the shapes of real ones.

Weights are random and images are random embeddings with their real positions: the vision encoder is left out of every
column, which favours ``full`` and ``prefix``.
"""

from __future__ import annotations

import gc
import time
from functools import partial
from statistics import median_low
from typing import Any, NamedTuple

import torch
from PIL import Image

from mpic.engine.base import Engine, GenerationUsage
from mpic.kv.chunk import Chunk, ChunkInputs
from mpic_lab.bench.harness import BenchFailed
from mpic_lab.bench.workload import (
    Ids,
    compile_all,
    first_token,
    image_chunk,
    prompt_of,
    random_image,
    request_of,
)
from mpic_lab.gpu.context import Context
from mpic_lab.gpu.models import ModelShape, native_engine, self_test
from mpic_lab.gpu.sizes import BASE, LINK, ImagePrompts
from mpic_lab.gpu.supervise import SectionRun


class Taken(NamedTuple):
    """A first token's median milliseconds, and their ratio to the roofline (None: not known)."""

    ms: float
    ratio: float | None


def link(run: SectionRun) -> None:
    """Link 8 resident images with the numbers of tokens of LLaVA-1.5 and LLaVA-1.6."""
    context = Context(run)
    for model in context.sizes.models:
        subject = FirstTokens(context, model)
        for prompts in context.sizes.links:
            subject.measure(prompts)
            subject.measure(prompts, graphs="off")
        del subject
        gc.collect()
        context.free()


def headline(run: SectionRun) -> None:
    """Measure the papers' figure: 1 to 10 images under each policy, and the roofline of mpic-32.

    Raises:
        RuntimeError: prefix caching and mpic-32 were not both measured on the first model.
    """
    context = Context(run)
    worst = 0.0
    for number, model in enumerate(context.sizes.models):
        subject = FirstTokens(context, model)
        taken = subject.measure(context.sizes.headline)
        most = max((count for count, policy in taken if policy == LINK), default=0)
        ours, prefix = taken.get((most, LINK)), taken.get((most, BASE))
        if ours is not None and prefix is not None:
            worst = max(worst, ours.ms / prefix.ms)
        if number == 0:
            if ours is None or prefix is None:
                raise RuntimeError("prefix and mpic-32 were not both measured")
            _head(run, f"{most} images", 100 * (1 - worst), "ttft_cut_percent", ">= 85", "% less")
            if ours.ratio is not None:
                _head(run, f"{most} images", ours.ratio, "link_over_roofline", "<= 1.5")
        del subject
        gc.collect()
        context.free()
    _head(run, "the most images, the worse of the models", worst, "mpic32_over_prefix", "<= 0.15")


def _head(run: SectionRun, shape: str, value: float, name: str, goal: str, unit: str = "") -> None:
    run.row("headline", shape, LINK, round(value, 4), unit, headline=name, goal=goal)


class FirstTokens:
    """A model that is built and self-tested, with prompts of images for it."""

    def __init__(self, context: Context, model: ModelShape) -> None:
        self._context, self._model = context, model
        self._device = context.placement.device
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        self._loaded, self._costs = context.model(model)
        self._loaded.image_inputs = self._inputs  # replaces the vision encoder
        self._ends = time.monotonic() + 0.85 * context.run.left
        self._ids = Ids(model.decoder.vocabulary)
        self._tokens, self._graphs = 0, "auto"

    def _inputs(self, image: Image.Image) -> ChunkInputs:
        """Return inputs with random embeddings and positions in a row, or in a grid."""
        n, side = self._tokens, self._model.side
        positions, rotary_length = torch.arange(n)[None], n
        if side:
            positions = torch.stack(
                [torch.zeros(n, dtype=torch.int64), torch.arange(n) // side, torch.arange(n) % side]
            )
            rotary_length = int(positions.max()) + 1
        embeds = torch.randn(n, self._model.decoder.hidden).mul_(0.02).to(self._context.placement.dtype)
        return ChunkInputs(torch.full((n,), 5), positions.contiguous(), rotary_length, embeds)

    def measure(self, prompts: ImagePrompts, graphs: str = "auto") -> dict[tuple[int, str], Taken]:
        """Write rows for every number of images that fits, and return the results with the report's own attention.

        ``mpic-32`` is also measured with the device's default attention, unless ``graphs`` is ``off``: then no step
        runs from CUDA graphs.
        """
        context, name = self._context, self._model.name
        self._tokens, self._system = prompts.tokens, self._ids.fresh(prompts.system)
        counts = [n for n in prompts.images if self._pool(prompts, n) <= self._room()]
        if len(counts) < len(prompts.images):
            what = f"{prompts.images[len(counts) :]} images of {prompts.tokens} tokens"
            context.left_out(f"first token, {name}", what, "they do not fit this device's memory")
        if not counts:
            return {}
        images = [image_chunk(random_image(i, 8)) for i in range(max(counts))]
        self._graphs = graphs
        with native_engine(self._loaded, self._pool(prompts, max(counts)), cuda_graphs=graphs) as engine:
            compile_all(engine, images)
            first_token(engine, request_of(prompt_of(self._system, self._ids.fresh(8)), BASE, 2))
            taken: dict[tuple[int, str], Taken] = {}
            for policy in prompts.policies:
                work = partial(self._policy, engine, prompts, images, counts, policy, taken)
                context.attempt(f"first token, {name}", policy, work)
            if LINK in prompts.policies and context.attention != "auto" and graphs != "off":
                self._attend("auto")
                self._policy(engine, prompts, images, counts, LINK, {})
                self._attend(context.attention)
            pages = engine.stats()["pages"]
        shape = f"{max(counts)} images of {prompts.tokens} tokens and requests"
        pool = pages["total"] * pages["page_bytes"]
        context.run.row(f"pool, {name}", shape, "-", round(pool / 2**30, 3), "GiB")
        if self._device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(self._device) / 2**30
            context.run.row(f"peak memory, {name}", shape, "weights, pool, work", round(peak, 3), "GiB")
        return taken

    def _attend(self, name: str) -> None:
        self._loaded.choose_attention(name)
        self_test(self._loaded)

    def _pool(self, prompts: ImagePrompts, images: int) -> int:
        """Return the pool's tokens: chunks, a request that recomputes all of them, one whose prefix is kept."""
        prompt = images * prompts.tokens + prompts.system + prompts.text
        return images * prompts.tokens + 2 * (prompt + 512)

    def _room(self) -> float:
        """Return the number of tokens that fit if a quarter of the free memory is left for work."""
        return 0.75 * self._context.free() / self._costs.token

    def _policy(
        self,
        engine: Engine,
        prompts: ImagePrompts,
        images: list[Chunk],
        counts: list[int],
        policy: str,
        taken: dict[tuple[int, str], Taken],
    ) -> None:
        """Write the rows of a policy, and put the results into ``taken``."""
        context, measured = self._context, f"first token, {self._model.name}"
        for count in sorted(counts, reverse=True):  # the largest must not be cut off, so it runs first
            shape = f"{count} images of {prompts.tokens} tokens"
            if time.monotonic() > self._ends:
                context.left_out(measured, f"{policy}, {shape}", "out of time")
                continue
            seconds, usage = self._median(engine, prompts, images[:count], policy)
            how = f"{policy}, {self._loaded.info.attention}{', no graphs' if self._graphs == 'off' else ''}"
            ratio = context.timed(measured, shape, how, seconds, self._costs.prefill(usage))
            taken[count, policy] = Taken(1e3 * seconds, ratio)

    def _median(
        self, engine: Engine, prompts: ImagePrompts, images: list[Chunk], policy: str
    ) -> tuple[float, GenerationUsage]:
        """Return the median seconds, after one request that does not count, and the usage of the prompt."""
        taken = []
        for number in range(prompts.repeats + 1):
            prompt = self._prompt(prompts, images, policy == BASE)
            elapsed, usage = first_token(engine, request_of(prompt, policy, 2))
            stale = [c.tier for c in usage.chunks if c.reused and c.tier != "device"]
            # the first request compiles chunks whose pages prompts under other policies have taken
            if stale and number:
                raise BenchFailed(f"{policy}: chunks came from {stale}")
            taken.append(elapsed / 1e3)
        return median_low(taken[1:]), usage

    def _prompt(self, prompts: ImagePrompts, images: list[Chunk], system: bool) -> Any:
        """Return a prompt of fresh text, so that nothing but the system prompt can be found again."""
        half, fresh = prompts.text // 2, self._ids.fresh
        parts: list[Any] = [self._system if system else fresh(prompts.system), fresh(half)]
        for image in images:
            parts += [image, fresh(2)]
        return prompt_of(*parts, fresh(half))
