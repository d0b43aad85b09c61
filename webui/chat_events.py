"""Events of the chat: asking, comparing, answering again, editing, deleting, stopping."""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager, suppress
from typing import Any, cast

import gradio as gr
import pydantic

from mpic.client import AsyncMPIC
from mpic.errors import BadRequest, Conflict, HandleTaken
from mpic.webui.asking import add_file, answer, by_handle, mention, own_files
from mpic.webui.chats import OpenChat, StoredAnswer, StoredChat, StoredTurn, Wishes, now, open_chat
from mpic.webui.events import client_of, given, told, visitor_of
from mpic.webui.parts import below, compared
from mpic.webui.samples import sample_files, samples
from mpic.webui.uploads import Sent, Uploads

WAIT = 20.0
"""Seconds that a sample question waits for its files; the answer itself compiles any that are not ready."""
TITLE = 60
MENTIONS = re.compile(r"^(?:(?:IMAGE|FILE)#\S+\s+)+")
Shown = tuple[Any, Any]
"""The chat in the form for Gradio's chatbot, and for the store.

Every step of an event carries both in full: Gradio's client changes the values of earlier steps to those of later ones
in place, and a browser that is slower than the answer would find nothing where a later step skips.
"""


def messages(page: OpenChat) -> list[dict[str, Any]]:
    """Return the turns of a chat as Gradio's chatbot shows them."""
    found: list[dict[str, Any]] = []
    for turn in page.chat.turns:
        found.append({"role": "user", "content": turn.question})
        run = turn.answer
        content: list[Any] = [gr.HTML(compared(turn), js_on_load=None)] if turn.again else []
        if not turn.again and run.text:
            content.append(run.text)
        elif run.state == "done" and not run.text:
            content.append("*The answer is empty.*")
        if under := below(turn, page.ms_per_token):
            content.append(gr.HTML(under, js_on_load=None))
        if content:
            found.append({"role": "assistant", "content": content})
    return found


def wishes(*values: Any) -> Wishes:
    """Return the options chosen in the pickers and the settings. Raise BadRequest if an option is invalid."""
    try:
        return Wishes(
            **{name: value for name, value in zip(Wishes.model_fields, values) if value is not None}
        )
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        raise BadRequest(f"{first['loc'][0]}: {first['msg']}", param=str(first["loc"][0])) from None


def question(text: str) -> dict[str, Any]:
    """Return the question box's value for this text."""
    return {"text": text, "files": []}


def drawn(page: OpenChat, answering: bool | None = None, asked: str = "") -> Shown:
    sent = page.model_copy(update={"answering": answering, "asked": asked})
    return messages(page), gr.update(page=sent.model_dump())


class Answering:
    """The answer that an open page waits for.

    Args:
        chat: id of the chat that it belongs to.
    """

    def __init__(self, chat: str) -> None:
        self.chat = chat
        self.stopping = False
        self.ended = asyncio.Event()
        self._step: asyncio.Future[Shown | None] | None = None

    async def steps_of(self, steps: AsyncGenerator[Shown, None]) -> AsyncGenerator[Shown, None]:
        """Yield the steps of an event until ``stop``, and what the event says when it is cancelled."""
        task = cast(asyncio.Task, asyncio.current_task())
        async with aclosing(steps):
            while not self.stopping:
                self._step = asyncio.ensure_future(anext(steps, None))
                try:
                    step = await self._step
                except asyncio.CancelledError:
                    if not self.stopping:
                        raise
                    break
                finally:
                    if task.cancelling():  # the page is gone, even if the event had a last word
                        raise asyncio.CancelledError
                if step is None:
                    return
                yield step
            with suppress(asyncio.CancelledError, StopAsyncIteration):
                yield await steps.athrow(asyncio.CancelledError())

    def stop(self) -> None:
        self.stopping = True
        if self._step is not None:
            self._step.cancel()


class ChatEvents:
    """See the module."""

    def __init__(self, uploads: Uploads) -> None:
        self._uploads = uploads
        self._answering: dict[str, Answering] = {}  # by session: an open page

    @told
    async def ask(
        self, page: Any, value: Any, event: gr.EventData, request: gr.Request, *pickers: Any
    ) -> AsyncIterator[Shown]:
        """Ask, ask in other words, answer again, or do what a button in the chat says.

        One at a time: two would both work on the chat as it was at the click, and undo each other.
        """
        client, open_page, wanted = client_of(request), open_chat(page), given(event)
        if "do" in wanted:
            steps = self._pressed(client, open_page, wanted, pickers)
        elif "previous_value" in wanted:
            steps = self._edit(client, open_page, wanted, pickers)
        elif "index" in wanted:
            steps = self._answer_again(client, open_page, _last(open_page.chat), pickers)
        else:
            steps = self._ask_box(client, open_page, value, request, pickers)
        try:
            async with (
                self._one_at_a_time(request, open_page.chat.id) as mine,
                aclosing(mine.steps_of(steps)) as stoppable,
            ):
                async for shown in stoppable:
                    yield shown
        except Conflict as error:  # a failed event must reach the script as well, which waits for it
            gr.Warning(f"{error.message}. [{error.code}]")
            yield gr.skip(), gr.skip()

    @asynccontextmanager
    async def _one_at_a_time(self, request: gr.Request, chat: str) -> AsyncGenerator[Answering, None]:
        """Wait for an answer that is being stopped. Raise Conflict if one is being written in this chat.

        A page shows one chat, so an answer in another one was left, whose ``stop`` may come later than this event.
        """
        session = str(request.session_hash)
        while before := self._answering.get(session):
            if before.chat != chat:
                before.stop()
            if not before.stopping:
                raise Conflict("an answer is being written; stop it first")
            await before.ended.wait()
        mine = self._answering[session] = Answering(chat)
        try:
            yield mine
        finally:
            del self._answering[session]
            mine.ended.set()

    async def _ask_box(
        self,
        client: AsyncMPIC,
        page: OpenChat,
        value: Any,
        request: gr.Request,
        pickers: tuple[Any, ...],
    ) -> AsyncGenerator[Shown, None]:
        run = StoredAnswer(wishes=wishes(*pickers))
        text = await self._with_files(client, value, request)
        if not text.strip():
            raise BadRequest("write a question first", param="question")
        async for shown in self._ask(client, page, text.strip(), run, from_box=True):
            yield shown

    async def _pressed(
        self, client: AsyncMPIC, open_page: OpenChat, wanted: dict[str, Any], pickers: tuple[Any, ...]
    ) -> AsyncGenerator[Shown, None]:
        chat = open_page.chat
        match wanted.get("do"):
            case "sample":
                text = await self._prepare(client, str(wanted.get("id")))
                async for shown in self._ask(client, open_page, text, StoredAnswer(wishes=wishes(*pickers))):
                    yield shown
            case "again":
                async for shown in self._answer_again(
                    client, open_page, chat.turn(str(wanted.get("turn"))), pickers
                ):
                    yield shown
            case "compare":
                turn = chat.turn(str(wanted.get("turn")))
                # the options of the first answer; a press would have no effect
                without = turn.answer.wishes.model_copy(update={"policy": "full", "press": ""})
                turn.again = StoredAnswer(wishes=without)
                async for shown in self._run(client, open_page, turn, turn.again):
                    yield shown
            case "delete":
                chat.remove(chat.turn(str(wanted.get("turn"))))
                yield drawn(open_page)
            case other:
                raise BadRequest(f"no such action: {str(other)[:80]}", param="do")

    async def _edit(
        self, client: AsyncMPIC, page: OpenChat, wanted: dict[str, Any], pickers: tuple[Any, ...]
    ) -> AsyncGenerator[Shown, None]:
        """Ask a question in other words."""
        index = wanted.get("index")
        number = index[0] if isinstance(index, list | tuple) and index else index
        turn = _turn_at(page, number)
        turn.question = str(wanted.get("value")).strip() or turn.question
        async for shown in self._answer_again(client, page, turn, pickers):
            yield shown

    @told
    async def undo(self, page: Any, request: gr.Request) -> tuple[Any, Any, Any]:
        """Move the last question back into the box for editing."""
        open_page = open_chat(page)
        async with self._one_at_a_time(request, open_page.chat.id):
            last = _last(open_page.chat)
            open_page.chat.remove(last)
            return *drawn(open_page), question(last.question)

    @told
    async def stop(self, page: Any, event: gr.EventData, request: gr.Request) -> Shown:
        """Stop what is being answered in the chat that the event names, or in the open one. The event that is answering
        reports the stop; if there is none, mark the answer as stopped here."""
        open_page = open_chat(page)
        if mine := self._answering.get(str(request.session_hash)):
            if mine.chat == given(event).get("chat", open_page.chat.id):
                mine.stop()
            return gr.skip(), gr.skip()
        for turn in open_page.chat.turns:
            for run in (turn.answer, turn.again):
                if run is not None and run.running:
                    run.state = "stopped"
                    turn.touch()
        return drawn(open_page, answering=False)

    @told
    async def opened(self, page: Any) -> Shown:
        """Show the chat that the store has opened."""
        return drawn(open_chat(page))

    @told
    async def take(self, value: Any, request: gr.Request) -> dict[str, Any]:
        """Add the files in the box to the library, and write their handles into the question."""
        text = await self._with_files(client_of(request), value, request)
        return question(text)

    async def _with_files(self, client: AsyncMPIC, value: Any, request: gr.Request) -> str:
        """Add the files in the box to the library, and return the box's text with their handles."""
        text, sent = box(value, self._uploads, request)
        mentions = [mention(await add_file(client, one)) for one in sent]
        return " ".join([*(m for m in mentions if m not in text), text]) if mentions else text

    async def _ask(
        self, client: AsyncMPIC, page: OpenChat, text: str, run: StoredAnswer, from_box: bool = False
    ) -> AsyncGenerator[Shown, None]:
        turns = page.chat.turns
        at = max(now(), turns[-1].at + 1 if turns else 0)
        turn = StoredTurn(id=secrets.token_hex(12), at=at, changed=at, question=text, answer=run)
        turns.append(turn)
        page.chat.title = page.chat.title or title(text)
        async for shown in self._run(client, page, turn, run, turn.id if from_box else ""):
            yield shown

    async def _answer_again(
        self, client: AsyncMPIC, page: OpenChat, turn: StoredTurn, pickers: tuple[Any, ...]
    ) -> AsyncGenerator[Shown, None]:
        turn.answer, turn.again = StoredAnswer(wishes=wishes(*pickers)), None
        async for shown in self._run(client, page, turn, turn.answer):
            yield shown

    async def _run(
        self, client: AsyncMPIC, page: OpenChat, turn: StoredTurn, run: StoredAnswer, asked: str = ""
    ) -> AsyncGenerator[Shown, None]:
        """Answer, and show how the answer grows."""
        turn.touch()
        try:
            yield drawn(page, True, asked)
            async with aclosing(answer(client, page.chat, turn, run)) as steps:
                async for _ in steps:
                    yield drawn(page, True, asked)
        except asyncio.CancelledError:  # stopped by ``Answering.stop``, or the page no longer takes updates
            run.state = "stopped"
            turn.touch()
        yield drawn(page, False, asked)

    async def _prepare(self, client: AsyncMPIC, id: str) -> str:
        """Add the files of a sample question, wait until they are compiled, and return the question."""
        model = (await client.models.list())[0].id
        sample = next((one for one in samples(model) if one.id == id), None)
        if sample is None:
            raise BadRequest(f"no sample {id[:80]!r}", param="id")
        there, added = by_handle(await own_files(client)), []
        for handle in sample.files:
            path = sample_files(model)[handle]
            if handle not in there:
                try:
                    added.append(await add_file(client, Sent(path.name, path, 0, 0.0), handle))
                except HandleTaken:  # another tab was faster
                    continue
        async with asyncio.timeout(WAIT):
            for file in added:
                await client.files.wait(file.id)
        return sample.text


def box(value: Any, uploads: Uploads, request: gr.Request) -> tuple[str, list[Sent]]:
    """Return the text in the box of the question, and the uploads that it names; none is opened yet.

    Raises:
        BadRequest: it is not a value of the box.
        NotFound: a file is not among the uploads of this user.
    """
    if not isinstance(value, dict) or not isinstance(value.get("text"), str):
        raise BadRequest("the question cannot be read", param="question")
    return value["text"], sent_files(value.get("files"), uploads, request)


def sent_files(value: Any, uploads: Uploads, request: gr.Request) -> list[Sent]:
    """Return the uploads that a value of a file component names. Raise as ``box``."""
    files = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(file, dict) for file in files):
        raise BadRequest("files are objects with a path", param="files")
    user = visitor_of(request).user
    return [uploads.find(user, file.get("path")) for file in files]


def title(text: str) -> str:
    """Return the title of a chat that begins with a question."""
    plain = MENTIONS.sub("", " ".join(text.split()))
    return f"{plain[: TITLE - 1]}…" if len(plain) > TITLE else plain


def _last(chat: StoredChat) -> StoredTurn:
    if not chat.turns:
        raise BadRequest("there is no question yet")
    return chat.turns[-1]


def _turn_at(page: OpenChat, index: Any) -> StoredTurn:
    """Return the turn whose question is a message of the chatbot. Raise BadRequest."""
    at = 0
    for turn in page.chat.turns:
        if at == index:
            return turn
        one = OpenChat(chat=page.chat.model_copy(update={"turns": [turn]}))
        at += len(messages(one))
    raise BadRequest("this question is no longer in the chat")
