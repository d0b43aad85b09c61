"""Limits the prompt rows of a step while answers stream, so that no stream pauses for long."""

from __future__ import annotations

SECONDS = 0.08
"""Time that a step may spend on prompts while answers stream beside them. On two cores it keeps the longest pause of a
stream under 250 ms, and costs about 5 % of the throughput of a full queue; twice as much costs nothing."""
LEAST = 256
"""Rows that a step may compute in any case. With fewer, reading the weights would take most of a large model's step."""
MEASURED = 16
"""Steps of fewer rows are not measured: most of their time does not depend on the number of rows."""
WEIGHT = 0.3
"""The weight of the newest step in the average."""


class StepPace:
    """Measures the speed of steps, and limits the rows of steps that delay streaming answers.

    Attributes:
        seconds_per_row: a moving average, or None before the first step that is long enough.
    """

    def __init__(self) -> None:
        self.seconds_per_row: float | None = None

    def measure(self, rows: int, seconds: float) -> None:
        """Record the time of a step."""
        if rows < MEASURED:
            return
        new = seconds / rows
        old = new if self.seconds_per_row is None else self.seconds_per_row
        self.seconds_per_row = old + WEIGHT * (new - old)

    def limit(self, budget: int) -> int:
        """Return how many rows of prompts a step may compute beside streaming answers, at most ``budget``."""
        fitting = int(SECONDS / self.seconds_per_row) if self.seconds_per_row else 0
        return min(budget, max(LEAST, fitting))
