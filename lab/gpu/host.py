"""Describes the machine and the software of a report's run, so that runs in one file can be distinguished. This module
needs nothing but the standard library, so that a report can begin before torch is imported."""

from __future__ import annotations

import importlib.metadata
import shutil
import subprocess
from pathlib import Path
from typing import Any

from mpic_lab.gpu.record import Line


def facts(device: str) -> dict[str, Any]:
    """Return the GPU's name (None on the CPU, or if it cannot be queried), the checkout's commit and torch's
    version (None without torch)."""
    asked = ask("nvidia-smi", "--query-gpu=name", "--format=csv,noheader") if device == "cuda" else None
    return {"gpu": asked and asked.splitlines()[0], "commit": commit(), "torch": version("torch")}


def version(package: str) -> str | None:
    """Return the version of an installed package, None if it is not installed as a distribution."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def commit() -> str | None:
    """Return the commit of the checkout; None if git cannot say."""
    root = Path(__file__).resolve().parents[2]
    return ask("git", "-C", str(root), "describe", "--always", "--dirty")


def ask(*command: str) -> str | None:
    """Return the output of a program; None if it is missing, fails, or takes too long."""
    if shutil.which(command[0]) is None:
        return None
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None


def another_gpu(lines: list[Line], gpu: str | None) -> str | None:
    """Return the name of another GPU that a report's rows were measured on, None if there is none."""
    names = (line.get("gpu") for line in lines if line.get("event") == "run")
    return next((name for name in names if name and gpu and name != gpu), None)
