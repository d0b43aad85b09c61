"""The processor's name. The standard library is all this needs."""

from __future__ import annotations

import platform


def processor() -> str:
    """Return the model of the CPU, or "unknown" where the system does not tell."""
    try:
        with open("/proc/cpuinfo") as info:
            for line in info:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine() or "unknown"
