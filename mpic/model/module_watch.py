"""Notices when a model's modules are no longer what they were: hooks, replaced modules, weights that lie elsewhere.

Whoever reads weights past their modules has to see this before every use, so it takes some microseconds for a hundred
modules.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

from torch import nn
from torch.nn.modules import module as torch_module


class ModuleWatch:
    """Compares modules with what they were when this was made. Hooks that they had then do not count."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        found = list(modules)
        self._own = [vars(module) for module in found]
        self._children = [module._modules for module in found]
        self._parameters = [p for m in found for p in m._parameters.values() if p is not None]
        self._named = [module._parameters for module in found]
        self._hooks = [one for m in found for one in (m._forward_pre_hooks, m._forward_hooks)]
        self._hooks += [torch_module._global_forward_pre_hooks, torch_module._global_forward_hooks]
        self._before = self._state()

    def change(self) -> str:
        """Returns what has changed; empty where nothing has."""
        now = self._state()
        return next((what for what, one in now.items() if one != self._before[what]), "")

    def _state(self) -> dict[str, object]:
        return {
            "hooks": sum(map(len, self._hooks)),
            "forwards that others have put in place of a module's": sum(["forward" in own for own in self._own]),
            "other modules": list(map(id, chain.from_iterable(map(dict.values, self._children)))),
            "other weights": list(map(id, chain.from_iterable(map(dict.values, self._named)))),
            "weights that lie elsewhere": [parameter.data_ptr() for parameter in self._parameters],
        }
