"""Models that bring Python of their own: it runs only when the operator says so, and the log names it."""

from __future__ import annotations

import json
import logging

import pytest
import transformers as tf
from chat_models import word_level
from families import TEXT

from mpic.errors import ModelRefused
from mpic.model.load import load_model
from mpic.model.own_code import own_code

CONFIGURATION = """
from pathlib import Path

from transformers import LlamaConfig

(Path({ran!r})).touch()


class OwnConfig(LlamaConfig):
    model_type = "own_llama"
"""
MODELING = """
from transformers import LlamaForCausalLM

from .configuration_own import OwnConfig


class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
"""
CLASSES = {"AutoConfig": "configuration_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}


@pytest.fixture
def folder(tmp_path):
    """A Llama whose configuration and model are classes in files beside its weights; ``ran`` appears when they are
    imported."""
    folder = tmp_path / "own-llama"
    tf.LlamaForCausalLM(tf.LlamaConfig(**TEXT)).save_pretrained(folder)
    word_level().save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "own_llama", "architectures": ["OwnForCausalLM"], "auto_map": CLASSES}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "configuration_own.py").write_text(CONFIGURATION.format(ran=str(tmp_path / "ran")))
    (folder / "modeling_own.py").write_text(MODELING)
    return folder


@pytest.fixture(autouse=True)
def modules(tmp_path, monkeypatch):
    """Redirect the folder to which transformers copies such code before it imports it."""
    import transformers.dynamic_module_utils as dynamic

    monkeypatch.setattr(dynamic, "HF_MODULES_CACHE", str(tmp_path / "modules"))


def test_code_of_a_model_does_not_run_without_the_flag_and_the_refusal_names_it(folder, tmp_path):
    with pytest.raises(ModelRefused, match=r"configuration_own\.OwnConfig.*--trust-remote-code"):
        load_model(str(folder))
    assert not (tmp_path / "ran").exists()


def test_with_the_flag_it_runs_passes_the_self_test_and_is_named_in_the_log(folder, tmp_path, caplog):
    with caplog.at_level(logging.WARNING, logger="mpic.model.load"):
        loaded = load_model(str(folder), trust_remote_code=True)
    assert (tmp_path / "ran").exists()
    assert loaded.info.details["self_test_error"] < 1e-5
    (line,) = [r.getMessage() for r in caplog.records if "Python that comes with the model" in r.getMessage()]
    assert all(name in line for name in ("own-llama", *CLASSES.values()))


def test_a_tokenizer_of_its_own_is_refused_too_without_the_flag(tmp_path):
    tf.LlamaForCausalLM(tf.LlamaConfig(**TEXT)).save_pretrained(tmp_path)
    word_level().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config |= {
        "tokenizer_class": "OwnTokenizer",
        "auto_map": {"AutoTokenizer": ["tokenization_own.Own", None]},
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "tokenization_own.py").write_text("raise RuntimeError('this must not run')")
    with pytest.raises(ModelRefused, match=r"tokenization_own\.Own\).*--trust-remote-code"):
        load_model(str(tmp_path))


def test_every_file_that_may_name_code_is_read(tmp_path):
    for name in ("processor", "preprocessor", "video_preprocessor"):
        (tmp_path / f"{name}_config.json").write_text(json.dumps({"auto_map": {"Auto": f"{name}.Own"}}))
    (tmp_path / "custom_generate").mkdir()
    (tmp_path / "custom_generate" / "generate.py").touch()
    code = ["custom_generate/generate.py", "preprocessor.Own", "processor.Own", "video_preprocessor.Own"]
    assert own_code(str(tmp_path)) == code
