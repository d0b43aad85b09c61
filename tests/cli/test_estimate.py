"""``mpic estimate``: counts of a log that was made so that they are known, and lines that cannot be used."""

import io
import json
import tracemalloc

import pytest
from server_helpers import chat_template, data_url, png
from typer.testing import CliRunner

from mpic import cli
from mpic.cli import estimate as module
from mpic.link import parse_policy

NEWS = "The news of today, at some length, for a test of reuse. " * 4
OLD = "What was in the papers of another year, again at length. " * 4
CONFIG = "[engine]\nlink_texts = 128\n"
EDGES = 8
"""Tokens at the ends of a long text that are not part of its chunk."""


@pytest.fixture
def estimate(tmp_path, tiny_model):
    (tmp_path / "mpic.toml").write_text(CONFIG)

    def run(lines, *args, status=0):
        log = tmp_path / "log.jsonl"
        log.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
        words = ["estimate", log, "--model", tiny_model, "--config", tmp_path / "mpic.toml", "--json", *args]
        done = CliRunner().invoke(cli.app, list(map(str, words)))
        assert done.exit_code == status, done.output
        return json.loads(done.stdout)

    return run


def ask(*texts):
    return {
        "model": "x",
        "messages": [{"role": "user", "content": [{"type": "text", "text": t} for t in texts]}],
    }


def computed(found):
    return {one["policy"]: one["computed"] for one in found["policies"]}


def test_texts_in_another_order_are_found_by_position_independent_caching_alone(estimate):
    """One token is one byte. Both requests have 41 tokens beside their two chunks."""
    found = estimate([ask(NEWS, OLD, "Why?"), ask(OLD, NEWS, "Why?")])
    chunks = len(NEWS.strip()) + len(OLD.strip()) - 2 * EDGES
    assert (found["requests"], found["left_out"], found["chunk_tokens"]) == (2, 0, 2 * chunks)
    assert found["prompt_tokens"] == 2 * (chunks + 41)
    assert (found["prefix_caching"]["reused"], found["position_independent"]["reused"]) == (0, chunks)
    assert computed(found) == {
        "full": 2 * (chunks + 41),
        "prefix": 2 * (chunks + 41),
        "reuse": 2 * 41 + chunks,
        "mpic-16": 2 * (41 + 32) + chunks,
        "mpic-32": 2 * (41 + 64) + chunks,
        "legolink-16": 2 * (41 + 32) + chunks,
        "cacheblend-15": 2 * (41 + 65) + chunks,
    }


def test_the_same_start_is_found_by_both(estimate):
    found = estimate([ask(NEWS, "Why?")] * 2, "--policy", "prefix", "--policy", "mpic-16")
    whole = found["prompt_tokens"] // 2
    hit = (whole - 1) // 16 * 16
    assert found["prefix_caching"]["reused"] == found["position_independent"]["reused"] == hit
    first = whole + 16  # the chunk is compiled, and its first 16 tokens are computed again
    assert computed(found) == {"prefix": 2 * whole - hit, "mpic-16": first + whole - hit}


def test_images_are_told_apart_by_their_bytes_or_addresses(estimate):
    part = lambda url: {"type": "image_url", "image_url": {"url": url}}
    body = lambda *urls: {
        "messages": [{"role": "user", "content": [*map(part, urls), {"type": "text", "text": "?"}]}]
    }
    red, blue, web = data_url(png("red")), data_url(png("blue")), "https://example.org/a.png"
    found = estimate([body(red, web), body(blue, red), body(web)], "--image-tokens", "100")
    assert (found["chunk_tokens"], found["left_out"]) == (500, 0)
    assert found["position_independent"]["reused"] == 200 > found["prefix_caching"]["reused"]


def test_what_was_used_long_ago_is_not_found(estimate):
    log = [ask(NEWS, "Why?"), ask(OLD, "Why?"), ask("Well, " + NEWS, "Why?")]
    few = estimate(log, "--kept", str(len(OLD)))
    assert few["position_independent"]["reused"] == 0
    again = [ask(NEWS, "Why?"), ask(OLD, "Why?"), ask("Well?", NEWS, "Why?")]
    assert estimate(again, "--kept", str(len(OLD)))["position_independent"]["reused"] == 0
    assert estimate(again)["position_independent"]["reused"] == len(NEWS.strip()) - EDGES


def test_a_log_may_come_from_standard_input(tiny_model):
    words = ["estimate", "-", "--model", str(tiny_model), "--json"]
    done = CliRunner().invoke(cli.app, words, input=json.dumps(ask("Hello")))
    assert done.exit_code == 0 and json.loads(done.stdout)["requests"] == 1


def test_requests_are_taken_out_of_what_logs_put_around_them(estimate):
    body = ask("Hello")
    batch = {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": body}
    assert estimate([body, "", batch, {"request": body}, {"request": {"body": body}}])["requests"] == 4


@pytest.mark.parametrize(
    "line, code, words",
    [
        ("{", "bad_request", "JSON"),
        ("[" * 10_000, "bad_request", "JSON"),
        ("7", "bad_request", "object"),
        ({"prompt": "x"}, "bad_request", "messages"),
        ({"messages": [{"role": "x", "content": "y"}]}, "bad_request", "messages[0].role"),
        ({"messages": [7]}, "bad_request", "messages[0]"),
        ({"messages": [{"role": "user", "content": "y"}], "tools": 7}, "bad_request", "tools"),
        ({"url": "/v1/embeddings", "body": {"input": "x"}}, "bad_request", "chat completion"),
        (
            {"messages": [{"role": "user", "content": [{"type": "file", "file": {"file_id": "file-x"}}]}]},
            "file_not_found",
            "not in the log",
        ),
    ],
)
def test_a_line_that_cannot_be_used_is_named_by_its_number(estimate, line, code, words):
    found = estimate([ask("Hello"), "", line, ask("Hello")], status=1)
    assert (found["requests"], found["left_out"]) == (2, 1)
    [note] = found["notes"]
    assert (note["line"], note["code"]) == (3, code) and words in note["message"]


def test_a_line_that_is_too_long_is_never_in_memory(monkeypatch):
    monkeypatch.setattr(module, "LONGEST_LINE", 1000)
    stream = io.BytesIO(b"a\n" + b"x" * 3_000_000 + b"\nb\n" + b"y" * 2000)
    tracemalloc.start()
    assert list(module.lines(stream)) == [(1, b"a\n"), (2, None), (3, b"b\n"), (4, None)]
    assert tracemalloc.get_traced_memory()[1] < 100_000
    tracemalloc.stop()


def test_memory_is_bounded_by_what_is_kept():
    template = chat_template()
    run = module.Estimate([parse_policy("mpic-16")], 1600, 576)
    for number in range(300):
        text = f"{number} " * 100
        run.add(module._prompt(json.dumps(ask(text)).encode(), template, 128, 576))
        run.leave_out(module.Note(number, "x", "y"))
    assert len(run._blocks._keys) <= 100 and sum(run._chunks._keys.values()) <= 1600
    assert len(run.notes) == module.SHOWN and run.left_out == 300
