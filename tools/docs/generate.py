"""Writes the generated files that are kept in the repository: ``python tools/docs/generate.py``.

They are kept so that they can be read without building the site; ``tests/docs`` compares them with the code.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from nav import ROOT, llms
from openai_table import openai

from mpic.link.policies_page import document


def files() -> dict[str, str]:
    """Return the text of every generated file by its path."""
    return {"docs/policies.md": document(), "docs/openai.md": "\n".join(openai()) + "\n", "llms.txt": llms()}


if __name__ == "__main__":
    for path, text in files().items():
        (ROOT / path).write_text(text, encoding="utf-8")
