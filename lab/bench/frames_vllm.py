"""``frames`` on the vLLM engine: links inside vLLM against vLLM alone with its prefix cache, step by step."""

from __future__ import annotations

from dataclasses import dataclass, replace

from mpic.prompt.segments import Prompt
from mpic_lab.bench import frames, vllm_pair
from mpic_lab.bench.baseline_vllm import PlainVLLM
from mpic_lab.bench.frames import LINK, Measure
from mpic_lab.bench.harness import BenchDevice, BenchFailed, Report, Ticker, bench

ALONE = vllm_pair.ALONE


@dataclass(frozen=True)
class Settings(frames.Settings):
    """Sizes of the ``frames`` bench on vLLM.

    Args:
        block: tokens of a block of vLLM's cache.
        context: the model's context in tokens; vLLM's cache has room for one prompt of this length.
    """

    block: int = 32
    context: int = 8192

    def of_engines(self) -> vllm_pair.Settings:
        """Return the settings with which the two engines are started."""
        return vllm_pair.Settings(
            replace(self.decoder, context=self.context),
            self.tower,
            images=self.window,
            system=self.system,
            text=self.window * self.text + self.question,
            answers=0,
            arrivals=1,
            block=self.block,
            seed=self.seed,
        )


@bench(
    "frames",
    "time to first token over 200 steps of an agent with a sliding window of 8 frames, against vLLM alone",
    Settings,
    quick=frames.QUICK,
    wants={"prefix_over_mpic16": ">= 2", "mpic16_growth": "<= 1.2"},
    engine="vllm",
    in_process=False,
)
def run(settings: Settings, placement: BenchDevice, ticker: Ticker) -> Report:
    """Measure every step with both engines, each of which runs in separate processes."""
    with vllm_pair.both_engines(settings.of_engines(), placement, ticker) as engines:
        ways = {LINK: frames.linked(engines.ours), ALONE: _alone(engines.plain, settings)}
        samples = frames.measure(settings, ways, ticker)
    notes = {**engines.notes, **frames.words(settings)}
    notes["files"] = (
        "a new frame's KV is written to its file on the disk before the step that links it goes on"
    )
    return frames.report(settings, samples, ALONE, notes)


def _alone(engine: PlainVLLM, settings: Settings) -> Measure:
    steps = 0

    def once(prompt: Prompt) -> float:
        nonlocal steps
        parts = [getattr(segment, "chunk", None) or segment.token_ids for segment in prompt.segments]
        answer = engine.ask(parts, 2).result()
        steps += 1
        if steps > settings.window and answer.cached >= settings.system + settings.text + settings.block:
            raise BenchFailed(f"vLLM found {answer.cached} tokens, more than the system prompt")
        return answer.first_ms

    return once
