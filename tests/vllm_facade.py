"""The vLLM engine behind ``mpic.engine.base``, with a library of a demo model's samples."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import torch
from engine_kit import until
from library_tools import drop
from small_models import SMALL, SMALL_SAMPLES

from mpic.config import EngineConfig
from mpic.engine import load_engine
from mpic.engine.base import GenerationRequest, Sampling
from mpic.kv.chunk import Chunk, ChunkInputs, ChunkKey
from mpic.library import Library
from mpic.link import BARE, Wrapping, parse_policy
from mpic.prompt import ChatTemplate, build_prompt
from mpic.prompt.segments import ChunkSegment, Prompt, TextSegment
from mpic.server.resolver import LibraryResolver

MANIFEST = json.loads((SMALL_SAMPLES / "manifest.json").read_text(encoding="utf-8"))
WRAPPINGS = (BARE, Wrapping(sink=4), Wrapping(packet=True))
"""The ways in which policies have chunks compiled."""
_ids = itertools.count()


class Bench:
    """An engine under test, with a library that both engines share.

    Args:
        samples: files that are uploaded, with their handles; None: the small model's samples.
    """

    def __init__(self, root: Path, samples: Mapping[Path, str] | None = None, **config: Any) -> None:
        self.library = Library.open(root)
        settings = {"model": str(SMALL), "pool_bytes": 1 << 28}
        settings |= {"max_running": 8, "vllm_args": '{"block_size": 32}'}
        config = self.config = EngineConfig(engine="vllm", **{**settings, **config})
        others = psutil.Process().children(recursive=True)
        self.engine, processor = load_engine(config, self.library.store)
        self.processes = [p for p in psutil.Process().children(recursive=True) if p not in others]
        self.template = ChatTemplate(processor)
        self.library.files.tokenize = self.template.tokenize_document
        self.library.references.tokenize = self.template.tokenize_document
        if samples is None:
            samples = {SMALL_SAMPLES / entry["path"]: entry["handle"] for entry in MANIFEST["files"]}
        for path, handle in samples.items():
            self.library.files.add("local", path, path.name, handle)

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.close()
        self.library.close()

    def prompt(self, messages, **options) -> Prompt:
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        return build_prompt(messages, self.template, LibraryResolver(self.library, "local", 64), **options)

    def text(self, text: str, owner: str = "local") -> Chunk:
        ids = tuple(self.template.tokenizer.encode(text, add_special_tokens=False))
        return Chunk(ChunkKey.of_text(text), owner, ids, label="doc")

    def request(
        self, prompt, policy, tokens=24, user="local", trace=False, retrieval=None, grammar=None, **sampling
    ):
        sampling = Sampling(max_tokens=tokens, **sampling)
        policy = parse_policy(policy)
        id = f"r{next(_ids)}"
        return GenerationRequest(id, prompt, policy, sampling, user, trace, retrieval, grammar=grammar)

    def submit(self, prompt, policy, engine=None, **options):
        return (engine or self.engine).submit(self.request(prompt, policy, **options))

    def ask(self, *args, **options):
        return self.submit(*args, **options).result()

    def file_of(self, chunk: Chunk, wrapping: Wrapping = BARE) -> Path:
        return self.library.store.path(self.engine.compiler.key(chunk, wrapping))

    def native(self) -> Any:
        """Return a native engine on the same library."""
        config = EngineConfig(model=self.config.model, dtype="float32", pool_bytes=1 << 28)
        return load_engine(config, self.library.store)[0]

    def compiled(self, engine: Any, chunk: Chunk, wrapping: Wrapping) -> tuple[ChunkInputs, torch.Tensor]:
        """Return what an engine writes for a chunk without a file: inputs, KV [layers, 2, heads, tokens, head_dim]."""
        key = self.engine.compiler.key(chunk, wrapping)
        drop(self.library.store, key, self.library.catalog)
        engine.forget(chunk)
        assert engine.compile(chunk, wrapping).result(60) == len(self.library.store.open(key).inputs)
        stored = self.library.store.open(key)
        kv = torch.empty(5, 2, 8, len(stored.inputs), 64)
        list(stored.read_layers(kv))
        return stored.inputs, kv

    def counters(self) -> dict[str, int]:
        return self.engine.stats()["counters"]


def compile_the_same(bench: Bench, native: Any, wrapping: Wrapping) -> None:
    """Check that both engines write the same for an image and for a text."""
    for chunk in bench.prompt("IMAGE#MAP7 FILE#VERA What?").chunks:
        (a, kv_a), (b, kv_b) = (bench.compiled(engine, chunk, wrapping) for engine in (bench.engine, native))
        torch.testing.assert_close(kv_a, kv_b, atol=2e-4, rtol=1e-4)
        assert torch.equal(a.token_ids, b.token_ids) and torch.equal(a.positions, b.positions)
        assert a.rotary_length == b.rotary_length and (a.embeds is None) == (b.embeds is None)
        if a.embeds is not None:
            torch.testing.assert_close(a.embeds, b.embeds, atol=2e-4, rtol=1e-4)


def idle(bench: Bench) -> None:
    until(lambda: not bench.engine._active)


def of(bench: Bench, *parts) -> Prompt:
    """Return a prompt in which texts are the request's own and chunks are linked."""
    encode = bench.template.tokenizer.encode
    text = lambda part: TextSegment(tuple(encode(part, add_special_tokens=False)))
    return Prompt(tuple(ChunkSegment(part) if isinstance(part, Chunk) else text(part) for part in parts))


def whole(usage) -> bool:
    return usage.prompt_tokens == usage.reused + usage.prefix_hit + usage.computed


def damage(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 3)
        file.write(os.urandom(64))


def lost(bench, question, how, policy="legolink-0"):
    """Return a question about a chunk whose file was stored and is lost, and the reason that will be given."""
    wrapping = parse_policy(policy).wrapping
    # one that nobody has read yet, because the scheduler keeps in memory what it has read
    own = lambda part: (
        replace(part, chunk=replace(part.chunk, owner="reader")) if hasattr(part, "chunk") else part
    )
    prompt = Prompt(tuple(map(own, bench.prompt(question).segments)))
    [chunk] = prompt.chunks
    bench.engine.compile(chunk, wrapping).result(60)
    how(bench.file_of(chunk, wrapping))
    return prompt, "missing" if how is Path.unlink else "corrupt"
