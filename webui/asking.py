"""Answers a turn of a chat through the API."""

from __future__ import annotations

import re
import time
from collections.abc import AsyncGenerator
from typing import Any

from mpic.client import AsyncMPIC
from mpic.client.types import File
from mpic.errors import HandleTaken, MPICError, UnknownPolicy
from mpic.link import named_policy
from mpic.webui.chats import Cited, Facts, SearchMade, StoredAnswer, StoredChat, StoredTurn, Wishes
from mpic.webui.uploads import Sent

HANDLE = re.compile(r"(?<![A-Za-z0-9_])(IMAGE|FILE)#([A-Za-z0-9_.\-]+)")
DRAWN = 0.1
"""Minimum seconds between updates of an answer; each update sends a message with the changes to the page."""
FILES = 1000
"""Maximum files of a user on the page; the newest are shown."""
GUESSES = 20
ADVICE = {
    "context_length_exceeded": "Delete earlier turns, or begin a new chat.",
    "unknown_handle": "It may be misspelt, or the file was renamed or deleted, or has expired. Type IMAGE# or FILE# in "
    "the question to choose a file.",
}


async def own_files(client: AsyncMPIC) -> list[File]:
    """Return the files of a user, newest first, at most ``FILES``."""
    return list((await client.files.list(limit=FILES)).data)


def by_handle(files: list[File]) -> dict[str, File]:
    return {file.handle.upper(): file for file in files if file.handle}


async def add_file(client: AsyncMPIC, sent: Sent, handle: str | None = None) -> File:
    """Add a file to the library under a free handle: the stem of its name, with a number if needed.

    Raises:
        MPICError: the server refuses it.
    """
    stem = re.sub(r"[^A-Z0-9]+", "_", sent.name.rpartition(".")[0].upper() or sent.name.upper()).strip("_")[
        :56
    ]
    wanted = handle or stem or "FILE"
    for number in range(2, GUESSES):
        try:
            with sent.path.open("rb") as content:
                return await client.files.create((sent.name, content), wanted)
        except HandleTaken:
            if handle or number == GUESSES - 1:
                raise
            wanted = f"{stem or 'FILE'}_{number}"
    raise AssertionError


def mention(file: File) -> str:
    return file.mention or file.id


def named_files(text: str, files: dict[str, File]) -> dict[str, str]:
    """Return the handles in a text, in capitals, that currently belong to files, with the ids of those files."""
    names = (_name(match[2], files) for match in HANDLE.finditer(text))
    return {name: files[name].id for name in names if name in files}


def with_handles_of_now(turn: StoredTurn, files: dict[str, File]) -> str:
    """Return the question of an earlier turn with the current handles of its files. The handle of a deleted file
    becomes a plain name, because the server would refuse the handle, or another file may have it by now."""
    handles = {file.id: name for name, file in files.items()}

    def now(match: re.Match[str]) -> str:
        name = _name(match[2], turn.files)
        if name not in turn.files:
            return match[0]
        handle, rest = handles.get(turn.files[name]), match[2][len(name) :]
        return f"{match[1]}#{handle}{rest}" if handle else match[2]

    return HANDLE.sub(now, turn.question)


def _name(word: str, known: Any) -> str:
    """Return the handle in a word, in capitals: a full stop or hyphen after it ends the sentence, as in the API."""
    name = word.upper()
    while name not in known and name.endswith((".", "-")):
        name = name[:-1]
    return name


def messages(
    chat: StoredChat, asked: StoredTurn, wishes: Wishes, files: dict[str, File]
) -> list[dict[str, Any]]:
    """Return the conversation up to a turn, in the form that the API takes."""
    found = [{"role": "system", "content": wishes.system}] if wishes.system else []
    for turn in chat.turns:
        if turn.at < asked.at and turn.answer.text and turn.answer.state != "failed":
            found.append({"role": "user", "content": with_handles_of_now(turn, files)})
            found.append({"role": "assistant", "content": turn.answer.text})
    return [*found, {"role": "user", "content": asked.question}]


def options(wishes: Wishes) -> dict[str, Any]:
    """Return the options of a chat completion. A press has no effect under a policy that reads no compiled chunk, and
    is refused with it, so it is left out there."""
    try:
        policy = named_policy(wishes.policy) if wishes.policy else None
        uses_chunks = (
            policy is None or policy.uses_chunks
        )  # the server refuses a press that its own choice does not read
    except UnknownPolicy:  # the server says so
        uses_chunks = True
    return {
        "policy": wishes.policy or None,
        "press": (wishes.press if uses_chunks else "") or None,
        "retrieval": None if wishes.retrieval == "off" else wishes.retrieval,
        "temperature": wishes.temperature or None,
        "max_tokens": wishes.length,
        "trace": True,
    }


async def answer(
    client: AsyncMPIC, chat: StoredChat, turn: StoredTurn, run: StoredAnswer
) -> AsyncGenerator[None, None]:
    """Fill in a run of a turn; yield whenever the page should be updated. Closing the iterator ends the server's
    work."""
    shown = time.monotonic()
    try:
        files = by_handle(await own_files(client))
        turn.files = {**turn.files, **named_files(turn.question, files)}
        said = messages(chat, turn, run.wishes, files)
        stream = await client.chat.completions.create(said, stream=True, **options(run.wishes))
        async with stream:
            async for chunk in stream:
                for choice in chunk.choices:
                    for note in choice.delta.annotations or ():
                        run.cited.append(Cited.model_validate(note["reference_citation"]))
                if not chunk.text:
                    continue
                run.text += chunk.text
                first, run.state = run.state == "waiting", "writing"
                if first or time.monotonic() - shown > DRAWN:
                    shown = time.monotonic()
                    turn.touch()
                    yield
        run.state = "done"
        if stream.usage is not None:
            run.policy, run.facts = stream.usage.mpic.policy, Facts.of(stream.usage)
            run.searches = [SearchMade.of(made) for made in stream.usage.mpic.retrieval or ()]
    except MPICError as error:
        run.state, run.error = (
            "failed",
            f"{error.message.rstrip('.')}. {ADVICE.get(error.code, '')} [{error.code}]",
        )
    turn.touch()
    yield
