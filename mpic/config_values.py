"""Values of a configuration: read from TOML, checked against a section's fields. ``mpic.config`` has the sections."""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, get_type_hints

from mpic.errors import BadRequest


class ConfigError(BadRequest):
    """A configuration file or flag that cannot be used."""

    code = "config_error"


GONE = {
    "orphan_days": "files that the catalogue does not list stay where they are, and a start names them; leave it out",
}
"""Keys of earlier versions, and what to do instead."""


def read_toml(path: Path) -> dict[str, Any]:
    """Return the content of a TOML file. Raise ConfigError."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"no such configuration file: {path}") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as exc:
        raise ConfigError(f"cannot read {path}: {exc}") from None


def build(section: str, cls: type, values: Mapping[str, Any]) -> Any:
    """Return a section with these values; those that are not given have their defaults.

    Args:
        section: its name, for messages.
        cls: its dataclass.

    Raises:
        ConfigError: a key is unknown, or a value has the wrong type or is negative.
    """
    types = get_type_hints(cls)
    checked = {}
    for key, value in values.items():
        if key in GONE:
            raise ConfigError(f"[{section}] {key} is gone: {GONE[key]}", param=key)
        if key not in types:
            known = listed(f.name for f in dataclasses.fields(cls))  # ty: ignore[invalid-argument-type] (`cls` is a dataclass)
            raise ConfigError(f"unknown key {key!r} in [{section}]; known: {known}", param=key)
        if types[key] is float and type(value) is int:
            value = float(value)
        if type(value) is not types[key]:
            raise ConfigError(
                f"[{section}] {key} must be {types[key].__name__}, not {type(value).__name__}", param=key
            )
        if isinstance(value, (int, float)) and value < 0:
            raise ConfigError(f"[{section}] {key} must not be negative", param=key)
        checked[key] = value
    try:
        return cls(**checked)
    except ValueError as exc:
        raise ConfigError(f"[{section}] {exc}") from None


def listed(names: Iterable[Any]) -> str:
    """Return names as a message lists them."""
    return ", ".join(names)
