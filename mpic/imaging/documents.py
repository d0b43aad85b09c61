"""Reads the text of PDF and Office files, web pages and e-mails in a decoding process: parsers of hostile bytes need
bounds of memory and time (``worker``).

A slide and a sheet are pages, too. A page begins with a line ``[page N]``, so that it is never blank and an answer can
cite it. Documents of Word have no pages before they are laid out; they are one text in Markdown.
"""

from __future__ import annotations

import re
import zipfile
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from mpic.errors import (
    DocumentTooCostly,
    InvalidDocument,
    InvalidUpload,
    NoDocumentReader,
    NoText,
    TooLarge,
    TooManyPages,
    UnsupportedType,
)
from mpic.imaging.pixels import said_by
from mpic.imaging.stored_file import FileBytes, stream

INSTALL = "pip install 'mpic[documents]'"
SIGNATURES = (b"%PDF-", b"PK\x03\x04", b"\xd0\xcf\x11\xe0")
PARTS = {"word/document.xml": "docx", "ppt/presentation.xml": "pptx", "xl/workbook.xml": "xlsx"}
"""Files inside a ZIP that identify the kind of document."""
HTML = re.compile(
    rb"(?:\xef\xbb\xbf)?\s*+(?>(?:<\?xml[^>]*>|<!--(?>.*?-->))\s*+)*+<(?:!doctype\s+html|html)\b", re.I | re.S
)
"""The beginning of a web page. No part is tried twice: thousands of comments could be joined in countless ways."""
FIELD = re.compile(rb"(?:[!-9;-~]+:[^\r\n]*\r?\n(?:[ \t][^\r\n]*\r?\n)*)+\r?\n")
"""The header of an e-mail (RFC 5322): fields, each of which may go on in lines that begin with a space, then an empty
line."""
SENDER, DATE = (re.compile(rb"^%s:" % name, re.I | re.M) for name in (b"From", b"Date"))
WRITTEN = ("html", "eml")
"""Formats that are text to begin with."""
WRITTEN_HEAD = 16 << 10
"""Bytes by which they are told."""
NOT_READ = ("script", "style", "template", "svg", "img")
MOST_XML = 64 << 20
"""Maximum bytes of XML unpacked from an Office document. Parsers take up to a second per two million bytes."""
PAGED = ("pdf", "pptx", "xlsx", "ods", "xls")
UNSAID = str.maketrans("", "", "\0\x02\ufffe\uffff")
"""Characters that PDFium puts where a line end splits a word, and characters that belong in no text."""


class DocumentRules(NamedTuple):
    """Rules by which documents are accepted.

    Args:
        pages: maximum number of pages, slides or sheets.
        bytes: maximum number of bytes of their text in UTF-8.
    """

    pages: int
    bytes: int


class DocumentText(NamedTuple):
    """The content of a document.

    Args:
        format: ``pdf``, ``docx``, ``pptx``, ``xlsx``, ``ods``, ``xls``, ``html`` or ``eml``.
        pages: the text of each page; of a document without pages all of its text.
    """

    format: str
    pages: list[str]

    @property
    def paged(self) -> bool:
        return self.format in PAGED


def read(data: FileBytes, rules: DocumentRules) -> DocumentText:
    """Return the text of a document.

    Raises:
        UnsupportedType: it is a ZIP or an old Office document of another kind.
        NoDocumentReader: the package that reads it is not installed.
        InvalidDocument: it is damaged, or protected by a password.
        NoText: there is no text in it.
        TooManyPages, TooLarge: it has more than the rules allow.
        MemoryError: it takes more memory than there is.
    """
    try:
        format = _format(data)
        return DocumentText(format, list(_bounded(READERS[format](data), format in PAGED, rules)))
    except (InvalidUpload, TooLarge):
        raise
    except ImportError as error:
        raise NoDocumentReader(
            f"Office documents need packages that are not installed here: {INSTALL}",
            param="file",
        ) from error
    except MemoryError:
        raise
    except Exception as error:  # a parser of hostile bytes may raise almost any exception
        raise InvalidDocument(f"the document cannot be read{said_by(error)}", param="file") from error


def _bounded(texts: Iterable[str], paged: bool, rules: DocumentRules) -> Iterator[str]:
    """Yield the pages with their numbers; raise if there are more than the rules allow."""
    size, any_text = 0, False
    for number, text in enumerate(texts, 1):
        if number > rules.pages:
            raise TooManyPages(
                f"the document has more than {rules.pages} pages: send the part of it that you need",
                param="file",
            )
        text = text.translate(UNSAID).encode(errors="replace").decode().strip()
        any_text |= bool(text)
        page = f"[page {number}]\n{text}\n" if paged else text
        size += len(page.encode())
        if size > rules.bytes:
            raise TooLarge(f"the text of the document has more than {rules.bytes} bytes", param="file")
        yield page
    if not any_text:
        raise NoText(
            "there is no text in the document: if its pages are pictures, send these as images", param="file"
        )


def written(data: FileBytes) -> str:
    """Return ``html`` or ``eml`` if that is what a text is, and an empty string otherwise. Other texts are read as they
    are: neither a name nor a stated type makes one of them."""
    head = data[:WRITTEN_HEAD]
    if HTML.match(head):
        return "html"
    fields = FIELD.match(head)
    return "eml" if fields and SENDER.search(fields[0]) and DATE.search(fields[0]) else ""


def _format(data: FileBytes) -> str:
    if format := written(data):
        return format
    if data.startswith(b"%PDF-"):
        return "pdf"
    if data.startswith(b"\xd0\xcf\x11\xe0"):
        return "xls"
    with zipfile.ZipFile(stream(data)) as archive:
        names = archive.NameToInfo
        if sum(part.file_size for part in names.values() if part.filename.endswith(".xml")) > MOST_XML:
            raise DocumentTooCostly(
                f"the document unpacks to more than {MOST_XML} bytes of XML", param="file"
            )
        for part, format in PARTS.items():
            if part in names:
                return format
        if "mimetype" in names and archive.open("mimetype").read(64).endswith(b"opendocument.spreadsheet"):
            return "ods"
    raise UnsupportedType(
        "a ZIP is not accepted, unless it is a document of Word (docx), PowerPoint (pptx) or Excel (xlsx), or a "
        "spreadsheet of OpenDocument",
        param="file",
        type="ZIP",
    )


def _pdf(data: FileBytes) -> Iterator[str]:
    import pypdfium2
    from pypdfium2.raw import FPDF_ERR_PASSWORD

    try:
        document = pypdfium2.PdfDocument(data if isinstance(data, bytes) else stream(data))
    except pypdfium2.PdfiumError as error:
        if error.err_code == FPDF_ERR_PASSWORD:
            raise InvalidDocument("the document is protected by a password", param="file") from error
        raise
    for number in range(len(document)):
        page = document[number]
        text = page.get_textpage()
        yield text.get_text_bounded().replace("\r\n", "\n")
        text.close()
        page.close()


def _docx(data: FileBytes) -> Iterator[str]:
    import mammoth
    import markdownify

    no_picture = mammoth.images.img_element(lambda image: {})
    html = mammoth.convert_to_html(stream(data), convert_image=no_picture).value
    yield markdownify.markdownify(html, heading_style="ATX", strip=["img"])


def _html(data: FileBytes) -> Iterator[str]:
    yield _markdown(data[:])


def _markdown(html: bytes | str) -> str:
    """Return a web page in Markdown, with its title and without its pictures and programs."""
    import bs4
    import markdownify

    page = bs4.BeautifulSoup(html, "html.parser")
    for tag in page(NOT_READ):
        tag.decompose()
    title = page.title.extract().get_text(" ", strip=True) if page.title else ""
    text = markdownify.MarkdownConverter(heading_style="ATX").convert_soup(page)
    return re.sub(r"\n{3,}", "\n\n", f"{title}\n\n{text}").strip()


def _eml(data: FileBytes) -> Iterator[str]:
    """Yield an e-mail: who wrote it to whom, its text, and the names of what is attached, which is not read."""
    import email
    import email.policy

    mail = email.message_from_bytes(data[:], policy=email.policy.default)
    lines = [f"{name}: {mail[name]}" for name in ("From", "To", "Cc", "Date", "Subject") if mail[name]]
    body = mail.get_body(("plain", "html"))
    text = "" if body is None else body.get_content()
    if body is not None and body.get_content_type() == "text/html":
        text = _markdown(text)
    for part in mail.iter_attachments() if mail.is_multipart() else ():
        lines.append(f"Attachment: {part.get_filename() or part.get_content_type()}")
    yield "\n".join([*lines, "", text.replace("\r\n", "\n")])


def _pptx(data: FileBytes) -> Iterator[str]:
    import pptx

    for slide in pptx.Presentation(stream(data)).slides:
        words = list(_shapes(slide.shapes))
        if slide.has_notes_slide and slide.notes_slide.notes_text_frame is not None:
            words.append(f"Notes: {slide.notes_slide.notes_text_frame.text}")
        yield "\n\n".join(words)


def _shapes(shapes: Iterable) -> Iterator[str]:
    for shape in shapes:
        if hasattr(shape, "shapes"):  # a group
            yield from _shapes(shape.shapes)
        elif shape.has_text_frame:
            yield shape.text_frame.text
        elif getattr(shape, "has_table", False):
            yield _table([cell.text for cell in row.cells] for row in shape.table.rows)


def _sheets(data: FileBytes) -> Iterator[str]:
    import python_calamine

    try:
        book = python_calamine.CalamineWorkbook.from_filelike(stream(data))
    except python_calamine.PasswordError as error:
        raise InvalidDocument("the document is protected by a password", param="file") from error
    except python_calamine.CalamineError as error:
        if data.startswith(b"\xd0\xcf\x11\xe0"):
            raise UnsupportedType(
                "old Office documents are not accepted, except those of Excel (xls): save it in the new format",
                param="file",
                type="old Office document",
            ) from error
        raise
    for name in book.sheet_names:
        rows = book.get_sheet_by_name(name).iter_rows()
        yield f"## {name}\n\n{_table(map(_said, row) for row in rows)}"


def _said(cell: object) -> str:
    """Return the text of a cell. Print whole numbers as integers, because most sheets store them as floats."""
    return str(int(cell)) if isinstance(cell, float) and cell.is_integer() else str(cell)


def _table(rows: Iterable[Iterable[str]]) -> str:
    """Return a table in Markdown."""
    lines = [
        "| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in row) + " |" for row in rows
    ]
    if lines:
        lines.insert(1, "|" + "---|" * (lines[0].count(" | ") + 1))
    return "\n".join(lines)


READERS = {
    "html": _html,
    "eml": _eml,
    "pdf": _pdf,
    "docx": _docx,
    "pptx": _pptx,
    **dict.fromkeys(("xlsx", "ods", "xls"), _sheets),
}
