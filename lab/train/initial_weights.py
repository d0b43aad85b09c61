"""Structured ("mimetic") initialisation of the language model.

From random weights, attention is slow to learn to look up what a label names, too slow for an hour on a CPU.
These initial weights already hold rough versions of the heads it takes, and training does the rest.

The residual stream starts in blocks: 4 reserved features, 92 for word embeddings, 32 for each of five tags.

* Layer 0 writes into a token's tags the previous token, the one before it, and the most recent *label*
  (number words, upper-case syllables), *name* (first and last names) and *content word* (colours, shapes,
  attributes, things). Reserved feature 0 is a constant with which queries say "always", 1-3 flag the words
  that the three recency heads listen to.
* Layers 1-3 hold induction heads and heads that match label and content word (images), label and previous
  token (cards), name (biographies), content word and the token two back (needles).
* The output matrix is the embedding matrix, rotated; the matching heads write through that rotation.
"""

from __future__ import annotations

import math
from typing import ClassVar, NamedTuple

import torch
from transformers import LlavaForConditionalGeneration, PreTrainedTokenizerFast

from mpic_lab.generator import words

HEAD = 64
HALF = HEAD // 2
SLOW = [j for i in range(16, HALF) for j in (i, i + HALF)]  # rotary pairs that hardly turn over a prompt
FLAGS = ("label", "name", "content")
RESERVED = 1 + len(FLAGS)
TAG = 32
TAGS = 5
CONSTANT = 1.5  # feature 0 of every embedding, and the flags where they are set
IMAGE_CONSTANT = 3.0  # feature 0 of every image token, whose other features sum several words


def gated_words() -> dict[str, list[str]]:
    """Returns the words each recency head listens to."""
    syllables = [c + v for c in "BCDFGHJKLMNPQRSTVWXYZ" for v in "AEIOU"] + list("ABCDEFGHIJKLMNOPQRSTUVWXYZ")
    content = [*words.COLOURS, *words.SHAPES, *words.OBJECTS, *words.QUESTION_WORDS]
    return {
        "label": [f" {w}" for w in words.NUMBERS] + [f" {s}" for s in syllables] + syllables,
        "name": [f" {w}" for w in (*words.FIRST_NAMES, *words.LAST_NAMES)] + list(words.FIRST_NAMES),
        "content": [f" {w}" for w in content],
    }


class Tags(NamedTuple):
    """Matrices [TAG, width] that read the tags of a token: the last word of each flag, and tokens at a distance."""

    label: torch.Tensor
    name: torch.Tensor
    content: torch.Tensor
    behind: dict[int, torch.Tensor]


class InitialWeights:
    """The weights in the making; a subclass may lay the residual stream out otherwise.

    Attributes:
        recency: flag -> the rotary pairs with which a head looks for its most recent word, and how strong each is.
            Faster pairs look less far back; together they say `sum(strength * cos(distance * frequency))`.
        beyond: flag -> what is taken off that score at every distance. A sum of cosines comes back to more than half of
            its height again and again over a long prompt.
        matching: the layers of the heads that match.
    """

    reserved = RESERVED
    flags: tuple[str, ...] = FLAGS
    tags = TAGS
    slow = SLOW
    after_words = 0  # features between the word block and the tags
    recency: ClassVar[dict[str, dict[int, float]]] = {
        "label": dict.fromkeys(range(3, 15), 4.0),
        "name": dict.fromkeys(range(4, 15), 4.0),
        "content": dict.fromkeys(range(8, 15), 4.0),
    }
    beyond: ClassVar[dict[str, float]] = {}
    matching: tuple[int, ...] = (1, 2, 3)

    def __init__(
        self, model: LlavaForConditionalGeneration, tokenizer: PreTrainedTokenizerFast, seed: int
    ) -> None:
        self.lm = model.model.language_model
        self.width = self.lm.config.hidden_size
        self.random = torch.Generator().manual_seed(seed)
        theta = self.lm.config.rope_parameters["rope_theta"]
        self.frequency = theta ** (-torch.arange(HALF) / HALF)
        self.word = range(self.reserved, self.width - TAG * self.tags - self.after_words)
        self.tags_used = 0
        self.written: set[tuple[int, int]] = set()  # (layer, head)
        words_only = torch.zeros(len(tokenizer), self.width)
        width = len(self.word)
        words_only[:, self.word] = self.normal(len(tokenizer), width) * 0.5 * math.sqrt(self.width / width)
        self.words = words_only
        self.embed = words_only.clone()
        self.embed[:, 0] = CONSTANT
        for feature, gated in enumerate(self.flagged_words().values(), 1):
            ids = [i for w in gated if len(i := tokenizer(w, add_special_tokens=False).input_ids) == 1]
            self.embed[torch.tensor(ids, dtype=torch.long).flatten(), feature] = CONSTANT
        rotation = torch.zeros(self.width, self.width)
        rotation[self.word[0] : self.word[-1] + 1, self.word[0] : self.word[-1] + 1] = self.orthogonal(width)
        self.rotation = rotation
        self.identity = self.read_words(TAG)  # how every tag names its word, so that tags compare

    def flagged_words(self) -> dict[str, list[str]]:
        """Returns the words with each flag, in the order of `flags`."""
        return gated_words()

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.random)

    def orthogonal(self, size: int) -> torch.Tensor:
        return torch.linalg.qr(self.normal(size, size))[0]

    def read_words(self, rows: int) -> torch.Tensor:
        """Returns [rows, width]: orthonormal directions within the word block."""
        matrix = torch.zeros(rows, self.width)
        matrix[:, self.word] = self.orthogonal(len(self.word))[:rows]
        return matrix

    def put(self, layer: int, head: int, **matrices: torch.Tensor) -> None:
        self.written.add((layer, head))
        attention, start = self.lm.layers[layer].self_attn, head * HEAD
        for name, matrix in matrices.items():
            weight = getattr(attention, f"{name}_proj").weight
            if name == "o":
                weight[:, start : start + HEAD] = 0
                weight[:, start : start + matrix.shape[1]] = matrix
            else:
                weight[start : start + HEAD] = 0
                weight[start : start + len(matrix)] = matrix

    def previous(self, head: int, distance: int) -> torch.Tensor:
        """Writes a head that attends to the token `distance` back; returns how to read the tag it writes."""
        query, key = torch.zeros(HEAD, self.width), torch.zeros(HEAD, self.width)
        amplitude = math.sqrt(60) / 2.5
        for i in range(10):
            query[i, 0] = amplitude
            key[i, 0] = amplitude * math.cos(distance * self.frequency[i])
            key[i + HALF, 0] = amplitude * math.sin(distance * self.frequency[i])
        return self._write(head, query, key)

    def recent(self, head: int, flag: str) -> torch.Tensor:
        """Writes a head that attends to the most recent word of a flag."""
        query, key = torch.zeros(HEAD, self.width), torch.zeros(HEAD, self.width)
        scores = {
            **self.recency[flag],
            HALF - 1: -self.beyond.get(flag, 0.0),
        }  # the slowest pair does not turn
        for i, strength in scores.items():
            amplitude = math.sqrt(8 * abs(strength)) / 2.5
            query[i, 0] = amplitude
            key[i, 1 + self.flags.index(flag)] = math.copysign(amplitude, strength)
        return self._write(head, query, key)

    def _write(self, head: int, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        space = self.new_tag()
        self.put(0, head, q=query, k=key, v=self.identity, o=0.7 * space.T)
        return space

    def new_tag(self) -> torch.Tensor:
        """Returns [TAG, width]: how to read the next free tag."""
        start = self.width - TAG * (self.tags - self.tags_used)
        self.tags_used += 1
        return torch.eye(self.width)[start : start + TAG]

    def match(self, layer: int, head: int, *pairs: tuple[torch.Tensor, torch.Tensor, float]) -> None:
        """Writes a head that attends where each (query rows, key rows) pair agrees, and copies to the output."""
        share = len(self.slow) // len(pairs)
        query, key = (0.02 * self.normal(HEAD, self.width) for _ in range(2))
        for n, (asked, offered, strength) in enumerate(pairs):
            places = self.slow[n * share : (n + 1) * share]
            query[places], key[places] = strength * asked[:share], strength * offered[:share]
        value = self.read_words(HEAD)
        self.put(layer, head, q=query, k=key, v=value, o=0.6 * self.rotation.T @ value.T)

    def lookups(self, tags: Tags) -> None:
        """Writes the heads that find what a question asks for."""
        for layer in self.matching:
            self.match(layer, 4, (tags.label, tags.label, 2.0), (tags.content, self.identity, 2.0))
            self.match(layer, 5, (tags.name, tags.name, 2.0))
            self.match(layer, 6, (tags.label, tags.label, 2.0), (tags.content, tags.behind[1], 1.6))
            self.match(layer, 7, (tags.content, tags.behind[2], 1.6))


@torch.no_grad()
def structured_init(
    model: LlavaForConditionalGeneration,
    tokenizer: PreTrainedTokenizerFast,
    seed: int = 0,
    kind: type[InitialWeights] = InitialWeights,
) -> None:
    """Overwrites embeddings, output matrix and most attention weights of the language model in place."""
    init = kind(model, tokenizer, seed)
    init.lm.embed_tokens.weight.copy_(init.embed)
    model.lm_head.weight.copy_(0.1 * init.words @ init.rotation)
    last = model.model.multi_modal_projector.linear_2
    last.weight[0], last.bias[0] = 0, IMAGE_CONSTANT

    behind = {distance: init.previous(distance - 1, distance) for distance in (1, 2)}
    label, name, content = (init.recent(head, flag) for head, flag in enumerate(init.recency, 4))
    init.lookups(Tags(label, name, content, behind))
    for layer in init.matching[:2]:
        init.match(layer, 0, (init.identity, behind[1], 1.5))  # induction
        own = init.read_words(TAG)
        init.match(layer, 1, (own, own, 1.5))  # the same token earlier
        init.match(layer, 2, (init.identity, behind[2], 1.5))  # skip-one induction
