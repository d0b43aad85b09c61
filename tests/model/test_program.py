"""Decoding steps in one call: what the model's modules compute, or the modules themselves with a reason."""

from __future__ import annotations

import shutil
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import transformers as tf
from families import TEXT, make_model
from fused_kit import DTYPES, FAMILIES, loaded_model, needs_fused
from processors import compiled_for
from spans_kit import threads
from torch import nn
from unit_kit import use_emulated_unit

from mpic.kernels import c_kernel, decoder, linear, linear_tiles, stream
from mpic.kernels.attention import SpanCall
from mpic.kernels.span import Span
from mpic.kernels.writes import RowWrites
from mpic.kv.pool import Pool
from mpic.model.hooks import Step
from mpic.model.program import NOTE
from mpic.model.program_proof import TOLERANCE
from mpic.model.quantize import quantize_weights
from mpic.model.structure import RowInputs

pytestmark = needs_fused
processor = compiled_for("avx2", "avx512", "avx512_bf16", "amx")


@pytest.fixture(scope="module")
def llama():
    return loaded_model()


def _case(loaded, rows, lengths=(3, 600, 40), bases=(0, 500, 77)):
    """Return a step of single rows with own tokens of mixed lengths, two chunks that rows see at their own bases, one
    of them twice, then its inputs and its memory. The same contents each time."""
    pool = Pool(loaded.shape, 1200 + 650 * rows, 1, loaded.dtype)
    pool.arena.normal_(generator=torch.Generator().manual_seed(1))
    chunks = [pool.kv(pool.alloc(n)) for n in (530, 20)]
    calls, own, slots = [], [], []
    for row in range(rows):
        length = lengths[row % 3] + row
        own.append(pool.kv(pool.alloc(length + 2)))
        slots.append(length)
        calls.append(SpanCall(slice(row, row + 1), Span(own[-1], 0, length + 1), first=True))
        for number, chunk in enumerate((*chunks, chunks[1])):
            span = Span(chunk, 2 * row, chunk.data.shape[3], base=bases[(row + number) % 3] + number)
            if row % 4 != 3 and span.tokens > 0:
                calls.append(SpanCall(slice(row, row + 1), span))
    kinds = [loaded.kind_calls(0, [])._replace(singles=loaded.single_rows(0, calls))]
    writes = RowWrites(pool.arena, range(rows), [view.data for view in own], slots)
    step = Step([], kinds, loaded.kind_of, loaded.partial, single_writes=writes)
    generator = torch.Generator().manual_seed(2)
    inputs = loaded.rows(torch.randint(9, 200, (rows,), generator=generator))
    positions = torch.randint(0, 2000, (loaded.mrope, rows), generator=generator)
    return step, inputs, positions, pool.arena


def _in_one_call(program):
    """Return the way of a step from its tokens to its logits."""
    decoder = program.whole_decoder()

    def run(inputs, positions, step, wanted):
        decoder.use(step.kinds[0].singles, step.single_writes)
        return decoder(inputs.ids.tolist(), *program.rotations(positions)).float()[wanted]

    return run


def _both(loaded, rows, wanted=None, way=None):
    """Return logits and memory after a step through the modules, and after the same step in one call (or another
    way)."""
    wanted = torch.arange(rows) if wanted is None else wanted
    results = []
    for run in (loaded.forward, way or _in_one_call(loaded.program)):
        step, inputs, positions, arena = _case(loaded, rows)
        results.append((run(inputs, positions, step, wanted), arena))
    return results


def _most_rows(loaded):
    return loaded.program.whole_decoder().most_rows


def _assert_same(loaded, results):
    (wanted, memory), (got, fused_memory) = results
    for one, other in ((got, wanted), (fused_memory.float(), memory.float())):
        assert (one - other).abs().max() <= TOLERANCE[loaded.dtype] * other.abs().max()
    assert got.dtype == torch.float32 and got.shape == wanted.shape


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FAMILIES)
def test_logits_keys_and_values_are_those_of_the_modules(name, dtype):
    loaded = loaded_model(name, dtype, FAMILIES[name])
    assert loaded.program is not None and loaded.info.details[NOTE] == ""
    for rows in {min(rows, _most_rows(loaded)) for rows in (1, 3, 16)}:
        _assert_same(loaded, _both(loaded, rows))
        _assert_same(loaded, _both(loaded, rows, way=loaded.program.run))


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_blocks_of_single_rows_are_multiplied_on_the_unit(name, monkeypatch):
    """Up to 64 requests decode in one call; the sizes are such that sums are carried, too."""
    use_emulated_unit(monkeypatch)
    loaded = loaded_model(name, torch.bfloat16, {"hidden_size": 64, "intermediate_size": 2080})
    assert loaded.program is not None and _most_rows(loaded) == decoder.BLOCK_ROWS
    assert loaded.info.details["linear_blocks"] == "cpu-linear-tiles"
    for rows in (4, 5, 33, 64):
        _assert_same(loaded, _both(loaded, rows))


def test_too_many_single_rows_for_one_call_are_refused_and_nothing_is_written(monkeypatch):
    use_emulated_unit(monkeypatch)
    loaded = loaded_model(dtype=torch.bfloat16, text={"hidden_size": 64, "intermediate_size": 96})
    assert _most_rows(loaded) == decoder.BLOCK_ROWS <= linear_tiles.ROWS
    step, inputs, positions, arena = _case(loaded, decoder.BLOCK_ROWS + 1)
    before = arena.clone()
    with pytest.raises(ValueError, match="a step of 65 rows does not write"):
        _in_one_call(loaded.program)(inputs, positions, step, torch.arange(1))
    assert torch.equal(arena, before)


def test_a_step_that_gets_more_threads_has_memory_for_them(monkeypatch):
    use_emulated_unit(monkeypatch)
    text = {"hidden_size": 64, "intermediate_size": 2080}
    loaded, before = loaded_model(dtype=torch.bfloat16, text=text), torch.get_num_threads()
    with threads(1):
        alone = _both(loaded, 6)[1]
    with threads(before + 2):
        together = _both(loaded, 6)[1]
    assert torch.equal(alone[0], together[0]) and torch.equal(alone[1], together[1])


def test_sizes_that_the_unit_does_not_take_are_multiplied_as_before(monkeypatch):
    use_emulated_unit(monkeypatch)
    loaded = loaded_model(dtype=torch.bfloat16, text={"hidden_size": 64, "intermediate_size": 72})
    assert loaded.program is not None and _most_rows(loaded) == linear.load(torch.bfloat16).most_rows
    _assert_same(loaded, _both(loaded, _most_rows(loaded)))


def test_only_wanted_logits_are_computed_in_their_order(llama):
    results = _both(llama, 4, torch.tensor([3, 1]))
    assert len(results[1][0]) == 2
    _assert_same(llama, results)
    assert _both(llama, 2, torch.zeros(0, dtype=torch.int64))[1][0].shape == (0, TEXT["vocab_size"])


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_results_do_not_depend_on_the_number_of_threads(threads):
    """Sizes at which several threads share the work: a product of more than 2^15 weights."""
    loaded = loaded_model(text={"hidden_size": 256, "intermediate_size": 520})
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = _both(loaded, 3)[1]
        torch.set_num_threads(threads)
        together = _both(loaded, 3)[1]
    finally:
        torch.set_num_threads(before)
    assert torch.equal(alone[0], together[0]) and torch.equal(alone[1], together[1])


UNUSUAL = {
    "windows": ("mistral", {}, "do not all attend in the plain way"),
    "products of its own": ("phi3", {}, "layer 0 also has"),
    "another activation": ("llama", {"hidden_act": "gelu"}, "another activation than SiLU"),
    "capped scores": ("gemma2", {}, "do not all attend in the plain way"),
}


@pytest.mark.parametrize("case", UNUSUAL)
def test_a_model_with_something_unusual_keeps_its_modules_and_says_why(case):
    name, text, reason = UNUSUAL[case]
    loaded = loaded_model(name, text=text)
    assert loaded.program is None and reason in loaded.info.details[NOTE]


CHANGES = {
    "a factor": (lambda forward, mlp, x: 0.9 * forward(mlp, x), "differs from the model's own"),
    "a limit that the proof does not reach": (
        lambda forward, mlp, x: forward(mlp, x.clamp(-1e4, 1e4)),
        "also computes clamp",
    ),
}


@pytest.mark.parametrize("what", CHANGES)
def test_what_no_part_shows_is_found_by_running_the_model(what, monkeypatch):
    change, reason = CHANGES[what]
    kind = tf.models.llama.modeling_llama.LlamaMLP
    forward = kind.forward
    monkeypatch.setattr(kind, "forward", lambda mlp, x: change(forward, mlp, x))
    loaded = loaded_model()
    assert loaded.program is None and reason in loaded.info.details[NOTE]


def test_a_family_with_factors_keeps_its_modules():
    loaded = loaded_model(
        model=tf.GraniteForCausalLM(tf.GraniteConfig(**TEXT, residual_multiplier=0.9)).eval()
    )
    assert loaded.program is None and "the model also computes div" in loaded.info.details[NOTE]


def test_quantised_weights_keep_their_modules():
    model = make_model("llama", text={"hidden_size": 64})[0].to(torch.bfloat16)
    quantize_weights(model, "int8")
    loaded = loaded_model(model=model, dtype=torch.bfloat16)
    assert loaded.program is None and "the kernels for products do not multiply" in loaded.info.details[NOTE]


@pytest.mark.parametrize("what", ["hook", "forward", "module", "weight"])
def test_a_program_owns_its_weights_whatever_becomes_of_the_modules(what):
    """It is what was proved: a hook or another weight that a module gets afterwards changes nothing."""
    loaded = loaded_model()
    wanted = _both(loaded, 2, way=loaded.program.run)
    layer = loaded.text_model.layers[1]
    mlp = layer.mlp
    if what == "hook":
        layer.register_forward_hook(lambda module, given, out: 2 * out)
    elif what == "forward":
        layer.forward = lambda *args, **kwargs: 2 * type(layer).forward(layer, *args, **kwargs)
    elif what == "module":
        mlp.down_proj = nn.Linear(mlp.down_proj.in_features, mlp.down_proj.out_features, bias=False)
    else:
        mlp.down_proj.weight = nn.Parameter(mlp.down_proj.weight * 2, requires_grad=False)
    found = _both(loaded, 2, way=loaded.program.run)
    assert not torch.equal(found[0][0], wanted[0][0])
    assert torch.equal(found[1][0], wanted[1][0]) and torch.equal(found[1][1], wanted[1][1])


@pytest.mark.parametrize("what", ["kernel", "deepstack"])
def test_steps_with_anything_else_to_do_run_the_modules(llama, what):
    step, inputs, positions, arena = _case(llama, 2)
    before = arena.clone()
    if what == "deepstack":
        inputs = inputs._replace(deepstack=(torch.zeros(2, dtype=torch.bool), torch.zeros(1, 0, 64)))
    else:
        step = replace(step, kernel=SimpleNamespace())
    assert llama.program.run(inputs, positions, step, torch.arange(2)) is None
    assert torch.equal(arena, before)


def test_more_rows_than_its_products_are_made_for_run_as_a_block(llama):
    _assert_same(llama, _both(llama, _most_rows(llama) + 1, way=llama.program.run))


BROKEN = {
    "the residual": ("decoder.c", "x = rounded_all(x + several(added + i, n - i));", ""),
    "the rotation": ("decoder.c", "- rounded_all(b * s)", "+ rounded_all(b * s)"),
    "the activation": ("decoder.c", "x * (over / (1.0f + e))", "x"),
    "the place of values": ("decoder.c", "kv - d->kv_heads) * DIM;", "0) * DIM;"),
    "the bias": ("linear.c", "(bias ? wide(bias[o]) : 0.0f)", "0.0f"),
    "norms of heads": ("decoder.c", "if (norm) normalize", "if (0) normalize"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_kernel_that_computes_something_else_is_found_and_not_used(what, tmp_path, monkeypatch):
    name, right, wrong = BROKEN[what]
    for source in (decoder.SOURCE, linear.SOURCE, stream.SOURCE, stream.SOURCE.with_name("vectors.h")):
        shutil.copy(source, tmp_path)
    text = (tmp_path / name).read_text()
    assert right in text
    (tmp_path / name).write_text(text.replace(right, wrong))
    monkeypatch.setattr(decoder, "SOURCE", tmp_path / "decoder.c")
    monkeypatch.setattr(c_kernel, "_cache_folder", lambda: tmp_path)
    linear.load(torch.float32), stream.load(32 if "heads" in what else 16, torch.float32)
    decoder.load.cache_clear()
    try:
        loaded = loaded_model("qwen3" if "heads" in what else "qwen2")
    finally:
        decoder.load.cache_clear()
    assert loaded.program is None and "differs from the model's own" in loaded.info.details[NOTE]


def test_weights_that_do_not_fit_together_are_refused(llama):
    weights = llama.program._layers.weights
    kernel = decoder.load(16, torch.float32)
    wrong = [weights.layers[0]._replace(before_gate=torch.ones(3)), *weights.layers[1:]]
    with pytest.raises(ValueError, match="before_gate of layer 0"):
        kernel.decoder(weights._replace(layers=wrong), 8)
    with pytest.raises(ValueError, match="pairs turn"):
        kernel.decoder(weights, 9)


def test_rows_that_are_no_tokens_are_run_too(llama):
    """Such as those of an adapter."""
    step, inputs, positions, _ = _case(llama, 2)
    embeds = torch.randn(2, TEXT["hidden_size"]).T.contiguous().T
    kept = embeds.clone()
    assert llama.program.run(RowInputs(inputs.ids, embeds), positions, step, torch.arange(2)) is not None
    assert torch.equal(embeds, kept)
