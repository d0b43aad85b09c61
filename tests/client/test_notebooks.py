"""The objects that the SDK returns, and the example notebook, run cell by cell."""

import ast
import io
import json
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest

import mpic
from mpic.client import types
from mpic.client.loading import teller

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "docs" / "examples" / "quickstart.ipynb"


def test_the_example_notebook_runs():
    """Run it like Jupyter, cell after cell, and display the last expression of each cell."""
    cells = [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]
    assert len(cells) > 5 and all(cell["outputs"] == [] for cell in cells)
    code = ["import sys; space = {}"]
    for cell in cells:
        tree = ast.parse("".join(cell["source"]))
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        code.append(f"exec({ast.unparse(tree)!r}, space)")
        if last is not None:
            code.append(f"value = eval({ast.unparse(last.value)!r}, space)")
            code.append("print(repr(value))")
    ran = subprocess.run(
        [sys.executable, "-c", "\n".join(code)],
        capture_output=True,
        text=True,
        cwd=NOTEBOOK.parent,
    )
    assert ran.returncode == 0, ran.stderr
    for word in ("red", "unchanged", "EIFFEL", "reused=", "FILE#VERA"):
        assert word in ran.stdout, word


def test_a_client_shows_its_address(url):
    client = mpic.MPIC(url)
    assert repr(client) == f"MPIC({url!r})"
    client.close()
    assert repr(client) == f"MPIC({url!r}, closed)"


def test_a_closed_client_says_so(url):
    client = mpic.MPIC(url)
    client.close()
    client.close()
    with pytest.raises(mpic.ClientClosed, match="was closed"):
        client.health()


def test_times_are_datetimes_too(client):
    file = client.files.create(b"dated", "DATED", ttl=100)
    assert file.created_time == datetime.fromtimestamp(file.created_at, UTC)
    assert file.expires_time.timestamp() == file.expires_at
    assert client.files.update(file.id, None).expires_time is None
    client.files.delete(file.id)


def test_health_is_typed_and_may_be_read_as_before(client):
    health = client.health()
    assert isinstance(health.model, types.ServedModel) and health.model.name == health.model["name"] == "tiny"
    assert health.model.context_length == 2048 and health.engine.running == 0
    assert health.engine["pages"]["total"] > 0 and health.engine.get("error") is None


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda c: c.files.create(5), "a file is a path"),
        (lambda c: c.files.create(("name", "text")), "encode a text"),
        (lambda c: c.files.create(io.StringIO("x")), "'rb'"),
        (lambda c: c.files.create(b"x", ttl="5"), "whole number of seconds"),
        (lambda c: c.files.delete(None), "an id is a text"),
        (lambda c: c.files.retrieve(5), "an id is a text"),
        (lambda c: c.chat.completions.create("x", polcy="full"), "did you mean 'policy'"),
        (lambda c: c.chat.completions.create("x", nonsense=1), "extra_body"),
        (lambda c: c.chat.completions.create({"role": "user"}), "list of messages"),
        (lambda c: c.chat.completions.create(["hello"]), r"messages\[0\]"),
    ],
)
def test_wrong_arguments_are_told_before_anything_is_sent(call, says):
    with mpic.MPIC("http://127.0.0.1:9", max_retries=0) as client:
        with pytest.raises(TypeError, match=says):
            call(client)


def test_a_local_server_tells_what_it_loads(tiny_model, capsys):
    stages = []
    with mpic.MPIC.local(
        tiny_model, progress=stages.append, pool_bytes=1 << 20, log_level="warning"
    ) as client:
        assert stages[0].startswith("importing") and stages[-1] == "ready"
        assert any("model tiny" in stage for stage in stages)
        assert client.health().ready
    teller(False)("x")
    assert "mpic: x" not in capsys.readouterr().err
    teller(True)("x")
    assert capsys.readouterr().err == "mpic: x\n"
