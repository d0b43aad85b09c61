"""The frame every bench runs in: registry, settings, paired measurement, table, JSON and plot.

A bench is a function ``(settings, where, progress) -> Report``. It measures its columns *interleaved*: every round
runs each column once, in an order that rotates, so that whatever else the machine does meanwhile hits all columns
alike, and ratios are taken within a round. The first round is cold and is reported apart.

Rich is imported where something is shown, so that the parts can be measured on a machine that does not have it.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import torch
import transformers

from mpic.errors import MPICError
from mpic.figure import save_png

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID

Row = dict[str, Any]
"""One line of a result. ``table`` names the table it is printed in; the other keys are its columns."""


class BenchFailed(MPICError):
    """A bench found something wrong: not slow, wrong."""

    code = "bench_failed"


@dataclass(frozen=True)
class Where:
    """Device and dtype that a bench runs with."""

    device: torch.device
    dtype: torch.dtype

    def synchronize(self) -> None:
        """Wait until the device has done what it was given."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        elif self.device.type == "mps":
            torch.mps.synchronize()


@dataclass
class Report:
    """What a bench found.

    Args:
        rows: everything measured.
        headline: the numbers that are compared over time, by name.
        notes: how it was measured; goes into the settings of the JSON.
        plot: draws into a matplotlib figure; None for no plot.
    """

    rows: list[Row]
    headline: dict[str, float]
    notes: dict[str, Any] = field(default_factory=dict)
    plot: Callable[[Any], None] | None = None


@dataclass(frozen=True)
class Bench:
    """An entry of the registry. ``wants`` says in words what each headline number should be; ``engine`` is the one it
    measures, in this process or (``in_process``) not; ``others`` has the same bench on another engine.
    ``on_cpu`` benches measure the CPU in float32, whatever other device there is."""

    name: str
    summary: str
    settings: type
    quick: dict[str, Any]
    wants: dict[str, str]
    run: Callable[[Any, Where, Ticker], Report]
    engine: str = "native"
    in_process: bool = True
    on_cpu: bool = False
    others: dict[str, Bench] = field(default_factory=dict)

    def on(self, engine: str) -> Bench | None:
        """The bench on an engine; None where there is none."""
        return self if engine == self.engine else self.others.get(engine)

    def configured(self, quick: bool = False, **changes: Any) -> Any:
        """The bench's settings: full, or the quick ones, with changes on top."""
        return replace(self.settings(), **{**(self.quick if quick else {}), **changes})


BENCHES: dict[str, Bench] = {}


def bench(
    name: str,
    summary: str,
    settings: type,
    quick: Mapping[str, Any],
    wants: Mapping[str, str],
    engine: str = "native",
    in_process: bool = True,
    on_cpu: bool = False,
) -> Callable[[Callable[[Any, Where, Ticker], Report]], Callable[[Any, Where, Ticker], Report]]:
    """Register a bench.

    Args:
        settings: a frozen dataclass whose defaults are the full size.
        quick: the fields that ``--quick`` makes smaller; the shape of the experiment stays.
        wants: headline name -> the goal in words.
        engine: what it measures; the native one is registered first.
        in_process: whether it runs in this process, where threads can be set.
        on_cpu: whether it always measures the CPU in float32.
    """
    unknown = set(quick) - {f.name for f in fields(settings)}
    if unknown:
        raise ValueError(f"bench {name}: no settings {sorted(unknown)}")

    def register(run: Callable[[Any, Where, Ticker], Report]) -> Callable[[Any, Where, Ticker], Report]:
        made = Bench(name, summary, settings, dict(quick), dict(wants), run, engine, in_process, on_cpu)
        if engine == "native":
            BENCHES[name] = made
        else:
            BENCHES[name].others[engine] = made
        return run

    return register


# ---- measuring


@dataclass
class Sample:
    """Repeated measurements of one column; ``cold`` is the first round, ``values`` the warm ones, in order."""

    cold: float
    values: list[float]

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    def row(self, unit: str = "ms") -> Row:
        """Cold, min, median and max as columns."""
        numbers = {"cold": self.cold, "min": min(self.values), "median": self.median, "max": max(self.values)}
        return {f"{k}_{unit}": round(v, 3) for k, v in numbers.items()}


def interleave(
    columns: Mapping[str, Callable[[int], float]], rounds: int, ticker: Ticker, cold: bool = True
) -> dict[str, Sample]:
    """Run every column once a round, starting with another one each time.

    Args:
        columns: each is called with the round's number and gives one measurement.
        rounds: warm rounds, at least one.
        cold: run a first round whose numbers are kept apart; False when the columns are known to be warm.
    """
    names = list(columns)
    values: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(rounds + cold):
        at = turn % len(names)
        for name in (*names[at:], *names[:at]):
            with ticker.step(name):
                values[name].append(columns[name](turn))
    return {name: Sample(v[0], v[1:] if cold else v) for name, v in values.items()}


def paired(numerator: Sample, denominator: Sample) -> float:
    """Median over rounds of the ratio within a round."""
    return statistics.median(a / b for a, b in zip(numerator.values, denominator.values, strict=True))


class Ticker:
    """A progress bar on stderr that counts measurements."""

    def __init__(self, console: Console | None = None, total: int | None = None) -> None:
        self._console = console
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        self._total = total

    def expect(self, measurements: int) -> None:
        """Announce how many more measurements will come."""
        self._total = (self._total or 0) + measurements
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, total=self._total)

    @contextmanager
    def step(self, label: str) -> Iterator[None]:
        """One measurement."""
        self.say(label)
        yield
        if self._progress is not None and self._task is not None:
            self._progress.advance(self._task)

    def say(self, label: str) -> None:
        """What is going on, beside the bar."""
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, description=label)

    def __enter__(self) -> Ticker:
        if self._console is not None:
            from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

            columns = (
                TextColumn("{task.description:32}"),
                BarColumn(),
                TextColumn("{task.completed:.0f}/{task.total}"),
            )
            self._progress = Progress(*columns, TimeElapsedColumn(), console=self._console, transient=True)
            self._task = self._progress.add_task("preparing", total=self._total)
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._progress is not None:
            self._progress.stop()


# ---- results


def machine(where: Where) -> str:
    """The machine in words, without names or paths."""
    memory = psutil.virtual_memory().total / 2**30
    parts = [
        f"{_cpu_model()}, {psutil.cpu_count(logical=True)} cores ({torch.backends.cpu.get_cpu_capability()})",
        f"{memory:.0f} GiB memory",
    ]
    if where.device.type == "cuda":
        parts.append(f"GPU {torch.cuda.get_device_name(where.device)}")
    parts.append(f"torch {torch.__version__}, transformers {transformers.__version__}")
    parts.append(f"{str(where.dtype).removeprefix('torch.')} on {where.device.type}")
    parts.append(f"{torch.get_num_threads()} threads")
    return "; ".join(parts)


def _cpu_model() -> str:
    try:
        with open("/proc/cpuinfo") as info:
            for line in info:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine() or "unknown CPU"


def as_json(entry: Bench, settings: Any, where: Where, report: Report) -> dict[str, Any]:
    """The result as it is written: bench, machine, settings, rows, headline."""
    return {
        "bench": entry.name,
        "machine": machine(where),
        "settings": {**asdict(settings), **report.notes},
        "rows": report.rows,
        "headline": {name: round(float(value), 4) for name, value in report.headline.items()},
    }


def write(path: Path, result: dict[str, Any]) -> None:
    """Write the JSON under a temporary name and rename it, so that a reader never sees half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(result, indent=2, default=str) + "\n")
    temporary.replace(path)


def save_plot(path: Path, report: Report) -> None:
    """The bench's plot, if it has one."""
    if report.plot is not None:
        save_png(path, report.plot, (8, 4.5), dpi=130)


def print_report(entry: Bench, report: Report, console: Console) -> None:
    """One table for every ``table`` of the rows, then the headline with its goals."""
    from rich.table import Table

    groups: dict[str, list[Row]] = {}
    for row in report.rows:
        groups.setdefault(row.get("table", entry.name), []).append(row)
    for title, rows in groups.items():
        columns = list(dict.fromkeys(key for row in rows for key in row if key != "table"))
        table = Table(title=title, title_justify="left")
        for column in columns:
            numeric = all(isinstance(row.get(column, 0), int | float) for row in rows)
            table.add_column(column.replace("_", " "), justify="right" if numeric else "left")
        for row in rows:
            table.add_row(*(_cell(row.get(column, "")) for column in columns))
        console.print(table, markup=False)
    table = Table("headline", "value", "goal", title=f"{entry.name}: {entry.summary}", title_justify="left")
    for name, value in report.headline.items():
        table.add_row(name, f"{value:.3f}", entry.wants.get(name, ""))
    console.print(table, markup=False)


def _cell(value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, float):
        return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:,.2f}"


def geometry(values: Sequence[int]) -> str:
    """Sizes for people: ``1k, 2k, 512``."""
    return ", ".join(f"{v // 1024}k" if v % 1024 == 0 else str(v) for v in values)
