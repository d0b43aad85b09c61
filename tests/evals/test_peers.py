"""``mpic bench peers``: the model files it writes, the prompts it asks, and its way with a server of llama.cpp."""

from __future__ import annotations

import sys
from pathlib import Path
from textwrap import dedent

import pytest
import torch
from bench_kit import run_bench
from transformers import AutoModelForCausalLM

from mpic.evals.bench.harness import BENCHES, BenchDevice, BenchFailed, Series
from mpic.evals.bench.peers import llama_server, peers, plain_vllm
from mpic.evals.bench.peers.gguf_file import write_gguf
from mpic.evals.bench.peers.prompts import Questions, Settings, flat
from mpic.evals.bench.workload import DecoderShape, random_model

TINY = DecoderShape(layers=2, hidden=128, heads=4, kv_heads=2, intermediate=96, vocabulary=300, context=1024)
SETTINGS = Settings(
    TINY,
    documents=3,
    document_tokens=48,
    system=8,
    question=8,
    short=24,
    answers=(1, 3),
    tokens=64,
    probes=4,
    probe_tokens=16,
    repeats=1,
)
CPU = torch.device("cpu")
IDS = torch.arange(11, 43)[None]


@pytest.fixture
def alone(monkeypatch):
    """Neither vLLM nor llama.cpp is found."""
    monkeypatch.setattr(plain_vllm, "why_not", lambda: "left out")
    monkeypatch.setattr(llama_server, "program", lambda: None)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 5e-2)])
def test_a_gguf_file_holds_the_same_model(dtype, tolerance, tmp_path):
    model = random_model(TINY, BenchDevice(CPU, dtype))
    write_gguf(model, tmp_path / "bench.gguf")
    read = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="bench.gguf", dtype=dtype)
    with torch.inference_mode():
        expected, found = (one(input_ids=IDS).logits.float() for one in (model, read))
    assert (found - expected).abs().max() <= tolerance * expected.abs().max()


def test_a_new_order_shares_the_system_prompt_alone_with_the_one_before_it():
    questions = Questions(SETTINGS)
    first, second = (flat(questions.shuffled(turn)) for turn in (0, 1))
    assert len(first) == len(second) == SETTINGS.length
    assert first[: SETTINGS.system] == second[: SETTINGS.system]
    assert first[SETTINGS.system] != second[SETTINGS.system]
    documents = [set(document.token_ids) for document in questions.documents]
    assert all(document <= set(first) and document <= set(second) for document in documents)


def test_two_questions_about_the_documents_in_order_differ_behind_them():
    questions = Questions(SETTINGS)
    first, second = flat(questions.ordered()), flat(questions.ordered())
    shared = SETTINGS.length - SETTINGS.question
    assert first[:shared] == second[:shared] and first[shared:] != second[shared:]


def test_peers_that_are_not_installed_are_named_with_the_reason(alone, tmp_path, monkeypatch):
    result, _ = run_bench(monkeypatch, {"peers": SETTINGS}, tmp_path, "peers", "--device", "cpu")
    assert set(result["headline"]) == {"shuffled_best_peer_over_mpic32", "fresh_transformers_over_mpic"}
    missing = result["settings"]["not measured"]
    assert missing["vLLM"] == "left out" and "LLAMA_SERVER" in missing["llama.cpp"]
    cases = {
        row["table"]: {r["column"] for r in result["rows"] if r["table"] == row["table"]}
        for row in result["rows"]
    }
    assert cases[peers.SHUFFLED] == {"MPIC prefix", "MPIC mpic-32", "MPIC legolink-16", "transformers"}
    assert cases[peers.AGAIN] == {"MPIC prefix"}, "transformers keeps nothing between prompts"
    assert cases[peers.answers_case(3)] == {"MPIC mpic-32", "transformers"}


def test_a_peer_that_computes_another_model_ends_the_bench(alone, monkeypatch):
    monkeypatch.setattr(peers.Stock, "next_token", lambda self, ids: 7)
    with pytest.raises(BenchFailed, match="transformers generates another token than MPIC"):
        peers.run(SETTINGS, BenchDevice(CPU, torch.float32), peers.Ticker())


def test_every_headline_has_a_goal():
    columns = ("MPIC prefix", *peers.LINKS, "transformers", "vLLM", "llama.cpp")
    cases = (*peers.FIRST, *map(peers.answers_case, Settings().answers))
    samples = {(case, column): Series(1.0, [2.0]) for case in cases for column in columns}
    assert set(peers.headline(Settings(), samples)) == set(BENCHES["peers"].wants)


FAKE = """
    #!{python}
    import json, sys, time
    from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

    if "--version" in sys.argv:
        print("version: 7 (fake)", file=sys.stderr)
        sys.exit()
    option = lambda name: sys.argv[sys.argv.index(name) + 1]
    if {fails}:
        sys.exit("error: unsupported model")

    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(int(option("--threads")))
    folder, _, name = option("--model").rpartition("/")
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200 if self.path == "/health" else 404)
            self.end_headers()

        def do_POST(self):
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            assert 0 <= asked["id_slot"] < int(option("--parallel")), asked["id_slot"]
            assert len(asked["prompt"]) + asked["n_predict"] <= int(option("--ctx-size")) // int(option("--parallel"))
            with torch.inference_mode():
                token = int(model(input_ids=torch.tensor([asked["prompt"]])).logits[0, -1].argmax())
            self.send_response(200)
            self.end_headers()
            if not asked["stream"]:
                self.wfile.write(json.dumps({{"tokens": [token]}}).encode())
                return
            for left in range(asked["n_predict"], -1, -1):
                self.wfile.write(b"data: " + json.dumps({{"content": "w", "stop": left == 0}}).encode() + b"\\n\\n")
                self.wfile.flush()
                time.sleep(0.01)  # answers that are asked for at once are then generated at the same time

        def log_message(self, *args):
            pass

    ThreadingHTTPServer(("127.0.0.1", int(option("--port"))), Handler).serve_forever()
"""


def fake_server(folder: Path, fails: bool = False) -> str:
    path = folder / "llama-server"
    path.write_text(dedent(FAKE).lstrip().format(python=sys.executable, fails=fails))
    path.chmod(0o755)
    return str(path)


def test_llama_cpp_is_asked_over_http_with_the_same_weights(tmp_path, monkeypatch):
    monkeypatch.setattr(plain_vllm, "why_not", lambda: "left out")
    monkeypatch.setenv("LLAMA_SERVER", fake_server(tmp_path))
    report = peers.run(SETTINGS, BenchDevice(CPU, torch.float32), peers.Ticker())
    assert report.notes["peers"]["llama.cpp"].startswith("llama.cpp 7 (fake), 16-bit KV")
    assert report.notes["same next token as MPIC"]["llama.cpp"] == "4 of 4"
    assert {"again_llama_over_mpic", "decode1_mpic_over_llama", "decode3_mpic_over_llama"} < set(
        report.headline
    )


def test_a_llama_server_that_does_not_start_ends_the_bench_with_its_words(tmp_path, monkeypatch):
    monkeypatch.setenv("LLAMA_SERVER", fake_server(tmp_path, fails=True))
    model = random_model(TINY, BenchDevice(CPU, torch.float32))
    with pytest.raises(BenchFailed, match="llama-server did not start:\nerror: unsupported model"):
        llama_server.LlamaServer(SETTINGS, model, tmp_path, 1)
