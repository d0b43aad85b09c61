"""``mpic references evaluate``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from mpic.cli.common import command_app, out

app = command_app()


@app.command()
def evaluate(
    json_path: Annotated[Path | None, typer.Option("--json", help="write the figures here")] = None,
    questions: Annotated[int, typer.Option(min=1, help="of each kind, at most")] = 1000,
    policy: Annotated[str, typer.Option(help="of all answers")] = "mpic-16",
    model: Annotated[str | None, typer.Option(help="default: the bundled demo model")] = None,
) -> None:
    """Measure retrieval on the bundled set, in this process.

    It reports recall, answers with `auto` against answers with the right reference in the prompt, and how often the
    model searches when it must and when it need not.
    """
    from mpic_lab.eval import retrieval

    report = retrieval.evaluate(policy=policy, limit=questions, model=model)
    retrieval.print_report(report, out)
    if json_path is not None:
        json_path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
