"""Sizes of the report's sections: those for a GPU with 80 GB, and tiny ones that check that every line runs."""

from __future__ import annotations

from dataclasses import dataclass

from mpic_lab.bench.workload import DecoderShape
from mpic_lab.gpu.attention_cases import DECODE, PREFILL, Case
from mpic_lab.gpu.models import LLAVA, QWEN, ModelShape

BASE, LINK = "prefix", "mpic-32"


@dataclass(frozen=True)
class ImagePrompts:
    """Sizes of prompts with images: numbers of ``images``, ``tokens`` of each, and the texts around them."""

    images: tuple[int, ...] = (1, 2, 4, 6, 8, 10)
    tokens: int = 2880
    policies: tuple[str, ...] = (LINK, BASE, "full", "cacheblend-15")  # in case time runs out
    system: int = 40
    text: int = 160
    repeats: int = 2


@dataclass(frozen=True)
class Sizes:
    """Sizes of the measurements in all sections.

    Args:
        models: models with the shapes of real ones; the first is used for the headline, the last for decoding and
            loads.
        chunk: tokens of a text chunk in ``decode``; ``sets`` of ``set_chunks`` chunks are compiled, and a context is
            made of one or more sets.
        contexts: lengths of contexts in sets. A batch whose contexts need more sets than there are is left out, with a
            note.
        links, headline: prompts of images in those sections.
        cases: a prefill and a decoding step of one layer, for ``tuning``.
        stored: chunks that ``loads`` keeps on disk, and tokens of each.
        blocks, singles: candidates of ``tuning``.
    """

    models: tuple[ModelShape, ...] = (LLAVA, QWEN)
    copy_megabytes: int = 2048
    matmul: int = 8192
    repeats: int = 3
    kernel_repeats: int = 20
    chunk: int = 512
    set_chunks: int = 8
    sets: int = 64
    contexts: tuple[int, ...] = (1, 8)
    batches: tuple[int, ...] = (1, 8, 32, 64)
    tokens: int = 32
    text: int = 64
    links: tuple[ImagePrompts, ...] = tuple(
        ImagePrompts((8,), tokens, (LINK, "reuse"), repeats=3) for tokens in (576, 2880)
    )
    headline: ImagePrompts = ImagePrompts()
    stored: tuple[int, int] = (8, 2880)
    cases: tuple[Case, ...] = (PREFILL, DECODE)
    blocks: tuple[tuple[int, ...], ...] = (
        (128, 64, 8, 2), (128, 64, 8, 3), (128, 128, 8, 3), (64, 64, 4, 2), (64, 64, 4, 3),
    )  # fmt: skip
    singles: tuple[tuple[int, ...], ...] = ((64, 4, 2), (64, 4, 3), (128, 4, 3), (64, 8, 4), (32, 4, 4))
    tuned_dims: tuple[int, ...] = (128,)


FULL = Sizes()

_LLAVA = ModelShape("LLaVA-1.6-7B shape, tiny", DecoderShape(2, 64, 2, 64, 2, 300, 2048))
_QWEN = ModelShape("Qwen2.5-VL-7B shape, tiny", DecoderShape(2, 64, 4, 64, 2, 300, 2048), side=4)
QUICK = Sizes(
    models=(_LLAVA, _QWEN),
    copy_megabytes=4,
    matmul=64,
    repeats=1,
    kernel_repeats=1,
    chunk=16,
    set_chunks=2,
    sets=4,
    contexts=(1, 2),
    batches=(1, 2),
    tokens=4,
    text=8,
    links=tuple(ImagePrompts((2,), tokens, (LINK, "reuse"), 8, 8, 1) for tokens in (16, 40)),
    headline=ImagePrompts((1, 2), 40, system=8, text=8, repeats=1),
    cases=(Case("prefill, tiny", 4, 2, 32, 5, 1, 2, 16), Case("decode, tiny", 4, 2, 32, 1, 2, 2, 16)),
    stored=(2, 40),
    blocks=((16, 16, 4, 1), (16, 32, 4, 1)),
    singles=((16, 4, 1),),
    tuned_dims=(32,),
)
