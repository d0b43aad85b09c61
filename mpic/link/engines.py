"""The policies that each engine runs, and the table of them, which ``tools/docs/generate.py`` writes."""

from __future__ import annotations

from mpic.link import POLICIES, Need, Policy

PROVIDES: dict[str, frozenset[Need]] = {
    "native": frozenset(Need),
    "vllm": frozenset({Need.SINK, Need.PACKET}),
}
"""The abilities of each engine that not every engine has."""

LACKS: dict[Need, str] = {
    Need.DECISION: "vLLM's scheduler says what a step computes before anything of the prompt has run",
    Need.TWO_STEPS: "vLLM computes a prompt's rows in one order, each behind all before it",
}
"""Why the engine on vLLM does not do what some policies need."""

NO_PRESS = (
    "chunks are compressed only on the native engine, not on the {engine} engine, whose paged cache has one set of "
    "tokens for all heads: take press none, or set engine = native"
)
"""Why a press is refused."""

HEADING = """# Policies

A policy says which tokens of an image or document are computed again when it is linked into a prompt. `policy` of a
request chooses one, and `--policy` of `mpic serve` sets the server's default. This page is generated from the policies'
classes (`mpic/link/policies`) by `.venv/bin/python tools/docs/generate.py`.

| policy | what it does | number | from | engines |
|---|---|---|---|---|
"""


REFUSED = """
## Not on vLLM

The vLLM engine refuses these by name: a server's default policy when the server starts, and a request's policy with
`unsupported_parameter`. Each needs something that a step of vLLM cannot do:

"""

PRESS = """- `press` ([compression](compression.md)): vLLM's paged cache has one set of tokens for all heads of a layer.
"""


def refusal(policy: Policy, engine: str) -> str | None:
    """Returns the reason why a policy does not run on the engine of that name, or None when it does."""
    lacking = policy.needs() - PROVIDES[engine]
    if not lacking:
        return None
    missing = [f"{need.value}, and {LACKS[need]}" for need in Need if need in lacking]
    return (
        f"policy {policy} does not run on the {engine} engine: {'; '.join(missing)}. "
        "Use another policy, or engine = native"
    )


def document() -> str:
    """Returns the text of ``docs/policies.md``."""
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


if __name__ == "__main__":
    print(document(), end="")
