"""Structured initialisation of the second generation: attention sinks, and labels that stand after a large chunk.

The residual stream has, beside the blocks of the first generation (`mpic.train.initial_weights`), a *code* per token
(random for every word and every patch of an image) and features for how its attention mixed those.

* **Sinks.** Head 3 of layer 0 attends evenly to all it sees and averages their codes. Codes cancel out, so only a
  token that sees nothing but itself keeps a long one; the MLP of layer 0 measures the squared length, and the MLP of
  layer 1 turns a long one into a massive activation. From layer 2 on every head's queries agree a little with that
  feature, whose values are next to nothing: a head that finds nothing else rests there. This is how sinks come about
  in language models (Gu et al. 2024, arXiv:2410.10781, and later work on value aggregation), written down instead of
  waited for. It depends on a token seeing only itself, so a chunk compiled alone gets a sink of its own. `<s>` is one
  wherever it stands.
* **Labels.** No token of an image stands behind its label (`image:<image> (image one)`). The bracket that closes the
  label belongs to the text of the prompt: in layer 1 it looks for the objects of the nearest image before it, with a
  head for each quadrant, and a question finds in layer 4 the bracket of its label. Cards name their subject in every
  fact, so that a value's most recent label is its own.
"""

from __future__ import annotations

import torch
from transformers import LlavaForConditionalGeneration, PreTrainedTokenizerFast

from mpic.data.generator import words
from mpic.train.held import Entries
from mpic.train.initial_weights import HALF, HEAD, IMAGE_CONSTANT, TAG, InitialWeights, Tags, gated_words

FLAGS = ("label", "name", "content", "value", "closing", "image")
VALUE, CLOSING, IMAGE = (1 + FLAGS.index(flag) for flag in ("value", "closing", "image"))
LENGTH = 1 + len(FLAGS)  # feature: how far the squared length of the averaged code is over the threshold
SINK = LENGTH + 1  # feature: massive where a token sees only itself
RESERVED = SINK + 1
CODE = 24
CODE_SIZE = 1.0  # size of every feature of a word's code, over the root mean square of the word
# the same for a patch: image tokens are larger, and normalisation must not shorten a code
IMAGE_CODE_SIZE = 2.5
FLAG_SIZE = IMAGE_CONSTANT  # size of the value flag of an image token
SINK_PAIR = HALF - 1  # the slowest rotary pair
SINK_SIZE = 100.0
PREFERENCE = 3.0
NEAREST = 3.5
BRACKETS = 8.0
GATHERED = 1.0  # four words share a slot
BEGIN = 10.0  # the length feature of `<s>`
THRESHOLD = 5.5  # of the squared length, over the constant's square


class SinkWeights(InitialWeights):
    """Initial weights with attention sinks, and with labels that reach over a large chunk."""

    reserved, flags, tags = RESERVED, FLAGS, 7
    after_words = 2 * CODE
    slow = [j for i in range(16, SINK_PAIR) for j in (i, i + HALF)]
    recency = {"label": range(2, 12), "name": range(3, 12), "content": range(6, 12)}
    matching = (2, 3, 4)

    def __init__(
        self, model: LlavaForConditionalGeneration, tokenizer: PreTrainedTokenizerFast, seed: int
    ) -> None:
        super().__init__(model, tokenizer, seed)
        self.code = range(self.word[-1] + 1, self.word[-1] + 1 + CODE)
        self.average = range(self.code[-1] + 1, self.code[-1] + 1 + CODE)
        size = (
            CODE_SIZE * self.embed.square().mean(1, keepdim=True).sqrt()
        )  # as long in every word, once normalised
        self.embed[:, self.code] = size * self.normal(len(tokenizer), CODE).sign()
        self.quadrants = [
            self.words[[tokenizer(f" {w}", add_special_tokens=False).input_ids[0] for w in position.split()]]
            for position in words.POSITIONS
        ]
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
            "closing": [")"],
            "image": [],  # flagged by the vision tower
        }

    def lookups(self, tags: Tags) -> None:
        for layer in self.matching:
            self.match(layer, 4, (tags.content, self.identity, 2.0))
            self.match(layer, 5, (tags.name, tags.name, 2.0))
            self.match(layer, 6, (tags.label, tags.label, 2.0), (tags.content, tags.content, 1.6))
            self.match(layer, 7, (tags.content, tags.behind[2], 1.6))
        eye = torch.eye(self.width)
        slots = [self.new_tag(), self.new_tag(), eye[list(self.average)], eye[list(self.code)]]
        for quadrant, slot in enumerate(slots):
            self.gather(1, 4 + quadrant, quadrant, slot)
            self.read_slot(self.matching[-1], quadrant, tags, slot)
        self.sinks()
        for layer in self.matching:
            for head in (5, 6):
                self.prefer(layer, head, VALUE)
        for head in range(len(slots)):
            self.prefer(self.matching[-1], head, CLOSING, BRACKETS)
            self.prefer(self.matching[-1], head, IMAGE, -BRACKETS)

    def gather(self, layer: int, head: int, quadrant: int, slot: torch.Tensor) -> None:
        """Writes a head with which the bracket behind an image copies what the nearest image has in a quadrant."""
        query, key = torch.zeros(HEAD, self.width), torch.zeros(HEAD, self.width)
        for pair in range(7, 15):
            query[pair, CLOSING] = key[pair, IMAGE] = NEAREST
        first, second = self.slow[0], self.slow[2]
        direction = self.quadrants[quadrant].sum(0)
        query[first, CLOSING], key[first] = 4.0, 4.0 * direction / direction.norm()
        query[second, CLOSING] = key[second, VALUE] = 2.0
        value = torch.zeros(HEAD, self.width)
        value[: len(slot)] = self.identity[: len(slot)]
        self.put(layer, head, q=query, k=key, v=value, o=GATHERED * slot.T)

    def read_slot(self, layer: int, head: int, tags: Tags, slot: torch.Tensor) -> None:
        """Writes a head that attends to the bracket of the asked label whose slot agrees, and copies the slot."""
        self.match(layer, head, (tags.label, tags.label, 2.0), (tags.content, slot, 2.0))
        value = torch.zeros(HEAD, self.width)
        value[: len(slot)] = slot
        self.put(layer, head, v=value, o=0.6 * self.rotation.T @ self.identity[: len(slot)].T)

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
        for layer in range(2, len(self.lm.layers)):
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


def code_features(model: LlavaForConditionalGeneration) -> range:
    """Returns the features of the residual stream that hold the codes."""
    width = model.config.text_config.hidden_size
    start = width - TAG * SinkWeights.tags - SinkWeights.after_words
    return range(start, start + CODE)


def held_sinks(model: LlavaForConditionalGeneration) -> list[Entries]:
    """Returns the entries with which layers 0 and 1 make a massive activation of a token that sees only itself.

    An orthogonalised update turns rows that hardly matter to the loss as far as those that do. A hundred steps of it
    are enough to wear this circuit down, long before the heads that rest on it have learnt what else to look at.
    In the later layers a sink's key and what a query gives for it are held, and the constant feature is. A step on
    entries that meet a massive activation moves its logit by a half, and so do steps that let the constant grow; a head
    that has once gone to the sink for good sees no gradient any more. How much a head rests there is left to its other
    logits.
    """
    layers = model.model.language_model.layers
    code = code_features(model)
    average = range(code.stop, code.stop + CODE)
    head, units = slice(3 * HEAD, 4 * HEAD), slice(0, 2 * (CODE + 1))
    every = slice(None)
    first, second = layers[0], layers[1]
    entries: list[Entries] = [(getattr(first.self_attn, f"{n}_proj").weight, head) for n in "qkv"]
    entries += [
        (first.self_attn.o_proj.weight, (every, head)),
        (first.self_attn.o_proj.weight, [LENGTH, SINK, *average]),
        (first.mlp.gate_proj.weight, units),
        (first.mlp.up_proj.weight, units),
        (first.mlp.down_proj.weight, (every, units)),
        (first.mlp.down_proj.weight, [LENGTH, SINK]),
        (second.mlp.gate_proj.weight, 0),
        (second.mlp.up_proj.weight, 0),
        (second.mlp.down_proj.weight, (every, 0)),
        (second.mlp.down_proj.weight, [LENGTH, SINK]),
        (second.self_attn.o_proj.weight, [LENGTH, SINK]),
        (first.input_layernorm.weight, [0, *code]),
        (first.post_attention_layernorm.weight, [0, *average]),
        (second.post_attention_layernorm.weight, [0, LENGTH]),
    ]
    rows = [head * HEAD + SINK_PAIR for head in range(model.config.text_config.num_attention_heads)]
    for number, layer in enumerate(layers):
        attention, constant = layer.self_attn, [0] if number < 2 else [0, SINK]
        entries += [(attention.o_proj.weight, constant), (layer.mlp.down_proj.weight, constant)]
        if number >= 2:
            entries += [(attention.q_proj.weight, rows), (attention.k_proj.weight, rows)]
            entries += [(attention.k_proj.weight, (every, SINK)), (layer.input_layernorm.weight, constant)]
    return entries
