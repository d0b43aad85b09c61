"""``mpic bench``: one command per bench, all with the same options."""

from __future__ import annotations

import importlib
import pkgutil
import signal
import sys
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from mpic.model.load import DTYPES, choose_device
from mpic_lab import bench
from mpic_lab.bench.harness import BENCHES, Bench, BenchDevice, Report, Ticker
from mpic_lab.bench.merge import earlier, merged
from mpic_lab.bench.results import as_json, machine, print_report, save_plot, write

# Each bench is a module and registers itself; in this order, so that ``NAME`` comes before ``NAME_vllm``.
for _module in sorted(one.name for one in pkgutil.walk_packages(bench.__path__, f"{bench.__name__}.")):
    if _module != __name__:
        importlib.import_module(_module)

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    help="Measure what the system promises, on random models made on the spot.\n\n"
    "`mpic bench ttft --quick` takes less than a minute on two cores and has the shape of the full bench; "
    "`mpic bench ttft --json ttft.json` writes machine, settings, every row and the headline numbers, and a plot "
    "beside it. The columns that a headline compares are measured in turns, so other load on the machine hits them "
    "alike; only requests that arrive at random are sent to one policy after the other. Still, measure "
    "on an idle machine.",
)


FORMER = {
    "gpu": "make bench-gpu",
    "load": "mpic bench parallel",
    "overhead": "mpic bench flops",
    "pages": "mpic bench memory",
    "serve": "mpic bench serving",
    "profile": "mpic bench serving --engine native-http",
    "sampling": "mpic bench decode",
    "restart": "make test ARGS=tests/library/test_many_files.py",
}
"""Former name of a bench -> the command that replaces it."""


@app.command("list")
def show() -> None:
    """List the benches, their headline numbers and the goals for those."""
    table = Table("bench", "measures", "headline", "goal")
    for entry in (one for native in BENCHES.values() for one in (native, *native.others.values())):
        names, goals = list(entry.wants), list(entry.wants.values())
        name = entry.name if entry.engine == "native" else f"{entry.name} --engine {entry.engine}"
        table.add_row(name, entry.summary, "\n".join(names), "\n".join(goals))
    Console().print(table, markup=False)


def _help(entry: Bench) -> str:
    goals = ", ".join(f"`{name}` {goal}" for name, goal in entry.wants.items())
    lines = [f"{entry.summary[0].upper()}{entry.summary[1:]}.", f"Headline: {goals}."]
    lines += [f"Sizes: {', '.join(entry.sizes)}."] if entry.sizes else []
    lines += [f"Cases: {', '.join(entry.cases)}."] if entry.cases else []
    return "\n\n".join(lines)


def _command(native: Bench) -> None:
    others = [f"With `--engine {engine}`: {_help(other)}" for engine, other in native.others.items()]
    engines = ", ".join(("native", *native.others))

    @app.command(native.name, help="\n\n".join((_help(native), *others)))
    def run(
        engine: Annotated[str, typer.Option(help="native, or vllm where the bench has it")] = "native",
        quick: Annotated[
            bool,
            typer.Option(
                "--quick",
                help="same shape, smaller: under 45 s on two cores; benches that start vLLM take longer",
            ),
        ] = False,
        json_path: Annotated[
            Path | None, typer.Option("--json", help="write the result here and a plot beside it")
        ] = None,
        repeats: Annotated[int | None, typer.Option(min=1, help="warm rounds")] = None,
        device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, mps")] = "auto",
        dtype: Annotated[str, typer.Option(help=f"auto (float32), {', '.join(DTYPES)}")] = "auto",
        threads: Annotated[int | None, typer.Option(min=1, help="threads of torch on the CPU")] = None,
        size: Annotated[str | None, typer.Option(help="another size, of a bench that has several")] = None,
        only: Annotated[
            str | None,
            typer.Option(
                help="cases, separated by commas, of a bench that has them; the others in the file of --json stay"
            ),
        ] = None,
    ) -> None:
        entry = native.on(engine)
        if entry is None:
            raise typer.BadParameter(f"bench {native.name} measures {engines}, not '{engine}'")
        _check_options(entry, threads, dtype, repeats)
        if entry.on_cpu:
            _check_on_cpu(entry, device, dtype)
            device = "cpu"
        changes = _changes(entry, repeats, size, only)
        if threads:
            torch.set_num_threads(threads)
        placement = BenchDevice(choose_device(device), DTYPES.get(dtype, torch.float32))
        settings = entry.configured(quick, **changes)
        old = earlier(json_path, entry, settings, placement) if only and json_path else None
        # raised as an exception, so that started processes end, too
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
        errors = Console(stderr=True)
        errors.print(f"{entry.name}: {machine(placement)}", markup=False, highlight=False)
        with Ticker(errors) as ticker:
            report = entry.run(settings, placement, ticker)
        print_report(entry, report, Console())
        if json_path is not None:
            _keep(json_path, entry, as_json(entry, settings, placement, report), report, old)


def _keep(
    path: Path, entry: Bench, result: dict[str, Any], report: Report, old: dict[str, Any] | None
) -> None:
    """Write a result, or merge its cases into an earlier result, with a plot beside it."""
    if old is not None:
        result = merged(old, result)
        if entry.headline is not None:
            headline = entry.headline(result["rows"])
            result["headline"] = {name: round(float(value), 4) for name, value in headline.items()}
        if (draw := entry.draw) is not None:
            report.plot = lambda figure: draw(figure, result["rows"])
    write(path, result)
    save_plot(path.with_suffix(".png"), report)


def _check_options(entry: Bench, threads: int | None, dtype: str, repeats: int | None) -> None:
    if threads and not entry.in_process:
        raise typer.BadParameter(
            f"what bench {entry.name} measures runs in a process of its own, which reads OMP_NUM_THREADS; "
            "vLLM reads VLLM_CPU_OMP_THREADS_BIND"
        )
    if dtype != "auto" and dtype not in DTYPES:
        raise typer.BadParameter(f"unknown dtype '{dtype}'; one of auto, {', '.join(DTYPES)}")
    if repeats and "repeats" not in entry.settings.__dataclass_fields__:
        raise typer.BadParameter(f"bench {entry.name} measures no rounds to repeat", param_hint="--repeats")


def _changes(entry: Bench, repeats: int | None, size: str | None, only: str | None) -> dict[str, Any]:
    """Return the settings that the options change."""
    changes: dict[str, Any] = {"repeats": repeats} if repeats else {}
    if size is not None:
        if size not in entry.sizes:
            has = ", ".join(entry.sizes) or "one size alone"
            raise typer.BadParameter(f"bench {entry.name} has {has}, not '{size}'", param_hint="--size")
        changes["size"] = size
    if only is not None:
        chosen = tuple(name.strip() for name in only.split(","))
        if unknown := [name for name in chosen if name not in entry.cases]:
            has = ", ".join(entry.cases) or "no cases to choose from"
            raise typer.BadParameter(f"bench {entry.name} has {has}, not '{unknown[0]}'", param_hint="--only")
        changes["only"] = chosen
    return changes


def _check_on_cpu(entry: Bench, device: str, dtype: str) -> None:
    for option, value, measured in (("--device", device, ("cpu",)), ("--dtype", dtype, entry.dtypes)):
        if value != "auto" and (value,) != tuple(measured):
            raise typer.BadParameter(
                f"bench {entry.name} measures {' and '.join(measured)}, not '{value}'", param_hint=option
            )


def _refuse(former: str, now: str) -> None:
    @app.command(
        former, hidden=True, context_settings={"ignore_unknown_options": True, "allow_extra_args": True}
    )
    def refused() -> None:
        raise typer.BadParameter(f"there is no bench {former} any more: use `{now}`")


for _entry in BENCHES.values():
    _command(_entry)
for _former, _now in FORMER.items():
    _refuse(_former, _now)
