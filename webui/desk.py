"""What happens when somebody does something on the page. Every handler asks the API, as the visitor."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import gradio as gr
from starlette.types import ASGIApp

from mpic.client.base import pauses
from mpic.errors import MPICError
from mpic.webui import library, live, policies, references, top
from mpic.webui.api import API
from mpic.webui.conversation import Conversation, Run, Turn
from mpic.webui.events import OnFile, OnReference, OnTranscript, Search
from mpic.webui.samples import Sample, samples, welcome
from mpic.webui.transcript import transcript

MAX_TOKENS = 512
DAY = 86_400
SHOW_SECONDS = 0.06  # between two looks at an answer being written
COMPILE_SECONDS = 20.0  # a sample question waits so long for its samples, then asks anyway

Update = Any


class Desk:
    """The handlers of the page.

    Args:
        app: the application whose API is asked.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    def _api(self, request: gr.Request) -> API:
        return API(self._app, request.request.state.visitor.key)

    # ---- the page itself

    async def open(self, conversation: Conversation, request: gr.Request) -> tuple[Update, ...]:
        """Everything that is there when the page opens."""
        self._own(conversation, request)
        api = self._api(request)
        # one after the other: the visitor's key may allow one request at a time
        health, files = await api.health(), await api.files()
        metrics, shelf = await api.metrics(), await self._whole_shelf(api, request)
        visitor = request.request.state.visitor
        default, forms = health["policy"], health["policies"]
        choices = policies.offered(forms, default)
        return (
            top.bar(visitor, health["model"]),
            gr.update(choices=choices, value=default),
            policies.line(default),
            library.panel(files),
            live.panel(health, metrics),
            policies.page(forms, default),
            welcome() if not conversation.turns else transcript(conversation.turns),
            gr.update(visible=visitor.role == "admin"),
            shelf,
        )

    async def look(self, request: gr.Request) -> tuple[Update, ...]:
        """The library and the figures as they are now."""
        api = self._api(request)
        try:
            health, files, metrics = await api.health(), await api.files(), await api.metrics()
        except MPICError:
            return gr.skip(), gr.skip()
        return library.panel(files), live.panel(health, metrics)

    # ---- the library

    async def files(self, conversation: Conversation, request: gr.Request) -> Update:
        return await _library(self._api(request))

    async def manage(self, conversation: Conversation, event: gr.EventData, request: gr.Request) -> Update:
        """A button of the library panel."""
        api = self._api(request)
        try:
            asked = OnFile.of(event._data)
            if asked.act == "delete":
                await api.delete(asked.id)
            else:
                end = (await api.file(asked.id))["expires_at"]
                if end is not None:
                    await api.extend(asked.id, max(0, round(end - time.time())) + DAY)
        except MPICError as exc:
            _warn(exc)
        return await _library(api)

    # ---- the references

    async def find(self, event: gr.EventData, request: gr.Request) -> Update:
        """What was searched for; all of them when it was nothing."""
        api = self._api(request)
        try:
            asked = Search.of(event._data)
            if asked.nothing:
                return await self._whole_shelf(api, request)
            found = await api.search(asked.query, asked.image)
        except MPICError as exc:
            return references.failed(exc.message, exc.code)
        like = f"most like “{asked.query}”" if asked.query else "most like this image"
        return self._shelf(found, request, like, references.MISSED)

    async def shelve(self, event: gr.EventData, request: gr.Request) -> Update:
        """A button of the shelf."""
        api = self._api(request)
        try:
            await api.remove(OnReference.of(event._data).id)
        except MPICError as exc:
            _warn(exc)
        return await self._whole_shelf(api, request)

    async def _whole_shelf(self, api: API, request: gr.Request) -> str:
        try:
            found, more = await api.references()
        except MPICError as exc:
            return references.failed(exc.message, exc.code)
        return self._shelf(found, request, references.whole(len(found), more))

    def _shelf(
        self,
        found: list[dict[str, Any]],
        request: gr.Request,
        note: str,
        empty: str = references.EMPTY,
    ) -> str:
        admin = request.request.state.visitor.role == "admin"
        return references.shelf(found, admin, note, empty)

    # ---- chat

    async def ask(
        self,
        text: str | None,
        policy: str | None,
        retrieval: str | None,
        conversation: Conversation,
        request: gr.Request,
    ) -> AsyncIterator[tuple[Update, ...]]:
        """Answer what is in the box."""
        self._own(conversation, request)
        text = (text or "").strip()
        if conversation.running or not text:
            yield _nothing()
            return
        async for update in self._answer(text, _run(policy, retrieval), conversation, request):
            yield update

    async def act(
        self,
        policy: str | None,
        retrieval: str | None,
        conversation: Conversation,
        event: gr.EventData,
        request: gr.Request,
    ) -> AsyncIterator[tuple[Update, ...]]:
        """A button of the transcript: a sample question, or an answer once more without reuse."""
        self._own(conversation, request)
        if conversation.running:
            return
        try:
            asked = OnTranscript.of(event._data)
        except MPICError as exc:
            _warn(exc)
            return
        if asked.act == "again" and asked.turn is not None:
            async for update in self._again(asked.turn, conversation, request):
                yield *update, gr.skip()
        sample = next((s for s in samples() if s.id == asked.sample), None)
        if asked.act == "sample" and sample is not None:
            async for update in self._sample(sample, policy, retrieval, conversation, request):
                yield update

    async def _sample(
        self,
        sample: Sample,
        policy: str | None,
        retrieval: str | None,
        conversation: Conversation,
        request: gr.Request,
    ) -> AsyncIterator[tuple[Update, ...]]:
        """Upload what a sample question is about, then ask it."""
        turn = Turn(sample.text, _run(policy, retrieval))
        conversation.turns.append(turn)
        try:
            yield *_running(conversation), gr.skip()
            await self._upload(sample.paths, request)
        except MPICError as exc:
            turn.answer.fail(exc.code, exc.message)
            yield *_ended(conversation, ""), gr.skip()
            return
        finally:
            turn.answer.end()
        conversation.turns.remove(turn)
        shown = await _library(self._api(request))
        async for update in self._answer(sample.text, _run(policy, retrieval), conversation, request):
            yield *update, shown
            shown = gr.skip()

    async def stop(self, conversation: Conversation) -> tuple[Update, ...]:
        conversation.end()
        return _ended(conversation, gr.skip())

    async def new(self, conversation: Conversation, request: gr.Request) -> tuple[Update, ...]:
        """Forget what was said."""
        fresh = Conversation(owner=request.username)
        return fresh, welcome(), "", gr.skip(), gr.update(visible=True), gr.update(visible=False)

    async def _answer(
        self, text: str, run: Run, conversation: Conversation, request: gr.Request
    ) -> AsyncIterator[tuple[Update, ...]]:
        api = self._api(request)
        turn = Turn(text, run)
        number = len(conversation.turns)
        conversation.turns.append(turn)
        try:
            yield _running(conversation)
            turn.files = {f["handle"]: f for f in await api.files() if f["handle"]}
            async for _ in self._write(turn.answer, conversation.messages(number), api):
                yield gr.skip(), transcript([turn], number), gr.skip(), gr.skip(), gr.skip()
        except MPICError as exc:
            turn.answer.fail(exc.code, exc.message)
        finally:
            turn.answer.end()
        yield _ended(conversation, text if turn.answer.state == "failed" else gr.skip())

    async def _again(
        self, number: int, conversation: Conversation, request: gr.Request
    ) -> AsyncIterator[tuple[Update, ...]]:
        if not 0 <= number < len(conversation.turns):
            return
        turn = conversation.turns[number]
        run = turn.again = Run("full", retrieval=turn.answer.retrieval)
        try:
            yield _running(conversation, whole=True)
            async for _ in self._write(run, conversation.messages(number), self._api(request)):
                yield transcript(conversation.turns), gr.skip(), gr.skip(), gr.skip(), gr.skip()
        finally:
            run.end()
        yield _ended(conversation, gr.skip())

    async def _write(self, run: Run, messages: list[dict[str, Any]], api: API) -> AsyncIterator[None]:
        """Fills the run; yields now and then when there is something new to see. Ends the request when left early."""
        shown = 0.0
        pieces = api.ask(messages, run.policy, run.retrieval, MAX_TOKENS)
        try:
            async for piece in pieces:
                run.state = "writing" if piece.text else run.state
                run.text, run.usage = run.text + piece.text, piece.usage or run.usage
                run.citations += piece.citations
                if time.monotonic() - shown > SHOW_SECONDS:
                    shown = time.monotonic()
                    yield
            run.state = "done"
        except MPICError as exc:
            run.fail(exc.code, exc.message)
        finally:
            await pieces.aclose()

    async def _upload(self, paths: dict[str, Path], request: gr.Request) -> None:
        """Upload what is not there yet, and wait until all of it is compiled."""
        api = self._api(request)
        wanted = {handle.upper() for handle in paths}  # handles ignore case
        there = {(f["handle"] or "").upper() for f in await api.files()}
        for handle, path in paths.items():
            if handle.upper() not in there:
                await api.upload(path.name, await asyncio.to_thread(path.read_bytes), handle)
        until = time.monotonic() + COMPILE_SECONDS
        for pause in pauses():
            used = [f for f in await api.files() if (f["handle"] or "").upper() in wanted]
            if all(f["state"] != "compiling" for f in used) or time.monotonic() > until:
                return
            await asyncio.sleep(pause)

    def _own(self, conversation: Conversation, request: gr.Request) -> None:
        """The gate binds a page to its user; this holds even if it did not."""
        conversation.owner = conversation.owner or request.username
        if conversation.owner != request.username:
            raise gr.Error("this page belongs to somebody else; reload it")


async def _library(api: API) -> Update:
    """The library as it is now; when the API refuses, as it was: the page asks again."""
    try:
        return library.panel(await api.files())
    except MPICError:
        return gr.skip()


def _warn(error: MPICError) -> None:
    """Says on the page why nothing was done."""
    gr.Warning(f"{error.message} [{error.code}]", title="That did not work")


def _run(policy: str | None, retrieval: str | None) -> Run:
    """An answer to begin; None is what a picker says that was emptied."""
    return Run(policy or "", retrieval=retrieval or "off")


def _nothing() -> tuple[Update, ...]:
    return (gr.skip(),) * 5


def _running(conversation: Conversation, whole: bool = False) -> tuple[Update, ...]:
    """The last turn is being written; with ``whole`` one of the others is."""
    turns = conversation.turns
    done, last = (turns, []) if whole else (turns[:-1], turns[-1:])
    return (
        transcript(done),
        transcript(last, len(done)),
        gr.skip() if whole else "",
        gr.update(visible=False),
        gr.update(visible=True),
    )


def _ended(conversation: Conversation, box: Update) -> tuple[Update, ...]:
    return (
        transcript(conversation.turns) or welcome(),
        "",
        box,
        gr.update(visible=True),
        gr.update(visible=False),
    )
