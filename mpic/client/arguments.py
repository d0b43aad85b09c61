"""Checks arguments, so that a wrong one is reported where it is passed and not by the server or httpx."""

from __future__ import annotations

import difflib
import io
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any


def check_options(given: Iterable[str], known: Iterable[str]) -> None:
    """Refuse unknown options. Raise a TypeError that names the most similar known option."""
    names = list(known)
    for name in given:
        if name not in names:
            similar = difflib.get_close_matches(name, names, 1)
            hint = (
                f"did you mean {similar[0]!r}?"
                if similar
                else "fields the SDK does not know go in extra_body"
            )
            raise TypeError(f"unknown option {name!r}; {hint}")


def check_id(id: Any) -> None:
    """Check an id. Raise TypeError if it is not a string, or ValueError if it is empty, since an empty id would name
    the whole collection."""
    if not isinstance(id, str):
        hint = f": pass its id, {id.id!r}" if isinstance(getattr(id, "id", None), str) else ""
        raise TypeError(f"an id is a text, not {type(id).__name__}{hint}")
    if not id:
        raise ValueError("an id is needed, and it is empty")


def check_messages(messages: Any) -> None:
    """Check that a value is a conversation. Raise TypeError."""
    if isinstance(messages, str):
        return
    if isinstance(messages, Mapping) or not isinstance(messages, Sequence):
        raise TypeError(
            f"messages are a text, or a list of messages such as {{'role': 'user', 'content': '...'}}, not "
            f"{type(messages).__name__}"
        )
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise TypeError(f"messages[{number}] must be a dictionary, not {type(message).__name__}")


def check_source(source: Any) -> None:
    """Check that a value is a file to send. Raise TypeError."""
    content = source[1] if isinstance(source, tuple) and len(source) == 2 else source
    if isinstance(content, io.TextIOBase):
        raise TypeError("the file is open as text: open it with 'rb'")
    right = isinstance(content, (bytes, str, os.PathLike)) or hasattr(content, "read")
    if isinstance(source, tuple):
        right = right and len(source) == 2 and isinstance(source[0], str)
    if not right:
        raise TypeError(
            f"a file is a path, bytes, a binary file, or (name, bytes or binary file), not {type(source).__name__}"
        )


def check_seconds(name: str, value: Any) -> None:
    """Check that a value is a lifetime. Raise TypeError."""
    if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
        raise TypeError(f"{name} is a whole number of seconds or None, not {type(value).__name__}")
