"""A rendering: messages with placeholders for the template, and its output, checked and cut into fragments."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from mpic.cancel import checkpoint
from mpic.errors import BadRequest, UnsupportedModality, UnsupportedParameter
from mpic.imaging.clip_header import NO_CLIPS
from mpic.prompt.guarded_tokenizer import GuardedTokenizer, Trusted
from mpic.prompt.messages import Message, Ref, Text
from mpic.prompt.placeholders import Placeholders
from mpic.prompt.probes import Abilities

Fragment = Trusted | str | Ref
Atom = int | Ref
"""Something that must appear in the output: a placeholder, by number, or an image or clip that the template places."""


class Rendering:
    """Prepares messages one by one (``message``), then reads the rendering of them all (``read``).

    Args:
        markers: text of the processor before and behind an image.
        video_token: what the template prints for a clip.
    """

    def __init__(
        self,
        abilities: Abilities,
        guard: GuardedTokenizer,
        image_token: str | None,
        markers: tuple[str, str] = ("", ""),
        video_token: str | None = None,
    ) -> None:
        self.abilities = abilities
        self.guard = guard
        self.image_token = image_token
        self.markers = markers
        self.video_token = video_token
        self.placeholders = Placeholders()
        self.documents = 0
        self.parts: set[Ref] = set()  # chunks that the template gets as parts of their own
        self.images: list[Ref] = []  # those of them that it places by its image token, in order
        self.clips: list[Ref] = []  # by its video token
        self.expected: list[tuple[Message, list[Atom]]] = []
        self.calls: list[tuple[str, str]] = []  # (function name, param)

    # -- the input of the template ---------------------------------------------------------------------------------

    def message(self, message: Message) -> dict[str, Any]:
        """Return a message as the template gets it."""
        checkpoint()
        message = self._without_reasoning(message)
        shape = "user" if message.role == "tool" else message.role
        as_parts, as_string = shape in self.abilities.parts, shape in self.abilities.strings
        if message.role == "tool" and as_string:  # many templates print the result of a tool as it is
            as_parts = False
        items = self._close_up(self._spell_out(message.content, as_parts))
        atoms: list[Atom] = []
        groups: list[str | dict[str, Any]] = []
        last: int | None = None
        for item in items:
            if isinstance(item, Ref) and item in self.parts:
                groups.append(self._part(item, atoms))
                continue
            part = item.part if isinstance(item, Text) else None
            if groups and isinstance(groups[-1], str) and (None in (last, part) or last == part):
                groups[-1] += self._placeholder(item, atoms)
            else:
                groups.append(self._placeholder(item, atoms))
            last = part
        self.expected.append((message, atoms))
        for i, call in enumerate(message.fields.get("tool_calls", ())):
            self.calls.append((call["function"]["name"], f"{message.param}.tool_calls[{i}]"))
        content: Any = [{"type": "text", "text": g} if isinstance(g, str) else g for g in groups]
        if not as_parts or (as_string and message.is_string and all(isinstance(g, str) for g in groups)):
            content = "\n".join(cast(list[str], groups))
        fields = {k: self.placeholders.tree(v, self.guard.is_plain) for k, v in message.fields.items()}
        return {"role": message.role, "content": content, **fields}

    def _without_reasoning(self, message: Message) -> Message:
        """Take the reasoning out of an earlier answer, for a template that would look for it in the content."""
        if message.role != "assistant" or not self.abilities.reasoning:
            return message
        text = "".join(item.text for item in message.content if isinstance(item, Text))
        thought, end, answer = text.rpartition("</think>")
        if not end:
            return message
        fields = dict(message.fields)
        if self.abilities.reasoning == "field":
            thought = thought.partition("</think>")[0].rstrip("\n").rpartition("<think>")[2].lstrip("\n")
            fields.setdefault("reasoning_content", thought)
            answer = answer.lstrip("\n")
        return replace(message, content=(Text(answer),) if answer else (), fields=fields)

    def _spell_out(self, content: Sequence[Text | Ref], as_parts: bool) -> list[Text | Ref]:
        """Decide which chunks the template places; for the others, write labels and document markers as text."""
        items: list[Text | Ref] = []
        for item in content:
            items.append(item)
            if isinstance(item, Text):
                continue
            if item.chunk.kind == "image":
                if self.image_token is None:
                    raise UnsupportedModality("the model takes no images", param=item.param)
                if item.name and not (as_parts and self.abilities.names):
                    items.append(Text(f"({item.name})", None))
                continue
            if item.chunk.kind == "video":
                if not as_parts or self.abilities.video is None:
                    raise UnsupportedModality(NO_CLIPS, param=item.param)
                self.parts.add(item)
                if item.name:
                    items.append(Text(f"({item.name})", None))
                continue
            self.documents += 1
            if as_parts and self.abilities.documents:
                self.parts.add(item)
            else:
                label = item.name or str(self.documents)
                items.insert(-1, Text(f"document {label}:\n", None))
                items.append(Text(f"\nend of document {label}.\n", None))
        images = [isinstance(item, Ref) and item.chunk.kind == "image" for item in items]
        in_front = images == sorted(images, reverse=True)
        if as_parts and (self.abilities.order == "word" or (self.abilities.order == "first" and in_front)):
            self.parts.update(cast(Ref, item) for item, image in zip(items, images) if image)
        return items

    def _close_up(self, items: list[Text | Ref]) -> Iterator[Text | Ref]:
        """Remove the client's white space around a handle within a text if the template puts white space there."""
        before, after = self.abilities.spaced

        def cuts(item: Text | Ref | None) -> bool:
            return isinstance(item, Ref) and item.mention and item in self.parts

        for last, item, following in zip([None, *items], items, [*items[1:], None]):
            if isinstance(item, Text):
                text = item.text.lstrip() if after and cuts(last) else item.text
                text = text.rstrip() if before and cuts(following) else text
                item = replace(item, text=text)
            if not isinstance(item, Text) or item.text:
                yield item

    def _placeholder(self, item: Text | Ref, atoms: list[Atom]) -> str:
        """Return a placeholder for an item within text, and add it to ``atoms``."""
        first = len(self.placeholders.values)
        text = self.placeholders.text(item.text) if isinstance(item, Text) else self.placeholders.chunk(item)
        atoms.extend(range(first, len(self.placeholders.values)))
        return text

    def _part(self, ref: Ref, atoms: list[Atom]) -> dict[str, Any]:
        """Return a chunk as a part of its own, and add it to ``atoms``."""
        name = {"name": self.placeholders.text(ref.name)} if ref.name else {}
        if ref.chunk.kind == "text":
            return {"type": "document", "text": self._placeholder(ref, atoms), **name}
        atoms.append(ref)
        if ref.chunk.kind == "video":
            self.clips.append(ref)
            return dict(self.abilities.video or {})
        self.images.append(ref)
        return {**(self.abilities.image or {}), **(name if self.abilities.names else {})}

    # -- its output ------------------------------------------------------------------------------------------------

    def read(self, rendered: str) -> list[Fragment]:
        """Cut the output at placeholders and image tokens, and check that nothing is missing or has moved."""
        cut = self.placeholders.cut(rendered)
        if cut is None:
            raise BadRequest("the model's chat template cuts texts short", param="messages")
        pieces: list[Fragment] = []
        atoms: list[Atom] = []
        seen: set[int] = set()
        named = {self.image_token: self.images, self.video_token: self.clips}
        placed = {token: iter(refs) for token, refs in named.items() if token and refs}
        for number, text in cut:
            checkpoint()
            if number is None:
                for piece in _at_tokens(text, placed):
                    pieces.append(piece)
                    atoms += [piece] if isinstance(piece, Ref) else []
                continue
            value = self.placeholders.values[number]
            if isinstance(value, Ref) or number not in seen:  # a template may repeat a text, but no chunk
                atoms.append(number)
                seen.add(number)
            if isinstance(value, str):
                pieces.append(text)
            elif value.chunk.kind == "image":
                before, after = self.abilities.image_text
                pieces += [Trusted(before), value, Trusted(after)]
            else:
                pieces.append(value)
        self._check(atoms)
        self._check_calls(rendered)
        return _separate([part for piece in pieces for part in self._marked(piece) if part != ""])

    def _marked(self, piece: Fragment) -> tuple[Fragment, ...]:
        """Return a piece with the processor's markers, if it is an image."""
        if not isinstance(piece, Ref) or piece.chunk.kind != "image":
            return (piece,)
        before, after = self.markers
        return Trusted(before), piece, Trusted(after)

    def _check(self, atoms: Sequence[Atom]) -> None:
        """Check that the texts and chunks of every message are there, in their order."""
        owner = {atom: i for i, (_, expected) in enumerate(self.expected) for atom in expected}
        found: list[list[Atom]] = [[] for _ in self.expected]
        for atom in atoms:
            if atom in owner:
                found[owner[atom]].append(atom)
        for (message, expected), got in zip(self.expected, found):
            if expected != got:
                what = "changes the order of" if set(expected) == set(got) else "leaves out part of"
                raise BadRequest(f"the model's chat template {what} this message", param=message.param)

    def _check_calls(self, rendered: str) -> None:
        """Check that the names of all called functions are there. Each name is looked for once."""
        text = self.placeholders.reveal(rendered) if self.calls else ""
        first: dict[str, str] = {}
        for name, param in self.calls:
            first.setdefault(name, param)
        for name, param in first.items():
            checkpoint()
            if name not in text:
                raise UnsupportedParameter("the model's chat template does not print tool calls", param=param)


def _at_tokens(text: str, placed: Mapping[str, Iterator[Ref]]) -> Iterator[Trusted | Ref]:
    """Cut text of the template at its tokens for images and clips, which stand for those given as parts, in order."""
    at = 0
    for match in re.finditer("|".join(map(re.escape, placed)), text) if placed else ():
        yield Trusted(text[at : match.start()])
        ref = next(placed[match[0]], None)
        if ref is None:
            raise BadRequest(
                "the model's chat template prints more images or videos than there are", param="messages"
            )
        yield ref
        at = match.end()
    yield Trusted(text[at:])


def _separate(pieces: list[Fragment]) -> list[Fragment]:
    """Add a newline after every chunk that would touch the next one, or end the prompt."""
    spaced: list[Fragment] = []
    for piece, following in zip(pieces, [*pieces[1:], None]):
        spaced.append(piece)
        if isinstance(piece, Ref) and (following is None or isinstance(following, Ref)):
            spaced.append(Trusted("\n"))
    return spaced
