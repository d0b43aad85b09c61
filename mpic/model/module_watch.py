"""Notices when a model's modules are no longer what they were: hooks, replaced modules, weights that lie elsewhere.

Whoever reads weights past their modules has to see this before every use, so it takes about two microseconds a layer of
a decoder: it looks at the dictionaries of modules, which stay the same objects.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain, repeat
from operator import contains, getitem

import torch
from torch import nn
from torch.nn.modules import module as torch_module


class ModuleWatch:
    """Compares modules with what they were when this was made. Hooks that they had then do not count."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        found = list(modules)
        self._own = [vars(module) for module in found if "forward" not in vars(module)]
        self._children = [module._modules for module in found if module._modules]
        hooks = [one for m in found for one in (m._forward_pre_hooks, m._forward_hooks)]
        hooks += [torch_module._global_forward_pre_hooks, torch_module._global_forward_hooks]
        self._no_hooks, self._hooks = [h for h in hooks if not h], [h for h in hooks if h]
        self._counts = list(map(len, self._hooks))
        weights = [
            (module._parameters, name)
            for module in found
            for name, parameter in module._parameters.items()
            if parameter is not None
        ]
        self._of, self._names = [parameters for parameters, _ in weights], [name for _, name in weights]
        self._kept = [parameters[name].detach() for parameters, name in weights]
        """Keeps the memory, so that no other weight can come to lie at one of these addresses."""
        self._addresses, self._modules = self._places(), self._parts()

    def change(self) -> str:
        """Returns what has changed; empty where nothing has."""
        if any(self._no_hooks) or list(map(len, self._hooks)) != self._counts:
            return "hooks"
        if any(map(contains, self._own, repeat("forward"))):
            return "a forward that is not its class's"
        if self._parts() != self._modules:
            return "other modules"
        return "" if self._places() == self._addresses else "other weights"

    def _parts(self) -> list[int]:
        return list(map(id, chain.from_iterable(map(dict.values, self._children))))

    def _places(self) -> list[int]:
        return list(map(torch.Tensor.data_ptr, map(getitem, self._of, self._names)))
