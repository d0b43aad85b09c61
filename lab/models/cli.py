"""``mpic models check``."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from mpic.cli.common import command_app

app = command_app()
FEW = ("llama", "mistral", "qwen3", "gemma3", "gemma3_text", "gpt_oss", "smollm3", "deepseek_v3", "mamba")


@app.command()
def check(
    families: Annotated[list[str] | None, typer.Argument(help="of transformers, by model_type")] = None,
    all_: Annotated[bool, typer.Option("--all", help="every family that transformers knows")] = False,
    json_: Annotated[
        Path | None, typer.Option("--json", help="write rows of family, kind, result, reason")
    ] = None,
    table: Annotated[Path | None, typer.Option(help="write the page docs/models.md to this file")] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, help="processes at a time; default 2, with vllm 1")
    ] = None,
    seconds: Annotated[float, typer.Option(min=1, help="that one family may take")] = 300.0,
    engine: Annotated[
        str, typer.Option(help="native, or vllm: what is found is kept for the table's last column")
    ] = "native",
) -> None:
    """Check model families: can they be linked, and are answers right?

    Build a tiny random instance of each, run the self-test that a real model goes through when it is loaded, and
    three policies against the slow oracle. Without names a few families; ends with status 1 if one *failed*. With
    `--engine vllm` a tiny checkpoint of each is served inside vLLM.
    """
    from mpic_lab.models import vllm_results
    from mpic_lab.models.check import Row
    from mpic_lab.models.instances import MAPPINGS
    from mpic_lab.models.instances import families as known
    from mpic_lab.models.sweep import sweep
    from mpic_lab.models.table import markdown

    out = Console(markup=False, emoji=False, highlight=False)
    chosen = families or list(FEW)
    wanted = [(name, kind) for kind in MAPPINGS for name in known(kind) if all_ or name in chosen]
    vllm = _vllm_version(engine, table)
    unknown = set() if all_ else set(chosen) - {name for name, _ in wanted}
    if unknown:
        raise typer.BadParameter(f"transformers knows no generating family {', '.join(sorted(unknown))}")

    def tell(row: Row) -> None:
        line = f"{row.family:28} {row.kind:18} {row.result:9} {row.reason}"
        out.print(line, soft_wrap=True)
        if vllm is not None:
            vllm_results.record([row], vllm)

    rows = sweep(wanted, workers or (1 if vllm else 2), seconds, tell, engine)
    counts = Counter(row.result for row in rows)
    out.print(", ".join(f"{n} {result}" for result, n in counts.most_common()))
    if json_ is not None:
        json_.write_text(json.dumps([row._asdict() for row in rows], indent=1))
    if table is not None:
        table.write_text(markdown(rows, vllm_results.read()))
    if counts["failed"]:
        raise typer.Exit(1)


def _vllm_version(engine: str, table: Path | None) -> str | None:
    """Return the version of vLLM, if families are checked inside it. Raise typer.BadParameter if it is not installed,
    there is no such engine, or the table is asked for, whose rows are the native engine's."""
    from mpic_lab.models.vllm_results import installed_version

    if engine == "native":
        return None
    if engine != "vllm":
        raise typer.BadParameter(f"unknown engine '{engine}'; available: native, vllm", param_hint="--engine")
    if table is not None:
        raise typer.BadParameter(
            "the table is made by the native engine; its last column is kept", param_hint="--table"
        )
    found = installed_version()
    if found is None:
        raise typer.BadParameter("vLLM is not installed (make setup-vllm)", param_hint="--engine")
    return found
