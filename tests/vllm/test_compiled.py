"""Compiled chunks that are still being written: how long they are waited for. The clock is one that tests move."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from mpic.engine.vllm.frontend import compiled
from mpic.engine.vllm.wire import NO_MEMORY, NOT_WRITTEN, part_name
from mpic.errors import CompileFailed, EngineStopped, OutOfMemory

TIMEOUT = 30.0


@pytest.fixture
def spool(tmp_path, monkeypatch):
    """A spool with this chunk's folder and another's. ``at`` maps a second to what the writer does then."""
    spool = SimpleNamespace(mine=tmp_path / "mine", other=tmp_path / "other", at={}, now=0.0)
    spool.mine.mkdir(), spool.other.mkdir()

    def sleep(_: float) -> None:
        spool.now += 1.0
        spool.at.get(spool.now, lambda: None)()

    monkeypatch.setattr(compiled, "time", SimpleNamespace(monotonic=lambda: spool.now, sleep=sleep))
    return spool


def finish(spool) -> None:
    tensors = {
        "kv": torch.ones(1, 2, 1, 3, 4),
        "token_ids": torch.arange(3),
        "positions": torch.arange(3)[None],
    }
    metadata = {"ranks": "1 1", "extent": "3", "layers": "0 1", "heads": "0 1"}
    save_file(tensors, spool.mine / f"{part_name(0, 0)}.safetensors", metadata)


def test_a_chunk_in_the_queue_is_waited_for_while_others_are_written(spool):
    def grow(size: int):
        return lambda: (spool.other / f"{part_name(0, 0)}.tmp").write_bytes(b"x" * size)

    spool.at = {20.0 * i: grow(i) for i in range(1, 10)} | {200.0: lambda: finish(spool)}
    inputs, _ = compiled.read_compiled(spool.mine, TIMEOUT)
    assert len(inputs) == 3 and spool.now == 200


def test_a_chunk_is_given_up_when_nothing_is_written_any_more(spool):
    spool.at = {20.0: lambda: (spool.other / "part.tmp").write_bytes(b"x")}
    with pytest.raises(CompileFailed, match="not written"):
        compiled.read_compiled(spool.mine, TIMEOUT)
    assert spool.now <= 3 * TIMEOUT


def test_a_chunk_that_could_not_be_written_is_given_up_at_once(spool):
    spool.at = {5.0: lambda: (spool.mine / f"{part_name(0, 0)}{NOT_WRITTEN}").touch()}
    with pytest.raises(CompileFailed, match="not written"):
        compiled.read_compiled(spool.mine, TIMEOUT)
    assert spool.now == 5


def test_a_chunk_that_a_worker_had_no_memory_for_can_be_asked_for_again(spool):
    (spool.mine / f"{part_name(0, 0)}{NO_MEMORY}").touch()
    with pytest.raises(OutOfMemory):
        compiled.read_compiled(spool.mine, TIMEOUT)


def test_nothing_more_is_waited_for_when_vllm_has_died(spool):
    """A chunk that vLLM has written to the end before it died is read."""
    spool.at = {20.0: lambda: (spool.other / "part.tmp").write_bytes(b"x")}
    with pytest.raises(EngineStopped, match="died"):
        compiled.read_compiled(spool.mine, TIMEOUT, dead=lambda: spool.now >= 5)
    assert spool.now == 5
    finish(spool)
    inputs, _ = compiled.read_compiled(spool.mine, TIMEOUT, dead=lambda: True)
    assert len(inputs) == 3
