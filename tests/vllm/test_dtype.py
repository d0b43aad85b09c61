"""The dtype of a checkpoint that the engine loads unless it is told one. No engine is started."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
import vllm_kit  # noqa: F401 - sets the environment before vLLM is imported
from safetensors.torch import load_file, save_file
from small_models import SMALL

from mpic.config import EngineConfig
from mpic.engine.vllm.frontend.model import describe_model
from mpic.model.checkpoint import SINGLE
from mpic.model.load import load_config, load_weights


@pytest.fixture
def checkpoint(tmp_path):
    """Write the small model with weights in bfloat16, whose configuration has a dtype only in the given parts."""

    def written(*parts: str) -> str:
        folder = tmp_path / "model"
        shutil.copytree(SMALL, folder, ignore=shutil.ignore_patterns("packet"))
        config = json.loads((folder / "config.json").read_text())
        for part in (config, *(config[name] for name in ("text_config", "vision_config"))):
            part.pop("dtype", None), part.pop("torch_dtype", None)
        for part in parts:
            config[part]["dtype"] = "bfloat16"
        (folder / "config.json").write_text(json.dumps(config))
        weights = {name: tensor.bfloat16() for name, tensor in load_file(folder / SINGLE).items()}
        weights["a.number"] = torch.tensor([1])  # the first by its name, and not a floating one
        save_file(weights, folder / SINGLE, {"format": "pt"})
        return str(folder)

    return written


@pytest.mark.parametrize("parts", [("text_config",), ("vision_config",), ()])
def test_a_dtype_that_the_configuration_does_not_have_at_its_top_is_found_as_the_native_engine_does(
    checkpoint, parts
):
    path = checkpoint(*parts)
    config = load_config(path, "auto", False)
    assert config.dtype is None
    assert describe_model(EngineConfig(model=path), cpu=False).dtype == "bfloat16"
    assert load_weights(path, config, "auto", False).dtype == torch.bfloat16


def test_weights_whose_dtype_nothing_tells_are_loaded_in_float32(checkpoint, monkeypatch):
    path = checkpoint()
    monkeypatch.setattr("mpic.model.checkpoint.SINGLE", "none.safetensors")
    assert describe_model(EngineConfig(model=path), cpu=False).dtype == "float32"
