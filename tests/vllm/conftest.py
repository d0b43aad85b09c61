"""Fixtures that several files share, and what ``make parity`` keeps of every family (``vllm_outcomes.py``). No test of
this folder runs where vLLM is not installed, and the run says so at its end (``tests/conftest.py``)."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
import torch
import vllm_facade
import vllm_kit
from torch import nn
from vllm_outcomes import Outcomes

from mpic.kv.file import ChunkFile
from mpic_lab.models import vllm_results

collect_ignore_glob = [] if vllm_kit.available() else ["test_*.py"]
_outcomes = Outcomes(
    {name: "image-text-to-text" if name in vllm_kit.VISION else "causal-lm" for name in vllm_kit.FAMILIES}
)


def pytest_deselected(items: list[pytest.Item]) -> None:
    for item in items:
        _outcomes.leave_out(item.nodeid)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" or report.outcome != "passed":
        _outcomes.add(report.nodeid, report.outcome)


def pytest_sessionfinish(session: pytest.Session) -> None:
    vllm_kit.staying.close()
    # of pytest-xdist; the process that started it hears of all tests
    is_worker = hasattr(session.config, "workerinput")
    if session.config.getoption("--parity") and vllm_kit.available() and not vllm_kit.V2 and not is_worker:
        vllm_results.record(_outcomes.rows(), vllm_results.installed_version())


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    """The engine on the bundled model."""
    with vllm_facade.Bench(tmp_path_factory.mktemp("library")) as made:
        yield made


@pytest.fixture(scope="module")
def native(bench):
    engine = bench.native()
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def linker(tmp_path_factory):
    """vLLM with links, and little host memory."""
    from vllm_faults import small_linker  # imports vLLM

    return small_linker(tmp_path_factory.mktemp("chunks"))


@pytest.fixture
def next_is_served(linker):
    from vllm_faults import serves_the_next

    yield
    serves_the_next(linker)


@pytest.fixture
def slow_disk(monkeypatch):
    """Let the KV of files be read only after ``go`` is set; ``reads`` has the names of those that were begun."""
    disk, read = SimpleNamespace(go=threading.Event(), reads=[]), ChunkFile.read_layers

    def waiting(self, destination):
        disk.reads.append(self.path.name)
        assert disk.go.wait(60)
        yield from read(self, destination)

    monkeypatch.setattr(ChunkFile, "read_layers", waiting)
    yield disk
    disk.go.set()


@pytest.fixture(scope="module")
def rotary():
    """A rotary module of vLLM's."""
    from paged_kit import WIDTH
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding import get_rope

    with set_current_vllm_config(VllmConfig()):
        parameters = {"rope_type": "default", "rope_theta": 10_000.0}
        return get_rope(WIDTH, 512, is_neox_style=True, rope_parameters=parameters, dtype=torch.float32)


@pytest.fixture(scope="module")
def rotation(rotary):
    """How it moves keys."""
    from mpic.engine.vllm.plugin.key_rotation import KeyRotation

    return KeyRotation(nn.ModuleList([rotary]))


@pytest.fixture
def preempted(monkeypatch):
    """Count how often vLLM preempts a request."""
    from vllm.v1.core.sched.scheduler import Scheduler

    counted, preempt = [], Scheduler._preempt_request

    def counting(self, request, *rest, **options):
        counted.append(request.request_id)
        return preempt(self, request, *rest, **options)

    monkeypatch.setattr(Scheduler, "_preempt_request", counting)
    return counted
