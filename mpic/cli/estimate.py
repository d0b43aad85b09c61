"""``mpic estimate``: what reuse would save of the requests in a log, without a model's weights."""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO, NamedTuple

import typer

from mpic.cli.common import Json, command_app, err, out, print_json, print_table
from mpic.cli.folder import ConfigFile
from mpic.errors import BadRequest, FileNotFound, MPICError, UnknownHandle

if TYPE_CHECKING:
    from mpic.config import EngineConfig
    from mpic.kv.chunk import Chunk
    from mpic.link import Policy
    from mpic.prompt import ChatTemplate, Prompt

app = command_app()

LONGEST_LINE = 64 << 20
BLOCK = 16
"""Tokens of a block of a prefix cache."""
SHOWN = 20
"""Maximum number of unusable lines that are named."""
DEFAULT = ("full", "prefix", "reuse", "mpic-16", "mpic-32", "legolink-16", "cacheblend-15")
CHATS = "/chat/completions"


@app.command()
def estimate(
    log: Annotated[
        Path,
        typer.Argument(help="request bodies, one a line; -: standard input"),
    ],
    model: Annotated[
        str | None,
        typer.Option(help="its tokenizer and chat template are used; default: the configuration's"),
    ] = None,
    policy: Annotated[
        list[str] | None, typer.Option(help="a policy to show; again for more; default: the common ones")
    ] = None,
    image_tokens: Annotated[int, typer.Option(min=1, help="tokens that an image is taken to have")] = 576,
    kept: Annotated[
        int, typer.Option(min=BLOCK, help="most tokens whose KV each cache keeps; what was used last stays")
    ] = 10_000_000,
    config: ConfigFile = None,
    as_json: Json = False,
) -> None:
    """Estimate what prefix caching and position-independent caching would save of the requests in a log.

    A line is the body of a chat completion, alone or as `body` or `request` of an object, as in OpenAI's batch files.
    They are taken in order, as requests of one user. The log stays here, and no weights are loaded. Images are not
    opened. Lines that name files by id are left out, because the log does not hold the files, and so are invalid lines.
    The skipped lines are listed by number, and the exit status is then 1.

    Example: `mpic estimate requests.jsonl --model Qwen/Qwen2.5-VL-3B-Instruct`
    """
    from mpic.config import load_config
    from mpic.link import parse_policy

    settings = load_config(config, {"model": model}).engine
    policies = [parse_policy(name) for name in policy or DEFAULT]
    for one in policies:
        if not one.context or one.wrapping.packet:
            raise BadRequest(f"{one.name} cannot be estimated: it changes the prompt", param="policy")
    run = Estimate(policies, kept, image_tokens)
    template = _template(settings)
    with nullcontext(sys.stdin.buffer) if str(log) == "-" else log.open("rb") as stream:
        for number, line in lines(stream):
            try:
                run.add(_prompt(line, template, settings.link_texts, image_tokens))
            except (MPICError, ValueError) as error:
                run.leave_out(_note(number, error))
    _show(run, as_json)
    if run.left_out:
        raise typer.Exit(1)


def lines(stream: BinaryIO) -> Iterator[tuple[int, bytes | None]]:
    """Yield the non-blank lines with their numbers, from 1. Yield None for a line that is too long, without ever
    holding all of it in memory."""
    number = 0
    while line := stream.readline(LONGEST_LINE + 1):
        number += 1
        if len(line) <= LONGEST_LINE:
            if line.strip():
                yield number, line
            continue
        while line and not line.endswith(b"\n"):
            line = stream.readline(LONGEST_LINE)
        yield number, None


class Note(NamedTuple):
    """A line that was left out, and why."""

    line: int
    code: str
    message: str


def _note(number: int, error: MPICError | ValueError) -> Note:
    if isinstance(error, MPICError):
        return Note(number, error.code, f"{error.message}{f' ({error.param})' if error.param else ''}")
    return Note(number, BadRequest.code, f"it cannot be read as JSON: {error}")


class Recent:
    """A least-recently-used set of keys, each with a number of tokens; the oldest keys are evicted when the tokens
    exceed the limit."""

    def __init__(self, most: int) -> None:
        self._most, self._tokens = most, 0
        self._keys: OrderedDict[Hashable, int] = OrderedDict()

    def __contains__(self, key: Hashable) -> bool:
        return key in self._keys

    def use(self, key: Hashable, tokens: int) -> None:
        self._tokens += tokens - self._keys.pop(key, 0)
        self._keys[key] = tokens
        while self._tokens > self._most:
            self._tokens -= self._keys.popitem(last=False)[1]


class PromptPart(NamedTuple):
    """A run of a prompt's tokens: a chunk, or the text between chunks (``chunk`` is None)."""

    ids: Sequence[int]
    chunk: str | None


@dataclass
class Estimate:
    """Sums over the requests that were added.

    Args:
        policies: the policies for which ``computed`` is counted.
        kept: maximum number of tokens that the prefix cache and the chunk cache each keep.

    Attributes:
        tokens: tokens of all prompts; ``chunk_tokens`` counts those in chunks.
        prefix: tokens that prefix caching reuses, in whole blocks from the start of a prompt.
        found: tokens that position-independent caching finds: those of ``prefix``, and the chunks that an earlier
            request contained.
        computed: tokens that each policy computes, including those spent on compiling chunks.
        left_out: lines that could not be used; ``notes`` are the first of them.
    """

    policies: Sequence[Policy]
    kept: int
    image_tokens: int
    requests: int = 0
    tokens: int = 0
    chunk_tokens: int = 0
    prefix: int = 0
    found: int = 0
    computed: Counter[str] = field(default_factory=Counter)
    left_out: int = 0
    notes: list[Note] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._blocks, self._chunks = Recent(self.kept), Recent(self.kept)

    def leave_out(self, note: Note) -> None:
        """Count a line that cannot be used, and keep the note if it is one of the first."""
        self.left_out += 1
        if self.left_out <= SHOWN:
            self.notes.append(note)

    def add(self, prompt: Prompt) -> None:
        """Add a request."""
        from mpic.link import ChunkPlace

        parts = [_part(segment, self.image_tokens) for segment in prompt.segments]
        total = sum(len(part.ids) for part in parts)
        hit = min(self._prefix(parts), total - 1)  # the last token is computed to draw the next one
        self.requests += 1
        self.tokens += total
        self.prefix += hit
        self.found += hit
        places, news, ends, text, at = [], [], [], 0, 0
        for part in parts:
            end = at + len(part.ids)
            if part.chunk is None:
                text += max(0, end - max(at, hit))
            else:
                self.chunk_tokens += len(part.ids)
                places.append(ChunkPlace(len(part.ids), at, at))
                news.append(part.chunk not in self._chunks)
                ends.append((at, end))
                if not news[-1]:
                    self.found += max(0, end - max(at, hit))
                self._chunks.use(part.chunk, len(part.ids))
            at = end
        for policy in self.policies:
            start = hit if policy.prefix else 0
            if not policy.uses_chunks:
                self.computed[policy.name] += total - start
                continue
            again = sum(
                max(0, last + place - max(first + place, start))
                for ranges, (place, _) in zip(policy.select(places), ends, strict=True)
                for first, last in ranges
            )
            compiled = sum(end - at for new, (at, end) in zip(news, ends, strict=True) if new and end > start)
            own = text if policy.prefix else total - sum(end - at for at, end in ends)
            self.computed[policy.name] += own + again + compiled

    def _prefix(self, parts: Sequence[PromptPart]) -> int:
        """Return how many tokens at the start of a prompt an earlier prompt shares, and remember this prompt."""
        ids = array("q")
        for part in parts:
            ids.extend(part.ids)
        name, hit = b"", True
        found = 0
        for end in range(BLOCK, len(ids) + 1, BLOCK):
            name = hashlib.blake2b(ids[end - BLOCK : end].tobytes(), key=name, digest_size=16).digest()
            hit = hit and name in self._blocks
            found = end if hit else found
            self._blocks.use(name, BLOCK)
        return found


def _part(segment: Any, image_tokens: int) -> PromptPart:
    from mpic.prompt import TextSegment

    if isinstance(segment, TextSegment):
        return PromptPart(segment.token_ids, None)
    chunk: Chunk = segment.chunk
    if chunk.token_ids is not None:
        return PromptPart(chunk.token_ids, str(chunk.key))
    return PromptPart([-int(chunk.key.digest[:12], 16) - 1] * image_tokens, str(chunk.key))


class LogResolver:
    """Resolves the chunks of a request from its body alone; see ``mpic.prompt.Resolver``."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template

    def by_handle(self, kind: str, name: str) -> Chunk:
        raise UnknownHandle(f"the file {name!r} is not in the log", handle=name)

    def by_file_id(self, file_id: str) -> Chunk:
        raise FileNotFound(f"the file {file_id!r} is not in the log", id=file_id)

    def by_cache_id(self, cache_id: str) -> Sequence[Chunk]:
        raise FileNotFound(f"the cache {cache_id!r} is not in the log", id=cache_id)

    def inline_image(self, data: bytes) -> Chunk:
        from mpic.kv.chunk import Chunk, ChunkKey

        return Chunk(ChunkKey("image", hashlib.sha256(data).hexdigest()), "local", load_image=_unopened)

    def inline_clip(self, data: bytes) -> Chunk:
        raise BadRequest("the tokens of a clip cannot be told without the model")

    def inline_text(self, text: str, label: str | None) -> Chunk:
        from mpic.kv.chunk import Chunk, ChunkKey

        return Chunk(ChunkKey.of_text(text), "local", self._template.tokenize_document(text), label=label)

    def inline_file(self, data: bytes, label: str | None) -> list[Chunk]:
        from mpic.library import Limits
        from mpic.library.intake.decode import (
            HEAD,
            decode_text,
            encoding_of,
            is_document,
            read_document,
            sniff,
        )

        if sniff(data[:HEAD]) == "image":
            return [self.inline_image(data)]
        limits, document = Limits(), is_document(data)
        pages = (
            read_document(data, limits).pages if document else [decode_text(data, limits, encoding_of(data))]
        )
        return [self.inline_text(page, label) for page in pages]


def _unopened() -> Any:
    raise RuntimeError("an image of a log is not opened")


def _template(settings: EngineConfig) -> ChatTemplate:
    """Return the chat template of a model without loading its weights. Raise ModelRefused."""
    import transformers

    from mpic.model.gguf_model import folder_of
    from mpic.model.load import is_vision, load_config, load_processor
    from mpic.prompt import ChatTemplate

    transformers.logging.set_verbosity_error()
    path = folder_of(settings.model, settings.dtype)
    known = load_config(path, "auto", settings.trust_remote_code)
    return ChatTemplate(load_processor(path, is_vision(known), settings.trust_remote_code))


def _prompt(line: bytes | None, template: ChatTemplate, link_texts: int, image_tokens: int) -> Prompt:
    """Return the prompt of a line of the log.

    Raises:
        ValueError: it is not JSON.
        MPICError: it is not a chat completion, or cannot be estimated.
    """
    from mpic import bounded_json
    from mpic.config import ServerConfig
    from mpic.prompt import build_prompt
    from mpic.prompt.long_texts import link_long_texts
    from mpic.prompt.messages import Handles

    if line is None:
        raise BadRequest(f"it is longer than {LONGEST_LINE} bytes")
    body = _body(bounded_json.read(line, bounded_json.Bounds()))
    messages, tools = body.get("messages"), body.get("tools") or []
    if not isinstance(messages, list):
        raise BadRequest("a chat completion has messages", param="messages")
    if not isinstance(tools, list):
        raise BadRequest("tools must be a list", param="tools")
    messages = [_offline(message) for message in messages]
    prompt = build_prompt(messages, template, LogResolver(template), tools, handles=Handles(False))
    if not link_texts:
        return prompt
    most = ServerConfig().max_chunks
    return link_long_texts(prompt, messages, tools, template, "local", link_texts, most)


def _body(value: Any) -> Mapping[str, Any]:
    """Return the body of a request without the log's wrapper around it. Raise BadRequest."""
    for _ in range(3):
        if not isinstance(value, dict):
            break
        if isinstance(url := value.get("url"), str) and "messages" not in value and not url.endswith(CHATS):
            raise BadRequest("it is no chat completion", param="url")
        inner = next((value[name] for name in ("body", "request") if name in value), None)
        if inner is None or "messages" in value:
            return value
        value = inner
    raise BadRequest("a line is an object: a request's body, or one with it as body or request")


def _offline(message: Any) -> Any:
    """Return a message in which pictures on the web are identified by their URLs."""
    if not isinstance(message, dict) or not isinstance(message.get("content"), list):
        return message
    return {**message, "content": [_offline_part(part) for part in message["content"]]}


def _offline_part(part: Any) -> Any:
    given = part.get("image_url") if isinstance(part, dict) else None
    url = given.get("url") if isinstance(given, dict) else given
    if not isinstance(url, str) or not url.startswith(("http://", "https://")):
        return part
    import base64

    return {
        "type": "image_url",
        "image_url": f"data:image/png;base64,{base64.b64encode(url.encode()).decode()}",
    }


def _show(run: Estimate, as_json: bool) -> None:
    share = lambda tokens: round(tokens / run.tokens, 4) if run.tokens else 0.0
    rows = [(name, run.computed[name], share(run.computed[name])) for name in (p.name for p in run.policies)]
    if as_json:
        print_json(
            {
                "requests": run.requests,
                "prompt_tokens": run.tokens,
                "chunk_tokens": run.chunk_tokens,
                "prefix_caching": {"reused": run.prefix, "share": share(run.prefix)},
                "position_independent": {"reused": run.found, "share": share(run.found)},
                "policies": [{"policy": p, "computed": n, "share": s} for p, n, s in rows],
                "left_out": run.left_out,
                "notes": [note._asdict() for note in run.notes],
            }
        )
        return
    percent = lambda tokens: f"{100 * share(tokens):.1f} %"
    out.print(
        f"{run.requests:,} requests, {run.tokens:,} tokens of prompts, {percent(run.chunk_tokens)} in chunks"
    )
    out.print(
        f"prefix caching reuses {percent(run.prefix)}, position-independent caching finds {percent(run.found)}"
    )
    cells = [(name, f"{tokens:,}", f"{100 * part:.1f} %") for name, tokens, part in rows]
    print_table(("policy", "computed tokens", "of all"), cells if run.requests else [], "no requests")
    sys.stdout.flush()
    for note in run.notes:
        err.print(f"line {note.line}: {note.message} [{note.code}]", style="red", soft_wrap=True)
    if run.left_out > SHOWN:
        err.print(f"and {run.left_out - SHOWN:,} more lines", style="red")
