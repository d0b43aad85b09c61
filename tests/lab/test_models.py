"""``mpic models check`` reports the results of families and notices wrong answers."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from mpic.cli.models import app
from mpic.kernels.windows import Stretch
from mpic_lab.models import check as checking
from mpic_lab.models.check import Row
from mpic_lab.models.sweep import sweep
from mpic_lab.models.table import markdown

KIND = "causal-lm"


def test_families_are_checked_in_processes_and_rows_and_table_are_written(tmp_path):
    """One family for each result: served correctly, refused with the reason, and not buildable as a small instance."""
    rows, table = tmp_path / "rows.json", tmp_path / "models.md"
    names = ["gemma3_text", "mamba", "reformer", "paligemma"]
    done = CliRunner().invoke(app, ["check", *names, "--json", str(rows), "--table", str(table)])
    assert done.exit_code == 0, done.output
    found = {row["family"]: row for row in json.loads(rows.read_text())}
    assert {name: found[name]["result"] for name in names} == {
        "gemma3_text": "verified",
        "mamba": "refused",
        "reformer": "not built",
        "paligemma": "verified",
    }
    assert "keep a state" in found["mamba"]["reason"]
    assert "| gemma3_text | refused (" in table.read_text(), "served, but not inside vLLM"


def test_an_unknown_family_is_an_error():
    done = CliRunner().invoke(app, ["check", "no_such_family"])
    assert done.exit_code == 2 and "no_such_family" in done.output


def test_a_family_that_takes_too_long_has_failed():
    (row,) = sweep([("llama", KIND)], seconds=0.0)
    assert row.result == "failed" and "took more than 0 s" in row.reason


def test_a_wrong_answer_is_noticed(monkeypatch):
    """The engine's windows are one token too wide, which the self-test's segments cannot hide from the oracle."""
    right = Stretch.skipped
    monkeypatch.setattr(checking, "self_test", lambda loaded: 0.0)
    monkeypatch.setattr(Stretch, "skipped", lambda self, floors: right(self, floors.clip(1) - 1))
    row = checking.check("gemma3_text", KIND)
    assert row.result == "failed"


@pytest.mark.parametrize("result", ["refused", "failed"])
def test_reasons_are_in_the_table(result):
    page = markdown([Row("one", KIND, result, "a | b")], {})
    assert f"| one | {result}: a \\| b |" in page and f"1 {result}" in page


def test_families_with_one_reason_share_a_row_whatever_it_names():
    reasons = {
        "mamba": "mamba: layers keep a state",
        "jamba": "jamba_text: layers keep a state",
        "bart": "bart: layers 4, 5, ... do not attend",
        "plbart": "plbart: layers 4 do not attend",
        "bert": "BertLMHeadModel: no decoder with layers",
        "gpt2": "GPT2ForCausalLM: no decoder with layers",
        "opt": "opt: it cannot be called: IndexError: index out of range",
    }
    page = markdown([Row(name, KIND, "refused", reason) for name, reason in reasons.items()], {})
    assert "| mamba, jamba | refused: layers keep a state |" in page
    assert "| bart, plbart | refused: layers do not attend |" in page
    assert "| bert, gpt2 | refused: no decoder with layers |" in page
    assert "| opt | refused: it cannot be called |" in page
