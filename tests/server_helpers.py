"""A server in this process: the real library, prompt code and routes over an engine that computes nothing."""

from __future__ import annotations

import asyncio
import io
import time
from contextlib import asynccontextmanager
from dataclasses import dataclass

import httpx
from fake_engine import FakeEngine
from PIL import Image
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mpic.config import Config
from mpic.library import Library
from mpic.prompt import ChatTemplate
from mpic.server import create_app

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{% if p.type == 'image' %}<image>{% else %}{{ p.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, and the control tokens of a ChatML model with images."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    control = ["<|im_start|>", "<|im_end|>", "<image>"]
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in control])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", chat_template=CHATML)


def chat_template() -> ChatTemplate:
    return ChatTemplate(byte_tokenizer(), image_token="<image>")


def png(colour: str = "red", size: tuple[int, int] = (32, 24)) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", size, colour).save(buffer, "PNG")
    return buffer.getvalue()


@dataclass
class Server:
    """What a test holds of the server under test."""

    http: httpx.AsyncClient
    engine: FakeEngine
    library: Library
    app: object

    async def upload(self, data=None, name="red.png", **form):
        form = {"purpose": "user_data", **form}
        return await self.http.post("/v1/files", data=form, files={"file": (name, data or png())})

    async def uploaded(self, data=None, name="red.png", **form):
        """Upload and wait until it is compiled."""
        answer = await self.upload(data, name, **form)
        assert answer.status_code == 200, answer.text
        return await self.settled(answer.json()["id"])

    async def settled(self, id):
        for _ in range(200):
            file = (await self.http.get(f"/v1/files/{id}")).json()
            if file["state"] != "compiling":
                return file
            await asyncio.sleep(0.01)
        raise AssertionError("not compiled")

    async def ask(self, content="hello", **fields):
        messages = fields.pop("messages", [{"role": "user", "content": content}])
        return await self.http.post("/v1/chat/completions", json={"messages": messages, **fields})


@asynccontextmanager
async def running(root, template, engine=None, config=None, clock=time.time):
    engine = engine or FakeEngine()
    library = Library.open(root, clock=clock)
    app = create_app(engine, library, template, config or Config())
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with app.router.lifespan_context(app):
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000") as http:
            yield Server(http, engine, library, app)
