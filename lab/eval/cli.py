"""``mpic eval``: tasks, runs, reports."""

from __future__ import annotations

from contextlib import ExitStack, closing
from pathlib import Path
from typing import Annotated

import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from mpic.errors import BadRequest

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    help="Which policy on *your* model and data: answers, scores and times of every policy side by side.\n\n"
    "Write a TOML file (`mpic eval example` prints one), `mpic eval run my.toml --out my-run`, and look at "
    "`my-run/report.html`. A run resumes where it was interrupted, and more policies or questions can be added to it.",
)

SHOWN = ("policy", "score", "lost", "TTFT, median", "TTFT, full over it", "FLOPs, full over it")
"""Columns of the summary that a terminal of 80 characters has room for; the report has all of them."""

EXAMPLE = """\
# mpic eval run this.toml --out my-run
# model = "PATH or hub id"            # a folder, from this file; left out: the bundled demo model
policies = ["prefix", "reuse", "mpic-16", "legolink-16", "cacheblend-15"]   # full is always there
questions = 50                        # of every task and number of chunks
seed = 0

[[task]]
name = "world-two-hop"                # `mpic eval tasks` lists them
chunks = [2, 4, 8]

# [[task]]
# name = "longbench-qa"
# path = "LongBench/hotpotqa.jsonl"   # relative to this file
# split = "passage"                   # or fixed, sentence, paragraph, section, none

# [judge]                             # any OpenAI-compatible endpoint; its key in JUDGE_API_KEY
# base_url = "http://127.0.0.1:9000/v1"
# model = "judge"
# rubric = "mpic"                     # MPIC's appendix B; or sparkles, short, a file of your own
"""


@app.command()
def tasks() -> None:
    """List the tasks, what they measure, and whether they read a local file."""
    from mpic_lab.eval.tasks import TASKS

    table = Table("task", "what", "metric", "reads")
    for entry in sorted(TASKS.values(), key=lambda entry: entry.name):
        reads = "a local file" if entry.reads_file else "nothing: generated"
        table.add_row(entry.name, entry.summary, entry.metric, reads)
    Console().print(table, markup=False)


@app.command()
def example() -> None:
    """Print a configuration to start from."""
    typer.echo(EXAMPLE, nl=False)


@app.command()
def run(
    config: Annotated[Path, typer.Argument(help="a TOML file; `mpic eval example` prints one")],
    out: Annotated[Path, typer.Option(help="folder of the run; an unfinished run in it is resumed")] = Path(
        "eval-run"
    ),
    model: Annotated[
        str | None, typer.Option(help="a folder or hub id in place of the configuration's model")
    ] = None,
    packet: Annotated[
        Path | None, typer.Option(help="an adapter's file in place of the configuration's", dir_okay=False)
    ] = None,
    table: Annotated[
        Path | None, typer.Option(help="also write the table of methods, as JSON: see `mpic eval table`")
    ] = None,
    questions: Annotated[
        int | None,
        typer.Option(min=1, help="of every cell, in place of the file's; more may be asked for later"),
    ] = None,
    stand_in: Annotated[
        bool,
        typer.Option(
            "--stand-in", help="generate the files that tasks read, and leave out what has no adapter"
        ),
    ] = False,
) -> None:
    """Ask every question under every policy; then write the report."""
    from mpic_lab.eval.config import load_eval_config
    from mpic_lab.eval.judge import Grader, judge_run, refuse_other_judge
    from mpic_lab.eval.run import Evaluator
    from mpic_lab.eval.run_facts import record_fact
    from mpic_lab.eval.stand_in import with_stand_ins

    settings = load_eval_config(config, model, questions=questions, packet=packet)
    notes: list[str] = []
    if stand_in:
        settings, notes = with_stand_ins(settings, out, load_eval_config(config).model)
        typer.echo("\n".join(notes))
    evaluator = Evaluator(settings, out)
    if notes:
        record_fact(out, "stand_in", notes, "over other data")
    columns = (
        TextColumn("{task.description:28}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(elapsed_when_finished=True),
    )
    with ExitStack() as stack:
        grader = None
        if settings.judge is not None:  # before the questions, which may take hours
            grader = stack.enter_context(closing(Grader(settings.judge, settings.folder)))
            refuse_other_judge(out, grader)
        progress = stack.enter_context(Progress(*columns, console=Console(stderr=True)))
        answers = evaluator.run(progress)
        if grader is not None:
            judge_run(settings, out, answers, grader, progress)
    report(out)
    if table is not None:
        write_methods(out, table)


@app.command()
def report(out: Annotated[Path, typer.Argument(help="folder of a run")] = Path("eval-run")) -> None:
    """Write report.md, report.html and the plots of a run, and print the summary."""
    from mpic_lab.eval import report as reports
    from mpic_lab.eval.answers import read_answers
    from mpic_lab.eval.compare import compare_policies
    from mpic_lab.eval.judge import read_grades
    from mpic_lab.eval.tables import summary_table

    written = reports.write_report(out)
    found = compare_policies(read_answers(out), read_grades(out))
    head, *rows = summary_table(found)
    shown = [i for i, name in enumerate(head) if name in SHOWN]
    table = Table(box=SIMPLE)
    for i in shown:
        table.add_column(head[i], no_wrap=head[i] == "lost")
    for row in rows:
        table.add_row(*(row[i] for i in shown))
    console = Console()
    console.print(table, markup=False)
    console.print(reports.advice(found).replace("**", "").replace("`", ""), markup=False)
    console.print("report: " + str(next(path for path in written if path.suffix == ".html")), markup=False)


@app.command("table")
def write_methods(
    out: Annotated[Path, typer.Argument(help="folder of a run")],
    to: Annotated[Path, typer.Argument(help="the JSON file to write")] = Path("methods.json"),
) -> None:
    """Write the table of methods of a run: score and interval, TTFT, operations and bytes of every policy and press."""
    from mpic_lab.eval.methods import write_table

    write_table(out, to)
    typer.echo(f"table: {to}")


@app.command()
def plot(
    runs: Annotated[list[Path], typer.Argument(help="folders of runs")],
    out: Annotated[Path, typer.Option(help="the PNG file to write")] = Path("runs.png"),
) -> None:
    """Draw several runs side by side, such as KVSplit's modes: scores over costs, one panel a run."""
    from mpic_lab.eval import plots
    from mpic_lab.eval.answers import read_answers
    from mpic_lab.eval.compare import compare_policies
    from mpic_lab.figure import save_png

    found = {run.name: compare_policies(read_answers(run)) for run in runs}
    if empty := [str(run) for run in runs if not found[run.name]]:
        raise BadRequest(f"{', '.join(empty)}: no answers of `full` to compare with")
    rows = -(-len(found) // plots.COLUMNS)
    save_png(out, lambda figure: plots.by_task(figure, found), (10, 1.5 + 3 * rows), dpi=110)
    typer.echo(f"plot: {out}")


@app.command()
def fill(path: Annotated[Path, typer.Argument(help="a Markdown file with marks")]) -> None:
    """Update the tables of a report from the runs and bench results that its marks name.

    A mark is a line `<!-- made: losses my-run mpic-16 -->`, closed by `<!-- end -->`; `docs/evidence/README.md` is made
    this way. Tables there are: summary, losses, cells, counts, lengths, runs, needles, same, pairs, pressed,
    methods, bench.
    """
    from mpic_lab.eval.evidence import fill as fill_in

    typer.echo(f"{path}: {fill_in(path)} tables")
