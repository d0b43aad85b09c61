"""Forms: what they may hold, and in which charset."""

import asyncio
import codecs
import encodings
import errno
import json
import logging
import os
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from fake_engine import FakeEngine
from server_helpers import fake_server, png, post_raw, refusal, wait_until

from mpic.library.intake.checks import METADATA_KEY_CHARS, METADATA_KEYS, METADATA_VALUE_CHARS
from mpic.library.references import DESCRIPTION_CHARS, TITLE_CHARS
from mpic.server.forms import MAX_FIELDS, TEXT_BYTES
from mpic.server.guard import OPEN_BYTES
from mpic.server.uploads import UploadsUnderWay

FORM = "multipart/form-data; boundary=x"
PART = b"--x\r\nContent-Disposition: form-data; name="


def field(name, value):
    return PART + b'"%s"\r\n\r\n%s\r\n' % (name.encode(), value)


def post(server, path, kind, content):
    return server.http.post(path, content=content, headers={"content-type": kind})


@pytest.fixture
def asked(monkeypatch):
    """The names of codecs that Python code asks for."""
    names, lookup = [], codecs.lookup
    monkeypatch.setattr(codecs, "lookup", lambda name: names.append(name) or lookup(name))
    return names


@pytest.mark.parametrize("charset", ["punycode", '"PUNYCODE"', "utf-8; charset=utf_7", "idna", "latin-1", ""])
@pytest.mark.parametrize(("path", "size"), [("/ui/login", OPEN_BYTES - 200), ("/v1/files", TEXT_BYTES - 200)])
async def test_a_form_in_another_charset_is_refused_and_python_is_not_asked_for_its_codec(
    server, asked, path, size, charset
):
    server.app.state.mpic.keys.create("root", "admin")
    server.http.headers.update(server.key("ann") if path != "/ui/login" else {})
    body = field("key", b"\xe9" * size) + b"--x--\r\n"
    answer = await post(server, path, f"{FORM}; charset={charset}", body)
    assert refusal(answer) == (400, "bad_request")
    assert answer.json()["error"]["param"] == "Content-Type" and "utf-8" in answer.text
    assert set(asked) <= {"utf-8"}


async def test_charsets_that_python_does_not_know_are_not_kept(server):
    server.app.state.mpic.keys.create("root", "admin")
    before = set(encodings._cache)
    for i in range(5):
        answer = await post(server, "/ui/login", f"{FORM}; charset=nobodys-{i}", b"--x--\r\n")
        assert refusal(answer) == (400, "bad_request")
    assert not [name for name in set(encodings._cache) - before if "nobodys" in name]


@pytest.mark.parametrize("charset", ["utf-8", '"UTF-8"', "Utf8"])
async def test_a_form_may_say_that_it_is_in_utf_8(server, charset):
    body = field("handle", b"GR\xc3\x9cN") + field('file"; filename="a.txt', b"green") + b"--x--\r\n"
    answer = await post(server, "/v1/files", f"{FORM}; charset={charset}", body)
    assert answer.json()["handle"] == "GR\u00dcN"  # read as it was meant
    login = f"application/x-www-form-urlencoded; charset={charset}"
    server.app.state.mpic.keys.create("root", "admin")
    assert (await post(server, "/ui/login", login, b"key=x")).status_code == 401


async def test_a_text_that_is_not_utf_8_is_refused_and_not_guessed(server):
    body = field("handle", b"GR\xdcN") + field('file"; filename="a.txt', b"green") + b"--x--\r\n"
    answer = await post(server, "/v1/files", FORM, body)
    assert refusal(answer) == (400, "bad_request") and "'handle' is not UTF-8" in answer.text


@pytest.mark.parametrize("fields", [1, 6, MAX_FIELDS])
async def test_a_form_with_large_texts_is_refused_before_its_file_arrives(server, fields):
    """Each of them may be within a bound of its own: they are in memory together."""
    sent = []

    async def pieces():
        for i in range(fields):
            yield field(f"field{i}", b"x" * (TEXT_BYTES // fields + 1))
        sent.append("file")
        yield field('file"; filename="a.txt', b"text") + b"--x--\r\n"

    answer = await post(server, "/v1/files", FORM, pieces())
    assert refusal(answer) == (413, "too_large")
    assert answer.json()["error"]["details"] == {"limit_bytes": TEXT_BYTES}
    assert sent == []


async def test_the_largest_texts_that_a_reference_may_have_fit_its_form(server):
    metadata = {
        chr(0x1F600 + i) * METADATA_KEY_CHARS: "\U0001f600" * METADATA_VALUE_CHARS
        for i in range(METADATA_KEYS)
    }
    texts = {
        "title": "\U0001f600" * TITLE_CHARS,
        "description": "\U0001f600" * DESCRIPTION_CHARS,
        "metadata": json.dumps(metadata),
    }
    answer = await server.http.post("/v1/references", data=texts, files={"file": ("a.txt", b"text")})
    assert answer.status_code == 200 and answer.json()["metadata"] == metadata


async def test_an_upload_that_is_no_multipart_form_is_refused_unread(server):
    async def pieces():
        yield b"file="
        pytest.fail("the body is read")

    answer = await post(server, "/v1/files", "application/x-www-form-urlencoded", pieces())
    assert refusal(answer) == (400, "bad_request") and "multipart/form-data" in answer.text


async def test_broken_forms_leave_no_record_in_the_log(server, caplog):
    """Anybody may send them to the login, as many as they like."""
    server.app.state.mpic.keys.create("root", "admin")
    with caplog.at_level(logging.INFO):
        for body in (b"nothing", b"--x", b"--x\r\n\0: a\r\n\r\n--x--", field("key", b"a") + b"--x--trailing"):
            assert (await post(server, "/ui/login", FORM, body)).status_code in (400, 401)
    assert caplog.records == []


NAMED = [
    (b"filename*=UTF-8''%E5%9B%BE.png", "图.png"),
    (b"filename*=utf-8'zh'%E5%9B%BE.png; filename=\"x.png\"", "图.png"),
    (b"filename=\"x.png\"; filename*=UTF-8''%e5%9b%be.png", "图.png"),
    (b"filename=x.png;FileName* = \"UTF-8''%E5%9B%BE.png\"", "图.png"),
    (b"filename*=iso-8859-1'en'%E9t%E9.png", "été.png"),
    (b"filename*=UTF-8''a%20%22b%22%5C%3B.png", 'a "b"\\;.png'),
    (b"filename*=koi8-r''%E5.png", "\ufffd.png"),  # no codec is asked for by a client's name for it
    (b"filename=\"a; filename*=UTF-8''b.png\"", "a; filename*=UTF-8''b.png"),
    ('filename="图片.png"'.encode(), "图片.png"),
    ('filename="été.png"'.encode("latin-1"), "été.png"),
    (b'filename="plain.png"', "plain.png"),
]


@pytest.mark.parametrize(("written", "name"), NAMED, ids=range(len(NAMED)))
async def test_a_file_keeps_the_name_that_its_client_wrote_in_whatever_way(server, asked, written, name):
    body = PART + b'"purpose"\r\n\r\nuser_data\r\n' + PART + b'"file"; ' + written
    body += b"\r\n\r\n" + png() + b"\r\n--x--\r\n"
    answer = await post(server, "/v1/files", FORM, body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["filename"] == name and not {"koi8-r"} & set(asked)


@pytest.mark.parametrize("odd", [b"filename*=", b"filename*=UTF-8", b"filename*=UTF-8''", b"filename*=''"])
async def test_a_malformed_extended_name_is_no_name(server, odd):
    body = PART + b'"file"; ' + odd + b"\r\n\r\nwords\r\n--x--\r\n"
    assert refusal(await post(server, "/v1/files", FORM, body)) == (400, "bad_request")


# ---- uploads under way


def unfinished(server, size, ended, path="/v1/files", name="file"):
    """Begin an upload whose body stops after ``size`` bytes of the file until ``ended`` is set."""

    async def body():
        yield PART + b'"%s"; filename="a.txt"\r\n\r\n' % name.encode() + b"a" * size
        await ended.wait()
        yield b"\r\n--x--\r\n"

    headers = {"Content-Type": "multipart/form-data; boundary=x"}
    return asyncio.ensure_future(server.http.post(path, content=body(), headers=headers))


async def test_the_uploads_of_a_user_that_are_under_way_have_a_bound_together(tmp_path, template):
    async with fake_server(tmp_path, template, FakeEngine()) as server:
        uploads, ended = server.app.state.mpic.uploads, asyncio.Event()
        uploads.most = 100_000
        first = [unfinished(server, 40_000, ended) for _ in range(2)]
        await wait_until(lambda: uploads.bytes_of("local") >= 80_000)
        held = uploads.bytes_of("local")
        refused = await server.upload(b"b" * 30_000, "b.txt")
        assert refusal(refused) == (429, "too_many_bytes") and "Retry-After" in refused.headers
        assert uploads.bytes_of("local") == held < 81_000 and uploads.bytes_of("another") == 0
        ended.set()
        assert [answer.status_code for answer in await asyncio.gather(*first)] == [200, 200]
        assert uploads.bytes_of("local") == 0
        assert (await server.upload(b"b" * 200_000, "b.txt")).status_code == 200  # one alone may be larger


async def test_an_upload_whose_client_leaves_is_not_counted_and_leaves_no_file(tmp_path, template):
    async with fake_server(tmp_path, template, FakeEngine()) as server:
        made, create = [], server.library.filesystem.create
        server.library.filesystem.create = lambda path: made.append(path) or create(path)
        head = b'--x\r\nContent-Disposition: form-data; name="file"; filename="a.txt"\r\n\r\n'
        form = "multipart/form-data; boundary=x"
        await post_raw(server.app, "/v1/files", [head + b"a" * 300_000, b"a" * 300_000], [], None, form)
        [path] = made
        await wait_until(lambda: not path.exists())
        assert not server.app.state.mpic.uploads._bytes and not list((tmp_path / "tmp").glob("*"))


def test_the_uploads_of_a_user_take_a_quarter_of_the_free_space_at_most(tmp_path, monkeypatch):
    free = {tmp_path: 1_000, tmp_path / "other": 10_000}
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=free[folder]))
    assert UploadsUnderWay(500, *free).room() == 250
    assert UploadsUnderWay(100, *free).room() == 100


@pytest.mark.parametrize(
    ("failure", "expected"),
    [(errno.ENOENT, None), (errno.EIO, (500, "internal_error"))],
    ids=["gone", "broken"],
)
async def test_a_disk_whose_free_space_cannot_be_told_is_an_error_of_the_server(
    server, monkeypatch, failure, expected
):
    monkeypatch.setattr("shutil.disk_usage", Mock(side_effect=OSError(failure, os.strerror(failure))))
    answer = await server.upload(b"text", "a.txt")
    assert answer.status_code == 200 if expected is None else refusal(answer) == expected


async def test_the_uploads_of_the_page_count_as_those_of_the_api_do(tmp_path, template):
    async with fake_server(tmp_path, template, FakeEngine()) as server:
        uploads, ended = server.app.state.mpic.uploads, asyncio.Event()
        uploads.most = 100_000
        first = unfinished(server, 80_000, ended, "/ui/gradio_api/upload", "files")
        await wait_until(lambda: uploads.bytes_of("local") >= 80_000)
        assert refusal(await server.upload(b"b" * 30_000, "b.txt")) == (429, "too_many_bytes")
        ended.set()
        assert (await first).status_code == 200
        assert uploads.bytes_of("local") == 0
