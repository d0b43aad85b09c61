"""The tables that ``mpic demo`` prints, at 80 columns."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from mpic.client.types import File, Health
from mpic_lab.demo_answers import (
    BASELINE,
    MUST_BE_RIGHT,
    PASSES,
    WARM,
    DemoAnswer,
    Headline,
    ratios_to,
    right_of,
)

LEGEND = (
    "ms: time to the first token (in the totals: the median). first: asked after a restart, so a chunk comes from disk "
    "when it is first linked. again: the same question once more, when the prompt's own prefix is cached too; prefix: "
    "tokens found that way. reused of: tokens of images and documents that were linked as compiled, of all of them."
)

EIGHT_LEGEND = (
    "Prefix caching is on, but each question has the images in an order of its own. The server is warm, features of "
    "images are kept for all policies, and one request runs at a time. first ms: the median; sooner: than prefix, the "
    "median of the questions' ratios; prefix: tokens of a prompt found in the prefix cache."
)


def show(
    console: Console,
    questions: list[dict[str, Any]],
    asked: list[DemoAnswer],
    policies: Sequence[str],
    headline: Headline | None,
) -> None:
    """Print the answers to the questions that were asked twice, totals, and the headline."""
    common = [answer for answer in asked if answer.turn in PASSES]
    for part in _answers(questions, common, policies):
        console.print(part, highlight=False)
    console.print()
    console.print(_totals(common, policies))
    console.print(LEGEND, style="dim")
    if len(common) < len(asked):
        console.print()
        console.print(_eight_images(asked, policies))
        console.print(EIGHT_LEGEND, style="dim")
    if headline is not None:
        console.print(_in_words(headline), highlight=False)


def what_runs(health: Health, seconds: float) -> str:
    model = health.model
    where = f"{model['device']} {model['dtype']}, attention {model['attention']}"
    if model["details"].get("engine") == "vllm":
        where = f"vLLM {model['details']['vllm']}, {where}"
    return f"{model['name']} ({model['family']}, {where}), started in {seconds:.1f} s"


def uploads(uploaded: list[File]) -> Table:
    table = Table(title="Compiled once", title_justify="left", box=SIMPLE, padding=(0, 1))
    for name, side in (("upload", "left"), ("tokens", "right")) * 2:  # two uploads per line
        table.add_column(name, justify=side)
    cells = [(f.mention, str(f.tokens)) for f in uploaded]
    for pair in zip_longest(cells[::2], cells[1::2], fillvalue=("", "")):
        table.add_row(*pair[0], *pair[1])
    return table


def _text(messages: list[dict[str, Any]]) -> str:
    """Return the conversation as a person would read it."""
    return " → ".join(_content_text(m["content"]) for m in messages)


def _content_text(content: str | list[dict[str, Any]]) -> str:
    if isinstance(content, str):
        return content
    return " ".join(p.get("text") or f"{p['type'].upper()}#{p.get('handle', '?')}" for p in content)


def _answers(
    questions: list[dict[str, Any]], asked: list[DemoAnswer], policies: Sequence[str]
) -> Iterator[Any]:
    """Yield the policies' answers question by question."""
    for number, question in enumerate(questions, 1):
        text = f"\n[bold]{number}. {question['id']}[/]: {escape(_text(question['messages']))}"
        yield f"{text}\n[dim]expected:[/] {escape(question['expected'])}"
        table = Table(box=None, padding=(0, 1), header_style="dim", expand=True)
        for name, width in (("policy", 12), ("", 1), ("answer", None)):
            table.add_column(name, width=width, ratio=None if width else 1)
        for name, width in (("first ms", 8), ("again", 6), ("reused of", 9)):
            table.add_column(name, justify="right", width=width)
        for policy in policies:
            first, again = (_find(asked, question["id"], policy, turn) for turn in PASSES)
            answer = first.answer if first.answer == again.answer else f"{first.answer} | {again.answer}"
            table.add_row(
                policy,
                "[green]✓[/]" if first.right and again.right else "[red]✗[/]",
                escape(answer) or "[dim](nothing)[/]",
                f"{first.ttft_ms:.1f}",
                f"{again.ttft_ms:.1f}",
                f"{first.reused}/{first.reused + first.recomputed}",
            )
        yield table


def _totals(asked: list[DemoAnswer], policies: Sequence[str]) -> Table:
    table = Table(Column("policy", no_wrap=True), title="All questions", title_justify="left", box=SIMPLE)
    for name in ("right", "first ms", "again ms", "prompt", "reused", "recomp.", "prefix"):
        table.add_column(name, justify="right")
    for policy in policies:
        first, again = ([a for a in asked if a.policy == policy and a.turn == turn] for turn in PASSES)
        table.add_row(
            policy,
            f"{len(right_of(asked, policy))}/{len(first)}",
            f"{statistics.median(a.ttft_ms for a in first):.1f}",
            f"{statistics.median(a.ttft_ms for a in again):.1f}",
            *(str(sum(getattr(a, n) for a in first)) for n in ("prompt_tokens", "reused", "recomputed")),
            str(sum(a.prefix_hit for a in again)),
        )
    return table


def _eight_images(asked: list[DemoAnswer], policies: Sequence[str]) -> Table:
    title = "Questions over eight images, asked by turns"
    table = Table(Column("policy", no_wrap=True), title=title, title_justify="left", box=SIMPLE)
    for name in ("right", "first ms", "sooner", "prompt", "reused", "recomp.", "prefix"):
        table.add_column(name, justify="right")
    for policy in policies:
        mine = [a for a in asked if (a.policy, a.turn) == (policy, WARM)]
        ratios = ratios_to(asked, policy)
        names = ("prompt_tokens", "reused", "recomputed", "prefix_hit")
        table.add_row(
            policy,
            f"{sum(a.right for a in mine)}/{len(mine)}",
            f"{statistics.median(a.ttft_ms for a in mine):.1f}",
            f"{statistics.median(ratios):.1f} x" if ratios else "",
            *(f"{statistics.median(getattr(a, n) for a in mine):.0f}" for n in names),
        )
    return table


def _in_words(found: Headline) -> str:
    times = f"{found.prefix_over_mpic:.1f} times sooner than {BASELINE}"
    return (
        f"\n[bold]Over eight images {MUST_BE_RIGHT} answers {times}.[/]\n"
        f"Right answers of {found.asked}: {MUST_BE_RIGHT} {found.right_mpic}, {BASELINE} {found.right_prefix}."
    )


def _find(asked: list[DemoAnswer], question: str, policy: str, turn: str) -> DemoAnswer:
    return next(a for a in asked if (a.question, a.policy, a.turn) == (question, policy, turn))
