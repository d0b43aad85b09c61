"""Tasks of ``mpic eval``: generated ones (``world``) and public formats read from local files (one module per format).

To add one: a file with a loader under ``@task(...)``, a line here, a row in ``tests/lab/test_tasks.py``.
"""

from mpic_lab.eval.tasks import (  # noqa: F401 - each registers itself
    dialogue,
    longbench,
    niah,
    prose,
    reading,
    scenes,
    world,
)
from mpic_lab.eval.tasks.base import TASKS, Options, Sample, TaskError, find

GRIDS = ("niah", "world-niah")
"""Tasks with ``questions`` of every length and depth."""

__all__ = ["GRIDS", "TASKS", "Options", "Sample", "TaskError", "find"]
