"""How the tests are spread over processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
from longest_first import SECONDS, TOGETHER, LongestFirst

ROOT = Path(__file__).parents[1]
LOOK = """
import sys
import pytest

class Look:
    def pytest_configure(self):
        print("torch" in sys.modules)
        pytest.exit("that is all", 0)

pytest.main([*sys.argv[1:], "tests/test_config.py"], plugins=[Look()])
"""


@pytest.fixture
def spread():
    """The scheduler of a run in one process."""
    return LongestFirst(Mock(getvalue=Mock(return_value=["popen"]), option=Mock(loadscopereorder=False)))


def order_of(tests, spread):
    """Return the files in the order in which the process gets them."""
    given = []
    node = Mock(shutting_down=False, send_runtest_some=given.extend)
    spread.add_node(node)
    spread.add_node_collection(node, tests)
    spread.schedule()
    for index in range(len(tests)):
        spread.mark_test_complete(node, given[index])
    return [tests[index].partition("::")[0] for index in given]


def test_the_files_that_take_longest_begin_first_and_the_others_keep_their_order(spread):
    long = [scope for scope in SECONDS if scope.endswith(".py")]
    least, most = min(long, key=SECONDS.get), max(long, key=SECONDS.get)
    files = ["tests/b.py", least, "tests/a.py", most, "tests/c.py"]
    got = order_of([f"{file}::test_it" for file in files], spread)
    assert got == [most, least, "tests/b.py", "tests/a.py", "tests/c.py"]


def test_what_shares_an_engine_a_browser_or_clients_is_given_to_one_process(spread):
    files = ["tests/vllm/test_links.py", "tests/client/test_a.py", "tests/link/test_plan.py"]
    files += ["tests/lab/test_bench_vllm.py", "tests/client/test_b.py", "tests/webui/test_facts.py"]
    assert [spread._split_scope(f"{file}::test[a::b]") for file in files] == [
        *("vllm", "tests/client", "tests/link/test_plan.py", "vllm", "tests/client", "tests/webui")
    ]


def test_every_unit_that_is_called_long_exists():
    assert all(scope in TOGETHER or (ROOT / scope).is_file() for scope in SECONDS)


@pytest.mark.parametrize("processes, imported", [("0", "True"), ("2", "False")])
def test_a_process_imports_torch_before_it_runs_tests_and_not_to_give_them_to_others(processes, imported):
    command = [sys.executable, "-c", LOOK, "-n", processes]
    environment = {name: value for name, value in os.environ.items() if name != "PYTEST_XDIST_WORKER"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert imported in done.stdout.splitlines(), done.stdout + done.stderr
