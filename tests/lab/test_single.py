"""The baseline ``single`` of ``mpic eval run``: the whole context of a prompt is one chunk."""

from __future__ import annotations

from contextlib import closing

import pytest
from engine_kit import TOKENS, assert_same, family, image_chunk, logits_of, prompt_of, submit, text_chunk
from PIL import Image
from small_models import SMALL

from mpic.engine.native.engine import NativeEngine
from mpic.errors import UnknownPress, UnsupportedParameter
from mpic.prompt import ChunkSegment, TextSegment
from mpic_lab.eval.config import load_eval_config
from mpic_lab.eval.linking import parse_linking
from mpic_lab.eval.run import Evaluator
from mpic_lab.eval.single import joined

DOCUMENTS = [text_chunk(range(10, 40), "eval"), text_chunk(range(50, 95), "eval")]


def prompt_over(*documents):
    first, second = documents
    return prompt_of([1, 2, 3], first, [4, 5], second, [6, 7, 8])


def tokens_of(prompt) -> list[int]:
    parts = (s.token_ids if isinstance(s, TextSegment) else s.chunk.token_ids for s in prompt.segments)
    return [token for part in parts for token in part]


def test_the_beginning_to_the_last_document_is_one_chunk_of_the_same_tokens():
    prompt = prompt_over(*DOCUMENTS)
    whole = joined(prompt)
    chunk, question = whole.segments
    assert isinstance(chunk, ChunkSegment) and isinstance(question, TextSegment)
    assert tokens_of(whole) == tokens_of(prompt) and question.token_ids == (6, 7, 8)
    assert chunk.chunk.owner == "eval" and joined(prompt) == whole
    other = joined(prompt_over(*reversed(DOCUMENTS)))
    assert other.chunks[0].key != chunk.chunk.key


def test_images_and_prompts_without_documents_are_refused_by_name():
    image = image_chunk(Image.new("RGB", (8, 8)))
    with pytest.raises(UnsupportedParameter, match=r"single joins documents of text .* kind image"):
        joined(prompt_over(DOCUMENTS[0], image))
    with pytest.raises(UnsupportedParameter, match="the prompt has none"):
        joined(prompt_of([1, 2, 3]))
    assert parse_linking("single").compiles(prompt_over(DOCUMENTS[0], image)) == []


def test_it_is_named_alone_or_with_a_press():
    assert parse_linking("single").name == "single"
    assert parse_linking("single+cur-30-16-0").name == "single+cur-30"
    assert parse_linking("single+cur-30-0").over(prompt_over(*DOCUMENTS)).chunks[0].press == "cur-30-0"
    with pytest.raises(UnknownPress, match="unknown press 'none-3'"):
        parse_linking("single+none-3")


def test_uncompressed_it_equals_full_and_under_a_press_it_keeps_that_share_of_the_context():
    """And its documents see each other, which those of ``reuse`` do not."""
    engine = NativeEngine(family("llama").loaded, pages=256, page_size=8, budget=512)
    prompt = prompt_over(*DOCUMENTS)
    with closing(engine):
        full = logits_of(submit(engine, prompt, "full"), TOKENS)
        assert_same(logits_of(submit(engine, parse_linking("single").over(prompt), "reuse"), TOKENS), full)
        _, apart = logits_of(submit(engine, prompt, "reuse"), TOKENS)
        assert (apart - full[1]).abs().max() > 1e-3
        sizes = {}
        for press in ("none", "cur-30-0", "cur-30-8-8"):
            answer = submit(engine, parse_linking(f"single+{press}").over(prompt), "reuse").result()
            (use,) = answer.usage.chunks
            sizes[press] = use.bytes
            assert answer.usage.reused == 80
    assert sizes["cur-30-0"] == sizes["cur-30-8-8"] == sizes["none"] * 56 // 80


def test_an_evaluation_answers_texts_with_it_and_says_why_it_skips_images(tmp_path):
    (tmp_path / "eval.toml").write_text(
        f'model = "{SMALL.as_posix()}"\npolicies = ["reuse", "single", "single+knorm-40-0"]\n'
        'questions = 2\n[[task]]\nname = "world-card"\nchunks = [2]\n[[task]]\nname = "world-image"\nchunks = [2]\n'
    )
    answers = Evaluator(load_eval_config(tmp_path / "eval.toml"), tmp_path / "out").run()
    found = {(a.task, a.policy, a.sample): a for a in answers}
    assert len(found) == 16
    for (task, policy, sample), answer in found.items():
        if task == "world-image" and policy.startswith("single"):
            assert answer.skipped == (
                "unsupported_parameter: single joins documents of text into one chunk, and the prompt has a chunk of "
                "kind image"
            )
            continue
        assert answer.skipped is None
        if policy == "single":
            assert answer.kl < 1e-5 and answer.answer == found[task, "full", sample].answer
            pressed = found[task, "single+knorm-40-0", sample]
            assert 0.59 < pressed.kv_bytes / answer.kv_bytes < 0.62
            assert answer.prompt_tokens == pressed.prompt_tokens
    assert all(a.kv_bytes > 0 for a in answers if a.policy == "single" and a.task == "world-card")
