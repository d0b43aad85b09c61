"""Checkpoints of a run of several workers, which are either complete or absent, whenever the run is killed.

Every worker writes a file of its own (weights, and its share of the optimizers' state). `checkpoint.json` names the
files of one step and is replaced only when all of them exist; then the files of earlier steps are deleted, and no
others in the folder.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mpic.config import ConfigError

INDEX = "checkpoint.json"
SAME = ("start", "init", "seed", "tokens", "generation")
"""Settings that a resumed run must share with the original run."""
_OWN = re.compile(r"checkpoint-[a-z]+-\d+-(mid|end)-\d+\.(pt|tmp)")
"""The names of workers' files, finished or not."""
_BEFORE = {"generation": 1}
"""Settings of runs whose checkpoints are older than the setting."""


def check(out: Path, settings: dict[str, Any], world: int, resume: bool) -> None:
    """Checks, before the workers start, that a run may begin or go on.

    Raises:
        ConfigError: a checkpoint exists but is not to be resumed, or is of another run; or none exists to resume.
    """
    before = None
    if (out / INDEX).exists():
        index = json.loads((out / INDEX).read_text())
        before = {k: index["settings"].get(k, _BEFORE.get(k)) for k in SAME} | {
            "workers": len(index["files"])
        }
    may_start(out, before, {k: settings[k] for k in SAME} | {"workers": world}, resume)


def may_start(out: Path, before: dict[str, Any] | None, mine: dict[str, Any], resume: bool) -> None:
    """Checks whether a run may begin, or go on, in a folder.

    Args:
        before: settings of the run whose checkpoint exists; None without a checkpoint.
        mine: settings of this run; both have what a resumed run must share with the original one.

    Raises:
        ConfigError: see ``check``.
    """
    if before is None:
        if resume:
            raise ConfigError(f"nothing to resume in {out}: there is no checkpoint", param="resume")
        return
    if not resume:
        message = (
            f"{out} holds the checkpoint of an earlier run: --resume continues it, another --out starts anew"
        )
        raise ConfigError(message, param="out")
    differs = [k for k, value in mine.items() if before.get(k) != value]
    if differs:
        raise ConfigError(
            f"the run in {out} has other settings than these: {', '.join(differs)}", param="resume"
        )


def save(out: Path, rank: int, settings: dict[str, Any], state: dict[str, Any]) -> None:
    """Saves a worker's state; all workers call it at the same step. `state` has "stage", "step", "finished" (names of
    stages)."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    label = f"{state['stage']}-{state['step']}-{'end' if state['stage'] in state['finished'] else 'mid'}"
    files = [f"checkpoint-{label}-{worker}.pt" for worker in range(world)]
    temporary = (out / files[rank]).with_suffix(".tmp")
    torch.save(state, temporary)
    temporary.replace(out / files[rank])
    _meet()
    if rank == 0:
        temporary = out / f"{INDEX}.tmp"
        temporary.write_text(json.dumps({"files": files, "settings": settings}))
        temporary.replace(out / INDEX)
        # by their form, because a run that was killed leaves some that no index names, and others may use this folder
        for old in out.glob("checkpoint-*"):
            if _OWN.fullmatch(old.name) and old.name not in files and old.is_file():
                old.unlink()
    _meet()


def load(out: Path, rank: int, device: torch.device) -> dict[str, Any]:
    """Returns a worker's state, as it was saved."""
    name = json.loads((out / INDEX).read_text())["files"][rank]
    return torch.load(out / name, map_location=device, weights_only=True)


def _meet() -> None:
    if dist.is_initialized():
        dist.barrier()
