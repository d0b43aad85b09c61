"""Makes a folder with the packages of a bare machine, as links to those installed here."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PACKAGES = ("torch", "triton", "transformers", "numpy", "safetensors", "psutil", "pillow", "typer", "xxhash")
MISSING = ("rich", "pydantic")
"""Left out although ``typer`` lists them: other versions of it do not."""


def needed(roots: tuple[str, ...] = PACKAGES) -> dict[str, metadata.Distribution]:
    """Return the packages and their requirements by canonical name; optional extras are left out."""
    found: dict[str, metadata.Distribution] = {}
    waiting = list(roots)
    while waiting:
        name = canonicalize_name(waiting.pop())
        if name in found or name in MISSING:
            continue
        try:
            found[name] = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue
        for line in found[name].requires or []:
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                waiting.append(requirement.name)
    return found


def make(folder: Path) -> Path:
    """Fill ``folder`` with links to the packages' files, their metadata included, and nothing else."""
    folder.mkdir(parents=True, exist_ok=True)
    for distribution in needed().values():
        tops = {
            file.parts[0] for file in distribution.files or [] if file.parts[0] not in ("..", "__pycache__")
        }
        for top in tops:
            source, link = Path(str(distribution.locate_file(top))), folder / top
            if source.exists() and not link.exists():
                link.symlink_to(source)
    return folder
