"""``mpic serve`` as a process of its own on a tiny random model, spoken to by the stock ``openai`` client."""

import asyncio
import json
import socket
import time

import httpx
import openai
import pytest
from server_helpers import POOL_PAGES, png


@pytest.fixture(scope="module")
def client(url):
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def image(client):
    """An uploaded and compiled image, with a handle of its own."""
    handle = f"PIC{time.monotonic_ns()}"
    file = client.files.create(file=("red.png", png()), purpose="vision", extra_body={"handle": handle})
    yield client.files.wait_for_processing(file.id, poll_interval=0.02)
    client.files.delete(file.id)


def user(content):
    return [{"role": "user", "content": content}]


def pages(url):
    return httpx.get(f"{url}/health", timeout=60).json()["engine"]


def idle_again(url, seconds=60.0):
    """Wait until nothing runs."""
    end = time.monotonic() + seconds
    while (engine := pages(url))["running"] or engine["waiting"]:
        assert time.monotonic() < end, f"still busy: {engine}"
        time.sleep(0.01)


@pytest.mark.parametrize("policy", ["full", "prefix", "reuse", "mpic-4", "legolink-4", "legolink-0"])
def test_reused_and_recomputed(client, image, policy):
    messages = user(f"Look at IMAGE#{image.model_extra['handle']} well.")
    body = client.chat.completions.create(
        model="tiny", messages=messages, max_tokens=4, extra_body={"mpic": {"policy": policy}}
    )
    ours = body.usage.model_extra["mpic"]
    k = {"full": 16, "prefix": 16, "mpic-4": 4, "legolink-4": 4}.get(policy, 0)
    tokens, [chunk] = ours["tokens"], ours["chunks"]
    assert ours["policy"] == policy
    assert chunk["tokens"] == chunk["reused"] + chunk["recomputed"] == 16
    if policy != "prefix":
        linked = 0 if chunk["tier"] == "compiled" else 16 - k  # legolink-0 has a recipe of its own
        assert (tokens["recomputed"], tokens["reused"]) == (k, linked)
    assert body.usage.prompt_tokens == tokens["reused"] + tokens["prefix_hit"] + tokens["computed"]
    assert body.usage.prompt_tokens_details.cached_tokens == tokens["reused"] + tokens["prefix_hit"]


def test_a_client_that_leaves_before_its_answer_frees_its_pages(url):
    idle_again(url)
    host, port = url.removeprefix("http://").split(":")
    options = {"ignore_eos": True, "policy": "full"}
    body = json.dumps({"messages": user("x"), "max_tokens": 900, "mpic": options}).encode()
    before = pages(url)["counters"].get("finished_abort", 0)
    with socket.create_connection((host, int(port))) as sock:
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        sock.sendall(head.encode() + f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
        with httpx.Client(base_url=url, timeout=60) as http:
            while http.get("/health").json()["engine"]["running"] == 0:
                time.sleep(0.005)
    idle_again(url)
    assert pages(url)["counters"]["finished_abort"] == before + 1


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_for_too_many_pages_disturbs_no_other(client, url, stream):
    """The response is a 400 with the number of pages, and another running answer is the same as alone."""
    ask = {"model": "tiny", "messages": user("count"), "max_tokens": 60}
    ask["extra_body"] = {"mpic": {"ignore_eos": True}}
    alone = client.chat.completions.create(**ask).choices[0].message.content
    other = client.chat.completions.create(**ask, stream=True)
    said = next(other).choices[0].delta.content or ""
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="tiny", messages=user("x" * 1500), max_tokens=2, stream=stream)
    assert caught.value.code == "pool_too_small"
    details = caught.value.body["details"]
    assert (
        set(details) == {"pages", "pages_needed"} and details["pages_needed"] > details["pages"] == POOL_PAGES
    )
    said += "".join(c.choices[0].delta.content or "" for c in other if c.choices)
    assert said == alone
    idle_again(url)


def test_other_hosts_and_origins_are_refused(url):
    assert httpx.get(f"{url}/health", headers={"host": "evil.example"}, timeout=60).status_code == 403
    assert (
        httpx.get(f"{url}/health", headers={"origin": "https://evil.example"}, timeout=60).status_code == 403
    )


async def test_many_clients_at_once(url, image):
    """Streams of several policies share one image; every third client leaves early. All others get the answer they
    would get alone, and nothing stays behind."""
    policies = ("full", "reuse", "mpic-4", "legolink-4")
    handle = image.model_extra["handle"]

    def body(i):
        text = f"{'x' * (i % 5)} IMAGE#{handle} {'y' * (i % 3)}"
        options = {"policy": policies[i % len(policies)], "ignore_eos": True}
        return {"messages": user(text), "max_tokens": 16, "stream": True, "mpic": options}

    async def ask(http, i, leaves):
        said = ""
        async with http.stream("POST", "/v1/chat/completions", json=body(i)) as response:
            assert response.status_code == 200
            async for line in response.aiter_lines():
                if line == "data: [DONE]":
                    return said
                if line:
                    chunk = json.loads(line[6:])
                    assert "error" not in chunk, chunk
                    said += chunk["choices"][0]["delta"].get("content", "")
                if leaves and len(said) > 3:
                    return None

    idle_again(url)
    before = pages(url)
    async with httpx.AsyncClient(base_url=url, timeout=60, limits=httpx.Limits(max_connections=None)) as http:
        answers = await asyncio.gather(*(ask(http, i, i % 3 == 2) for i in range(30)))
        idle_again(url)
        for i in range(0, 30, 7):
            if i % 3 != 2:
                assert await ask(http, i, False) == answers[i]
    after = pages(url)
    assert after["counters"].get("failed", 0) == before["counters"].get("failed", 0)
    free = after["pages"]["free"] + after["pages"].get("prefix", 0)
    assert free <= POOL_PAGES and all(a for i, a in enumerate(answers) if i % 3 != 2)


@pytest.mark.parametrize(("size", "says"), [(3000, "context"), (1500, "pages")])
def test_an_upload_that_cannot_be_compiled_shows_the_reason(client, url, size, says):
    whole = {"split": "none"}
    made = client.files.create(file=("long.txt", b"x" * size), purpose="user_data", extra_body=whole)
    file = client.files.wait_for_processing(made.id, poll_interval=0.05)
    assert file.status == "error" and says in file.status_details
    content = [{"type": "file", "file": {"file_id": made.id}}, {"type": "text", "text": "?"}]
    with pytest.raises(openai.BadRequestError, check=lambda error: says in error.message):
        client.chat.completions.create(model="tiny", messages=user(content), max_tokens=2)
    client.files.delete(made.id)
    idle_again(url)
