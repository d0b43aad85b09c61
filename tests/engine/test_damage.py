"""An engine over a real library whose files are damaged: answers stay right, and the damage is reported."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
from engine_kit import TOKENS, adapter, family, ids, prompt_of, request_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from library_tools import Unreadable

from mpic.engine.native.engine import NativeEngine
from mpic.library import Library
from mpic.library.upkeep import check as scrub

TEXTS = ("the first document, of some length", "another one, which is longer than the first")


def answer(library, policy):
    """Ask about both documents with an engine that has nothing in memory."""
    engine = NativeEngine(family("llama").loaded, library.store, adapter=adapter(), pages=128, page_size=8)
    try:
        chunks = [library.files.chunk("ann", library.files.by_handle("ann", name)) for name in ("A", "B")]
        prompt = prompt_of(ids(1, 5), chunks[0], ids(2, 3), chunks[1], ids(3, 4))
        said = engine.submit(request_of(prompt, policy, TOKENS, user="ann", logprobs=0)).result()
        engine.check()
    finally:
        engine.close()
    return list(said.token_ids), [p.logprob for p in said.logprobs], said.usage


@contextmanager
def documents(folder, **options):
    """A library with both documents, which is checked at the end."""
    with Library.open(folder, **options) as library:
        library.files.tokenize = lambda text: tuple(10 + byte % 200 for byte in text.encode())
        for handle, text in zip("AB", TEXTS, strict=True):
            library.files.add("ann", text.encode(), f"{handle}.txt", handle)
        yield library
        library.check()


@pytest.mark.parametrize("policy", ["reuse", "mpic-4", "packet"])
def test_answers_over_files_with_any_flipped_bit_are_those_over_whole_files(policy, tmp_path):
    with documents(tmp_path / "library") as library:
        expected_ids, expected, _ = answer(library, policy)  # compiled and stored
        files = sorted((tmp_path / "library" / "kv").rglob("*.safetensors"))
        assert len(files) == 2

        @settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
        @given(st.data())
        def check(data):
            answer(library, policy)  # a chunk that the last example removed is compiled and stored again
            path = data.draw(st.sampled_from(files), label="file")
            raw = bytearray(path.read_bytes())
            bit = data.draw(st.integers(0, 8 * len(raw) - 1), label="bit")
            raw[bit // 8] ^= 1 << bit % 8
            path.write_bytes(raw)
            got_ids, got, usage = answer(library, policy)
            assert got_ids == expected_ids and got == pytest.approx(expected, abs=1e-4)
            reasons = {use.tier: use.reason for use in usage.chunks}
            if "compiled" in reasons:
                assert reasons["compiled"] == "corrupt"
                assert path.exists() and path.read_bytes() != bytes(raw)  # compiled again and stored
            else:  # in a part that this link did not need: a scrub finds it
                assert [problem.path for problem in scrub(library)] == [str(path.relative_to(library.root))]

        check()


@pytest.mark.parametrize("begin", [0, 4096], ids=["header", "layers"])
def test_chunks_that_cannot_be_read_now_are_compiled_for_the_answer_and_stay_on_disk(begin, tmp_path):
    disk = Unreadable(begin)
    with documents(tmp_path / "library", filesystem=disk) as library:
        expected_ids, expected, _ = answer(library, "reuse")
        files = sorted((tmp_path / "library" / "kv").rglob("*.safetensors"))
        disk.broken = True
        got_ids, got, usage = answer(library, "reuse")
        assert got_ids == expected_ids and got == pytest.approx(expected, abs=1e-4)
        assert {use.tier for use in usage.chunks} == {"compiled"}
        disk.broken = False
        assert sorted((tmp_path / "library" / "kv").rglob("*.safetensors")) == files
        assert library.store.stats()["corrupt"] == 0
        assert {use.tier for use in answer(library, "reuse")[2].chunks} == {"disk"}
