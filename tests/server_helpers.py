"""A server in this process: the real library, prompt code and routes over an engine that computes nothing."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import time
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import families
import httpx
import pydantic
import pytest
import torch
from fake_engine import FakeEngine
from PIL import Image
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    CLIPImageProcessor,
    Gemma3ImageProcessor,
    Gemma3Processor,
    LlavaProcessor,
    PreTrainedTokenizerFast,
)

from mpic.api.requests import ChatRequest
from mpic.config import Config, EngineConfig
from mpic.engine import load_engine
from mpic.http.errors import from_validation
from mpic.keys import KeyLimits
from mpic.library import Library
from mpic.prompt import ChatTemplate
from mpic.server import create_app

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{% if p.type == 'image' %}<image>{% else %}{{ p.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

CONFIG = Config(engine=EngineConfig(policy="mpic-16"))
"""Serves a model that is not calibrated under a policy that reuses chunks."""

POOL_PAGES = 64  # pages of the real server's pool: half of the tiny model's context, 12,288 bytes each
SMALL_POOL = {"pool_bytes": POOL_PAGES * 12_288, "log_level": "warning"}


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per byte, and the control tokens of a ChatML model with images."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    control = ["<|im_start|>", "<|im_end|>", "<image>"]
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in control])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", chat_template=CHATML)


def save_tiny_llava(folder: Path, seed: int = 0) -> Path:
    """A random LLaVA of three small layers, with processor and chat template, as ``from_pretrained`` wants it.

    An image is 16 tokens, text has one token per byte, and the context has 2048 tokens.
    """
    torch.manual_seed(seed)
    tokenizer = byte_tokenizer()
    own = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": None}
    text = {**families.TEXT, **own, "vocab_size": len(tokenizer)}
    model = families.llava(text, tokenizer.convert_tokens_to_ids("<image>"))
    model.eval().save_pretrained(folder)
    llava_processor(tokenizer).save_pretrained(folder)
    return folder


def llava_processor(tokenizer: PreTrainedTokenizerFast) -> LlavaProcessor:
    """A processor of images with 32 x 32 pixels in patches of 8."""
    return LlavaProcessor(
        CLIPImageProcessor(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32}),
        tokenizer,
        patch_size=8,
        vision_feature_select_strategy="default",
        image_token="<image>",
        num_additional_image_tokens=1,
        chat_template=CHATML,
    )


def with_bos(**special: Any) -> PreTrainedTokenizerFast:
    """The same tokenizer with a BOS token, and with further special tokens."""
    plain = byte_tokenizer()
    names = {"eos_token": "<|im_end|>", "bos_token": "<bos>"}
    return PreTrainedTokenizerFast(tokenizer_object=plain.backend_tokenizer, **names, **special)


def gemma3_processor() -> Gemma3Processor:
    """A processor that puts markers around an image, for which the template prints one token."""
    special = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"}
    tokenizer = with_bos(extra_special_tokens={**special, "image_token": "<image_soft_token>"})
    images = Gemma3ImageProcessor(size={"height": 32, "width": 32})
    template = CHATML.replace("<image>", special["boi_token"])
    return Gemma3Processor(images, tokenizer, chat_template=template, image_seq_length=16)


def chat_template() -> ChatTemplate:
    return ChatTemplate(byte_tokenizer(), image_token="<image>")


def png(colour: str = "red", size: tuple[int, int] = (32, 24)) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", size, colour).save(buffer, "PNG")
    return buffer.getvalue()


def data_url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


@dataclass
class Server:
    """The server under test, with helpers for tests."""

    http: httpx.AsyncClient
    engine: FakeEngine
    library: Library
    app: object

    async def upload(self, data=None, name="red.png", **form):
        form = {"purpose": "user_data", **form}
        file = (name, png() if data is None else data)
        return await self.http.post("/v1/files", data=form, files={"file": file})

    async def uploaded(self, data=None, name="red.png", **form):
        """Upload a file and wait until it is compiled."""
        answer = await self.upload(data, name, **form)
        assert answer.status_code == 200, answer.text
        return await self.settled(answer.json()["id"])

    async def settled(self, id, kind="files"):
        """Wait until a file, cache or reference is compiled."""

        async def compiled():
            shown = (await self.http.get(f"/v1/{kind}/{id}")).json()
            return shown if shown["state"] != "compiling" else None

        return await wait_until(compiled)

    def key(self, user="alice", role="user", **limits):
        """The header of a new key."""
        secret, _ = self.app.state.mpic.keys.create(user, role, KeyLimits(**limits))
        return {"Authorization": f"Bearer {secret}"}

    async def ask(self, content="hello", **fields):
        messages = fields.pop("messages", [{"role": "user", "content": content}])
        return await self.http.post("/v1/chat/completions", json={"messages": messages, **fields})


@asynccontextmanager
async def fake_server(root, template, engine=None, config=None, clock=time.time):
    """The application over a FakeEngine."""
    config = config or CONFIG
    library = Library.open(root, config.library.limits(), clock=clock)
    async with running(create_app(engine or FakeEngine(), library, template, config)) as server:
        yield server


@asynccontextmanager
async def real_server(root, model, **options):
    """The application over a real engine for the model in a folder; the options are the engine's."""
    library = Library.open(root)
    engine, processor = load_engine(EngineConfig(model=str(model), **options), library.store)
    async with running(create_app(engine, library, ChatTemplate(processor), CONFIG)) as server:
        yield server


@asynccontextmanager
async def running(app):
    """An application in this process, from start-up to shut-down."""
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with app.router.lifespan_context(app):
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000") as http:
            yield Server(http, app.state.mpic.engine, app.state.mpic.library, app)


async def wait_until(true, seconds=120):
    """Wait until ``true`` returns a true value, directly or from a coroutine."""
    end = time.monotonic() + seconds
    while True:
        value = true()
        value = await value if asyncio.iscoroutine(value) else value
        if value or time.monotonic() > end:
            assert value, "it has not come about"
            return value
        await asyncio.sleep(0.01)


async def post_raw(app, path, incoming, sent, leaves=None, content_type="application/json"):
    """Post the pieces ``incoming`` below HTTP, then disconnect (when ``leaves`` is set, if it is given)."""
    pieces = [{"type": "http.request", "body": body, "more_body": True} for body in incoming]
    if leaves is not None:
        pieces[-1]["more_body"] = False

    async def receive():
        if not pieces and leaves is not None:
            await leaves.wait()
        return pieces.pop(0) if pieces else {"type": "http.disconnect"}

    async def send(message):
        sent.append(message)

    headers = [(b"host", b"127.0.0.1"), (b"content-type", content_type.encode())]
    scope = {"type": "http", "method": "POST", "path": path, "headers": headers, "query_string": b""}
    scope |= {"http_version": "1.1", "scheme": "http", "server": ("127.0.0.1", 80), "root_path": ""}
    await app(scope, receive, send)


def refusal(answer):
    """Status and code of an error."""
    return answer.status_code, answer.json()["error"]["code"]


def invalid(body):
    """The error of a chat request that is not valid."""
    with pytest.raises(pydantic.ValidationError) as caught:
        ChatRequest.model_validate(body)
    return from_validation([{**e, "loc": ("body", *e["loc"])} for e in caught.value.errors()], body, True)


def refused_field(answer):
    """Status, code and parameter of an error."""
    return *refusal(answer), answer.json()["error"]["param"]


def events(text):
    """The JSON frames of a stream, and whether it ended with [DONE]."""
    frames = text.split("\n\n")
    assert frames.pop() == ""
    assert all(f.startswith("data: ") and "\n" not in f for f in frames)
    done = frames[-1] == "data: [DONE]"
    return [json.loads(f[6:]) for f in (frames[:-1] if done else frames)], done


def said(frames):
    return "".join(c["delta"].get("content", "") for f in frames for c in f["choices"])
