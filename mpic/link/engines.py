"""The policies that each engine runs, and the reasons why it refuses others."""

from __future__ import annotations

from mpic.link import Need, Policy

PROVIDES: dict[str, frozenset[Need]] = {
    "native": frozenset(Need),
    "vllm": frozenset({Need.SINK, Need.PACKET}),
}
"""The abilities of each engine that not every engine has."""

LACKS: dict[Need, str] = {
    Need.DECISION: "vLLM's scheduler says what a step computes before anything of the prompt has run",
    Need.TWO_STEPS: "vLLM computes a prompt's rows in one order, each behind all before it",
}
"""Need of a policy -> the reason why the engine on vLLM cannot meet it."""

NO_PRESS = (
    "chunks are compressed only on the native engine, not on the {engine} engine, whose paged cache has one set of "
    "tokens for all heads: take press none, or set engine = native"
)
"""The message that refuses a press."""


def refusal(policy: Policy, engine: str) -> str | None:
    """Return the reason why a policy does not run on the engine of that name, or None when it does."""
    lacking = policy.needs() - PROVIDES[engine]
    if not lacking:
        return None
    missing = [f"{need.value}, and {LACKS[need]}" for need in Need if need in lacking]
    return (
        f"policy {policy} does not run on the {engine} engine: {'; '.join(missing)}. "
        "Use another policy, or engine = native"
    )
