"""Write ``docs/models.md`` from the results of the sweep."""

from __future__ import annotations

import re
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from importlib.metadata import version

from mpic.version import VERSION
from mpic_lab.models.check import Row
from mpic_lab.models.vllm_results import NOT_RUN, VLLMResults

_HEAD = """# Models

Made by `make models` on {date} (MPIC {mpic}, transformers {transformers}, torch {torch}); do not edit it.

Every class that transformers knows is tried as a tiny random instance in fp32. On the native engine it must pass
the load-time self-test; then one prompt with two chunks (texts, or images) is linked under `full`, `mpic-5` and
`reuse`, and answers must equal those of a stock model with the same selection, its own masks and its own eager
attention. Where all of that holds, a family is **served**, and stands in a table by what it does inside vLLM;
otherwise in a table by the reason.

| word | meaning |
|---|---|
| refused | a real model of the family is refused when it is loaded, or its images are, with this reason |
| not built | no small instance could be made, so nothing is known |
| failed | a wrong answer or a raw error; there must be none |

**Inside vLLM**, `make parity` serves a tiny checkpoint by `--engine vllm` on a CPU and links the same prompt with
text chunks, then with two images. *Not in vLLM*: it has no model of that name. *Not started*: vLLM does not start
on the checkpoint. *Differs*: plain prompts have other log-probabilities there than in transformers. *Not run*:
nothing is known.

**Images of a real model.** When a model is loaded, its whole processor is asked about images of several sizes. A
chunk holds what the processor puts from the first token of an image to the last, with the breaks and labels between
tiles. A model is refused if the text around them depends on the size, as in Aya Vision. Every image has the tokens
that it has alone in a prompt; LLaVA-OneVision in transformers cuts several images of one conversation into no
tiles, here each is cut (`image_layout_note` of `/health`).
"""


def markdown(rows: Sequence[Row], on_vllm: VLLMResults) -> str:
    """Return the page: families grouped by what they have in common."""
    head = _HEAD.format(
        date=time.strftime("%Y-%m-%d"),
        mpic=VERSION,
        transformers=version("transformers"),
        torch=version("torch"),
    )
    return head + "".join(
        _section(kind, [row for row in rows if row.kind == kind], on_vllm)
        for kind in dict.fromkeys(row.kind for row in rows)
    )


def _section(kind: str, rows: list[Row], on_vllm: VLLMResults) -> str:
    """Return the tables of one kind of model."""
    counts = Counter(row.result for row in rows)
    inside, reasons = defaultdict(list), defaultdict(list)
    for row in rows:
        if row.result == "verified":
            inside[_inside(row, on_vllm)].append(row.family)
        else:
            reasons[f"{row.result}: {_common(row.reason)}"].append(row.family)
    title = ", ".join(f"{n} {_SERVED.get(result, result)}" for result, n in counts.most_common())
    return (
        f"\n## {kind}: {title}\n"
        + _table("served families | inside vLLM", inside)
        + _table("other families | result and reason", reasons)
    )


_SERVED = {"verified": "served"}
_NAMES = re.compile(r"^(?:[a-z][a-z0-9_.-]*: |\w+(?:For\w+|Model|Decoder):? )+")
_NUMBERS = re.compile(r"(?<=^layers) [\d, .]+(?=do not)")
_EXCEPTION = re.compile(r": \w*Error: .*")


def _inside(row: Row, on_vllm: VLLMResults) -> str:
    """Return what vLLM does with a family, with its version and the date."""
    result = on_vllm.get((row.family, row.kind))
    if result is None:
        return NOT_RUN
    return str(result._replace(reason=_common(result.reason)))


def _common(reason: str) -> str:
    """Return the part of a reason that families share: without their names, numbers of layers and exceptions."""
    return _EXCEPTION.sub("", _NUMBERS.sub(" ", _NAMES.sub("", reason)))


def _table(heading: str, groups: dict[str, list[str]]) -> str:
    """Return a table with a row for each group, the largest first."""
    if not groups:
        return ""
    lines = [
        f"| {', '.join(families)} | {reason.replace('|', chr(92) + '|')} |"
        for reason, families in sorted(groups.items(), key=lambda group: -len(group[1]))
    ]
    return "\n".join([f"\n| {heading} |\n|---|---|", *lines]) + "\n"
