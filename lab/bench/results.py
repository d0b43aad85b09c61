"""Results of a bench: description of the machine, JSON, plot, tables.

Rich is imported only where something is shown, so that benches can be used on a machine without it.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import torch
import transformers

from mpic.kernels import instructions
from mpic.table import print_whole
from mpic_lab.bench.harness import Bench, BenchDevice, Report, Row
from mpic_lab.eval.processor import processor
from mpic_lab.figure import save_png

if TYPE_CHECKING:
    from rich.console import Console


def machine(placement: BenchDevice) -> str:
    """Return a description of the machine, without names or paths."""
    memory = psutil.virtual_memory().total / 2**30
    parts = [
        f"{processor()}, {psutil.cpu_count(logical=True)} cores ({_instructions()})",
        f"{memory:.0f} GiB memory",
    ]
    if placement.device.type == "cuda":
        parts.append(f"GPU {torch.cuda.get_device_name(placement.device)}")
    parts.append(f"torch {torch.__version__}, transformers {transformers.__version__}")
    parts.append(f"{str(placement.dtype).removeprefix('torch.')} on {placement.device.type}")
    parts.append(f"{torch.get_num_threads()} threads")
    return "; ".join(parts)


def _instructions() -> str:
    """Return the instructions that torch computes with on the CPU, and what it multiplies bfloat16 with there."""
    parts = [instructions.level()]
    if instructions.unit():
        parts.append("AMX")
    elif instructions.pairs():
        parts.append("AVX512 BF16")
    return ", ".join(parts)


def as_json(entry: Bench, settings: Any, placement: BenchDevice, report: Report) -> dict[str, Any]:
    """Return the result in the form of its file: bench, machine, settings, rows, headline."""
    return {
        "bench": entry.name,
        "machine": machine(placement),
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
    """Write the bench's plot, if it has one."""
    if report.plot is not None:
        save_png(path, report.plot, (8, 4.5), dpi=130)


def print_report(entry: Bench, report: Report, console: Console) -> None:
    """Print one table for every ``table`` of the rows, then the headline with its goals."""
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
        print_whole(table, console)
    table = Table("headline", "value", "goal", title=f"{entry.name}: {entry.summary}", title_justify="left")
    for name, value in report.headline.items():
        table.add_row(name, f"{value:.3f}", entry.wants.get(name, ""))
    print_whole(table, console)


def _cell(value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, float):
        return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:,.2f}"
