"""The harness of all benches: registry, settings, paired measurement.

A bench is a function ``(settings, placement, ticker) -> Report``. It measures its columns *interleaved*: every round
runs each column once, in an order of its own (``rotated``), so that other load on the machine affects all columns
alike, and ratios are taken within a round. The first round is cold and is reported apart.

Rich is imported only where something is shown, so that measurements also run on a machine without it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from mpic.errors import MPICError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID

Column = TypeVar("Column")
BenchFunction = Callable[[Any, "BenchDevice", "Ticker"], "Report"]
"""A bench's function of its settings."""
Row = dict[str, Any]
"""One line of a result. ``table`` names the table it is printed in; the other keys are its columns."""


class BenchFailed(MPICError):
    """A bench has found a wrong result, so its times mean nothing."""

    code = "bench_failed"


@dataclass(frozen=True)
class BenchDevice:
    """Device and dtype that a bench runs with."""

    device: torch.device
    dtype: torch.dtype

    def synchronize(self) -> None:
        """Wait until the device has finished its work."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        elif self.device.type == "mps":
            torch.mps.synchronize()


@dataclass
class Report:
    """The results of a bench.

    Args:
        rows: all measurements.
        headline: the numbers that are compared over time, by name.
        notes: description of the measurement, which becomes part of the settings in the JSON.
        plot: function that draws into a matplotlib figure; None for no plot.
    """

    rows: list[Row]
    headline: dict[str, float]
    notes: dict[str, Any] = field(default_factory=dict)
    plot: Callable[[Any], None] | None = None


@dataclass(frozen=True)
class Bench:
    """An entry of the registry.

    Args:
        settings: a frozen dataclass whose defaults are the full size.
        quick: the fields that ``--quick`` makes smaller; the shape of the experiment stays.
        wants: the goal in words for each headline.
        engine: the engine it measures; the native one is registered first and has the others in ``others``.
        in_process: True if it runs in this process, where the number of threads can be set.
        on_cpu: True if it always measures the CPU, even if there is another device, and only in ``dtypes``.
        dtypes: the dtypes measured by a bench that always runs on the CPU.
        sizes: the fields that ``--size NAME`` changes; the first size changes none. Empty: it has one size.
        cases: short names of the parts that ``--only`` selects, for settings with a field ``only``. The rows of a case
            have a table of their own.
        draw: function that draws the rows of a result into a matplotlib figure, for a bench with cases.
        headline: function that returns the headline of all rows, for a bench whose headline compares its cases; None:
            each case has headline numbers of its own.
    """

    name: str
    summary: str
    settings: type
    quick: Mapping[str, Any]
    wants: Mapping[str, str]
    run: BenchFunction
    engine: str = "native"
    in_process: bool = True
    on_cpu: bool = False
    dtypes: Sequence[str] = ("float32",)
    sizes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    cases: Sequence[str] = ()
    draw: Callable[[Any, Sequence[Row]], None] | None = None
    headline: Callable[[Sequence[Row]], dict[str, float]] | None = None
    others: dict[str, Bench] = field(default_factory=dict)

    def on(self, engine: str) -> Bench | None:
        """Return the bench for an engine, or None if it does not measure that engine."""
        return self if engine == self.engine else self.others.get(engine)

    def configured(self, quick: bool = False, size: str | None = None, **changes: Any) -> Any:
        """Return the bench's settings: full, or those of a size, then the quick ones, with changes on top."""
        sized = self.sizes[size] if size else {}
        return replace(self.settings(), **{**sized, **(self.quick if quick else {}), **changes})


BENCHES: dict[str, Bench] = {}


def bench(
    name: str,
    summary: str,
    settings: type,
    quick: Mapping[str, Any],
    wants: Mapping[str, str],
    **options: Any,
) -> Callable[[BenchFunction], BenchFunction]:
    """Register a bench; the arguments are those of ``Bench``.

    Raises:
        ValueError: ``quick`` names a field that the settings do not have.
    """
    unknown = set(quick) - {f.name for f in fields(settings)}
    if unknown:
        raise ValueError(f"bench {name}: no settings {sorted(unknown)}")

    def register(run: BenchFunction) -> BenchFunction:
        made = Bench(name, summary, settings, quick, wants, run, **options)
        entries = BENCHES if made.engine == "native" else BENCHES[name].others
        entries[name if made.engine == "native" else made.engine] = made
        return run

    return register


# ---- measuring


@dataclass
class Series:
    """Repeated measurements of one column; ``cold`` is the first round, ``values`` the warm ones, in order."""

    cold: float
    values: list[float]

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    def row(self, unit: str = "ms") -> Row:
        """Return cold, min, median and max as columns."""
        numbers = {"cold": self.cold, "min": min(self.values), "median": self.median, "max": max(self.values)}
        return {f"{k}_{unit}": round(v, 3) for k, v in numbers.items()}


def interleave(
    columns: Mapping[str, Callable[[], float]], rounds: int, ticker: Ticker, cold: bool = True
) -> dict[str, Series]:
    """Run every column once per round, in the orders of ``rotated``.

    Args:
        columns: each call makes one measurement.
        rounds: warm rounds, at least one.
        cold: run a first round whose numbers are kept apart; False when the columns are known to be warm.
    """
    names = list(columns)
    values: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(rounds + cold):
        for name in rotated(names, turn):
            with ticker.step(name):
                values[name].append(columns[name]())
    return {name: Series(v[0], v[1:] if cold else v) for name, v in values.items()}


def rotated(columns: Sequence[Column], turn: int) -> list[Column]:
    """Return the columns in the order of a round, by a balanced Latin square (Williams, Experimental designs balanced
    for the estimation of residual effects of treatments, 1949): over as many rounds as there are columns, or twice as
    many of an odd number, each column takes each place, and follows each other column, equally often, so that
    after-effects of one column hit all others alike."""
    count = len(columns)
    steps = [(place + 1) // 2 * (1 if place % 2 else -1) for place in range(count)]
    order = [columns[(turn + step) % count] for step in steps]
    return order[::-1] if count % 2 and turn // count % 2 else order


def median_seconds(
    work: Callable[[], Any], placement: BenchDevice, repeats: int, before: Callable[[], Any] = lambda: None
) -> float:
    """Return the median seconds of ``repeats`` runs. On CUDA two warm-up runs do not count, and time is taken by
    events, with a cold cache when ``before`` clears it."""
    on_cuda = placement.device.type == "cuda"
    for _ in range(2 if on_cuda else 0):
        work()
    taken = []
    for _ in range(repeats):
        before()
        if on_cuda:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            work()
            end.record()
            end.synchronize()
            taken.append(start.elapsed_time(end) / 1e3)
        else:
            began = time.perf_counter()
            work()
            taken.append(time.perf_counter() - began)
    return statistics.median_high(taken)


def paired(numerator: Series, denominator: Series) -> float:
    """Return the median over rounds of the ratio within a round."""
    return statistics.median(a / b for a, b in zip(numerator.values, denominator.values, strict=True))


class Ticker:
    """A progress bar that counts measurements; without a console it shows nothing."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        self._total = 0

    def _update(self, **changes: Any) -> None:
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, **changes)

    def expect(self, measurements: int) -> None:
        """Announce how many more measurements will come."""
        self._total += measurements
        self._update(total=self._total)

    @contextmanager
    def step(self, label: str) -> Iterator[None]:
        """Count the work inside the block as one measurement."""
        self.say(label)
        yield
        self._update(advance=1)

    def say(self, label: str) -> None:
        """Show a text beside the bar."""
        self._update(description=label)

    def __enter__(self) -> Ticker:
        if self._console is not None:
            from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

            columns = (
                TextColumn("{task.description:32}"),
                BarColumn(),
                TextColumn("{task.completed:.0f}/{task.total}"),
            )
            self._progress = Progress(*columns, TimeElapsedColumn(), console=self._console, transient=True)
            self._task = self._progress.add_task("preparing", total=self._total or None)
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._progress is not None:
            self._progress.stop()
