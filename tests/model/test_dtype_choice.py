"""The dtype that a model is loaded in when nobody has asked for one."""

from __future__ import annotations

from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from small_models import SMALL_PLAIN

from mpic.errors import ModelRefused
from mpic.model import dtype_choice, load, selftest
from mpic.model.dtype_choice import dtype_for_results, dtype_on_cpu, own_dtype
from mpic.model.load import load_config, load_model

CPU = torch.device("cpu")


@pytest.fixture
def has_unit(monkeypatch):
    monkeypatch.setattr(dtype_choice, "why_no_unit", lambda: "")


@pytest.fixture
def has_no_unit(monkeypatch):
    monkeypatch.setattr(dtype_choice, "why_no_unit", lambda: "the processor has no matrix unit")


def test_a_bf16_checkpoint_is_loaded_in_bf16_where_the_processor_has_a_matrix_unit_and_the_banner_says_so(
    has_unit,
):
    chosen = dtype_on_cpu("bfloat16")
    assert chosen.name == "bfloat16"
    assert "--dtype float32" in chosen.note


@pytest.mark.parametrize("own", ["float32", "float16"])
def test_another_checkpoint_keeps_its_bits_and_the_banner_names_the_faster_dtype(own, has_unit):
    chosen = dtype_on_cpu(own)
    assert chosen.name == "float32"
    assert "--dtype bfloat16" in chosen.note


@pytest.mark.parametrize("own", ["bfloat16", "float32", "float16"])
def test_without_a_matrix_unit_every_checkpoint_is_loaded_in_float32_and_nothing_is_noted(own, has_no_unit):
    assert dtype_on_cpu(own) == ("float32", "")


@pytest.mark.parametrize("options", [{"kv_dtype": "float16"}, {"packed": True}])
def test_options_of_float32_models_keep_a_model_in_float32(options, has_unit):
    assert dtype_on_cpu("bfloat16", **options) == ("float32", "")


def test_weights_that_are_quantised_at_load_are_computed_in_bf16_on_every_processor(has_no_unit):
    assert dtype_on_cpu("float32", quantize=True) == ("bfloat16", "")


@pytest.mark.parametrize(
    "at, expected",
    [
        ({"dtype": torch.bfloat16}, "bfloat16"),
        ({"text": torch.float16}, "float16"),
        ({"vision": torch.bfloat16}, "bfloat16"),
    ],
)
def test_a_checkpoints_dtype_is_found_at_the_top_of_its_configuration_or_in_a_part(at, expected):
    text, vision = (SimpleNamespace(dtype=at.get(part)) for part in ("text", "vision"))
    config = SimpleNamespace(dtype=at.get("dtype"), vision_config=vision, get_text_config=lambda: text)
    assert own_dtype("nowhere", config) == expected


def test_a_configuration_without_a_dtype_leaves_it_to_the_weights():
    config = load_config(str(SMALL_PLAIN), "auto", False)
    for part in (config, config.get_text_config(), config.vision_config):
        part.dtype = None
    assert own_dtype(str(SMALL_PLAIN), config) == "bfloat16"


def test_a_model_is_loaded_in_the_dtype_that_was_chosen_or_asked_for(has_unit):
    loaded = load_model(str(SMALL_PLAIN), device="cpu")
    assert loaded.dtype is torch.bfloat16 and loaded.info.details["dtype_note"]
    asked = load_model(str(SMALL_PLAIN), device="cpu", dtype="float32")
    assert asked.dtype is torch.float32 and not asked.info.details["dtype_note"]
    kept = load_model(str(SMALL_PLAIN), device="cpu", kv_dtype="float16")
    assert (kept.dtype, kept.kv_dtype) == (torch.float32, torch.float16)


def test_results_are_in_float32_on_every_processor_unless_another_dtype_is_asked_for(has_unit):
    assert dtype_for_results("auto", CPU) == "float32"
    assert dtype_for_results("bfloat16", CPU) == "bfloat16"
    assert dtype_for_results("auto", torch.device("cuda")) == "auto"
    assert dtype_for_results("auto", CPU, quantize="int8") == "auto"


@pytest.mark.parametrize(
    ("options", "differs", "named"),
    [
        ({}, True, True),
        ({}, False, False),
        ({"dtype": "bfloat16"}, True, False),
        ({"quantize": "int8"}, True, False),  # which is not computed in float32
    ],
)
def test_a_model_that_is_too_inexact_in_the_dtype_of_auto_is_refused_with_the_name_of_the_other(
    options, differs, named, has_unit, monkeypatch
):
    if differs:
        monkeypatch.setattr(selftest, "relative_error", lambda got, expected: float("nan"))
    else:
        monkeypatch.setattr(load, "self_test", Mock(side_effect=ModelRefused("it has markers")))
    with pytest.raises(
        ModelRefused, match="differ from the stock model's" if differs else "markers"
    ) as refused:
        load_model(str(SMALL_PLAIN), device="cpu", **options)
    assert ("--dtype float32" in refused.value.message) is named
