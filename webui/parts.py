"""The page's own HTML: facts about an answer, the strip of its tokens, two answers side by side, the library.

Gradio's HTML component shows these texts unescaped, so all foreign content is escaped here.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from html import escape
from itertools import groupby
from typing import Any

from mpic.client.types import File, Reference, ReferenceHit, Savings
from mpic.webui.chats import Facts, StoredAnswer, StoredTurn, TokenSpan

STATES = {
    "device": "reused from the device",
    "host": "reused from host memory",
    "disk": "reused from disk",
    "remote": "reused from the shared store",
    "prefix": "found in the prefix cache",
    "compiled": "compiled for this answer, then reused",
    "recomputed": "recomputed by the policy",
    "new": "new text, computed",
}
WORDS = re.compile(r"\s+|\w+|[^\w\s]")
MOST_WORDS = 3000
"""Maximum words of an answer that is compared word by word; longer answers are compared as a whole."""


def button(text: str, to: str, do: str, label: str = "", confirm: str = "", /, **data: str) -> str:
    """Return a button that sends an event with ``do`` and ``data`` to a part of the page (``page.js``).

    Args:
        label: its accessible name, if ``text`` is not enough.
        confirm: a question that is asked first.
    """
    given = {"to": to, "do": do, **data, **({"confirm": confirm} if confirm else {})}
    shown = "".join(f' data-{name}="{escape(value)}"' for name, value in given.items())
    name = f' aria-label="{escape(label)}"' if label else ""
    return f'<button type="button" class="mpic-button"{shown}{name}>{escape(text)}</button>'


def ms(value: float) -> str:
    return (
        f"{value / 1000:.1f} s" if value >= 1000 else f"{value:.0f} ms" if value >= 10 else f"{value:.1f} ms"
    )


def size(count: float) -> str:
    for unit in ("B", "KB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"


def day(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M UTC")


def picture(id: str, kind: str) -> str:
    """Return a thumbnail of an image, or a symbol for any other kind of file."""
    if kind == "image":
        return f'<img class="mpic-thumb" src="thumbs/{escape(id)}" alt="" loading="lazy">'
    return f'<span class="mpic-thumb" aria-hidden="true">{"▶" if kind == "video" else "≣"}</span>'


# ---- answers


def factor(times: float) -> str:
    return f"{times:.1f}× sooner" if times >= 1 else f"{1 / times:.1f}× later"


def line(turn: StoredTurn, ms_per_token: float | None) -> str:
    """Return the figures of an answer in one line: time to the first token, share reused, and the time saved."""
    facts = turn.answer.facts
    assert facts is not None
    found = [f"{ms(facts.ttft)} to the first token", f"{100 * facts.saved // max(1, facts.prompt)} % reused"]
    again = turn.again.facts if turn.again else None
    if again is not None:
        found.append(factor(again.ttft / max(facts.ttft, 0.01)))
    elif ms_per_token and facts.saved and turn.answer.policy != "full":
        times = (facts.ttft + ms_per_token * facts.saved) / max(facts.ttft, 0.01)
        found += [f"about {times:.1f}× sooner"] if times >= 1.1 else []
    return " · ".join(found)


def strip(facts: Facts, scale: float) -> str:
    """Return the tokens of a prompt by their source, block by block, and the parts of the time to the first token.

    Args:
        scale: time in ms that the width of the strip stands for.
    """
    total = sum(span.tokens for span in facts.spans)
    bar = "".join(_cell(span) for span in facts.spans)
    used = dict.fromkeys(span.state for span in facts.spans)
    legend = "".join(
        f'<li><span class="mpic-key s-{escape(state)}"></span>{escape(STATES.get(state, state))}: '
        f"{sum(s.tokens for s in facts.spans if s.state == state):,}</li>"
        for state in used
    )
    blocks = "".join(
        _block(list(spans)) for _, spans in groupby(facts.spans, lambda s: (s.kind, s.label, s.file))
    )
    stages = "".join(
        f'<li>{name} {ms(value)}<span class="mpic-time" style="width:{_share(value, scale):.1f}%"></span></li>'
        for name, value in (("queue", facts.queue), ("load", facts.load), ("link", facts.link))
    )
    return (
        f'<div class="mpic-strip" role="img" aria-label="{total:,} tokens of the prompt by their source">{bar}</div>'
        f'<ul class="mpic-legend">{legend}</ul><ul class="mpic-blocks">{blocks}</ul>'
        f'<ul class="mpic-times" aria-label="parts of the time to the first token">{stages}</ul>'
    )


def _share(value: float, whole: float) -> float:
    """Return a part in percent."""
    return min(100.0, 100 * value / max(whole, 0.01))


def _cell(span: TokenSpan) -> str:
    what = "text" if span.kind == "text" else f"{span.kind} {span.label}"
    title = f"{what}: {span.tokens} tokens, {STATES.get(span.state, span.state)}"
    look = f"flex-grow:{span.tokens}"
    return f'<span class="s-{escape(span.state)}" style="{look}" title="{escape(title)}"></span>'


def _block(spans: Sequence[TokenSpan]) -> str:
    """Return one image or document of a prompt with the sources of its tokens; nothing for texts between them."""
    first, kinds = spans[0], dict[str, int]()
    if first.kind == "text":
        return ""
    for span in spans:
        kinds[span.state] = kinds.get(span.state, 0) + span.tokens
    where = ", ".join(f"{count:,} {STATES.get(state, state)}" for state, count in kinds.items())
    to = "ref" if first.file.startswith("ref_") else "file"
    name = button(first.label or first.file, to, "open", id=first.file)
    return f"<li>{picture(first.file, first.kind)} {name} <span>{escape(where)}</span></li>"


def marked(one: str, other: str) -> str:
    """Return a text in which the words that another text lacks are marked."""
    a, b = WORDS.findall(one), WORDS.findall(other)
    if len(a) > MOST_WORDS or len(b) > MOST_WORDS:
        return escape(one) if one == other else f"<mark>{escape(one)}</mark>"
    found = ""
    for op, begin, end, _, _ in difflib.SequenceMatcher(None, a, b, autojunk=False).get_opcodes():
        words = escape("".join(a[begin:end]))
        found += words if op == "equal" or not words else f"<mark>{words}</mark>"
    return found


def compared(turn: StoredTurn) -> str:
    """Return the answers with and without reuse side by side, and what the comparison shows."""
    assert turn.again is not None
    one, two = turn.answer, turn.again
    texts = one.text.strip(), two.text.strip()
    done = one.state == two.state == "done"
    sides = "".join(
        f'<div class="mpic-run"><p class="mpic-head"><code>{escape(run.policy or run.wishes.policy)}</code> {how}</p>'
        f'<p class="mpic-text">{marked(own, other) if done else escape(own) or "…"}</p>{problem(run)}</div>'
        for run, how, own, other in (
            (one, "with reuse", *texts),
            (two, "without reuse", *texts[::-1]),
        )
    )
    verdict = ""
    if done and one.facts and two.facts:
        same, won = texts[0] == texts[1], two.facts.ttft - one.facts.ttft
        told = "Reuse did not change the answer." if same else "The answers differ; what differs is marked."
        time = f"{ms(won)} sooner" if won >= 0 else f"{ms(-won)} later"
        chance = ""
        if not same and two.wishes.temperature:
            chance = f" At temperature {two.wishes.temperature:g} two answers may differ by chance; 0 compares fairly."
        verdict = (
            f'<p class="mpic-verdict"><b>{told}</b> With reuse the first token came {time}, and '
            f"{one.facts.saved - two.facts.saved:,} fewer tokens were computed.{chance}</p>"
        )
    return f'{verdict}<div class="mpic-two">{sides}</div>'


def problem(run: StoredAnswer) -> str:
    """Return the reason why an answer is incomplete; empty if it is complete."""
    if run.state == "failed":
        return f'<p class="mpic-error" role="alert"><b>No answer.</b> {escape(run.error)}</p>'
    return '<p class="mpic-hint">Stopped.</p>' if run.state == "stopped" else ""


def searches(run: StoredAnswer) -> str:
    """Return the searches made for an answer, with their results."""
    if run.wishes.retrieval == "off" or run.state != "done":
        return ""
    if not run.searches and not run.cited:
        return '<p class="mpic-hint">Nothing was looked up.</p>'
    found = ""
    for query in dict.fromkeys([*(s.query for s in run.searches), *(c.query for c in run.cited)]):
        error = next((s.error for s in run.searches if s.query == query and s.error), None)
        missed = {None: "", "nothing_found": ": nothing was found"}.get(error, f" without success ({error})")
        chips = "".join(
            picture(c.reference_id, c.kind)
            + button(c.title or c.reference_id, "ref", "open", id=c.reference_id)
            + f" <small>similarity {c.score:.2f}</small> "
            for c in run.cited
            if c.query == query
        )
        found += f'<p class="mpic-found">Looked up “{escape(query.strip())}”{escape(missed)} {chips}</p>'
    return found


def below(turn: StoredTurn, ms_per_token: float | None) -> str:
    """Return the part below an answer: its searches, its figures, and its buttons."""
    run, again = turn.answer, turn.again
    if run.running:
        return ""
    parts = [problem(run) if again is None else "", searches(run)]
    if run.facts is not None:
        scale = max(run.facts.ttft, again.facts.ttft if again and again.facts else 0)
        strips = strip(run.facts, scale)
        if again and again.facts:
            strips = f'<div class="mpic-two"><div>{strips}</div><div>{strip(again.facts, scale)}</div></div>'
        parts.append(
            f'<details class="mpic-facts"><summary>{escape(line(turn, ms_per_token))}</summary>{strips}</details>'
        )
    buttons = []
    if run.state == "done" and not (again and again.running):
        once = "Compare once more" if again else "Compare"
        buttons.append(
            button(once, "chat", "compare", f"{once}: answer again without reuse, side by side", turn=turn.id)
        )
    if not (again and again.running):
        buttons.append(button("Answer again", "chat", "again", turn=turn.id))
        ask = "Delete this question and its answer? They cannot be brought back."
        buttons.append(button("Delete", "chat", "delete", "Delete this turn", ask, turn=turn.id))
    return f'<div class="mpic-below">{"".join(parts)}<p class="mpic-row">{"".join(buttons)}</p></div>'


# ---- library, references


def library(files: Sequence[File]) -> str:
    """Return the list of a user's files. It also carries their handles for the question box."""
    if not files:
        return '<p class="mpic-hint">No files yet. Drop some anywhere on the page.</p>'
    return f'<ul class="mpic-cards">{"".join(_file(file) for file in files)}</ul>'


def _file(file: File) -> str:
    facts = [
        file.kind,
        f"{file.tokens:,} tokens" if file.tokens else "",
        f"{file.chunk_count} chunks" if file.chunk_count > 1 else "",
        size(file.bytes),
        " + ".join(file.tiers) if file.tiers or file.state != "ready" else "compiled again on next use",
        file.press or "",
        "pinned" if file.pinned else "",
    ]
    name, insert = file.handle or file.filename, ""
    if file.mention:
        insert = button("+", "box", "insert", f"Insert {name} into the question", text=file.mention)
    state = file.status_details if file.state == "failed" else file.state
    progress = "<progress></progress>" if file.state == "compiling" else ""
    # a bar without a number is named after the step it waits for
    progress = progress.replace("<progress", f'<progress aria-label="compiling {escape(name)}"')
    return (
        f'<li data-handle="{escape(file.mention or "")}" data-state="{escape(file.state)}">'
        f"{picture(file.id, file.kind)}<span>{button(name, 'file', 'open', f'Open {name}', id=file.id)}"
        f"<small>{escape(' · '.join(filter(None, facts)))}</small>"
        f'<small class="mpic-state">{escape(state or "")} {progress}</small></span>'
        f"{insert}"
        "</li>"
    )


def file_view(file: File, text: str) -> str:
    """Return one file: an image as it is, a document as text with the borders of its chunks."""
    head = f"<h3>{escape(file.mention or file.filename)}</h3>"
    about = [file.filename, size(file.bytes), f"added {day(file.created_at)}"]
    about += [f"expires {day(file.expires_at)}"] if file.expires_at else []
    about += [f"KV kept unused for {file.kv_ttl:,} s"] if file.kv_ttl and not file.pinned else []
    about += ["pinned"] if file.pinned else []
    head += f'<p class="mpic-hint">{escape(" · ".join(about))}</p>'
    if file.kind == "image":
        return (
            f'{head}<img class="mpic-full" src="originals/{escape(file.id)}" alt="{escape(file.filename)}">'
        )
    if file.kind == "video":
        return f'{head}<p>A clip; <a href="originals/{escape(file.id)}" download>download it</a>.</p>'
    borders = [(chunk.start, chunk.end) for chunk in file.chunks or ()] or [(0, len(text))]
    chunks = "".join(
        f'<section aria-label="chunk {n}"><b class="mpic-border">chunk {n}</b>{escape(text[begin:end])}</section>'
        for n, (begin, end) in enumerate(borders, 1)
    )
    return f'{head}<div class="mpic-document" tabindex="0" role="region" aria-label="text">{chunks}</div>'


def life(item: File | Reference, to: str) -> str:
    """Return the buttons that pin the compiled KV of a file or reference, and prefetch it."""
    name, do = ("Unpin", "unpin") if item.pinned else ("Pin", "pin")
    return button(name, to, do, id=item.id) + button("Prefetch", to, "prefetch", id=item.id)


def references(found: Iterable[Reference | ReferenceHit], admin: bool, note: str) -> str:
    cards = "".join(_reference(one, admin) for one in found)
    return f'<p class="mpic-hint" role="status">{escape(note)}</p><ul class="mpic-cards">{cards}</ul>'


def _reference(one: Reference | ReferenceHit, admin: bool) -> str:
    facts = [f"{one.tokens:,} tokens" if one.tokens else "", size(one.bytes)]
    facts += [one.state] if one.state != "ready" else []
    score = f" · similarity {one.score:.2f}" if isinstance(one, ReferenceHit) else ""
    remove = ""
    if admin:
        ask = f"“{one.title}” is shared by all users of this server. Remove it? It cannot be brought back."
        remove = button("Remove", "ref", "remove", f"Remove {one.title}", ask, id=one.id)
    return (
        f'<li data-id="{escape(one.id)}" data-state="{escape(one.state)}">{picture(one.id, one.kind)}'
        f"<span>{button(one.title, 'ref', 'open', f'Open {one.title}', id=one.id)}"
        f"<small>{escape(' · '.join(filter(None, facts)))}{score}</small>"
        f"<small>{escape(one.description)}</small></span>"
        f"{remove}</li>"
    )


def reference_view(one: Reference, text: str) -> str:
    known: dict[str, object] = {"file": one.filename, "version": one.version, "updated": day(one.updated_at)}
    known |= {"expires": day(one.expires_at)} if one.expires_at else {}
    known |= {"pinned": "yes"} if one.pinned else {}
    known |= {"synced": "by the server"} if one.synced else {}
    known |= one.metadata
    shown = (
        f'<img class="mpic-full" src="originals/{escape(one.id)}" alt="{escape(one.title)}">'
        if one.kind == "image"
        else f'<div class="mpic-document" tabindex="0" role="region" aria-label="text">{escape(text)}</div>'
    )
    return (
        f"<h3>{escape(one.title)}</h3><p>{escape(one.description)}</p>{table(('', ''), known.items())}{shown}"
    )


# ---- figures


def table(heads: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Return a table that scrolls sideways where it is too wide."""
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in heads) if any(heads) else ""
    body = "".join(f"<tr>{''.join(f'<td>{escape(str(cell))}</td>' for cell in row)}</tr>" for row in rows)
    return (
        f'<div class="mpic-scroll" tabindex="0" role="region" aria-label="table"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def tiles(found: Savings, price: float) -> str:
    """Return the sums of the savings.

    Args:
        price: price of a million prompt tokens, in any currency; 0 if unknown.
    """
    total = found.total
    share = 100 * total.saved_tokens / max(1, total.prompt_tokens)
    shown = [
        ("Not computed", f"{total.saved_tokens:,} tokens", f"{share:.0f} % of {total.prompt_tokens:,}"),
        ("Answers", f"{total.answers:,}", "with prompts of any length"),
    ]
    if found.ms_per_token:
        seconds = total.saved_tokens * found.ms_per_token / 1000
        time = f"{seconds / 3600:.1f} h" if seconds > 7200 else f"{seconds:,.1f} s"
        shown.append(("Time", time, "of computing, by this server's own speed"))
    if price:
        shown.append(
            ("Money", f"{price * total.saved_tokens / 1e6:,.4f}", "at your price of a million tokens")
        )
    found_tiles = "".join(f"<div><span>{a}</span><b>{b}</b><small>{c}</small></div>" for a, b, c in shown)
    return f'<div class="mpic-tiles">{found_tiles}</div>'


def never_reused(found: Savings) -> str:
    never = [item for item in found.items if not item.uses]
    what = "references" if found.scope == "all" else "files"
    if not found.items:
        return f'<p class="mpic-hint">There are no {what}.</p>'
    oldest = f" This looks at the {len(found.items):,} oldest only." if found.more_items else ""
    if not never:
        return f'<p class="mpic-hint">All {what} were reused at least once.{oldest}</p>'
    whole = size(sum(item.bytes for item in never))
    told = f"No answer has reused these {len(never):,} {what} ({whole}). They could go.{oldest}"
    rows = [(item.name, item.kind, size(item.bytes), day(item.created_at)) for item in never[:100]]
    return f'<p class="mpic-hint">{told}</p>{table(("Name", "Kind", "Size", "Added"), rows)}'
