"""Bad, missing and late files in a running engine: the report names the chunks that were computed instead, or the
request ends."""

from __future__ import annotations

import os
from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch
from engine_kit import ids
from library_tools import flip
from vllm_faults import BOTH, DOCUMENT, IMAGE, PATIENCE, TEXT, answer_to, refused
from vllm_links import MODEL

from mpic.kv.chunk import ChunkKV, KVKey, Recipe
from mpic.kv.file import write
from mpic.link import BARE, parse_policy

pytestmark = pytest.mark.usefixtures("next_is_served")


def copy(linker, chunk, wrapping=BARE) -> tuple:
    """Make a fresh copy of a chunk's file; return its path on disk and its path and key in orders."""
    _, (name, key) = linker.file(chunk, wrapping)
    fresh = f"copy-{len(list(linker.files.iterdir()))}.kv"
    (linker.files / fresh).write_bytes((linker.files / name).read_bytes())
    return linker.files / fresh, (fresh, key)


def fallback(linker, file) -> list:
    """Link a text over a file; return the chunks that were computed instead."""
    return answer_to(linker, *linker.link(TEXT, "mpic-4", files={0: file})).report["fallback"]


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
    """Write a valid file with the same key and other contents."""

    def damage(linker, path, chunk):
        _, (fresh, _) = linker.save(chunk, *change(*linker.stored(chunk)))
        (linker.files / fresh).rename(path)

    return damage


def other_tokens(inputs, kv):
    return replace(inputs, token_ids=inputs.token_ids.flip(0) + 1), kv


def one_token_less(inputs, kv):
    less = {"token_ids": inputs.token_ids[:-1], "positions": inputs.positions[:, :-1]}
    if inputs.embeds is not None:
        less["embeds"] = inputs.embeds[:-1]
    return replace(inputs, **less, rotary_length=inputs.rotary_length - 1), kv[:, :, :, :-1]


FILES = {
    "missing": (lambda linker, path, chunk: path.unlink(), "missing"),
    "a damaged layer": (lambda linker, path, chunk: flip(path, 3 * 4096), "corrupt"),
    "a damaged header": (lambda linker, path, chunk: flip(path, 100), "corrupt"),
    "a damaged end": (lambda linker, path, chunk: flip(path, -1), "corrupt"),
    "cut off": (lambda linker, path, chunk: path.write_bytes(path.read_bytes()[:-100]), "corrupt"),
    "empty": (lambda linker, path, chunk: path.write_bytes(b""), "corrupt"),
    "no file of ours": (lambda linker, path, chunk: path.write_bytes(os.urandom(8000)), "corrupt"),
    "a header without end": (
        lambda linker, path, chunk: path.write_bytes(b"\xff" * 7 + b"\x7f" + path.read_bytes()[8:]),
        "corrupt",
    ),
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
def test_text_whose_file_cannot_be_used_is_computed_and_reported(linker, kind):
    damage, code = FILES[kind]
    path, file = copy(linker, DOCUMENT)
    damage(linker, path, DOCUMENT)
    prompt, params = linker.link(TEXT, "mpic-4", files={0: file})
    (full,) = linker.run([prompt], [None])
    answer = answer_to(linker, {**prompt, "cache_salt": "fresh " + kind}, params)
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
    assert fallback(linker, ("half.kv", key.digest)) == [(0, "mismatch")]


@pytest.mark.parametrize(
    "error, code",
    [(PermissionError(13, "Permission denied"), "corrupt"), (FileNotFoundError(2, "gone"), "missing")],
)
def test_a_chunk_whose_file_becomes_unreadable_is_computed(linker, monkeypatch, error, code):
    monkeypatch.setattr("mpic.engine.vllm.plugin.host_memory.ChunkFile", Mock(side_effect=error))
    assert fallback(linker, copy(linker, DOCUMENT)[1]) == [(0, code)]


def test_a_link_with_more_rows_than_the_limit_is_computed_whole_and_says_so(linker, monkeypatch):
    admission = linker.llm.llm_engine.engine_core.engine_core.scheduler.connector._admission
    prompt, params = linker.link(BOTH, "random-30")
    rows = len(params["mpic"]["link"]["rows"])
    assert rows > 5
    monkeypatch.setattr(admission, "_most_rows", rows)
    linked = answer_to(linker, prompt, params)
    assert linked.report["fallback"] == [] and linked.ids == linker.expected(BOTH, "random-30")[0]
    monkeypatch.setattr(admission, "_most_rows", rows - 1)
    whole = answer_to(linker, *linker.link(BOTH, "random-30"))
    assert whole.report["fallback"] == [(0, "rows"), (1, "rows")] and whole.report["reused"] == 0
    assert whole.ids == linker.expected(BOTH, "full")[0]


def test_a_name_that_is_too_long_is_a_missing_file(linker):
    _, (_, key) = linker.file(DOCUMENT)
    assert fallback(linker, ("x" * 4000, key)) == [(0, "missing")]


def test_a_file_that_was_mended_is_linked_again(linker):
    path, file = copy(linker, DOCUMENT)
    good = path.read_bytes()
    path.write_bytes(good[:-1])
    assert fallback(linker, file)
    path.write_bytes(good)
    assert fallback(linker, file) == []


@pytest.mark.parametrize("chunk, prompt", [(DOCUMENT, TEXT), (IMAGE, BOTH)])
def test_a_file_outside_of_the_folders_is_never_read(linker, chunk, prompt):
    path, file = copy(linker, chunk)
    a_link_outside(linker, path, chunk)
    refused(linker, *linker.link(prompt, "mpic-4", files={0: file}), "leads out", "forbidden")


@pytest.mark.parametrize("policy", ["mpic-4", "packet-4"])
@pytest.mark.parametrize("prompt", [TEXT, BOTH], ids=["text", "image"])
def test_late_chunks_are_computed_and_reported(linker, slow_disk, prompt, policy, monkeypatch):
    scheduler, count = linker.llm.llm_engine.engine_core.engine_core.scheduler, len(prompt.chunks)
    monkeypatch.setattr(scheduler.connector._admission, "_patience", PATIENCE)
    wrapping = parse_policy(policy).wrapping
    files = {i: copy(linker, chunk, wrapping)[1] for i, chunk in enumerate(prompt.chunks)}
    request, params = linker.link(prompt, policy, files=files)
    answer = answer_to(linker, request, params)
    assert answer.report["fallback"] == [(i, "late") for i in range(count)]
    assert answer.report["load_ms"] >= 1e3 * PATIENCE and answer.report["reused"] == 0
    slow_disk.go.set()
    (whole,) = linker.run(*zip(linker.link(prompt, policy.replace("4", "1000000"))))
    assert answer.ids == whole.ids


def test_others_are_served_while_a_link_waits_for_its_files(linker, slow_disk):
    request, params = linker.link(TEXT, "mpic-4", files={0: copy(linker, DOCUMENT)[1]})
    order: list[str] = []
    vllm = linker.llm.llm_engine
    from vllm import SamplingParams

    extra = {"kv_transfer_params": params}
    vllm.add_request("waits", request, SamplingParams(max_tokens=2, extra_args=extra))
    vllm.add_request("goes on", {"prompt_token_ids": ids(1, 9)}, SamplingParams(max_tokens=2))
    while vllm.has_unfinished_requests():
        order += [done.request_id for done in vllm.step() if done.finished]
        if order:
            slow_disk.go.set()
    assert order == ["goes on", "waits"]
