"""Results of families inside vLLM: they are kept between runs, and the page shows them."""

from __future__ import annotations

import json
import sys
import types
from unittest.mock import Mock

import pytest
import torch
from engine_kit import MemoryStore
from typer.testing import CliRunner
from vllm_outcomes import Outcomes

from mpic.cli.models import app
from mpic.config import ConfigError
from mpic.engine.native.engine import NativeEngine
from mpic.errors import CompileFailed, ModelRefused
from mpic.model.load import load_model
from mpic_lab.models import on_vllm, on_vllm_images, sweep, vllm_results
from mpic_lab.models.check import LIMIT, Row
from mpic_lab.models.instances import build
from mpic_lab.models.table import markdown
from mpic_lab.models.vllm_results import VLLMResult, read, record

TEXT, IMAGES = "causal-lm", "image-text-to-text"
RESULTS = ("verified", "refused", "not in vLLM", "not built", "not started", "differs", "failed")
KINDS = {"llava": IMAGES, "llava_next": IMAGES, "llama": TEXT}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "vllm.json"


def test_what_is_found_is_kept_with_version_and_date_and_other_families_stay(path, monkeypatch):
    assert read(path) == {}
    monkeypatch.setattr(vllm_results.time, "strftime", lambda form: "2026-01-02")
    record([Row("qwen3", TEXT, "verified", "6e-06"), Row("llava", IMAGES, "failed", "a b")], "0.32.0", path)
    monkeypatch.setattr(vllm_results.time, "strftime", lambda form: "2026-03-04")
    record([Row("llava", IMAGES, "refused", "its images")], "0.33.0", path)
    assert read(path) == {
        ("qwen3", TEXT): VLLMResult("verified", "6e-06", "0.32.0", "2026-01-02"),
        ("llava", IMAGES): VLLMResult("refused", "its images", "0.33.0", "2026-03-04"),
    }
    assert [entry["family"] for entry in json.loads(path.read_text())] == ["qwen3", "llava"]


def test_what_could_not_be_built_replaces_nothing_that_is_known(path):
    record([Row("llava", IMAGES, "verified", ""), Row("emu3", IMAGES, "not built", "old")], "0.32.0", path)
    record([Row("llava", IMAGES, "not built", "no"), Row("emu3", IMAGES, "not built", "new")], "0.33.0", path)
    found = read(path)
    assert (found["llava", IMAGES].result, found["llava", IMAGES].version) == ("verified", "0.32.0")
    assert found["emu3", IMAGES].reason == "new"


def test_the_page_groups_served_families_by_it():
    rows = [Row(name, TEXT, "verified", "") for name in ("llama", "phi3", "ctrl", "olmo")]
    page = markdown(
        rows,
        {
            ("llama", TEXT): VLLMResult("verified", "6e-06", "0.32.0", "2026-01-02"),
            ("phi3", TEXT): VLLMResult("refused", "a | b", "0.32.0", "2026-01-02"),
            ("ctrl", TEXT): VLLMResult("not in vLLM", "", "0.32.0", "2026-01-02"),
            ("olmo", IMAGES): VLLMResult("verified", "", "0.32.0", "2026-01-02"),
        },
    )
    assert "| llama | verified (0.32.0, 2026-01-02) |" in page
    assert "| phi3 | refused (0.32.0, 2026-01-02): a \\| b |" in page
    assert "| ctrl | not in vLLM (0.32.0, 2026-01-02) |" in page
    assert "| olmo | not run |" in page, "of another kind"


def test_the_kept_results_can_be_read_and_say_what_they_must():
    for (family, kind), result in read().items():
        assert kind in (TEXT, IMAGES) and family
        assert result.result in RESULTS
        assert result.reason or result.result in ("verified", "not in vLLM")
        assert result.version and len(result.date) == len("2026-01-02")


def outcomes(*tests: tuple[str, str], left_out: tuple[str, ...] = ()) -> list[Row]:
    found = Outcomes(KINDS)
    for test in left_out:
        found.leave_out(f"tests/vllm/{test}")
    for test, outcome in tests:
        found.add(f"tests/vllm/{test}", outcome)
    return list(found.rows())


MODELS, LINKS = "test_models.py::test_answers[llava]", "test_links.py::test_link[llava-mpic-4]"


def test_a_family_is_right_when_all_of_its_tests_ran_and_passed():
    right = [Row("llava", IMAGES, "verified", "tests/vllm")]
    assert outcomes((MODELS, "passed"), (LINKS, "passed"), ("test_loop.py::test[llava]", "failed")) == right
    assert outcomes((MODELS, "passed")) == outcomes((LINKS, "passed")) == []
    assert outcomes((MODELS, "passed"), (LINKS, "passed"), left_out=(LINKS,)) == []
    assert outcomes((MODELS, "passed"), (LINKS, "skipped"), (LINKS, "passed")) == []


def test_a_family_has_failed_when_one_of_its_tests_has():
    of_next = "test_links.py::test_link[llava_next-mpic-4]"
    assert outcomes((MODELS, "passed"), (LINKS, "failed"), (of_next, "passed"), left_out=(MODELS,)) == [
        Row("llava", IMAGES, "failed", "test_link[llava-mpic-4]")
    ]


# one family


@pytest.fixture
def registry(monkeypatch):
    """The names of classes that vLLM has, in place of vLLM."""
    supported = {"LlamaForCausalLM", "Gemma2ForCausalLM"}
    supported |= {"Gemma4ForCausalLM", "LlavaForConditionalGeneration"}
    module = types.ModuleType("vllm.model_executor.models")
    module.ModelRegistry = types.SimpleNamespace(get_supported_archs=lambda: supported)
    for name in ("vllm", "vllm.model_executor"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(on_vllm, "prepare_environment", lambda: True)


def served_by(monkeypatch, load) -> None:
    monkeypatch.setattr(on_vllm, "load_engine", load)


def native(config):
    """The native engine on the checkpoint, in place of vLLM."""
    return NativeEngine(load_model(config.model, device="cpu"), MemoryStore(), pages=64, page_size=8), None


@pytest.mark.parametrize(
    ("family", "kind", "result", "reason"),
    [
        ("bert", TEXT, "not in vLLM", ""),
        ("gemma2", TEXT, "refused", "gemma2: attention with attn_logit_softcapping is not supported"),
        (
            "gemma4_text",
            TEXT,
            "refused",
            "gemma4_text: layers with different head_dim are not supported in vLLM",
        ),
    ],
)
def test_what_is_known_before_anything_is_served(
    family, kind, result, reason, registry, monkeypatch, tmp_path
):
    served_by(monkeypatch, lambda config: pytest.fail("it was served"))
    assert on_vllm.check_on_vllm(family, kind, tmp_path / "log") == Row(family, kind, result, reason)


@pytest.mark.parametrize(("family", "kind"), [("llama", TEXT), ("llava", IMAGES)])
def test_links_of_a_served_checkpoint_are_compared_with_the_oracle(
    family, kind, registry, monkeypatch, tmp_path
):
    served_by(monkeypatch, native)
    row = on_vllm.check_on_vllm(family, kind, tmp_path / "log")
    assert row.result == "verified" and float(row.reason) < LIMIT, row


@pytest.mark.parametrize(
    ("texts", "images", "expected"),
    [
        ((0.0, 1e-5), (0.0, 1e-4), ("verified", "1e-04")),
        ((0.1, 0.1), None, ("differs", "without a link")),
        ((0.0, 0.1), None, ("failed", "differs from the oracle by 1.0e-01")),
        ((0.0, 0.0), (0.1, 0.2), ("differs", "with images, without a link")),
        ((0.0, 0.0), (0.0, 0.2), ("failed", "with images, differs from the oracle by 2.0e-01")),
        ((0.0, 0.0), CompileFailed("an image is more than one token repeated"), ("refused", "an image is")),
        ((0.0, 0.0), CompileFailed("it fell"), ("failed", "it is served, then CompileFailed: it fell")),
    ],
)
def test_a_family_with_images_is_right_when_texts_and_images_are(
    texts, images, expected, registry, monkeypatch, tmp_path
):
    served_by(monkeypatch, lambda config: (types.SimpleNamespace(close=lambda: None), None))
    monkeypatch.setattr(on_vllm, "compare", lambda engine, model: texts)
    monkeypatch.setattr(on_vllm, "compare_images", Mock(side_effect=[images]))
    row = on_vllm.check_on_vllm("llava", IMAGES, tmp_path / "log")
    assert row.result == expected[0] and row.reason.startswith(expected[1])


def test_a_processor_that_cannot_be_made_is_the_reason(registry, monkeypatch, tmp_path):
    served_by(monkeypatch, lambda config: pytest.fail("it was served"))
    monkeypatch.setitem(on_vllm_images.PROCESSOR_MAPPING_NAMES, "llava", "NoProcessor")
    row = on_vllm.check_on_vllm("llava", IMAGES, tmp_path / "log")
    assert row.result == "not built" and row.reason.startswith("its processor could not be made: ")


def test_an_engine_that_links_nothing_has_failed(registry, monkeypatch, tmp_path):
    """As vLLM answers when chunk files cannot be read: with everything computed."""
    from mpic.link.policies.full import Full

    def computes(config):
        engine, processor = native(config)
        submit = engine.submit
        engine.submit = lambda request: submit(request.__class__(**{**vars(request), "policy": Full()}))
        return engine, processor

    served_by(monkeypatch, computes)
    row = on_vllm.check_on_vllm("llama", TEXT, tmp_path / "log")
    assert row.result == "failed" and "differs from the oracle" in row.reason


def test_a_model_that_vllm_computes_otherwise_without_any_link_is_told_apart(registry, monkeypatch, tmp_path):
    def other(config):
        model = load_model(config.model, device="cpu")
        with torch.no_grad():
            model.model.lm_head.weight.mul_(1.1)
        return NativeEngine(model, MemoryStore(), pages=64, page_size=8), None

    served_by(monkeypatch, other)
    row = on_vllm.check_on_vllm("llama", TEXT, tmp_path / "log")
    assert row.result == "differs" and "without a link" in row.reason


@pytest.mark.parametrize(
    ("error", "log", "expected"),
    [
        (ModelRefused("its keys"), "", ("refused", "its keys")),
        (ConfigError("vLLM did not start"), "x\n y.ModelRefused: a  window\nEnd\n", ("refused", "a window")),
        (ConfigError("did not start"), "ValueError: a\n(x) KeyError: b\n", ("not started", "KeyError: b")),
        (ConfigError("did not start"), "(x) AssertionError\n", ("not started", "AssertionError")),
        (ConfigError("did not start"), "", ("not started", "did not start")),
        (ConfigError("no '/tmp/mpic-families-a/mpic-family-b/x'"), "", ("not started", "no 'FOLDER/x'")),
        (RuntimeError("it fell"), "", ("failed", "RuntimeError: it fell")),
    ],
)
def test_a_family_that_is_not_served_says_why(error, log, expected, registry, monkeypatch, tmp_path):
    def refuses(config):
        (tmp_path / "log").write_text(log)
        raise error

    served_by(monkeypatch, refuses)
    assert on_vllm.check_on_vllm("llama", TEXT, tmp_path / "log")[2:] == expected


def test_sizes_that_are_given_reach_text_models_and_not_vision_encoders():
    plain, larger = (build("llava", IMAGES, sizes=sizes).config for sizes in (None, on_vllm.SIZES))
    assert (plain.text_config.hidden_size, larger.text_config.hidden_size) == (64, 128)
    assert plain.vision_config.to_dict() == larger.vision_config.to_dict()
    assert torch.equal(build("llama", TEXT).lm_head.weight, build("llama", TEXT, sizes={}).lm_head.weight)


# the command


def test_the_command_keeps_every_row_as_soon_as_it_is_known(monkeypatch):
    kept = []
    monkeypatch.setattr(vllm_results, "installed_version", lambda: "0.32.0")
    monkeypatch.setattr(vllm_results, "record", lambda rows, version: kept.append((*rows, version)))
    row = Row("llama", TEXT, "verified", "")

    def swept(wanted, workers, seconds, tell, engine):
        assert (wanted, workers, engine) == ([("llama", TEXT)], 1, "vllm")
        tell(row)
        return [row]

    monkeypatch.setattr(sweep, "sweep", swept)
    done = CliRunner().invoke(app, ["check", "llama", "--engine", "vllm"])
    assert done.exit_code == 0 and kept == [(row, "0.32.0")], done.output


@pytest.mark.parametrize(
    ("options", "installed", "said"),
    [
        (["--engine", "other"], "0.32.0", "available"),
        (["--engine", "vllm", "--table", "x.md"], "0.32.0", "native"),
        (["--engine", "vllm"], None, "not installed"),
    ],
)
def test_what_cannot_be_checked_is_refused(options, installed, said, monkeypatch):
    monkeypatch.setattr(vllm_results, "installed_version", lambda: installed)
    done = CliRunner().invoke(app, ["check", "llama", *options])
    assert done.exit_code == 2 and said in done.output
