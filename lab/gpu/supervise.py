"""Runs sections one after the other, each in a process of its own: an exception, a crash of the device or a hang ends
that section only, and its rows until then are in the file. This module needs only the standard library."""

from __future__ import annotations

import faulthandler
import importlib
import importlib.util
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from mpic_lab.gpu import record

POLL = 0.1
LEAST = 20.0
"""A section is not begun if fewer seconds are left than this or, if that is less, its limit."""
TAIL = 3000
"""Maximum characters of a process's last output that go into the file."""
STACKS = ("Timeout (", "Fatal Python error")
"""First words of a dump of all threads' stacks; each lists the innermost call first."""


@dataclass(frozen=True)
class Section:
    """A part of the report.

    Args:
        target: ``module:function``; the function takes a ``SectionRun``.
        limit: seconds after which the section's process is killed.
        needs: packages without which it cannot run.
    """

    name: str
    target: str
    limit: float
    summary: str
    needs: tuple[str, ...] = ()

    def missing(self) -> list[str]:
        return [package for package in self.needs if not installed(package)]


def installed(package: str) -> bool:
    """Return whether a package could be imported, without importing it."""
    try:
        return importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):
        return False


@dataclass
class SectionRun:
    """A section's run: its device and time, and the file its rows go to.

    Args:
        out: the report's file.
        device, quick: the requested device, and whether sizes are tiny.
        ends: ``time.monotonic`` at which the section's process is killed.
    """

    section: str
    out: Path
    device: str = "cuda"
    quick: bool = False
    ends: float = float("inf")
    began: float = field(default_factory=time.monotonic)

    def emit(self, row: dict[str, Any]) -> None:
        """Write a row at once; missing columns are empty."""
        blank = dict.fromkeys(record.COLUMNS)
        always = {"section": self.section, "seconds": round(time.monotonic() - self.began, 2)}
        record.append(self.out, {**blank, **row, **always})

    def row(self, measured: str, shape: str, how: str, value: Any, unit: str = "", **more: Any) -> None:
        """Write a row at once, given its columns by name."""
        self.emit({"measured": measured, "shape": shape, "with": how, "value": value, "unit": unit, **more})

    @property
    def left(self) -> float:
        """Seconds that are left for this section."""
        return self.ends - time.monotonic()


class _Process(Protocol):
    pid: int

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal, or None while it runs."""


class _Forked:
    """A child of ``os.fork``, polled as ``subprocess.Popen`` is."""

    def __init__(self, work: Callable[[], int]) -> None:
        self._code: int | None = None
        sys.stdout.flush()  # otherwise the child would write buffered output a second time
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            code = 70
            try:
                os.setsid()
                code = work()
            finally:
                os._exit(code)

    def poll(self) -> int | None:
        if self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self._code = os.waitstatus_to_exitcode(status)
        return self._code


class Supervisor:
    """Runs sections and records how they ended.

    Args:
        out: the report's file; the output of processes goes to ``out`` with ``.log``.
        limit: seconds for everything; a section that cannot begin within them is left out, with a note.
        fork: True if sections are forked from this process, which has imported their common modules. Only where no
            section uses CUDA, which does not survive a fork; otherwise every section is a new interpreter.
        command: starts a new interpreter for one section; ``child`` is called in it.
        say: function that prints a line.
    """

    def __init__(
        self,
        out: Path,
        device: str,
        quick: bool,
        limit: float,
        fork: bool,
        command: Sequence[str] = (),
        say: Callable[[str], None] = print,
    ) -> None:
        self._out, self._device, self._quick, self._fork = out, device, quick, fork
        self._command, self._say = list(command), say
        self._ends = time.monotonic() + limit
        self._log = out.with_name(out.name + ".log")
        self._shown = out.stat().st_size if out.exists() else 0

    def run(self, sections: Sequence[Section]) -> None:
        """Run all sections in order. A failure in one does not prevent the next."""
        for section in sections:
            missing = section.missing()
            left = self._ends - time.monotonic()
            if missing:
                self._end(section, "left out", 0.0, f"needs {', '.join(missing)}, not installed here")
            elif left < min(section.limit, LEAST):
                self._end(section, "left out", 0.0, "the time for the whole report is used up")
            else:
                self._one(section, min(section.limit, left))

    def _one(self, section: Section, limit: float) -> None:
        self._say(f"== {section.name}: {section.summary} (at most {limit:.0f} s)")
        record.append(self._out, {"event": "begin", "section": section.name, "limit": round(limit)})
        logged, began = self._size(self._log), time.monotonic()
        run = SectionRun(section.name, self._out, self._device, self._quick, began + limit)
        process = self._start(section, run)
        code = None
        try:
            while code is None and time.monotonic() < began + limit:
                time.sleep(POLL)
                code = process.poll()
                self._show()
        finally:
            _kill(process)  # also ends processes that it started and left behind
            if code is None:  # the limit is reached, or this process is being ended
                while process.poll() is None:
                    time.sleep(POLL / 10)
        self._show()
        seconds = time.monotonic() - began
        if code is None:
            self._end(section, "killed at its limit", seconds, self._printed(logged))
        elif code < 0:
            self._end(section, f"ended by {signal.Signals(-code).name}", seconds, self._printed(logged))
        elif code:
            self._end(section, "failed", seconds, self._printed(logged))
        else:
            self._end(section, "ok", seconds)

    def _start(self, section: Section, run: SectionRun) -> _Process:
        if self._fork:
            return _Forked(lambda: child(section.target, run, self._log))
        arguments = [*self._command, "--child", section.target, "--name", section.name]
        arguments += ["--out", str(self._out), "--device", self._device, "--ends", str(run.ends)]
        arguments += ["--quick"] if self._quick else []
        with self._log.open("ab") as log:  # also for errors before ``child`` runs
            return subprocess.Popen(arguments, stdout=log, stderr=log, start_new_session=True)

    def _end(self, section: Section, status: str, seconds: float, error: str = "") -> None:
        line = {"event": "end", "section": section.name, "status": status, "seconds": round(seconds, 1)}
        record.append(self._out, line | ({"error": error} if error else {}))
        self._show()
        last = error.strip().splitlines()
        self._say(f"-- {section.name}: {status}, {seconds:.0f} s" + (f": {last[-1]}" if last else ""))

    def _show(self) -> None:
        """Show the rows that have come since the last call."""
        with self._out.open("rb") as file:
            file.seek(self._shown)
            new = file.read()
        whole = new[: new.rfind(b"\n") + 1]
        self._shown += len(whole)
        for line in record.lines_of(whole):
            if "event" not in line:
                self._say(f"   {record.shown(line)}")

    def _printed(self, since: int) -> str:
        """Return the last output of the section's process."""
        with self._log.open("rb") as file:
            file.seek(since)
            text = file.read().decode(errors="replace").strip()
        dump = max(text.rfind(start) for start in STACKS)
        return text[dump:][: 3 * TAIL] if dump >= 0 else text[-TAIL:]

    @staticmethod
    def _size(path: Path) -> int:
        return path.stat().st_size if path.exists() else 0


def _kill(process: _Process) -> None:
    """End the process group of the section, which has only its own processes, because it leads its own session."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    if process.poll() is None:  # it may not lead its session yet
        with suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)


def child(target: str, run: SectionRun, log: Path) -> int:
    """Run a section in its own process, with all output in the log; return the exit code.

    Shortly before the limit every thread's stack is written, so that a hang shows where it is.
    """
    fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    faulthandler.enable(file=fd)
    faulthandler.dump_traceback_later(max(0.2, run.left - max(0.5, run.left / 50)), file=fd)
    try:
        module, name = target.split(":")
        getattr(importlib.import_module(module), name)(run)
    except BaseException:
        os.write(fd, traceback.format_exc().encode())
        return 1
    finally:
        faulthandler.cancel_dump_traceback_later()
        with suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
    return 0
