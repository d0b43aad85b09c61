"""Chats as the browser sends them, and what becomes of them on the way to the API."""

import asyncio
from types import SimpleNamespace

import gradio as gr
import pytest

from mpic.errors import BadRequest, Conflict
from mpic.webui import parts
from mpic.webui.asking import messages, named_files, options, with_handles_of_now
from mpic.webui.chat_events import Answering, ChatEvents
from mpic.webui.chats import (
    Facts,
    OpenChat,
    StoredAnswer,
    StoredChat,
    StoredTurn,
    TokenSpan,
    Wishes,
    open_chat,
)
from mpic.webui.uploads import Uploads


class File:
    def __init__(self, id, handle):
        self.id, self.handle = id, handle


def turn(question, answer="yes", at=0, **fields):
    run = StoredAnswer(text=answer, state="done")
    return StoredTurn(id=f"t{at}", at=at, question=question, answer=run, **fields)


def test_earlier_turns_are_sent_with_the_handles_that_files_have_now():
    files = {"TOWER": File("file-1", "TOWER"), "GONE": File("file-9", "GONE")}
    then = {"EIFFEL": "file-1", "GONE": "file-2"}
    asked = turn("IMAGE#eiffel, FILE#GONE. IMAGE#OTHER IMAGE#EIFFEL.", files=then)
    assert with_handles_of_now(asked, files) == "IMAGE#TOWER, GONE. IMAGE#OTHER IMAGE#TOWER."
    assert named_files("IMAGE#tower. IMAGE#NONE", files) == {"TOWER": "file-1"}


def test_a_conversation_leaves_out_turns_without_an_answer_and_those_after_it():
    failed = turn("B", at=2)
    failed.answer.state = "failed"
    chat = StoredChat(
        id="a", turns=[turn("A", at=1), failed, turn("C", "", at=3), turn("D", at=4), turn("E", at=5)]
    )
    said = messages(chat, chat.turns[3], Wishes(system="Be brief."), {})
    assert [one["content"] for one in said] == ["Be brief.", "A", "yes", "D"]


def test_a_press_is_left_out_under_a_policy_that_reads_no_compiled_chunk():
    assert options(Wishes(policy="full", press="snapkv-50"))["press"] is None
    assert options(Wishes(policy="mpic-16", press="snapkv-50"))["press"] == "snapkv-50"


@pytest.mark.parametrize("field", ["policy", "system"])
def test_texts_of_options_have_a_bound(field):
    wishes = {field: "x" * 200_000}
    chat = {"id": "a", "turns": [{"id": "b", "answer": {"wishes": wishes}}]}
    with pytest.raises(BadRequest):
        open_chat({"user": "ann", "chat": chat})


EVIL = "<img src=x onerror=alert(1)>\"'"


def test_no_text_from_elsewhere_becomes_markup():
    spans = [TokenSpan(state=EVIL, tokens=3, kind="image", label=EVIL, file=EVIL)]
    one = turn(EVIL, EVIL)
    one.answer.facts = Facts(prompt=3, saved=0, ttft=1, spans=spans)
    one.answer.policy = one.answer.error = EVIL
    one.again = StoredAnswer(text=EVIL + "x", state="done", facts=one.answer.facts, policy=EVIL)
    page = OpenChat(chat=StoredChat(id="a", turns=[one]))
    shown = parts.compared(one) + parts.below(one, None) + parts.button(EVIL, EVIL, EVIL, EVIL, EVIL, id=EVIL)
    shown += (
        parts.marked(EVIL, "")
        + parts.problem(StoredAnswer(state="failed", error=EVIL))
        + parts.table([EVIL], [[EVIL]])
    )
    assert "<img src=x" not in shown and "&lt;img src=x" in shown and page.chat.turns[0].question == EVIL


def test_words_that_differ_are_marked_and_long_answers_are_compared_as_a_whole():
    assert parts.marked("a red cat", "a blue cat") == "a <mark>red</mark> cat"
    long = "word " * 4000
    assert parts.marked(long, long) == long and parts.marked(long, "x").startswith("<mark>")


def test_an_upload_ends_with_its_page(tmp_path):
    uploads = Uploads(1000)
    path = uploads.find("ann", uploads.add("ann", "../../x", (tmp_path / "x").open("w+b"))).path
    assert path.parent.parent != tmp_path.parent and ".." not in str(path)
    uploads.close()
    assert not path.exists()


async def spoken(closed):
    """Steps of an event that has a last word when it is cancelled, and notes when it is closed."""
    try:
        yield "first"
        yield "second"
        await asyncio.Future()
    except asyncio.CancelledError:
        yield "last"
    finally:
        closed.append(True)


@pytest.mark.parametrize(
    "after", [None, 0, 0.01], ids=["between two steps", "as a step begins", "while it waits"]
)
async def test_an_answer_that_is_stopped_has_a_last_word(after):
    answering, closed, said = Answering("a"), [], []
    async for word in answering.steps_of(spoken(closed)):
        said.append(word)
        if word == "second" and after is None:
            answering.stop()
        elif word == "second":
            asyncio.get_running_loop().call_later(after, answering.stop)
    assert said == ["first", "second", "last"] and closed


async def test_an_answer_that_is_stopped_before_it_begins_says_nothing():
    answering = Answering("a")
    answering.stop()
    assert [word async for word in answering.steps_of(spoken([]))] == []


async def test_an_answer_whose_page_is_gone_has_no_last_word():
    answering, closed, said = Answering("a"), [], []

    async def listen():
        async for word in answering.steps_of(spoken(closed)):
            said.append(word)

    task = asyncio.create_task(listen())
    while len(said) < 2:
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.sleep(0)
    assert said == ["first", "second"] and closed


async def test_a_question_in_another_chat_stops_the_answer_that_was_left_and_a_late_stop_harms_none():
    """The page sends both at once, and the server may see them in either order."""
    uploads = Uploads(1000)
    events, request = ChatEvents(uploads), SimpleNamespace(session_hash="page")
    left, closed = [], []

    async def answer(chat):
        async with events._one_at_a_time(request, chat) as mine:
            async for word in mine.steps_of(spoken(closed)):
                left.append((chat, word))

    first = asyncio.create_task(answer("a"))
    while len(left) < 2:
        await asyncio.sleep(0)
    with pytest.raises(Conflict):
        async with events._one_at_a_time(request, "a"):
            pass
    second = asyncio.create_task(answer("b"))
    await first
    while len(left) < 5:
        await asyncio.sleep(0)
    page = OpenChat(chat=StoredChat(id="b")).model_dump()
    assert await events.stop(page, SimpleNamespace(_data={"chat": "a"}), request) == (gr.skip(), gr.skip())
    assert not events._answering["page"].stopping
    await events.stop(page, SimpleNamespace(_data=None), request)
    await second
    assert [word for _, word in left] == ["first", "second", "last"] * 2
    uploads.close()
