"""The digests of a checkpoint that is streamed from its files equal those of the loaded model."""

from __future__ import annotations

import pytest
import torch
from families import FAMILIES, ODD, TYPES, make_model
from small_models import SMALL

from mpic.model.checkpoint import NotStreamable, streamed_digest
from mpic.model.identity import fingerprint, fingerprint_of, weights_digest, weights_digest_of
from mpic.model.load import empty_model, load_config, load_weights


def both(path: str, dtype: torch.dtype, digest_of=fingerprint_of, loaded=fingerprint) -> tuple[str, str]:
    config = load_config(path, "auto", False)
    streamed = streamed_digest(path, empty_model(config, dtype, False), dtype, digest_of=digest_of)
    return streamed, loaded(load_weights(path, load_config(path, "auto", False), dtype, False))


PARTLY_FP32 = ("gpt_oss", "deepseek")
"""Families that keep some weights in fp32 whatever is asked for: their files are loaded, not streamed."""


STREAMED = [name for name in FAMILIES if name not in (*ODD, *TYPES)]
"""Families that vLLM may serve: it needs a fingerprint of weights that it loads itself."""


@pytest.mark.parametrize("name", STREAMED)
def test_a_streamed_digest_is_that_of_the_loaded_model(name, tmp_path):
    make_model(name)[0].save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    for dtype in (torch.float32, torch.bfloat16):
        if name in PARTLY_FP32:
            with pytest.raises(NotStreamable, match="stay in float32"):
                both(str(tmp_path), dtype)
            continue
        streamed, loaded = both(str(tmp_path), dtype)
        assert streamed == loaded
        streamed, loaded = both(str(tmp_path), dtype, weights_digest_of, weights_digest)
        assert streamed == loaded


def test_a_bundled_model_has_it():
    streamed, loaded = both(str(SMALL), torch.float32)
    assert streamed == loaded


def test_another_weight_gives_another_fingerprint_and_a_missing_one_none(tmp_path):
    model = make_model("llama")[0]
    model.save_pretrained(tmp_path)
    first, _ = both(str(tmp_path), torch.float32)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 5] += 1e-3
    model.save_pretrained(tmp_path)
    assert both(str(tmp_path), torch.float32)[0] != first
    (tmp_path / "model.safetensors").unlink()
    config = load_config(str(tmp_path), "auto", False)
    with pytest.raises(NotStreamable, match="in no safetensors files"):
        streamed_digest(str(tmp_path), empty_model(config, torch.float32, False), torch.float32)
