"""The page: Gradio's layout and events around HTML that is made here."""

from __future__ import annotations

import re
from importlib.resources import files
from typing import Any
from urllib.parse import quote

import gradio as gr
from fastapi import FastAPI, Request
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mpic.webui import policies
from mpic.webui.conversation import Conversation
from mpic.webui.desk import Desk
from mpic.webui.events import EVENT_BYTES, Known
from mpic.webui.gate import ROOT
from mpic.webui.samples import welcome

SEND_EVENTS = "element.addEventListener('click', e => { const b = e.target.closest('[data-act]'); " + (
    "if (b && !b.disabled) trigger('click', {...b.dataset}); });"
)


def make(app: ASGIApp) -> FastAPI:
    """The application that serves the page at ``/ui``."""
    root = FastAPI(openapi_url=None)
    page = build(app)
    gr.mount_gradio_app(
        root,
        page,
        path=ROOT,
        auth_dependency=_user,
        footer_links=[],
        run_history=False,
        show_error=False,  # the text of an exception that nobody expected is for the log; ours are said by the handlers
        max_file_size=EVENT_BYTES,  # nothing is uploaded through Gradio; the gate closes that route
        ssr_mode=False,
        enable_monitoring=False,
        pwa=False,
        mcp_server=False,
        theme=_theme(),
        css=_static("app.css"),
        js=_static("app.js"),
        head='<meta name="color-scheme" content="light dark"><meta name="referrer" content="same-origin">',
    )
    root.add_middleware(_Tidy)
    here = {id: len(event.inputs) for id, event in page.fns.items() if event.fn is not None}
    root.add_middleware(Known, values=here)
    return root


class _Tidy:
    """Takes out of Gradio's page what points elsewhere: pictures for social networks, and a manifest at the root of the
    site that is not there. Puts our icon in, or browsers would look for one at the root too."""

    ELSEWHERE = re.compile(rb"""<meta\s[^>]*(?:og:|twitter:)[^>]*>|<link rel="manifest"[^>]*>""")
    ICON = b'<link rel="icon" href="data:image/svg+xml,%s"></head>'

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._icon = self.ICON % quote(_static("icon.svg")).encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"].rstrip("/") != ROOT:
            return await self._app(scope, receive, send)
        scope["headers"] = [(n, v) for n, v in scope["headers"] if n.lower() != b"accept-encoding"]
        start: Message = {}
        body = b""

        async def sending(message: Message) -> None:
            nonlocal start, body
            if message["type"] == "http.response.start":
                start = message
                return
            body += message.get("body", b"")
            if not message.get("more_body"):
                body = self.ELSEWHERE.sub(b"", body).replace(b"</head>", self._icon, 1)
                MutableHeaders(scope=start)["content-length"] = str(len(body))
                await send(start)
                await send({"type": "http.response.body", "body": body})

        await self._app(scope, receive, sending)


def _user(request: Request) -> str | None:
    visitor = getattr(request.state, "visitor", None)
    return visitor and visitor.user


def build(app: ASGIApp) -> gr.Blocks:
    desk = Desk(app)
    with gr.Blocks(title="MPIC", analytics_enabled=False, fill_width=True, delete_cache=None) as page:
        conversation = gr.State(Conversation())
        top = gr.HTML(elem_id="m-top", apply_default_css=False, js_on_load="")
        with gr.Row(elem_id="m-body", equal_height=False):
            with gr.Column(elem_id="m-side", min_width=0):
                gr.HTML(_static("side.html"), apply_default_css=False, js_on_load="")
                library = gr.HTML(
                    elem_id="m-library", apply_default_css=False, js_on_load=SEND_EVENTS, container=False
                )
                gr.HTML('<h2 class="m-h">Live</h2>', apply_default_css=False, js_on_load="")
                live = gr.HTML(elem_id="m-live", apply_default_css=False, js_on_load="")
            with gr.Column(elem_id="m-main", min_width=0), gr.Tabs(elem_id="m-tabs"):
                with gr.Tab("Chat", id="chat"):
                    said = gr.HTML(
                        welcome(), elem_id="m-said", apply_default_css=False, js_on_load=SEND_EVENTS
                    )
                    now = gr.HTML(elem_id="m-now", apply_default_css=False, js_on_load="")
                    with gr.Column(elem_id="m-composer"):
                        gr.HTML('<div id="m-chips"></div>', apply_default_css=False, js_on_load="")
                        box = gr.Textbox(
                            placeholder="Ask. Write IMAGE# or FILE# to name a file.",
                            lines=1,
                            max_lines=8,
                            show_label=False,
                            label="Your question",
                            elem_id="m-box",
                            container=False,
                            autofocus=True,
                        )
                        with gr.Row(elem_id="m-tools"):
                            policy = gr.Dropdown(
                                [],
                                label="Policy",
                                show_label=False,
                                container=False,
                                allow_custom_value=True,
                                elem_id="m-policy",
                                min_width=120,
                            )
                            retrieval = gr.Dropdown(
                                [(name, mode) for mode, (name, _) in policies.RETRIEVAL.items()],
                                value="off",
                                label="Reference library",
                                show_label=False,
                                container=False,
                                filterable=False,
                                elem_id="m-retrieval",
                                min_width=120,
                            )
                            gr.HTML(
                                '<button type="button" class="m-button" data-do="pick">Add files</button>',
                                elem_id="m-attach",
                                apply_default_css=False,
                                js_on_load="",
                            )
                            send = gr.Button("Send", variant="primary", elem_id="m-send", min_width=84)
                            stop = gr.Button("Stop", elem_id="m-stop", visible=False, min_width=84)
                        line = gr.HTML(elem_id="m-policy-line", apply_default_css=False, js_on_load="")
                with gr.Tab("References", id="references", visible=False) as kept:
                    finder = gr.HTML(
                        _static("references.html"),
                        elem_id="m-finder",
                        apply_default_css=False,
                        js_on_load=_static("references.js"),
                    )
                    shelf = gr.HTML(elem_id="m-references", apply_default_css=False, js_on_load=SEND_EVENTS)
                with gr.Tab("Policies", id="policies"):
                    guide = gr.HTML(elem_id="m-guide", apply_default_css=False, js_on_load="")
        refresh = gr.Button("refresh", elem_id="m-refresh", visible="hidden")
        look = gr.Button("look", elem_id="m-look", visible="hidden")
        new = gr.Button("new", elem_id="m-new", visible="hidden")

        asking = [said, now, box, send, stop]
        # preprocess: the gate has checked the values, and the handlers and the API say what is wrong with them
        quiet: dict[str, Any] = {"show_progress": "hidden", "api_visibility": "private", "preprocess": False}
        many: dict[str, Any] = {**quiet, "concurrency_limit": None}
        opened = [top, policy, line, library, live, guide, said, kept, shelf]
        page.load(desk.open, [conversation], opened, **many)
        finder.submit(desk.find, None, [shelf], **many)
        shelf.click(desk.shelve, None, [shelf], **many)
        chosen = [policy, retrieval]
        gr.on([policy.change, retrieval.change], policies.line, chosen, [line], queue=True, **many)
        ask = gr.on(
            [send.click, box.submit],
            desk.ask,
            [box, *chosen, conversation],
            asking,
            **many,
        )
        act = said.click(desk.act, [*chosen, conversation], [*asking, library], **many)
        stop.click(desk.stop, [conversation], asking, cancels=[ask, act], **many)
        new.click(desk.new, [conversation], [conversation, *asking], cancels=[ask, act], **many)
        library.click(desk.manage, [conversation], [library], **many)
        refresh.click(desk.files, [conversation], [library], **many)
        for done in (look.click, ask.then, act.then):  # app.js says when the first is pressed
            done(desk.look, None, [library, live], **many)
    page.queue(default_concurrency_limit=None, api_open=False)
    return page


def _static(name: str) -> str:
    return (files("mpic.webui") / "static" / name).read_text(encoding="utf-8")


def _theme() -> gr.themes.Base:
    """Gradio's own fonts and colours; whatever the page draws itself is in ``app.css``. The fonts come with Gradio; of
    their weights only these two are whole (its SemiBold has no letter a)."""
    sans, mono = (
        gr.themes.LocalFont(name, weights=(400, 700)) for name in ("IBM Plex Sans", "IBM Plex Mono")
    )
    return gr.themes.Base(
        primary_hue="teal",
        neutral_hue="stone",
        radius_size="md",
        font=[sans, "system-ui", "sans-serif"],
        font_mono=[mono, "ui-monospace", "monospace"],
    )
