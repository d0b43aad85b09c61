"""Set-up for all tests: one thread per process, because the models are tiny and a second core costs more than it gains;
no deadlines, because machines differ; examples and random tensors drawn from one seed, so that a run repeats; temporary
folders in memory; and a home that is not the user's."""

from __future__ import annotations

import argparse
import importlib.util
import os
from collections.abc import Iterator
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")  # compiling vLLM's sampler takes longer than a test

import closed_folders
import processors
import pytest

processors.hold_libraries()

MEMORY = "/dev/shm"
"""A file system in memory, on Linux. Temporary folders lie there when it has room: tests sync thousands of small files,
and a disk that somebody else uses takes 10 ms for each."""

if os.access(MEMORY, os.W_OK):
    about = os.statvfs(MEMORY)
    if about.f_bavail * about.f_frsize > 4 << 30 and not about.f_flag & os.ST_NOEXEC:
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", MEMORY)
closed_folders.move_home()
GUARD = closed_folders.Guard()


@pytest.fixture(autouse=True, scope="session")
def _float32_on_every_processor() -> Iterator[None]:
    """Has ``dtype = auto`` mean float32 in the tests' own process, whatever its processor is fast at, because most of
    them compare numbers. Servers in processes of their own choose as a user's do."""
    from mpic.model import dtype_choice

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dtype_choice, "why_no_unit", lambda: "tests compare in float32")
        yield


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    parser.addoption("--fuzz", type=int, default=0, help="examples an operation gets (make fuzz)")
    parser.addoption("--parity", action="store_true", help="every family in the vLLM tests (make parity)")
    parser.addoption("--load-seconds", type=float, default=10, help="how long clients load the server")
    parser.addoption("--soak", type=int, default=0, help="how often the long tests repeat (make soak)")
    # now, because the conftest.py of a folder that is named imports torch before pytest_configure
    if not _only_spreads(pluginmanager.get_plugin("pytestconfig").known_args_namespace):
        _prepare()


def _only_spreads(options: argparse.Namespace) -> bool:
    """Return whether this process gives the tests to others (pytest-xdist) and run none."""
    if os.environ.get("PYTEST_XDIST_WORKER"):
        return False
    return bool(getattr(options, "numprocesses", None)) and not (options.collectonly or options.usepdb)


def _prepare() -> None:
    """Import what needs settings before its first use, and make them. It takes seconds."""
    import torch

    # before anything imports Triton: its kernels then run in the interpreter
    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")
    if os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton"):  # macOS has none
        from quick_interpreter import prepare_once

        prepare_once()
    from hypothesis import HealthCheck, settings

    processors.refuse_more_than_there_is()
    torch.set_num_threads(1)
    slow = [HealthCheck.too_slow]  # a check of the machine
    settings.register_profile(
        "mpic", deadline=None, derandomize=True, database=None, suppress_health_check=slow
    )
    settings.register_profile("fuzz", deadline=None)
    settings.load_profile("mpic")


FIGURES = pytest.StashKey[list[str]]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[FIGURES] = []
    if not hasattr(config, "workerinput"):  # of pytest-xdist; what it lacks is told once
        from missing import left_out

        config.stash[FIGURES] += left_out(config)
    if config.getoption("--fuzz") and not _only_spreads(config.option):
        from hypothesis import settings

        settings.load_profile("fuzz")


def pytest_runtest_setup() -> None:
    """Draw the same numbers in a test, and in what is first made for it, whatever the process has run before."""
    import torch

    torch.manual_seed(0)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown() -> Iterator[None]:
    yield
    GUARD.complain()


@pytest.fixture
def guard() -> closed_folders.Guard:
    """What fails a test that opens what is the user's."""
    return GUARD


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from longest_first import LongestFirst

    return LongestFirst(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests marked ``parity`` run in ``make parity`` only: each starts an engine of its own."""
    if config.getoption("--parity"):
        return
    left_out = [item for item in items if item.get_closest_marker("parity")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("parity")]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: Any) -> None:
    """Take over the figures of a process of pytest-xdist that has ended."""
    node.config.stash[FIGURES] += getattr(node, "workeroutput", {}).get("figures", [])


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["figures"] = session.config.stash[FIGURES]


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    from missing import not_run

    for line in (*config.stash[FIGURES], *not_run(terminalreporter.stats.get("skipped", []))):
        terminalreporter.write_line(line)


@pytest.fixture(scope="session")
def figures(request: pytest.FixtureRequest) -> list[str]:
    """Lines that are printed at the end of the run: what was measured, where machines differ."""
    return request.config.stash[FIGURES]


@pytest.fixture(scope="session")
def soak(request: pytest.FixtureRequest) -> int:
    """Number of repetitions in ``make soak``; 0 in the suite."""
    return request.config.getoption("--soak")


@pytest.fixture(scope="session")
def fuzz(request: pytest.FixtureRequest) -> int:
    """Number of examples in ``make fuzz``; 0 in the suite."""
    return request.config.getoption("--fuzz")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory) -> str:
    """The folder of a tiny random model that sees images."""
    from server_helpers import save_tiny_llava

    return str(save_tiny_llava(tmp_path_factory.mktemp("model") / "tiny"))


@pytest.fixture(scope="session")
def served_folder(tmp_path_factory):
    """The data folder of the server at ``url``."""
    return tmp_path_factory.mktemp("data")


@pytest.fixture(scope="session")
def url(served_folder, tiny_model):
    """``mpic serve`` as a process of its own on the tiny model, one for all tests."""
    from server_helpers import POOL_PAGES

    from mpic_lab.demo import running_server

    # the tiny model is not calibrated
    flags = ("--policy", "mpic-16", "--pool-bytes", str(POOL_PAGES * 12_288))
    with running_server(served_folder, tiny_model, *flags) as (url, _):
        yield url


@pytest.fixture
def mpic(monkeypatch, capsys):
    """Run the command line in this process; return (exit status, stdout, stderr)."""
    from mpic import cli

    def run(*args):
        monkeypatch.setattr("sys.argv", ["mpic", *map(str, args)])
        status = 0
        try:
            cli.main()
        except SystemExit as exc:
            status = exc.code or 0
        return status, *capsys.readouterr()

    monkeypatch.setattr(cli.out, "width", 250, raising=False)
    monkeypatch.setattr(cli.err, "width", 250, raising=False)
    return run
