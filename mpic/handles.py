"""Handles, the names by which prompts call uploads (``IMAGE#NAME``, ``FILE#NAME``), in any script."""

from __future__ import annotations

import mimetypes
import re
import unicodedata
from pathlib import PurePath

LONGEST = 64
"""Characters of a handle."""
KINDS = ("IMAGE", "FILE")
PAGES = re.compile(r"\[(\d{1,6})(?:-(\d{1,6}))?\]")
"""The pages of a document behind its handle: ``[3]`` or ``[3-5]``."""
RUN = re.compile(r"[\w.\-]+")


def canonical(name: str) -> str:
    """Return the form in which a handle is kept and compared: composed (NFC), with letters beyond ASCII in title case.
    ASCII letters stay as they are: whatever compares handles ignores their case."""
    if name.isascii():
        return name
    capitals = (c if c.isascii() else c.title() for c in unicodedata.normalize("NFC", name))
    return unicodedata.normalize("NFC", "".join(capitals))


def folded(name: str) -> str:
    """Return a text that is the same for all spellings of a handle."""
    return canonical(name).casefold()


def is_handle(name: str) -> bool:
    """Return whether a canonical name can be a handle: letters, digits and marks of any script, ``_``, ``.`` and
    ``-``, one letter or digit at least."""
    return len(name) <= LONGEST and end_of_name(name, 0) == len(name) and any(map(str.isalnum, name))


def end_of_name(text: str, start: int) -> int:
    """Return where the longest name ends that begins at a place of a text: there, if none does."""
    end = start
    while True:
        if run := RUN.match(text, end):
            end = run.end()
        elif start < end < len(text) and unicodedata.category(text[end])[0] == "M":  # \w leaves marks out
            end += 1
        else:
            return end


def without_pages(name: str) -> tuple[str, tuple[int, int] | None]:
    """Return a name without the pages behind it, and the first and last of these, or None."""
    if not name.endswith("]") or (found := PAGES.fullmatch(name, max(0, name.rfind("[")))) is None:
        return name, None
    first = int(found[1])
    return name[: found.start()], (first, int(found[2] or first))


def of_file(filename: str) -> str:
    """Return a handle made of a file's name: its stem in capitals, with ``_`` in place of what handles cannot hold. A
    stem without letters and digits gives the numbers of its characters, behind IMAGE or FILE."""
    stem = PurePath(filename).stem
    name = "".join(c.upper() if c.isascii() else c for c in canonical(stem))
    kept = "".join(c if c.isalnum() or unicodedata.category(c)[0] == "M" else " " for c in name)
    handle = canonical("_".join(word for word in kept.split(" ") if word))[:LONGEST].strip("_")
    if is_handle(handle):
        return handle
    image = (mimetypes.guess_type(filename)[0] or "").startswith("image/")
    return "_".join((KINDS[0] if image else KINDS[1], *(f"{ord(c):X}" for c in stem)))[:LONGEST].strip("_")
