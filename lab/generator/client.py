"""Generated conversations as a client would send them: OpenAI-shaped messages with images and documents inside."""

from __future__ import annotations

import base64
import io
from typing import Any

from PIL import Image as PILImage

from mpic_lab.generator.conversation import Conversation, Document, Image


def messages_of(conversation: Conversation) -> list[dict[str, Any]]:
    """Return the conversation up to its last question, as a client would send it."""
    out: list[dict[str, Any]] = []
    if conversation.system:
        out.append({"role": "system", "content": conversation.system})
    for turn in conversation.turns:
        out.append({"role": "user", "content": [content_part(part) for part in turn.user]})
        out.append({"role": "assistant", "content": turn.answer})
    return out[:-1]


def content_part(part: str | Image | Document) -> dict[str, Any]:
    """Return a piece of a generated turn, as a client would send it."""
    if isinstance(part, str):
        return {"type": "text", "text": part}
    named = {"name": part.name} if part.name else {}
    if isinstance(part, Document):
        return {"type": "document", "text": part.text, **named}
    return {"type": "image", "image": data_url(PILImage.fromarray(part.pixels)), **named}


def data_url(image: PILImage.Image) -> str:
    """Return an image as a PNG data URL."""
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
