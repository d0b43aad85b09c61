"""Whatever one client sends, the streams and listings of others continue. The test measures time with a wide margin:
such requests used to delay others by 3 to 70 seconds."""

import contextlib
import json
import threading
import time

import httpx
import pytest
from hostile_texts import prose

SECONDS = 3.0


def chat(content, times=1):
    body = {"messages": [{"role": "user", "content": content}] * times}
    return "/v1/chat/completions", json.dumps(body).encode()


def form(charset):
    part = b"--x\r\nContent-Disposition: form-data; name="
    body = part + b'"handle"\r\n\r\n' + b"a" * (1 << 19) + b"\r\n--x--\r\n"
    return "/v1/files", body, f"multipart/form-data; boundary=x; charset={charset}"


def cache(mode, text):
    return "/v1/caches", json.dumps({"text": text, "split": {"mode": mode, "tokens": 16_384}}).encode()


OBJECTS = b'{"messages":[' + b"{}," * 7_000_000 + b"{}]}"
REQUESTS = {
    "a prompt of 20 MB": lambda: chat(prose(20_000_000)),
    "100,000 messages": lambda: chat("x", 100_000),
    "20 MB of empty objects": lambda: ("/v1/chat/completions", OBJECTS),
    "a cache of 8 MB cut by sentences": lambda: cache("sentence", prose(8_000_000)),
    "a cache of 8 MB cut by sections": lambda: cache("section", "|a|b\n" * 1_600_000),
    "a form in punycode": lambda: form("punycode"),
    "a search for 20 MB": lambda: (
        "/v1/references/search",
        json.dumps({"query": prose(20_000_000)}).encode(),
    ),
}


class Watch(threading.Thread):
    """The longest wait for an answer's next word, or for a listing."""

    def __init__(self, url, streams):
        super().__init__(daemon=True)
        self.url, self.streams, self.over = url, streams, threading.Event()
        self.reset()
        self.start()

    def reset(self):
        self.finished, self.count, self.began = 0.0, 0, time.monotonic()

    @property
    def longest(self):
        """Return the longest wait in seconds, including one that still lasts."""
        return max(self.finished, time.monotonic() - self.began)

    def run(self):
        with httpx.Client(base_url=self.url, timeout=60) as http:
            while not self.over.is_set():
                for _ in self._words(http) if self.streams else self._listings(http):
                    if self.over.is_set():
                        break

    def _timed(self, steps):
        self.began = time.monotonic()
        for step in steps:
            self.finished = max(self.finished, time.monotonic() - self.began)
            self.count += 1
            yield step
            self.began = time.monotonic()

    def _listings(self, http):
        yield from self._timed(http.get("/v1/files?limit=1").raise_for_status() for _ in range(1))
        time.sleep(0.01)

    def _words(self, http):
        yield from self._timed(self._lines(http))
        time.sleep(0.1)

    def _lines(self, http):
        body = {"messages": [{"role": "user", "content": "go on"}], "max_tokens": 60, "stream": True}
        body["mpic"] = {"ignore_eos": True}
        with http.stream("POST", "/v1/chat/completions", json=body) as answer:
            yield from answer.iter_lines()


@pytest.fixture
def watches(url):
    watches = [Watch(url, streams) for streams in (True, False)]
    while not all(watch.count for watch in watches):
        time.sleep(0.01)
    yield watches
    for watch in watches:
        watch.over.set()
    for watch in watches:
        watch.join(60)


@pytest.mark.parametrize("request_of", REQUESTS.values(), ids=REQUESTS)
def test_other_requests_do_not_wait(request_of, url, watches):
    """A busy machine may stall a request once; one that is stalled by the server waits every time."""
    path, body, *kind = request_of()
    headers = {"content-type": kind[0] if kind else "application/json"}
    for tries_left in (4, 3, 2, 1, 0):
        for watch in watches:
            watch.reset()
        with httpx.Client(base_url=url, timeout=httpx.Timeout(60, read=4)) as http:
            # it goes on beside the others until its client leaves
            with contextlib.suppress(httpx.ReadTimeout):
                http.post(path, content=body, headers=headers)
        time.sleep(0.2)
        if not tries_left or all(watch.longest < SECONDS and watch.count > 5 for watch in watches):
            break
    assert [watch.longest < SECONDS for watch in watches] == [True, True]
    assert [watch.count > 5 for watch in watches] == [True, True]
