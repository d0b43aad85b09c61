"""PDF and Office files: read by page, one handle for the file, pages named in a question."""

import io
import json
import random
import sys
import zipfile
from contextlib import suppress
from unittest.mock import Mock

import psutil
import pytest
from document_kit import docx, mutated, ods, pdf
from fake_engine import FakeEngine
from server_helpers import data_url, fake_server, png, refusal

from mpic.client import MPIC
from mpic.errors import DocumentTooCostly, NoDocumentReader
from mpic.imaging import decoder as decoder_module
from mpic.imaging import documents
from mpic.kv.chunk import ChunkKey
from mpic.library import Limits
from mpic.library.intake.decode import read_pages
from mpic_lab.demo import running_server

REPORT = [f"Chapter {i}.\nThe code of chapter {i} is {i * 37}." for i in range(1, 8)]
SHOWN = [f"[page {i}]\n{text}\n" for i, text in enumerate(REPORT, 1)]


@pytest.fixture
async def server(tmp_path, template):
    async with fake_server(tmp_path, template, FakeEngine(context=2000, pool=10**6)) as server:
        yield server


def linked(server):
    return [s.chunk for s in server.engine.requests[-1].prompt.segments if hasattr(s, "chunk")]


def pages(server):
    return [chunk.page for chunk in linked(server)]


async def test_a_page_of_a_pdf_is_a_chunk(server):
    file = await server.uploaded(pdf(REPORT), "report.pdf", handle="REPORT")
    assert (file["kind"], file["format"], file["pages"], file["chunk_count"]) == ("text", "pdf", 7, 7)
    assert [chunk["page"] for chunk in file["chunks"]] == [*range(1, 8)]
    assert [chunk.key for chunk in server.engine.compiled] == [ChunkKey.of_text(page) for page in SHOWN]
    [listed] = (await server.http.get("/v1/files")).json()["data"]
    assert listed["pages"] == 7
    content = await server.http.get(f"/v1/files/{file['id']}/content")
    assert content.content == pdf(REPORT)


async def test_a_page_that_is_too_long_for_a_chunk_is_cut_but_never_across_its_end(server):
    long = "\n".join(
        f"Sentence {i} of a page that is much too long for a chunk of its own." for i in range(60)
    )
    file = await server.uploaded(pdf([REPORT[0], long, REPORT[1]]), "report.pdf", handle="REPORT")
    numbers = [chunk["page"] for chunk in file["chunks"]]
    assert (numbers[0], numbers[-1]) == (1, 3) and set(numbers[1:-1]) == {2} and len(numbers) > 5
    await server.ask("FILE#REPORT[2]")
    assert pages(server) == numbers[1:-1]


async def test_whoever_wants_a_document_in_one_piece_has_its_pages(server):
    file = await server.uploaded(pdf(REPORT), "report.pdf", handle="REPORT", split="none")
    assert file["chunk_count"] == 7
    again = await server.upload(pdf(REPORT), "report.pdf", handle="REPORT", split="none")
    assert again.json()["outcome"] == "unchanged"


@pytest.mark.parametrize(
    "question, numbers",
    [
        ("What is in FILE#REPORT[3-5]?", [3, 4, 5]),
        ("What is in FILE#report[3]. And in FILE#REPORT[7-7]?", [3, 7]),
        ("FILE#REPORT[3] and FILE#REPORT[2-4], all FILE#REPORT", [3, 2, 4, 1, 5, 6, 7]),
        ("FILE#REPORT and FILE#REPORT[3]", [1, 2, 3, 4, 5, 6, 7]),
        (
            [{"type": "file", "handle": "REPORT[6-7]"}, {"type": "text", "text": "and FILE#REPORT[6-7]?"}],
            [6, 7],
        ),
        ([{"type": "file", "file": {"file_id": "ID[2]"}}], [2]),
        ("FILE\\#REPORT[3] FILE#REPORT[1]", [1]),
    ],
)
async def test_pages_are_named_behind_the_handle_and_linked_once(server, question, numbers):
    file = await server.uploaded(pdf(REPORT), "report.pdf", handle="REPORT")
    question = json.loads(json.dumps(question).replace('"ID[', f'"{file["id"]}['))
    answer = await server.ask(question)
    assert answer.status_code == 200, answer.text
    assert pages(server) == numbers
    assert [chunk.key for chunk in linked(server)] == [ChunkKey.of_text(SHOWN[n - 1]) for n in numbers]
    assert [chunk.label for chunk in linked(server)] == [f"REPORT page {n}" for n in numbers]
    assert "unlinked_handles" not in answer.json()["usage"]["mpic"]


async def test_a_later_mention_of_pages_is_their_name(server):
    await server.uploaded(pdf(REPORT), "report.pdf", handle="REPORT")
    await server.ask("FILE#REPORT[3-4] Compare FILE#REPORT[3-4] with FILE#REPORT[4].")
    *_, own = (s.token_ids for s in server.engine.requests[-1].prompt.segments if not hasattr(s, "chunk"))
    words = server.library.files.tokenize("Compare document REPORT pages 3 to 4 with document REPORT page 4.")
    assert pages(server) == [3, 4]
    assert any(own[at : at + len(words)] == words for at in range(len(own)))


@pytest.mark.parametrize(
    "question", ["FILE#REPORT[8]", "FILE#REPORT[0]", "FILE#REPORT[5-3]", "FILE#REPORT[6-9]"]
)
async def test_a_page_that_is_not_there_links_nothing_and_says_which_are(server, question):
    await server.uploaded(pdf(REPORT), "report.pdf", handle="REPORT")
    answer = await server.ask(f"What is in {question}? {question}")
    [note] = answer.json()["usage"]["mpic"]["unlinked_handles"]
    assert linked(server) == [] and note == {"handle": question, "reason": "REPORT has the pages 1 to 7"}
    part = [{"type": "file", "handle": question.removeprefix("FILE#")}]
    assert refusal(await server.ask(part)) == (404, "page_not_found")


async def test_a_bracket_behind_a_handle_without_pages_is_text(server):
    await server.uploaded(b"notes", "notes.txt", handle="NOTES")
    await server.ask("See FILE#NOTES[1].")
    assert [chunk.key for chunk in linked(server)] == [ChunkKey.of_text("notes")]
    assert refusal(await server.ask([{"type": "file", "handle": "NOTES[1]"}])) == (404, "no_pages")


async def test_a_document_too_long_for_the_context_is_asked_about_by_its_pages(tmp_path, template):
    async with fake_server(tmp_path, template, FakeEngine(context=150, pool=10**6)) as server:
        file = await server.uploaded(pdf([f"Page {i}" for i in range(40)]), "report.pdf", handle="REPORT")
        error = (await server.ask("FILE#REPORT")).json()["error"]
        assert error["code"] == "document_too_long" and "such as FILE#REPORT[1-3]" in error["message"]
        assert file["status_details"] == error["message"]
        assert (await server.ask("FILE#REPORT[20]")).status_code == 200 and pages(server) == [20]


async def test_a_document_of_word_is_markdown(server):
    file = await server.uploaded(docx(["# Title", "Hello", "World"]), "letter.docx", handle="LETTER")
    assert (file["format"], file["pages"]) == ("docx", None)
    [chunk] = server.engine.compiled
    assert chunk.key == ChunkKey.of_text("# Title\n\nHello\n\nWorld")


async def test_slides_and_sheets_are_pages(server):
    file = await server.uploaded(slides("One", "Two"), "talk.pptx", handle="TALK")
    assert (file["format"], file["pages"]) == ("pptx", 2)
    file = await server.uploaded(
        sheets(Prices=[["a", "b"], [1, 2.5]], More=[["x"]]), "x.xlsx", handle="SHEETS"
    )
    assert (file["format"], file["pages"]) == ("xlsx", 2)
    table = "[page 1]\n## Prices\n\n| a | b |\n|---|---|\n| 1 | 2.5 |\n"
    assert ChunkKey.of_text(table) in [chunk.key for chunk in server.engine.compiled]


def slides(*titles):
    import pptx

    made, out = pptx.Presentation(), io.BytesIO()
    for title in titles:
        made.slides.add_slide(made.slide_layouts[5]).shapes.title.text = title
    made.save(out)
    return out.getvalue()


def sheets(**rows):
    import xlsxwriter

    out = io.BytesIO()
    with xlsxwriter.Workbook(out) as book:
        for name, lines in rows.items():
            sheet = book.add_worksheet(name)
            for number, line in enumerate(lines):
                sheet.write_row(number, 0, line)
    return out.getvalue()


def test_a_document_whose_reader_is_missing_is_refused_by_the_command_that_installs_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "mammoth", None)
    with pytest.raises(NoDocumentReader, match=r"pip install 'mpic\[documents\]'"):
        documents.read(docx(["x"]), documents.DocumentRules(10, 1000))


@pytest.mark.parametrize(
    "data, kinds",
    [
        (pdf(REPORT), ["text"] * 7),
        (docx(["x"]), ["text"]),
        (png(), ["image"]),
        ("Привет, как дела? Сегодня хорошая погода.".encode("utf-16"), ["text"]),
        (b"text", ["text"]),
    ],
)
async def test_a_file_inside_a_request_is_read_as_an_upload_is(server, data, kinds, monkeypatch):
    url = data_url(data, "application/octet-stream")
    part = {"type": "file", "file": {"file_data": url, "filename": "x.pdf"}}
    ask = lambda: server.ask([part, {"type": "text", "text": "What is it?"}])
    answer = await ask()
    assert answer.status_code == 200, answer.text
    inline = linked(server)
    await server.uploaded(data, "x", handle="X")
    await server.ask("FILE#X")
    assert [c.key for c in inline] == [c.key for c in linked(server)] and [c.kind for c in inline] == kinds
    monkeypatch.setattr(decoder_module.Decoder, "document", Mock(side_effect=AssertionError("read again")))
    assert (await ask()).status_code == 200


@pytest.mark.parametrize(
    "data, code",
    [(pdf(REPORT)[:500], "invalid_document"), (b"\x7fELF", "unsupported_type"), (pdf([""]), "no_text")],
)
async def test_a_file_inside_a_request_is_refused_by_its_place(server, data, code):
    part = {"type": "file", "file": {"file_data": data_url(data, "application/pdf")}}
    error = (await server.ask([part])).json()["error"]
    assert (error["code"], error["param"]) == (code, "messages[0].content[0].file.file_data")


async def test_a_reference_may_be_a_document(server):
    files = {"file": ("report.pdf", pdf(REPORT[:2]))}
    answer = await server.http.post(
        "/v1/references", data={"title": "Report", "id": "ref_report"}, files=files
    )
    assert answer.status_code == 200, answer.text
    await server.ask([{"type": "file", "file": {"file_id": "ref_report"}}])
    assert [chunk.key for chunk in linked(server)] == [ChunkKey.of_text("".join(SHOWN[:2]))]


async def test_a_document_that_another_version_of_its_parser_reads_otherwise_is_compiled_anew(
    tmp_path, template, monkeypatch
):
    engine = lambda: FakeEngine(context=2000, pool=10**6)
    async with fake_server(tmp_path, template, engine()) as server:
        file = await server.uploaded(pdf(REPORT), "report.pdf", handle="REPORT")
    other = documents.DocumentText("pdf", ["[page 1]\nother\n", "[page 2]\ntext\n"])
    monkeypatch.setattr(decoder_module.Decoder, "document", Mock(return_value=other))
    async with fake_server(tmp_path, template, engine()) as server:
        assert (await server.ask("FILE#REPORT[2]")).status_code == 200
        assert [chunk.key for chunk in linked(server)] == [ChunkKey.of_text("[page 2]\ntext\n")]
        found = (await server.http.get(f"/v1/files/{file['id']}")).json()
        assert (found["pages"], found["chunk_count"]) == (2, 2)
        held = {row["digest"] for row in server.library.catalog.read("SELECT digest FROM contents")}
        assert ChunkKey.of_text(SHOWN[0]).digest not in held
        server.library.check()


@pytest.mark.parametrize("memory, seconds", [(64 << 20, 30), (256 << 20, 1)])
def test_a_document_that_takes_too_much_memory_or_time_is_refused(memory, seconds, monkeypatch):
    monkeypatch.setattr(decoder_module, "DOCUMENT_SLACK", memory)
    monkeypatch.setattr(decoder_module, "DOCUMENT_CPU_SECONDS", seconds)
    made = decoder_module.Decoder(workers=1)
    with pytest.raises(DocumentTooCostly):
        made.document(docx(["words " * 20] * 120_000), documents.DocumentRules(10, 1 << 30), 1 << 30)
    assert made.document(docx(["x"]), documents.DocumentRules(10, 1000), 1 << 30).pages == ["x"]
    made.workers.close()


async def test_a_document_that_claims_memory_beyond_any_bound_is_too_costly(server):
    """The parser of sheets ends its process when memory is refused to it."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(sheets(A=[["x"]]))) as made, zipfile.ZipFile(out, "w") as lies:
        for name in made.namelist():
            lies.writestr(name, made.read(name).replace(b'niqueCount="1"', b'niqueCount="%d"' % (1 << 43)))
    assert refusal(await server.upload(out.getvalue(), "x.xlsx")) == (413, "document_too_costly")
    assert (await server.upload(sheets(A=[["x"]]), "x.xlsx")).status_code == 200


async def test_damaged_documents_are_refused_or_read_within_bounds(server, monkeypatch, fuzz):
    """None of them crashes, hangs or fails the server, and the process that reads them stays small. ``make fuzz``
    sends more."""
    monkeypatch.setattr(decoder_module, "_own", decoder_module.Decoder(workers=1))
    most = 0
    chance = random.Random(57)
    originals = [
        pdf(REPORT, packed=False),
        pdf(REPORT),
        docx(["# A", "b" * 50]),
        slides("x"),
        sheets(A=[["x", 1]]),
        ods([["x", "1"]]),
        PAGE.encode(),
        MAIL.encode(),
    ]
    for number in range(300 + 100 * fuzz):
        data = originals[number % len(originals)]
        for _ in range(chance.choice((1, 1, 2, 3))):
            data = mutated(data, chance)
        answer = await server.upload(data, f"{number}.pdf")
        assert answer.status_code < 500, answer.text
        assert answer.status_code == 200 or answer.json()["error"]["code"], answer.text
        for pid in decoder_module.decoder().workers.pids:
            with suppress(psutil.NoSuchProcess):  # it has just ended
                most = max(most, psutil.Process(pid).memory_info().rss)
    assert 0 < most < 400 << 20
    assert (await server.upload(pdf(REPORT), "good.pdf")).status_code == 200


def test_a_report_of_200_pages_is_asked_about_by_page_and_reused_after_a_restart(tmp_path, tiny_model):
    report = pdf([f"Page {i}: the code is {i * 37}." for i in range(1, 201)])
    ask = "What is the code in FILE#REPORT[117]? Compare FILE#REPORT[3-5]."
    counts = []
    for start in range(2):
        with running_server(tmp_path, tiny_model, "--pool-bytes", "8000000") as (url, _), MPIC(url) as client:
            if not start:
                file = client.files.create(("report.pdf", report), "REPORT", wait=True)
                assert (file.pages, file.chunk_count, file.state) == (200, 200, "ready")
            answer = client.chat.completions.create(ask, max_tokens=2, policy="reuse")
            counts.append(answer.usage.mpic.tokens)
            labels = [chunk.label for chunk in answer.usage.mpic.chunks]
            assert labels == [f"REPORT page {page}" for page in (117, 3, 4, 5)]
            assert [chunk.reused for chunk in answer.usage.mpic.chunks] == [
                chunk.tokens for chunk in answer.usage.mpic.chunks
            ]
    assert counts[0].reused == counts[1].reused > 100 and counts[1].compiled == 0


PAGE = """<!DOCTYPE html>
<html><head><title>The manual &amp; more</title><meta charset="utf-8"><style>p {color: red}</style></head>
<body><script>alert(1)</script><h1>Grüße</h1><p>The code is <b>37</b>.</p><img src="data:image/png;base64,AAAA">
<ul><li>one</li><li><a href="https://example.org/a">two</a></li></ul>
<table><tr><th>a</th><th>b</th></tr><tr><td>1</td><td>2</td></tr></table></body></html>
"""
MAIL = """Received: from a by b\r
From: =?utf-8?q?J=C3=B6rg?= <joerg@example.org>\r
To: anna@example.org\r
Subject: The\r
 meeting\r
Date: Mon, 2 Mar 2026 10:00:00 +0100\r
MIME-Version: 1.0\r
Content-Type: multipart/mixed; boundary=x\r
\r
--x\r
Content-Type: text/html; charset=utf-8\r
Content-Transfer-Encoding: quoted-printable\r
\r
<p>At <b>noon</b>, see=20you.</p>\r
--x\r
Content-Type: application/pdf\r
Content-Disposition: attachment; filename="plan.pdf"\r
\r
%PDF\r
--x--\r
"""
READ = {
    "html": (PAGE, "The manual & more\n\n# Grüße\n\nThe code is **37**.\n\n* one\n"
             "* [two](https://example.org/a)\n\n| a | b |\n| --- | --- |\n| 1 | 2 |"),
    "eml": (MAIL, "From: Jörg <joerg@example.org>\nTo: anna@example.org\nDate: Mon, 02 Mar 2026 10:00:00 +0100\n"
            "Subject: The meeting\nAttachment: plan.pdf\n\nAt **noon**, see you."),
}  # fmt: skip


@pytest.mark.parametrize("begins", ["\ufeff", " \n<?xml version='1.0'?>\n<!-- a > b --><!--->-->\n"])
def test_a_web_page_is_known_behind_a_mark_and_comments(begins):
    assert documents.written((begins + "<HTML lang=en>").encode()) == "html"


@pytest.mark.parametrize("format", READ)
async def test_web_pages_and_mails_are_read_as_markdown_uploaded_and_inline(server, format):
    source, text = READ[format]
    file = await server.uploaded(source.encode(), "a.txt", handle="A")
    assert (file["kind"], file["format"], file.get("pages")) == ("text", format, None)
    await server.ask("FILE#A What?")
    assert [chunk.key for chunk in linked(server)] == [ChunkKey.of_text(text)]
    inline = {"type": "file", "file": {"file_data": data_url(source.encode(), "application/octet-stream")}}
    await server.ask([inline, {"type": "text", "text": "What?"}])
    assert [chunk.key for chunk in linked(server)] == [ChunkKey.of_text(text)]
    content = await server.http.get(f"/v1/files/{file['id']}/content")
    assert content.content == source.encode()


@pytest.mark.parametrize(
    "text",
    [
        "<p>A part of a page</p>",
        "From: here to there, a story. Date: unknown.\n\nOnce upon a time.",
        "From: a\nTo: b\n\nno date",
        "From a@b Mon Mar 2\nFrom: a@b\nDate: Mon, 2 Mar 2026 10:00:00 +0100\n\na mailbox",
        "print('<html>')",
        "<!---->" * 200 + "comments",
    ],
)
async def test_other_texts_are_read_as_they_are(server, text):
    file = await server.uploaded(text.encode(), "page.html", handle="A")
    assert file.get("format") is None
    await server.ask("FILE#A What?")
    assert [chunk.key for chunk in linked(server)] == [ChunkKey.of_text(text)]


def test_a_web_page_that_an_earlier_version_took_as_text_stays_what_it_was():
    assert read_pages(PAGE.encode(), Limits(), "") == [PAGE]
    assert read_pages(PAGE.encode(), Limits(), "html") == [READ["html"][1]]


@pytest.mark.parametrize(
    ("source", "code"),
    [
        ("<html>" + "<div>" * 50_000, "invalid_document"),
        ("<html><script>1</script></html>", "no_text"),
        ("From: a\nDate: b\nContent-Type: multipart/mixed\n\n\n", None),
        ("From: a\nDate: b\nContent-Type: text/plain; charset=nonsense\n\nhello", "invalid_document"),
    ],
    ids=lambda value: str(value)[:40],
)
async def test_hostile_pages_and_mails_are_refused_by_code(server, source, code):
    answer = await server.upload(source.encode(), "a.html")
    assert answer.status_code == 200 if code is None else refusal(answer)[1] == code, answer.text
