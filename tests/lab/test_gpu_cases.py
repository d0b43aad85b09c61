"""Sections of the GPU report run to their end at a tiny size on the CPU, through Triton's interpreter, so that mistakes
are found before there is a GPU."""

from __future__ import annotations

import importlib.machinery
import math
import sys
from dataclasses import replace
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from slow_device import SlowDevice

from mpic.errors import ModelRefused
from mpic.kernels import reference
from mpic.kernels.attention import KVView, QueryRotation, SpanCall
from mpic.kernels.span import Span
from mpic.kernels.triton.tuning import look_up, read_table
from mpic.model import selftest
from mpic_lab.bench.harness import BenchDevice
from mpic_lab.gpu import (
    attention_cases,
    comparators,
    context,
    copy_checks,
    first_tokens,
    graphs,
    kernel_times,
    machine,
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
    """Runs a section with even smaller sizes; returns its rows. A model that is built again is not tested again."""

    def once(loaded):
        key = loaded.info.name, loaded.attention_name
        if key not in tested:
            tested[key] = selftest.self_test(loaded)
        return tested[key]

    for module in (context, first_tokens):
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


def test_the_tuner_writes_a_table_that_can_be_read(tmp_path):
    path = tmp_path / "tuned.json"
    block, single = ((16, 16, 4, 1), (16, 32, 4, 1)), ((16, 4, 1),)
    for gpu in ("GPU A", "GPU B"):
        kernel_times.tune(path, gpu, HERE, 32, 2, block, single, *CASES[:2], repeats=1)
    table = read_table(path)
    assert set(table["gpus"]) == {"GPU A", "GPU B"}
    found = look_up(table, "GPU A", torch.float32, 32, 2)
    assert found[:4] in block and found[4:7] in single and found.source == "tuned on GPU A"


class _Wrapper:
    """Imitates FlashInfer's two wrappers by their documented contract."""

    def __init__(self, workspace, kv_layout="NHD"):
        assert workspace.dtype == torch.uint8 and kv_layout == "NHD"

    def plan(self, **given):
        self.given = given


class _Ragged(_Wrapper):
    def run(self, q, k, v):
        plan = self.given
        starts = zip(plan["qo_indptr"].tolist(), plan["kv_indptr"].tolist())
        bounds = list(zip(starts, zip(plan["qo_indptr"][1:].tolist(), plan["kv_indptr"][1:].tolist())))
        parts = [
            flash(q[None, a:b], k[None, c:d], v[None, c:d], plan["sm_scale"], plan["causal"])
            for (a, c), (b, d) in bounds
        ]
        return torch.cat(parts, 1)[0]


class _Paged(_Wrapper):
    def run(self, q, pages):
        plan, size = self.given, self.given["page_size"]
        out = []
        for i, row in enumerate(q):
            lo, hi = plan["indptr"][i : i + 2].tolist()
            keys = (hi - lo - 1) * size + int(plan["last_page_len"][i])
            k, v = (each[plan["indices"][lo:hi].long()].flatten(0, 1)[None, :keys] for each in pages)
            out.append(flash(row[None, None], k, v, plan["sm_scale"], False)[0])
        return torch.cat(out)


def flash(q, k, v, softmax_scale, causal):
    """Imitates FlashAttention by its documented contract: the causal mask ends at the last query and the last key."""
    mask = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril(k.shape[1] - q.shape[1])
    q, k, v = (each.transpose(1, 2) for each in (q, k, v))
    mask = mask if causal else None
    return F.scaled_dot_product_attention(q, k, v, mask, scale=softmax_scale, enable_gqa=True).transpose(1, 2)


@pytest.fixture
def others(monkeypatch):
    """Installs stand-ins for the packages of other projects."""
    functions = {
        "flash_attn": {"flash_attn_func": flash},
        "flashinfer": {
            "BatchPrefillWithRaggedKVCacheWrapper": _Ragged,
            "BatchDecodeWithPagedKVCacheWrapper": _Paged,
        },
    }
    for package, names in functions.items():
        module = ModuleType(package)
        module.__spec__ = importlib.machinery.ModuleSpec(package, None)
        vars(module).update(names)
        monkeypatch.setitem(sys.modules, package, module)
    return functions


ODD = attention_cases.Case("prefill, odd", 4, 2, 32, 5, 3, 2, 13)


@pytest.mark.parametrize("case", (*CASES, ODD), ids=lambda case: case.name)
@pytest.mark.parametrize("name", comparators.COMPARATORS)
def test_other_projects_attention_is_asked_for_what_a_case_describes(others, name, case):
    inputs = comparators.random_inputs(case, HERE)
    found = comparators.COMPARATORS[name].build(case, inputs)()
    assert comparators.error_of(found, case, inputs) < 1e-5
    assert comparators.error_of(found.flip(-1), case, inputs) > 0.01


def rows_of_attention(measured):
    sizes = replace(QUICK, cases=tuple(replace(case, name=f"{case.name}") for case in CASES[:2]))
    rows = measured("attention", kernel_times.attention, sizes)
    return rows, {row["headline"]: row["value"] for row in rows if "headline" in row}


def test_kernels_are_measured_against_other_projects_where_they_are_installed(measured, others):
    rows, heads = rows_of_attention(measured)
    kinds = [f"{kind}_over_" for kind in ("prefill", "decode")]
    assert set(heads) == {kind + by for kind in kinds for by in ("flash", "flash_attn", "flashinfer")}
    assert all(row["ok"] for row in rows if row["measured"].startswith("is right"))


def test_what_is_not_installed_is_named_and_what_is_wrong_is_not_timed(measured, monkeypatch, others):
    wrong = lambda q, k, v, softmax_scale, causal: q * 0
    monkeypatch.setattr(sys.modules["flash_attn"], "flash_attn_func", wrong)
    monkeypatch.delitem(sys.modules, "flashinfer")
    monkeypatch.setattr(kernel_times, "installed", lambda package: package in sys.modules)
    rows, heads = rows_of_attention(measured)
    assert set(heads) == {"prefill_over_flash", "decode_over_flash"}
    assert [row["ok"] for row in rows if row["measured"].startswith("is right")] == [False, False]
    left_out = [row["why"] for row in rows if row["with"] == "left out"]
    assert left_out == ["flashinfer-python is not installed"]


# ---- copies and decoding


@pytest.fixture
def copying(measured, monkeypatch):
    """Runs the checks of copies on a device that copies late; returns them by name."""
    devices = []

    def run(**options):
        devices.append(SlowDevice(**options))
        monkeypatch.setattr(copy_checks, "copies_for", lambda device: devices[-1])
        rows = measured("copies", copy_checks.copies, QUICK)
        assert any(row["with"] == "share that is hidden" for row in rows)
        return {row["shape"]: row for row in rows if row["measured"] == "copy check"}

    yield run
    for device in devices:
        device._delays = (0.0,)  # nobody waits for the copies that are left
        device.close()


@pytest.mark.skipif(torch.cuda.is_available(), reason="real copies are checked there")
def test_copies_that_are_late_and_in_order_pass_every_check(copying):
    checks = copying()
    assert len(checks) == 6 and all(row["ok"] for row in checks.values()), checks


@pytest.mark.skipif(torch.cuda.is_available(), reason="real copies are checked there")
def test_copies_that_nobody_waits_for_are_found_by_every_check_that_has_some(copying, monkeypatch):
    monkeypatch.setattr(SlowDevice, "follow", lambda self, mark: None)
    monkeypatch.setattr(SlowDevice, "wait", lambda self, mark: None)
    checks = copying(delays=(0.3,))  # longer than a busy machine takes for what does not wait
    assert [row["ok"] for row in checks.values()] == [False] * 5 + [True], checks


def test_decoding_is_the_same_with_graphs_and_without_and_ahead_or_not(measured):
    rows = measured("graphs", graphs.graphs, replace(QUICK, batches=(1,), set_chunks=1, tokens=3))
    same = [row for row in rows if row["measured"] == "answers that are the same"]
    # a small model in fp32, and the one that is measured
    assert [(row["value"], row["ok"]) for row in same] == [(2, True)] * 2 + [(1, True)] * 2
    ahead = [row for row in rows if row["measured"] == "steps launched ahead"]
    assert [bool(row["value"]) for row in ahead] == [True, True, False] and all(row["ok"] for row in ahead)
