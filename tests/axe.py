"""Runs axe-core on a page of a real browser, and counts how much it examined."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[1] / ".venv/axe/node_modules/axe-core/axe.min.js"
"""Where ``tools/get_axe.sh`` puts it."""

# Rules that are off by default stay off but for the size of targets; an open menu covers a part of what lies below it,
# which axe-core takes for a small target.
RUN = """async () => {
    const found = await axe.run(document, {
        resultTypes: ['violations', 'incomplete', 'passes'],
        rules: { 'target-size': { enabled: !document.querySelector('.menu:not([hidden])') } },
    });
    const why = (node) => [...node.any, ...node.all].map((check) => check.message).join('; ');
    const told = (rules) => rules.map(({ id, impact, help, nodes }) => ({
        id, impact, help, nodes: nodes.map((n) => `${n.target.join(' ')}: ${n.html.slice(0, 120)} ${why(n)}`),
    }));
    return {
        violations: told(found.violations),
        incomplete: told(found.incomplete),
        passes: found.passes.map((rule) => [rule.id, rule.nodes.length]),
    };
}"""


class Audit:
    """The results of axe-core on the pages it has examined."""

    def __init__(self) -> None:
        self.views = 0
        self.violations: list[str] = []
        self.count: Counter[str] = Counter()

    def look(self, page) -> list[str]:
        """Audit the present state of a page by all rules of axe-core. Return its violations, of any impact."""
        if not page.evaluate("'axe' in window"):
            page.evaluate(SOURCE.read_text(encoding="utf-8"))
        found = page.evaluate(RUN)
        self.views += 1
        self.count["rules passed"] += len(found["passes"])
        self.count["elements passed"] += sum(nodes for _, nodes in found["passes"])
        for rule in found["incomplete"]:
            self.count[f"left to a person: {rule['id']}"] += len(rule["nodes"])
        violations = [
            f"{rule['impact']} {rule['id']}: {rule['help']}: {node}"
            for rule in found["violations"]
            for node in rule["nodes"]
        ]
        self.violations += violations
        return violations
