"""The GPU report: a failure in a section does not affect others, every row is written when it is measured, and a bare
machine is enough."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import bare_site
import pytest

from mpic_lab.gpu import host, record, sections, suite
from mpic_lab.gpu.supervise import Section, SectionRun, Supervisor

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tools" / "gpu_report.py"
FAKES = """
import os, signal, sys, time, subprocess
from pathlib import Path

def fine(run):
    run.row("thing", "small", "hand", 1.5, "ms", predicted=1.0, ratio=1.5, bound="memory")
    run.row("check", "small", "hand", 0.0, "error", ok=True)

def raises(run):
    run.row("before", "small", "hand", 1, "ms")
    raise ValueError("the reason of it")

def hangs(run):
    run.row("before", "small", "hand", 2, "ms")
    child = subprocess.Popen(["sleep", "600"])
    Path(str(run.out) + ".pid").write_text(str(child.pid))
    wait_here_for_ever()

def wait_here_for_ever():
    time.sleep(600)

def killed(run):
    run.row("before", "small", "hand", 3, "ms")
    os.kill(os.getpid(), signal.SIGSEGV)

def leaves(run):
    run.row("before", "small", "hand", 4, "ms")
    sys.exit(3)
"""


@pytest.fixture
def fakes(tmp_path, monkeypatch):
    """Sections by name, in a module that every child can import."""
    (tmp_path / "fake_sections.py").write_text(FAKES)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    names = ("raises", "hangs", "killed", "leaves", "fine")
    return {name: Section(name, f"fake_sections:{name}", 300, name) for name in names}


def supervised(out: Path, chosen: list[Section], fork: bool, limit: float = 2000) -> list[dict]:
    said: list[str] = []
    command = (sys.executable, str(SCRIPT))
    Supervisor(out, "cpu", True, limit, fork, command, said.append).run(chosen)
    return record.read(out)


@pytest.mark.parametrize("fork", [True, False], ids=["forked", "new interpreters"])
def test_a_section_that_raises_hangs_or_dies_ends_alone(tmp_path, fakes, fork):
    out = tmp_path / "rows.jsonl"
    hang = fakes["hangs"]
    seconds = 8 if fork else 30  # in which a busy machine has started an interpreter
    fakes["hangs"] = Section(hang.name, hang.target, seconds, hang.summary)
    lines = supervised(out, list(fakes.values()), fork)
    ends = record.ends(lines)
    assert {name: end["status"] for name, end in ends.items()} == {
        "raises": "failed",
        "hangs": "killed at its limit",
        "killed": "ended by SIGSEGV",
        "leaves": "failed",
        "fine": "ok",
    }
    assert "the reason of it" in ends["raises"]["error"]
    assert "wait_here_for_ever" in ends["hangs"]["error"]  # where it hung
    rows = record.latest(lines)
    assert [row["value"] for row in rows if row["measured"] == "before"] == [1, 2, 3, 4]
    assert [row["section"] for row in rows if row["measured"] in ("thing", "check")] == ["fine", "fine"]
    pid = int(Path(f"{out}.pid").read_text())
    assert _gone(pid)  # processes that the section had started are not left behind
    text = record.summary(lines)
    assert "ended by SIGSEGV" in text and "checks: 1, wrong: 0" in text


def _gone(pid: int) -> bool:
    for _ in range(50):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except OSError:
            return True
        if state == "Z":  # ended; whoever adopted it has not looked yet
            return True
        time.sleep(0.1)
    return False


def test_a_row_is_in_the_file_while_its_section_still_runs(tmp_path):
    out = tmp_path / "rows.jsonl"
    run = SectionRun("one", out)
    run.row("thing", "small", "hand", 1.5, "ms")
    (line,) = [json.loads(text) for text in out.read_text().splitlines()]
    assert set(record.COLUMNS) <= set(line) and line["section"] == "one" and line["predicted"] is None
    with out.open("a") as file:
        file.write('{"section": "one", "meas')  # the machine went away
    assert len(record.read(out)) == 1


def test_a_missing_package_is_named_and_its_section_is_left_out(tmp_path, fakes):
    lacking = Section("lacking", "fake_sections:fine", 300, "", ("json", "no_such_package"))
    lines = supervised(tmp_path / "rows.jsonl", [lacking, fakes["fine"]], True)
    ends = record.ends(lines)
    assert ends["lacking"]["status"] == "left out" and "no_such_package" in ends["lacking"]["error"]
    assert ends["fine"]["status"] == "ok"


def test_nothing_is_begun_after_the_time_for_everything(tmp_path, fakes):
    lines = supervised(tmp_path / "rows.jsonl", [fakes["fine"]], True, limit=0)
    assert record.ends(lines)["fine"]["status"] == "left out"


def test_a_second_attempt_counts_alone(tmp_path, fakes):
    out = tmp_path / "rows.jsonl"
    for _ in range(2):
        lines = supervised(out, [fakes["fine"]], True)
    assert len([line for line in lines if line.get("measured") == "thing"]) == 2
    assert len([row for row in record.latest(lines) if row["measured"] == "thing"]) == 1


def script():
    spec = importlib.util.spec_from_file_location("gpu_report", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_what_ended_well_is_not_run_again_unless_it_is_named(tmp_path):
    out = tmp_path / "rows.jsonl"
    for name, status in (("machine", "ok"), ("ceilings", "ok"), ("link", "ok"), ("decode", "failed")):
        record.append(out, {"event": "end", "section": name, "status": status, "seconds": 1})
    names = [section.name for section in script().chosen("", out)]
    assert "link" not in names and "decode" in names
    assert names[:2] == ["machine", "ceilings"]  # the machine and its software may be others now
    assert [section.name for section in script().chosen("machine", out)] == ["machine"]
    with pytest.raises(SystemExit, match="no sections"):
        script().chosen("machine,nothing", out)


def test_rows_of_another_device_are_not_mixed_into_a_file(tmp_path):
    out = tmp_path / "rows.jsonl"
    record.append(out, {"event": "run", "device": "cuda", "quick": False})
    with pytest.raises(SystemExit, match="another device"):
        script().start(script().parse(["--device", "cpu", "--out", str(out)]))


def test_rows_of_another_gpu_are_not_mixed_into_a_file_and_a_run_says_what_it_is_made_on(
    tmp_path, monkeypatch, capsys
):
    here = {"gpu": "NVIDIA H200", "commit": "abc", "torch": "2.13"}
    monkeypatch.setattr(host, "facts", lambda device: here)
    out = tmp_path / "rows.jsonl"
    options = script().parse(["--out", str(out)])
    for earlier in ({}, {"gpu": None}, {"gpu": "NVIDIA H200"}):  # the first as earlier versions wrote it
        record.append(out, {"event": "run", "device": "cuda", "quick": False, **earlier})
        script().start(options)
    assert here.items() <= record.read(out)[-1].items()
    record.append(out, {"event": "run", "device": "cuda", "quick": False, "gpu": "NVIDIA H100"})
    with pytest.raises(SystemExit, match="another GPU, NVIDIA H100"):
        script().start(options)


def test_a_summary_names_the_sections_of_other_software(tmp_path):
    lines = []
    for commit, names in (("abc", ("kernels", "copies")), ("abd", ("copies", "link"))):
        lines.append({"event": "run", "commit": commit, "torch": "2.13"})
        for name in names:
            lines.append({"event": "begin", "section": name})
            lines.append({"event": "end", "section": name, "status": "ok", "seconds": 1})
    text = record.summary(lines)
    assert "  abc, torch 2.13: kernels\n  abd, torch 2.13: copies, link\n" in text
    assert "different software" not in record.summary(lines[:5])


def test_every_section_has_a_time_and_together_they_leave_a_margin():
    assert len({section.name for section in sections.SECTIONS}) == len(sections.SECTIONS)
    assert all(0 < section.limit <= 300 for section in sections.SECTIONS)


def test_the_test_files_that_a_section_runs_are_there():
    assert all((ROOT / suite.FOLDER / name).is_file() for name in suite.FILES)


# ---- a bare machine

ABSENT = ["mpic", "faiss", "fastapi", "platformdirs", "vllm", "pip", "rich", "aiofiles", "pydantic"]
CHOSEN = "machine,ceilings,tuning,tests"
ALONE = f"""
import importlib, importlib.util, runpy, sys
present = [name for name in {ABSENT!r} if importlib.util.find_spec(name)]
assert not present, present
space = runpy.run_path(sys.argv[1], run_name="script")
sys.meta_path.insert(0, space["Checkout"]())
space["prepare"]("cpu")
from mpic_lab.gpu.sections import SECTIONS
for section in SECTIONS:
    module, name = section.target.split(":")
    assert callable(getattr(importlib.import_module(module), name)), section
import mpic.kernels
print(mpic.kernels.__file__)
raise SystemExit(space["main"](sys.argv[2:]))
"""


def on_a_bare_machine(tmp_path, *words) -> str:
    """The output of an interpreter that has only a bare machine's packages, without an installed ``mpic``."""
    site = bare_site.make(tmp_path / "site")
    environment = {k: v for k, v in os.environ.items() if k in ("PATH", "HOME", "OMP_NUM_THREADS", "TMPDIR")}
    where = {"env": environment | {"PYTHONPATH": str(site)}, "cwd": site}
    command = [sys.executable, "-S", *map(str, words)]
    done = subprocess.run(command, **where, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_bare_machine_imports_every_section_and_the_script_comes_to_its_end(tmp_path):
    out = tmp_path / "rows.jsonl"
    options = ["--device", "cpu", "--out", out, "--sections", CHOSEN]
    said = on_a_bare_machine(tmp_path, "-c", ALONE, SCRIPT, *options)
    assert said.startswith(str(ROOT / "kernels" / "__init__.py"))  # the package of the checkout
    lines, log = record.read(out), Path(f"{out}.log")
    ends = record.ends(lines)
    for name in ("machine", "ceilings", "tuning"):
        assert ends[name]["status"] == "ok", log.read_text()
    assert ends["tests"]["status"] == "left out" and "pytest" in ends["tests"]["error"]
    assert "not installed here: " in said and "pytest" in said
    rows = record.latest(lines)
    assert {row["ceiling"] for row in rows if "ceiling" in row} == {"copy", "matmul", "to_device", "to_host"}
    timed = [row for row in rows if row["section"] == "tuning" and row["unit"] == "us"]
    assert timed and all(row["predicted"] > 0 and row["ratio"] > 0 and row["bound"] for row in timed)
    assert all(set(record.COLUMNS) <= set(row) for row in rows)
    table = record.markdown(lines)
    assert table.startswith("| section | measured |") and table.count("\n") == len(rows) + 1


SPAWNED = """
import multiprocessing, runpy, sys
if __name__ == "__main__":
    sys.modules["__main__"].__file__ = sys.argv[1]
    child = multiprocessing.get_context("spawn").Process(target=runpy.run_path, args=(sys.argv[2],))
    child.start()
    child.join()
    raise SystemExit(child.exitcode)
"""


def test_a_process_that_a_section_starts_finds_the_checkout_on_a_bare_machine(tmp_path):
    """They import the script under another name, and never call it."""
    found, starter = tmp_path / "found.py", tmp_path / "starter.py"
    found.write_text("import mpic.kernels, mpic.kv.readback\nprint(mpic.kernels.__file__)\n")
    starter.write_text(SPAWNED)
    said = on_a_bare_machine(tmp_path, starter, SCRIPT, found)
    assert said.strip() == str(ROOT / "kernels" / "__init__.py")
