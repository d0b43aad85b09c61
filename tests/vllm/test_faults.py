"""Bad orders and bad files against one running engine: each request gets a plain prefill or an error with a code, and
the engine answers the next ones as before.

The engine runs in this process and has no room in host memory for more than one load at a time.
"""

from __future__ import annotations

import copy
import errno
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import vllm_kit as kit
from engine_kit import ids, image_chunk, prompt_of, text_chunk
from families import IMAGE_TOKEN, random_image
from vllm_links import Linker, engine

from mpic.engine.vllm import capture, files
from mpic.engine.vllm.wire import ChunkRef
from mpic.errors import CompileFailed, StorageFull
from mpic.kv.chunk import ChunkKey, ChunkKV, Recipe
from mpic.kv.file import ChunkFile, write

PATIENCE = 1.0
TOKENS = 4
HEAD, TAIL = [1, *ids(1, 9)], ids(2, 11)


class Outcome(NamedTuple):
    """How a request ended.

    Args:
        said: its tokens; empty when it failed.
        finish: vLLM's reason.
        report: of ``kv_transfer_params``.
    """

    said: list[int]
    finish: str
    report: dict[str, Any]


class Bench:
    """The engine, two chunks, and what good requests over them answer."""

    def __init__(self, llm: Any, folder: Path, outside: Path) -> None:
        self.llm, self.folder, self.outside = llm, folder, outside
        self.linker = Linker(llm, "llava", folder)
        self.text, self.image = text_chunk(ids(3, 40)), image_chunk(random_image(1))
        self.numbers = iter(range(10**6))
        self.good = self.answers()
        self.plain = {self.text: self.good[0], self.image: self.good[1]}

    def order(self, chunk: Any, path: str | None = None, **key: str) -> tuple[dict[str, Any], dict[str, Any]]:
        """A good request that links one chunk: prompt and parameters, free to be changed.

        Args:
            path: of another file to link instead.
        """
        request, params = self.linker.link(prompt_of(HEAD, chunk, TAIL), "mpic-4")
        params = copy.deepcopy(params)
        reference = self.reference(params)
        if path is not None:
            reference["path"] = path
        reference.update(key)
        return request, params

    @staticmethod
    def reference(params: dict[str, Any]) -> dict[str, Any]:
        """The first chunk of a link order, as an object."""
        body = params["mpic"]["link"]
        if not isinstance(body["chunks"][0], dict):
            body["chunks"] = [dict(zip(ChunkRef._fields, chunk)) for chunk in body["chunks"]]
        return body["chunks"][0]

    def copy_of(self, chunk: Any, change: Callable[[bytearray], Any] = lambda data: None) -> str:
        """The name of a copy of a chunk's file, changed."""
        _, (path, _) = self.linker.file(chunk)
        data = bytearray((self.folder / path).read_bytes())
        change(data)
        name = f"copy-{next(self.numbers)}.kv"
        (self.folder / name).write_bytes(data)
        return name

    def written(self, chunk: Any, change: Callable[[ChunkKV], ChunkKV]) -> tuple[str, str]:
        """Name and key digest of a valid file that holds something else."""
        _, (path, _) = self.linker.file(chunk)
        file = ChunkFile(self.folder / path)
        kv = torch.empty(*file.shape[:1], 2, file.shape[1], file.tokens, file.shape[2], dtype=file.dtype)
        for _ in file.read_layers(kv):
            pass
        changed = change(ChunkKV(file.key, file.inputs, kv))
        file.close()
        name = f"written-{next(self.numbers)}.kv"
        write(self.folder / name, changed)
        return name, changed.key.digest

    def ask(self, request: dict[str, Any], params: dict[str, Any], **sampling: Any) -> Outcome:
        return self.ask_all([(request, params)], **sampling)[0]

    def ask_all(
        self, requests: Sequence[tuple[dict[str, Any], dict[str, Any] | None]], **sampling: Any
    ) -> list[Outcome]:
        from vllm import SamplingParams

        settings = {"temperature": 0, "max_tokens": TOKENS, "ignore_eos": True, **sampling}
        extras = [{"kv_transfer_params": params} if params is not None else None for _, params in requests]
        done = self.llm.generate(
            [request for request, _ in requests],
            [SamplingParams(extra_args=extra, **settings) for extra in extras],
            use_tqdm=False,
        )
        return [
            Outcome(
                list(one.outputs[0].token_ids),
                one.outputs[0].finish_reason,
                (one.kv_transfer_params or {}).get("mpic", {}),
            )
            for one in done
        ]

    def answers(self) -> list[list[int]]:
        """Of good requests: either chunk in a prompt that is computed whole, and linked."""
        asked = [
            self.linker.link(prompt_of(HEAD, chunk, TAIL), "mpic-4") for chunk in (self.text, self.image)
        ]
        whole = [
            {"prompt_token_ids": [*HEAD, *self.text.token_ids, *TAIL]},
            {
                "prompt_token_ids": [*HEAD, IMAGE_TOKEN, *TAIL],
                "multi_modal_data": {"image": self.image.load_image()},
            },
        ]
        outcomes = self.ask_all([*((request, None) for request in whole), *asked])
        for one in outcomes[2:]:
            assert one.report["fallback"] == [] and one.report["reused"] > 0
        return [one.said for one in outcomes]


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    folder, outside = tmp_path_factory.mktemp("files"), tmp_path_factory.mktemp("outside")
    settings = {"patience": PATIENCE, "host_bytes": 1}
    with engine(kit.checkpoint("llava"), folder, settings) as llm:
        yield Bench(llm, folder, outside)


@pytest.fixture(autouse=True)
def the_engine_answers_as_before(bench):
    yield
    assert bench.answers() == bench.good


# files: the chunk is computed instead


def flip(at: Callable[[bytearray], int]) -> Callable[[bytearray], None]:
    def change(data: bytearray) -> None:
        data[at(data)] ^= 0x10

    return change


def cut(data: bytearray) -> None:
    del data[len(data) // 2 :]


def body(data: bytearray) -> int:
    """Where the header of a file ends."""
    return 8 + int.from_bytes(data[:8], "little")


BYTES = {
    "truncated": cut,
    "empty": bytearray.clear,
    "no file of ours": lambda data: data.__setitem__(slice(0, 64), os.urandom(64)),
    "a header of 2^63 bytes": lambda data: data.__setitem__(slice(0, 8), b"\xff" * 7 + b"\x7f"),
    "flipped bit in the header": flip(lambda data: 200),
    "flipped bit in a layer": flip(lambda data: body(data) + 5000),
    "flipped bit in the inputs": flip(lambda data: len(data) - 3),
}


@pytest.mark.parametrize("damage", BYTES)
def test_a_damaged_file_is_computed_instead(bench, damage):
    asked = bench.ask(*bench.order(bench.text, bench.copy_of(bench.text, BYTES[damage])))
    assert (asked.said, asked.report["fallback"]) == (bench.plain[bench.text], [(0, "corrupt")])
    assert asked.report["reused"] == 0


def other_key(chunk: ChunkKV) -> ChunkKV:
    return replace(chunk, key=replace(chunk.key, chunk=ChunkKey.of_text("something else")))


def fewer_layers(chunk: ChunkKV) -> ChunkKV:
    return replace(chunk, kv=chunk.kv[:2].contiguous())


def other_heads(chunk: ChunkKV) -> ChunkKV:
    return replace(chunk, kv=chunk.kv.repeat(1, 1, 2, 1, 1))


def halves(chunk: ChunkKV) -> ChunkKV:
    recipe = Recipe("bfloat16")
    return ChunkKV(replace(chunk.key, recipe=recipe), chunk.inputs, chunk.kv.bfloat16())


def other_ids(chunk: ChunkKV) -> ChunkKV:
    return replace(chunk, inputs=replace(chunk.inputs, token_ids=chunk.inputs.token_ids.flip(0)))


def shorter(chunk: ChunkKV) -> ChunkKV:
    inputs = replace(
        chunk.inputs, token_ids=chunk.inputs.token_ids[1:], positions=chunk.inputs.positions[:, :-1]
    )
    return replace(
        chunk, inputs=replace(inputs, extent=inputs.extent - 1), kv=chunk.kv[:, :, :, 1:].contiguous()
    )


@pytest.mark.parametrize("change", [fewer_layers, other_heads, halves, other_ids, shorter])
def test_a_file_that_does_not_fit_model_or_prompt_is_computed_instead(bench, change):
    path, key = bench.written(bench.text, change)
    asked = bench.ask(*bench.order(bench.text, path, key=key))
    assert (asked.said, asked.report["fallback"]) == (bench.plain[bench.text], [(0, "mismatch")])


def test_a_file_of_another_key_is_computed_instead(bench):
    path, _ = bench.written(bench.text, other_key)
    asked = bench.ask(*bench.order(bench.text, path))
    assert (asked.said, asked.report["fallback"]) == (bench.plain[bench.text], [(0, "mismatch")])


def no_file(bench: Bench) -> str:
    return "not-there.kv"


def below_a_file(bench: Bench) -> str:
    return f"{bench.copy_of(bench.text)}/x.kv"


def long_name(bench: Bench) -> str:
    return "x" * 4000


def folder(bench: Bench) -> str:
    (bench.folder / "folder.kv").mkdir()
    return "folder.kv"


def pipe(bench: Bench) -> str:
    os.mkfifo(bench.folder / "pipe.kv")
    return "pipe.kv"


@pytest.mark.parametrize(
    "place, code",
    [
        (no_file, "missing"),
        (below_a_file, "missing"),
        (long_name, "missing"),
        (folder, "mismatch"),
        (pipe, "mismatch"),
    ],
)
def test_a_path_without_a_file_is_computed_instead(bench, place, code):
    asked = bench.ask(*bench.order(bench.text, place(bench)))
    assert (asked.said, asked.report["fallback"]) == (bench.plain[bench.text], [(0, code)])


def test_a_file_that_may_not_be_read_is_computed_instead(bench, monkeypatch):
    def refuse(*args: Any, **options: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    path = bench.copy_of(bench.text)
    monkeypatch.setattr(files, "ChunkFile", refuse)  # the superuser may read everything
    asked = bench.ask(*bench.order(bench.text, path))
    assert (asked.said, asked.report["fallback"]) == (bench.plain[bench.text], [(0, "corrupt")])


def test_a_file_that_goes_away_before_it_is_read_is_computed_instead(bench, monkeypatch):
    path = bench.copy_of(bench.text)
    found = files.HostMemory._resolve

    def find_and_lose(self: Any, name: str) -> Path:
        file = found(self, name)
        file.unlink()
        return file

    monkeypatch.setattr(files.HostMemory, "_resolve", find_and_lose)
    asked = bench.ask(*bench.order(bench.text, path))
    assert (asked.said, asked.report["fallback"]) == (bench.plain[bench.text], [(0, "missing")])


def test_a_file_that_is_late_is_computed_instead(bench, monkeypatch):
    path = bench.copy_of(bench.text)
    read = ChunkFile.read_layers

    def slowly(self: ChunkFile, destination: torch.Tensor) -> Any:
        time.sleep(2 * PATIENCE)
        yield from read(self, destination)

    monkeypatch.setattr(ChunkFile, "read_layers", slowly)
    began = time.monotonic()
    asked = bench.ask(*bench.order(bench.text, path))
    assert time.monotonic() - began < 1.9 * PATIENCE
    assert (asked.said, asked.report["fallback"]) == (bench.plain[bench.text], [(0, "late")])


def test_a_file_that_was_mended_is_linked_again(bench):
    path = bench.copy_of(bench.text)
    good = (bench.folder / path).read_bytes()
    (bench.folder / path).write_bytes(good[:-1])
    assert bench.ask(*bench.order(bench.text, path)).report["fallback"] == [(0, "corrupt")]
    (bench.folder / path).write_bytes(good)
    assert bench.ask(*bench.order(bench.text, path)).report["fallback"] == []


# files that cannot be done without, or must not be read: an error


def test_a_symlink_out_of_the_folders_is_refused(bench):
    target = bench.outside / "chunk.kv"
    target.write_bytes((bench.folder / bench.copy_of(bench.text)).read_bytes())
    (bench.folder / "link.kv").symlink_to(target)
    refused(bench.ask(*bench.order(bench.text, "link.kv")), "forbidden")


@pytest.mark.parametrize(
    "change, code",
    [
        (lambda data: None, "missing"),
        (BYTES["flipped bit in the inputs"], "corrupt"),
        (BYTES["flipped bit in a layer"], "corrupt"),
    ],
    ids=["missing", "inputs", "layer"],
)
def test_an_image_whose_file_is_bad_fails_the_request(bench, change, code):
    path = bench.copy_of(bench.image, change)
    if code == "missing":
        (bench.folder / path).unlink()
    refused(bench.ask(*bench.order(bench.image, path)), code)


def no_embeddings(chunk: ChunkKV) -> ChunkKV:
    return replace(chunk, inputs=replace(chunk.inputs, embeds=None))


def wide_embeddings(chunk: ChunkKV) -> ChunkKV:
    return replace(chunk, inputs=replace(chunk.inputs, embeds=chunk.inputs.embeds.repeat(1, 2)))


def more_deepstack(chunk: ChunkKV) -> ChunkKV:
    return replace(chunk, inputs=replace(chunk.inputs, deepstack=chunk.inputs.embeds[None].clone()))


@pytest.mark.parametrize("change", [no_embeddings, wide_embeddings, more_deepstack])
def test_an_image_without_embeddings_of_this_model_fails_the_request(bench, change):
    path, key = bench.written(bench.image, change)
    refused(bench.ask(*bench.order(bench.image, path, key=key)), "mismatch")


def refused(asked: Outcome, code: str) -> None:
    assert (asked.finish, asked.said, asked.report["error"]) == ("error", [], code)
    assert asked.report["message"]


# orders that contradict themselves, their prompt or the rules


def link(params: dict[str, Any]) -> dict[str, Any]:
    return params["mpic"]["link"]


def changed_rows(*rows: Any) -> Callable[[dict[str, Any]], None]:
    return lambda params: link(params).update(rows=list(rows))


def changed(**fields: Any) -> Callable[[dict[str, Any]], None]:
    return lambda params: Bench.reference(params).update(fields)


N = len(HEAD) + 40 + len(TAIL)
ORDERS = {
    "path outside": changed(path="../secret.kv"),
    "absolute path": changed(path="/etc/passwd"),
    "path with a zero": changed(path="a\0b"),
    "path that is no text": changed(path=17),
    "rows overlap": changed_rows([0, 12], [8, N]),
    "rows out of range": changed_rows([0, 14], [50, N + 9]),
    "rows backwards": changed_rows([50, N], [0, 14]),
    "row that is no pair": changed_rows([0, 14, 15], [50, N]),
    "no rows": changed_rows(),
    "last token not computed": changed_rows([0, 14], [50, N - 1]),
    "tokens of nobody": changed_rows([0, 9], [50, N]),
    "length of another prompt": lambda params: link(params).update(length=N - 1),
    "extent that does not add up": lambda params: link(params).update(extent=N - 1),
    "base that does not add up": changed(base=3),
    "chunk outside the prompt": changed(start=N - 5),
    "chunk of no tokens": changed(length=0),
    "huge numbers": changed(start=1 << 62, length=1 << 62),
    "chunks that are none": lambda params: link(params).update(chunks="all"),
    "unknown field": lambda params: link(params).update(quick=True),
    "unknown field of a chunk": lambda params: Bench.reference(params).update(quick=True),
    "unknown version": lambda params: params["mpic"].update(version=2),
    "link and compile": lambda params: params["mpic"].update(compile={"folder": "x"}),
    "neither link nor compile": lambda params: params["mpic"].pop("link"),
    "no object": lambda params: params.update(mpic=[1, 2]),
}


@pytest.mark.parametrize("name", ORDERS)
def test_an_order_that_makes_no_sense_fails_its_request(bench, name):
    request, params = bench.order(bench.text)
    ORDERS[name](params)
    refused(bench.ask(request, params), "bad_link_order")


def test_a_link_without_salt_fails(bench):
    request, params = bench.order(bench.text)
    del request["cache_salt"]
    refused(bench.ask(request, params), "bad_link_order")


def test_a_link_with_images_beside_it_fails(bench):
    request, params = bench.order(bench.text)
    prompt = [*HEAD, IMAGE_TOKEN, *TAIL]
    refused(
        bench.ask(
            {**request, "prompt_token_ids": prompt, "multi_modal_data": {"image": random_image(3)}}, params
        ),
        "bad_link_order",
    )


def test_log_probabilities_of_a_linked_prompt_fail(bench):
    refused(bench.ask(*bench.order(bench.text), prompt_logprobs=1), "bad_link_order")


def test_a_prompt_that_is_too_long_is_refused_before_it_starts(bench):
    from vllm.exceptions import VLLMValidationError

    request, params = bench.order(bench.text)
    with pytest.raises(VLLMValidationError, match="1024"):
        bench.ask({**request, "prompt_token_ids": ids(9, 1100)}, params)


# compiling


@pytest.mark.parametrize("folder", ["not-there", "../outside", "a-file", "x" * 4000])
def test_a_compile_without_a_folder_fails(bench, folder):
    (bench.folder / "a-file").touch()
    asked = bench.ask({"prompt_token_ids": ids(4, 20)}, params_of(folder))
    refused(asked, "bad_link_order")


def params_of(folder: str) -> dict[str, Any]:
    return {"mpic": {"version": 1, "compile": {"folder": folder, "skip": 0}}}


@pytest.mark.parametrize("skip", [-1, 20, "2"])
def test_a_compile_of_nothing_fails(bench, skip):
    (bench.folder / "compiled").mkdir(exist_ok=True)
    params = params_of("compiled")
    params["mpic"]["compile"]["skip"] = skip
    refused(bench.ask({"prompt_token_ids": ids(4, 20)}, params), "bad_link_order")


@pytest.mark.parametrize("code, error", [(errno.ENOSPC, StorageFull), (errno.EIO, CompileFailed)])
def test_a_compile_onto_a_full_or_broken_disk_is_told_to_its_reader(
    bench, monkeypatch, tmp_path, code, error
):
    def fail(*args: Any, **options: Any) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(capture, "save_file", fail)
    name = f"compile-{code}"
    (bench.folder / name).mkdir()
    bench.ask({"prompt_token_ids": ids(4, 20)}, params_of(name), max_tokens=1)
    with pytest.raises(error):
        capture.read_compiled(bench.folder / name, timeout=10)
