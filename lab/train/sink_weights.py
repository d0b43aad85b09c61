"""Structured initialisation of the second generation: attention sinks, and labels that stand after a large chunk.

The residual stream has, beside the blocks of the first generation (`mpic_lab.train.initial_weights`), a *code* per
token (random for every word and every patch of an image) and features for how its attention mixed those.

* **Sinks.** Head 3 of layer 0 attends evenly to all it sees and averages their codes. Codes cancel out, so only a
  token that sees nothing but itself keeps a long one; the MLP of layer 0 measures the squared length, and the MLP of
  layer 1 turns a long one into a massive activation. From layer 2 on every head's queries agree a little with that
  feature, whose values are next to nothing: a head that finds nothing else rests there. This is how sinks come about
  in language models (Gu et al. 2024, arXiv:2410.10781, and later work on value aggregation), written down instead of
  waited for. It depends on a token seeing only itself, so a chunk compiled alone gets a sink of its own. `<s>` is one
  wherever it stands.
* **Labels.** A label stands before its image (`image one:<image>`), where it reaches the first dozen tokens of the
  image alone: the head that looks for the most recent label does not look further back. Every token of an image carries
  a code of its background, the image's *signature*. In layer 1 a question finds the tokens that stand behind its label
  and copies their signature; from layer 2 on it finds what has that signature and shows what is asked about. Cards
  name their subject in every fact, so that a value's most recent label is its own.
"""

from __future__ import annotations

import functools
from typing import ClassVar

import torch
from transformers import LlavaForConditionalGeneration, PreTrainedTokenizerFast

from mpic_lab.generator import words
from mpic_lab.generator.images import BACKGROUND_LEVELS
from mpic_lab.train.held import Entries
from mpic_lab.train.initial_weights import HALF, HEAD, IMAGE_CONSTANT, TAG, InitialWeights, Tags, gated_words

FLAGS = ("label", "name", "content", "value", "image")
VALUE, IMAGE = (1 + FLAGS.index(flag) for flag in ("value", "image"))
LENGTH = 1 + len(FLAGS)  # feature: how far the squared length of the averaged code is over the threshold
SINK = LENGTH + 1  # feature: massive where a token sees only itself
RESERVED = SINK + 1
CODE = 24
SIGNATURE = 15  # features of an image's background, five for each of red, green and blue
CODE_SIZE = 1.0  # size of every feature of a word's code, over the root mean square of the word
# the same for a patch: image tokens are larger, and normalisation must not shorten a code
IMAGE_CODE_SIZE = 2.5
SIGNATURE_SIZE = 2.0
FLAG_SIZE = IMAGE_CONSTANT  # size of the value flag of an image token
SINK_PAIR = HALF - 1  # the slowest rotary pair
SINK_SIZE = 1000.0
PREFERENCE = 3.0
NEAR_LABEL = 5.0
BEGIN = 10.0  # the length feature of `<s>`
THRESHOLD = 5.5  # of the squared length, over the constant's square
LABEL_STRENGTHS = (
    0.17, 0.29, 0.27, 1.08, 1.50, 3.74, 3.89, 3.20, 2.97, 2.68, 1.68, 1.58, 1.28, 3.04, 1.67,
)  # fmt: skip
"""The strengths of the rotary pairs, from the fastest on, in the head that looks for the most recent label. With
`BEYOND_LABEL` the score falls from 17 to 11 over 14 tokens, and is never above 0 from 64 to 8,192 tokens. A linear
program found them: of all strengths that do this they have the smallest sum."""
BEYOND_LABEL = 12.4


class SinkWeights(InitialWeights):
    """Initial weights with attention sinks, and with labels that reach over a large chunk."""

    reserved, flags, tags = RESERVED, FLAGS, 6
    after_words = 2 * CODE + SIGNATURE
    slow = [j for i in range(16, SINK_PAIR) for j in (i, i + HALF)]
    recency: ClassVar[dict[str, dict[int, float]]] = {
        "label": dict(enumerate(LABEL_STRENGTHS)),
        "name": dict.fromkeys(range(3, 12), 4.0),
        "content": dict.fromkeys(range(6, 12), 4.0),
    }
    beyond: ClassVar[dict[str, float]] = {"label": BEYOND_LABEL}
    matching = (2, 3, 4)

    def __init__(
        self, model: LlavaForConditionalGeneration, tokenizer: PreTrainedTokenizerFast, seed: int
    ) -> None:
        super().__init__(model, tokenizer, seed)
        self.code = range(self.word[-1] + 1, self.word[-1] + 1 + CODE)
        self.average = range(self.code[-1] + 1, self.code[-1] + 1 + CODE)
        self.signature = range(self.average[-1] + 1, self.average[-1] + 1 + SIGNATURE)
        size = (
            CODE_SIZE * self.embed.square().mean(1, keepdim=True).sqrt()
        )  # as long in every word, once normalised
        self.embed[:, self.code] = size * self.normal(len(tokenizer), CODE).sign()
        begin = tokenizer.bos_token_id  # several in a row would look like one
        self.embed[begin, self.code], self.embed[begin, LENGTH] = 0, BEGIN

    def flagged_words(self) -> dict[str, list[str]]:
        flagged = gated_words()
        digits = [*words.DIGITS, *(f" {d}" for d in words.DIGITS)]
        values = [f" {w}" for w in (*words.CITIES, *words.JOBS, *words.PETS)]
        return {
            **flagged,
            "label": [*flagged["label"], *words.DIGITS],
            "value": values + digits,
            "image": [],  # flagged by the vision tower
        }

    def lookups(self, tags: Tags) -> None:
        signature, asked = torch.eye(self.width)[list(self.signature)], self.new_tag()
        for head in (4, 5):
            self.match(1, head, (tags.label, tags.label, 1.8))
            self.put(1, head, v=signature, o=asked.T[:, :SIGNATURE])
            self.prefer(1, head, IMAGE, NEAR_LABEL)
        for layer in self.matching:
            self.match(layer, 3, (asked, signature, 2.5), (tags.content, self.identity, 2.5))
            self.match(layer, 4, (asked, signature, 2.5), (tags.content, self.identity, 2.5))
            self.match(layer, 5, (tags.name, tags.name, 2.0))
            self.match(layer, 6, (tags.label, tags.label, 2.0), (tags.content, tags.behind[1], 1.6))
            self.match(layer, 7, (tags.content, tags.behind[2], 1.6))
        self.sinks()
        for layer in self.matching:
            for head in (3, 4, 5, 6):
                self.prefer(layer, head, VALUE)

    def sinks(self) -> None:
        """Has layers 0 and 1 find tokens that see only themselves; all heads of the later ones may rest there."""
        read, write = (torch.eye(self.width)[list(r)] for r in (self.code, self.average))
        nothing = torch.zeros(HEAD, self.width)
        self.put(0, 3, q=nothing, k=nothing, v=read, o=write.T)
        squares = self.lm.layers[0].mlp
        rows = [(row, 1.0) for row in write] + [(torch.eye(self.width)[0], -THRESHOLD)]
        for unit, (row, weight) in enumerate([*rows, *((-row, weight) for row, weight in rows)]):
            squares.gate_proj.weight[unit] = squares.up_proj.weight[unit] = (
                row  # two of opposite sign: a square
            )
            squares.down_proj.weight[:, unit] = 0
            squares.down_proj.weight[LENGTH, unit] = 0.15 * weight
        massive = self.lm.layers[1].mlp
        for matrix in (massive.gate_proj, massive.up_proj):
            matrix.weight[0] = 0
        massive.gate_proj.weight[0, LENGTH] = 6.0
        massive.up_proj.weight[0, 0] = 1.0
        massive.down_proj.weight[:, 0] = 0
        massive.down_proj.weight[SINK, 0] = SINK_SIZE / 12
        for layer in self.lm.layers[2:]:
            query, key = layer.self_attn.q_proj.weight, layer.self_attn.k_proj.weight
            for head in range(self.lm.config.num_attention_heads):
                for row in (SINK_PAIR, SINK_PAIR + HALF):
                    query[head * HEAD + row], key[head * HEAD + row] = 0, 0
                query[head * HEAD + SINK_PAIR, 0] = 2.0
                key[head * HEAD + SINK_PAIR, SINK] = 1.0
        self.silence()

    def silence(self) -> None:
        """Has the heads that nobody wrote put out nothing at first.

        What a random head puts out is noise, and the quickest way to be rid of it is to rest on the sink for good.
        """
        for layer in range(len(self.lm.layers)):
            for head in range(self.lm.config.num_attention_heads):
                if (layer, head) not in self.written:
                    self.lm.layers[layer].self_attn.o_proj.weight[:, head * HEAD : (head + 1) * HEAD] = 0

    def prefer(self, layer: int, head: int, flag: int, strength: float = PREFERENCE) -> None:
        """Has a head attend to tokens of a flag rather than to others: after a name come many that are no value."""
        attention, row = self.lm.layers[layer].self_attn, head * HEAD + SINK_PAIR + HALF
        attention.q_proj.weight[row, 0], attention.k_proj.weight[row, flag] = abs(strength), strength


def patch_codes(model: LlavaForConditionalGeneration) -> torch.Tensor:
    """Returns [image tokens, CODE]: the code of every patch, the same for all images and seeds."""
    random = torch.Generator().manual_seed(7)
    tokens = model.config.image_seq_length
    return IMAGE_CODE_SIZE * torch.randn(tokens, CODE, generator=random).sign()


@functools.cache
def background_codes() -> torch.Tensor:
    """Returns [backgrounds, SIGNATURE]: the level of each colour as a corner of a tetrahedron, so that only equal
    levels agree."""
    corners = torch.tensor([[1.0, 1, 1], [1, -1, -1], [-1, 1, -1], [-1, -1, 1]])
    turn = torch.linalg.qr(torch.randn(5, 3, generator=torch.Generator().manual_seed(7)))[0]
    # a sum and not a product of matrices, which autocast would compute in bf16
    levels = SIGNATURE_SIZE * (5 / 3) ** 0.5 * (corners[:, None] * turn).sum(-1)
    return torch.stack([levels[list(background)].flatten() for background in BACKGROUND_LEVELS])


def signature_features(model: LlavaForConditionalGeneration) -> range:
    """Returns the features of the residual stream that hold an image's signature."""
    start = code_features(model).stop + CODE
    return range(start, start + SIGNATURE)


def code_features(model: LlavaForConditionalGeneration) -> range:
    """Returns the features of the residual stream that hold the codes."""
    width = model.config.text_config.hidden_size
    start = width - TAG * SinkWeights.tags - SinkWeights.after_words
    return range(start, start + CODE)


def held_circuits(model: LlavaForConditionalGeneration) -> list[Entries]:
    """Returns the entries that training leaves as they are: layer 0, the heads that read labels and find backgrounds,
    and what makes a massive activation of a token that sees only itself.

    An orthogonalised update turns rows that hardly matter to the loss as far as those that do. A hundred steps of it
    are enough to wear these circuits down, long before what rests on them has been learnt. Layer 0 is held as a whole:
    when it was trained, its outputs grew to seven times the length of a word, and the averaged code, a part of the
    normalised sum, became too short to tell a first token by.
    In the later layers a sink's key and what a query gives for it are held, and the constant feature is. A step on
    entries that meet a massive activation moves its logit by a half, and so do steps that let the constant grow; a head
    that has once gone to the sink for good sees no gradient any more. How much a head rests there is left to its other
    logits.
    """
    layers = model.model.language_model.layers
    code = code_features(model)
    average = range(code.stop, code.stop + CODE)
    every = slice(None)
    first, second = layers[0], layers[1]
    entries: list[Entries] = [(p, every) for p in first.parameters()]
    entries += [
        (model.model.language_model.embed_tokens.weight, (every, [0, LENGTH, SINK, *code, *average])),
        (second.mlp.gate_proj.weight, 0),
        (second.mlp.up_proj.weight, 0),
        (second.mlp.down_proj.weight, (every, 0)),
        (second.mlp.down_proj.weight, [LENGTH, SINK]),
        (second.self_attn.o_proj.weight, [LENGTH, SINK]),
        (second.post_attention_layernorm.weight, [0, LENGTH]),
        (second.input_layernorm.weight, every),
        (layers[2].input_layernorm.weight, every),
    ]
    labels = slice(4 * HEAD, 6 * HEAD)
    entries += [(getattr(second.self_attn, f"{n}_proj").weight, labels) for n in "qkv"]
    entries += [(second.self_attn.o_proj.weight, (every, labels))]
    shown = slice(3 * HEAD, 4 * HEAD)
    entries += [(getattr(layer.self_attn, f"{n}_proj").weight, shown) for layer in layers[2:4] for n in "qk"]
    rows = [head * HEAD + SINK_PAIR for head in range(model.config.text_config.num_attention_heads)]
    for number, layer in enumerate(layers):
        attention, constant = layer.self_attn, [0] if number < 2 else [0, SINK]
        entries += [(attention.o_proj.weight, constant), (layer.mlp.down_proj.weight, constant)]
        if number >= 2:
            entries += [(attention.q_proj.weight, rows), (attention.k_proj.weight, rows)]
            entries += [(attention.k_proj.weight, (every, SINK)), (layer.input_layernorm.weight, constant)]
    return entries
