"""The navigation of the documentation (``docs/nav.toml``), the paths of pages in the site, and ``llms.txt``."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]


def navigation() -> list[dict[str, Any]]:
    """Return the sections of ``docs/nav.toml``; paths of pages are those of the repository."""
    sections = tomllib.loads((ROOT / "docs/nav.toml").read_text(encoding="utf-8"))["section"]
    for section in sections:
        for page in section["page"]:
            page["path"] = os.path.normpath(f"docs/{page['path']}")
    return sections


def site_path(source: str) -> str:
    """Return the path in the site of a page of the repository, which is a Markdown file or a listed folder."""
    path = (
        source.removesuffix(".md") if source.startswith("docs/") else f"project/{source.removesuffix('.md')}"
    )
    return re.sub(r"(^|/)README$", r"\1index", path.removeprefix("docs/")) + ".html"


def asset_path(source: str) -> str:
    """Return the path in the site of a picture or another file that a page links to."""
    return source.removeprefix("docs/") if source.startswith("docs/") else f"files/{source}"


def llms(place: Callable[[str], str] | None = None) -> str:
    """Return the content of ``llms.txt``: a description and one line for each page, for programs that read
    documentation.

    Args:
        place: function from a path in the repository to the path in the site. Without it links are paths in the
            repository, and pages that exist only in the site are left out.
    """
    lines = [(HERE / "llms.head.txt").read_text(encoding="utf-8").rstrip()]
    for section in navigation():
        rows = []
        for page in section["page"]:
            link = str(Path(place(page["path"])).with_suffix(".md")) if place else page["path"]
            if place or (ROOT / link).exists():
                rows.append(f"- [{page['title']}]({link}): {page['about']}")
        lines += ["", f"## {section['title']}", "", *rows] if rows else []
    return "\n".join(lines) + "\n"
