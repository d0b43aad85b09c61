"""The adapter in vLLM's embedding layer, without an engine."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import vllm_kit  # noqa: F401 - sets the environment before vLLM is imported
from torch import nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from mpic.engine.vllm.plugin.packet_embedding import adapter_of, install
from mpic.engine.vllm.wire import FIRST_SOFT
from mpic.errors import AdapterRefused, ModelRefused
from mpic.packet.adapter import Adapter

WORDS, WIDTH = 50, 8
ADAPTER = Adapter(torch.randn(3, WIDTH), torch.randn(2, WIDTH), "0" * 64)
ROWS = torch.cat([ADAPTER.header, ADAPTER.trailer])


class Model(nn.Module):
    """A language model as far as its first layer.

    Args:
        scale: factor that it multiplies embeddings by, as Gemma does.
    """

    def __init__(self, tables: int = 1, scale: float = 1.0) -> None:
        super().__init__()
        with set_current_vllm_config(VllmConfig()):
            made = [VocabParallelEmbedding(WORDS, WIDTH, disable_tp=True) for _ in range(tables)]
        self.tables, self.scale = nn.ModuleList(made), scale
        for table in made:
            nn.init.normal_(table.weight)

    def embed_input_ids(self, ids: torch.Tensor) -> torch.Tensor:
        return self.tables[0](ids) * self.scale


@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
def test_trained_tokens_get_the_adapters_vectors_and_words_their_own(kind):
    model = Model()
    ids = torch.tensor([4, WORDS - 1, 0], dtype=kind)
    before = model.embed_input_ids(ids)
    install(model, ADAPTER)
    mixed = torch.cat([ids[:2], torch.arange(5, dtype=kind) + FIRST_SOFT, ids[2:]])
    assert torch.equal(model.embed_input_ids(mixed), torch.cat([before[:2], ROWS, before[2:]]))


def test_vectors_are_in_the_models_type():
    model = Model().to(torch.bfloat16)
    install(model, ADAPTER)
    given = model.embed_input_ids(torch.arange(5) + FIRST_SOFT)
    assert given.dtype == torch.bfloat16 and torch.equal(given, ROWS.bfloat16())


@pytest.mark.parametrize(
    ("model", "says"), [({"scale": 2.0}, "changes what its table"), ({"tables": 2}, "has 2 tables")]
)
def test_a_model_whose_first_layer_would_not_get_these_vectors_is_refused(model, says):
    with pytest.raises(ModelRefused, match=says):
        install(Model(**model), ADAPTER)


def test_an_adapter_that_is_not_the_one_that_the_server_has_read_is_refused(tmp_path):
    """Otherwise a packet of the server's adapter would be computed with the vectors of the other one."""
    path = tmp_path / "adapter.safetensors"
    settings = {"packet": str(path), "packet_digest": ADAPTER.digest}
    config = SimpleNamespace(
        kv_transfer_config=SimpleNamespace(kv_connector_extra_config=settings),
        model_config=SimpleNamespace(hf_text_config=SimpleNamespace(hidden_size=WIDTH)),
    )
    ADAPTER.save(path)
    assert adapter_of(config).digest == ADAPTER.digest
    Adapter(ADAPTER.header + 1, ADAPTER.trailer, ADAPTER.model).save(path)
    with pytest.raises(AdapterRefused, match=r"is not the one that the server has read .* was replaced"):
        adapter_of(config)
    del settings["packet_digest"]
    assert adapter_of(config) is not None
