"""Bad orders to a running engine, and its own errors: the request ends with a reason, and the next one is served."""

from __future__ import annotations

from unittest.mock import Mock

import pytest
import vllm_kit as kit
from engine_kit import ids
from families import random_image
from vllm_faults import BOTH, TEXT, answer_to, refused
from vllm_links import replaced

from mpic.engine.vllm.wire import CompileOrder
from mpic.errors import CompileFailed, StorageFull

pytestmark = pytest.mark.usefixtures("next_is_served")


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
            ref if isinstance(ref, dict) else list(ref) for ref in body["link"]["chunks"]
        ]
    refused(linker, prompt, params, word)


def test_a_link_without_a_salt_is_refused(linker):
    prompt, params = linker.link(TEXT, "mpic-4")
    refused(linker, {"prompt_token_ids": prompt["prompt_token_ids"]}, params, "cache_salt")


def test_a_link_with_images_of_its_own_is_refused(linker):
    _, params = linker.link(TEXT, "mpic-4")
    request = {"prompt_token_ids": [kit.IMAGE_TOKEN, 1], "multi_modal_data": {"image": random_image(1)}}
    length = 17  # vLLM widens the image to 16 tokens before the connector sees it
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
    refused(linker, {"prompt_token_ids": ids(1, 9)}, CompileOrder(folder).params(), "no folder", tokens=1)


def test_compiling_outside_of_the_folders_is_refused(linker):
    refused(
        linker, {"prompt_token_ids": ids(1, 9)}, CompileOrder("../outside").params(), "relative", tokens=1
    )


def test_compiling_without_a_token_is_refused(linker):
    refused(linker, {"prompt_token_ids": ids(1, 9)}, CompileOrder("nowhere", 9).params(), "skip", tokens=1)


def test_a_compile_that_goes_on_answering_is_refused(linker):
    (linker.files / "answering").mkdir()
    order = CompileOrder("answering").params()
    refused(linker, {"prompt_token_ids": ids(1, 9)}, order, "max_tokens must be 1", tokens=2)


@pytest.mark.parametrize(
    ("folder", "error", "raised", "says"),
    [
        ("unwritten", OSError("broken"), CompileFailed, "not written"),
        ("full", OSError(28, "No space left on device"), StorageFull, None),
    ],
)
def test_a_compile_that_cannot_be_written_is_reported(linker, monkeypatch, folder, error, raised, says):
    from mpic.engine.vllm.frontend.compiled import read_compiled

    (linker.files / folder).mkdir()
    monkeypatch.setattr("mpic.engine.vllm.plugin.kv_export.save_file", Mock(side_effect=error))
    answer = answer_to(linker, {"prompt_token_ids": ids(1, 9)}, CompileOrder(folder).params(), tokens=1)
    assert answer.report["error"] is None
    with pytest.raises(raised, match=says):
        read_compiled(linker.files / folder)


def test_a_placement_that_fails_ends_its_requests_and_leaves_no_blocks(linker, monkeypatch):
    request, params = linker.link(TEXT, "mpic-4", salt="placement")
    no_room = Mock(side_effect=RuntimeError("no room"))
    monkeypatch.setattr("mpic.engine.vllm.plugin.runner.place_on_cpu", no_room)
    refused(linker, request, params, "no room", "internal_error")
    monkeypatch.undo()
    answer = answer_to(linker, request, params)
    assert answer.report["prefix_hit"] == 0 and answer.ids == linker.expected(TEXT, "mpic-4")[0]


def test_an_error_of_ours_ends_one_request(linker, monkeypatch):
    monkeypatch.setattr("mpic.engine.vllm.plugin.admission.ranges_of", lambda *_: 1 / 0)
    request, params = linker.link(TEXT, "mpic-4")
    refused(linker, request, params, "ZeroDivisionError", "internal_error")


def test_the_report_names_the_one_wrong_chunk_among_many(linker):
    prompt, _ = linker.link(BOTH, "mpic-4")
    _, order, _ = linker.order(BOTH, "mpic-4")
    moved = replaced(order, 1, base=order.chunks[1].base - 1)
    refused(linker, prompt, moved.params(), "chunk 1")
