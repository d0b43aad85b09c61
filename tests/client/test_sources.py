"""Values that a client accepts as a file. A string is a path only where the program allows it."""

import base64

import pytest
from server_helpers import png
from watched import opened

import mpic
from mpic.client.sources import image_data_url

NOBODY = "http://127.0.0.1:9"  # nothing is sent
URL = f"data:image/png;base64,{base64.b64encode(png()).decode()}"


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "red.png"
    path.write_bytes(png())
    return path


@pytest.fixture(params=["path", "text", "file URL", "missing"])
def word(request, path):
    """Returns ways to name a file, some of which would open it."""
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
