"""The context that sections share: device and dtype, sizes, measured ceilings, checks and models."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from mpic_lab.bench.harness import BenchDevice
from mpic_lab.gpu import record
from mpic_lab.gpu.models import LoadedModel, ModelShape, self_test
from mpic_lab.gpu.roofline import Ceilings, Cost, Costs, against
from mpic_lab.gpu.sizes import FULL, QUICK, Sizes
from mpic_lab.gpu.supervise import SectionRun


@dataclass(frozen=True)
class Context:
    """A section's view of the report."""

    run: SectionRun

    @cached_property
    def placement(self) -> BenchDevice:
        """The device, and the dtype, which is bf16 on CUDA.

        Raises:
            ModelRefused: there is no CUDA device.
        """
        from mpic.model.load import choose_device

        device = choose_device(self.run.device)
        if device.type == "cuda":
            torch.cuda.init()
            torch.cuda.set_device(device.index or 0)
        return BenchDevice(device, torch.bfloat16 if device.type == "cuda" else torch.float32)

    @property
    def sizes(self) -> Sizes:
        return QUICK if self.run.quick else FULL

    @cached_property
    def top(self) -> Ceilings | None:
        """The ceilings in the report's file; None when they have not been measured."""
        found = {
            row["ceiling"]: row["rate"]
            for row in record.latest(record.read(self.run.out))
            if "ceiling" in row
        }
        return Ceilings(**found) if {"copy", "matmul"} <= set(found) else None

    @cached_property
    def attention(self) -> str:
        """The attention of models: Triton, unless the section of self-tests has found it wrong on this device."""
        lines = record.read(self.run.out)
        end = record.ends(lines).get("selftest", {"status": "ok"})
        wrong = any(
            row["section"] == "selftest" and row["with"] == "triton" and row.get("ok") is False
            for row in record.latest(lines)
        )
        return "auto" if wrong or end["status"] not in ("ok", "left out") else "triton"

    def model(self, model: ModelShape) -> tuple[LoadedModel, Costs]:
        """Return a model with random weights on the device, self-tested as every model is when it is loaded."""
        loaded = model.build(self.placement)
        loaded.choose_attention(self.attention)
        error = self_test(loaded)
        self.run.row(
            f"runs, {model.name}", "attention", loaded.info.attention, round(error, 6), "relative error"
        )
        return loaded, Costs(loaded.model, loaded.dtype)

    def timed(
        self, measured: str, shape: str, how: str, taken: float, cost: Cost, unit: str = "ms", **more: Any
    ) -> float | None:
        """Write a row with a time, given in seconds and shown in ``unit`` (ms or us), and the roofline of its cost.
        Return the ratio of the time to the roofline, None when that is not known."""
        value = taken * {"ms": 1e3, "us": 1e6}[unit]
        return self.rate(measured, shape, how, value, taken, cost, unit, **more)

    def rate(
        self,
        measured: str,
        shape: str,
        how: str,
        value: float,
        taken: float,
        cost: Cost,
        unit: str,
        **more: Any,
    ) -> float | None:
        """Write a row with the rate of work that took ``taken`` seconds, and the roofline of its cost; see
        ``timed``."""
        roofline = against(self.top, cost, taken, value, unit)
        self.run.row(measured, shape, how, round(value, 4), unit, **roofline, **more)
        return roofline["ratio"]

    def check(
        self, measured: str, shape: str, how: str, work: Callable[[], float], limit: float, unit: str
    ) -> bool:
        """Write a row that says whether an error is within its limit. An exception becomes a row, too, and is not
        raised.

        Args:
            work: computes the error.
        """
        try:
            error = work()
        except Exception:
            self.run.row(measured, shape, how, None, unit, ok=False, error=traceback.format_exc()[-1500:])
            return False
        ok = error <= limit  # also fails for NaN
        self.run.row(measured, shape, how, float(f"{error:.3g}"), unit, limit=limit, ok=ok)
        return ok

    def attempt(self, measured: str, shape: str, work: Callable[[], None]) -> None:
        """Run work that writes rows. An exception becomes the row of a failed check, and the next measurements still
        run."""
        try:
            work()
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            trace = traceback.format_exc()[-1500:]
            self.run.row(measured, shape, "failed", None, "", why=why, error=trace, ok=False)

    def left_out(self, measured: str, shape: str, why: str) -> None:
        self.run.row(measured, shape, "left out", None, "", why=why)

    def free(self) -> float:
        """Return the bytes of device memory that are free; unlimited on the CPU, where sizes are tiny."""
        if self.placement.device.type != "cuda":
            return float("inf")
        torch.cuda.empty_cache()
        return float(torch.cuda.mem_get_info(self.placement.device)[0])
