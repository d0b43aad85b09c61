"""Events that show the server's model, policies and savings, and the settings that the browser keeps."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from html import escape
from typing import Any

import gradio as gr

from mpic.errors import Forbidden, MPICError
from mpic.link import AUTO
from mpic.webui import live, parts, policies
from mpic.webui.chats import OpenChat, StoredChat, Wishes
from mpic.webui.events import client_of, told, visitor_of
from mpic.webui.plots import plots
from mpic.webui.samples import PARAMETERS, samples

KNOWS = """It knows drawings of coloured shapes and digits (what is where, which colour, how many), short texts about
people (where they live, their job, pet and friend), and cards and codes in short texts, across several documents at
once. **Nothing else:** it has {} million parameters and has never seen a photograph or a fact about the world, so
questions about those get a confident and wrong answer. To serve a model of your own: `mpic serve --model
PATH_OR_HUB_ID`."""


@told
async def load(settings: Any, request: gr.Request) -> tuple[Any, ...]:
    """Fill in the page: its user, the store, the pickers with the user's own choices, and what the model knows."""
    visitor = visitor_of(request)
    client = visitor.client
    health = await client.health()
    try:
        cost = (await client.savings(days=1)).ms_per_token
    except MPICError:
        cost = None
    chosen = settings.get(visitor.user, {}) if isinstance(settings, dict) else {}
    own = {name: chosen.get(name) for name in Wishes.model_fields} if isinstance(chosen, dict) else {}
    menu = policies.menu(list(health.policies), health.policy)
    offered, default = [(_policy_label(one), one["name"]) for one in menu], health.policy
    if health.auto:
        offered.insert(0, (f"{AUTO}: {health.auto.why}", AUTO))
        default = AUTO if health.auto.default else default
    presses = policies.press_menu(list(health.presses), health.press)
    retrieval = [(f"{name}: {about}", mode) for mode, (name, about) in policies.RETRIEVAL.items()]
    page = OpenChat(user=visitor.user, chat=StoredChat(id="none"), ms_per_token=cost).model_dump()
    admin = gr.update(visible=visitor.role == "admin")
    return (
        gr.update(page=page),
        _who(visitor),
        gr.update(
            choices=offered,
            value=own.get("policy") or default,
        ),
        gr.update(
            choices=[(f"{one['name']}: {one['about']}", one["name"]) for one in presses],
            value=own.get("press") or (presses[0]["name"] if presses else None),
            visible=bool(presses),
        ),
        gr.update(choices=retrieval, value=own.get("retrieval") or "off"),
        own.get("system") or "",
        own.get("temperature") or 0,
        own.get("length") or Wishes().length,
        _welcome(health.model),
        _policy_table(menu),
        admin,
        admin,
        admin,
    )


def _who(visitor: Any) -> str:
    out = (
        '<form method="post" action="logout"><button class="mpic-button">Log out</button></form>'
        if visitor.keyed
        else ""
    )
    colours = parts.button("Light or dark", "colours", "switch")
    exports = parts.button("Export all chats", "store", "exportAll") + parts.button(
        "Delete all", "store", "deleteAll"
    )
    name = f'<p class="mpic-hint">{escape(visitor.user)}, {visitor.role}</p>'
    return f'{name}<p class="mpic-row">{exports}{colours}{out}</p>'


def _policy_label(one: dict[str, Any]) -> str:
    return f"{one['name']}: {one['about']}"


def _welcome(model: Any) -> str:
    """Return what the model knows, and the sample questions about it."""
    context = f"{model.context_length:,} tokens of context"
    kinds = "texts and images" if "image" in model.modalities else "texts only"
    knows = (
        KNOWS.format(PARAMETERS[model.name])
        if model.name in PARAMETERS
        else "What it knows, its own model card says."
    )
    knows = knows.replace("**Nothing else:**", "<b>Nothing else:</b>").replace(
        "`mpic serve --model\nPATH_OR_HUB_ID`", "<code>mpic serve --model PATH_OR_HUB_ID</code>"
    )
    tried = "".join(
        parts.button(f"{one.title}: {one.text}", "chat", "sample", id=one.id) for one in samples(model.name)
    )
    hint = "A click adds the files it needs and asks." if tried else ""
    return (
        f"<h2>Ask about your images and documents</h2><p>Add files; each is compiled once and gets a handle such as "
        f"<code>IMAGE#CAT</code>. Write handles anywhere in a question, in any order. Below each answer you see how "
        f"much "
        f"was reused. This server runs <b>{escape(model.name)}</b> with {context}, for {kinds}. {knows}</p>"
        f'<p class="mpic-hint">{hint}</p><div class="mpic-samples">{tried}</div>'
    )


def _policy_table(menu: list[dict[str, Any]]) -> str:
    rows = [
        (
            one["name"],
            one["about"],
            "" if one["lost"] is None else f"{one['lost']:g}",
            "" if one["fewer"] is None else f"{one['fewer']:g} times",
        )
        for one in menu
    ]
    shown = "".join(
        f'<figure><img src="plots/{escape(one.name)}.png" alt="{escape(one.title)}" loading="lazy">'
        f"<figcaption><b>{escape(one.title)}</b> {escape(one.text)}</figcaption></figure>"
        for one in plots()
    )
    heads = ("Policy", "What it does", "Points lost of 100", "Fewer operations than full")
    note = '<p class="mpic-hint">Measured on the bundled demo model.</p>'
    return f'{parts.table(heads, rows)}{note}<div class="mpic-plots">{shown}</div>'


@told
async def keep(settings: Any, request: gr.Request, *values: Any) -> Any:
    """Return the settings for the browser to keep, updated with this user's current choices."""
    if values[0] is None:  # the page is not filled in yet
        return gr.skip()
    known = settings if isinstance(settings, dict) else {}
    return {**known, visitor_of(request).user: dict(zip(Wishes.model_fields, values))}


@told
async def savings(days: int, scope: str, price: float, request: gr.Request) -> tuple[Any, Any, Any]:
    """Return the sums, the bars for each day, and the files that were never reused."""
    import pandas

    found = await client_of(request).savings(days=int(days), scope=scope)
    begin = datetime.now(UTC).date() - timedelta(days=int(days) - 1)
    rows = []
    for one in found.days:
        rows.append((one.day, "not computed", one.saved_tokens))
        rows.append((one.day, "computed", one.prompt_tokens - one.saved_tokens))
    rows = rows or [(begin.isoformat(), "computed", 0)]
    frame = pandas.DataFrame(rows, columns=["day", "tokens of prompts", "count"])
    return parts.tiles(found, max(0.0, float(price or 0))), frame, parts.never_reused(found)


@told
async def figures(request: gr.Request) -> str:
    """Return the server's figures, for administrators."""
    if visitor_of(request).role != "admin":
        raise Forbidden("this needs a key with the role admin")
    found = live.figures(await client_of(request).metrics())
    rows: list[tuple[str, str]] = [
        ("running, waiting", f"{found['running']}, {found['waiting']}"),
        ("tokens of prompts, reused", f"{found['prompt_tokens']:,}, {found['reused_tokens']:,}"),
        ("evictions", f"{found['evictions']:,}"),
    ]
    rows += [
        (f"first token, {name}", parts.ms(value)) for name, value in found["first_token_ms"].items() if value
    ]
    for tier in found["tiers"]:
        most = f" of {parts.size(tier['budget'])}" if tier["budget"] else ""
        used = f"{parts.size(tier['bytes'])}{most}, {tier['chunks']:,} chunks"
        rows.append((tier["tier"], used))
    return parts.table(("Figure", "Now"), rows)
