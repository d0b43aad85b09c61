"""The HTML of objects in notebooks, and the example notebook, run cell by cell."""

import ast
import io
import json
import subprocess
import sys
from datetime import UTC, datetime
from html.parser import HTMLParser
from pathlib import Path

import pytest

import mpic
from mpic.api import html
from mpic.client import types
from mpic.client.loading import teller

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "docs" / "examples" / "quickstart.ipynb"


class Elements(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.tags, self.text = [], ""
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_data(self, data):
        self.text += data


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
            code.append("print(getattr(value, '_repr_html_', value.__repr__)())")
    ran = subprocess.run(
        [sys.executable, "-c", "\n".join(code)],
        capture_output=True,
        text=True,
        cwd=NOTEBOOK.parent,
    )
    assert ran.returncode == 0, ran.stderr
    for word in ("red", "unchanged", "IMAGE#EIFFEL", "tokens reused", "display:inline-block", "FILE#VERA"):
        assert word in ran.stdout, word


def test_an_answer_shows_its_text_and_where_its_tokens_came_from(client):
    file = client.files.create(b"some notes <of> mine", "SHOWN", wait=True)
    for trace in (False, True):
        answer = client.chat.completions.create(
            "FILE#SHOWN what?", max_tokens=2, policy="mpic-4", trace=trace
        )
        found = Elements(answer._repr_html_())
        widths = [a["style"].split("%")[0] for tag, a in found.tags if tag == "span"]
        assert 99 < sum(float(one.removeprefix("width:")) for one in widths) < 101
        assert f"{answer.usage.mpic.tokens.reused} tokens reused" in found.text and answer.text in found.text
    shown = Elements(file._repr_html_())
    assert "FILE#SHOWN" in shown.text and "ready" in shown.text
    client.files.delete(file.id)


def test_texts_of_others_are_shown_as_texts():
    hostile = '<script>alert("x")</script>'
    for shown in (
        html.paragraph(hostile),
        html.fields([(hostile, hostile)]),
        html.strip([("new", 1, hostile)]),
        html.link("javascript:alert(1)", hostile),
        html.link(f"https://x/{hostile}", hostile),
    ):
        assert "<script" not in shown and not [a for tag, a in Elements(shown).tags if tag == "script"]
    assert "href" not in html.link("javascript:alert(1)", "x")


def test_a_client_shows_its_address(url):
    client = mpic.MPIC(url)
    assert repr(client) == f"MPIC({url!r})"
    assert f'href="{url}/ui"' in client._repr_html_()
    client.close()
    assert repr(client) == f"MPIC({url!r}, closed)" and "href" not in client._repr_html_()


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
        assert client.health().ready and "href" not in client._repr_html_()
    teller(False)("x")
    assert "mpic: x" not in capsys.readouterr().err
    teller(True)("x")
    assert capsys.readouterr().err == "mpic: x\n"
