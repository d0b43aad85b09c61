"""Helpers shared by all events of the page: the visitor, the data of a button, and the display of errors."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import gradio as gr

from mpic.client import AsyncMPIC
from mpic.http.errors import as_mpic_error
from mpic.webui.visitors import Visitor


def visitor_of(request: gr.Request) -> Visitor:
    """Return the visitor whom the gate has found."""
    assert request.request is not None  # Gradio leaves it out only of events without a browser
    return request.request.state.visitor


def client_of(request: gr.Request) -> AsyncMPIC:
    return visitor_of(request).client


def given(event: gr.EventData) -> dict[str, Any]:
    """Return the data that a button in HTML has sent. It is untrusted and may be anything."""
    return event._data if isinstance(event._data, dict) else {}


def told(act: Callable[..., Any]) -> Callable[..., Any]:
    """Make an event show its errors to the user: ours as they are, all others as an internal error."""

    def shown(error: Exception) -> gr.Error:
        known = as_mpic_error(error)
        return gr.Error(f"{known.message} [{known.code}]", title="That did not work", print_exception=False)

    if inspect.isasyncgenfunction(act):

        @functools.wraps(act)
        async def steps(*values: Any, **others: Any) -> Any:
            try:
                async for step in act(*values, **others):
                    yield step
            except Exception as error:
                raise shown(error) from None

        return steps

    @functools.wraps(act)
    async def once(*values: Any, **others: Any) -> Any:
        try:
            return await act(*values, **others)
        except Exception as error:
            raise shown(error) from None

    return once


def panel(name: str, **options: Any) -> gr.HTML:
    """Return HTML whose buttons, and those in messages, send events to this part of the page (``parts.button``).

    Args:
        name: what the buttons send to.
    """
    listen = f"document.addEventListener('mpic-{name}', (event) => trigger('act', event.detail));"
    return gr.HTML(js_on_load=listen, **options)


def with_own_uploads(component: gr.components.Component) -> Any:
    """Return a file component whose value reaches the events as ``page.py`` passes it on.

    Gradio's own check of such values wants paths of its own. (A subclass would say that more plainly, but Gradio writes
    a file beside the source of each.)
    """
    component.data_model = None
    component.api_info = lambda: {"type": "object"}
    component.example_inputs = lambda: None
    return component
