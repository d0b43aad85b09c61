"""Sections of the GPU report run to their end at a tiny size on the CPU, through Triton's interpreter, so that mistakes
are found before there is a GPU."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from mpic.errors import ModelRefused
from mpic.kernels import reference
from mpic.kernels.attention import KVView, QueryRotation, SpanCall
from mpic.kernels.span import Span
from mpic.model import selftest
from mpic_lab.bench.harness import BenchDevice
from mpic_lab.gpu import (
    attention_cases,
    context,
    first_tokens,
    kernel_times,
    machine,
    model_checks,
    record,
)
from mpic_lab.gpu.sizes import QUICK
from mpic_lab.gpu.supervise import SectionRun

HERE = BenchDevice(torch.device("cuda" if torch.cuda.is_available() else "cpu"), torch.float32)
CASES = (
    attention_cases.Case("prefill, A", 4, 2, 32, 5, 1, 2, 16),
    attention_cases.Case("decode, A", 4, 2, 32, 1, 2, 2, 16),
    attention_cases.Case("decode shared, A", 4, 2, 32, 1, 2, 2, 16, shared=True),
)


@pytest.fixture(scope="module")
def tested():
    """The error of each model's self-test with each attention."""
    return {}


@pytest.fixture
def measured(tmp_path, monkeypatch, tested):
    """Run a section with even smaller sizes; return its rows. A model that is built again is not tested again."""

    def once(loaded):
        key = loaded.info.name, loaded.attention_name
        if key not in tested:
            tested[key] = selftest.self_test(loaded)
        return tested[key]

    for module in (context, first_tokens, model_checks):
        monkeypatch.setattr(module, "self_test", once)

    def run(name, work, sizes, **options):
        monkeypatch.setattr(context, "QUICK", sizes)
        out = tmp_path / "rows.jsonl"
        work(SectionRun(name, out, HERE.device.type, quick=True, **options))
        return [row for row in record.latest(record.read(out)) if row["section"] == name]

    return run


def test_the_headline_measures_every_policy_on_both_models(measured):
    sizes = replace(QUICK, headline=replace(QUICK.headline, images=(1,), tokens=24))
    measured("ceilings", machine.measure_ceilings, sizes)
    rows = measured("headline", first_tokens.headline, sizes)
    heads = {row["headline"]: row["value"] for row in rows if "headline" in row}
    assert set(heads) == {"ttft_cut_percent", "link_over_roofline", "mpic32_over_prefix"}
    assert all(math.isfinite(value) for value in heads.values())
    for model in sizes.models:
        firsts = [row["with"] for row in rows if row["measured"] == f"first token, {model.name}"]
        for policy in sizes.headline.policies:
            assert sum(name.startswith(f"{policy}, triton") for name in firsts) == 1
        own = f"mpic-32, {HERE.device.type}-"  # the device's default attention, beside it
        assert any(name.startswith(own) for name in firsts)
        assert any(row["measured"] == f"pool, {model.name}" for row in rows)


def test_links_of_every_size_are_measured(measured):
    sizes = replace(QUICK, models=QUICK.models[1:], links=tuple(replace(p, images=(1,)) for p in QUICK.links))
    rows = measured("link", first_tokens.link, sizes)
    shapes = {row["shape"] for row in rows if row["measured"].startswith("first token")}
    assert shapes == {"1 images of 16 tokens", "1 images of 40 tokens"}


def test_nothing_is_begun_after_the_time_is_up(measured):
    sizes = replace(QUICK, models=QUICK.models[:1], links=QUICK.links[:1])
    rows = measured("link", first_tokens.link, sizes, ends=0.0)
    firsts = [row for row in rows if row["measured"].startswith("first token")]
    assert firsts and all(row["with"] == "left out" and row["why"] == "out of time" for row in firsts)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_missing_gpu_is_reported(tmp_path):
    with pytest.raises(ModelRefused, match="no CUDA device"):
        first_tokens.headline(SectionRun("headline", tmp_path / "rows.jsonl", "cuda"))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_case_computes_what_it_describes(case):
    """A row of the table that measured something else would be worse than none."""
    prepared, q = attention_cases.build(case, HERE)
    out, _ = prepared.attend(0, q, 0.2)
    expected = list(prepared_calls(prepared, case))
    assert (
        out - reference.attend(q, expected, 0.2, lambda base: rotation_of(base, case.dim))
    ).abs().max() < 1e-4


def rotation_of(base: int, dim: int) -> QueryRotation | None:
    angle = torch.linspace(0, float(base), dim // 2)
    return QueryRotation(angle.cos(), angle.sin()) if base else None


def prepared_calls(prepared, case):
    """The case, described again from its arena."""
    dim, heads, arena = case.dim, case.kv_heads, prepared.anchor
    per_token, begin, sets = 2 * heads * dim, 0, []

    def extent(n):
        nonlocal begin
        view = arena[begin * per_token : (begin + n) * per_token].view(1, 2, heads, n, dim)
        begin += n
        return KVView(view)

    for _ in range(1 if case.shared else case.requests):
        sets.append([extent(case.keys) for _ in range(case.spans)])
    for request in range(case.requests):
        rows = slice(request * case.rows, (request + 1) * case.rows)
        yield SpanCall(rows, Span(extent(case.rows + 1), 0, case.rows), causal=True)
        for number, view in enumerate(sets[0 if case.shared else request]):
            yield SpanCall(rows, Span(view, 0, case.keys, base=number + 1))


def test_the_tuner_finds_one_of_the_candidates():
    block, single = ((16, 16, 4, 1), (16, 32, 4, 1)), ((16, 4, 1),)
    best = kernel_times.tune(HERE, 32, 2, block, single, *CASES[:2], repeats=1)
    assert best[0] in block and best[1] in single


def test_the_checks_of_engines_and_models_pass_here(measured):
    rows = measured("selftest", model_checks.self_tests, replace(QUICK, models=QUICK.models[1:]))
    checks = {(row["measured"], row["with"]): row for row in rows if "ok" in row}
    failed = [row for row in checks.values() if not row["ok"]]
    # this device has no CUDA graphs to compare with
    graphs = [row for row in failed if "CUDA graphs" in row["shape"]]
    assert failed == (graphs if HERE.device.type == "cpu" else []) and len(checks) >= 4
