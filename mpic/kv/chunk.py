"""Chunks, their identities, and their compiled KV (``docs/design.md``, "What a link is" and "Isolation").

A *chunk* is immutable content: one image, one clip or one piece of text. Identity is always a full SHA-256 and is
compared whole; a truncated digest is only ever shown to people.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Literal, NamedTuple

import torch
from PIL import Image

from mpic.imaging.clips import Clip, Sample
from mpic.imaging.pixels import PixelDigest
from mpic.imaging.stored_file import FileBytes, pieces
from mpic.press import parse_press

Kind = Literal["text", "image", "video"]
LATENT, LATENT_ONCE = "latent", "latent-once"
"""Layouts of ``Recipe``."""


def digest(*parts: FileBytes | str) -> str:
    """Return SHA-256 (hex, 64 characters) over length-prefixed parts, so that no two splits of bytes collide."""
    found = hashlib.sha256()
    for part in parts:
        raw = part.encode() if isinstance(part, str) else part
        found.update(len(raw).to_bytes(8, "little"))
        for piece in pieces(raw):
            found.update(piece)
    return found.hexdigest()


@dataclass(frozen=True, slots=True)
class ChunkKey:
    """The identity of a chunk's content: its kind and a full digest (of an image's pixels and size, of the bytes of a
    text, or of a clip's file)."""

    kind: Kind
    digest: str

    @classmethod
    def of_text(cls, text: str) -> ChunkKey:
        return cls("text", digest("text", text))

    @classmethod
    def of_image(cls, image: Image.Image) -> ChunkKey:
        """Return the key of a decoded RGB image (EXIF orientation applied): of its size and pixels, not its file.

        Raises:
            ValueError: it is not RGB.
        """
        if image.mode != "RGB":
            raise ValueError(f"an image's key is of its RGB pixels, not of {image.mode}")
        return cls("image", PixelDigest.of(image))

    @classmethod
    def of_clip(cls, data: FileBytes) -> ChunkKey:
        """Return the key of a clip: of its file. The model's processor chooses which frames are seen, so that is part
        of the recipe."""
        return cls("video", digest("video", data))

    def __str__(self) -> str:
        return f"{self.kind}:{self.digest[:12]}"


@dataclass(frozen=True, slots=True)
class Recipe:
    """The way in which a chunk is compiled. Two recipes never share a ChunkKV.

    Args:
        dtype: type of the stored K and V (``float32``, ``bfloat16``, ``float16``).
        codec: encoding of the stored bytes; ``raw`` is lossless.
        sink: BOS tokens compiled in front of the chunk and dropped afterwards (LegoLink-0 of EPIC, section 5.4).
        preprocessing: digest of the tokenizer and image processor that made the chunk's inputs; for a clip also of the
        video processor and its sampling of frames.
        packet: digest of the adapter around the chunk (KV Packet, section 3.1), or empty.
        layout: what a layer keeps of a token. Empty: every head's key and value. ``latent-once``: the latent of
            multi-head latent attention and the part of the key that turns. ``latent``: the same twice, as key and as
            value, where other layers of the model keep heads.
        press: name of the press that compressed the KV (``mpic.press``), or empty.
    """

    dtype: str
    codec: str = "raw"
    sink: int = 0
    preprocessing: str = ""
    packet: str = ""
    layout: str = ""
    press: str = ""

    def fields(self) -> dict[str, str | int]:
        """Return its fields as JSON values, as files and catalogues have them. An empty ``packet``, ``layout`` or
        ``press`` is left out, so that chunks compiled before these fields existed keep their digests."""
        return {k: v for k, v in asdict(self).items() if v or k not in ("packet", "layout", "press")}

    @property
    def parts(self) -> int:
        """Number of vectors that a layer keeps for a token and head: a key and a value, or one that serves as both."""
        return 1 if self.layout == LATENT_ONCE else 2

    def slots(self, n: int) -> int:
        """Return how many of n tokens the KV holds in every layer and head."""
        press = parse_press(self.press)
        return n if press is None else press.slots(n)

    @property
    def digest(self) -> str:
        return _recipe_digest(self)


@functools.lru_cache(256)
def _recipe_digest(recipe: Recipe) -> str:
    return digest("recipe", json.dumps(recipe.fields(), sort_keys=True))


@dataclass(frozen=True)
class KVKey:
    """The address of one ChunkKV: owner, content, model and recipe."""

    owner: str
    chunk: ChunkKey
    model: str
    recipe: Recipe

    @staticmethod
    @functools.lru_cache(1 << 14)
    def of(owner: str, chunk: ChunkKey, model: str, recipe: Recipe) -> KVKey:
        """Return the key. Recently used keys are cached, so that they are not made and hashed again."""
        return KVKey(owner, chunk, model, recipe)

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:  # computed once, because keys are looked up many times in a request's life
        return hash((self.owner, self.chunk, self.model, self.recipe))

    @functools.cached_property
    def digest(self) -> str:
        return digest("kv", self.owner, self.chunk.kind, self.chunk.digest, self.model, self.recipe.digest)


@dataclass(frozen=True)
class Chunk:
    """A reference to reusable content as a prompt holds it.

    Args:
        key: content identity.
        owner: user id whose library holds it (server-derived), or the shared library's id.
        token_ids: for text, the ids fixed when the chunk was made; None for images and clips.
        load_image: for images, returns the decoded RGB image (only called when nothing is compiled yet).
        load_clip: for clips, returns those of its frames that the sampler it is given chooses (only called then, too).
        label: the name a person gave it, shown in traces.
        file_id: the library file it came from, or None for inline content.
        press: name of the press that compresses its KV, ``none``, or empty if neither request nor upload names one.
        page: the page of its file that it is on, from 1; None where there are no pages.
        lease: an object that lives as long as the chunk and its copies, by which its library knows that it is in use.
    """

    key: ChunkKey
    owner: str
    token_ids: tuple[int, ...] | None = None
    load_image: Callable[[], Image.Image] | None = field(default=None, compare=False, repr=False)
    label: str | None = None
    file_id: str | None = None
    press: str = ""
    load_clip: Callable[[Sample], Clip] | None = field(default=None, compare=False, repr=False)
    lease: object = field(default=None, compare=False, repr=False)
    page: int | None = field(default=None, compare=False)

    @property
    def kind(self) -> Kind:
        return self.key.kind

    def pressed(self, asked: str | None, default: str = "") -> Chunk:
        """Return the chunk with the press that a request asks for; without one its own, then the server's."""
        press = asked or self.press or default
        return self if press == self.press else replace(self, press=press)


@dataclass(frozen=True)
class ChunkInputs:
    """The inputs of the model's first layer for a chunk of n tokens; enough to recompute any of them without a vision
    encoder.

    Args:
        token_ids: ``[n]`` int64; a placeholder for tokens with an embedding of their own (for images the model's image
            token).
        positions: ``[p, n]`` int64 chunk-local rotary positions; p = 3 for M-RoPE (Qwen-VL), else 1.
        rotary_length: rotary positions the chunk takes: the next segment starts at base + rotary_length.
        embeds: ``[n, hidden]`` input embeddings of an image, a clip or a packet, None for text (looked up in the
            embedding table).
        deepstack: ``[layers, n, hidden]`` features added after the first layers (Qwen3-VL), or None.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    rotary_length: int
    embeds: torch.Tensor | None = None
    deepstack: torch.Tensor | None = None

    def __len__(self) -> int:
        return self.token_ids.shape[0]

    def embedded(self, embed: Callable[[torch.Tensor], torch.Tensor]) -> ChunkInputs:
        """Return the inputs with embeddings of their own, in host memory.

        Args:
            embed: gives ``[n, hidden]`` for the token ids of a text.
        """
        return self if self.embeds is not None else replace(self, embeds=embed(self.token_ids).cpu())

    def wrap(self, header: torch.Tensor, trailer: torch.Tensor) -> ChunkInputs:
        """Return the inputs of the packet ``[header, chunk, trailer]`` (KV Packet, section 3.1, equation 2). Soft
        tokens take positions as text does, before the chunk and behind its extent, and have no DeepStack features.

        Args:
            header, trailer: ``[any, hidden]`` embeddings.

        Raises:
            ValueError: the chunk has no embeddings.
        """
        if self.embeds is None:
            raise ValueError("only embeddings can be wrapped")
        h, t, axes = len(header), len(trailer), self.positions.shape[0]
        before = torch.arange(h).expand(axes, h)
        after = torch.arange(t).expand(axes, t) + h + self.rotary_length
        deepstack = self.deepstack
        if deepstack is not None:
            deepstack = torch.nn.functional.pad(deepstack, (0, 0, h, t))
        return ChunkInputs(
            torch.nn.functional.pad(self.token_ids, (h, t)),
            torch.cat([before, self.positions + h, after], 1),
            h + self.rotary_length + t,
            torch.cat([header.to(self.embeds), self.embeds, trailer.to(self.embeds)]),
            deepstack,
        )

    @property
    def nbytes(self) -> int:
        tensors = (self.token_ids, self.positions, self.embeds, self.deepstack)
        return sum(t.nbytes for t in tensors if t is not None)


class KVShape(NamedTuple):
    """The geometry of a model's KV: every extent of n tokens is ``[layers, parts, kv_heads, n, head_dim]`` contiguous.
    The parts are keys and values; where there is one, the values are the keys (``mpic.model.latent``)."""

    layers: int
    kv_heads: int
    head_dim: int
    parts: int = 2

    def extent(self, n: int) -> tuple[int, ...]:
        """Return the sizes of an extent of n tokens."""
        return self.layers, self.parts, self.kv_heads, n, self.head_dim

    @property
    def per_token(self) -> int:
        """The elements of K and V that one token takes over all layers."""
        return self.layers * self.parts * self.kv_heads * self.head_dim


@dataclass(frozen=True)
class ChunkKV:
    """A compiled chunk in host memory: its inputs and ``kv [layers, parts, kv_heads, m, head_dim]`` with keys rotated
    at their chunk-local positions (offset by ``recipe.sink``); there are ``recipe.parts`` parts, and m is
    ``recipe.slots(n)``, n unless a press made it less."""

    key: KVKey
    inputs: ChunkInputs
    kv: torch.Tensor
