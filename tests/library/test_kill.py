"""``kill -9`` of a server in the middle of uploads and compiles: everything it acknowledged is there and answered
right, and the library is clean."""

import random
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import httpx
import pytest
from fastapi.testclient import TestClient
from kill_server import POOL_BYTES, Server
from server_helpers import png, save_tiny_llava

from mpic.config import load_config
from mpic.library import Library
from mpic.library.upkeep import check
from mpic.server.run import build

KILLS = 5


def content_of(number):
    """Return the content and the name of upload number n; every fourth is an image."""
    if number % 4 == 0:
        return f"{number}.png", png(f"rgb({number * 37 % 256}, {number * 11 % 256}, {number % 256})")
    return f"{number}.txt", f"Text number {number}. ".encode() * (5 + number % 17)


class Client:
    """Uploads and asks until the server dies; remembers acknowledged uploads."""

    def __init__(self, http):
        self.http = http

    def upload(self, number):
        name, content = content_of(number)
        answer = self.http.post("/v1/files", files={"file": (name, content)}, data={"handle": f"H{number}"})
        assert answer.status_code == 200, answer.text
        return answer.json()["id"]

    def ask(self, number, policy="mpic-4"):
        kind = "IMAGE" if number % 4 == 0 else "FILE"
        body = {"model": "tiny", "messages": [{"role": "user", "content": f"{kind}#H{number} What?"}]}
        body |= {"max_tokens": 4, "temperature": 0, "mpic": {"policy": policy}}
        answer = self.http.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]["message"]["content"]

    def content(self, file_id):
        return self.http.get(f"/v1/files/{file_id}/content").content


def work_until_dead(url, first, acknowledged, stop):
    """One thread uploads, and another asks about the uploads, which compiles them if needed."""

    def upload():
        client = Client(httpx.Client(base_url=url, timeout=60))
        with pytest.raises(httpx.TransportError):
            for number in range(first, first + 10_000):
                acknowledged[number] = client.upload(number)

    def ask():
        client = Client(httpx.Client(base_url=url, timeout=60))
        with pytest.raises(httpx.TransportError):
            while True:
                for number in sorted(acknowledged)[-3:]:
                    client.ask(number)
                time.sleep(0.01)

    with ThreadPoolExecutor(2) as pool:
        work = [pool.submit(upload), pool.submit(ask)]
        stop(work)
        for one in work:
            one.result()


@contextmanager
def in_process(data, model):
    """The same server inside this process, for tests that do not kill it."""
    app = build(load_config(None, {"data_dir": str(data), "model": str(model), "pool_bytes": POOL_BYTES}))
    with TestClient(app, base_url="http://127.0.0.1") as http:
        yield Client(http)


@pytest.fixture
def start():
    """Start servers, and end them even if a test fails."""
    servers = []

    def one(data, model):
        servers.append(Server(data, model))
        return servers[-1]

    yield one
    for server in servers:
        server.kill()


def test_kill_nine_of_a_server_in_the_middle_of_uploads_and_compiles(tmp_path, soak, start):
    model, data = save_tiny_llava(tmp_path / "tiny"), tmp_path / "data"
    rng = random.Random(7)
    acknowledged: dict[int, str] = {}
    answers: dict[int, str] = {}
    first = 0
    for _ in range(soak or KILLS):
        server = start(data, model)
        client = Client(httpx.Client(base_url=server.url, timeout=60))
        fresh = sorted(set(acknowledged) - set(answers))
        for number in fresh:
            assert client.content(acknowledged[number]) == content_of(number)[1]
            answers[number] = client.ask(number)
        for number in rng.sample(sorted(answers), min(3, len(answers))):
            assert client.ask(number) == answers[number]

        enough = len(acknowledged) + rng.randint(2, 10)
        delay = rng.random() * 0.05

        def stop(work, enough=enough, delay=delay, server=server):
            while len(acknowledged) < enough and not any(one.done() for one in work):
                time.sleep(0.002)
            time.sleep(delay)
            server.kill()

        work_until_dead(server.url, first, acknowledged, stop)
        first = max(acknowledged) + 2  # the next may have been stored without an answer
        with Library.open(data) as library:  # as ``mpic library check`` does
            assert check(library) == []
            assert library.recovered["lost_files"] == library.recovered["missing_chunks"] == 0
            handles = {file.handle for file in library.files.page("local").files}
            assert {f"H{number}" for number in acknowledged} <= handles
            assert len(handles) <= len(acknowledged) + (soak or KILLS)  # unanswered ones, at most one a kill

    with in_process(data, model) as client:
        for number in sorted(set(acknowledged) - set(answers)):
            assert client.content(acknowledged[number]) == content_of(number)[1]
            answers[number] = client.ask(number)
    with in_process(tmp_path / "undisturbed", model) as client:
        for number, answer in answers.items():
            client.upload(number)
            assert client.ask(number) == answer, f"upload {number} is answered otherwise after the kills"
    assert len(answers) == len(acknowledged) > 2 * (soak or KILLS)
