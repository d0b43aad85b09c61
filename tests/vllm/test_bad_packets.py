"""Packets whose file cannot be used, and orders with trained tokens that cannot be followed, in a running engine."""

from __future__ import annotations

from dataclasses import replace

import pytest
from vllm_faults import BOTH, DOCUMENT, IMAGE, TEXT, answer_to, refused
from vllm_links import MODEL, assert_close

from mpic.engine.vllm.wire import FIRST_SOFT, CompileOrder, packet_ids
from mpic.kv.chunk import ChunkKV, KVKey, Recipe
from mpic.kv.file import write
from mpic.link import Wrapping

pytestmark = pytest.mark.usefixtures("next_is_served")
PACKET = Wrapping(packet=True)
ALL = "packet-1000000"


def with_adapter(linker, chunk, digest: str) -> tuple[str, str]:
    """Write a packet's file once more as one of an adapter with this digest; return its path and key."""
    inputs, kv = linker.stored(chunk, PACKET)
    key = KVKey(chunk.owner, chunk.key, MODEL, Recipe("float32", packet=digest))
    write(linker.files / f"{digest[:4]}.kv", ChunkKV(key, inputs, kv))
    return f"{digest[:4]}.kv", key.digest


def assert_computed(linker, files, codes) -> None:
    """Link a text over a packet that cannot be used: all of it is computed, with the adapter's vectors."""
    request, params = linker.link(TEXT, "packet", files=files)
    (answer,) = linker.run([request], [params])
    assert_close(answer, linker.expected(TEXT, ALL))
    again = answer_to(linker, {**request, "cache_salt": "again"}, params)
    assert again.report["fallback"] == codes and again.report["reused"] == 0


def test_a_document_whose_packet_is_missing_is_computed_with_the_adapters_vectors(linker):
    key = linker.file(DOCUMENT, PACKET)[1][1]
    assert_computed(linker, {0: ("nowhere.kv", key)}, [(0, "missing")])


def test_a_packet_of_another_adapter_is_not_linked(linker):
    assert_computed(linker, {0: with_adapter(linker, DOCUMENT, "ab" * 32)}, [(0, "mismatch")])
    request, params = linker.link(BOTH, "packet", files={0: with_adapter(linker, IMAGE, "cd" * 32)})
    refused(linker, request, params, "inside another adapter", "mismatch")


def test_a_prompt_with_placeholders_in_the_place_of_trained_tokens_is_not_linked(linker):
    """The ids in a file are no prompt: 0 is a word."""
    request, params = linker.link(TEXT, "packet")
    plain = [0 if i >= FIRST_SOFT else i for i in request["prompt_token_ids"]]
    assert answer_to(linker, {**request, "prompt_token_ids": plain}, params).report["fallback"] == [
        (0, "mismatch")
    ]


def test_links_with_more_rows_than_the_limit_compute_packets_whole(linker, monkeypatch):
    admission = linker.llm.llm_engine.engine_core.engine_core.scheduler.connector._admission
    monkeypatch.setattr(admission, "_most_rows", 1)
    (answer,) = linker.run(*zip(linker.link(BOTH, "packet")))
    assert_close(answer, linker.expected(BOTH, ALL))


def test_trained_tokens_that_the_adapter_does_not_have_are_refused(linker, monkeypatch):
    import vllm.renderers.base

    monkeypatch.setattr(vllm.renderers.base.BaseRenderer, "validate_token_ids", lambda *args, **options: None)
    monkeypatch.delattr(linker.llm.renderer, "validate_token_ids")
    request, params = linker.link(TEXT, "packet")
    ids = [i + len(linker.adapter) if i >= FIRST_SOFT else i for i in request["prompt_token_ids"]]
    refused(linker, {**request, "prompt_token_ids": ids}, params, "adapter here has 8 tokens")


def test_vllm_itself_refuses_all_other_ids_beyond_the_vocabulary(linker):
    from vllm.exceptions import VLLMValidationError

    for id in (300, FIRST_SOFT - 1, FIRST_SOFT + len(linker.adapter), -1):
        with pytest.raises(VLLMValidationError, match="out of vocabulary"):
            linker.run([{"prompt_token_ids": [1, FIRST_SOFT, id]}], [None])


PARAMETERS = {"a penalty": {"repetition_penalty": 1.1}, "log-probabilities": {"prompt_logprobs": 1}}


@pytest.mark.parametrize("kind", PARAMETERS)
def test_parameters_that_look_up_ids_of_the_prompt_are_refused_with_trained_tokens(linker, kind):
    prompt = {"prompt_token_ids": list(packet_ids(DOCUMENT.token_ids, 5, 3))}
    (linker.files / kind.split()[-1]).mkdir()
    order = CompileOrder(kind.split()[-1]).params()
    refused(linker, prompt, order, "not known for an adapter's tokens", tokens=1, **PARAMETERS[kind])


def test_a_text_without_embeddings_is_no_packet(linker):
    inputs, kv = linker.stored(DOCUMENT, PACKET)
    _, file = linker.save(DOCUMENT, replace(inputs, embeds=None), kv, PACKET)
    assert file[1] == linker.file(DOCUMENT, PACKET)[1][1]
    assert_computed(linker, {0: file}, [(0, "mismatch")])
