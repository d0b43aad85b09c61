"""``mpic eval run``: asks every task, number of chunks and policy on one engine, keeps every answer, and can be
resumed.

Per sample the chunks are compiled first, then each policy answers in turn, in an order of its own for every sample;
all of them find resident chunks, and none finds the prefix cache of another. A line of ``answers.jsonl`` is one
answer. What was skipped for a reason that may be gone, such as memory, is asked again by the next run; if the engine
stops, the run ends with its error.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.progress import Progress

from mpic.config import EngineConfig
from mpic.engine import load_engine
from mpic.engine.base import Delta, Engine, GenerationRequest, GenerationUsage, Sampling
from mpic.errors import BadRequest, EngineStopped, MPICError
from mpic.kv.chunk import Chunk
from mpic.model.dtype_choice import dtype_for_results
from mpic.model.load import choose_device
from mpic.press import parse_press
from mpic.prompt import ChatTemplate, Prompt, build_prompt
from mpic_lab.eval import metrics
from mpic_lab.eval.answers import NAME, PolicyAnswer, lines_of, ready
from mpic_lab.eval.compare import metric_of
from mpic_lab.eval.config import EvalConfig
from mpic_lab.eval.flops import Flops, shapes_of
from mpic_lab.eval.linking import parse_linking
from mpic_lab.eval.resolve import LocalResolver, counter_of, fitter_of, splitter_of
from mpic_lab.eval.run_facts import begin_run, record_fact
from mpic_lab.eval.tasks import GRIDS, Options, Sample, TaskError, find

LISTED = 1024
"""Most likely first tokens that are compared with those of ``full``."""


class Evaluator:
    """Runs a configuration into a folder.

    Raises:
        BadRequest: the folder holds a run of another model or seed, or a task over another file or split.
        TaskError: local files of tasks do not exist; it names all of them, and the model if that is not here either.
    """

    def __init__(self, config: EvalConfig, out: Path) -> None:
        self.config, self.out = config, out
        if missing := config.missing():
            raise TaskError("\n".join([*missing, *filter(None, [config.missing_model()])]))
        out.mkdir(parents=True, exist_ok=True)
        self.done = {answer.key: answer for answer in ready(out)}
        begin_run(config, out, answered=bool(self.done))

    def run(self, progress: Progress | None = None) -> list[PolicyAnswer]:
        """Answer the questions that have not been answered yet.

        Raises:
            BadRequest: the answers so far are of another dtype, kind of device or adapter.
            EngineStopped: the engine has ended; every later question would be skipped.
        """
        settings = self.settings()
        linkings = [parse_linking(name) for name in self.config.policies]
        packets = [linking.policy.name for linking in linkings if linking.policy.wrapping.packet]
        if packets:
            settings = replace(settings, policy=packets[0])  # such a policy is refused without an adapter
        engine, processor = load_engine(settings)
        try:
            self.loaded(engine)
            cells = self.config.cells()
            if packets:
                record_fact(self.out, "packet", engine.info.details["packet"], "of another adapter")
            for press in (parse_press(linking.press) for linking in linkings):
                if press is not None and press.syntax not in engine.presses():
                    raise BadRequest(f"press {press} does not run on model {engine.info.name}")
            template = ChatTemplate(processor)
            session = _Session(engine, template, self.config, self.policies_of)
            total = sum(questions_of(name, options) for name, options in cells)
            bar = progress.add_task("samples", total=total) if progress else None
            with (self.out / NAME).open("a", encoding="utf-8") as lines:
                for name, options in cells:
                    if progress is not None:
                        progress.update(bar, description=f"{name} {options.chunks or ''}")
                    done = {key: answer for key, answer in self.done.items() if answer.lasting}
                    ask = partial(session.ask, name, options, done=done)
                    samples = self._samples(session, name, options, done)
                    for answers in _map(ask, samples, self.config.at_once):
                        for answer in answers:
                            self.done[answer.key] = answer
                            lines.write(lines_of([answer]))
                        lines.flush()
                        if progress is not None:
                            progress.advance(bar)
                    session.forget()
        finally:
            engine.close()
        return list(self.done.values())

    def settings(self) -> EngineConfig:
        """Return the engine's configuration."""
        config = self.config
        return EngineConfig(
            model=config.model,
            device=config.device,
            dtype=dtype_for_results(config.dtype, choose_device(config.device), config.quantize),
            kv_dtype=config.kv_dtype,
            quantize=config.quantize,
            packet=config.packet,
        )

    def loaded(self, engine: Engine) -> None:
        """Do further work once the engine is loaded, before any question; a hook for subclasses."""

    def policies_of(self, task: str) -> Sequence[str]:
        """Return the policies that answer the next question of a task."""
        return self.config.policies

    def _samples(
        self, session: _Session, name: str, options: Options, done: dict[Any, PolicyAnswer]
    ) -> Iterator[Sample]:
        """Yield the samples of a cell. Before the first sample without answers, check that its answers would be
        computed like the earlier ones; a finished run may be graded on another machine."""
        checked = False
        for sample in session.samples(name, options):
            if not checked and session.missing(name, options, sample, done):
                computed = _computed(session.engine, self.config)
                words = "in another dtype or on another kind of device"
                record_fact(self.out, "computed", computed, words)
                checked = True
            yield sample


def questions_of(name: str, options: Options) -> int:
    """Return the maximum number of samples of a task; for needles this number applies to every length and depth."""
    return options.questions * (len(options.lengths) * len(options.depths) if name in GRIDS else 1)


def _map(
    ask: Callable[[Sample], list[PolicyAnswer]], samples: Iterable[Sample], at_once: int
) -> Iterator[list[PolicyAnswer]]:
    """Yield the samples' answers in order, with ``at_once`` samples in flight."""
    if at_once == 1:
        yield from map(ask, samples)
        return
    with ThreadPoolExecutor(at_once) as pool:
        futures = [pool.submit(ask, sample) for sample in samples]
        try:
            for future in futures:
                yield future.result()
        finally:
            pool.shutdown(cancel_futures=True)


def _computed(engine: Engine, config: EvalConfig) -> list[str]:
    """Return the dtype and the kind of device that answers are computed in, whatever ``auto`` means here."""
    return [engine.info.dtype, choose_device(config.device).type]


class _Session:
    """A loaded model that answers samples."""

    def __init__(
        self,
        engine: Engine,
        template: ChatTemplate,
        config: EvalConfig,
        policies_of: Callable[[str], Sequence[str]] | None = None,
    ) -> None:
        self.engine, self.template, self.config = engine, template, config
        self.policies_of = policies_of or (lambda task: config.policies)
        self.flops = Flops(shapes_of(config.model))
        self._warm: set[str] = set()
        self._asked: list[Chunk] = []
        self._requests = itertools.count(1)

    def samples(self, name: str, options: Options) -> Iterator[Sample]:
        fit = fitter_of(self.template, self.engine.info.context_length, options.max_length)
        tools = {"splitter": splitter_of(self.template), "count": counter_of(self.template), "fit": fit}
        return find(name).load(replace(options, **tools))

    def missing(
        self, name: str, options: Options, sample: Sample, done: dict[Any, PolicyAnswer]
    ) -> list[str]:
        """Return the policies whose answers are missing."""
        chunks = options.chunks or sample.chunks
        return [p for p in self.policies_of(name) if (name, chunks, sample.id, p) not in done]

    def ask(
        self, name: str, options: Options, sample: Sample, done: dict[Any, PolicyAnswer]
    ) -> list[PolicyAnswer]:
        """Return the sample's missing answers. The answer of ``full`` comes first, because the others are compared
        with it."""
        missing = self.missing(name, options, sample, done)
        if not missing:
            return []
        chunks = options.chunks or sample.chunks
        common = {"expected": sample.expected, "metric": options.metric}
        answers = {p: PolicyAnswer(name, chunks, sample.id, p, **common) for p in missing}
        try:
            prompt = build_prompt(sample.messages, self.template, LocalResolver(self.template))
            self._compile(prompt, missing)
            full = self._first_token(prompt, "full") if self.config.fidelity else None
        except EngineStopped:
            raise
        except MPICError as error:
            for answer in answers.values():
                answer.skipped = f"{error.code}: {error}"
            return list(answers.values())
        # shuffle for every sample, so that no policy alone pays for what other requests leave in the pool
        random.Random(f"{name} {chunks} {sample.id}").shuffle(missing)
        for policy in missing:
            self._answer(answers[policy], prompt, sample, full)
        if self.config.at_once == 1:
            self.forget()
        return list(answers.values())

    def forget(self) -> None:
        """Drop the chunks of the samples that were asked, and every prefix over them: tasks share documents, and a
        policy must not find the prompt of another task, nor make room in the pool."""
        while self._asked:
            self.engine.forget(self._asked.pop())

    def _compile(self, prompt: Prompt, policies: list[str]) -> None:
        asked = [compiled for name in policies for compiled in parse_linking(name).compiles(prompt)]
        self._asked += {c.key: c for c in (*prompt.chunks, *(chunk for chunk, _ in asked))}.values()
        for future in [self.engine.compile(*compiled) for compiled in dict.fromkeys(asked)]:
            future.result()

    def _submit(self, prompt: Prompt, policy: str, salt: str = "", **sampling: Any) -> Iterator[Delta]:
        """Submit a request. Every policy has its own user, so that it does not find prefixes that another policy has
        computed."""
        linking = parse_linking(policy)
        request = GenerationRequest(
            f"eval-{next(self._requests)}",
            linking.over(prompt),
            linking.policy,
            Sampling(**sampling),
            f"{policy} {salt}",
        )
        return iter(self.engine.submit(request))

    def _answer(
        self, answer: PolicyAnswer, prompt: Prompt, sample: Sample, full: dict[int, float] | None
    ) -> None:
        try:
            if answer.policy not in self._warm:  # keep one-time set-up out of the measurement
                self._warm.add(answer.policy)
                list(self._submit(prompt, answer.policy, "warm", max_tokens=2))
            text, usage, ttft = self._run(prompt, answer.policy, sample.max_tokens)
            if late := {use.tier for use in usage.chunks if use.reused} - {"device"}:
                answer.skipped = (
                    f"chunks came from {', '.join(sorted(late))}: the pool is too small to keep them"
                )
                return
            answer.answer = text.strip()
            if self.config.at_once == 1:
                answer.ttft_ms, answer.total_ms = round(ttft, 3), round(usage.total_ms, 3)
            answer.prompt_tokens, answer.computed = usage.prompt_tokens, usage.computed
            answer.pieces = len(prompt.chunks)
            answer.reused, answer.chunk_tokens = usage.reused, usage.reused + usage.recomputed
            answer.flops = self.flops.of(usage, parse_linking(answer.policy).policy)
            answer.kv_bytes = sum({use.key: use.bytes for use in usage.chunks}.values())
            names = {metric_of(answer), "em", "f1"}
            scored = sample.scored(text).strip()
            answer.scores = {m: metrics.best(m, scored, sample.expected) for m in sorted(names)}
            answer.answer_tokens = usage.completion_tokens
            if full is not None:
                other = full if answer.policy == "full" else self._first_token(prompt, answer.policy)
                answer.kl = round(metrics.first_token_kl(full, other), 6)
                answer.top1 = max(full, key=full.__getitem__) == max(other, key=other.__getitem__)
        except EngineStopped:
            raise
        except MPICError as error:
            answer.skipped = f"{error.code}: {error}"

    def _run(self, prompt: Prompt, policy: str, max_tokens: int) -> tuple[str, GenerationUsage, float]:
        """Return answers, usage and milliseconds to the first token as the caller sees it."""
        began = time.perf_counter()
        text, ttft, usage = "", 0.0, None
        for delta in self._submit(prompt, policy, max_tokens=max_tokens):
            ttft = ttft or (time.perf_counter() - began) * 1e3
            text += delta.text
            usage = delta.usage or usage
        assert usage is not None
        return text, usage, ttft

    def _first_token(self, prompt: Prompt, policy: str) -> dict[int, float]:
        """Return log-probabilities of the first token. The request is made by the policy's own user, so that the
        prompt that its answer has just computed is not computed again; a test checks that the numbers are the same."""
        deltas = self._submit(prompt, policy, max_tokens=1, logprobs=LISTED, ignore_eos=True)
        (first, *_) = [delta.logprobs[0] for delta in deltas if delta.logprobs]
        return dict(first.top)
