"""The benches that run vLLM, at a tiny size; nothing here is timed. Where vLLM is not installed they say so."""

from __future__ import annotations

import json
from contextlib import nullcontext

import pytest
import torch
import vllm_kit
from bench_kit import run_bench
from transformers import AutoModelForImageTextToText, AutoProcessor
from typer.testing import CliRunner

from mpic_lab.bench import checkpoint, cli, frames_vllm, serving_http, ttft_vllm, vllm_pair
from mpic_lab.bench.harness import BENCHES, BenchDevice, BenchFailed, Ticker
from mpic_lab.bench.workload import DecoderShape, TowerShape, random_image, random_model

CPU = BenchDevice(torch.device("cpu"), torch.float32)
TINY = DecoderShape(layers=2, hidden=128, heads=4, intermediate=64, vocabulary=300, context=2048)
TOWER = TowerShape(layers=1, hidden=32, heads=2, size=56, patch=8)
PROMPT = {"images": 3, "system": 8, "text": 24, "answers": 2, "tokens": 128, "arrivals": 2, "gap": 0.02}
PROMPT |= {"questions": 4}
ONCE = {"repeats": 1, "vision_repeats": 1, "decode_repeats": 1}
LOAD = {"pool": 3, "linked": 2, "text": 16, "answer": 2, "backlog": 0.1, "repeats": 1, "seconds": 0.2}
SETTINGS = {
    "ttft": ttft_vllm.Settings(TINY, TOWER, **PROMPT, **ONCE, block=32),
    "frames": frames_vllm.Settings(TINY, TOWER, frames=8, window=3, system=8, text=4, question=8),
    "serving": serving_http.Settings(TINY, TOWER, **LOAD),
}
HEADLINES = {
    "frames": {"prefix_over_mpic16", "mpic16_growth"},
    "ttft": {"prefix_over_mpic32", "mpic32_over_floor", "decode_idle_over_vllm"},
    "serving": {"mpic32_over_prefix", "p99_prefix_over_mpic32"},
}
HEADLINES["ttft"] |= {"decode_while_linking_over_vllm", "questions_one_by_one_over_at_once"}
needs_vllm = pytest.mark.skipif(not vllm_kit.available(), reason="vLLM is not installed (make setup-vllm)")


@needs_vllm
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "name, engine",
    [
        ("ttft", "vllm"),
        ("serving", "native-http"),
        pytest.param("frames", "vllm", marks=pytest.mark.parity),
        pytest.param("serving", "vllm", marks=pytest.mark.parity),
    ],
)
def test_writes_machine_settings_rows_headline_and_a_plot(name, engine, tmp_path, monkeypatch):
    result, _ = run_bench(monkeypatch, SETTINGS, tmp_path, name, "--engine", engine, "--device", "cpu")
    assert result["settings"]["engine"] == engine.removesuffix("-http") and result["rows"]
    assert set(result["headline"]) == HEADLINES[name]
    if name == "ttft":
        reused = {row["column"]: row["reused"] for row in result["rows"] if "column" in row}
        linked = dict.fromkeys((ttft_vllm.HOST, ttft_vllm.PAGES, ttft_vllm.DISK), 51)
        assert reused == {ttft_vllm.ALONE: 0, ttft_vllm.FLOOR: 64, **linked}
        sent = [(row["sent"], row["questions"]) for row in result["rows"] if row["table"] == "questions"]
        assert sent == [(ttft_vllm.ONE_BY_ONE, 4), (ttft_vllm.AT_ONCE, 4)]


@pytest.mark.parametrize("name", HEADLINES)
def test_the_list_and_the_help_name_both_engines(name):
    listed = CliRunner().invoke(cli.app, ["list"], env={"COLUMNS": "200"}).output
    taught = CliRunner().invoke(cli.app, [name, "--help"], env={"COLUMNS": "200"}).output
    assert f"{name} --engine vllm" in listed and "With --engine vllm" in taught
    assert set(BENCHES[name].on("vllm").wants) == HEADLINES[name]


def test_two_engines_on_one_gpu_ask_for_little_of_it_to_be_free():
    """By default vLLM wants nine tenths, of which the first engine has taken a part when the second one starts."""
    on_gpu = BenchDevice(torch.device("cuda"), torch.bfloat16)
    for placement, share in ((on_gpu, vllm_pair.LEAST_FREE), (CPU, None)):
        config = vllm_pair.engine_config(TINY, placement, "model", 100, 32)
        assert json.loads(config.vllm_args).get("gpu_memory_utilization") == share
        assert config.pool_bytes == (TINY.context + 32) * TINY.token_bytes(placement.dtype)


def test_an_engine_that_a_bench_does_not_measure_is_refused_by_name():
    done = CliRunner().invoke(cli.app, ["flat", "--engine", "vllm"])
    assert done.exit_code == 2 and "native" in done.output


@pytest.mark.parametrize("name, engine", [("ttft", "vllm"), ("serving", "native-http"), ("serving", "vllm")])
def test_threads_are_refused_where_another_process_would_ignore_them(name, engine):
    done = CliRunner().invoke(cli.app, [name, "--engine", engine, "--threads", "1"])
    assert done.exit_code == 2 and "VLLM_CPU_OMP_THREADS_BIND" in done.output


def test_a_saved_bench_model_loads_as_it_was_and_counts_one_token_a_word(tmp_path):
    model = random_model(TINY, CPU, TOWER)
    checkpoint.save(model, TINY, tmp_path)
    loaded = AutoModelForImageTextToText.from_pretrained(tmp_path, dtype=torch.float32)
    ours, theirs = model.state_dict(), loaded.state_dict()
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    processor = AutoProcessor.from_pretrained(tmp_path)
    ids = (17, 299, 10)
    assert processor.tokenizer(checkpoint.words(ids), add_special_tokens=False)["input_ids"] == list(ids)
    made = processor(images=random_image(0, TOWER.size), text="<image> w20", return_tensors="pt")
    assert (made["input_ids"] == model.config.image_token_id).sum() == TOWER.tokens


def test_tokens_a_second_are_counted_over_the_time_that_all_answers_share():
    """Times at which only one of the answers is generated do not count."""
    first, second = [0.0, 1.0, 2.0, 3.0], [2.0, 3.0, 4.0, 9.0]
    assert ttft_vllm.rate([first, second]) == 2.0
    with pytest.raises(BenchFailed, match="same time"):
        ttft_vllm.rate([[0.0, 1.0], [1.0, 2.0]])


def test_serving_prompts_name_linked_images_and_have_the_text_they_promise(tmp_path):
    settings = SETTINGS["serving"]
    load = serving_http._PoolLoad(settings, "http://nowhere", tmp_path, tmp_path)
    prompts = [load.prompt().split() for _ in range(20)]
    for prompt in prompts:
        handles = [word for word in prompt if word.startswith("IMAGE#")]
        assert len(set(handles)) == len(handles) == settings.linked
        assert len(prompt) - len(handles) == settings.text
        assert not prompt[0].startswith("IMAGE#") and not prompt[-1].startswith("IMAGE#")
    assert len({tuple(prompt[:4]) for prompt in prompts}) == len(prompts)
    assert len({tuple(w for w in p if w.startswith("IMAGE#")) for p in prompts}) > 1


def test_policies_take_turns_with_their_backlogs_over_http(tmp_path, monkeypatch):
    order = []

    class Load:
        def __init__(self, *_):
            pass

        def backlog(self, client, policy):
            order.append(policy)
            rate = float(len(order))
            row = {"table": serving_http.BACKLOG, "policy": policy, "requests": 3, "alone_ms": 1.0}
            return row | {"requests_per_s": rate, "tokens_per_s": 9}

        def arrivals(self, policy, rate):
            return {"policy": policy, "ttft_p99_ms": 1.0}

    monkeypatch.setattr(serving_http, "_PoolLoad", Load)
    monkeypatch.setattr(serving_http, "prepare_environment", lambda: None)
    monkeypatch.setattr(serving_http, "running_server", lambda *_: nullcontext(("http://nowhere", 1.0)))
    monkeypatch.setattr(serving_http, "MPIC", lambda url: nullcontext())
    monkeypatch.setattr(serving_http, "_upload", lambda *_: None)
    report = serving_http._run("native", serving_http.Settings(TINY, TOWER, repeats=2), CPU, Ticker())
    assert order == ["prefix", "mpic-32", "mpic-32", "prefix"]
    assert [row["requests_per_s"] for row in report.rows[:2]] == [2.5, 2.5]
    assert report.headline["mpic32_over_prefix"] == (2 / 1 + 3 / 4) / 2


def test_a_request_that_the_generator_could_not_finish_fails_the_bench(tmp_path, monkeypatch):
    load = serving_http._PoolLoad(SETTINGS["serving"], "http://127.0.0.1:9", tmp_path, tmp_path)
    failed = {"failed": 1, "completed": 1, "errors": ["", "Bad Request"]}
    monkeypatch.setattr(serving_http, "generate", lambda *_: failed)
    with pytest.raises(BenchFailed, match="1 of 2 requests failed: Bad Request"):
        load._send("prefix", 2, "inf", 1.0)
