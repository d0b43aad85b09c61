"""The text of ``docs/policies.md``, which ``tools/docs/generate.py`` writes."""

from __future__ import annotations

from mpic.link import POLICIES, Need, Policy
from mpic.link.engines import LACKS, PROVIDES

HEADING = """# Policies

A policy says which tokens of an image or document are computed again when it is linked into a prompt. `policy` of a
request chooses one, and `--policy` of `mpic serve` sets the server's default. This page is generated from the policies'
classes (`mpic/link/policies`) by `.venv/bin/python tools/docs/generate.py`.

The default, `auto`, stands for one of them: the cheapest that a calibration of the model has shown to lose little, and
`prefix` where there is none ([which policy](choosing.md#calibrate-your-model)).

| policy | what it does | number | from | engines |
|---|---|---|---|---|
"""

REFUSED = """
## Not on vLLM

The vLLM engine refuses these by name: a server's default policy when the server starts, and a request's policy with
`unsupported_parameter`. Each needs a feature that a step of vLLM lacks:

"""

PRESS = """- `press` ([compression](compression.md)): vLLM's paged cache has one set of tokens for all heads of a layer.
"""


def document() -> str:
    """Return the text of ``docs/policies.md``."""
    return HEADING + "".join(map(_row, POLICIES)) + REFUSED + "".join(map(_reason, POLICIES)) + PRESS


def _reason(cls: type[Policy]) -> str:
    missing = [f"{need.value}, and {LACKS[need]}" for need in Need if need in cls.needs() - PROVIDES["vllm"]]
    return f"- `{cls.syntax}`: {'; '.join(missing)}.\n" if missing else ""


def _row(cls: type[Policy]) -> str:
    numbers = ", ".join(
        f"{one.name.upper()}: {one.metadata['least']:,} to {one.metadata['most']:,} {one.metadata['unit']}"
        for one in cls.parameters()
    )
    paper = f"[{cls.paper.name}]({cls.paper.url})" if cls.paper else ""
    engines = ", ".join(name for name, provided in PROVIDES.items() if cls.needs() <= provided)
    return f"| `{cls.syntax}` | {cls.summary} | {numbers} | {paper} | {engines} |\n"
