"""The plots of results that ship with the program, with their descriptions."""

from __future__ import annotations

import re
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

NAME = re.compile(r"[A-Za-z0-9_-]{1,80}")

EXPLAINED = {
    "ttft": (
        "Time to the first token",
        "Linking compiled images against computing them: the more of a prompt is reused, the sooner it is answered.",
    ),
    "flat": (
        "Growing documents",
        "Without reuse the first token waits longer with every token of the documents; linked documents hardly matter.",
    ),
    "peers": (
        "Beside other servers",
        "First tokens and decoding beside transformers, vLLM, LMCache, llama.cpp and OpenVINO on the same weights.",
    ),
    "rates": (
        "Users who return",
        "First tokens and throughput while users ask about their files again, every policy at the same rates.",
    ),
    "overhead": (
        "Choosing tokens",
        "Where the time of a policy goes that looks at the whole prompt before it links.",
    ),
    "memory": (
        "Memory",
        "Requests over the same files share one copy of their caches in memory, instead of holding one each.",
    ),
    "decode": (
        "Writing the answer",
        "Tokens per second after the first, over linked caches, against a plain dense cache.",
    ),
    "load": ("Loading", "Reading compiled caches from disk, cold and warm, against what the disk can do."),
    "parallel": (
        "Loading while computing",
        "Reading hits while misses are compiled, against the slower of the two.",
    ),
    "retrieval": ("Retrieval", "Finding references, and linking them while an answer is being written."),
    "serving": ("Under load", "Time to the first token while requests arrive, by policy."),
    "peaks": (
        "Length of documents",
        "Requests that can be answered a second: the longer a document, the more CacheBlend computes of it.",
    ),
    "flops": ("Operations", "Counted operations of the same prompts, by policy."),
}


class Plot(NamedTuple):
    name: str
    title: str
    text: str
    path: Path


def plots() -> list[Plot]:
    """List the plots, evaluations first, then benches, one plot per name."""
    found: dict[str, Plot] = {}
    for folder in _folders():
        for path in sorted(folder.rglob("*.png")) if folder.is_dir() else ():
            if NAME.fullmatch(path.stem) and path.stem not in found:
                title, text = EXPLAINED.get(path.stem, (path.stem.replace("_", " ").replace("-", " "), ""))
                found[path.stem] = Plot(path.stem, title, text, path)
    return list(found.values())


def plot(name: str) -> Path | None:
    """Return the file of one plot; only files that ``plots`` lists are served."""
    return next((p.path for p in plots() if p.name == name), None)


def _folders() -> tuple[Path, ...]:
    """Return ``docs/evidence`` of a checkout, and the folder of results that are installed with the data."""
    here = Path(__file__).resolve().parent
    return here.parent / "docs" / "evidence", Path(str(files("mpic.data"))) / "results" / "bench"
