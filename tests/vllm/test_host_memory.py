"""Chunk files in host memory: the budget, pins, the order of loads."""

from __future__ import annotations

import errno
import pickle
import random
from unittest.mock import Mock

import pytest
import torch
from engine_kit import until
from library_tools import flip
from page_locking import page_locked

from mpic.engine.vllm.plugin import host_memory
from mpic.engine.vllm.plugin.host_memory import CachedFile, HostMemory
from mpic.kv.chunk import ChunkInputs, ChunkKey, ChunkKV, KVKey, KVShape, Recipe
from mpic.kv.expected import Expected
from mpic.kv.file import ChunkFile, write
from mpic.packet.adapter import Adapter

SHAPE = KVShape(2, 1, 4)
TOKENS = 8
BYTES = TOKENS * SHAPE.per_token * 4
"""Bytes of a chunk's KV."""


@pytest.fixture
def wanted(tmp_path):
    """Five chunks on disk, in the form that ``HostMemory.load`` takes."""
    return [saved(tmp_path, i, TOKENS) for i in range(5)]


def saved(folder, i: int, tokens: int) -> tuple[str, str, int]:
    """Write chunk number ``i``, whose KV is that number, and return what loads it."""
    key = KVKey("local", ChunkKey.of_text(str(i)), "model", Recipe("float32"))
    inputs = ChunkInputs(torch.arange(tokens), torch.arange(tokens)[None], tokens)
    write(folder / f"{i}.kv", ChunkKV(key, inputs, torch.full((2, 2, 1, tokens, 4), float(i))))
    return f"{i}.kv", key.digest, tokens


@pytest.fixture
def make(tmp_path):
    made = []

    def memory(chunks: int, readers: int = 2, **options) -> HostMemory:
        expected = Expected(SHAPE, torch.float32, 4, 0)
        made.append(HostMemory([tmp_path], chunks * BYTES, readers, expected, **options))
        return made[-1]

    yield memory
    for one in made:
        one.close()


def finish(memory: HostMemory, load) -> None:
    until(lambda: load.done or memory.wait(0.01))


def loaded(memory: HostMemory, wanted):
    """Load chunks to the end."""
    load = memory.load(wanted)
    finish(memory, load)
    return load


def test_chunks_stay_until_others_need_their_memory(make, wanted, monkeypatch):
    reads, read = [], ChunkFile.read_layers
    noted = lambda self, to: reads.append(self.path.name) or read(self, to)
    monkeypatch.setattr(ChunkFile, "read_layers", noted)
    memory = make(3)
    for i in (0, 1, 2, 0, 3, 0, 1):  # 1 was the least recently used when 3 came
        load = loaded(memory, [wanted[i]])
        assert load.chunks[0].state == "ready" and (load.chunks[0].kv == i).all()
        memory.release(load)
    assert reads == ["0.kv", "1.kv", "2.kv", "3.kv", "1.kv"]


def test_page_locked_chunks_count_what_is_allocated(make):
    memory, chunk = make(2), CachedFile("some.kv", "key", 5)
    assert memory._bytes(chunk) == 5 * SHAPE.per_token * 4
    memory._pinned_memory = True
    assert memory._bytes(chunk) == 512, "torch rounds up to a power of two"


def test_page_locked_chunks_of_changing_sizes_stay_within_the_budget(make, tmp_path, monkeypatch):
    """Also with what torch's allocator keeps of those that were evicted."""
    chosen = random.Random(4)
    chunks = [saved(tmp_path, i, chosen.choice((2, 3, 5, 11, 20, 40))) for i in range(40)]
    locked, allocator = page_locked()
    monkeypatch.setattr(host_memory, "PAGE_LOCKED", locked)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    memory = make(16)
    for _ in range(60):
        loads = [memory.load(chosen.sample(chunks, chosen.randint(1, 2))) for _ in range(2)]
        for load in loads:
            finish(memory, load)
            assert all((chunk.kv == int(chunk.path.split(".")[0])).all() for chunk in load.chunks)
            memory.release(load)
        del loads, load
    assert allocator.most <= 16 * BYTES and allocator.emptied > 5


def test_loads_wait_for_memory_in_order_and_pinned_chunks_stay(make, wanted):
    memory = make(2)
    first, second = memory.load(wanted[:2]), memory.load(wanted[1:3])
    third = memory.load(wanted[3:4])
    finish(memory, first)
    assert not second.started and not third.started
    memory.release(first)
    memory.release(first)
    assert second.started and not third.started
    finish(memory, second)
    assert second.chunks[0] is first.chunks[1]
    memory.release(second)
    finish(memory, third)


def test_a_load_larger_than_the_budget_has_its_turn_alone(make, wanted):
    memory = make(2)
    small, large, next_one = memory.load(wanted[:1]), memory.load(wanted), memory.load(wanted[:1])
    finish(memory, small)
    assert not large.started
    memory.release(small)
    finish(memory, large)
    assert not next_one.done
    memory.release(large)
    finish(memory, next_one)


def test_what_was_released_does_not_stay_beyond_the_budget(make, wanted):
    memory = make(2)
    load = loaded(memory, wanted)
    assert len(memory._chunks) == len(wanted)
    memory.release(load)
    assert len(memory._chunks) == 2


def test_a_chunk_that_is_waited_for_is_read_although_another_order_gives_it_another_length(
    make, wanted, slow_disk
):
    memory = make(9, readers=1)
    first = memory.load(wanted[:1])
    until(lambda: slow_disk.reads)
    path, key, tokens = wanted[1]
    waits, other = memory.load([(path, key, tokens)]), memory.load([(path, key, tokens + 1)])
    slow_disk.go.set()
    for load in (first, waits, other):
        finish(memory, load)
    assert (waits.chunks[0].state, other.chunks[0].code) == ("ready", "mismatch")


def test_a_load_that_came_back_goes_first(make, wanted):
    memory = make(1)
    held, waits = memory.load(wanted[:1]), memory.load(wanted[1:2])
    back = memory.load(wanted[2:3], first=True)
    memory.release(held)
    assert back.started and not waits.started
    memory.release(waits)
    memory.release(back)


def test_a_file_that_could_not_be_read_is_tried_again(make, wanted, tmp_path):
    memory = make(3)
    good = (tmp_path / "0.kv").read_bytes()
    (tmp_path / "0.kv").write_bytes(good[:-1])
    load = loaded(memory, wanted[:2])
    assert [chunk.code for chunk in load.chunks] == ["corrupt", ""]
    (tmp_path / "0.kv").write_bytes(good)
    again = loaded(memory, wanted[:1])
    assert again.chunks[0].state == "ready"


def test_a_disk_that_does_not_answer_fails_a_load_and_not_the_readers(make, wanted, monkeypatch):
    memory = make(3)
    with monkeypatch.context() as patch:
        patch.setattr("mpic.kv.file.read_all", Mock(side_effect=OSError(5, "Input/output error")))
        load = loaded(memory, wanted[:1])
    assert (load.chunks[0].state, load.chunks[0].code) == ("failed", "corrupt")
    again = loaded(memory, wanted[:1])
    assert again.chunks[0].state == "ready"


@pytest.mark.parametrize("error", [MemoryError(), OSError(errno.ENOMEM, "no memory")])
def test_a_file_that_there_is_no_memory_for_is_not_called_damaged(make, wanted, monkeypatch, error):
    memory = make(chunks=5)
    monkeypatch.setattr(ChunkFile, "read_layers", Mock(side_effect=error))
    load = memory.load(wanted[:1])
    finish(memory, load)
    assert (load.chunks[0].state, load.chunks[0].code) == ("failed", "out_of_memory")
    monkeypatch.undo()
    again = memory.load(wanted[:1])
    finish(memory, again)
    assert again.chunks[0].state == "ready"


def test_one_chunk_is_read_once_for_all_that_wait_for_it(make, wanted, slow_disk):
    memory = make(3)
    loads = [memory.load([wanted[0], wanted[0]]), memory.load(wanted[:1])]
    slow_disk.go.set()
    for load in loads:
        finish(memory, load)
    assert slow_disk.reads == ["0.kv"] and loads[0].chunks[0] is loads[0].chunks[1] is loads[1].chunks[0]


def test_the_inputs_of_all_chunks_are_read_before_the_kv_of_any(make, wanted, monkeypatch):
    done, read, open_inputs = [], ChunkFile.read_layers, ChunkFile._read_inputs
    noted = lambda what, method: (
        lambda self, *rest: done.append((what, self.path.name)) or method(self, *rest)
    )
    monkeypatch.setattr(ChunkFile, "read_layers", noted("kv", read))
    monkeypatch.setattr(ChunkFile, "_read_inputs", noted("inputs", open_inputs))
    memory = make(3, readers=1)
    finish(memory, memory.load(wanted[:3]))
    assert done == [(what, f"{i}.kv") for what in ("inputs", "kv") for i in range(3)]


def test_a_chunk_that_nobody_waits_for_any_more_is_not_read(make, wanted, slow_disk):
    memory = make(5, readers=1)
    first = memory.load(wanted[:1])
    until(lambda: slow_disk.reads)
    given_up, again, last = memory.load(wanted[1:3]), memory.load(wanted[2:3]), memory.load(wanted[3:4])
    memory.release(given_up)
    slow_disk.go.set()
    for load in (first, again, last):
        finish(memory, load)
    assert slow_disk.reads == ["0.kv", "2.kv", "3.kv"]
    finish(memory, back := memory.load(wanted[1:2]))
    assert back.chunks[0].state == "ready" and slow_disk.reads[-1] == "1.kv"


def test_another_process_reads_its_own_heads_and_layers(make, wanted, tmp_path):
    memory = make(1)
    load = loaded(memory, wanted[3:4])
    there = pickle.loads(pickle.dumps(load.chunks[0]))
    (layer,) = there.slice_kv(range(1, 2), range(1))
    assert there.kv is None and torch.equal(layer, torch.full((2, 1, TOKENS, 4), 3.0))
    assert torch.equal(there.given_inputs().token_ids, torch.arange(TOKENS))
    (tmp_path / "3.kv").unlink()
    with pytest.raises(OSError):
        there.slice_kv(range(2), range(1))


def test_without_workers_in_this_process_no_kv_is_kept_and_a_damaged_file_is_still_found(
    make, wanted, tmp_path
):
    memory = make(3, keep_kv=False)
    flip(tmp_path / "1.kv", -1)
    load = loaded(memory, wanted[:2])
    assert [chunk.state for chunk in load.chunks] == ["ready", "failed"]
    assert load.chunks[0].kv is None and load.chunks[1].code == "corrupt"
    there = pickle.loads(pickle.dumps(load.chunks[0])).slice_kv(range(2), range(1))
    assert all((layer == 0).all() and layer.shape == (2, 1, TOKENS, 4) for layer in there)


def test_without_workers_in_this_process_the_budget_counts_what_is_kept(make, wanted):
    memory = make(1, keep_kv=False)  # enough for the KV of one chunk, or for the embeddings of four
    loads = [memory.load([one]) for one in wanted]
    assert [load.started for load in loads] == [True, True, True, True, False]


@pytest.mark.parametrize("keep_kv", [True, False])
def test_the_embeddings_of_a_texts_packet_do_not_stay_in_host_memory(tmp_path, keep_kv):
    """They follow from the ids of the prompt, and the budget does not count them beside KV."""
    width, adapter = 512, Adapter(torch.ones(2, 512), torch.ones(1, 512), "0" * 64)
    key = KVKey("local", ChunkKey.of_text("packet"), "model", Recipe("float32", packet=adapter.digest))
    bare = ChunkInputs(torch.arange(5), torch.arange(5)[None], 5, torch.zeros(5, width))
    write(
        tmp_path / "packet.kv",
        ChunkKV(key, bare.wrap(adapter.header, adapter.trailer), torch.zeros(2, 2, 1, TOKENS, 4)),
    )
    expected = Expected(SHAPE, torch.float32, width, 0, adapter)
    memory = HostMemory([tmp_path], 4 * BYTES, 1, expected, keep_kv)
    load = loaded(memory, [("packet.kv", key.digest, TOKENS)])
    memory.close()
    [chunk] = load.chunks
    worker = pickle.loads(pickle.dumps(chunk)).given_inputs()
    assert chunk.state == "ready" and chunk.inputs.token_ids.tolist()[2:7] == list(range(5))
    for inputs in (chunk.inputs, worker):
        storages = [one.untyped_storage() for one in (inputs.token_ids, inputs.positions)]
        held = {one.data_ptr(): one.nbytes() for one in storages}
        assert inputs.embeds is None and sum(held.values()) == 2 * TOKENS * 8
