"""Runs the bench command at a tiny size, for tests of benches."""

import json
import math

from typer.testing import CliRunner

from mpic_lab.bench import cli
from mpic_lab.bench.harness import Bench


def run_bench(monkeypatch, settings, folder, name, *options):
    """Return the result that ``mpic bench NAME`` writes, and the text that it prints, after checking that its plot
    exists."""
    monkeypatch.setattr(Bench, "configured", lambda self, quick, **changes: settings[self.name])
    path = folder / f"{name}.json"
    arguments = [name, *options, "--json", str(path)]
    # a headline's name is cut where the table does not fit
    done = CliRunner().invoke(cli.app, arguments, env={"COLUMNS": "200"})
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception  # with its traceback
    assert done.exit_code == 0, done.output
    result = json.loads(path.read_text())
    for name, value in result["headline"].items():  # one is a difference of two runs
        assert math.isfinite(value) and (value > 0 or name.endswith("_python_ms")), name
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    return result, done.output
