"""Writes ``docs/models.md`` from the results of the sweep."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from importlib.metadata import version

from mpic.version import VERSION
from mpic_lab.models.check import Row
from mpic_lab.models.vllm_results import NOT_RUN, VLLMResults

_HEAD = """# Models

Made by `make models` on {date} (MPIC {mpic}, transformers {transformers}, torch {torch}); do not edit it.

**On the native engine.** For every class that transformers knows, a tiny random instance in fp32 is built from the
default configuration of its family with small sizes. It must pass the load-time self-test; then one prompt with two
chunks (texts, or images) is linked under `full`, `mpic-5` and `reuse`, and answers must equal those of a stock model
with the same selection, its own masks and its own eager attention.

- **verified**: all of that holds. Of an image-text class, with two images through its own image processor.
- **refused**: a real model of the family is refused when it is loaded, or its images are, with this reason.
- **not built**: no small instance could be made, so nothing is known.
- **failed**: a wrong answer or a raw error. There must be none.

**Images of a real model.** When a model is loaded, its whole processor is asked about images of several sizes. A chunk
holds what the processor puts from the first token of an image to the last, with the breaks and labels between tiles. A
model is refused if the text around them depends on the size, as in Aya Vision. Every image has the tokens that it has
alone in a prompt. LLaVA-OneVision in transformers gives several images of one conversation fewer, because it cuts none
of them into tiles; here each is cut, and `/health` says so (`image_layout_note`).

**Inside vLLM.** The last column says what `make parity` found, with vLLM's version and the date: a tiny checkpoint of
the family is served by `--engine vllm` on a CPU, which tests itself when it starts, and links the same prompt with text
chunks, then, of an image-text class, with two images (`tests/vllm` checks some families instead). *Not in vLLM*: it has
no model of that name. *Not built* and *not started*: there is no such checkpoint, or vLLM does not start on it, for the
given reason. *Differs*: plain prompts, without any link, have other log-probabilities there than in transformers. *Not
run*: nothing is known.
"""


def markdown(rows: Sequence[Row], on_vllm: VLLMResults) -> str:
    """Returns the page."""
    lines = [
        _HEAD.format(
            date=time.strftime("%Y-%m-%d"),
            mpic=VERSION,
            transformers=version("transformers"),
            torch=version("torch"),
        )
    ]
    for kind in dict.fromkeys(row.kind for row in rows):
        chosen = [row for row in rows if row.kind == kind]
        counts = Counter(row.result for row in chosen)
        lines.append(
            f"\n## {kind}: " + ", ".join(f"{n} {result}" for result, n in counts.most_common()) + "\n"
        )
        lines.append("| family | result | reason | inside vLLM |\n|---|---|---|---|")
        for row in chosen:
            reason = "" if row.result == "verified" else row.reason
            inside = str(on_vllm.get((row.family, kind), NOT_RUN))
            cells = (row.family, row.result, reason, inside)
            lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return "\n".join(lines) + "\n"
