"""``mpic bench peers``: the model files it writes, the prompts it asks, and its way with a server of llama.cpp."""

from __future__ import annotations

import importlib.util
import json
import sys
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from textwrap import dedent

import pytest
import torch
from bench_kit import run_bench
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from mpic_lab.bench import cli
from mpic_lab.bench.harness import BENCHES, Bench, BenchDevice, BenchFailed, Series, Ticker
from mpic_lab.bench.peers import (
    cases,
    groups,
    llama_server,
    lmcache_server,
    openvino_genai,
    peers,
    plain_vllm,
)
from mpic_lab.bench.peers.gguf_file import write_gguf
from mpic_lab.bench.peers.groups import PeerGroup
from mpic_lab.bench.peers.prompts import First, Questions, Settings, flat
from mpic_lab.bench.peers.weights import write_weights
from mpic_lab.bench.workload import DecoderShape, TowerShape, random_model

TINY = DecoderShape(layers=2, hidden=128, heads=4, kv_heads=2, intermediate=96, vocabulary=300, context=1024)
TOWER = TowerShape(layers=1, hidden=32, heads=2, size=56, patch=8)
SETTINGS = Settings(
    TINY,
    TOWER,
    documents=3,
    document_tokens=48,
    system=8,
    question=8,
    short=24,
    answers=(1, 3),
    tokens=256,  # they are generated at the same time, although requests are sent one after the other
    probes=4,
    probe_tokens=16,
    repeats=1,
)
CPU = torch.device("cpu")
IDS = torch.arange(11, 43)[None]


def left_out(weights=None):
    return "left out"


@pytest.fixture
def alone(monkeypatch):
    """No peer but transformers is found."""
    for peer in (plain_vllm, lmcache_server, openvino_genai):
        monkeypatch.setattr(peer, "why_not", left_out)
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
    assert set(result["headline"]) == {
        "shuffled_best_peer_over_mpic32",
        "fresh_transformers_over_mpic",
        "shuffled_images_best_peer_over_mpic32",
        *(f"decode{count}_mpic_over_best_peer" for count in SETTINGS.answers),
    }
    missing = result["settings"]["not measured"]
    assert missing["vLLM"] == missing["LMCache"] == missing["OpenVINO GenAI, images"] == "left out"
    assert "LLAMA_SERVER" in missing["llama.cpp"]
    columns = {
        row["table"]: {r["column"] for r in result["rows"] if r["table"] == row["table"]}
        for row in result["rows"]
    }
    assert columns[cases.SHUFFLED] == columns[cases.IMAGES] == {*cases.LINKS, cases.PREFIX, cases.STOCK}
    assert columns[cases.NEW_IMAGES] == {cases.PREFIX, cases.STOCK}
    assert columns[cases.AGAIN] == {cases.PREFIX}, "transformers keeps nothing between prompts"
    assert columns[cases.answers_case(3)] == {"MPIC mpic-32", "transformers"}
    assert columns[peers.RATIOS] == set(result["headline"])
    agreement = result["settings"]["same next token as transformers"]
    assert agreement["MPIC prefix"] == agreement["MPIC prefix, images"] == "4 of 4"


def test_peers_that_start_one_at_a_time_are_ended_before_the_next(alone, monkeypatch):
    started, ended = [], []
    start = peers.groups()[0].start

    @contextmanager
    def counted(weights, questions):
        assert len(started) == len(ended), "the last one is still there"
        with start(weights, questions) as found:
            started.append(len(found))
            yield found
        ended.append(len(found))

    monkeypatch.setattr(peers, "groups", lambda: [PeerGroup("here", counted)])
    settings = replace(SETTINGS, together=False, repeats=2, only=("shuffled",))
    report = peers.run(settings, BenchDevice(CPU, torch.float32), Ticker())
    assert started == [4, 4] and ended == [4, 4]
    assert "one peer at a time" in report.notes["turns"]
    assert {row["table"] for row in report.rows} == {cases.SHUFFLED, peers.RATIOS}


def test_a_peer_that_computes_another_model_ends_the_bench(alone, monkeypatch):
    monkeypatch.setattr(groups.Stock, "next_token", lambda self, prompt: 7)
    with pytest.raises(BenchFailed, match="transformers generates another token than transformers"):
        peers.run(SETTINGS, BenchDevice(CPU, torch.float32), Ticker())


class Cached:
    """A peer whose cache finds so many tokens of every prompt but the first."""

    name = "cached"

    def __init__(self, found: int | None) -> None:
        self._found = found

    def reset(self) -> None:
        pass

    def first(self, prompt) -> First:
        return First(1.0, self._found)


@pytest.mark.parametrize(
    "only, found, words",
    [
        ("shuffled", SETTINGS.system + 40, "held the first 48 tokens of the prompt, not 10 or less"),
        ("fresh", 40, "held the first 40 tokens of the prompt, not 2 or less"),
        ("short", 20, "held the first 20 tokens"),
        ("images", SETTINGS.system + 40, "held the first 48 tokens"),
        ("new-images", SETTINGS.system + 40, "held the first 48 tokens"),
    ],
)
def test_a_cache_that_finds_more_than_the_case_says_ends_the_bench(only, found, words):
    settings = replace(SETTINGS, only=(only,))
    questions = Questions(settings, "images" in only)
    with pytest.raises(BenchFailed, match=words):
        cases.turn_of(settings, Cached(found), questions, 0)
    assert cases.turn_of(settings, Cached(0), questions, 1) == cases.turn_of(
        settings, Cached(None), questions, 2
    )


def test_a_cache_that_has_not_kept_the_prompt_ends_the_bench():
    settings = replace(SETTINGS, only=("again",))
    with pytest.raises(BenchFailed, match=f"not {SETTINGS.length - 64} or more"):
        cases.turn_of(settings, Cached(0), Questions(settings), 0)


def test_every_headline_has_a_goal():
    columns = (cases.PREFIX, *cases.LINKS, cases.STOCK, peers.VLLM, peers.LLAMA, peers.GENAI)
    every = (*cases.FIRST, *map(cases.answers_case, Settings().answers))
    samples = {(case, column): Series(1.0, [2.0]) for case in every for column in columns}
    assert set(peers.ratios(Settings(), samples)) == set(BENCHES["peers"].wants)


def test_a_case_that_is_measured_again_takes_its_place_in_the_file(alone, tmp_path, monkeypatch):
    def settings(self, quick, **changes):
        return replace(SETTINGS, **changes)

    monkeypatch.setattr(Bench, "configured", settings)
    path = tmp_path / "peers.json"

    def bench(*options):
        return CliRunner().invoke(cli.app, ["peers", "--device", "cpu", "--json", str(path), *options])

    assert bench("--only", "shuffled,short").exit_code == 0
    first = json.loads(path.read_text())
    assert bench("--only", "short", "--repeats", "2").exit_code == 0
    second = json.loads(path.read_text())

    def rows(result, table):
        return [row for row in result["rows"] if row["table"] == table]

    assert rows(first, cases.SHUFFLED) == rows(second, cases.SHUFFLED)
    assert rows(first, cases.SHORT) != rows(second, cases.SHORT)
    assert len(rows(first, cases.SHORT)) == len(rows(second, cases.SHORT))
    assert first["headline"] == second["headline"] and rows(first, peers.RATIOS) == rows(second, peers.RATIOS)
    assert list(second["settings"]["remade"]) == [cases.SHORT]
    assert second["settings"]["remade"][cases.SHORT]["repeats"] == 2 and second["settings"]["repeats"] == 1
    refused = bench("--only", "short", "--dtype", "bfloat16")
    assert refused.exit_code != 0 and "device or dtype" in str(refused.exception)


@pytest.mark.parametrize(
    "options, words",
    [
        (["peers", "--only", "shuffled,nothing"], "not 'nothing'"),
        (["peers", "--size", "7b"], "110m, 2b, not '7b'"),
        (["ttft", "--size", "2b"], "one size alone"),
        (["ttft", "--only", "shuffled"], "no cases to choose from"),
    ],
)
def test_sizes_and_cases_that_there_are_not_are_refused(options, words):
    refused = CliRunner().invoke(cli.app, options, env={"COLUMNS": "300", "TERM": "dumb"})
    assert refused.exit_code == 2 and words in refused.output


def test_the_large_size_is_that_of_the_decoder_of_qwen2_vl_2b():
    large = BENCHES["peers"].configured(size="2b")
    decoder = large.decoder
    assert (decoder.layers, decoder.hidden, decoder.intermediate, decoder.kv_heads) == (28, 1536, 8960, 2)
    assert decoder.hidden // decoder.heads == 128 and not large.together
    quick = BENCHES["peers"].configured(True, size="2b")
    assert quick.decoder == BENCHES["peers"].configured(True).decoder and not quick.together


FAKE = """
    #!{python}
    import itertools, json, sys, time
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

    slots, saved = {{}}, {{}}
    event = lambda left, found: {{"content": "w", "stop": left == 0, "timings": {{"cache_n": found}}}}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200 if self.path == "/health" else 404)
            self.end_headers()

        def do_POST(self):
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if self.path.startswith("/slots/"):
                return self.slot(int(self.path.split("/")[2].split("?")[0]), self.path.split("action=")[1], asked)
            assert 0 <= asked["id_slot"] < int(option("--parallel")), asked["id_slot"]
            assert len(asked["prompt"]) + asked["n_predict"] <= int(option("--ctx-size")) // int(option("--parallel"))
            slot = slots.setdefault(asked["id_slot"], [])
            found = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(slot, asked["prompt"])))
            slots[asked["id_slot"]] = asked["prompt"]
            with torch.inference_mode():
                token = int(model(input_ids=torch.tensor([asked["prompt"]])).logits[0, -1].argmax())
            self.send_response(200)
            self.end_headers()
            if not asked["stream"]:
                self.wfile.write(json.dumps({{"tokens": [token]}}).encode())
                return
            for left in range(asked["n_predict"], -1, -1):
                self.wfile.write(b"data: " + json.dumps(event(left, found)).encode() + b"\\n\\n")
                self.wfile.flush()
                time.sleep(0.004)  # answers that are asked for at once are then generated at the same time

        def slot(self, number, action, asked):
            if action == "save":
                saved[asked["filename"]] = slots[number]
            else:
                slots[number] = saved[asked["filename"]] if action == "restore" else []
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args):
            pass

    ThreadingHTTPServer(("127.0.0.1", int(option("--port"))), Handler).serve_forever()
"""


PROGRAM = llama_server.program


def fake_server(folder: Path, fails: bool = False) -> str:
    path = folder / "llama-server"
    path.write_text(dedent(FAKE).lstrip().format(python=sys.executable, fails=fails))
    path.chmod(0o755)
    return str(path)


def test_llama_cpp_is_asked_over_http_with_the_same_weights(alone, tmp_path, monkeypatch):
    monkeypatch.setattr(llama_server, "program", PROGRAM)
    monkeypatch.setenv("LLAMA_SERVER", f"{fake_server(tmp_path)} -fa off")
    report = peers.run(replace(SETTINGS, only=cases.TEXT_CASES), BenchDevice(CPU, torch.float32), Ticker())
    detail = report.notes["peers"]["llama.cpp"]
    assert detail.startswith("llama.cpp 7 (fake), float32 weights, float16 KV")
    assert detail.endswith("-fa off; over HTTP")
    assert report.notes["same next token as transformers"]["llama.cpp"] == "4 of 4"
    assert {"again_llama_over_mpic", "decode1_mpic_over_llama", "decode3_mpic_over_llama"} < set(
        report.headline
    )


def test_a_llama_server_that_does_not_start_ends_the_bench_with_its_words(tmp_path, monkeypatch):
    monkeypatch.setenv("LLAMA_SERVER", fake_server(tmp_path, fails=True))
    weights = write_weights(SETTINGS, BenchDevice(CPU, torch.float32), tmp_path, images=False, gguf=True)
    with pytest.raises(BenchFailed, match="llama-server did not start:\nerror: unsupported model"):
        llama_server.LlamaServer(weights)


def test_peers_that_cannot_be_asked_about_images_say_why(tmp_path, monkeypatch):
    monkeypatch.setenv("LLAMA_SERVER", fake_server(tmp_path))
    monkeypatch.setenv("OPTIMUM_CLI", fake_server(tmp_path))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    placement = BenchDevice(CPU, torch.float32)
    text, images = (
        write_weights(SETTINGS, placement, tmp_path, images, gguf=False) for images in (False, True)
    )
    assert llama_server.why_not(text) is None and openvino_genai.why_not(text) is None
    assert "mmproj" in llama_server.why_not(images) and "models of text" in openvino_genai.why_not(images)
    assert plain_vllm.why_not(images) is None and lmcache_server.why_not(images) is None


def test_a_converter_that_fails_ends_the_bench_with_its_words(tmp_path, monkeypatch):
    weights = write_weights(SETTINGS, BenchDevice(CPU, torch.float32), tmp_path, images=False, gguf=False)
    program = tmp_path / "optimum-cli"
    program.write_text("#!/bin/sh\necho no such architecture >&2\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setenv("OPTIMUM_CLI", str(program))
    with pytest.raises(BenchFailed, match="optimum-cli did not convert the weights:\nno such architecture"):
        openvino_genai.convert(weights)
