"""Finds Python code that comes with a model: the classes and files that its folder asks transformers to run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers.utils import cached_file

_CONFIGURATIONS = (
    "config.json",
    "tokenizer_config.json",
    "processor_config.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
)
"""Files of a model in which ``auto_map`` names classes of its own."""
_GENERATE = "custom_generate/generate.py"


def own_code(path: str) -> list[str]:
    """Return the Python code of the model at ``path``, by the names in its files, such as
    ``modeling_tiny.TinyForCausalLM``; ``repository--module.Class`` is in another repository. Nothing is imported.

    Args:
        path: local folder or hub id.
    """
    names = {name for file in _CONFIGURATIONS for name in _classes(_read(_find(path, file)).get("auto_map"))}
    if _find(path, _GENERATE) is not None:
        names.add(_GENERATE)
    return sorted(names)


def _classes(value: Any) -> Iterator[str]:
    """Yield the names in an ``auto_map``: a string, or a list or an object of them, None for a class that is
    missing."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _classes(one)


def _find(path: str, name: str) -> Path | None:
    if Path(path).is_dir():
        found = Path(path) / name
        return found if found.is_file() else None
    cached = cached_file(
        path, name, _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False, _raise_exceptions_for_gated_repo=False,
    )  # fmt: skip
    return Path(cached) if cached else None


def _read(file: Path | None) -> dict[str, Any]:
    """Return the object in a JSON file; an empty one if there is none, which transformers itself will report."""
    try:
        found = json.loads(file.read_text(encoding="utf-8")) if file is not None else {}
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
