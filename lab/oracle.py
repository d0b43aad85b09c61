"""The slow, obvious oracle of a link: a stock transformers model, its own masks, one long dense cache.

It knows nothing of rotary embeddings: a chunk is compiled alone *at the positions it has in the prompt*, where the
engine compiles it at 0 and turns queries. It knows nothing of masks, windows, soft-capping or sinks either: the mask of
a layer is the one that transformers makes, asked for each row's and key's index in the prompt, and the attention is the
``eager_attention_forward`` of the model's own file.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from mpic.kv.chunk import ChunkInputs
from mpic.link import Policy, Ranges
from mpic.model.structure import RowInputs, per_layer_inputs, text_model_of
from mpic.prompt.segments import Prompt, TextSegment

NAME = "mpic-oracle"
Layers = list[tuple[torch.Tensor, torch.Tensor]]
"""Keys and values by layer, ``[kv_heads, n, head_dim]`` each."""


@dataclass
class DenseCache:
    """Dense cache: ``keys/values[layer] [kv_heads, length, head_dim]``; rows at ``index`` are written, then attend.
    ``removed[layer] [kv_heads, length]`` is true where no row sees a token, since a press has removed it."""

    index: torch.Tensor
    length: int
    keys: dict[int, torch.Tensor] = field(default_factory=dict)
    values: dict[int, torch.Tensor] = field(default_factory=dict)
    queries: dict[int, torch.Tensor] = field(default_factory=dict)
    removed: dict[int, torch.Tensor] = field(default_factory=dict)
    scaling: float = 1.0

    def place(self, layer: int, where: slice | torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Write ``[kv_heads, n, head_dim]`` of a layer; the rest of the cache is NaN until it is written."""
        for held, new in ((self.keys, key), (self.values, value)):
            if layer not in held:
                held[layer] = torch.full((new.shape[0], self.length, new.shape[2]), float("nan"))
            held[layer][:, where] = new

    def remove(self, layer: int, start: int, n: int, kept: torch.Tensor) -> None:
        """Hide the tokens of ``[start, start + n)`` that are not in ``kept [kv_heads, any]``, which counts from
        start."""
        removed = self.removed.setdefault(layer, torch.zeros(len(kept), self.length, dtype=torch.bool))
        removed[:, start : start + n] = True
        removed.scatter_(1, kept + start, False)


_cache: DenseCache | None = None


def _mask(*, mask_function: Callable[..., torch.Tensor], dtype: torch.dtype = torch.float32, **unread: Any):
    cache = _cache
    assert cache is not None
    rows, keys = cache.index[:, None], torch.arange(cache.length)[None]
    seen = mask_function(0, 0, rows, keys).expand(len(rows), cache.length)
    return torch.zeros(seen.shape, dtype=dtype).masked_fill(~seen, torch.finfo(dtype).min)[None, None]


def _attention(module, query, key, value, attention_mask, **kwargs: Any):
    cache, layer = _cache, module.layer_idx
    assert cache is not None
    cache.place(layer, cache.index, key[0], value[0])
    cache.queries[layer] = query[0]
    cache.scaling = kwargs.get("scaling") or query.shape[-1] ** -0.5
    eager = sys.modules[type(module).__module__].eager_attention_forward
    keys, values = (torch.nan_to_num(held[layer])[None] for held in (cache.keys, cache.values))
    if attention_mask is None:  # the model leaves the mask to the implementation
        attention_mask = _mask(mask_function=lambda b, h, q, k: k <= q)
    if layer in cache.removed:
        removed = cache.removed[layer].repeat_interleave(query.shape[1] // key.shape[1], 0)
        lowest = torch.finfo(attention_mask.dtype).min
        attention_mask = attention_mask.masked_fill(removed[None, :, None], lowest)
    return eager(module, query, keys, values, attention_mask, **kwargs)


ALL_ATTENTION_FUNCTIONS.register(NAME, _attention)
ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, _mask)


class TokenTypes(NamedTuple):
    """A processor's types of tokens: the name of the model's argument for them, and the types of text, of images and of
    generated tokens."""

    name: str
    text: int
    image: int
    generated: int

    def of(self, kinds: Sequence[int], generated: int = 0) -> dict[str, torch.Tensor]:
        """Return the argument for a prompt's tokens (1: part of an image) and ``generated`` more."""
        types = [self.image if kind else self.text for kind in kinds]
        return {self.name: torch.tensor([types + [self.generated] * generated])}


IMAGE_TYPES = {
    name: TokenTypes(name, text=0, image=1, generated=0) for name in ("token_type_ids", "mm_token_type_ids")
}
PREFIX_TYPES = TokenTypes("token_type_ids", text=0, image=0, generated=1)
"""Token types of a prefix language model (PaliGemma)."""


class StockOracle:
    """Computes answers with one stock model.

    Args:
        stock: an unhooked model (its attention implementation is switched as needed).
        mrope: 3 for models with M-RoPE, else 1.
        types: its processor's types of tokens; None if the model has no such types.
        stand_ins: for some tokens, the token whose embedding the layers look up instead.
    """

    def __init__(
        self,
        stock: nn.Module,
        mrope: int,
        types: TokenTypes | None = None,
        stand_ins: Mapping[int, int] | None = None,
    ) -> None:
        self.model, self.mrope, self.types, self.stand_ins = stock, mrope, types, stand_ins
        self.text = text_model_of(stock)
        self.text_config = stock.config.get_text_config()
        self.cache: DenseCache | None = None

    # ---- pieces

    @contextmanager
    def _beside(self, extra: dict[str, Any]) -> Iterator[None]:
        """Pass the text model its inputs other than embeddings."""
        handle = self.text.register_forward_pre_hook(
            lambda module, args, kwargs: (args, {**kwargs, **extra}), with_kwargs=True
        )
        try:
            yield
        finally:
            handle.remove()

    def _run(
        self,
        cache: DenseCache,
        rows: RowInputs,
        positions: torch.Tensor,
        kinds: Sequence[int] = (),
        generated: int = 0,
    ) -> torch.Tensor:
        """Run the model over rows and return logits ``[rows, vocabulary]``. ``kinds`` says for each token of the
        prompt whether it belongs to an image; ``generated`` more follow."""
        global _cache
        _cache = self.cache = cache
        self.text.config._attn_implementation_internal = NAME
        extra: dict[str, Any] = {}
        if rows.deepstack is not None:
            marks, features = rows.deepstack
            extra = {"visual_pos_masks": marks[None], "deepstack_visual_embeds": list(features)}
        given: dict[str, Any] = {} if self.types is None else self.types.of(kinds, generated)
        found = per_layer_inputs(self.text, rows.ids, self.stand_ins)
        if found is not None:
            extra["per_layer_inputs"] = found
            if "per_layer_inputs" in inspect.signature(self.model.forward).parameters:
                given["per_layer_inputs"] = found
        with self._beside(extra):
            return self.model(
                inputs_embeds=rows.embeds[None],
                position_ids=positions[:1] if self.mrope == 1 else positions[:, None],
                # the rows of a prompt need not be adjacent
                attention_mask=torch.ones(1, len(rows.ids), dtype=torch.int64),
                use_cache=False,
                **given,
            ).logits[0]

    def _embed(self, ids: Sequence[int] | torch.Tensor) -> torch.Tensor:
        return self.model.get_input_embeddings()(torch.as_tensor(ids))

    def _embeds(self, inputs: ChunkInputs) -> torch.Tensor:
        return inputs.embeds if inputs.embeds is not None else self._embed(inputs.token_ids)

    @torch.no_grad()
    def compile(self, inputs: ChunkInputs, sink: int, bos: int, base: int | None = None) -> Layers:
        """Return the KV of a chunk that is compiled alone behind ``sink`` tokens, which are dropped; its first token
        has position ``base`` (``sink`` if it is not given)."""
        n, base = len(inputs), sink if base is None else base
        ids = torch.cat([torch.full((sink,), bos), inputs.token_ids])
        embeds = torch.cat([self._embed(ids[:sink]), self._embeds(inputs)])
        heads = (torch.arange(sink) + base - sink).expand(self.mrope, -1)
        deep = None
        if inputs.deepstack is not None:
            marks = torch.cat([torch.zeros(sink, dtype=torch.bool), torch.ones(n, dtype=torch.bool)])
            deep = marks, inputs.deepstack
        cache = DenseCache(torch.arange(sink + n), sink + n)
        kinds = [0] * sink + [int(inputs.embeds is not None)] * n
        self._run(cache, RowInputs(ids, embeds, deep), torch.cat([heads, inputs.positions + base], 1), kinds)
        return [(cache.keys[i][:, sink:], cache.values[i][:, sink:]) for i in sorted(cache.keys)]

    # ---- whole prompts

    def _layout(self, prompt: Prompt, inputs: Sequence[ChunkInputs]):
        """Return the rows of the whole prompt: ids, embed, positions, deepstack marks, features, chunks (start, base,
        inputs)."""
        ids, embeds, positions, marks, features, places = [], [], [], [], [], []
        start = base = 0
        following = iter(inputs)
        for segment in prompt.segments:
            if isinstance(segment, TextSegment):
                ids.append(torch.tensor(segment.token_ids))
                embeds.append(self._embed(segment.token_ids))
                n = rotary_length = len(segment.token_ids)
                positions.append(torch.arange(n).expand(self.mrope, -1) + base)
                marks.append(torch.zeros(n, dtype=torch.bool))
            else:
                chunk = next(following)
                ids.append(chunk.token_ids)
                embeds.append(self._embeds(chunk))
                positions.append(chunk.positions + base)
                deep = chunk.deepstack is not None
                marks.append(torch.full((len(chunk),), deep))
                if deep:
                    features.append(chunk.deepstack)
                places.append((start, base, chunk))
                n, rotary_length = len(chunk), chunk.rotary_length
            start += n
            base += rotary_length
        deepstack = torch.cat(features, 1) if features else None
        columns = (torch.cat(ids), torch.cat(embeds), torch.cat(positions, 1), torch.cat(marks))
        return *columns, deepstack, places, base

    @torch.no_grad()
    def generate(
        self,
        prompt: Prompt,
        inputs: Sequence[ChunkInputs],
        policy: Policy,
        selection: Sequence[Ranges],
        tokens: int,
        bos: int = 1,
        kept: Sequence[Sequence[torch.Tensor]] = (),
    ) -> tuple[list[int], torch.Tensor]:
        """Return the greedy answer and the logits of every answered position, given the chunk tokens to recompute.

        Args:
            kept: for each chunk and layer the tokens that a press has kept, ``[kv_heads, slots]``; empty where no chunk
                is compressed.
        """
        ids, embeds, positions, marks, deepstack, places, rotary_length = self._layout(prompt, inputs)
        own = torch.ones(len(embeds), dtype=torch.bool)
        compiled = []
        for (start, base, chunk), ranges in zip(places, selection, strict=True):
            keep = torch.zeros(len(chunk), dtype=torch.bool)
            for lo, hi in ranges:
                keep[lo:hi] = True
            own[start : start + len(chunk)] = keep
            compiled.append((start, self.compile(chunk, policy.wrapping.sink, bos, base)))
        index = own.nonzero()[:, 0]
        answer: list[int] = []
        logits = []
        for step in range(tokens):
            length = len(embeds)
            cache = DenseCache(index, length)
            for i, (start, layers) in enumerate(compiled):
                for layer, (k, v) in enumerate(layers):
                    cache.place(layer, slice(start, start + k.shape[1]), k, v)
                    if kept:
                        cache.remove(layer, start, k.shape[1], kept[i][layer])
            deep = None
            if deepstack is not None:
                deep = marks[index], deepstack[:, own[: len(marks)][marks]]
            rows = RowInputs(ids[index], embeds[index], deep)
            last = self._run(cache, rows, positions[:, index], kinds_of(prompt, inputs), step)[-1]
            logits.append(last)
            token = int(last.argmax())
            answer.append(token)
            ids = torch.cat([ids, torch.tensor([token])])
            embeds = torch.cat([embeds, self._embed([token])])
            positions = torch.cat([positions, torch.full((self.mrope, 1), rotary_length + step)], 1)
            own = torch.cat([own, torch.ones(1, dtype=torch.bool)])
            marks = torch.cat([marks, torch.zeros(1, dtype=torch.bool)])
            index = torch.cat([index, torch.tensor([length])])
        return answer, torch.stack(logits)

    @torch.no_grad()
    def deviations(self, prompt: Prompt, inputs: Sequence[ChunkInputs], layer: int) -> list[torch.Tensor]:
        """Return for every chunk, ``[tokens]``, the squared distance of a token's key and value in a full prefill from
        those in its chunk, compiled alone at its place, at one layer."""
        ids, embeds, positions, marks, deepstack, places, _ = self._layout(prompt, inputs)
        compiled = [self.compile(chunk, 0, 0, base)[layer] for _, base, chunk in places]
        whole = DenseCache(torch.arange(len(embeds)), len(embeds))
        deep = None if deepstack is None else (marks, deepstack)
        self._run(whole, RowInputs(ids, embeds, deep), positions, kinds_of(prompt, inputs))
        found = []
        for (start, _, chunk), (k, v) in zip(places, compiled, strict=True):
            rows = slice(start, start + len(chunk))
            keys, values = whole.keys[layer][:, rows] - k, whole.values[layer][:, rows] - v
            found.append(keys.square().sum((0, 2)) + values.square().sum((0, 2)))
        return found


def kinds_of(prompt: Prompt, inputs: Sequence[ChunkInputs]) -> list[int]:
    """Return for each token of a prompt whether it belongs to an image."""
    kinds: list[int] = []
    following = iter(inputs)
    for segment in prompt.segments:
        if isinstance(segment, TextSegment):
            kinds += [0] * len(segment.token_ids)
        else:
            chunk = next(following)
            kinds += [int(chunk.embeds is not None)] * len(chunk)
    return kinds
