"""How much memory the page pool gets when nobody says."""

from __future__ import annotations

import psutil
import torch

from mpic.errors import PoolTooSmall
from mpic.model.loaded import LoadedModel

PAGE_SIZE = 16
_SHARE = {"cuda": 0.85, "mps": 0.5, "cpu": 0.25}
_CAP_CPU = 8 << 30


def pool_pages(model: LoadedModel, pool_bytes: int = 0) -> int:
    """Pages of ``PAGE_SIZE`` tokens for ``pool_bytes``; 0 takes a share of what is free on the model's device, and no
    more than 64 full contexts, which is as much as the largest batch can use.

    Raises:
        PoolTooSmall: not one page fits.
    """
    page = PAGE_SIZE * model.shape.per_token * torch.empty(0, dtype=model.dtype).element_size()
    if pool_bytes:
        if pool_bytes < page:
            raise PoolTooSmall(f"a page of this model takes {page} bytes; the pool was given {pool_bytes}")
        return pool_bytes // page
    if model.device.type == "cuda":
        free = torch.cuda.mem_get_info(model.device)[0]
    else:
        free = psutil.virtual_memory().available
    budget = int(free * _SHARE.get(model.device.type, 0.25))
    if model.device.type == "cpu":
        budget = min(budget, _CAP_CPU)
    return max(1, min(budget // page, 64 * -(-model.context_length // PAGE_SIZE)))
