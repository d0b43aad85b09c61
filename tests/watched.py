"""Records the files below a folder that a process opens."""

from __future__ import annotations

import builtins
import io
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def opened(folder: Path) -> Iterator[list[str]]:
    """Yield the list of files below a folder that this process opens inside the block."""
    seen: list[str] = []

    def told(real: Callable) -> Callable:
        def call(path: Any, *args: Any, **options: Any) -> Any:
            if not isinstance(path, int) and os.fsdecode(path).startswith(str(folder)):
                seen.append(os.fsdecode(path))
            return real(path, *args, **options)

        return call

    real = [(module, module.open) for module in (builtins, io, os)]
    for module, function in real:
        module.open = told(function)
    try:
        yield seen
    finally:
        for module, function in real:
            module.open = function
