"""The trained tokens of an adapter (KV Packet, arXiv 2604.13226, section 3.1) in vLLM's embedding layer, where their
ids (``wire.FIRST_SOFT``) get its vectors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

from mpic.engine.vllm.wire import FIRST_SOFT
from mpic.errors import AdapterRefused, ModelRefused
from mpic.packet.adapter import Adapter, read_adapter


class SoftEmbedding:
    """A mixin for vLLM's table of embeddings. With tensor parallelism every rank has a part of the table but the whole
    adapter, so the adapter's vectors are inserted after the sum over ranks.

    Attributes:
        soft_rows: ``[trained tokens, hidden]``.
    """

    soft_rows: torch.Tensor

    def forward(self, input_: torch.Tensor) -> torch.Tensor:
        """Return the embeddings ``[n, hidden]`` of token ids ``[n]``."""
        soft = input_ >= FIRST_SOFT
        words = super().forward(input_.masked_fill(soft, 0))
        index = (input_ - FIRST_SOFT).clamp(0, len(self.soft_rows) - 1)
        return torch.where(soft.unsqueeze(-1), self.soft_rows[index.long()], words)


def adapter_of(config: VllmConfig) -> Adapter | None:
    """Return the adapter that the connector's setting ``packet`` names, or None. The frontend checks which weights it
    was trained with, because here they have vLLM's layout.

    Every process of vLLM reads the file itself, minutes after the frontend and maybe on another machine, and the ids
    of trained tokens do not say which adapter they are of. So the settings also pass the digest that the frontend
    computed.

    Raises:
        AdapterRefused: the file cannot be used, or it holds another adapter than ``packet_digest`` says.
    """
    settings = config.kv_transfer_config.kv_connector_extra_config
    path, digest = settings.get("packet"), settings.get("packet_digest")
    if not path:
        return None
    adapter = read_adapter(Path(path), config.model_config.hf_text_config.hidden_size)
    if digest and adapter.digest != digest:
        raise AdapterRefused(
            f"the adapter {path} ({adapter.digest[:12]}) is not the one that the server has read ({digest[:12]}): its "
            "file was replaced meanwhile, or machines have different ones; start the server again"
        )
    return adapter


@torch.inference_mode()
def install(model: Any, adapter: Adapter) -> None:
    """Add an adapter's tokens to a language model's embedding layer. Call this before the model runs for the first
    time, which may compile it.

    Raises:
        ModelRefused: there is not exactly one table of embeddings, or its output is changed before the first layer.
    """
    tables = [
        module
        for module in model.modules()
        if isinstance(module, VocabParallelEmbedding) and not isinstance(module, ParallelLMHead)
    ]
    if len(tables) != 1:
        raise ModelRefused(
            f"packets in vLLM: the model has {len(tables)} tables of embeddings; remove its adapter"
        )
    table: nn.Module = tables[0]
    some = next(table.parameters())
    dtype = model.embed_input_ids(torch.zeros(1, dtype=torch.int64, device=some.device)).dtype
    rows = torch.cat([adapter.header, adapter.trailer]).to(some.device, dtype)
    table.register_buffer("soft_rows", rows, persistent=False)
    table.__class__ = type(f"Soft{type(table).__name__}", (SoftEmbedding, type(table)), {})
    given = model.embed_input_ids(torch.arange(len(rows), device=some.device) + FIRST_SOFT)
    if not torch.equal(given, rows):
        raise ModelRefused(
            "packets in vLLM: the model changes what its table of embeddings gives, and an adapter was not trained so; "
            "remove it"
        )
