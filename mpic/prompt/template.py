"""A model's own chat template, and the segments of the messages that it renders.

A prompt has this form:

- Everything around chunks is the template's: vision start and end markers, newlines, labels that it prints; or the
  processor's, where it replaces the template's image token by markers and the image (``markers.py``). A text-only
  prompt has exactly the ids of the stock tokenizer on the stock rendering, plus BOS if the template has none.
- *Images* stay where the client put them. A template that keeps the order of parts gets image parts; for one that
  moves images to the front (LLaVA-1.5, LLaVA-NeXT), or takes strings only, a message whose images do not come first
  has the template's own image text (``<image>\\n``) placed inside its text. No end marker is added to an image: the
  models have their own (``<|vision_end|>``, a newline). A template that prints image names gets the name; with others,
  an image that the request named (``IMAGE#EIFFEL``) is followed by ``(EIFFEL)``, so that later mentions of the name
  mean something. Images without a name get no text.
- *Clips* (videos) stay where they are, too, by the template's own video part; a name follows as that of an image does.
  A template that does not leave them in their places takes none.
- *Documents* (text chunks) are document parts for a template that renders these with their names. For others they are
  text: ``document LABEL:``, newline, the chunk, newline, ``end of document LABEL.``, newline, where LABEL is the name
  or the document's number in the conversation.
- Two chunks never touch: a newline goes between them if the template leaves nothing there.
- Texts of separate parts are joined by a newline where a template takes strings only.
- A system message goes in front of the next user message, with an empty line, if the template has no system role.
- A model without any chat template gets ``PLAIN``: Vicuna's ``USER: ... ASSISTANT:``, which LLaVA-1.5 was trained on.
"""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

from mpic.bounded_json import Bounds
from mpic.errors import BadRequest, UnsupportedModality, UnsupportedParameter, cut
from mpic.kv.chunk import Chunk
from mpic.prompt.bounds import Limit
from mpic.prompt.guarded_tokenizer import Cut, GuardedTokenizer, Trusted
from mpic.prompt.markers import image_markers
from mpic.prompt.messages import Handles, Message, Ref, Resolver, Text, parse_messages
from mpic.prompt.probes import TEMPLATE_ERRORS, Abilities, probe
from mpic.prompt.rendering import Rendering
from mpic.prompt.segments import ChunkSegment, Prompt, Segment, TextSegment
from mpic.prompt.sliced_tokenizer import SlicedTokenizer

PLAIN = (
    "{{ bos_token or '' }}{% for m in messages %}{% if m.role == 'system' %}{{ m.content | trim }} "
    "{% elif m.role == 'user' %}USER: {{ m.content | trim }} "
    "{% else %}ASSISTANT: {{ m.content | trim }}{{ eos_token or '' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)

TOO_DEEP = "a tool or the arguments of a tool call are nested too deeply"


class ChatTemplate:
    """Renders messages through the model's own chat template and cuts the result into segments.

    Args:
        processor: a transformers processor or tokenizer.
        image_token: the image token, if the processor does not know its own.

    Attributes:
        image_token: the token that stands for an image in rendered text; None for a text model.
        video_token: the same of a clip; None for a model without clips.
        abilities: of the template (``mpic.prompt.probes``).
        context: most tokens of the model, if known (``within``). Longer prompts are refused, mostly before they are
            tokenized.

    Raises:
        ModelRefused: the tokenizer or the template cannot be used safely.
    """

    def __init__(self, processor: Any, image_token: str | None = None) -> None:
        self.tokenizer = getattr(processor, "tokenizer", processor)
        self.image_token = image_token or getattr(processor, "image_token", None)
        self.video_token = getattr(processor, "video_token", None)
        self._source = getattr(processor, "chat_template", None) or self.tokenizer.chat_template or PLAIN
        self._guard = GuardedTokenizer(self.tokenizer, self.image_token, self.video_token)
        self._markers = image_markers(processor)
        self.abilities: Abilities = probe(self._render, self.image_token, self.video_token)
        self.context: int | None = None
        self._options: Mapping[str, Any] = {}

    def within(self, context: int) -> ChatTemplate:
        """Return the same template for a model that takes at most ``context`` tokens."""
        bounded = copy.copy(self)
        bounded.context = context
        return bounded

    def given(self, options: Mapping[str, Any]) -> ChatTemplate:
        """Return the same template with variables of a client, such as ``enable_thinking``.

        Raises:
            UnsupportedParameter: the template does not read one of them.
        """
        for name in options:
            if not self.reads(name):
                field = name if name == "reasoning_effort" else f"chat_template_kwargs.{name}"
                raise UnsupportedParameter(
                    f"{cut(field)} is not supported: the model's chat template does not read it", param=field
                )
        chosen = copy.copy(self)
        chosen._options = options
        return chosen

    def reads(self, name: str) -> bool:
        """Return whether the template reads a variable that clients may give."""
        return name in self._words and name not in self._reserved

    @cached_property
    def _words(self) -> frozenset[str]:
        """All names that occur in the template."""
        sources = self._source.values() if isinstance(self._source, dict) else [self._source]
        return frozenset(re.findall(r"[^\W\d]\w*", "\n".join(sources)))

    @cached_property
    def _reserved(self) -> frozenset[str]:
        """Names of what is no client's to choose."""
        own = inspect.signature(self.tokenizer.apply_chat_template).parameters
        return frozenset({"messages", *own, *self.tokenizer.special_tokens_map})

    @property
    def own(self) -> bool:
        """Return whether the model has a chat template of its own."""
        return self._source is not PLAIN

    @property
    def longest_token(self) -> int | None:
        """Return the most bytes of client text that one token can stand for; None: any number."""
        return self._guard.sliced.longest

    @property
    def calls(self) -> str | None:
        """Return the form in which the model writes a tool call, if its decoded answer shows it
        (``Abilities.calls``)."""
        mark = "<tool_call>"
        ids = self.tokenizer(mark, add_special_tokens=False)["input_ids"]
        shown = mark in self.tokenizer.decode(ids, skip_special_tokens=True)
        return self.abilities.calls if shown else None

    def tokenize_document(self, text: str) -> tuple[int, ...]:
        """Return the ids of a chunk's text by itself: nothing is added, and control strings in it are text.

        Raises:
            ContextLengthExceeded: there are more than ``context``.
        """
        return self._guard.encode(text, self._limit(self.context, "the text"))

    def tokenize_alone(self, text: str) -> tuple[int, ...]:
        """Return the ids of a text of a prompt that fits, as ``tokenize_document`` does."""
        return self._guard.encode(text)

    def tokenize_whole(self, text: str, bare: bool = False) -> tuple[int, ...]:
        """Return the ids of a prompt that a client has written as a whole, for the model itself: control strings in it
        are control tokens.

        Args:
            bare: leave out what the tokenizer puts in front of a text.

        Raises:
            ContextLengthExceeded: there are more than ``context``.
        """
        ids = self._guard.encode_whole(text, self._limit(self.context, "the prompt", "prompt"))
        before = len(self._guard.prefix) if bare and not self._begins_itself(text) else 0
        return ids[before:]

    def _begins_itself(self, text: str) -> bool:
        return bool(self._guard.prefix) and text.startswith(self.tokenizer.decode(self._guard.prefix[:1]))

    def check_ids(self, ids: Sequence[int], param: str) -> None:
        """Raise BadRequest if one of the ids is not the tokenizer's."""
        size = len(self.tokenizer)
        if ids and not 0 <= min(ids) <= max(ids) < size:
            wrong = next(at for at, id in enumerate(ids) if not 0 <= id < size)
            raise BadRequest(f"the tokenizer has the tokens 0 to {size - 1}", param=f"{param}[{wrong}]")

    def check_text(self, ids: Sequence[int], param: str) -> None:
        """Raise UnsupportedModality if one of the ids stands for an image or a video."""
        media = {self.tokenizer.convert_tokens_to_ids(t) for t in (self.image_token, self.video_token) if t}
        if not media.isdisjoint(ids):
            raise UnsupportedModality("images and videos go into /v1/chat/completions", param=param)

    @property
    def documents(self) -> SlicedTokenizer:
        """Return a tokenizer for texts of any length that works like ``tokenize_document`` (for
        ``mpic.prompt.split``)."""
        return self._guard.sliced

    def prompt(self, messages: Sequence[Message], tools: Sequence[Mapping] | None = None) -> Prompt:
        """Return the segments of a conversation, ready for the model's answer.

        Raises:
            BadRequest: the template does not accept the conversation, or would leave part of it out.
            UnsupportedModality: an image or a clip for a model that takes none.
            UnsupportedParameter: tools or tool calls for a template that does not print them.
            ContextLengthExceeded: the texts alone leave no room in ``context`` for an answer.
        """
        pieces = self.pieces(messages, tools)
        room = None if self.context is None else self.context - 1
        parts = self._guard.encode_pieces(
            (Cut(piece.chunk.kind == "image") if isinstance(piece, Ref) else piece for piece in pieces),
            self._limit(room, "the prompt", "messages"),
        )
        segments: list[Segment] = [TextSegment(parts[0])] if parts[0] else []
        for ref, part in zip((p for p in pieces if isinstance(p, Ref)), parts[1:]):
            segments.append(ChunkSegment(ref.chunk))
            if part:
                segments.append(TextSegment(part))
        return Prompt(tuple(segments))

    def continuation(self, pieces: Sequence[Trusted | str | Chunk]) -> tuple[Segment, ...]:
        """Return segments of text and chunks that continue a model's answer; nothing is put in front."""
        before, after = self._markers
        cuts: list[Trusted | str | Cut] = []
        for piece in pieces:
            if not isinstance(piece, Chunk):
                cuts.append(piece)
            elif piece.kind == "image":
                cuts += [Trusted(before), Cut(True), Trusted(after)]
            else:
                cuts.append(Cut(False))
        parts = self._guard.encode_pieces([Cut(False), *cuts])[1:]
        segments: list[Segment] = [TextSegment(parts[0])] if parts[0] else []
        for chunk, part in zip((p for p in pieces if isinstance(p, Chunk)), parts[1:]):
            segments.append(ChunkSegment(chunk))
            if part:
                segments.append(TextSegment(part))
        return tuple(segments)

    def _limit(self, tokens: int | None, what: str, param: str | None = None) -> Limit | None:
        if tokens is None or self.context is None:
            return None
        return Limit(tokens, self.context, what, param)

    def is_control(self, token: str) -> bool:
        """Return whether a string is a control token of the model."""
        return self.tokenizer.get_added_vocab().get(token) in self._guard.control

    def render(self, messages: list[dict[str, Any]], tools: list | None = None) -> str:
        """Apply the template to messages of this program, with the generation prompt; not for clients' text."""
        return self._render(messages, tools)

    def pieces(
        self, messages: Sequence[Message], tools: Sequence[Mapping] | None = None
    ) -> list[Trusted | str | Ref]:
        """Render a conversation: text of the template (``Trusted``), text of clients (``str``) and chunks
        (``Ref``)."""
        if tools and not self.abilities.tools:
            raise UnsupportedParameter("the model's chat template does not print tools", param="tools")
        rendering = Rendering(self.abilities, self._guard, self.image_token, self._markers, self.video_token)
        try:
            conversation = [rendering.message(m) for m in self._fold_system(messages)]
            offered = rendering.placeholders.tree(list(tools or ()), self._guard.is_plain)
            spell = partial(rendering.placeholders.tree, is_plain=self._guard.is_plain)
            options = {name: spell(value) for name, value in self._options.items()}
        except RecursionError:
            raise BadRequest(TOO_DEEP) from None
        try:
            rendered = self._render(conversation, offered, options)
        except RecursionError:
            raise BadRequest(TOO_DEEP) from None
        except TEMPLATE_ERRORS as error:
            why = rendering.placeholders.reveal(str(error))
            raise BadRequest(
                f"the model's chat template refuses this conversation: {why}", param="messages"
            ) from error
        return rendering.read(rendered)

    def _render(
        self,
        messages: list[dict[str, Any]],
        tools: list | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> str:
        source = self._source
        if isinstance(source, dict):
            source = source["tool_use"] if tools and "tool_use" in source else source["default"]
        return self.tokenizer.apply_chat_template(
            messages,
            tools=tools or None,
            chat_template=source,
            tokenize=False,
            add_generation_prompt=True,
            **(options or {}),
        )

    def _fold_system(self, messages: Sequence[Message]) -> list[Message]:
        """Put system messages in front of the next user message if the template does not render them."""
        if self.abilities.system:
            return list(messages)
        folded: list[Message] = []
        waiting: Message | None = None
        for message in messages:
            if message.role not in ("system", "user"):
                folded.append(message)
                continue
            if waiting:
                items = (*waiting.content, Text("\n\n", None), *message.content)
                message = replace(message, content=items)
            waiting = message if message.role == "system" else None
            if not waiting:
                folded.append(message)
        return [*folded, replace(waiting, role="user")] if waiting else folded


def build_prompt(
    messages: Any,
    template: ChatTemplate,
    resolver: Resolver,
    tools: Sequence[Mapping] | None = None,
    values: int = Bounds.values,
    handles: Handles | None = None,
) -> Prompt:
    """Return the prompt of an OpenAI-shaped conversation, ready for the model's answer; its last segment is text.

    Args:
        messages: the request's ``messages``, as parsed from JSON.
        template: template of the model that answers.
        resolver: finds the chunks of the user who makes the request.
        tools: the request's ``tools``.
        values, handles: see ``parse_messages``.

    Raises:
        BadRequest: see ``parse_messages`` and ``ChatTemplate.prompt``; ``param`` names the field.
        MPICError: see the resolver.
    """
    parsed = parse_messages(messages, resolver, values, handles)
    for i, tool in enumerate(tools or ()):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise BadRequest("a tool must have a function with a name", param=f"tools[{i}].function")
    return template.prompt(parsed, tools)
