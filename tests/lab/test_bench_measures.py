"""What single benches and the parts that they share measure, and which results they refuse; nothing here is timed."""

from __future__ import annotations

import json
import mmap
import random
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from unittest.mock import Mock

import pytest
import torch
from bench_settings import CPU, SETTINGS, TINY

from mpic.engine.base import ChunkUse, Delta, GenerationUsage
from mpic.engine.stream import DeltaStream
from mpic_lab.bench import (
    arrivals,
    cli,
    decode,
    disk,
    flat,
    memory,
    parallel,
    peak,
    rates,
    serving,
    ttft,
)
from mpic_lab.bench.baseline import StockGenerator, floors
from mpic_lab.bench.checkpoint import make_model
from mpic_lab.bench.harness import (
    BENCHES,
    BenchFailed,
    Series,
    Ticker,
    interleave,
    paired,
    rotated,
)
from mpic_lab.bench.merge import earlier
from mpic_lab.bench.results import as_json
from mpic_lab.bench.workload import Ids


def test_columns_take_turns_in_starting_a_round_and_the_first_round_is_cold():
    order = []
    columns = {name: lambda name=name: order.append(name) or float(order.count(name) - 1) for name in "abc"}
    samples = interleave(columns, 2, Ticker())
    assert "".join(order) == "abcbcacab"
    assert samples["a"] == Series(0.0, [1.0, 2.0])


@pytest.mark.parametrize("columns", ["ab", "abc", "abcd", "abcde"])
def test_every_column_stands_equally_often_in_each_place_and_behind_each_other_one(columns):
    rounds = [rotated(columns, turn) for turn in range(2 * len(columns))]
    assert all(sorted(order) == list(columns) for order in rounds)
    places = Counter((place, name) for order in rounds for place, name in enumerate(order))
    behind = Counter(pair for order in rounds for pair in pairwise(order))
    assert set(places.values()) == set(behind.values()) == {2}
    assert len(behind) == len(columns) * (len(columns) - 1)


def test_ratios_are_taken_within_a_round():
    """A load that makes a whole round ten times slower does not change a ratio."""
    assert paired(Series(0, [2.0, 20.0, 2.0]), Series(0, [1.0, 10.0, 1.0])) == 2.0


def test_memory_fails_when_an_answer_depends_on_its_company(monkeypatch):
    """A wrong token must not go unnoticed in a headline."""
    answers = iter(range(100))
    compile_all = memory.compile_all

    def wrong(engine, chunks):
        compile_all(engine, chunks)
        submit = engine.submit

        def changed(request):
            stream = submit(request)
            return Mock(
                id=stream.id, __iter__=lambda _: (d._replace(token_ids=(next(answers),)) for d in stream)
            )

        engine.submit = changed

    monkeypatch.setattr(memory, "compile_all", wrong)
    with pytest.raises(BenchFailed, match="differently"):
        BENCHES["memory"].run(SETTINGS["memory"], CPU, Ticker())


def test_the_peak_of_a_backlog_counts_from_its_first_request(monkeypatch):
    sender = serving.PoolSender(
        serving.Settings(pool=4, chunk_tokens=4), Mock(), Mock(of=Mock(return_value=2e9))
    )
    served = arrivals.Served(5.0, 1.0, 5.0, GenerationUsage())
    monkeypatch.setattr(serving, "first_token", lambda *_: (1000.0, GenerationUsage()))
    monkeypatch.setattr(serving, "send", lambda engine, requests, times: [served for _ in requests])
    row = sender.backlog("reuse")
    assert row["requests_per_s"] == row["requests"] / 10 and row["gflop"] == 2


@pytest.mark.parametrize("count, ratio, found", [(10, 0.5, 5), (11, 0.5, 6), (10, 0.0, 0), (13, 1.0, 13)])
def test_as_many_requests_link_cached_chunks_as_the_share_says(count, ratio, found):
    drawn = [serving.hits(random.Random(seed), count, ratio) for seed in range(20)]
    assert {(len(one), sum(one)) for one in drawn} == {(count, found)}
    assert len(set(map(tuple, drawn))) > 1 or found in (0, count)


def test_a_row_of_partly_cached_requests_has_ten_of_them_and_says_the_share_that_came_of_it(monkeypatch):
    sender = serving.PoolSender(serving.Settings(pool=4, chunk_tokens=4, seconds=0.1), Mock(), Mock())
    served = arrivals.Served(5.0, 1.0, 5.0, GenerationUsage())
    monkeypatch.setattr(serving, "send", lambda engine, requests, times: [served for _ in requests])
    row = sender.arrivals("reuse", 1.0, ratio=0.5)
    assert row["requests"] == serving.LEAST == 10 and row["cached"] == "50%"


def test_the_pool_is_resident_before_a_row_is_measured_and_what_is_gone_meanwhile_is_told(monkeypatch):
    engine = Mock()
    sender = serving.PoolSender(
        serving.Settings(pool=4, chunk_tokens=4), engine, Mock(of=Mock(return_value=1))
    )
    keys = [str(chunk.key) for chunk in sender.pool]
    uses = tuple(
        ChunkUse(key, None, 4, 4, 0, tier)
        for key, tier in ((keys[0], "device"), (keys[1], "compiled"), ("new", "compiled"))
    )
    served = arrivals.Served(5.0, 1.0, 5.0, GenerationUsage(chunks=uses))
    monkeypatch.setattr(serving, "first_token", lambda *_: (9e4, GenerationUsage()))
    monkeypatch.setattr(serving, "send", lambda engine, requests, times: [served for _ in requests])
    for measure in (sender.backlog, lambda policy: sender.arrivals(policy, 0.001)):
        engine.compile.reset_mock()
        row = measure("reuse")
        assert [call.args[0] for call in engine.compile.call_args_list] == sender.pool
        assert row["compiled_again"] == row["requests"]


def test_several_backlogs_are_told_by_their_median_and_spread():
    rounds = [
        {"requests": 3, "alone_ttft_ms": 9.0, "requests_per_s": rate, "tokens_per_s": 10 * rate, "gflop": 2.0}
        for rate in (1.0, 4.0, 2.0)
    ]
    row = serving.of_rounds(rounds)
    assert (row["requests"], row["requests_per_s"], row["tokens_per_s"]) == (9, 2.0, 20.0)
    assert (row["min_requests_per_s"], row["max_requests_per_s"], row["gflop"]) == (1.0, 4.0, 2.0)


def test_requests_that_are_not_answered_in_time_are_ended_and_do_not_count():
    aborted = []

    class Engine:
        def submit(self, number):
            stream = DeltaStream(str(number))
            stream.on_abort = lambda: (aborted.append(number), stream.put(Delta("", finish_reason="abort")))
            if number < 3:
                stream.put(Delta("x", (1,), finish_reason="length", usage=GenerationUsage(prompt_tokens=10)))
            return stream

    served = arrivals.send(Engine(), range(5), [0.0, 0.01, 0.02, 0.03, 0.04], until=0.06)
    assert len(served) == 3 and {3, 4} <= set(aborted)
    figures = rates._figures(served, 5, 2.0)
    assert (figures["requests_per_s"], figures["tokens_per_s"], figures["unanswered"]) == (1.5, 15, 2)
    nothing = rates._figures([], 5, 2.0)
    assert rates._means([nothing, nothing]) | {"ttft_ms": "", "unanswered": 10} == rates._means(
        [nothing, nothing]
    )
    assert rates._means([figures, {**figures, "tokens_per_s": 25}])["tokens_per_s_deviation"] == 5


def test_the_memory_at_the_peak_of_some_work_is_seen_though_it_is_freed():
    """The work maps pages of its own: an allocator may serve a tensor from memory that it freed and kept."""
    size = 64 << 20

    def work():
        with mmap.mmap(-1, size) as fresh:
            for page in range(0, size, mmap.PAGESIZE):
                fresh[page] = 1
            return len(fresh)

    result, found = peak.peak_of(work, CPU)
    assert result == size
    if found is not None:  # Linux
        assert 0.5 * size < found < 4 * size
        assert peak.peak_of(lambda: 1, CPU)[1] < size / 2


def test_the_reach_of_a_policy_lies_between_the_sizes_that_were_measured():
    needs = [(100, 10.0), (200, 30.0), (400, 70.0)]
    assert [flat.reach(needs, budget) for budget in (5.0, 20.0, 70.0, 99.0)] == [50, 150, 400, 400]


def test_the_masked_floors_compute_what_a_plain_forward_computes(monkeypatch):
    """A floor that ignored its cache would measure something else, so all floors but the unmasked one must agree."""
    model = make_model(TINY, CPU, gain=4.0)
    ids = Ids(300).fresh(5)
    seen = []
    forward = type(model.stock).forward

    def spy(self, *args, **kwargs):
        out = forward(self, *args, **kwargs)
        seen.append(out.logits[0, -1])
        return out

    monkeypatch.setattr(type(model.stock), "forward", spy)
    ways = floors(model.stock, TINY, lambda n: ids, 5, 40, lambda: None)
    for way in ways.values():
        assert way() > 0 and way() > 0
    unmasked, unmasked_again, ready, _, static, static_again = seen
    assert torch.allclose(ready, static, atol=1e-4) and torch.allclose(static, static_again, atol=1e-5)
    assert torch.allclose(unmasked, unmasked_again, atol=1e-5)


def test_no_two_prompts_begin_with_the_same_token_until_all_have_been_used():
    ids = Ids(40)
    for _ in range(3):
        prompts = [ids.framed([], 4) for _ in range(15)] + [ids.spaced([], 3, 2) for _ in range(15)]
        assert len({prompt.segments[0].token_ids[0] for prompt in prompts}) == 30


def test_shares_measured_one_by_one_make_one_result_whose_headline_is_that_of_all_of_them(
    tmp_path, monkeypatch
):
    path, entry = tmp_path / "rates.json", BENCHES["rates"]
    settings = replace(SETTINGS["rates"], seconds=0.2, repeats=1)
    alone = {}
    monkeypatch.setattr(rates, "_headline", lambda rows: {"rows": len(rows)})
    for share in ("10", "30"):
        one = replace(settings, only=(share,))
        report = entry.run(one, CPU, Ticker())
        result = as_json(entry, one, CPU, report)
        alone[share] = result["rows"]
        old = earlier(path, entry, one, CPU) if path.exists() else None
        cli._keep(path, replace(entry, headline=rates._headline), result, report, old)
    kept = json.loads(path.read_text())
    assert kept["rows"] == [*alone["10"], *alone["30"]] and kept["settings"]["only"] == ["10", "30"]
    assert kept["headline"] == {"rows": 6} and list(kept["settings"]["remade"]) == [
        "share of the pool that documents fill: 30 %"
    ]


def test_totals_that_make_no_document_are_refused_before_anything_is_computed():
    with pytest.raises(BenchFailed, match="31 tokens make no document of 32"):
        BENCHES["flat"].run(replace(SETTINGS["flat"], totals=(31, 64)), CPU, Ticker())


def test_growth_is_told_at_sixteen_times_the_fewest_tokens_whatever_was_measured_beyond():
    times = {1024: 10.0, 4096: 20.0, 16384: 30.0, 50176: 90.0}
    samples = {f"k {n} p": Series(0.0, [ms]) for n, ms in times.items()}
    assert flat._growth(samples, "k", "p", times) == 3
    assert flat._growth(samples, "k", "p", {1024: 0, 4096: 0}) == 2


@pytest.mark.parametrize("kind", decode.CACHES)
def test_the_baseline_generates_every_token_over_its_filled_cache(kind, monkeypatch):
    model = make_model(TINY, CPU)
    lengths = []
    forward = type(model.stock).forward

    def spy(self, *args, **kwargs):
        lengths.append((kwargs["input_ids"].shape[1], int(kwargs["past_key_values"].get_seq_length())))
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(type(model.stock), "forward", spy)
    baseline = StockGenerator(model.stock, TINY, kind, 2, 30, 4)
    for _ in range(2):
        lengths.clear()
        assert baseline() > 0
        assert lengths == [(1, 30), (1, 31), (1, 32), (1, 33)]


def test_a_disk_bench_refuses_a_folder_in_memory(monkeypatch):
    """A cold read from memory would give a meaningless, fast time."""
    monkeypatch.setattr(disk, "file_system", lambda folder: "tmpfs")
    with pytest.raises(BenchFailed, match="TMPDIR"), disk.fresh_library():
        pass


def test_ttft_fails_when_a_policy_recomputes_another_number_of_tokens_than_its_column_promises(monkeypatch):
    ask = ttft.request_of

    def another(prompt, policy, tokens):
        return ask(prompt, {"mpic-32": "mpic-16"}.get(policy, policy), tokens)

    monkeypatch.setattr(ttft, "request_of", another)
    with pytest.raises(BenchFailed, match="mpic-16: reused 66 of 34 expected"):
        BENCHES["ttft"].run(SETTINGS["ttft"], CPU, Ticker())


def test_parallel_fails_when_the_chunks_did_not_come_from_the_disk(monkeypatch):
    """A column that silently measured something else must not become a headline."""
    monkeypatch.setattr(parallel._Subject, "_bring", lambda self, chunks: 0.0)  # nothing is made resident
    with pytest.raises(BenchFailed, match="came from"):
        BENCHES["parallel"].run(SETTINGS["parallel"], CPU, Ticker())
