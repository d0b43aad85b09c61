"""The policies in words, and the page that helps to choose one."""

from __future__ import annotations

from html import escape

from mpic.webui.plots import plots

EXPLAINED = {
    "full": "Computes everything. The quality reference; no reuse at all.",
    "prefix": "Reuses only what stands at the beginning of an earlier prompt. Exact.",
    "reuse": "Recomputes nothing of images and documents. Fastest, and the least exact.",
    "reuse-2step": "As reuse, but text is computed in a second step, as other systems do it.",
    "mpic-K": "Recomputes the first K tokens of every image and document.",
    "legolink-K": "As mpic-K, but not for the piece the prompt starts with.",
    "legolink-0": "Recomputes nothing; pieces were compiled behind four start tokens.",
    "attnlink-K": "Recomputes K tokens around every boundary between pieces.",
    "block-N": "Recomputes the first N pages (of 16 tokens) of every piece.",
    "random-R": "Recomputes R percent of every piece, blindly. A control.",
    "cacheblend-R": "Recomputes the R percent of tokens whose cache differs most.",
    "nocache": "Leaves images and documents out of the prompt. A control.",
}
"""Form of a policy -> one line. Forms without a line are shown without one."""

OFFERED = {
    "mpic-K": ("mpic-16", "mpic-32"),
    "legolink-K": ("legolink-16",),
    "attnlink-K": ("attnlink-16",),
    "block-N": ("block-1",),
    "random-R": ("random-15",),
    "cacheblend-R": ("cacheblend-15",),
}
"""Concrete policies to offer for a form; any other number can be typed."""

FIRST = ("mpic-16", "mpic-32", "reuse", "prefix", "full")


def offered(forms: list[str], default: str) -> list[str]:
    """Concrete policies to choose from, the common ones first.

    Args:
        forms: what the server has (``/health``: policies).
        default: the server's own choice.
    """
    concrete = [name for form in forms for name in OFFERED.get(form, (form,))]
    wanted = [default, *(n for n in FIRST if n in concrete), *concrete]
    return list(dict.fromkeys(wanted))


def explain(policy: str) -> str:
    """One line about a concrete policy; empty if there is nothing to say."""
    if policy in EXPLAINED:
        return EXPLAINED[policy]
    stem, _, number = policy.rpartition("-")
    for form, line in EXPLAINED.items():
        if form[:-2] == stem and form[-1] in "KNR" and number.isdecimal() and len(number) < 10:
            return line.replace(f" {form[-1]} ", f" {int(number)} ")
    return ""


def page(forms: list[str], default: str) -> str:
    """The page as HTML."""
    rows = "".join(
        f"<tr><td><code>{escape(form)}</code></td><td>{escape(EXPLAINED.get(form, ''))}</td></tr>"
        for form in forms
    )
    figures = "".join(
        f'<figure><a href="/ui/plots/{p.name}.png" target="_blank" rel="noopener">'
        f'<img src="/ui/plots/{p.name}.png" alt="{escape(p.title)}" loading="lazy"></a>'
        f"<figcaption><b>{escape(p.title)}</b>{escape(p.text)}</figcaption></figure>"
        for p in plots()
    )
    measured = figures or '<p class="m-empty">No results are kept with this installation. '
    measured += "" if figures else "<code>make bench</code> measures on your machine.</p>"
    return f"""<article class="m-page">
<h2>Which policy?</h2>
<p class="m-lead">A policy decides which tokens of your images and documents are computed again when they are linked
into a prompt. Recomputing more costs time and brings the answer closer to the one without reuse.</p>
<ol class="m-steps">
<li><b>Start with <code>{escape(default)}</code></b>, this server's default.</li>
<li>Ask a few questions of your own and press <b>Answer again without reuse</b>. Differences are marked.</li>
<li>If answers differ, take a larger number (<code>mpic-32</code>). If they never do, try a smaller one, or
<code>reuse</code>.</li>
</ol>
<div class="m-scroll"><table class="m-table"><thead><tr><th>policy</th><th>what it does</th></tr></thead>
<tbody>{rows}</tbody></table></div>
<h2>What was measured</h2>
<div class="m-figures">{measured}</div>
</article>"""


RETRIEVAL = {
    "off": ("No search", ""),
    "always": (
        "Always search",
        "Your words are looked up in the reference library before the answer begins.",
    ),
    "auto": ("Search when needed", "The model looks things up in the reference library while it answers."),
}
"""``mpic.retrieval`` -> its name on the page, and what it does."""


def line(policy: str | None, retrieval: str | None = None) -> str:
    """What stands under the pickers."""
    known = [explain(policy or ""), RETRIEVAL.get(retrieval or "off", ("", ""))[1]]
    return f'<p class="m-note">{escape(" ".join(filter(None, known)))}</p>' if any(known) else ""
