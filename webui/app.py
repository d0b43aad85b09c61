"""The page: a Gradio app. Its events are in ``*_events.py``, its HTML in ``parts.py``, its scripts in ``*.js``."""

from __future__ import annotations

from importlib.resources import files
from typing import Any

import gradio as gr
from fastapi import FastAPI, Request

from mpic.webui import about_events
from mpic.webui.chat_events import ChatEvents
from mpic.webui.events import panel, with_own_uploads
from mpic.webui.gate import ROOT
from mpic.webui.library_events import LibraryEvents
from mpic.webui.uploads import Uploads

WAITING = 512
"""Maximum waiting events of all users."""
QUIET: dict[str, Any] = {"api_visibility": "private", "show_progress": "hidden"}
RAW: dict[str, Any] = {**QUIET, "preprocess": False}
"""Arguments of events whose files are handled by ``uploads.py`` and not by Gradio."""
TAKE = """(value) => {
    const names = (value?.files || []).map((file) => file.path).join(' ');
    if (names && names !== window.mpicTaken) document.querySelector('#take').click();
    window.mpicTaken = names;
}"""
"""Adds files as soon as they are in the box; the box's value changes twice when files arrive."""
AS_IT_IS = "(_, ...others) => [window.mpicPage(), ...others]"
"""Passes an event the script's version of the chat, because the latest change may not have reached Gradio's state
yet."""
EMPTY = "() => ({ text: '', files: [] })"
FONT = ["system-ui", "sans-serif"]


def mounted(uploads: Uploads) -> tuple[FastAPI, gr.Blocks]:
    """Return the app, as the last route of an application that starts and ends it."""
    blocks = build(uploads)
    blocks.queue(api_open=False, max_size=WAITING, default_concurrency_limit=None)
    blocks.state_session_capacity = WAITING
    parent = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
    gr.mount_gradio_app(
        parent,
        blocks,
        ROOT,
        footer_links=[],
        run_history=False,
        auth_dependency=_user,
        allowed_paths=[],
        blocked_paths=["/"],
        max_file_size=uploads.most_bytes,
        show_error=False,
        ssr_mode=False,
        enable_monitoring=False,
        pwa=False,
        mcp_server=False,
        theme=gr.themes.Default(font=FONT, font_mono=["ui-monospace", "monospace"], primary_hue="teal"),
        css=_read("style.css"),
        js=_read("page.js"),
    )
    return parent, blocks


def _user(request: Request) -> str | None:
    """Return the user whom the gate has let in."""
    visitor = getattr(request.state, "visitor", None)
    return visitor and visitor.user


def _read(name: str) -> str:
    return (files("mpic.webui") / name).read_text(encoding="utf-8")


STORE = (
    '<button type="button" class="mpic-button" data-act="new">New chat</button>'
    '<p class="mpic-said" role="status"></p><ul class="mpic-chats" aria-label="chats"></ul>'
)
"""The chats of the browser; ``store.js`` keeps and lists them."""


def build(uploads: Uploads) -> gr.Blocks:
    """Return the page, with its events."""
    chat, library = ChatEvents(uploads), LibraryEvents(uploads)
    with gr.Blocks(title="MPIC", analytics_enabled=False, fill_height=True) as page:
        settings = gr.BrowserState(
            {}, storage_key="mpic-settings", secret="mpic"
        )  # the browser store holds no secrets
        timer = gr.Timer(1.5, active=False)
        with gr.Sidebar(width=290):
            gr.HTML("<h1>MPIC</h1>", js_on_load=None)
            # ``page`` is a ``chats.OpenChat``. It is no ``value``, which Gradio would send back to its own state later
            store = gr.HTML(html_template=STORE, js_on_load=_read("store.js"), elem_id="store", page=None)
            gr.HTML("<h2>Files</h2>", js_on_load=None)
            listed = panel("file", elem_id="library")
            who = gr.HTML(js_on_load=None)
        with gr.Tabs() as tabs:
            with gr.Tab("Chat", id="chat", scale=1):
                welcome = gr.HTML(elem_id="welcome", js_on_load=None)
                bot = gr.Chatbot(
                    elem_id="bot",
                    label="Chat",
                    show_label=False,
                    height="64vh",
                    editable="user",
                    buttons=["copy"],
                    scale=1,
                )
                box = with_own_uploads(
                    gr.MultimodalTextbox(
                        elem_id="box",
                        label="Your question",
                        show_label=False,
                        placeholder="Ask about IMAGE#… or FILE#…; drop or paste files here",
                        file_count="multiple",
                        max_plain_text_length=100_000,
                        autofocus=True,
                    )
                )
                take = gr.Button("add", elem_id="take", visible="hidden")
                stop = gr.Button("Stop", elem_id="stop", variant="stop")
                with gr.Row():
                    policy = gr.Dropdown(label="Policy", allow_custom_value=True, elem_id="policy")
                    retrieval = gr.Dropdown(label="References", elem_id="retrieval")
                    press = gr.Dropdown(label="Compression", allow_custom_value=True, elem_id="press")
            with gr.Tab("Library", id="library"):
                add = with_own_uploads(
                    gr.File(label="Add files", file_count="multiple", height=120, elem_id="add")
                )
                shown = gr.HTML(visible=False, elem_id="file", js_on_load=None)
                file_id = gr.Textbox(visible=False)
                with gr.Row(visible=False) as naming:
                    handle = gr.Textbox(label="Handle", max_length=64, elem_id="handle")
                    rename = gr.Button("Rename", elem_id="rename")
            with gr.Tab("References", id="references") as references_tab:
                with gr.Row():
                    query = gr.Textbox(label="Search by words", elem_id="query", scale=2)
                    similar = with_own_uploads(
                        gr.File(
                            label="Search by a picture", file_count="single", height=120, elem_id="similar"
                        )
                    )
                search = gr.Button("Search", variant="primary", elem_id="search")
                with gr.Accordion("Add a reference", open=False, visible=False) as adding:
                    new = with_own_uploads(
                        gr.File(
                            label="Image or text", file_count="single", height=120, elem_id="new-reference"
                        )
                    )
                    title = gr.Textbox(label="Title", max_length=200, elem_id="new-title")
                    description = gr.Textbox(label="Description", elem_id="new-description")
                    put = gr.Button("Add", variant="primary", elem_id="put")
                found = panel("ref", elem_id="references")
                reference = gr.HTML(visible=False, elem_id="reference", js_on_load=None)
            with gr.Tab("Savings", id="savings") as savings_tab:
                with gr.Row():
                    days = gr.Dropdown([7, 30, 90, 365], value=30, label="Days", elem_id="days")
                    scope = gr.Radio(
                        [("mine", "mine"), ("all users", "all")], value="mine", label="Of", visible=False
                    )
                    price = gr.Number(0, label="Price of a million prompt tokens", minimum=0, elem_id="price")
                sums = gr.HTML(elem_id="sums", js_on_load=None)
                bars = gr.BarPlot(
                    x="day",
                    y="count",
                    color="tokens of prompts",
                    title="Tokens of prompts by day",
                    height=220,
                )
                gr.HTML("<h2>Never reused</h2>", js_on_load=None)
                never = gr.HTML(js_on_load=None)
            with gr.Tab("Policies", id="policies"):
                table = gr.HTML(elem_id="policies", js_on_load=None)
            with gr.Tab("Settings", id="settings"):
                system = gr.Textbox(
                    label="System prompt", lines=3, elem_id="system", info="Stands before every chat."
                )
                temperature = gr.Number(
                    0,
                    label="Temperature",
                    minimum=0,
                    maximum=2,
                    step=0.1,
                    info="0 always gives the likeliest answer.",
                )
                length = gr.Number(
                    256, label="Longest answer, in tokens", minimum=1, precision=0, elem_id="length"
                )
                with gr.Accordion("The server now", open=False, visible=False, elem_id="server") as server:
                    again = gr.Button("Refresh")
                    figures = gr.HTML(js_on_load=None)
        pickers = [policy, press, retrieval, system, temperature, length]
        drawn = [bot, store]
        filled = [store, who, policy, press, retrieval, system, temperature, length, welcome, table]
        page.load(about_events.load, [settings], [*filled, adding, scope, server], **QUIET)
        page.load(library.refresh, None, [listed, timer], **QUIET)

        asked = gr.on(
            [box.submit, store.submit, bot.retry, bot.edit],
            chat.ask,
            [store, box, *pickers],
            drawn,
            js=AS_IT_IS,
            trigger_mode="multiple",  # the second is told that the first is being answered
            **RAW,
        )
        asked.failure(None, None, None, js="() => document.dispatchEvent(new CustomEvent('mpic-failed'))")
        asked.then(library.refresh, None, [listed, timer], **QUIET)
        bot.undo(chat.undo, [store], [*drawn, box], js=AS_IT_IS, **RAW)
        bot.clear(
            None,
            None,
            None,
            js="() => document.dispatchEvent(new CustomEvent('mpic-store', { detail: { do: 'new' } }))",
        )
        for stopped in (stop.click, store.stopped):
            stopped(chat.stop, [store], drawn, js=AS_IT_IS, trigger_mode="multiple", **RAW)
        store.taken(None, None, [box], js=EMPTY)
        store.opened(chat.opened, [store], drawn, js=AS_IT_IS, trigger_mode="always_last", **RAW)
        box.change(
            None,
            [box],
            None,
            js=TAKE,
        )
        take.click(chat.take, [box], [box], **RAW).then(library.refresh, None, [listed, timer], **QUIET)

        timer.tick(library.refresh, None, [listed, timer], **QUIET)
        add.upload(library.add, [add], [listed, timer, add], **RAW)
        # by default a button that is pressed while another's event runs does nothing
        listed.act(
            library.act,
            None,
            [listed, timer, shown, file_id, handle, tabs, naming],
            trigger_mode="multiple",
            **QUIET,
        )
        rename.click(library.rename, [file_id, handle], [listed, timer], **QUIET)
        references_tab.select(library.references, None, [found], **QUIET)
        gr.on([search.click, query.submit], library.search, [query, similar], [found], **RAW)
        put.click(library.add_reference, [new, title, description], [found, new, title, description], **RAW)
        found.act(library.act_reference, None, [found, reference, tabs], trigger_mode="multiple", **QUIET)

        money = [days, scope, price]
        gr.on(
            [savings_tab.select, *(one.change for one in money)],
            about_events.savings,
            money,
            [sums, bars, never],
            **QUIET,
        )
        gr.on([server.expand, again.click], about_events.figures, None, [figures], **QUIET)
        gr.on([one.change for one in pickers], about_events.keep, [settings, *pickers], [settings], **QUIET)
    return page
