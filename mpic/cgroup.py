"""The memory limits of a container or a systemd unit (Linux, cgroup v2), which the system's free memory does not
reflect."""

from __future__ import annotations

import math
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")


def available() -> float:
    """Return the bytes that the groups of this process may still take, infinity without limits.

    Cached pages of files that nobody uses count as free, because the kernel drops them when it needs memory.
    """
    return min((_left(group) for group in _groups()), default=math.inf)


def _groups() -> list[Path]:
    """Return the folders of the process's group and of those around it: every one of them may have a limit."""
    try:
        lines = OWN.read_text().splitlines()
    except OSError:
        return []
    own = next((line[3:].strip("/") for line in lines if line.startswith("0::")), None)
    if own is None:
        return []
    inner = Path(own)
    return [ROOT / inner, *(ROOT / parent for parent in inner.parents)]


def _left(group: Path) -> float:
    try:
        most = (group / "memory.max").read_text().strip()
        if most == "max":
            return math.inf
        used = int((group / "memory.current").read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        return max(0, int(most) - used + int(stat.get("inactive_file", 0)))
    except (OSError, ValueError):  # no such group in this namespace, or no memory controller
        return math.inf
