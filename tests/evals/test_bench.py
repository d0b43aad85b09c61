"""Every bench runs to its end at a tiny size and writes the promised results; nothing here is timed."""

from __future__ import annotations

import json
import random
import shutil
from collections import Counter
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from io import StringIO
from itertools import pairwise
from unittest.mock import Mock

import pytest
import torch
from bench_kit import run_bench
from rich.console import Console
from typer.testing import CliRunner

from mpic.engine.base import ChunkUse, Delta, GenerationUsage
from mpic.engine.stream import DeltaStream
from mpic.evals.bench import (
    arrivals,
    cli,
    decode,
    disk,
    dtypes,
    flat,
    flops,
    frames,
    load,
    memory,
    overhead,
    parallel,
    peak,
    peaks,
    profile,
    rates,
    retrieval,
    sampling,
    serving,
    start,
    ttft,
)
from mpic.evals.bench.baseline import StockGenerator, floors
from mpic.evals.bench.harness import (
    BENCHES,
    BenchDevice,
    BenchFailed,
    Report,
    Series,
    Ticker,
    interleave,
    paired,
    rotated,
)
from mpic.evals.bench.merge import earlier
from mpic.evals.bench.results import as_json, print_report
from mpic.evals.bench.workload import DecoderShape, Ids, TowerShape, make_pair

TINY = DecoderShape(layers=2, hidden=64, heads=2, intermediate=64, vocabulary=300, context=2048)
TOWER = TowerShape(layers=1, hidden=32, heads=2, size=56, patch=8)
LOADS = {
    "same": memory.Load(requests=4, chunks=2, chunk_tokens=64, answer=4),
    "grown": memory.Load(requests=2, chunks=2, chunk_tokens=24, answer=4),
}
CHUNKS = {"chunks": 2, "tokens": 8, "layers": 2, "kv_heads": 1, "head_dim": 16, "hidden": 8}
INDEX = {"vectors": 300, "dimension": 16, "queries": 10, "changes": 2, "batch": 4, "references": 2}
SERVED = {"pool": 3, "linked": 2, "chunk_tokens": 24, "answer": 2, "backlog": 0.05, "seconds": 0.05}
FEW = {"policies": ("full", "cacheblend-15", "legolink-16"), "text": 8, "answer": 2}
SETTINGS = {
    "ttft": ttft.Settings(TINY, TOWER, images=2, system=8, text=24, repeats=1, vision_repeats=1),
    "flat": flat.Settings(
        TINY, TINY, documents=2, totals=(64, 128), wide_totals=(128, 256), fixed=32, text=8, repeats=1
    ),
    "overhead": overhead.Settings(TINY, counts=(1, 2), chunk_tokens=24, text=8, repeats=2),
    "rates": rates.Settings(
        TINY, ("10",), 2048, 2, document_tokens=48, **FEW, rates=(10.0,), seconds=1.0, repeats=2
    ),
    "flops": flops.Settings(decoder=TINY, counts=(1, 2), chunk_tokens=48, text=8),
    "frames": frames.Settings(TINY, TOWER, frames=8, window=3, system=8, text=4, question=8),
    "memory": memory.Settings(
        TINY, **LOADS, counts=(1, 2), rates=(1.0,), seconds=0.05, text=8, policy="mpic-4"
    ),
    "sampling": sampling.Settings(vocabulary=2000, batch=3, repeats=1),
    "serving": serving.Settings(TINY, **SERVED, text=8, shares=(0.5,)),
    "peaks": peaks.Settings(TINY, {"short": 24, "long": 48}, 3, 2, 8, 2, backlog=0.05, repeats=2),
    "load": load.Settings(**CHUNKS, repeats=1, catalogue=300, linked=4, images=4, image_tokens=8, lookups=3),
    "parallel": parallel.Settings(
        TINY, 2, 24, (0, 1, 2), TOWER, (1,), text=8, many=3, many_text=6, repeats=1
    ),
    "decode": decode.Settings(
        decoder=TINY, batches=(1, 3), chunks=2, chunk_tokens=24, text=8, tokens=6, repeats=1
    ),
    "dtype": dtypes.Settings(
        TINY,
        TOWER,
        documents=2,
        document_tokens=48,
        system=8,
        question=8,
        short=24,
        answers=(1, 3),
        tokens=120,
        repeats=1,
    ),
    "profile": profile.Settings(
        TINY, chunks=2, chunk_tokens=24, text=8, fresh=32, batches=(1, 3), steps=12, peak=32, repeats=1
    ),
    "start": start.Settings(uncounted=0, repeats=1, packages=5),
    "retrieval": retrieval.Settings(TINY, TOWER, **INDEX, context=24, policy="mpic-4", repeats=1),
}
COMPILER = any(map(shutil.which, ("cc", "gcc", "clang")))
HEADLINES = {
    "retrieval": {"ann_recall", "reprefill_over_midlink"},
    "ttft": {"prefix_over_mpic32", "mpic32_over_floor"},
    "flat": {
        *(f"{name}_growth" for name in ("full", "cacheblend15", "legolink16")),
        "legolink16_fixed_growth",
        "packet_fixed_growth",
        "wide_packet_fixed_growth",
        *(f"wide_{name}_growth" for name in ("full", "cacheblend15", "legolink16", "legolink16_fixed")),
        "tokens_in_memory_over_cacheblend15",
    },
    "overhead": {"least_share_of_deciding", "most_share_of_deciding", "cacheblend15_over_legolink16"},
    "rates": {"throughput_legolink16_over_cacheblend15", "ttft_cacheblend15_over_legolink16"},
    "flops": {"full_over_mpic32", "cacheblend15_over_legolink16"},
    "frames": {"prefix_over_mpic16", "mpic16_growth"},
    "memory": {f"copies_over_shared{at}" for at in ("", "_at_most_chunks", "_at_highest_rate")},
    "serving": {
        "legolink16_over_cacheblend15",
        "operations_cacheblend15_over_legolink16",
        "mpic32_over_prefix",
        "p99_prefix_over_mpic32",
    },
    "peaks": {
        f"{name}_{ratio}"
        for name in ("short", "long")
        for ratio in ("legolink16_over_cacheblend15", "operations_cacheblend15_over_legolink16")
    },
    "load": {"cold_over_raw", "warm_over_memcpy", "lookup_p50_ms", "lookup_p99_ms"},
    "parallel": {"worst_over_limit", "many_serial_over_parallel"},
    "sampling": {"top_p_peaked_sequential_over_batch", "top_p_flat_sequential_over_batch"},
    "profile": {
        *(f"{case}_{kind}_of_peak" for case in ("link", "fresh") for kind in ("products", "attention")),
        *(f"decode{n}_{kind}" for n in (1, 3) for kind in ("python_ms", "products_of_memory_speed")),
    },
    "dtype": {
        f"{name}_bfloat16_over_float32"
        for name in (*("shuffled", "images", "fresh", "new_images", "short", "again"), "decode1", "decode3")
    },
    "start": {"ready_processor_seconds", "self_tested_processor_seconds", "ready_over_libraries"},
    "decode": {
        f"batch{n}_{kind}"
        for n in (1, 3)
        for kind in ("over_transformers", *(["half_kv_over_float32"] if COMPILER else []))
    },
}
CPU = BenchDevice(torch.device("cpu"), torch.float32)


def writes_all_that_it_promises(name, folder, monkeypatch):
    """Runs a bench, checks what it writes, and returns its result."""
    result, output = run_bench(monkeypatch, SETTINGS, folder, name, "--quick", "--device", "cpu")
    assert set(result) == {"bench", "machine", "settings", "rows", "headline"}
    assert result["bench"] == name and "torch" in result["machine"] and result["rows"]
    assert set(result["headline"]) == HEADLINES[name]
    for value in result["headline"]:
        assert value in output
    assert [p.name for p in folder.iterdir() if p.name.startswith(".")] == []
    return result


@pytest.mark.parametrize("name", [name for name in SETTINGS if name not in ("start", "overhead")])
def test_writes_machine_settings_rows_headline_and_a_plot(name, tmp_path, monkeypatch):
    writes_all_that_it_promises(name, tmp_path, monkeypatch)


@pytest.fixture
def starts(tmp_path_factory, monkeypatch):
    """Has one server stand for all that are started, because each takes ten seconds; it reports its imports. Returns
    the options of ``mpic serve`` and of the interpreter with which each was to be started."""
    real, asked, made = start.server_process, [], []

    @contextmanager
    def shared(data_dir, *flags, python=()):
        assert data_dir.is_dir()
        asked.append((flags, python))
        if not made:  # in a folder of its own: the bench removes the others
            folder = tmp_path_factory.mktemp("server")
            made.append(running.enter_context(real(folder, *flags, python=["-X", "importtime"])))
        yield made[0]

    monkeypatch.setattr(start, "server_process", shared)
    with ExitStack() as running:
        yield asked


def test_a_server_is_started_with_self_tests_with_proofs_kept_and_to_report_its_imports(
    starts, tmp_path, monkeypatch
):
    result = writes_all_that_it_promises("start", tmp_path, monkeypatch)
    always, kept, imports = starts
    assert {flags[: flags.index("--model")] for flags, _ in starts} == {
        ("--device", "cpu", "--dtype", "float32")
    }
    assert always[0][-2:] == ("--self-test", "always") and not always[1]
    assert kept[0][-2:] == ("--self-test", "when-changed") and not kept[1]
    assert "always" not in imports[0] and imports[1] == ["-X", "importtime"]
    tables = [row["table"] for row in result["rows"]]
    assert tables.count("until it is ready") == 3 and tables.count("imports") == 5


def test_the_list_and_the_help_name_every_bench():
    listed = CliRunner().invoke(cli.app, ["list"]).output
    taught = CliRunner().invoke(cli.app, ["--help"]).output
    for name in BENCHES:
        assert name in listed and name in taught


def test_a_table_wider_than_the_terminal_shows_every_number_and_word_whole():
    shown = StringIO()
    row = {f"measured_deviation_{i}": 123_456_789 + i for i in range(12)}
    print_report(
        BENCHES["rates"], Report([{"policy": "cacheblend-15"} | row], {}), Console(file=shown, width=80)
    )
    assert "…" not in shown.getvalue()
    assert all(f"{value:,}" in shown.getvalue() for value in row.values())


def test_an_unknown_dtype_is_refused_before_anything_runs():
    done = CliRunner().invoke(cli.app, ["memory", "--dtype", "float8"])
    assert done.exit_code == 2 and "float8" in done.output


@pytest.mark.parametrize("name, measured", [("load", "float32"), ("dtype", "float32 and bfloat16")])
def test_a_bench_that_is_about_certain_dtypes_names_them(name, measured):
    done = CliRunner().invoke(cli.app, [name, "--dtype", "bfloat16"], env={"COLUMNS": "200"})
    assert done.exit_code == 2 and f"measures {measured}, not" in done.output


@pytest.mark.parametrize("name", ["memory", "flops"])
def test_repeats_are_refused_where_there_are_no_rounds(name):
    done = CliRunner().invoke(cli.app, [name, "--quick", "--repeats", "3"])
    assert done.exit_code == 2 and "--repeats" in done.output and name in done.output


@pytest.mark.parametrize("former, now", cli.FORMER.items())
def test_a_former_name_is_refused_naming_what_took_its_place(former, now):
    done = CliRunner().invoke(cli.app, [former, "--quick", "--json", "x.json"], env={"COLUMNS": "200"})
    assert done.exit_code == 2 and now in done.output


@pytest.mark.parametrize("option", [("--dtype", "bfloat16"), ("--device", "cuda")])
def test_a_bench_of_the_cpu_in_float32_refuses_to_be_recorded_as_another(option):
    done = CliRunner().invoke(cli.app, ["load", "--quick", *option])
    assert done.exit_code == 2 and option[0] in done.output and "load" in done.output


def test_a_bench_of_the_cpu_records_the_cpu_beside_an_accelerator(tmp_path, monkeypatch):
    monkeypatch.setattr(cli, "choose_device", lambda name: torch.device("meta" if name == "auto" else name))
    result, _ = run_bench(monkeypatch, SETTINGS, tmp_path, "load")
    assert "float32 on cpu" in result["machine"]


def test_quick_settings_differ_and_changes_win():
    for entry in BENCHES.values():
        assert entry.configured(quick=True) != entry.configured()
    assert BENCHES["flat"].configured(True, repeats=9).repeats == 9


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
            result = stream.result
            stream.result = lambda: result()._replace(token_ids=(next(answers),))
            return stream

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


def test_the_time_of_deciding_is_part_of_the_time_to_the_first_token_and_none_without_a_choice(
    tmp_path, monkeypatch
):
    rows = writes_all_that_it_promises("overhead", tmp_path, monkeypatch)["rows"]
    parts = ("looking at the prompt, ms", "choosing tokens, ms", "computing them, ms")
    for row in rows:
        blended = row["policy"] == "cacheblend-15"
        assert row["min_deciding"] <= row["deciding"] <= row["max_deciding"]
        assert (row["deciding"] > 0) == blended == (row[parts[0]] > 0) and row["deciding"] < 1
        assert all(row[part] >= 0 for part in parts) and row[parts[2]] > 0


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
    size = 64 << 20

    def work():
        return float(torch.ones(size // 4).sum())

    result, found = peak.peak_of(work, CPU)
    assert result == size // 4
    if found is not None:  # Linux
        assert 0.9 * size < found < 3 * size
        assert peak.peak_of(lambda: 1, CPU)[1] < size / 2


def test_the_reach_of_a_policy_lies_between_the_sizes_that_were_measured():
    needs = [(100, 10.0), (200, 30.0), (400, 70.0)]
    assert [flat.reach(needs, budget) for budget in (5.0, 20.0, 70.0, 99.0)] == [50, 150, 400, 400]


def test_stock_and_hooked_model_share_their_weights_and_the_stock_one_is_untouched():
    pair = make_pair(TINY, CPU)
    ours = dict(pair.loaded.model.named_parameters())
    theirs = dict(pair.stock.named_parameters())
    assert all(theirs[name].data_ptr() == p.data_ptr() for name, p in ours.items())
    assert pair.stock.config._attn_implementation == "sdpa"


def test_the_masked_floors_compute_what_a_plain_forward_computes(monkeypatch):
    """A floor that ignored its cache would measure something else, so all floors but the unmasked one must agree."""
    pair = make_pair(TINY, CPU, gain=4.0)
    ids = Ids(300).fresh(5)
    seen = []
    forward = type(pair.stock).forward

    def spy(self, *args, **kwargs):
        out = forward(self, *args, **kwargs)
        seen.append(out.logits[0, -1])
        return out

    monkeypatch.setattr(type(pair.stock), "forward", spy)
    ways = floors(pair.stock, pair.loaded.shape, lambda n: ids, 5, 40, lambda: None)
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
    pair = make_pair(TINY, CPU)
    lengths = []
    forward = type(pair.stock).forward

    def spy(self, *args, **kwargs):
        lengths.append((kwargs["input_ids"].shape[1], int(kwargs["past_key_values"].get_seq_length())))
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(type(pair.stock), "forward", spy)
    baseline = StockGenerator(pair.stock, pair.loaded.shape, kind, 2, 30, 4)
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


def test_load_fails_when_what_was_read_is_not_what_was_stored(monkeypatch):
    monkeypatch.setattr(load, "LoaderAlone", lambda store, threads: Mock(return_value=(1.0, 1.0)))
    with pytest.raises(BenchFailed, match="not what was stored"):
        BENCHES["load"].run(SETTINGS["load"], CPU, Ticker())


def test_parallel_fails_when_the_chunks_did_not_come_from_the_disk(monkeypatch):
    """A column that silently measured something else must not become a headline."""
    monkeypatch.setattr(parallel._Subject, "_bring", lambda self, chunks: 0.0)  # nothing is made resident
    with pytest.raises(BenchFailed, match="came from"):
        BENCHES["parallel"].run(SETTINGS["parallel"], CPU, Ticker())
