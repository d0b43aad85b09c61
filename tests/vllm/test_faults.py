"""Bad orders and bad files against a running engine: the request at fault says why, the next one is served.

The engine has room in host memory for one request's chunks at a time.
"""

from __future__ import annotations

import os
import threading
from dataclasses import replace

import pytest
import torch
import vllm_kit as kit
from engine_kit import ids, image_chunk, prompt_of, text_chunk
from families import random_image
from vllm_links import MODEL, Linker, engine, replaced

from mpic.engine.vllm.wire import CompileOrder
from mpic.kv.chunk import ChunkKV, KVKey, Recipe
from mpic.kv.file import ChunkFile, write

PATIENCE = 0.3
IMAGE, DOCUMENT = image_chunk(random_image(1)), text_chunk(ids(7, 41))
TEXT = prompt_of([1, *ids(1, 26)], DOCUMENT, ids(2, 9))
BOTH = prompt_of([1, *ids(1, 26)], IMAGE, ids(2, 3), DOCUMENT, ids(3, 9))


@pytest.fixture(scope="module")
def linker(tmp_path_factory):
    files = tmp_path_factory.mktemp("chunks")
    with engine(kit.checkpoint("llava"), files, {"patience": PATIENCE, "host_bytes": 1}) as llm:
        linker = Linker(llm, "llava", files)
        linker.file(IMAGE), linker.file(DOCUMENT)
        yield linker


@pytest.fixture(autouse=True)
def serves_the_next(linker):
    """Whatever a test did, the engine goes on and holds nothing of it."""
    yield
    (answer,) = linker.run(*zip(linker.link(BOTH, "mpic-4")))
    expected, logprobs = linker.expected(BOTH, "mpic-4")
    assert answer.ids == expected and (answer.logprobs - logprobs).abs().max() < 1e-4
    scheduler = linker.llm.llm_engine.engine_core.engine_core.scheduler
    admission, host = scheduler.connector._admission, scheduler.connector._host
    assert not admission._tickets and not host._held and not scheduler.requests


def told(linker, prompt, params):
    (answer,) = linker.reported([prompt], [params])
    return answer


def refused(linker, prompt, params, word: str, code: str = "bad_link_order") -> None:
    answer = told(linker, prompt, params)
    assert answer.reason == "error" and not answer.ids
    assert answer.report["error"] == code and word in answer.report["message"], answer.report


def change_link(**fields):
    def change(body):
        body["link"] |= fields

    return change


def change_chunk(**fields):
    def change(body):
        body["link"]["chunks"] = [dict(ref._asdict(), **fields) for ref in body["link"]["chunks"]]

    return change


ORDERS = {
    "another version": (lambda body: body.update(version=2), "version"),
    "not an object": (lambda body: body.update(link=[]), "either link or compile"),
    "two kinds": (lambda body: body.update(compile={"folder": "x"}), "either link or compile"),
    "an unknown field": (change_link(policy="mpic-4"), "unknown field"),
    "another length": (change_link(length=7), "7 tokens"),
    "an extent of nothing": (change_link(extent=0), "extent"),
    "an extent that the chunks do not make": (change_link(extent=70), "extent 70"),
    "rows of words": (change_link(rows=[["a", "b"]]), "pairs of numbers"),
    "rows in no order": (change_link(rows=[[30, 77], [0, 20]]), "ascend"),
    "rows behind the end": (change_link(rows=[[0, 900]]), "ascend"),
    "no rows": (change_link(rows=[]), "last token"),
    "a last token that nobody computes": (change_link(rows=[[0, 60]]), "last token"),
    "tokens in no chunk": (change_link(rows=[[70, 77]]), "neither computed nor in a chunk"),
    "chunks of nothing": (change_chunk(length=0), "follow each other"),
    "a chunk behind the end": (change_chunk(start=70), "follow each other"),
    "a base that goes back": (change_chunk(base=-1), "ascend"),
    "a base that is not the chunk's": (change_chunk(base=28), "base 28"),
    "numbers beyond any prompt": (change_chunk(start=1 << 62, length=1 << 62), "follow each other"),
    "chunks that are no list": (change_link(chunks="all"), "chunks must be a list"),
    "an unknown field of a chunk": (change_chunk(quick=True), "unknown field"),
    "a key that is a number": (change_chunk(key=7), "key"),
    "a path that is a number": (change_chunk(path=7), "path"),
    "a path with a zero in it": (change_chunk(path="a\0b"), "path"),
    "an absolute path": (change_chunk(path="/etc/passwd"), "relative"),
    "a path that climbs": (change_chunk(path="../x.kv"), "relative"),
}


@pytest.mark.parametrize("kind", ORDERS)
def test_a_bad_order_is_refused_with_its_reason(linker, kind):
    prompt, params = linker.link(TEXT, "mpic-4")
    body = params["mpic"]
    body["link"] = {**body["link"], "chunks": linker.order(TEXT, "mpic-4")[1].chunks}
    change, word = ORDERS[kind]
    change(body)
    if body["link"] and kind != "chunks that are no list":
        body["link"]["chunks"] = [
            dict(ref) if isinstance(ref, dict) else list(ref) for ref in body["link"]["chunks"]
        ]
    refused(linker, prompt, params, word)


def test_a_link_without_a_salt_is_refused(linker):
    prompt, params = linker.link(TEXT, "mpic-4")
    refused(linker, {"prompt_token_ids": prompt["prompt_token_ids"]}, params, "cache_salt")


def test_a_link_with_images_of_its_own_is_refused(linker):
    _, params = linker.link(TEXT, "mpic-4")
    request = {"prompt_token_ids": [kit.IMAGE_TOKEN, 1], "multi_modal_data": {"image": random_image(1)}}
    length = 17  # vLLM widens the image to 16 tokens before our side sees it
    params["mpic"]["link"] |= {"length": length, "extent": length, "rows": [[0, length]], "chunks": []}
    refused(linker, {**request, "cache_salt": "images"}, params, "chunk files")


def test_log_probabilities_of_a_linked_prompt_are_refused(linker):
    (answer,) = linker.reported(*zip(linker.link(TEXT, "mpic-4")), prompt_logprobs=1)
    assert answer.report["error"] == "bad_link_order" and "log-probabilities" in answer.report["message"]


def test_a_prompt_that_is_too_long_is_refused_before_it_starts(linker):
    from vllm.exceptions import VLLMValidationError

    request, params = linker.link(TEXT, "mpic-4")
    with pytest.raises(VLLMValidationError, match="1024"):
        linker.run([{**request, "prompt_token_ids": ids(9, 1100)}], [params])


@pytest.mark.parametrize("folder", ["nowhere", "a-file", "x" * 4000])
def test_compiling_into_no_folder_is_refused(linker, folder):
    (linker.files / "a-file").touch()
    refused(linker, {"prompt_token_ids": ids(1, 9)}, CompileOrder(folder).params(), "no folder")


def test_compiling_outside_of_the_folders_is_refused(linker):
    refused(linker, {"prompt_token_ids": ids(1, 9)}, CompileOrder("../outside").params(), "relative")


def test_compiling_without_a_token_is_refused(linker):
    refused(linker, {"prompt_token_ids": ids(1, 9)}, CompileOrder("nowhere", 9).params(), "skip")


def test_a_compile_that_cannot_be_written_says_so(linker, monkeypatch):
    from mpic.engine.vllm.capture import read_compiled
    from mpic.errors import CompileFailed

    folder = linker.files / "unwritten"
    folder.mkdir()
    monkeypatch.setattr(
        "mpic.engine.vllm.capture.save_file", lambda *_: (_ for _ in ()).throw(OSError("broken"))
    )
    answer = told(linker, {"prompt_token_ids": ids(1, 9)}, CompileOrder("unwritten").params())
    assert answer.report["error"] is None
    with pytest.raises(CompileFailed, match="not written"):
        read_compiled(folder)


def test_a_full_disk_is_named(linker, monkeypatch):
    from mpic.engine.vllm.capture import read_compiled
    from mpic.errors import StorageFull

    (linker.files / "full").mkdir()
    full = OSError(28, "No space left on device")
    monkeypatch.setattr("mpic.engine.vllm.capture.save_file", lambda *_: (_ for _ in ()).throw(full))
    told(linker, {"prompt_token_ids": ids(1, 9)}, CompileOrder("full").params())
    with pytest.raises(StorageFull):
        read_compiled(linker.files / "full")


# files


def copy(linker, chunk) -> tuple:
    """A fresh copy of a chunk's file: (path on disk, (path, key))."""
    _, (name, key) = linker.file(chunk)
    fresh = f"copy-{len(list(linker.files.iterdir()))}.kv"
    (linker.files / fresh).write_bytes((linker.files / name).read_bytes())
    return linker.files / fresh, (fresh, key)


def flipped(position: int):
    def damage(linker, path, chunk):
        raw = bytearray(path.read_bytes())
        raw[position] ^= 1
        path.write_bytes(raw)

    return damage


def cut(linker, path, chunk):
    path.write_bytes(path.read_bytes()[:-100])


def emptied(linker, path, chunk):
    path.write_bytes(b"")


def foreign(linker, path, chunk):
    path.write_bytes(os.urandom(8000))


def endless_header(linker, path, chunk):
    raw = path.read_bytes()
    path.write_bytes(b"\xff" * 7 + b"\x7f" + raw[8:])


def gone(linker, path, chunk):
    path.unlink()


def a_folder(linker, path, chunk):
    path.unlink()
    path.mkdir()


def a_pipe(linker, path, chunk):
    path.unlink()
    os.mkfifo(path)


def a_link_outside(linker, path, chunk):
    outside = linker.files.parent / path.name
    path.rename(outside)
    path.symlink_to(outside)


def another_chunk(linker, path, chunk):
    other = DOCUMENT if chunk is IMAGE else IMAGE
    path.write_bytes((linker.files / linker.file(other)[1][0]).read_bytes())


def changed(change):
    """A valid file of the same key that holds something else."""

    def damage(linker, path, chunk):
        inputs, (name, _) = linker.file(chunk)
        kv = torch.empty(3, 2, 2, len(inputs), 32)
        list(ChunkFile(linker.files / name).read_layers(kv))
        _, (fresh, _) = linker.save(chunk, *change(inputs, kv))
        (linker.files / fresh).rename(path)

    return damage


def other_tokens(inputs, kv):
    return replace(inputs, token_ids=inputs.token_ids.flip(0) + 1), kv


def one_token_less(inputs, kv):
    less = {
        name: getattr(inputs, name)[:-1]
        for name in ("token_ids", "embeds")
        if getattr(inputs, name) is not None
    }
    less |= {"positions": inputs.positions[:, :-1], "extent": inputs.extent - 1}
    return replace(inputs, **less), kv[:, :, :, :-1]


FILES = {
    "missing": (gone, "missing"),
    "a damaged layer": (flipped(3 * 4096), "corrupt"),
    "a damaged header": (flipped(100), "corrupt"),
    "a damaged end": (flipped(-1), "corrupt"),
    "cut off": (cut, "corrupt"),
    "empty": (emptied, "corrupt"),
    "no file of ours": (foreign, "corrupt"),
    "a header without end": (endless_header, "corrupt"),
    "a folder": (a_folder, "mismatch"),
    "a pipe": (a_pipe, "mismatch"),
    "another chunk": (another_chunk, "mismatch"),
    "more layers": (changed(lambda inputs, kv: (inputs, kv.repeat(2, 1, 1, 1, 1))), "mismatch"),
    "fewer layers": (changed(lambda inputs, kv: (inputs, kv[:2])), "mismatch"),
    "more heads": (changed(lambda inputs, kv: (inputs, kv.repeat(1, 1, 2, 1, 1))), "mismatch"),
    "other tokens": (changed(other_tokens), "mismatch"),
    "fewer tokens": (changed(one_token_less), "mismatch"),
}


@pytest.mark.parametrize("kind", FILES)
def test_text_whose_file_cannot_be_used_is_computed_and_said_to_be(linker, kind):
    damage, code = FILES[kind]
    path, file = copy(linker, DOCUMENT)
    damage(linker, path, DOCUMENT)
    prompt, params = linker.link(TEXT, "mpic-4", files={0: file})
    (full,) = linker.run([prompt], [None])
    answer = told(linker, {**prompt, "cache_salt": "fresh " + kind}, params)
    assert answer.reason == "length" and answer.ids == full.ids
    assert answer.report["error"] is None and answer.report["fallback"] == [(0, code)]
    assert answer.report["reused"] == 0 and answer.report["recomputed"] == len(prompt["prompt_token_ids"])


@pytest.mark.parametrize("kind", FILES)
def test_an_image_whose_file_cannot_be_used_ends_its_request(linker, kind):
    damage, code = FILES[kind]
    path, file = copy(linker, IMAGE)
    damage(linker, path, IMAGE)
    refused(linker, *linker.link(BOTH, "mpic-4", files={0: file}), file[0] if code != "corrupt" else "", code)


EMBEDDINGS = {
    "none": lambda inputs: {"embeds": None},
    "of another width": lambda inputs: {"embeds": inputs.embeds.repeat(1, 2)},
    "with features of another model": lambda inputs: {"deepstack": inputs.embeds[None].clone()},
    "at no place": lambda inputs: {"positions": inputs.positions.repeat(2, 1)},
}


@pytest.mark.parametrize("kind", EMBEDDINGS)
def test_an_image_without_embeddings_of_this_model_ends_its_request(linker, kind):
    path, file = copy(linker, IMAGE)
    changed(lambda inputs, kv: (replace(inputs, **EMBEDDINGS[kind](inputs)), kv))(linker, path, IMAGE)
    refused(linker, *linker.link(BOTH, "mpic-4", files={0: file}), "has", "mismatch")


def test_a_chunk_of_another_type_is_computed(linker):
    inputs, _ = linker.file(DOCUMENT)
    key = KVKey(DOCUMENT.owner, DOCUMENT.key, MODEL, Recipe("bfloat16"))
    write(linker.files / "half.kv", ChunkKV(key, inputs, torch.zeros(3, 2, 2, len(inputs), 32).bfloat16()))
    answer = told(linker, *linker.link(TEXT, "mpic-4", files={0: ("half.kv", key.digest)}))
    assert answer.report["fallback"] == [(0, "mismatch")]


@pytest.mark.parametrize(
    "error, code",
    [(PermissionError(13, "Permission denied"), "corrupt"), (FileNotFoundError(2, "gone"), "missing")],
)
def test_a_file_that_may_not_be_read_or_goes_away_before_it_is_is_computed(linker, monkeypatch, error, code):
    file = copy(linker, DOCUMENT)[1]

    def fail(*_):
        raise error

    monkeypatch.setattr("mpic.engine.vllm.files.ChunkFile", fail)
    answer = told(linker, *linker.link(TEXT, "mpic-4", files={0: file}))
    assert answer.report["fallback"] == [(0, code)]


def test_a_name_that_is_too_long_is_a_missing_file(linker):
    _, (_, key) = linker.file(DOCUMENT)
    answer = told(linker, *linker.link(TEXT, "mpic-4", files={0: ("x" * 4000, key)}))
    assert answer.report["fallback"] == [(0, "missing")]


def test_a_file_that_was_mended_is_linked_again(linker):
    path, file = copy(linker, DOCUMENT)
    good = path.read_bytes()
    path.write_bytes(good[:-1])
    assert told(linker, *linker.link(TEXT, "mpic-4", files={0: file})).report["fallback"]
    path.write_bytes(good)
    assert told(linker, *linker.link(TEXT, "mpic-4", files={0: file})).report["fallback"] == []


@pytest.mark.parametrize("chunk, prompt", [(DOCUMENT, TEXT), (IMAGE, BOTH)])
def test_a_file_outside_of_the_folders_is_never_read(linker, chunk, prompt):
    path, file = copy(linker, chunk)
    a_link_outside(linker, path, chunk)
    refused(linker, *linker.link(prompt, "mpic-4", files={0: file}), "leads out", "forbidden")


@pytest.fixture
def slow_disk(monkeypatch):
    """KV is not read before the event; the inputs in front of it are."""
    event, read = threading.Event(), ChunkFile.read_layers

    def waiting(self, destination):
        assert event.wait(60)
        yield from read(self, destination)

    monkeypatch.setattr(ChunkFile, "read_layers", waiting)
    yield event
    event.set()


@pytest.mark.parametrize("prompt", [TEXT, BOTH], ids=["text", "image"])
def test_what_is_late_is_computed_and_said_to_be(linker, slow_disk, prompt):
    count = len(prompt.chunks)
    files = {i: copy(linker, chunk)[1] for i, chunk in enumerate(prompt.chunks)}
    request, params = linker.link(prompt, "mpic-4", files=files)
    answer = told(linker, request, params)
    assert answer.report["fallback"] == [(i, "late") for i in range(count)]
    assert answer.report["load_ms"] >= 1e3 * PATIENCE and answer.report["reused"] == 0
    slow_disk.set()
    (whole,) = linker.run(*zip(linker.link(prompt, "mpic-1000000")))
    assert answer.ids == whole.ids


def test_others_are_served_while_a_link_waits_for_its_files(linker, slow_disk):
    request, params = linker.link(TEXT, "mpic-4", files={0: copy(linker, DOCUMENT)[1]})
    order: list[str] = []
    vllm = linker.llm.llm_engine
    from vllm import SamplingParams

    vllm.add_request(
        "waits", request, SamplingParams(max_tokens=2, extra_args={"kv_transfer_params": params})
    )
    vllm.add_request("goes on", {"prompt_token_ids": ids(1, 9)}, SamplingParams(max_tokens=2))
    while vllm.has_unfinished_requests():
        order += [done.request_id for done in vllm.step() if done.finished]
    assert order == ["goes on", "waits"]


def test_a_placement_that_fails_ends_its_requests_and_leaves_no_blocks(linker, monkeypatch):
    request, params = linker.link(TEXT, "mpic-4", salt="placement")
    monkeypatch.setattr(
        "mpic.engine.vllm.runner.place", lambda *_: (_ for _ in ()).throw(RuntimeError("no room"))
    )
    refused(linker, request, params, "no room", "internal_error")
    monkeypatch.undo()
    answer = told(linker, request, params)
    assert answer.report["prefix_hit"] == 0 and answer.ids == linker.expected(TEXT, "mpic-4")[0]


def test_an_error_of_ours_ends_one_request(linker, monkeypatch):
    monkeypatch.setattr("mpic.engine.vllm.admission.ranges_of", lambda *_: 1 / 0)
    request, params = linker.link(TEXT, "mpic-4")
    refused(linker, request, params, "ZeroDivisionError", "internal_error")


def test_an_order_with_one_wrong_chunk_among_many_says_which(linker):
    prompt, _ = linker.link(BOTH, "mpic-4")
    _, order, _ = linker.order(BOTH, "mpic-4")
    moved = replaced(order, 1, base=order.chunks[1].base - 1)
    refused(linker, prompt, moved.params(), "chunk 1")
