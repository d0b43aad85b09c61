"""How pytest-xdist spreads the tests over processes."""

from __future__ import annotations

from typing import Any

from xdist.scheduler import LoadScopeScheduling

TOGETHER = ("vllm", "tests/webui", "tests/client")
"""Tests that stay in one process: those that start vLLM, that drive a browser, or that share the clients of
``tests/client``."""
SECONDS = {
    "vllm": 500,
    "tests/webui": 300,
    "tests/client": 45,
    "tests/lab/test_bench.py": 50,
    "tests/lab/test_gpu_cases.py": 50,
    "tests/server/test_schemathesis.py": 50,
    "tests/engine/test_invariants.py": 45,
    "tests/kernels/test_triton_compile.py": 35,
    "tests/library/test_kill.py": 35,
    "tests/server/test_shutdown.py": 35,
    "tests/server/test_load.py": 30,
    "tests/kernels/test_compare_tool.py": 25,
    "tests/server/test_stalls.py": 20,
}
"""About how long a unit takes on one core. A long one that begins late is still running when the other processes have
nothing left to do. Units that are missing here are short; their order is pytest-xdist's own."""


class LongestFirst(LoadScopeScheduling):
    """Keeps the tests of a file in one process, and begins with the files that take longest."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return next((heavy for heavy in TOGETHER if heavy in file), file)

    def _assign_work_unit(self, node: Any) -> None:
        longest = max(self.workqueue, key=lambda scope: SECONDS.get(scope, 0))
        self.workqueue.move_to_end(longest, last=False)
        super()._assign_work_unit(node)
