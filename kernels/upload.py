"""Uploads the small tables of a step to the device in one copy, without waiting for it."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

_ALIGNED = 16
"""Bytes that every table begins at a multiple of."""


def upload(arrays: Mapping[str, np.ndarray], device: torch.device) -> dict[str, torch.Tensor]:
    """Copy tables to the device, with the same shapes and types.

    On CUDA the copy comes from pinned memory, which torch keeps until it is done, so that the host does not wait. On
    the CPU the tables are the arrays.
    """
    if device.type == "cpu":
        return {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items()}
    dense = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    ends = np.cumsum([0, *(-(-array.nbytes // _ALIGNED) * _ALIGNED + _ALIGNED for array in dense.values())])
    buffer = staging(int(ends[-1]), device)
    host = buffer.numpy()
    for array, begin in zip(dense.values(), ends):
        host[begin : begin + array.nbytes] = array.reshape(-1).view(np.uint8)
    on_device = copied(buffer, device)
    tables = {}
    for (name, array), begin in zip(dense.items(), ends):
        dtype = torch.from_numpy(array[:0]).dtype
        part = on_device[begin : begin + max(array.nbytes, _ALIGNED)].view(dtype)
        tables[name] = part[: array.size].view(array.shape)
    return tables


def send(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy host memory to the device, without waiting for the copy (``upload``)."""
    if device.type == "cpu" or tensor.device == device:
        return tensor
    buffer = staging(tensor.nbytes, device).view(tensor.dtype).view(tensor.shape)
    return copied(buffer.copy_(tensor), device)


def staging(size: int, device: torch.device) -> torch.Tensor:
    """Return host memory of this many bytes, from which the device can copy while the host continues."""
    return torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")


def copied(buffer: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a copy of a ``staging`` buffer on the device, which is made when the device gets to it."""
    return buffer.to(device, non_blocking=True)
