"""A configuration of ``mpic eval run`` says what is meant, or is refused by name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mpic.config import ConfigError
from mpic.errors import UnknownPolicy, UnknownPress, UnsupportedParameter
from mpic_lab.eval.config import load_eval_config
from mpic_lab.eval.tasks import TaskError


def test_an_adapter_of_the_command_line_replaces_the_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    path = tmp_path / "runs" / "e.toml"
    path.write_text('packet = "a.safetensors"\n[[task]]\nname = "world-image"')
    assert load_eval_config(path).packet == str(tmp_path / "runs" / "a.safetensors")
    assert load_eval_config(path, packet=Path("b.safetensors")).packet == str(tmp_path / "b.safetensors")


@pytest.mark.parametrize(
    "text, error",
    [
        ("", ConfigError),
        ('[[task]]\nname = "nothing"', TaskError),
        ('policies = ["best"]\n[[task]]\nname = "world-image"', UnknownPolicy),
        ('presses = ["best-50"]\npressed = ["reuse"]\n[[task]]\nname = "world-image"', UnknownPress),
        ('policies = ["a3-15+snapkv-50"]\n[[task]]\nname = "world-image"', UnsupportedParameter),
        ('question = 4\n[[task]]\nname = "world-image"', ConfigError),
        ('[[task]]\nnames = "world-image"', ConfigError),
        ('task = "world-image"', ConfigError),
        ('[[task]]\nname = "squad"\npath = "a.json"\n[[task]]\nname = "squad"\npath = "b.json"', ConfigError),
    ],
)
def test_mistakes_in_a_configuration_are_refused_by_name(tmp_path, text, error):
    (tmp_path / "e.toml").write_text(text)
    with pytest.raises(error):
        load_eval_config(tmp_path / "e.toml")


@pytest.mark.parametrize(
    "top, task, said",
    [
        ("", "chunks = 4", "[[task]] 1: chunks is a list of whole numbers, not 4"),
        ("", 'chunks = [2, "4"]', "[[task]] 1: chunks is a list of whole numbers, not [2, '4']"),
        ("", "chunks = [4, 0]", "[[task]] 1: chunks is at least 1, not [4, 0]"),
        ("", "questions = 0", "[[task]] 1: questions is at least 1, not 0"),
        ('policies = "mpic-16"', "", "policies is a list of strings, not 'mpic-16'"),
        ("questions = -1", "", "questions is at least 1, not -1"),
        ("questions = true", "", "questions is a whole number, not True"),
        ("at_once = 0", "", "at_once is at least 1, not 0"),
        ("fidelity = 1", "", "fidelity is true or false, not 1"),
        ("judge = 3", "", "[judge] is a table, not 3"),
    ],
)
def test_a_value_of_the_wrong_kind_is_refused_with_what_is_expected(tmp_path, top, task, said):
    (tmp_path / "e.toml").write_text(f'{top}\n[[task]]\nname = "world-image"\n{task}')
    with pytest.raises(ConfigError, match=re.escape(said)):
        load_eval_config(tmp_path / "e.toml")
