"""The tokens of a model that attend to each other in both directions are found from its masks, and the result
matters."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace

import pytest
import torch
from engine_kit import family, ids, image_chunk, logits_of, prompt_of, submit
from extend_kit import Lookup, ask
from families import random_image

from mpic.engine.native.engine import NativeEngine
from mpic.errors import ModelRefused, UnsupportedParameter
from mpic.kernels.patterns import Blocks, Pattern
from mpic.kernels.windows import Window
from mpic.model.bidirectional import Scope, find_blocks
from mpic.model.image_selftest import image_self_test
from mpic.model.refusals import refuse_on_vllm, refuse_unsupported
from mpic.model.triton_attention import refuse_layers

FOUND = {
    "gemma3_images": (Scope.IMAGE, [Pattern(Window(7), Blocks.WINDOWED), Pattern(None, Blocks.WHOLE)]),
    "gemma4_images": (Scope.IMAGE, [Pattern(Window(40), Blocks.WINDOWED), Pattern()]),
    "paligemma": (Scope.PROMPT, [Pattern(None, Blocks.WHOLE)]),
    "paligemma2": (Scope.PROMPT, [Pattern(Window(6), Blocks.WHOLE), Pattern(None, Blocks.WHOLE)]),
    "qwen2_vl": (None, [Pattern()]),
    "gemma3": (None, [Pattern(Window(7)), Pattern()]),
}


@pytest.mark.parametrize("name", FOUND)
def test_what_attends_in_both_directions_is_found_from_the_masks(name):
    scope, patterns = FOUND[name]
    loaded = family(name).loaded
    assert loaded.scope is scope
    assert [kind.pattern for kind in loaded.kinds] == patterns


@pytest.mark.parametrize("what", ["types hide text", "the first half of a block sees ahead"])
def test_masks_that_blocks_do_not_describe_are_refused(what):
    def masks(types: torch.Tensor):
        if what == "types hide text":
            return [lambda row, key: key <= row and int(types[key]) == 0]
        return [lambda row, key: key <= row or (int(types[row]) == int(types[key]) == 1 and row < 14)]

    with pytest.raises(ModelRefused, match="by more than blocks"):
        find_blocks([None], masks)


def test_an_image_that_no_window_cuts_between_texts_that_it_cuts_is_refused():
    def masks(types: torch.Tensor):
        return [
            lambda row, key: (
                row - 4 < key <= row
                or (
                    int(types[row]) == int(types[key]) == 1
                    and not any(types[min(row, key) : max(row, key)] == 0)
                )
            )
        ]

    with pytest.raises(ModelRefused, match="no part of an image"):
        find_blocks([Window(4)], masks)


@pytest.mark.parametrize("name", ["gemma3_images", "gemma4_images", "paligemma", "paligemma2"])
def test_rows_of_images_that_attended_causally_would_be_refused_by_the_self_test(name, monkeypatch):
    loaded = family(name).loaded
    monkeypatch.setattr(loaded, "kinds", [replace(kind, blocks=None) for kind in loaded.kinds])
    with pytest.raises(ModelRefused, match="attends to them, in another way"):
        image_self_test(loaded)


def test_an_image_larger_than_the_budget_of_a_step_is_computed_whole():
    image = image_chunk(random_image(3))
    prompt = prompt_of(ids(1, 6), image, ids(2, 4))
    answers = []
    for budget in (512, 5):
        loaded = family("gemma3_images").loaded
        with closing(NativeEngine(loaded, pages=64, page_size=8, budget=budget)) as engine:
            answers.append([logits_of(submit(engine, prompt, policy), 4) for policy in ("full", "mpic-3")])
    for (said, rows), (other, others) in zip(*answers, strict=True):
        assert said == other and (rows - others).abs().max() < 1e-4


def test_a_prompt_that_attends_to_itself_takes_no_references_while_decoding():
    with closing(NativeEngine(family("paligemma").loaded, pages=64, page_size=8)) as engine:
        with pytest.raises(UnsupportedParameter, match="in both directions") as refused:
            ask(engine, prompt_of(ids(1, 6)), "reuse", 4, Lookup([1, 2]))
        assert refused.value.param == "mpic.retrieval"


def test_no_prefix_of_a_prompt_that_attends_to_itself_is_kept_for_another():
    with closing(NativeEngine(family("paligemma").loaded, pages=64, page_size=8)) as engine:
        for tail in (ids(4, 3), ids(5, 3)):
            answer = submit(engine, prompt_of(ids(1, 20), tail), "prefix").result()
            assert answer.usage.prefix_hit == 0


@pytest.mark.parametrize("name", ["gemma3_images", "paligemma"])
def test_vllm_refuses_them_by_name(name):
    config = family(name).stock.config
    refuse_unsupported(config, config.get_text_config())
    with pytest.raises(ModelRefused, match="in both directions"):
        refuse_on_vllm(config, config.get_text_config())


def test_triton_refuses_them_by_name():
    loaded = family("paligemma").loaded
    with pytest.raises(ModelRefused, match="attention in both directions"):
        refuse_layers(loaded.kinds)
