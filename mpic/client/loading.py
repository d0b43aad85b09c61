"""The progress that ``MPIC.local()`` shows while it loads."""

from __future__ import annotations

import sys
from collections.abc import Callable

StageCallback = Callable[[str], None]
"""Called with each stage as it begins, such as ``loading the model``, and with ``ready`` at the end."""


def teller(progress: StageCallback | bool | None) -> StageCallback:
    """Return the function that is called with every stage.

    Args:
        progress: a function; True writes to stderr, False shows nothing; None writes to stderr in a terminal and in a
            notebook.
    """
    if callable(progress):
        return progress
    if progress is None:
        progress = sys.stderr.isatty() or "ipykernel" in sys.modules
    return _write if progress else lambda stage: None


def _write(stage: str) -> None:
    print(f"mpic: {stage}", file=sys.stderr, flush=True)
