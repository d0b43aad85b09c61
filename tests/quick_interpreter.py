"""Triton's interpreter prepares Triton's whole language at every launch, and again at every call of a function inside a
kernel; in tests it does so once for each module of kernels."""

from __future__ import annotations

from collections.abc import Callable

from triton.runtime import interpreter


def prepare_once() -> None:
    """Make what the interpreter puts in place of the language stay in place until the process ends."""
    prepare, prepared = interpreter._patch_lang, set()

    def once(function: Callable) -> interpreter._LangPatchScope:
        module = function.__globals__["__name__"]
        if module not in prepared:
            prepare(function)
            prepared.add(module)
        return interpreter._LangPatchScope()  # which has changed nothing, and so restores nothing

    interpreter._patch_lang = once
