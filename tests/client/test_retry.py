"""Retries and their times, over a transport with scripted responses."""

import asyncio
import io
from email.utils import formatdate
from types import SimpleNamespace

import httpx
import pytest

import mpic
from mpic.client.retry import Retry

HEALTH = {"status": "ok", "live": True, "ready": True, "version": "1", "model": {}, "engine": {}}
HEALTH |= {"policy": "full", "policies": []}
FILE = {"id": "file-1", "filename": "a", "bytes": 1, "created_at": 1, "kind": "text", "state": "ready"}
FILE |= {"purpose": "user_data", "status": "processed"}


def refusal(status, **headers):
    cls = {429: mpic.QueueFull, 503: mpic.Unavailable}[status]
    return lambda: httpx.Response(status, json=cls("not now").body(), headers=headers)


def file():
    return httpx.Response(200, json=FILE)


class Script:
    """Returns its responses in order and raises exception classes. ``bodies`` are the request bodies."""

    def __init__(self, *answers):
        self.answers = list(answers)
        self.bodies = []

    def __call__(self, request):
        self.bodies.append(request.read())
        answer = self.answers.pop(0)
        if isinstance(answer, type):
            raise answer("broken", request=request)
        return answer()

    async def later(self, request):
        await request.aread()
        return self(request)


@pytest.fixture(params=["sync", "async"])
def ask(request, monkeypatch):
    """Run ``work(client)`` over a script; return the result and the seconds slept. Servers of other tests may run in
    this process, and sleep as usual."""
    slept = []

    async def sleep(seconds):
        slept.append(seconds)

    def run(script, work, retries=2):
        slept.clear()
        if request.param == "sync":
            monkeypatch.setattr("mpic.client.io.time", SimpleNamespace(sleep=slept.append))
            with mpic.MPIC(transport=httpx.MockTransport(script), max_retries=retries) as client:
                return work(client), slept

        async def main():
            monkeypatch.setattr(
                "mpic.client.io.asyncio", SimpleNamespace(sleep=sleep, to_thread=asyncio.to_thread)
            )
            transport = httpx.MockTransport(script.later)
            async with mpic.AsyncMPIC(transport=transport, max_retries=retries) as client:
                return await work(client), slept

        return asyncio.run(main())

    return run


@pytest.mark.parametrize("status", [429, 503])
def test_a_refusal_that_passes_is_tried_again_with_growing_pauses(ask, status):
    script = Script(refusal(status), refusal(status), file)
    made, slept = ask(script, lambda c: c.files.create(b"abc"))
    assert made.id == "file-1" and len(slept) == 2
    assert 0.375 <= slept[0] <= 0.5 and 0.75 <= slept[1] <= 1.0
    assert all(b"abc" in body for body in script.bodies)


def test_the_server_says_how_long_to_wait(ask):
    _, slept = ask(Script(refusal(429, **{"retry-after": "7"}), file), lambda c: c.files.retrieve("file-1"))
    assert slept == [7.0]
    date = formatdate(0, usegmt=True)
    _, slept = ask(Script(refusal(503, **{"retry-after": date}), file), lambda c: c.files.retrieve("file-1"))
    assert slept == [0.0]


def test_a_wait_that_is_too_long_is_the_callers_to_decide(ask):
    script = Script(refusal(429, **{"retry-after": "3600"}))
    with pytest.raises(mpic.QueueFull):
        ask(script, lambda c: c.models.list())


def test_it_gives_up(ask):
    with pytest.raises(mpic.QueueFull, match="not now"):
        ask(Script(*[refusal(429)] * 3), lambda c: c.models.list())
    with pytest.raises(mpic.Unreachable):
        ask(Script(*[httpx.ConnectError] * 3), lambda c: c.models.list())
    with pytest.raises(mpic.QueueFull):
        ask(Script(refusal(429)), lambda c: c.models.list(), retries=0)


def test_a_health_that_is_not_ready_is_an_answer(ask):
    body = {**HEALTH, "ready": False, "status": "unavailable"}
    script = Script(lambda: httpx.Response(503, json=body))
    answer, slept = ask(script, lambda c: c.health())
    assert not answer.ready and slept == []


def of_a_proxy():
    return httpx.Response(503, text="<html>no upstream</html>")


@pytest.mark.parametrize(
    ("refused", "error"), [(refusal(503), mpic.Unavailable), (of_a_proxy, mpic.client.BadResponse)]
)
def test_a_health_that_is_refused_is_tried_again_and_then_an_error(ask, refused, error):
    answer, slept = ask(Script(refused, lambda: httpx.Response(200, json=HEALTH)), lambda c: c.health())
    assert answer.ready and len(slept) == 1
    with pytest.raises(error, check=lambda error: error.status == 503):
        ask(Script(*[refused] * 3), lambda c: c.health())


@pytest.mark.parametrize("broken", [httpx.ConnectError, httpx.ConnectTimeout])
def test_what_was_never_sent_is_sent_again_whatever_it_is(ask, broken):
    assert ask(Script(broken, file), lambda c: c.files.create(b"abc"))[0].id == "file-1"


@pytest.mark.parametrize("broken", [httpx.ReadError, httpx.RemoteProtocolError, httpx.WriteError])
def test_only_what_may_be_done_twice_is_sent_again_over_a_broken_connection(ask, broken):
    assert ask(Script(broken, file), lambda c: c.files.retrieve("file-1"))[0].id == "file-1"
    for work in (
        lambda c: c.files.create(b"abc"),
        lambda c: c.caches.create("abc"),
        lambda c: c.files.delete("file-1"),
        lambda c: c.references.create(b"abc"),
    ):
        script = Script(broken)
        with pytest.raises(mpic.Unreachable):
            ask(script, work)
        assert len(script.bodies) == 1


def test_an_upload_with_a_handle_may_be_sent_twice(ask):
    """The second one finds the file that the first one has made."""
    broken = httpx.RemoteProtocolError
    script = Script(broken, file)
    assert ask(script, lambda c: c.files.create(b"abc", "H"))[0].id == "file-1" and len(script.bodies) == 2


@pytest.mark.parametrize("broken", [httpx.ReadError, httpx.WriteError])
def test_a_put_and_a_part_may_be_sent_twice_and_are_read_again_from_their_start(ask, broken, tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"the whole text")
    part = {"id": "part_1", "created_at": 1, "upload_id": "upload_1", "bytes": 14}
    for work, answer in (
        (lambda c: c.files.put("H", path), file),
        (lambda c: c.uploads.add_part("upload_1", path), lambda: httpx.Response(200, json=part)),
    ):
        script = Script(broken, answer)
        ask(script, work)
        assert [b"the whole text" in body for body in script.bodies] == [True, True]


def test_an_answer_that_is_late_is_not_asked_for_again(ask):
    with pytest.raises(mpic.TimedOut):
        ask(Script(httpx.ReadTimeout), lambda c: c.files.retrieve("file-1"))


def test_other_refusals_are_final(ask):
    script = Script(lambda: httpx.Response(409, json=mpic.HandleTaken("taken").body()))
    with pytest.raises(mpic.HandleTaken):
        ask(script, lambda c: c.files.create(b"abc"))


def test_an_upload_is_read_again_from_its_start(ask, tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"the whole text")
    told = []
    for source in (path, ("a.txt", io.BytesIO(b"the whole text"))):
        script = Script(refusal(503), file)
        ask(script, lambda c, source=source: c.files.create(source, progress=lambda *at: told.append(at)))
        assert [b"the whole text" in body for body in script.bodies] == [True, True]
    assert set(told) >= {(14, 14)}


def test_an_upload_that_cannot_be_read_again_is_sent_once(ask):
    class Pipe(io.BytesIO):
        def seekable(self):
            return False

    script = Script(refusal(503))
    with pytest.raises(mpic.Unavailable):
        ask(script, lambda c: c.files.create(("a.txt", Pipe(b"once"))))
    assert len(script.bodies) == 1


def test_what_is_not_of_this_api_is_said_to_be(ask):
    with pytest.raises(mpic.BadResponse, match="not an answer of this API"):
        ask(Script(lambda: httpx.Response(200, json={"hello": 1})), lambda c: c.files.retrieve("x"))


def test_pauses_are_bounded():
    retry = Retry(most=20, first=1)
    assert all(retry.wait(i, True, httpx.ConnectError("x")) <= 8 for i in range(20))
    assert retry.wait(20, True, httpx.ConnectError("x")) is None


def test_the_key_comes_from_the_caller_or_the_environment(monkeypatch):
    seen = []

    def answer(request):
        seen.append(request.headers.get("authorization"))
        return httpx.Response(200, json=HEALTH)

    monkeypatch.setenv("MPIC_API_KEY", "from-env")
    for key in (None, "mine", ""):
        with mpic.MPIC("http://127.0.0.1/v1/", key, transport=httpx.MockTransport(answer)) as client:
            client.health()
    assert seen == ["Bearer from-env", "Bearer mine", None]
