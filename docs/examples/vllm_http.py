"""Compile a document and link it into prompts on a plain vLLM server (docs/vllm.md says how to start one).

    python docs/examples/vllm_http.py http://127.0.0.1:8001 /var/mpic

The second argument is one of the folders the connector was started with; this script and the server both see it.
"""

import sys
import uuid
from pathlib import Path

import httpx

from mpic.engine.vllm.frontend.compiled import read_compiled
from mpic.engine.vllm.wire import CompileOrder, make_link_order
from mpic.kv import file
from mpic.kv.chunk import ChunkKey, ChunkKV, KVKey, Recipe
from mpic.link import SegmentShape, make_plan, parse_policy

DOCUMENT = (
    "The lighthouse at Cape Mora was built in 1874. Its keeper, Ines Duarte, kept a diary for thirty years. "
    * 3
)
QUESTIONS = ("Who kept the lighthouse?", "When was the lighthouse at Cape Mora built?")


class Server:
    """vLLM's OpenAI server, with prompts of token ids."""

    def __init__(self, url: str) -> None:
        self._http = httpx.Client(base_url=url, timeout=120)
        self.model = self._http.get("/v1/models").raise_for_status().json()["data"][0]["id"]

    def tokens(self, text: str) -> list[int]:
        body = {"model": self.model, "prompt": text, "add_special_tokens": False}
        return self._http.post("/tokenize", json=body).raise_for_status().json()["tokens"]

    def complete(self, prompt: list[int], tokens: int, order: dict | None = None) -> dict:
        """Return a greedy completion; ``order`` goes into ``kv_transfer_params``."""
        body = {"model": self.model, "prompt": prompt, "max_tokens": tokens, "temperature": 0}
        if order is not None:
            body["kv_transfer_params"] = order
            # A salt that nobody else uses: linked KV is approximate and must not be found by other requests.
            body["cache_salt"] = uuid.uuid4().hex
        return self._http.post("/v1/completions", json=body).raise_for_status().json()


def compile_chunk(server: Server, folder: Path, text: str) -> tuple[str, ChunkKV]:
    """Have the server compute a chunk alone, and make a chunk file of what it wrote; the file's name and contents."""
    parts = folder / f"compile-{uuid.uuid4().hex}"
    parts.mkdir()
    server.complete(server.tokens(text), 1, CompileOrder(parts.name).params())
    inputs, kv = read_compiled(parts)
    recipe = Recipe(dtype=str(kv.dtype).removeprefix("torch."))
    chunk = ChunkKV(KVKey("local", ChunkKey.of_text(text), server.model, recipe), inputs, kv)
    name = f"{chunk.key.digest}.safetensors"
    file.write(folder / name, chunk)
    for part in parts.iterdir():
        part.unlink()
    parts.rmdir()
    return name, chunk


def main(url: str, folder: str) -> None:
    server = Server(url)
    name, chunk = compile_chunk(server, Path(folder), DOCUMENT)
    policy = parse_policy("mpic-16")
    for question in QUESTIONS:
        before, after = server.tokens(f"Question: {question}\n"), server.tokens("\nAnswer:")
        shapes = [
            SegmentShape(len(before), len(before), False),
            SegmentShape(len(chunk.inputs), chunk.inputs.rotary_length, True),
            SegmentShape(len(after), len(after), False),
        ]
        order = make_link_order(make_plan(shapes, policy), [(name, chunk.key.digest)])
        prompt = [*before, *chunk.inputs.token_ids.tolist(), *after]
        linked = server.complete(prompt, 16, order.params())
        plain = server.complete(prompt, 16)
        print(question)
        print("  linked:", repr(linked["choices"][0]["text"]), linked["kv_transfer_params"]["mpic"])
        print("  plain: ", repr(plain["choices"][0]["text"]))


if __name__ == "__main__":
    main(*sys.argv[1:])
