"""Steps that continue the last one advance its tables, and give the answers of tables that are made anew every time."""

from __future__ import annotations

import itertools

import pytest
import torch
from engine_kit import family, ids, logits_of, prompt_of, request_of, text_chunk

from mpic.engine.native.engine import NativeEngine
from mpic.engine.native.step_tables import StepTables

SHARED, OTHER = text_chunk(ids(70, 40)), text_chunk(ids(71, 23))
LINKED = [prompt_of(ids(1, 5), SHARED, ids(2, 4), OTHER, ids(3, 3)), prompt_of(ids(4, 5), SHARED, ids(5, 4))]
LONG = prompt_of(ids(6, 500))
"""Its own tokens outgrow a section of the CPU's kernel, and the extent they began in."""
SHORT = prompt_of(ids(6, 15))
"""Its own tokens outgrow the extent they began in; Triton's interpreter takes a minute for a long one."""


@pytest.fixture
def answers(monkeypatch):
    """Answers to all prompts at once, with log-probabilities, and the engine's tables."""

    def run(attention: str, own=LONG, tokens: int = 30) -> tuple[list, StepTables]:
        monkeypatch.setattr("mpic.engine.native.scheduler.GROWTH", 8)
        loaded = family("llama").loaded
        loaded.choose_attention(attention)
        engine = NativeEngine(loaded, pages=160, page_size=16)
        engine.pool.arena.fill_(float("nan"))
        try:
            streams = [engine.submit(request_of(p, "mpic-4", tokens, logprobs=300)) for p in (*LINKED, own)]
            found = [logits_of(stream, tokens) for stream in streams]
            engine.check()
        finally:
            engine.close()
            loaded.choose_attention("auto")
        return found, engine.executor.tables

    return run


@pytest.mark.parametrize(
    ("attention", "own", "tokens"),
    [("auto", LONG, 30), ("cpu-flash", LONG, 30), ("triton", SHORT, 6)],
    ids=["auto", "cpu-flash", "triton"],
)
def test_advanced_tables_give_the_answers_of_tables_made_anew(answers, monkeypatch, attention, own, tokens):
    found, tables = answers(attention, own, tokens)
    assert tables.advanced > 0
    monkeypatch.setattr(StepTables, "_continues", lambda self, alone: False)
    # one is slow enough
    expected, anew = answers("auto" if attention == "triton" else attention, own, tokens)
    assert anew.advanced == 0
    for (got, logits), (wanted, wanted_logits) in zip(found, expected, strict=True):
        assert got == wanted and (logits - wanted_logits).abs().max() < 1e-4


def test_tables_are_made_anew_when_anything_but_the_next_token_changes(answers, monkeypatch):
    """Two requests of different lengths, a request that ends, one that grows into another extent: every one of them
    would read or write somewhere else with the last tables."""
    made = []
    together = StepTables.single_rows

    def watched(self, alone):
        before = self.advanced
        out = together(self, alone)
        made.append((self.advanced > before, [(part.rows, part.rows.extent) for part, _ in alone]))
        return out

    monkeypatch.setattr(StepTables, "single_rows", watched)
    answers("auto")
    changed = [old != new for (_, old), (_, new) in itertools.pairwise(made)]
    assert any(changed) and not any(advanced for (advanced, _), change in zip(made[1:], changed) if change)


def test_rows_are_written_to_their_slots_and_to_the_next_ones_after_that():
    from mpic.kernels.writes import RowWrites

    memory = torch.full((3 * 2 * 2 * 20 * 8 + 64,), float("nan"))
    extents = [
        memory[start : start + 3 * 2 * 2 * n * 8].view(3, 2, 2, n, 8) for start, n in ((16, 9), (16 + 864, 7))
    ]
    writes = RowWrites(memory, [2, 0], extents, [4, 0])
    for step in range(2):
        k, v = torch.randn(2, 2, 3, 8).unbind(0)
        for layer in range(3):
            writes.write(layer, k, v)
            for extent, row, slot in zip(extents, (2, 0), (4 + step, step)):
                assert torch.equal(extent[layer, 0, :, slot], k[:, row])
                assert torch.equal(extent[layer, 1, :, slot], v[:, row])
        written = (~memory.isnan()).sum()
        assert written == (step + 1) * 2 * 3 * 2 * 2 * 8
        writes.advance()
