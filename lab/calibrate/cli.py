"""``mpic calibrate``: a table of what every policy costs, and the file by which ``auto`` chooses one."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from mpic import preflight
from mpic.cli import completion
from mpic.config import EngineConfig, bundled_model, default_data_dir
from mpic.errors import LibraryInUse

POLICIES = "reuse,mpic-8,mpic-16,mpic-32,mpic-64,mpic-128"
QUESTIONS = 300

app = typer.Typer(add_completion=False, rich_markup_mode="markdown", pretty_exceptions_enable=False)


@app.command()
def calibrate(
    tasks: Annotated[
        Path | None,
        typer.Argument(
            help="a file of tasks (`mpic eval example`), whose [[task]]s, model and seed are taken in place of ours"
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="folder, .gguf file or hub id, as `mpic serve` takes it")
    ] = None,
    questions: Annotated[
        int | None,
        typer.Option(
            min=1,
            help=f"of each task; default: {QUESTIONS}, or the file's. A bound of 2 points takes 200 or "
            "more, 1 point 400 or more",
        ),
    ] = None,
    bound: Annotated[
        float,
        typer.Option(min=0.1, max=100, help="points of 100 that a policy may lose, with 95 % confidence"),
    ] = 2.0,
    policies: Annotated[
        str, typer.Option(help="comma-separated", autocompletion=completion.policies)
    ] = POLICIES,
    data_dir: Annotated[
        Path | None, typer.Option(help="the server's data folder; default: the same as of `mpic serve`")
    ] = None,
    out: Annotated[Path, typer.Option(help="folder of the answers; an unfinished run in it goes on")] = Path(
        "calibrate-run"
    ),
    device: Annotated[str, typer.Option(help="as of `mpic serve`")] = "auto",
    dtype: Annotated[str, typer.Option(help="as of `mpic serve`")] = "auto",
    kv_dtype: Annotated[str, typer.Option(help="as of `mpic serve`")] = "auto",
    quantize: Annotated[str, typer.Option(help="as of `mpic serve`")] = "",
) -> None:
    """Measure what reuse costs the answers of your model, and let the policy `auto` choose by it.

    Ask for codes in documents of real prose, and about pictures if the model sees them, under `full` and under every
    policy; one that can no longer meet the bound is asked no further. The cheapest that meets it is what `auto` then
    serves for that kind of chunk, from the server's next start on; if none is shown to, `auto` stays `prefix`, which is
    exact. Give the options by which you serve the model: a calibration is of one model in one dtype.
    """
    from mpic.config_values import ConfigError
    from mpic.durable import FileSystem, write_durably
    from mpic_lab.calibrate.run import TASKS, Calibrator
    from mpic_lab.eval.config import EvalConfig, load_eval_config
    from mpic_lab.eval.linking import parse_linking

    names = ("full", *(parse_linking(name.strip()).name for name in policies.split(",")))
    if tasks is None:
        config = EvalConfig(tuple(TASKS.values()), model or bundled_model(), questions=questions or QUESTIONS)
    else:
        config = load_eval_config(tasks, model, questions=questions)
    served = {"device": device, "dtype": dtype, "kv_dtype": kv_dtype, "quantize": quantize}
    config = replace(config, policies=tuple(dict.fromkeys(names)), at_once=1, **served)
    folder = data_dir or Path(default_data_dir())
    with suppress(LibraryInUse):  # a running server finds the calibration at its next start
        preflight.check_folder(folder)
    folder.mkdir(parents=True, exist_ok=True)  # fail here rather than after hours of questions
    preflight.check_engine(EngineConfig(model=config.model, **served))
    preflight.check_model(config.model)
    console = Console()
    calibrator = Calibrator(config, out, bound)
    with Progress(console=Console(stderr=True)) as progress:
        calibrator.run(progress)
    found, verdicts, notes = calibrator.result()
    table = Table("chunks", "policy", "questions", "points lost", "KL", "operations saved", "", box=SIMPLE)
    for kind, one, words in verdicts:
        lost = f"{one.lost:+.1f} [{one.low:+.1f}, {one.high:+.1f}]"
        kl = "" if one.kl is None else f"{one.kl:.3f}"
        table.add_row(kind, one.policy, str(one.questions), lost, kl, f"{one.saved:.1f} x", words)
    console.print(table, markup=False)
    for note in notes:
        console.print(note, markup=False)
    if not found.kinds:
        raise ConfigError("nothing was measured, so no calibration is written, and auto stays prefix")
    path = found.path(folder)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_durably(FileSystem(), path, [memoryview(found.model_dump_json(indent=1).encode() + b"\n")])
    console.print(f"written: {path}", markup=False)
