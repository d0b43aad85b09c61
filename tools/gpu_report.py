#!/usr/bin/env python3
"""Measures MPIC on a GPU with one command, on a bare machine, from a checkout that has not been installed.

    python3 tools/gpu_report.py --out gpu.jsonl            # everything, about 10 minutes on an H100
    python3 tools/gpu_report.py --out gpu.jsonl            # again: machine and ceilings, and what has not ended well
    python3 tools/gpu_report.py --sections selftest,decode --out gpu.jsonl
    python3 tools/gpu_report.py --device cpu               # tiny sizes, Triton's interpreter

Every row is a line of JSON in the file as soon as it is measured. A section that fails, hangs or crashes does not
affect the others. The exit status is 0 when the script has completed, whatever the sections found; see docs/gpu.md.
"""

from __future__ import annotations

import argparse
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = {"mpic": "mpic", "mpic.kernels": "kernels", "mpic.retriever": "retriever", "mpic.webui": "webui"}
FOLDERS |= {"mpic.data": "data", "mpic_lab": "lab"}
EACH_TIME = ("machine", "ceilings")
"""Sections that every run repeats: what the others are compared with."""


class Checkout(importlib.abc.MetaPathFinder):
    """An import finder that prefers the packages of this checkout to installed ones."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> object:
        folder = FOLDERS.get(name)
        if folder is None:
            return None
        start = ROOT / folder / "__init__.py"
        return importlib.util.spec_from_file_location(
            name, start, submodule_search_locations=[str(ROOT / folder)]
        )


# also in processes that a section's libraries start, which import this file under the second name
if __name__ in ("__main__", "__mp_main__"):
    sys.meta_path.insert(0, Checkout())


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, default=Path("gpu-report.jsonl"), help="the file of rows; added to"
    )
    parser.add_argument(
        "--sections", default="", help="only these, by name, also if they have ended well before"
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--quick", action="store_true", help="tiny sizes; on the CPU these are always used")
    parser.add_argument("--limit", type=float, default=1500, help="seconds for everything (1500)")
    parser.add_argument("--list", action="store_true", help="show the sections and end")
    parser.add_argument("--markdown", action="store_true", help="print the file's rows as a table and end")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--name", help=argparse.SUPPRESS)
    # on the monotonic clock, which processes share
    parser.add_argument("--ends", type=float, help=argparse.SUPPRESS)
    found = parser.parse_args(arguments)
    found.quick = found.quick or found.device == "cpu"
    return found


def chosen(names: str, file: Path) -> list:
    """Return the sections to run: the named ones, or all that have not succeeded in the file. Those about the machine
    run each time, since it may have changed.

    Raises:
        SystemExit: a name is unknown.
    """
    from mpic_lab.gpu import record
    from mpic_lab.gpu.sections import SECTIONS

    wanted = [name.strip() for name in names.split(",") if name.strip()]
    unknown = sorted(set(wanted) - {section.name for section in SECTIONS})
    if unknown:
        raise SystemExit(
            f"there are no sections {unknown}; there are {', '.join(section.name for section in SECTIONS)}"
        )
    if wanted:
        return [section for section in SECTIONS if section.name in wanted]
    ended = record.ends(record.read(file)).items()
    done = {name for name, end in ended if end["status"] == "ok"} - set(EACH_TIME)
    return [section for section in SECTIONS if section.name not in done]


def start(options: argparse.Namespace) -> None:
    """Write the facts about this run, and print what is missing.

    Raises:
        SystemExit: the file belongs to another device, GPU or size, and its rows could not be distinguished from this
            run's.
    """
    from mpic_lab.gpu import host, record, supervise
    from mpic_lab.gpu.sections import SECTIONS

    run = {"device": options.device, "quick": options.quick}
    lines, here = record.read(options.out), host.facts(options.device)
    if other := host.another_gpu(lines, here["gpu"]):
        raise SystemExit(f"{options.out} has rows of another GPU, {other}; choose another --out")
    for line in lines:
        if line.get("event") == "run" and {key: line.get(key) for key in run} != run:
            raise SystemExit(f"{options.out} has rows of another device or size; choose another --out")
    missing = sorted({package for section in SECTIONS for package in section.missing()})
    run = {
        "event": "run",
        **run,
        **here,
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "missing": missing,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    record.append(options.out, run)
    print(f"not installed here: {', '.join(missing) or 'nothing that a section needs'}")
    for section in SECTIONS:
        without = [package for package in section.missing()]
        if without:
            print(f"  {section.name} is left out: it needs {', '.join(without)}")
    print(f"rows: {options.out}; output of the sections' processes: {options.out}.log", flush=True)
    if options.device == "cuda" and supervise.installed("torch") and not Path("/dev/nvidiactl").exists():
        print("no NVIDIA driver is visible: sections that need the device will fail", flush=True)


def prepare(device: str) -> None:
    """Make the settings that must be in place before torch or Triton is imported."""
    if device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    from mpic_lab.gpu import record, supervise
    from mpic_lab.gpu.sections import SECTIONS

    prepare(options.device)
    log = options.out.with_name(options.out.name + ".log")
    if options.child:
        run = supervise.SectionRun(options.name, options.out, options.device, options.quick, options.ends)
        return supervise.child(options.child, run, log)
    if options.list:
        for section in SECTIONS:
            print(f"{section.name:10} at most {section.limit:4.0f} s  {section.summary}")
        return 0
    if options.markdown:
        print(record.markdown(record.read(options.out)))
        return 0
    start(options)
    fork = options.device == "cpu"
    if fork:
        warm_up()
    command = (sys.executable, str(Path(__file__).resolve()))
    say = lambda text: print(text, flush=True)
    supervisor = supervise.Supervisor(
        options.out, options.device, options.quick, options.limit, fork, command, say
    )
    try:
        supervisor.run(chosen(options.sections, options.out))
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from here")
        return 130
    finally:
        print("\n" + record.summary(record.read(options.out)), flush=True)
    return 0


def warm_up() -> None:
    """Import the modules that forked sections share. A section reports missing modules itself."""
    for name in ("mpic_lab.gpu.context", "mpic_lab.gpu.first_tokens", "mpic.library"):
        try:
            importlib.import_module(name)
        except Exception as error:
            print(f"{name} cannot be imported: {type(error).__name__}: {error}", flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
