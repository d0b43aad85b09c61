"""Counted operations against torch's own counter."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace

import torch
from engine_kit import family, ids, prompt_of, request_of, text_chunk
from torch.utils.flop_counter import FlopCounterMode

from mpic.engine.native.engine import NativeEngine
from mpic.link import parse_policy
from mpic_lab.eval.flops import Flops
from mpic_lab.models.instances import build


def test_a_full_prefill_is_what_torch_counts_for_a_stock_forward():
    fam = family("llama")
    fam.stock.set_attn_implementation("eager")
    flops, n = Flops(fam.stock), 24
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        fam.stock(input_ids=torch.tensor([ids(1, n)]), use_cache=False, logits_to_keep=1)
    with closing(NativeEngine(fam.loaded, pages=64, page_size=8)) as engine:
        usage = engine.submit(request_of(prompt_of(ids(1, n)), "full", 1)).result().usage
    assert (usage.computed, usage.attended) == (n, n * (n + 1) // 2)
    # eager attention computes masked pairs too
    masked = flops.layers * flops.pair * (n * n - n * (n + 1) // 2)
    assert flops.of(usage) + masked == counter.get_total_flops()


def test_reuse_attends_to_every_token_but_computes_only_its_own():
    prompt = prompt_of(ids(1, 4), text_chunk(ids(2, 20)), ids(3, 6))
    requests = [request_of(prompt, policy, 1) for policy in ("reuse", "reuse-2step", "full")]
    with closing(NativeEngine(family("llama").loaded, pages=64, page_size=8)) as engine:
        reuse, late, full = (engine.submit(request).result().usage for request in requests)
    assert reuse.attended == 10 * 11 // 2 + 6 * 20
    assert late.attended == 10 * 11 // 2 + 1 * 20  # only the last token of its text sees the chunk
    assert Flops(family("llama").stock).of(reuse) < Flops(family("llama").stock).of(full) / 2


def test_what_a_dynamic_policy_looks_at_first_is_counted():
    prompt = prompt_of(ids(1, 4), text_chunk(ids(2, 20)), ids(3, 6))
    fam, found = family("llama"), {}
    flops, layer = Flops(fam.stock), fam.loaded.text_model.layers[0].self_attn
    weights = sum(part.weight.numel() for part in (layer.q_proj, layer.k_proj, layer.v_proj))
    with closing(NativeEngine(fam.loaded, pages=64, page_size=8)) as engine:
        for name in ("cacheblend-50", "a3-30"):
            usage = engine.submit(request_of(prompt, name, 1)).result().usage
            found[name] = flops.of(usage, parse_policy(name)) - flops.of(replace(usage, probed=0))
    assert found["cacheblend-50"] == 30 * (flops.layer + 2 * weights) + flops.pair * 30 * 31 // 2
    assert found["a3-30"] == 6 * 2 * weights + flops.pair // 2 * 6 * 20, (
        "the question's queries, and their scores"
    )


def test_a_model_whose_layers_have_heads_of_different_sizes_is_counted_by_their_mean():
    flops = Flops(build("gemma4", "image-text-to-text"))
    assert flops.layers == 4 and flops.pair > 0 and flops.layer > 0
