"""Chunks that are pressed from their files: the same files as compiling under the press stores."""

from __future__ import annotations

import copy
import functools
from dataclasses import replace

import pytest
import torch
from engine_kit import adapter, family, ids, text_chunk
from extend_kit import chunks_of

from mpic.engine.native.engine import NativeEngine
from mpic.engine.native.presser import press_stored
from mpic.errors import UnsupportedParameter
from mpic.kv.chunk import ChunkKV
from mpic.kv.file import ChunkFile
from mpic.library import Library
from mpic.library.pressing import press_chunks
from mpic.link import parse_policy
from mpic.model.loaded import LoadedModel
from mpic.press import PRESSES, parse_press
from mpic.press.presses.leverage import Leverage

CHUNKS = [text_chunk(ids(7, 41)), text_chunk(ids(8, 90)), text_chunk(ids(3, 4))]
FROM_FILES = [cls for cls in PRESSES if not cls.needs_queries]
WRAPPINGS = ("mpic-5", "legolink-0", "packet-5")


@functools.cache
def model_of(name: str, dtype: str) -> LoadedModel:
    if dtype == "float32":
        return family(name).loaded
    return LoadedModel(copy.deepcopy(family(name).stock).to(getattr(torch, dtype)), None, name)


def compile_into(library: Library, model: LoadedModel, name: str, chunks, policies=WRAPPINGS) -> list[str]:
    """Compile the chunks in every wrapping; return the paths of their files."""
    engine = NativeEngine(model, library.store, adapter=adapter(name), pages=256, page_size=8, budget=512)
    try:
        paths = []
        for policy in policies:
            for chunk in chunks:
                wrapping = parse_policy(policy).wrapping
                engine.compile(chunk, wrapping).result(60)
                paths.append(
                    str(library.store.path(engine.linker.key(chunk, wrapping)).relative_to(library.root))
                )
    finally:
        engine.close()
    return paths


def press_all(library: Library, model: LoadedModel, press: str, replaced: bool = False):
    chosen = parse_press(press)
    return press_chunks(
        library, chosen, model.digest, lambda chunk: press_stored(model, chosen, chunk), replaced
    )


def pressed(chunks, press: str):
    return [replace(chunk, press=press) for chunk in chunks]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("cls", FROM_FILES, ids=lambda cls: cls.syntax)
def test_a_file_that_is_pressed_is_the_file_that_compiling_under_the_press_stores(cls, dtype, tmp_path):
    model = model_of("llama", dtype)
    for press in (cls(50, 5).name, cls(70).name, cls(60, 3, 4).name):
        with Library.open(tmp_path / f"{press} stored") as stored, Library.open(tmp_path / press) as compiled:
            compile_into(stored, model, "llama", CHUNKS)
            done = press_all(stored, model, press)
            paths = compile_into(compiled, model, "llama", pressed(CHUNKS, press))
            assert [one.outcome for one in done] == ["pressed"] * len(paths) == ["pressed"] * 9
            for path in paths:
                assert (stored.root / path).read_bytes() == (compiled.root / path).read_bytes()
            file = ChunkFile(stored.root / paths[0])
            assert (file.tokens, file.slots) == (41, parse_press(press).slots(41)) and file.slots < 41
            assert file.key.recipe.press == press
            stored.check()


@pytest.mark.parametrize("name", ["rotaries", "qwen2_vl", "llava"])
@pytest.mark.parametrize("cls", FROM_FILES, ids=lambda cls: cls.syntax)
def test_families_with_images_and_several_rotations_are_pressed_as_when_compiled(cls, name, tmp_path):
    model, press = model_of(name, "float32"), cls(50, 5).name
    chunks, policies = chunks_of(name), ("mpic-5", "legolink-0")
    if cls.needs_positions and model.mrope > 1:
        with Library.open(tmp_path / "stored") as stored:
            compile_into(stored, model, name, chunks[:1], policies[:1])
            with pytest.raises(UnsupportedParameter, match="several axes"):
                press_all(stored, model, press)
        return
    with Library.open(tmp_path / "stored") as stored, Library.open(tmp_path / "compiled") as compiled:
        compile_into(stored, model, name, chunks, policies)
        press_all(stored, model, press)
        for path in compile_into(compiled, model, name, pressed(chunks, press), policies):
            assert (stored.root / path).read_bytes() == (compiled.root / path).read_bytes()


def test_keys_behind_sink_tokens_are_unrotated_from_where_they_were_compiled(tmp_path, monkeypatch):
    # as in larger heads: a sketch sees how far all keys are rotated
    monkeypatch.setattr(Leverage, "sketch", 8)
    model, press = model_of("llama", "float32"), "leverage-50-5"
    with Library.open(tmp_path / "stored") as stored, Library.open(tmp_path / "compiled") as compiled:
        compile_into(stored, model, "llama", CHUNKS[:2], ["legolink-0"])
        press_all(stored, model, press)
        for path in compile_into(compiled, model, "llama", pressed(CHUNKS[:2], press), ["legolink-0"]):
            assert (stored.root / path).read_bytes() == (compiled.root / path).read_bytes()


def test_an_engine_links_what_was_pressed_without_compiling_it(tmp_path):
    model = model_of("llama", "float32")
    with Library.open(tmp_path / "library") as library:
        compile_into(library, model, "llama", CHUNKS, ["mpic-5"])
        press_all(library, model, "knorm-50", replaced=True)
        saved = library.store.stats()["saved"]
        compile_into(library, model, "llama", pressed(CHUNKS, "knorm-50"), ["mpic-5"])
        assert library.store.stats()["saved"] == saved and library.store.stats()["chunks"] == 3


@pytest.mark.parametrize("press", ["tova-50", "snapkv-50"])
def test_presses_that_look_at_queries_are_refused_by_name_and_with_the_reason(press):
    model = model_of("llama", "float32")
    with pytest.raises(UnsupportedParameter, match=f"press {press} .* queries .* no file"):
        press_stored(model, parse_press(press), None)


@pytest.mark.parametrize(
    ("name", "why"), [("mistral", "window"), ("deepseek", "latents"), ("paligemma", "both directions")]
)
def test_models_that_are_refused_when_compiling_are_refused_here(name, why):
    with pytest.raises(UnsupportedParameter, match=why):
        press_stored(family(name).loaded, parse_press("knorm-50"), None)


def test_what_is_compressed_already_is_not_compressed_again(tmp_path):
    model = model_of("llama", "float32")
    with Library.open(tmp_path / "library") as library:
        (path,) = compile_into(library, model, "llama", pressed(CHUNKS[:1], "knorm-50"), ["mpic-5"])
        assert press_all(library, model, "streaming-50") == []
        file = ChunkFile(library.root / path)
        chunk = ChunkKV(file.key, file.inputs, torch.empty(0))
        with pytest.raises(ValueError, match="already, by knorm-50"):
            press_stored(model, parse_press("streaming-50"), chunk)
