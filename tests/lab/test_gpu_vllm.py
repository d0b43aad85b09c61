"""The sections of the GPU report that run vLLM: with stand-ins for its engines, and with vLLM itself (make parity)."""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import vllm_kit

from mpic.engine.base import GenerationUsage
from mpic_lab.bench import vllm_pair
from mpic_lab.bench.baseline_vllm import TimedAnswer
from mpic_lab.bench.harness import BenchFailed
from mpic_lab.bench.workload import Ids
from mpic_lab.gpu import context, inside_vllm, record
from mpic_lab.gpu.models import LLAVA, QWEN
from mpic_lab.gpu.sizes import QUICK
from mpic_lab.gpu.supervise import SectionRun

GIB = 1 << 30


@pytest.fixture
def run(tmp_path):
    """Runs a section over a file that has the rows of others; returns its rows."""

    def section(name, work, **options):
        found = SectionRun(name, tmp_path / "rows.jsonl", "cpu", quick=True, **options)
        work(found)
        return [row for row in record.latest(record.read(found.out)) if row["section"] == name]

    return section


class Plain:
    """Unchanged vLLM, which finds what it was asked before in its prefix cache, in whole blocks."""

    def __init__(self, block: int) -> None:
        self._block, self._known, self._threads = block, [], ThreadPoolExecutor(8)
        self.asked: list[int] = []

    def ask(self, parts, tokens, times=None) -> Future:
        (prompt,) = parts
        self.asked.append(len(prompt))
        cached = max((self._common(prompt, known) for known in self._known), default=0)
        self._known.append(tuple(prompt))
        times = [] if times is None else times

        def answer() -> TimedAnswer:
            began = time.perf_counter()
            for _ in range(tokens):
                time.sleep(0.002)
                times.append(time.perf_counter())
            return TimedAnswer(len(prompt), cached, began, tuple(times))

        return self._threads.submit(answer)

    def _common(self, prompt, known) -> int:
        same = 0
        while same < min(len(prompt) - 1, len(known)) and prompt[same] == known[same]:
            same += 1
        return same // self._block * self._block

    def close(self) -> None:
        self._threads.shutdown()


@pytest.fixture
def engines(monkeypatch):
    """Stands in for both engines, with links that compute some tokens too many."""
    plain = Plain(inside_vllm.QUICK.block)
    made = SimpleNamespace(plain=plain, too_many=0, compiled=[], settings=None)

    def submit(request):
        images = sum(hasattr(segment, "chunk") for segment in request.prompt.segments)
        computed = replace(made.settings, images=images).computed + made.too_many
        usage = GenerationUsage(completion_tokens=2, computed=computed)
        deltas = [SimpleNamespace(token_ids=(1,), usage=None), SimpleNamespace(token_ids=(1,), usage=usage)]
        return iter(deltas)

    def compile_one(chunk, wrapping=None):
        made.compiled.append(chunk)
        done = Future()
        done.set_result(1)
        return done

    @contextmanager
    def both(settings, placement, model, library):
        made.settings = settings
        yield plain, SimpleNamespace(submit=submit, compile=compile_one)

    monkeypatch.setattr(vllm_pair, "engines_of", both)
    yield made
    plain.close()


def test_the_headline_inside_vllm_has_every_number_of_images_three_ways_the_largest_first(run, engines):
    rows = run("vllm", inside_vllm.first_tokens)
    first = [(row["shape"], row["with"]) for row in rows if row["measured"].startswith("first token")]
    ways = (vllm_pair.ALONE, vllm_pair.LINK, vllm_pair.FLOOR)
    assert first == [(f"{n} images of 49 tokens", way) for n in (2, 1) for way in ways]
    heads = [row["headline"] for row in rows if "headline" in row]
    assert heads == ["vllm_ttft_cut_percent", "vllm_mpic32_over_floor"]
    assert len(engines.compiled) == 2, "every image once"


def test_a_link_that_was_computed_instead_is_no_measurement(run, engines):
    engines.too_many = 7
    with pytest.raises(BenchFailed, match="computed 87 of 80"):
        run("vllm", inside_vllm.first_tokens)


def test_what_two_engines_do_not_fit_is_left_out_and_named(run, engines, monkeypatch):
    monkeypatch.setattr(context.Context, "free", lambda self: 0.0)
    (row,) = run("vllm", inside_vllm.first_tokens)
    assert row["with"] == "left out" and row["shape"] == "[1, 2] images"


def test_a_gpu_of_80_gb_holds_both_engines_at_ten_images(monkeypatch, tmp_path):
    found = context.Context(SectionRun("vllm", tmp_path / "rows", "cuda"))
    monkeypatch.setattr(
        context.Context, "placement", SimpleNamespace(device=torch.device("cuda"), dtype=torch.bfloat16)
    )
    settings = inside_vllm._settings(found, 10)
    assert 60 * GIB < inside_vllm._bytes(found, settings) < 76 * GIB
    assert settings.length == 10 * 2916 + 200 < settings.decoder.context < settings.length + 256
    for shape, billions in ((LLAVA, 6.6), (QWEN, 7.1)):
        assert inside_vllm._weights(shape.decoder) == pytest.approx(billions * 1e9, rel=0.03)


def test_vllms_decoding_is_compared_with_the_native_engines_rows(run, monkeypatch, tmp_path):
    other = SectionRun("decode", tmp_path / "rows.jsonl")
    record.append(other.out, {"event": "begin", "section": "decode"})
    other.row("decode", "batch 2, 32 tokens shared", "triton", 100.0, "tokens/s")
    found = context.Context(SectionRun("vllm-decode", other.out, "cpu", quick=True))
    decoder, cases = inside_vllm._cases(found)
    assert len(cases) == 2 * len(QUICK.batches) * len(QUICK.contexts)
    engine, ratios, ids = Plain(32), [], Ids(decoder.vocabulary)
    for case in cases:
        inside_vllm._rate(found, engine, ids, case, ratios)
    engine.close()
    rows = [row for row in record.latest(record.read(other.out)) if row["section"] == "vllm-decode"]
    theirs = {row["shape"]: row["value"] for row in rows if row["measured"] == "decode, vLLM"}
    assert set(theirs) == {case.shape for case in cases} and min(theirs.values()) > 0
    (compared,) = [row for row in rows if row["measured"] == "decode, native over vLLM"]
    assert compared["shape"] == "batch 2, 32 tokens shared"
    assert compared["value"] == pytest.approx(100.0 / theirs[compared["shape"]], rel=0.01)
    assert len(ratios) == 1 and max(engine.asked) == 64 + QUICK.text
    held = decoder.context
    assert all(case.prefix + QUICK.text + inside_vllm.ANSWERS * QUICK.tokens <= held for case in cases)


def test_batches_that_do_not_fit_are_left_out_of_decoding(run, monkeypatch):
    monkeypatch.setattr(context.Context, "free", lambda self: 0.0)
    rows = run("vllm-decode", inside_vllm.decode)
    assert len(rows) == 8 and {row["with"] for row in rows} == {"left out"}


def test_the_model_is_saved_as_vllm_reads_it_and_removed_with_its_folder(tmp_path):
    found = context.Context(SectionRun("vllm", tmp_path / "rows", "cpu", quick=True))
    sizes = inside_vllm.QUICK
    with inside_vllm._saved(found, replace(sizes.images.decoder, context=256), sizes.tower) as folder:
        names = {path.name for path in Path(folder).iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= names and not Path(folder).exists()


@pytest.mark.parity
@pytest.mark.timeout(1200)
@pytest.mark.skipif(not vllm_kit.available(), reason="vLLM is not installed (make setup-vllm)")
def test_the_sections_run_with_vllm_itself(run):
    rows = run("vllm", inside_vllm.first_tokens)
    assert {row["headline"] for row in rows if "headline" in row} == {
        "vllm_ttft_cut_percent",
        "vllm_mpic32_over_floor",
    }
    rows = run("vllm-decode", inside_vllm.decode)
    assert len(rows) == 8 and all(row["value"] > 0 for row in rows)
