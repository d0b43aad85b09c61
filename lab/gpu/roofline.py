"""The measured ceilings of a device, and the least time that a piece of work takes on it.

The roofline of a piece of work is the larger of its operations over the rate of a matrix product, its bytes over the
rate of a copy, and its bytes on the bus over the rate of the bus. Operations and bytes are counted from the model's
shape and the engine's reports; every weight, key and value is counted once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from mpic.engine.base import GenerationUsage
from mpic_lab.bench.harness import BenchDevice, Row, median_seconds
from mpic_lab.eval.flops import Flops


@dataclass(frozen=True)
class Cost:
    """The cost of work: operations, bytes of device memory read and written, and bytes that cross the bus."""

    flops: float = 0.0
    bytes: float = 0.0
    bus: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.flops + other.flops, self.bytes + other.bytes, self.bus + other.bus)


@dataclass(frozen=True)
class Ceilings:
    """The device's rates in this run, per second: bytes of a copy (read plus written), operations of a matrix
    product, bytes from pinned host memory to the device and back."""

    copy: float
    matmul: float
    to_device: float = math.inf
    to_host: float = math.inf

    def parts(self, cost: Cost) -> dict[str, float]:
        """Return the minimum seconds for each resource."""
        return {
            "operations": cost.flops / self.matmul,
            "memory": cost.bytes / self.copy,
            "bus": cost.bus / self.to_device,
        }

    def seconds(self, cost: Cost) -> float:
        """Return the seconds below which the work cannot be done."""
        return max(self.parts(cost).values())


def against(top: Ceilings | None, cost: Cost, taken: float, value: float, unit: str) -> Row:
    """Return the columns that set a measurement beside its roofline.

    Args:
        top: None when the ceilings were not measured; then there is no prediction.
        taken: the measured time in seconds.
        value, unit: the value in the row; a rate's prediction is a rate.
    """
    if top is None:
        return {"predicted": None, "ratio": None, "bound": "no ceilings were measured"}
    parts = top.parts(cost)
    least = max(parts.values())
    if not least or not taken:
        return {"predicted": None, "ratio": None, "bound": "nothing was counted"}
    predicted = value * least / taken if not unit.endswith("/s") else value * taken / least
    return {
        "predicted": float(f"{predicted:.4g}"),
        "ratio": float(f"{taken / least:.4g}"),
        "bound": max(parts, key=parts.__getitem__),
    }


class Costs:
    """Counts the work of one model."""

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        self._flops = Flops(model)
        size, config = dtype.itemsize, model.config.get_text_config()
        self.weights = (self._flops.layers * self._flops.layer + self._flops.head) / 2 * size
        """Bytes of the linear layers and of the output projection, which every step reads."""
        dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.token = config.num_hidden_layers * 2 * config.num_key_value_heads * dim * size
        """Bytes of a token's keys and values in all layers."""

    def prefill(self, usage: GenerationUsage) -> Cost:
        """Return the cost of a request's prefill in as few steps as possible."""
        flops = self._flops.of(usage)
        return Cost(flops, self.weights + self.token * (usage.prompt_tokens + usage.computed))

    def compiled(self, tokens: int) -> Cost:
        """Return the cost of compiling a chunk alone."""
        f, pairs = self._flops, tokens * (tokens + 1) / 2
        return Cost(f.layers * (f.layer * tokens + f.pair * pairs), self.weights + self.token * tokens)

    def step(self, batch: int, context: int, unique: int) -> Cost:
        """Return the cost of a decoding step.

        Args:
            context: tokens that each row sees.
            unique: tokens that the batch sees in all, shared ones counted once.
        """
        f = self._flops
        flops = batch * (f.layers * (f.layer + f.pair * context) + f.head)
        return Cost(flops, self.weights + self.token * (unique + batch))


def ceilings(placement: BenchDevice, megabytes: int, side: int, repeats: int, bus: bool = False) -> Ceilings:
    """Measure the device.

    Args:
        megabytes: size of the copy.
        side: size of the square matrices.
        bus: True also measures copies from and to pinned host memory.
    """
    halves = torch.ones(2, megabytes << 20, dtype=torch.uint8, device=placement.device)
    copied = median_seconds(lambda: halves[0].copy_(halves[1]), placement, repeats)
    a = torch.randn(side, side, dtype=placement.dtype, device=placement.device)
    product = torch.empty_like(a)
    multiplied = median_seconds(lambda: torch.mm(a, a, out=product), placement, repeats)
    rates: dict[str, Any] = {}
    if bus:
        size = min(megabytes, 512) << 20
        host = torch.ones(size, dtype=torch.uint8, pin_memory=placement.device.type == "cuda")
        on_device = halves[0][:size]
        rates["to_device"] = size / median_seconds(
            lambda: on_device.copy_(host, non_blocking=True), placement, repeats
        )
        rates["to_host"] = size / median_seconds(
            lambda: host.copy_(on_device, non_blocking=True), placement, repeats
        )
    return Ceilings(2 * (megabytes << 20) / copied, 2 * side**3 / multiplied, **rates)
