"""The file of a compiled chunk."""

import gc
import json
import os
from contextlib import suppress
from dataclasses import replace
from unittest.mock import Mock, patch

import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from library_tools import FullDisk, Unreadable, everything, make_chunk, read, same_inputs, text_key
from safetensors.torch import load_file, save_file

from mpic.durable import FileSystem
from mpic.errors import CorruptFile, OutOfMemory, StorageFull
from mpic.kv.chunk import LATENT, LATENT_ONCE, ChunkKey, ChunkKV, KVKey, KVShape, Recipe
from mpic.kv.file import BLOCK, IO_BYTES, PREFIX, ChunkFile, checksum, write


def written(folder, chunk, *filesystem):
    """The path of a chunk's file."""
    path = folder / "c.safetensors"
    assert write(path, chunk, *filesystem) == path.stat().st_size
    return path


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("image", [False, True])
@pytest.mark.parametrize("positions", [1, 3])
def test_a_chunk_comes_back_as_it_was(tmp_path, dtype, image, positions):
    chunk = make_chunk(text_key(dtype=dtype, sink=4), n=7, dim=3, image=image, positions=positions)
    stored = ChunkFile(written(tmp_path, chunk), chunk.key)
    assert stored.key == chunk.key
    assert stored.shape == KVShape(3, 2, 3) and stored.dtype == chunk.kv.dtype
    assert same_inputs(stored.inputs, chunk.inputs)
    assert torch.equal(read(stored, chunk.kv), chunk.kv)
    assert os.listdir(tmp_path) == ["c.safetensors"]


@pytest.mark.parametrize("inputs", [True, False])
def test_a_compressed_chunk_comes_back_with_fewer_slots_than_tokens(tmp_path, inputs):
    whole = make_chunk(n=40)
    key = replace(whole.key, recipe=replace(whole.key.recipe, press="snapkv-50-4"))
    chunk = ChunkKV(key, whole.inputs, whole.kv[:, :, :, :20])
    stored = ChunkFile(written(tmp_path, chunk), key, inputs=inputs)
    assert (stored.tokens, stored.slots) == (40, 20) and stored.key.recipe.press == "snapkv-50-4"
    assert torch.equal(read(stored, chunk.kv), chunk.kv)
    for kv in (whole.kv, whole.kv[:, :, :, :19]):
        with pytest.raises(ValueError, match=r"not \[layers, 2, kv_heads, 20, head_dim\]"):
            write(tmp_path / "other", ChunkKV(key, whole.inputs, kv))


def test_latents_that_are_kept_once_take_half_the_bytes_and_come_back(tmp_path):
    whole = make_chunk(n=64, layers=4, heads=1, dim=32)
    key = replace(whole.key, recipe=replace(whole.key.recipe, layout=LATENT_ONCE))
    chunk = ChunkKV(key, whole.inputs, whole.kv[:, :1])
    both, once = (written(tmp_path, one).stat().st_size for one in (whole, chunk))
    assert both - once == chunk.kv.nbytes == whole.kv.nbytes // 2, "all of it whole blocks"
    stored = ChunkFile(written(tmp_path, chunk), key)
    assert stored.shape.parts == 1 and torch.equal(read(stored, chunk.kv), chunk.kv)


def test_a_file_has_as_many_parts_as_its_recipe_says(tmp_path):
    whole = make_chunk(n=40, heads=1)
    once = replace(whole.key, recipe=replace(whole.key.recipe, layout=LATENT_ONCE))
    for key, kv in ((whole.key, whole.kv[:, :1]), (once, whole.kv)):
        with pytest.raises(ValueError, match=rf"not \[layers, {key.recipe.parts}, kv_heads, 40, head_dim\]"):
            write(tmp_path / "other", ChunkKV(key, whole.inputs, kv))
    twice = replace(whole.key, recipe=replace(whole.key.recipe, layout=LATENT))
    kept = ChunkFile(written(tmp_path, ChunkKV(twice, whole.inputs, whole.kv)), twice)
    assert kept.shape.parts == 2 and torch.equal(read(kept, whole.kv), whole.kv)
    path = written(tmp_path, whole)
    says = {"recipe": json.dumps(once.recipe.fields())}
    path.write_bytes(forged(path.read_bytes(), lambda header: header["__metadata__"].update(says)))
    with pytest.raises(CorruptFile, match=r"has KV of shape \[2, 1, 40, 4\]"):
        ChunkFile(path)


def test_the_kv_is_one_aligned_range_of_bytes_in_the_order_of_memory(tmp_path):
    chunk = make_chunk(image=True)
    raw = written(tmp_path, chunk).read_bytes()
    data = 8 + int.from_bytes(raw[:8], "little")
    size = chunk.kv.nbytes
    assert data % BLOCK == 0
    assert raw[data : data + size] == chunk.kv.numpy().tobytes()
    entries = json.loads(raw[8:data])
    assert entries["token_ids"]["data_offsets"][0] % BLOCK == 0
    assert entries["kv.002"]["data_offsets"][1] == size


def test_the_stock_safetensors_library_reads_it(tmp_path):
    chunk = make_chunk(text_key(dtype="bfloat16"), image=True)
    tensors = load_file(written(tmp_path, chunk))
    for i, layer in enumerate(chunk.kv):
        assert torch.equal(tensors[f"kv.{i:03d}"], layer)
    assert torch.equal(tensors["deepstack"], chunk.inputs.deepstack)
    assert torch.equal(tensors["token_ids"], chunk.inputs.token_ids)


def test_layers_are_announced_in_order_when_their_bytes_are_in_place(tmp_path):
    chunk = make_chunk(layers=12)
    destination, seen = torch.zeros_like(chunk.kv), []
    for layer in ChunkFile(written(tmp_path, chunk), chunk.key).read_layers(destination):
        assert torch.equal(destination[layer], chunk.kv[layer])
        seen.append(layer)
    assert seen == list(range(12))


def test_reads_are_large(tmp_path):
    files = FileSystem()
    chunk = make_chunk(n=512, layers=7, heads=4, dim=64)  # a layer is 1 MiB
    stored = ChunkFile(written(tmp_path, chunk), chunk.key, files)
    with patch.object(files, "read", wraps=files.read) as reads:
        assert torch.equal(read(stored, chunk.kv), chunk.kv)
    assert [len(call.args[1]) for call in reads.call_args_list] == [IO_BYTES, IO_BYTES, IO_BYTES, 1 << 20]


def test_short_writes_and_short_reads_are_completed(tmp_path):
    class Short(FileSystem):
        def write(self, fd, data):
            return super().write(fd, data[:777])

        def read(self, fd, into, offset):
            return super().read(fd, into[:555], offset)

    chunk = make_chunk(image=True, n=40)
    stored = ChunkFile(written(tmp_path, chunk, Short()), chunk.key, Short())
    assert torch.equal(read(stored, chunk.kv), chunk.kv)
    assert same_inputs(stored.inputs, chunk.inputs)


class Whole:
    """A chunk, its file's bytes, and a place for damaged copies."""

    def __init__(self, folder):
        self.chunk = make_chunk(image=True)
        self.path = written(folder, self.chunk)
        self.raw = self.path.read_bytes()

    def read(self, data):
        """Return the inputs and the KV in a file of other bytes."""
        self.path.write_bytes(data)
        stored = ChunkFile(self.path, self.chunk.key)
        return stored.inputs, read(stored, self.chunk.kv)

    def __repr__(self):
        return "whole"


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return Whole(tmp_path_factory.mktemp("whole"))


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_every_flipped_bit_is_detected(whole, data):
    bit = data.draw(st.integers(0, 8 * len(whole.raw) - 1), label="bit")
    damaged = bytearray(whole.raw)
    damaged[bit // 8] ^= 1 << bit % 8
    with pytest.raises(CorruptFile):
        whole.read(damaged)


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_every_truncation_and_every_extension_is_detected(whole, data):
    raw = whole.raw
    size = data.draw(st.integers(0, len(raw) - 1) | st.integers(len(raw) + 1, len(raw) + BLOCK), label="size")
    with pytest.raises(CorruptFile):
        whole.read(raw[:size].ljust(size, b"\0"))


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_swapped_blocks_are_detected(whole, data):
    blocks = [whole.raw[i : i + 64] for i in range(0, len(whole.raw), 64)]
    i, j = (data.draw(st.integers(0, len(blocks) - 1)) for _ in range(2))
    if blocks[i] == blocks[j]:
        return
    blocks[i], blocks[j] = blocks[j], blocks[i]
    with pytest.raises(CorruptFile):
        whole.read(b"".join(blocks))


json_values = st.recursive(
    st.none() | st.integers(-5, 1 << 40) | st.text(max_size=5),
    lambda x: st.lists(x, max_size=3),
    max_leaves=4,
)


def forged(raw, change):
    """The file with its header changed and a right checksum on the result."""
    start = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:start])
    del header["__metadata__"]["header_xxh3"]
    change(header)
    metadata, entries = json.dumps(header.pop("__metadata__"))[1:], json.dumps(header)[1:]
    text = PREFIX + b"0" * 16 + f'",{metadata},{entries}'.encode()
    head = bytearray((start - 8).to_bytes(8, "little") + text.ljust(start - 8))
    head[8 + len(PREFIX) : 24 + len(PREFIX)] = checksum(bytes(head)).encode()
    return bytes(head) + raw[start:]


def test_the_helper_that_forges_headers_works(whole):
    assert torch.equal(whole.read(forged(whole.raw, lambda header: None))[1], whole.chunk.kv)


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_a_nonsensical_header_with_a_right_checksum_never_raises_anything_else(whole, data):
    def change(header):
        entry = data.draw(st.sampled_from([*header]), label="entry")
        place, name = header, entry
        if entry == "__metadata__" or data.draw(st.booleans(), label="within"):
            place, name = header[entry], data.draw(st.sampled_from([*header[entry]]), label="field")
        if data.draw(st.booleans(), label="remove"):
            del place[name]
        else:
            place[name] = data.draw(json_values, label="value")

    damaged = forged(whole.raw, change)
    with suppress(CorruptFile):
        whole.read(damaged)


@pytest.mark.parametrize("name", ["kv.000", "kv.002", "pad", "token_ids", "embeds", "deepstack"])
def test_a_header_that_leaves_out_a_tensor_is_refused(whole, name):
    with pytest.raises(CorruptFile):
        whole.read(forged(whole.raw, lambda header: header.pop(name)))


def test_foreign_files_are_refused(tmp_path):
    key = text_key()
    path = tmp_path / "c.safetensors"
    for content in (b"", b"\0", b"hello", b"\xff" * 100_000, b"\0" * 100_000):
        path.write_bytes(content)
        with pytest.raises(CorruptFile):
            ChunkFile(path, key)
    save_file({"kv.000": torch.zeros(2, 2, 5, 4)}, path)
    with pytest.raises(CorruptFile, match="not written by this system"):
        ChunkFile(path, key)


def test_a_file_of_any_other_key_is_refused(tmp_path):
    key = text_key(preprocessing="p")
    path = written(tmp_path, make_chunk(key))
    others = [
        KVKey("bob", key.chunk, key.model, key.recipe),
        KVKey(key.owner, ChunkKey("image", key.chunk.digest), key.model, key.recipe),
        KVKey(key.owner, ChunkKey.of_text("other"), key.model, key.recipe),
        KVKey(key.owner, key.chunk, "b2" * 32, key.recipe),
        KVKey(key.owner, key.chunk, key.model, Recipe("bfloat16", preprocessing="p")),
        KVKey(key.owner, key.chunk, key.model, Recipe("float32", sink=4, preprocessing="p")),
        KVKey(key.owner, key.chunk, key.model, Recipe("float32", preprocessing="q")),
    ]
    for other in others:
        with pytest.raises(CorruptFile, match="another chunk"):
            ChunkFile(path, other)
    assert ChunkFile(path).key == ChunkFile(path, key).key == key


def test_an_owner_cannot_forge_the_header(tmp_path):
    key = text_key(owner='x","header_xxh3":"0000000000000000","model":"\u2028')
    assert ChunkFile(written(tmp_path, make_chunk(key)), key).key == key


@pytest.mark.parametrize("left", [0, 1, 4096, 4500, 8600])
def test_a_full_disk_leaves_nothing_and_what_was_there(tmp_path, left):
    disk, old = FullDisk(), make_chunk(seed=1)
    path = written(tmp_path, old, disk)
    disk.left = left
    with pytest.raises(StorageFull):
        write(tmp_path / "d.safetensors", make_chunk(seed=2, image=True), disk)
    assert everything(tmp_path) == {"c.safetensors"}
    assert torch.equal(read(ChunkFile(path, old.key), old.kv), old.kv)


def test_an_open_chunk_survives_its_deletion(tmp_path):
    chunk = make_chunk()
    path = written(tmp_path, chunk)
    stored = ChunkFile(path, chunk.key)
    path.unlink()
    assert torch.equal(read(stored, chunk.kv), chunk.kv)


def test_no_descriptor_is_left_open(tmp_path):
    chunk = make_chunk()
    gc.collect()
    before = psutil.Process().num_fds()
    path = written(tmp_path, chunk)
    for _ in range(5):
        read(ChunkFile(path, chunk.key), chunk.kv)
        with pytest.raises(CorruptFile):
            ChunkFile(path, text_key("other"))
    assert psutil.Process().num_fds() <= before


@pytest.mark.parametrize("begin", [0, 1])
def test_a_file_that_cannot_be_read_now_is_not_called_corrupt(tmp_path, begin):
    chunk, disk = make_chunk(), Unreadable(begin)
    path = written(tmp_path, chunk)
    gc.collect()
    before = psutil.Process().num_fds()
    disk.broken = True
    with pytest.raises(OSError, match="Input/output"):
        read(ChunkFile(path, chunk.key, disk), chunk.kv)
    gc.collect()
    assert psutil.Process().num_fds() <= before


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory")])
def test_exhausted_memory_is_not_called_corrupt(tmp_path, monkeypatch, error):
    chunk = make_chunk()
    path = written(tmp_path, chunk)
    monkeypatch.setattr(ChunkFile, "_read_inputs", Mock(side_effect=error))
    with pytest.raises(OutOfMemory):
        ChunkFile(path, chunk.key)


def test_a_destination_that_does_not_fit_is_refused(tmp_path):
    chunk = make_chunk()
    stored = ChunkFile(written(tmp_path, chunk), chunk.key)
    for wrong in (chunk.kv[:2].clone(), chunk.kv.double(), chunk.kv.to("meta")):
        with pytest.raises(ValueError):
            next(stored.read_layers(wrong))


@pytest.mark.parametrize("io_bytes", [1, 5000, 1 << 20])
def test_a_strided_destination_is_filled_layer_by_layer_and_nothing_around_it_is_touched(
    tmp_path, io_bytes, monkeypatch
):
    """A chunk compiled behind sink slots: its tokens are not one run of memory."""
    monkeypatch.setattr("mpic.kv.file.IO_BYTES", io_bytes)
    chunk = make_chunk(layers=5)
    path = written(tmp_path, chunk)
    layers, two, heads, n, dim = chunk.kv.shape
    extent = torch.full((layers, two, heads, n + 4, dim), 7.0, dtype=chunk.kv.dtype)
    target = extent[:, :, :, 4:]
    for layer in ChunkFile(path, chunk.key, inputs=False).read_layers(target):
        assert torch.equal(target[layer], chunk.kv[layer])
    assert torch.equal(target, chunk.kv) and bool((extent[:, :, :, :4] == 7).all())


def test_layers_can_be_read_without_the_inputs(tmp_path):
    chunk = make_chunk()
    path = written(tmp_path, chunk)
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1  # in the inputs
    path.write_bytes(raw)
    bare = ChunkFile(path, chunk.key, inputs=False)
    assert bare.inputs is None and torch.equal(read(bare, chunk.kv), chunk.kv)
    with pytest.raises(CorruptFile):
        ChunkFile(path, chunk.key)


def test_a_chunk_that_contradicts_itself_is_not_written(tmp_path):
    good = make_chunk()
    for key in (text_key(dtype="bfloat16"), text_key(codec="zip")):
        with pytest.raises(ValueError):
            write(tmp_path / "c", type(good)(key, good.inputs, good.kv))
    with pytest.raises(ValueError):
        write(tmp_path / "c", type(good)(good.key, good.inputs, good.kv[:, :, :, :4]))
    assert not everything(tmp_path)
