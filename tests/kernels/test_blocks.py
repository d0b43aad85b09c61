"""The kernel for blocks of rows in bf16, against one softmax in double precision over the same bf16 numbers."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from processors import why_not
from unit_kit import has_unit

from mpic.kernels import block, c_kernel, instructions, pairs
from mpic.kernels.backends import row_blocks, single_rows
from mpic.model import attention_choice

CPU = torch.device("cpu")
try:
    LOADED = block.load((32, 64, 80, 128))
except block.KernelUnavailable:
    LOADED = None
needs_kernel = pytest.mark.skipif(
    LOADED is None, reason=why_not("avx512_bf16") or "no C compiler on this machine"
)
needs_single_rows = pytest.mark.skipif(
    single_rows(CPU, torch.bfloat16, 64)[0] is None, reason="no kernel for single rows, so none for blocks"
)
TOLERANCE = 2.0**-7
"""This is for results near 1: weights and values have 8 significant bits."""


def exact(q, k, v, causal, scale):
    group = q.shape[1] // k.shape[1]
    keys, values = (x.double().repeat_interleave(group, 1) for x in (k, v))
    scores = q.double() @ keys.transpose(2, 3) * scale
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[2:]).triu(1).bool(), float("-inf"))
    return (scores.softmax(-1) @ values).float(), scores.logsumexp(-1).float()


@st.composite
def cases(draw):
    dim = draw(st.sampled_from((32, 64, 80, 128)))
    kv_heads, group = draw(st.sampled_from((1, 2, 3))), draw(st.sampled_from((1, 2, 7)))
    tokens, causal = draw(st.integers(1, 330)), draw(st.booleans())
    rows = tokens if causal else draw(st.integers(1, 230))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    # a span of a larger extent: heads and slots lie apart
    q = torch.randn(rows, kv_heads * group, dim + 8, generator=generator).bfloat16()
    kv = torch.randn(3, 2, kv_heads, tokens + 5, dim, generator=generator).bfloat16()
    k, v = kv[1, :, :, 3 : 3 + tokens]
    sharp = draw(st.sampled_from((0.1, 1.0, 4.0)))  # of the softmax
    return q[None, :, :, :dim].transpose(1, 2), k[None], v[None], causal, sharp * dim**-0.5


@needs_kernel
@settings(max_examples=60, deadline=None, derandomize=True)
@given(cases())
def test_results_and_log_sums_are_those_of_one_softmax(case):
    out, lse = LOADED(*case)
    wanted, total = exact(*case)
    assert out.dtype == lse.dtype == torch.float32
    torch.testing.assert_close(lse, total, atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(out, wanted, atol=TOLERANCE, rtol=TOLERANCE)


@needs_kernel
def test_it_is_nearer_to_exact_than_torch():
    q, k, v = torch.randn(3, 1, 4, 300, 64, generator=torch.Generator().manual_seed(1)).bfloat16().unbind(0)
    wanted = exact(q, k, v, True, 0.125)[0]
    theirs = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).float()
    assert (LOADED(q, k, v, True, 0.125)[0] - wanted).abs().mean() < (theirs - wanted).abs().mean()


@needs_kernel
def test_a_row_does_not_depend_on_the_rows_and_threads_beside_it():
    q, k, v = torch.randn(3, 1, 6, 500, 64, generator=torch.Generator().manual_seed(2)).bfloat16().unbind(0)
    whole = LOADED(q, k, v, False, 0.125)
    alone = LOADED(q[:, :, 201:202], k, v, False, 0.125)
    assert all(torch.equal(a[:, :, 201:202], b) for a, b in zip(whole, alone, strict=True))
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1 if threads > 1 else 2)
        assert all(torch.equal(a, b) for a, b in zip(whole, LOADED(q, k, v, False, 0.125), strict=True))
    finally:
        torch.set_num_threads(threads)


@needs_kernel
def test_scores_beyond_the_range_of_exponentials_give_neither_nan_nor_infinity():
    q = torch.full((1, 1, 8, 64), 30.0).bfloat16()
    k = torch.cat([torch.full((1, 1, 70, 64), -30.0), torch.full((1, 1, 1, 64), 30.0)], 2).bfloat16()
    v = torch.arange(71.0).expand(64, 71).T[None, None].bfloat16()
    out, lse = LOADED(q, k, v.contiguous(), False, 1.0)
    assert out.eq(70).all() and lse.allclose(torch.tensor(64 * 900.0))


@needs_kernel
@pytest.mark.parametrize("wrong", ["float32", "rectangle", "heads", "strided", "dimension"])
def test_what_it_cannot_read_is_refused_and_not_read(wrong):
    q, k, v = torch.randn(3, 1, 4, 20, 64).bfloat16().unbind(0)
    causal = wrong == "rectangle"
    if wrong == "float32":
        q = q.float()
    elif wrong == "rectangle":
        q = q[:, :, :5]
    elif wrong == "heads":
        k, v = k[:, :3], v[:, :3]
    elif wrong == "strided":
        k = k.transpose(2, 3).contiguous().transpose(2, 3)
    else:
        v = v[..., :32]
    with pytest.raises(ValueError, match="cpu-blocks cannot attend"):
        LOADED(q, k, v, causal, 0.125)


# ---- where it is used


def test_only_bf16_on_a_cpu_has_it():
    assert row_blocks(CPU, torch.float32, [64]) == (None, "")
    assert row_blocks(torch.device("cuda"), torch.bfloat16, [64]) == (None, "")


def test_processors_that_multiply_no_pairs_do_not_have_it(monkeypatch):
    monkeypatch.setattr(instructions, "pairs", lambda: False)
    monkeypatch.setattr(instructions, "unit", lambda: False)
    assert row_blocks(CPU, torch.bfloat16, [64]) == (None, "the processor has no AVX-512 BF16")


def test_processors_with_a_matrix_unit_have_a_better_one(monkeypatch):
    monkeypatch.setattr(instructions, "pairs", lambda: True)
    monkeypatch.setattr(instructions, "unit", lambda: True)
    assert row_blocks(CPU, torch.bfloat16, [64]) == (None, "")


@pytest.mark.parametrize("ratio, taken", [(1.0, True), (1.6, False)])
def test_processors_that_are_slow_at_pairs_have_a_better_one(monkeypatch, ratio, taken):
    kernel = SimpleNamespace()
    monkeypatch.setattr(instructions, "pairs", lambda: True)
    monkeypatch.setattr(instructions, "unit", lambda: False)
    monkeypatch.setattr(pairs, "over_singles", lambda: ratio)
    monkeypatch.setattr(block, "load", lambda dims: kernel)
    assert row_blocks(CPU, torch.bfloat16, [64]) == (kernel if taken else None, "")


@pytest.mark.parametrize("dim", [63, 576])
def test_other_heads_are_left_to_torch(dim, monkeypatch):
    monkeypatch.setattr(instructions, "pairs", lambda: True)
    monkeypatch.setattr(instructions, "unit", lambda: False)
    with pytest.raises(block.KernelUnavailable, match=f"not {dim}"):
        block.load([64 if LOADED else dim, dim])


@needs_kernel
def test_a_kernel_that_computes_something_else_is_refused(tmp_path, monkeypatch):
    wrong = tmp_path / "block.c"
    wrong.write_text(block.SOURCE.read_text().replace("row + 1 : c->tokens", "row + 2 : c->tokens"))
    monkeypatch.setattr(block, "SOURCE", wrong)
    monkeypatch.setattr(c_kernel, "_cache_folder", lambda: tmp_path)
    block._function.cache_clear()
    try:
        with pytest.raises(block.KernelUnavailable, match="wrong by"):
            block.load([64])
    finally:
        block._function.cache_clear()


def choice(softcap: float | None = None) -> attention_choice.AttentionChoice:
    kinds, layers = [SimpleNamespace(dim=64)], [SimpleNamespace(softcap=softcap)]
    return attention_choice.choose("auto", kinds, layers, CPU, torch.bfloat16, torch.bfloat16)


@needs_single_rows
def test_a_matrix_unit_has_the_work_of_bf16_over_all_spans(monkeypatch):
    has_unit(monkeypatch)
    chosen = choice()
    assert chosen.name == "cpu-stream" and chosen.blocks == "cpu-block-tiles"
    assert [spans.name for spans in chosen.spans] == ["cpu-block-tiles"] and not chosen.blocks_note


@needs_single_rows
def test_scores_that_are_capped_stay_torchs_on_a_matrix_unit(monkeypatch):
    """Not even the kernel that would compute in fp32 takes them: torch uses the unit where it can."""
    monkeypatch.setattr(instructions, "unit", lambda: True)
    chosen = choice(30.0)
    assert chosen.blocks == "cpu-flash" and not chosen.spans and "are capped" in chosen.blocks_note


@needs_single_rows
def test_a_unit_that_the_system_withholds_leaves_the_work_to_fp32_and_the_reason_is_told(monkeypatch):
    monkeypatch.setattr(instructions, "unit", lambda: True)
    monkeypatch.setattr(instructions, "pairs", lambda: True)
    monkeypatch.setattr(torch.cpu, "_init_amx", lambda: False)
    chosen = choice()
    assert chosen.blocks == "cpu-block-spans" and "does not let" in chosen.blocks_note
