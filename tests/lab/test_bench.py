"""Every bench runs to its end at a tiny size and writes the promised results; nothing here is timed."""

from __future__ import annotations

import shutil
from contextlib import ExitStack, contextmanager
from io import StringIO

import pytest
import torch
from bench_kit import run_bench
from bench_settings import SETTINGS
from rich.console import Console
from typer.testing import CliRunner

from mpic_lab.bench import (
    cli,
    decode,
    start,
)
from mpic_lab.bench.harness import (
    BENCHES,
    Report,
)
from mpic_lab.bench.results import print_report

COMPILER = any(map(shutil.which, ("cc", "gcc", "clang")))
HEADLINES = {
    "retrieval": {"reprefill_over_midlink"},
    "ttft": {"prefix_over_mpic32", "mpic32_over_floor"},
    "flat": {
        *(f"{name}_growth" for name in ("full", "cacheblend15", "legolink16")),
        "legolink16_fixed_growth",
        "packet_fixed_growth",
        "wide_packet_fixed_growth",
        *(f"wide_{name}_growth" for name in ("full", "cacheblend15", "legolink16", "legolink16_fixed")),
        "tokens_in_memory_over_cacheblend15",
    },
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
    "parallel": {"worst_over_limit", "many_serial_over_parallel"},
    "dtype": {
        f"{name}_bfloat16_over_float32"
        for name in (*("shuffled", "images", "fresh", "new_images", "short", "again"), "decode1", "decode3")
    },
    "forms": {"batch1_form_over_free", "batch3_form_over_free"},
    "start": {"ready_processor_seconds", "ready_over_libraries"},
    "decode": {
        f"batch{n}_{kind}"
        for n in (1, 3)
        for kind in ("over_transformers", *(["half_kv_over_float32"] if COMPILER else []))
    },
}


def writes_all_that_it_promises(name, folder, monkeypatch):
    """Run a bench, check what it writes, and return its result."""
    result, output = run_bench(monkeypatch, SETTINGS, folder, name, "--quick", "--device", "cpu")
    assert set(result) == {"bench", "machine", "settings", "rows", "headline"}
    assert result["bench"] == name and "torch" in result["machine"] and result["rows"]
    assert set(result["headline"]) == HEADLINES[name]
    for value in result["headline"]:
        assert value in output
    assert [p.name for p in folder.iterdir() if p.name.startswith(".")] == []
    return result


@pytest.mark.parametrize("name", [name for name in SETTINGS if name != "start"])
def test_writes_machine_settings_rows_headline_and_a_plot(name, tmp_path, monkeypatch):
    monkeypatch.setattr(
        decode, "LONGER", 512
    )  # a busy machine may stop the reader for many steps of a tiny model
    writes_all_that_it_promises(name, tmp_path, monkeypatch)


@pytest.fixture
def starts(tmp_path_factory, monkeypatch):
    """Has one server stand for all that are started, because each takes ten seconds. Return the options of ``mpic
    serve`` with which each was to be started."""
    real, asked, made = start.server_process, [], []

    @contextmanager
    def shared(data_dir, *flags):
        assert data_dir.is_dir()
        asked.append(flags)
        if not made:  # in a folder of its own: the bench removes the others
            folder = tmp_path_factory.mktemp("server")
            made.append(running.enter_context(real(folder, *flags)))
        yield made[0]

    monkeypatch.setattr(start, "server_process", shared)
    with ExitStack() as running:
        yield asked


def test_a_server_is_started_beside_the_libraries_alone(starts, tmp_path, monkeypatch):
    result = writes_all_that_it_promises("start", tmp_path, monkeypatch)
    assert [flags[:4] for flags in starts] == [("--device", "cpu", "--dtype", "float32")]
    assert [row["table"] for row in result["rows"]] == ["until it is ready"] * 2


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


@pytest.mark.parametrize(
    "name, option, measured",
    [
        ("dtype", ("--dtype", "bfloat16"), "float32 and bfloat16"),
        ("start", ("--dtype", "bfloat16"), "float32"),
        ("start", ("--device", "cuda"), "cpu"),
    ],
)
def test_a_bench_of_the_cpu_in_certain_dtypes_refuses_to_be_recorded_as_another(name, option, measured):
    done = CliRunner().invoke(cli.app, [name, *option], env={"COLUMNS": "200"})
    assert done.exit_code == 2 and option[0] in done.output and f"measures {measured}, not" in done.output


@pytest.mark.parametrize("name", ["memory", "flops"])
def test_repeats_are_refused_where_there_are_no_rounds(name):
    done = CliRunner().invoke(cli.app, [name, "--quick", "--repeats", "3"])
    assert done.exit_code == 2 and "--repeats" in done.output and name in done.output


@pytest.mark.parametrize("former, now", cli.FORMER.items())
def test_a_former_name_is_refused_naming_what_took_its_place(former, now):
    done = CliRunner().invoke(cli.app, [former, "--quick", "--json", "x.json"], env={"COLUMNS": "200"})
    assert done.exit_code == 2 and now in done.output


def test_a_bench_of_the_cpu_records_the_cpu_beside_an_accelerator(tmp_path, monkeypatch):
    monkeypatch.setattr(cli, "choose_device", lambda name: torch.device("meta" if name == "auto" else name))
    result, _ = run_bench(monkeypatch, SETTINGS, tmp_path, "dtype")
    assert "float32 on cpu" in result["machine"]


def test_quick_settings_differ_and_changes_win():
    for entry in BENCHES.values():
        assert entry.configured(quick=True) != entry.configured()
    assert BENCHES["flat"].configured(True, repeats=9).repeats == 9
