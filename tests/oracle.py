"""The slow, obvious oracle (``mpic_lab.oracle``), and the untouched model called as its users call it.

It shares no code with the engine: it compiles chunks at the positions they have in the prompt (the engine rotates
queries), scatters them into a dense cache and attends with the model's own masks and eager attention over the whole
sequence, one request at a time.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mpic.kv.chunk import ChunkInputs
from mpic.model.structure import RowInputs
from mpic.prompt.segments import Prompt, TextSegment
from mpic_lab.oracle import DenseCache, StockOracle, kinds_of


class Oracle(StockOracle):
    """Answers for one stock model."""

    def wrap(self, inputs: ChunkInputs, header: torch.Tensor, trailer: torch.Tensor) -> ChunkInputs:
        """A chunk's packet: every token's embedding, position and DeepStack features, one after the other."""
        first, last = len(header), len(header) + inputs.rotary_length
        columns = [torch.full((self.mrope,), i) for i in range(first)]
        columns += [inputs.positions[:, j] + first for j in range(len(inputs))]
        columns += [torch.full((self.mrope,), last + i) for i in range(len(trailer))]
        deep = None
        if inputs.deepstack is not None:
            before, after = (
                torch.zeros(len(inputs.deepstack), len(part), part.shape[1]) for part in (header, trailer)
            )
            deep = torch.cat([before, inputs.deepstack, after], 1)
        embeds = torch.cat([header, self._embeds(inputs).detach(), trailer])
        ids = torch.zeros(len(embeds), dtype=torch.int64)
        return ChunkInputs(ids, torch.stack(columns, 1), last + len(trailer), embeds, deep)

    @torch.no_grad()
    def attention(self, prompt: Prompt, inputs: Sequence[ChunkInputs], layer: int) -> list[torch.Tensor]:
        """Return for every chunk, ``[tokens]``, the attention of the text after the last chunk to its tokens at a
        layer of a full prefill: softmax over chunk tokens, summed over heads and queries."""
        ids, embeds, positions, marks, deepstack, places, _ = self._layout(prompt, inputs)
        whole = DenseCache(torch.arange(len(embeds)), len(embeds))
        deep = None if deepstack is None else (marks, deepstack)
        self._run(whole, RowInputs(ids, embeds, deep), positions, kinds_of(prompt, inputs))
        rows = [range(start, start + len(chunk)) for start, _, chunk in places]
        keys, queries = whole.keys[layer], whole.queries[layer][:, max(r.stop for r in rows) :]
        keys = keys.repeat_interleave(queries.shape[0] // keys.shape[0], 0)[:, [i for r in rows for i in r]]
        weights = torch.softmax(queries @ keys.transpose(1, 2) * whole.scaling, -1).sum((0, 1))
        return list(weights.split([len(r) for r in rows]))

    @torch.no_grad()
    def stock_logits(self, prompt: Prompt, image_processor, images, image_token: int, counts) -> torch.Tensor:
        """Return the last logits of the untouched model, called as its users call it, with input ids and pixel
        values."""
        self.model.set_attn_implementation("eager")
        ids, kinds, pictures = [], [], iter(images)
        used = []
        for segment, count in zip(prompt.segments, counts, strict=True):
            if isinstance(segment, TextSegment):
                ids += segment.token_ids
                kinds += [0] * len(segment)
            elif segment.chunk.token_ids is not None:
                ids += segment.chunk.token_ids
                kinds += [0] * len(segment.chunk.token_ids)
            else:
                ids += [image_token] * count
                kinds += [1] * count
                used.append(next(pictures))
        extra = {}
        if used:
            extra = dict(image_processor(images=used, return_tensors="pt"))
            if self.mrope == 3:
                extra["mm_token_type_ids"] = torch.tensor([kinds], dtype=torch.int32)
        if self.types is not None:
            extra |= self.types.of(kinds)
        return self.model(input_ids=torch.tensor([ids]), **extra, use_cache=False).logits[0, -1]
