"""Events of the library and of the references."""

from __future__ import annotations

import asyncio
import base64
from typing import Any

import gradio as gr

from mpic.client import AsyncMPIC
from mpic.errors import BadRequest
from mpic.library import thumbnail
from mpic.webui import parts
from mpic.webui.asking import add_file, own_files
from mpic.webui.chat_events import sent_files
from mpic.webui.events import client_of, given, told, visitor_of
from mpic.webui.uploads import Uploads

SHOWN = 60
"""Maximum references shown at once."""
FOUND = 12
SIDE = 384  # side in pixels of a picture used as a query; embedders use no more
MOST_TEXT = 1_000_000
"""Maximum bytes of a document that is shown."""


class LibraryEvents:
    """See the module."""

    def __init__(self, uploads: Uploads) -> None:
        self._uploads = uploads

    # ---- the user's files

    @told
    async def refresh(self, request: gr.Request) -> tuple[Any, Any]:
        return await self._listed(client_of(request))

    @told
    async def add(self, value: Any, request: gr.Request) -> tuple[Any, Any, Any]:
        for sent in sent_files(value, self._uploads, request):
            await add_file(client_of(request), sent)
        return *await self._listed(client_of(request)), None

    @told
    async def act(self, event: gr.EventData, request: gr.Request) -> tuple[Any, ...]:
        """Open, pin, prefetch or remove a file. Return the list, its timer, the file, its id and handle, the tab."""
        client, wanted = client_of(request), given(event)
        id = str(wanted.get("id"))
        match wanted.get("do"):
            case "open" | "pin" | "unpin" | "prefetch" as do:
                await _change(client.files, id, do)
                file = await client.files.retrieve(id)
                shown = parts.file_view(file, await self._text(client.files, file))
                ask = f"Delete {file.handle or file.filename} and everything compiled from it?"
                delete = parts.button("Delete this file", "file", "remove", "", ask, id=id)
                shown += f'<p class="mpic-row">{parts.life(file, "file")}{delete}</p>'
                listed = await self._listed(client)
                return (
                    *listed,
                    gr.update(value=shown, visible=True),
                    id,
                    file.handle or "",
                    *_to("library", True),
                )
            case "remove":
                await client.files.delete(id)
                return (
                    *await self._listed(client),
                    gr.update(value="", visible=False),
                    "",
                    "",
                    *_to("library", False),
                )
            case other:
                raise BadRequest(f"no such action: {str(other)[:80]}", param="do")

    @told
    async def rename(self, id: str, handle: str, request: gr.Request) -> tuple[Any, Any]:
        client = client_of(request)
        await client.files.rename(str(id), str(handle).strip() or None)
        gr.Info("Nothing was compiled again. Chats send the new handle from now on.", title="Renamed")
        return await self._listed(client)

    async def _listed(self, client: AsyncMPIC) -> tuple[Any, Any]:
        """Return the list of files, and whether the page should ask for it again soon."""
        files = await own_files(client)
        compiling = any(file.state == "compiling" for file in files)
        return parts.library(files), gr.update(active=compiling)

    async def _text(self, collection: Any, item: Any) -> str:
        """Return the text of a document, "" for pictures and clips."""
        if item.kind in ("image", "video"):
            return ""
        if item.bytes > MOST_TEXT:
            return f"(The document has {item.bytes:,} bytes, too many to be shown.)"
        return (await collection.content(item.id)).decode("utf-8", "replace").removeprefix("\ufeff")

    # ---- references

    @told
    async def references(self, request: gr.Request) -> str:
        visitor = visitor_of(request)
        page = await visitor.client.references.list(limit=SHOWN)
        count = f"The newest {len(page.data)} references" if page.has_more else f"{len(page.data)} references"
        note = f"{count}, newest first." if page.data else "No references yet."
        return parts.references(page.data, visitor.role == "admin", note)

    @told
    async def search(self, query: str, value: Any, request: gr.Request) -> str:
        visitor, image = visitor_of(request), None
        for sent in sent_files(value, self._uploads, request)[:1]:
            png = await asyncio.to_thread(lambda path=sent.path: thumbnail(path.read_bytes(), side=SIDE))
            image = f"data:image/png;base64,{base64.b64encode(png).decode()}"
        if not (query.strip() or image):
            return await self.references(request)
        hits = await visitor.client.references.search(query.strip() or None, image=image, top_k=FOUND)
        note = f"{len(hits)} found, best first." if hits else "Nothing was found."
        return parts.references(hits, visitor.role == "admin", note)

    @told
    async def add_reference(
        self, value: Any, title: str, description: str, request: gr.Request
    ) -> tuple[Any, ...]:
        files = sent_files(value, self._uploads, request)
        if not files:
            raise BadRequest("choose a file first", param="file")
        with files[0].path.open("rb") as content:
            await client_of(request).references.create(
                (files[0].name, content),
                title.strip() or None,
                description=description.strip() or None,
                wait=30.0,
            )
        return await self.references(request), None, "", ""

    @told
    async def act_reference(self, event: gr.EventData, request: gr.Request) -> tuple[Any, ...]:
        """Open, pin, prefetch or remove a reference. Return the list, the reference, and the tab."""
        visitor, wanted = visitor_of(request), given(event)
        client, id = visitor.client, str(wanted.get("id"))
        match wanted.get("do"):
            case "open" | "pin" | "unpin" | "prefetch" as do:
                await _change(client.references, id, do)
                found = await client.references.retrieve(id)
                shown = parts.reference_view(found, await self._text(client.references, found))
                if visitor.role == "admin":
                    shown += f'<p class="mpic-row">{parts.life(found, "ref")}</p>'
                return gr.skip(), gr.update(value=shown, visible=True), gr.update(selected="references")
            case "remove":
                await client.references.delete(id)
                return await self.references(request), gr.update(value="", visible=False), gr.skip()
            case other:
                raise BadRequest(f"no such action: {str(other)[:80]}", param="do")


async def _change(collection: Any, id: str, do: str) -> None:
    """Pin or prefetch a file or reference, as ``do`` says, or change nothing (``open``)."""
    if do in ("pin", "unpin"):
        await collection.pin(id, do == "pin")
    elif do == "prefetch":
        await collection.prefetch(id)
        gr.Info("Its compiled KV is brought near to the device.", title="Prefetching")


def _to(tab: str, naming: bool) -> tuple[Any, Any]:
    """Return the tab that is shown, and whether a file can be renamed there."""
    return gr.update(selected=tab), gr.update(visible=naming)
