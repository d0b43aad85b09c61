"""The staging ring of a CUDA device in the budget of host memory."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from mpic.config import Config, ConfigError
from mpic.kv.staging import staging_for

if TYPE_CHECKING:
    from mpic.library import Limits


def with_staging(config: Config, limits: Limits) -> tuple[Config, Limits]:
    """Settle the size of the ring that chunks are read through to a CUDA device, and take its bytes from the budget
    of chunks in host memory. Without such a budget (0) the ring is all there is.

    Returns:
        The configuration with the size that was chosen, and what is left for chunks.

    Raises:
        ConfigError: the ring takes all of the budget.
    """
    engine = config.engine
    size = staging_for(engine.staging_slots, engine.staging_slot_bytes, limits.host_bytes)
    if 0 < limits.host_bytes <= size.bytes:
        says = f"staging_slots x staging_slot_bytes ({size.slots} x {size.slot_bytes}) leave nothing"
        raise ConfigError(f"{says} of host_bytes = {limits.host_bytes} for chunks", param="host_bytes")
    engine = replace(engine, staging_slots=size.slots, staging_slot_bytes=size.slot_bytes)
    left = max(0, limits.host_bytes - size.bytes)
    return replace(config, engine=engine), replace(limits, host_bytes=left)
