"""Shell completion (``mpic --install-completion``) of policies and of the handles of uploads."""

from __future__ import annotations

import typer

SECONDS = 5.0
"""Seconds to wait for a server; after that, completion offers nothing."""


NUMBERS = {"K": ("8", "16", "32", "64"), "R": ("5", "15", "50")}
"""Common values for the numbers in policy names (tokens of a chunk, percentages), by the letter that stands for
them."""


def policies(incomplete: str) -> list[str]:
    """Return the policies that begin with the given text, with common numbers filled in."""
    from mpic.link import AUTO, policy_names

    names: list[str] = [AUTO]
    for name in policy_names():
        stem, dash, letter = name.rpartition("-")
        names += [f"{stem}-{n}" for n in NUMBERS[letter]] if dash and letter in NUMBERS else [name]
    return [name for name in names if name.startswith(incomplete)]


def handles(context: typer.Context, incomplete: str) -> list[str]:
    """Return the handles of uploads that begin with the given text, from the server that the command would use."""
    from mpic.client import MPIC
    from mpic.errors import MPICError

    url, key = context.params.get("url"), context.params.get("api_key")
    try:
        with MPIC(url, key, timeout=SECONDS, max_retries=0) as client:
            found = [file.handle for file in client.files.list(limit=1000) if file.handle]
    except MPICError:  # the command itself will show the error
        return []
    return sorted(name for name in found if name.startswith(incomplete))
