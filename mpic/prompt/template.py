"""A model's own chat template, and the segments it renders messages into.

What a prompt looks like, decided here:

- Everything around chunks is the template's: vision start and end markers, newlines, labels it prints. A text-only
  prompt has exactly the ids of the stock tokenizer on the stock rendering, plus BOS if the template has none.
- *Images* stay where the client put them. A template that keeps the order of parts gets image parts; for one that
  moves images to the front (LLaVA-1.5, LLaVA-NeXT), or takes strings only, a message whose images do not come first
  has the template's own image text (``<image>\\n``) placed inside its text. No end marker is added to an image: the
  models have their own (``<|vision_end|>``, a newline). A template that prints image names gets the name; with others,
  an image that the request named (``IMAGE#EIFFEL``) is followed by ``(EIFFEL)``, so that later mentions of the name
  mean something. Images nobody named get no text.
- *Documents* (text chunks) are given to a template that renders document parts with their names. With others they are
  text: ``document LABEL:``, newline, the chunk, newline, ``end of document LABEL.``, newline, where LABEL is the name
  or the document's number in the conversation.
- Two chunks never touch: a newline goes between them if the template leaves nothing there.
- Texts of separate parts are joined by a newline where a template takes strings only.
- A system message goes in front of the next user message, with an empty line, if the template has no system role.
- A model without any chat template gets ``PLAIN``: Vicuna's ``USER: ... ASSISTANT:``, which LLaVA-1.5 was trained on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from mpic.errors import BadRequest, UnsupportedModality, UnsupportedParameter
from mpic.prompt.marks import Marks
from mpic.prompt.messages import Message, Ref, Text
from mpic.prompt.probes import TEMPLATE_ERRORS, Abilities, probe
from mpic.prompt.segments import ChunkSegment, Prompt, Segment, TextSegment
from mpic.prompt.tokens import Cut, GuardedTokenizer, Trusted

PLAIN = (
    "{{ bos_token or '' }}{% for m in messages %}{% if m.role == 'system' %}{{ m.content | trim }} "
    "{% elif m.role == 'user' %}USER: {{ m.content | trim }} "
    "{% else %}ASSISTANT: {{ m.content | trim }}{{ eos_token or '' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)

Atom = int | Ref
"""What must come out of a rendering: a mark's number, or an image the template places itself."""


class ChatTemplate:
    """Renders messages through the model's own chat template and cuts the result into segments.

    Args:
        processor: a transformers processor or tokenizer.
        image_token: the image placeholder, if the processor does not know its own.

    Attributes:
        image_token: the placeholder that stands for an image in rendered text; None for a text model.
        abilities: what the template can do (``mpic.prompt.probes``).

    Raises:
        ModelRefused: the tokenizer or the template cannot be used safely.
    """

    def __init__(self, processor: Any, image_token: str | None = None) -> None:
        self.tokenizer = getattr(processor, "tokenizer", processor)
        self.image_token = image_token or getattr(processor, "image_token", None)
        self._source = getattr(processor, "chat_template", None) or self.tokenizer.chat_template or PLAIN
        self._guard = GuardedTokenizer(self.tokenizer, self.image_token)
        self.abilities: Abilities = probe(self._render, self.image_token)

    def tokenize_document(self, text: str) -> tuple[int, ...]:
        """Ids of a chunk's text: alone, nothing added, control strings in it taken as text."""
        return self._guard.encode(text)

    def prompt(self, messages: Sequence[Message], tools: Sequence[Mapping] | None = None) -> Prompt:
        """The segments of a conversation, ready for the model's answer.

        Raises:
            BadRequest: the template does not accept the conversation, or would leave part of it out.
            UnsupportedModality: an image for a text model.
            UnsupportedParameter: tools or tool calls for a template that does not print them.
        """
        pieces = self.pieces(messages, tools)
        runs = self._guard.encode_pieces(
            Cut(piece.chunk.kind == "image") if isinstance(piece, Ref) else piece for piece in pieces
        )
        segments: list[Segment] = [TextSegment(runs[0])] if runs[0] else []
        for ref, run in zip((p for p in pieces if isinstance(p, Ref)), runs[1:]):
            segments.append(ChunkSegment(ref.chunk))
            if run:
                segments.append(TextSegment(run))
        return Prompt(tuple(segments))

    def pieces(
        self, messages: Sequence[Message], tools: Sequence[Mapping] | None = None
    ) -> list[Trusted | str | Ref]:
        """The rendered conversation: template text (``Trusted``), client text (``str``) and chunks (``Ref``)."""
        if tools and not self.abilities.tools:
            raise UnsupportedParameter("the model's chat template does not print tools", param="tools")
        draft = _Draft(self.abilities, self._guard, self.image_token)
        conversation = [draft.message(m) for m in self._fold_system(messages)]
        try:
            rendered = self._render(conversation, draft.marks.tree(list(tools or ()), self._guard.is_plain))
        except TEMPLATE_ERRORS as error:
            said = draft.marks.reveal(str(error))
            raise BadRequest(
                f"the model's chat template refuses this conversation: {said}", param="messages"
            ) from error
        return draft.read(rendered)

    def _render(self, messages: list[dict[str, Any]], tools: list | None = None) -> str:
        source = self._source
        if isinstance(source, dict):
            source = source["tool_use"] if tools and "tool_use" in source else source["default"]
        return self.tokenizer.apply_chat_template(
            messages, tools=tools or None, chat_template=source, tokenize=False, add_generation_prompt=True
        )

    def _fold_system(self, messages: Sequence[Message]) -> list[Message]:
        """Put system messages in front of the next user message if the template has no place for them."""
        if self.abilities.system:
            return list(messages)
        folded: list[Message] = []
        waiting: Message | None = None
        for message in messages:
            if waiting and message.role in ("system", "user"):
                items = (*waiting.content, Text("\n\n", None), *message.content)
                message = replace(message, content=items)
            waiting = message if message.role == "system" else None
            if not waiting:
                folded.append(message)
        return [*folded, replace(waiting, role="user")] if waiting else folded


class _Draft:
    """One rendering: messages for the template with marks in them, and what its output must contain."""

    def __init__(self, abilities: Abilities, guard: GuardedTokenizer, image_token: str | None) -> None:
        self.abilities = abilities
        self.guard = guard
        self.image_token = image_token
        self.marks = Marks()
        self.images: list[Ref] = []  # placed by the template, in order
        self.documents = 0
        self.expected: list[tuple[Message, list[Atom]]] = []
        self.called: list[tuple[str, str]] = []  # (function name, param)

    def message(self, message: Message) -> dict[str, Any]:
        """The message as the template gets it."""
        shape = "user" if message.role == "tool" else message.role
        as_parts, as_string = shape in self.abilities.parts, shape in self.abilities.strings
        items = self._items(message, as_parts)
        inline = not as_parts or not self._keeps_order(items)
        atoms: list[Atom] = []
        groups: list[str | dict[str, Any]] = []
        last: int | None = -1
        for item in items:
            if (
                isinstance(item, Text)
                or (item.chunk.kind == "image" and inline)
                or not self._by_part(item, as_parts)
            ):
                text = self._inline(item, atoms)
                part = item.part if isinstance(item, Text) else None
                if groups and isinstance(groups[-1], str) and (None in (last, part) or last == part):
                    groups[-1] += text
                else:
                    groups.append(text)
                last = part
            else:
                groups.append(self._part(item, atoms))
        self.expected.append((message, atoms))
        for i, call in enumerate(message.fields.get("tool_calls", ())):
            self.called.append((call["function"]["name"], f"{message.param}.tool_calls[{i}]"))
        content: Any = [{"type": "text", "text": g} if isinstance(g, str) else g for g in groups]
        if all(isinstance(g, str) for g in groups) and as_string and (message.is_string or not as_parts):
            content = "\n".join(groups)
        fields = {k: self.marks.tree(v, self.guard.is_plain) for k, v in message.fields.items()}
        return {"role": message.role, "content": content, **fields}

    def _items(self, message: Message, as_parts: bool) -> list[Text | Ref]:
        """Content with labels and document markers written out where the template does not."""
        items: list[Text | Ref] = []
        for item in message.content:
            if isinstance(item, Text):
                items.append(item)
            elif item.chunk.kind == "image":
                if self.image_token is None:
                    raise UnsupportedModality("the model takes no images", param=item.param)
                items.append(item)
                if item.name and not (self.abilities.names and as_parts):
                    items.append(Text(f"({item.name})", None))
            else:
                self.documents += 1
                label = item.name or str(self.documents)
                if self._by_part(item, as_parts):
                    items.append(item)
                else:
                    before, after = f"document {label}:\n", f"\nend of document {label}.\n"
                    items += [Text(before, None), item, Text(after, None)]
        return items

    def _by_part(self, ref: Ref, as_parts: bool) -> bool:
        """Whether the template can be given this chunk as a part of its own."""
        return as_parts and (
            self.abilities.documents if ref.chunk.kind == "text" else bool(self.abilities.image)
        )

    def _keeps_order(self, items: Sequence[Text | Ref]) -> bool:
        if self.abilities.order == "word":
            return True
        kinds = [isinstance(item, Ref) and item.chunk.kind == "image" for item in items]
        return self.abilities.order == "first" and kinds == sorted(kinds, reverse=True)

    def _inline(self, item: Text | Ref, atoms: list[Atom]) -> str:
        """An item within text: a mark."""
        first = len(self.marks.values)
        text = self.marks.text(item.text) if isinstance(item, Text) else self.marks.chunk(item)
        atoms.extend(range(first, len(self.marks.values)))
        return text

    def _part(self, ref: Ref, atoms: list[Atom]) -> dict[str, Any]:
        """A chunk as a part of its own."""
        name = {"name": self.marks.text(ref.name)} if ref.name else {}
        if ref.chunk.kind == "text":
            return {"type": "document", "text": self._inline(ref, atoms), **name}
        self.images.append(ref)
        atoms.append(ref)
        return {**(self.abilities.image or {}), **(name if self.abilities.names else {})}

    def read(self, rendered: str) -> list[Trusted | str | Ref]:
        """Cut the rendering at the marks and image placeholders, and check that nothing got lost or moved."""
        cut = self.marks.cut(rendered)
        if cut is None:
            raise BadRequest("the model's chat template cuts texts short", param="messages")
        pieces: list[Trusted | str | Ref] = []
        atoms: list[Atom] = []
        images = iter(self.images)
        for number, text in cut:
            if number is None:
                self._template_text(text, images, pieces, atoms)
                continue
            value = self.marks.values[number]
            if isinstance(value, Ref) or number not in atoms:
                atoms.append(number)
            if not isinstance(value, Ref):
                pieces.append(text)
            elif value.chunk.kind == "image":
                before, after = self.abilities.image_text
                pieces += [Trusted(before), value, Trusted(after)]
            else:
                pieces.append(value)
        self._check(atoms, self.marks.reveal(rendered))
        return _apart([p for p in pieces if p != ""])

    def _template_text(self, text: str, images: Any, pieces: list, atoms: list[Atom]) -> None:
        """Template text; image placeholders in it are the images given as parts, in order."""
        if not self.images:
            pieces.append(Trusted(text))
            return
        first, *others = text.split(self.image_token)
        pieces.append(Trusted(first))
        for other in others:
            ref = next(images, None)
            if ref is None:
                raise BadRequest("the model's chat template repeats an image", param="messages")
            pieces += [ref, Trusted(other)]
            atoms.append(ref)

    def _check(self, atoms: Sequence[Atom], text: str) -> None:
        owner = {atom: i for i, (_, expected) in enumerate(self.expected) for atom in expected}
        found: list[list[Atom]] = [[] for _ in self.expected]
        for atom in atoms:
            if atom in owner:
                found[owner[atom]].append(atom)
        for (message, expected), got in zip(self.expected, found):
            if expected != got:
                what = "changes the order of" if len(got) >= len(expected) else "leaves out part of"
                raise BadRequest(f"the model's chat template {what} this message", param=message.param)
        for name, param in self.called:
            if name not in text:
                raise UnsupportedParameter("the model's chat template does not print tool calls", param=param)


def _apart(pieces: list[Trusted | str | Ref]) -> list[Trusted | str | Ref]:
    """A newline after every chunk that would touch the next one, or end the prompt."""
    spaced: list[Trusted | str | Ref] = []
    for piece, following in zip(pieces, [*pieces[1:], None]):
        spaced.append(piece)
        if isinstance(piece, Ref) and (following is None or isinstance(following, Ref)):
            spaced.append(Trusted("\n"))
    return spaced
