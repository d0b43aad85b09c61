"""Computes digests of the local files that samples come from, because two files may have one name."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from mpic_lab.eval.tasks import Options


def cell_name(name: str, options: Options) -> str:
    """Return how a cell of a task is named in ``run.json``."""
    return f"{name}, {options.chunks} chunks" if options.chunks else name


def contents_of_cells(cells: Iterable[tuple[str, Options]]) -> dict[str, dict[str, str]]:
    """Return, by cell, digests of its local files and folders (``path``, ``images``), of those that there are."""
    digest = cache(contents_of)  # cells of one task share their files
    found: dict[str, dict[str, str]] = {}
    for name, options in cells:
        paths = {"path": options.path, "images": options.images}
        digests = {key: digest(path) for key, path in paths.items() if path is not None and path.exists()}
        if digests:
            found[cell_name(name, options)] = digests
    return found


def contents_of(path: Path) -> str:
    """Return the digest of a file, or of the names and sizes of the files in a folder, without the files that file
    managers leave there."""
    if path.is_file():
        return digest_of(path)
    files = ((one.relative_to(path), one) for one in path.rglob("*") if one.is_file())
    listed = sorted([name.as_posix(), one.stat().st_size] for name, one in files if not _left_over(name))
    return hashlib.sha256(json.dumps(listed).encode()).hexdigest()


def digest_of(file: Path) -> str:
    """Return the digest of a file's bytes."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _left_over(name: Path) -> bool:
    return name.name == "Thumbs.db" or any(part.startswith(".") for part in name.parts)
