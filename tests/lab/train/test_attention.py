"""Attention by blocks equals torch's own under the same mask, forwards and backwards."""

import numpy as np
import pytest
import torch

from mpic_lab.train.attention import attend, make_block
from mpic_lab.train.batch import Example
from mpic_lab.train.curriculum import Group, fill
from mpic_lab.train.optim import _orthogonalize


def _visible(rows, kind):
    i = np.arange(rows)
    causal = i[None] <= i[:, None]
    if kind == "causal":
        return causal
    if kind == "islands":
        return causal & (i[None] // 7 == i[:, None] // 7)
    random = np.random.default_rng(0).random((rows, rows)) < 0.3
    return random & causal | np.eye(rows, dtype=bool)


@pytest.mark.parametrize("kind", ["causal", "islands", "random"])
@pytest.mark.parametrize("size", [1, 8, 64])
def test_values_and_gradients_are_those_of_masked_attention(kind, size):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 40, 16, dtype=torch.float64, requires_grad=True) for _ in range(3))
    visible = _visible(40, kind)
    blocks = [make_block(visible[i : i + size], i, 0) for i in range(0, 40, size)]
    ours = attend(q, k, v, blocks, 0.25)
    theirs = torch.nn.functional.scaled_dot_product_attention(q, k, v, torch.from_numpy(visible), scale=0.25)
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-6)
    weight = torch.randn_like(ours)
    for own, other in zip(
        *(torch.autograd.grad((x * weight).sum(), (q, k, v)) for x in (ours, theirs)), strict=True
    ):
        torch.testing.assert_close(own, other, atol=1e-6, rtol=1e-6)


def test_half_precision_stays_so_where_autocast_computes_a_softmax_in_fp32(monkeypatch):
    """CUDA's does, and its product with the values then has two dtypes; a CPU's does not."""
    softmax = torch.softmax

    def as_on_cuda(x, dim):
        return softmax(x.float() if torch.is_autocast_enabled(x.device.type) else x, dim)

    monkeypatch.setattr(torch, "softmax", as_on_cuda)
    q, k, v = (torch.randn(2, 40, 16, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    visible = _visible(40, "causal")
    with torch.autocast("cpu", torch.bfloat16):
        out = attend(q, k, v, [make_block(visible[i : i + 8], i, 0) for i in range(0, 40, 8)], 0.25)
    out.float().sum().backward()
    assert out.dtype == q.grad.dtype == torch.bfloat16


def test_a_block_reads_only_the_keys_that_its_rows_see():
    visible = _visible(40, "islands")
    block = make_block(visible[14:21], 14, 0)
    assert (block.start, block.end, block.low, block.high) == (14, 21, 14, 21)
    assert make_block(np.ones((3, 5), bool), 10, 2).bias is None


@pytest.mark.parametrize("shape", [(48, 24), (24, 48)])
def test_orthogonalized_matrices_have_singular_values_near_one(shape):
    torch.manual_seed(0)
    values = torch.linalg.svdvals(_orthogonalize(torch.randn(shape)).float())
    assert values.min() > 0.4 and values.max() < 1.4


def test_batches_keep_every_group_and_the_budget():
    groups = [Group([Example(ids=[0] * n)], n) for n in (900, 300, 300, 200, 800, 1000, 100)]
    batches = fill(groups, 1000)
    assert sorted(g.rows for batch in batches for g in batch) == sorted(g.rows for g in groups)
    assert all(sum(g.rows for g in batch) <= 1000 for batch in batches) and len(batches) == 4
