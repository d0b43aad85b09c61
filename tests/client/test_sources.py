"""Values that a client accepts as a file. A string is a path only where the program allows it."""

import bz2
import gzip
import io
import os

import httpx
import pytest
from server_helpers import data_url, png
from threads_kit import started
from watched import opened

import mpic
from mpic.client.sources import Upload, image_data_url

NOBODY = "http://127.0.0.1:9"  # nothing is sent
URL = data_url(png())


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "red.png"
    path.write_bytes(png())
    return path


@pytest.fixture(params=["path", "text", "file URL", "missing"])
def word(request, path):
    """Return ways to name a file, some of which would open it."""
    words = {"path": path, "text": str(path), "file URL": f"file://{path}", "missing": f"{path}.gone"}
    return words[request.param]


@pytest.mark.parametrize("kind", [mpic.MPIC, mpic.AsyncMPIC])
async def test_a_client_without_local_files_takes_no_word_for_a_path(word, tmp_path, kind):
    with opened(tmp_path) as seen:
        client = kind(NOBODY, local_files=False, max_retries=0)
        for error, says, call in (
            (mpic.BadRequest, "opens no files", lambda: client.files.create(word)),
            (mpic.BadRequest, "opens no files", lambda: client.references.create(("red.png", word))),
            (mpic.BadRequest, "opens no files", lambda: client.references.replace("ref_a", word)),
            (mpic.InvalidImage, "data URL", lambda: client.references.search(image=word)),
        ):
            with pytest.raises(error, match=says):
                await call()
        closing = client.close()
        assert closing is None or await closing is None
    assert seen == []


NO_IMAGES = [
    *(None, 5, URL.encode(), [URL], {"image": URL}, "", "data:", "data:,x", "data:image/png,AA", f" {URL}"),
    *("data:text/plain;base64,AA", "data:image/svg+xml;base64,AA"),
    *("file:///etc/hostname", "http://127.0.0.1/a.png", "/dev/zero"),
]


@pytest.mark.parametrize("value", NO_IMAGES, ids=lambda value: repr(value)[:40])
def test_nothing_but_the_data_url_of_an_image_is_one(value):
    with pytest.raises(mpic.InvalidImage, match="data URL"):
        image_data_url(value)


def test_the_data_url_of_an_image_may_be_bounded():
    assert image_data_url(URL) == image_data_url(URL, len(URL)) == URL
    with pytest.raises(mpic.TooLarge):
        image_data_url(URL, len(URL) - 1)


def test_in_the_programs_own_process_a_text_may_be_a_path(client, path):
    made = client.references.create(path, "a square", wait=True)
    for image in (path, str(path), URL):
        assert made.id in [hit.id for hit in client.references.search(image=image, top_k=100)]
    client.references.delete(made.id)


TEXT = b"A line of a text that is longer than a buffer of a pipe.\n" * 2000


@pytest.fixture(params=["pipe", "named pipe", "gzip", "bz2", "only read"])
def unsized(request, tmp_path):
    """A file of TEXT whose descriptor, if it has one, does not know its size."""
    if request.param in ("gzip", "bz2"):
        kind = {"gzip": gzip, "bz2": bz2}[request.param]
        (tmp_path / "text").write_bytes(kind.compress(TEXT))
        with kind.open(tmp_path / "text") as file:
            yield file
        return
    if request.param == "only read":
        yield OnlyRead(TEXT)
        return

    def write(end):
        with open(end, "wb") as file:
            file.write(TEXT)

    if request.param == "pipe":
        end, other = os.pipe()
        source = os.fdopen(end, "rb")
    else:
        source = other = tmp_path / "named"
        os.mkfifo(other)
    writer = started(write, other)
    yield source
    writer.join()
    if request.param == "pipe":
        source.close()


class OnlyRead:
    def __init__(self, data):
        self.read = io.BytesIO(data).read


def test_a_file_whose_descriptor_does_not_know_its_size_arrives_whole(client, unsized):
    made = client.files.create(unsized)
    assert client.files.content(made.id) == TEXT
    client.files.delete(made.id)


def test_the_size_of_what_can_be_sought_is_announced_and_progress_ends_there(tmp_path):
    (tmp_path / "text").write_bytes(gzip.compress(TEXT))
    lengths, told = [], []

    def answer(request):
        lengths.append(int(request.headers["content-length"]) - len(request.read()))
        return httpx.Response(503, json=mpic.Unavailable("not now").body())

    with gzip.open(tmp_path / "text") as file, mpic.MPIC(transport=httpx.MockTransport(answer)) as client:
        with pytest.raises(mpic.Unavailable):
            client.files.create(file, progress=lambda *at: told.append(at))
    assert lengths == [0, 0, 0] and told[-1] == (len(TEXT), len(TEXT))


def test_a_file_that_grows_is_sent_as_it_was_and_one_that_shrinks_is_an_error_of_the_client(tmp_path):
    path = tmp_path / "log.txt"
    path.write_bytes(TEXT)
    with Upload("log.txt", path).opened() as (_, body, _):
        with path.open("ab") as more:
            more.write(b"more")
        assert body.read() == TEXT and body.read() == b""
    with Upload("log.txt", path).opened() as (_, body, _):
        os.truncate(path, 5)
        assert body.read(1 << 20) == TEXT[:5]
        with pytest.raises(mpic.client.ClientError, match="ended after 5"):
            body.read(1 << 20)


def test_a_file_of_texts_is_refused_before_its_length_would_be_wrong():
    with Upload("a.txt", OnlyTexts()).opened() as (_, body, _), pytest.raises(TypeError, match="'rb'"):
        body.read()


class OnlyTexts:
    def read(self, size):
        return "é"
