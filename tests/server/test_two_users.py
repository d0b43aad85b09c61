"""Two users of one server: neither sees, lists, links, times or evicts what the other has."""

import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from server_helpers import data_url, png, refusal
from typer.testing import CliRunner

from mpic import MPIC, cli
from mpic.errors import Forbidden

IMAGE = png("purple")
TEXT = b"the very same words, sent by both"


class Person:
    """A user with a key of their own."""

    def __init__(self, keyed, name):
        url, keys = keyed
        headers = {"Authorization": f"Bearer {keys.create(name)[0]}"}
        self.http = httpx.Client(base_url=url, headers=headers, timeout=60)

    def upload(self, data, name, **form):
        form = {"purpose": "user_data", **form}
        answer = self.http.post("/v1/files", data=form, files={"file": (name, data)})
        assert answer.status_code == 200, answer.text
        return self.wait("files", answer.json()["id"])

    def wait(self, kind, id):
        while True:
            made = self.http.get(f"/v1/{kind}/{id}").json()
            if made["state"] != "compiling":
                return made

    def cache(self, **body):
        return self.wait("caches", self.http.post("/v1/caches", json=body).json()["id"])

    def ask(self, content, policy="reuse", **fields):
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": 4, **fields}
        return self.http.post("/v1/chat/completions", json={**body, "mpic": {"policy": policy}})

    def usage(self, content, policy="reuse"):
        answer = self.ask(content, policy)
        assert answer.status_code == 200, answer.text
        return answer.json()["usage"]["mpic"]


@pytest.fixture(scope="module")
def two(keyed):
    people = Person(keyed, "ann"), Person(keyed, "ben")
    yield people
    for person in people:
        person.http.close()


@pytest.fixture(scope="module")
def hers(two):
    ann, _ = two
    return {
        "image": ann.upload(IMAGE, "purple.png", handle="MINE"),
        "text": ann.upload(TEXT, "words.txt", handle="WORDS"),
        "cache": ann.cache(text="her cached text", name="c"),
    }


def test_users_do_not_see_engine_counters_and_their_programs_still_work(keyed):
    url, keys = keyed
    secret = keys.create("carl")[0]
    with MPIC(url, secret) as client:
        health = client.health()
        assert health.ready and health.policies and not health.engine.model_dump(exclude_none=True)
        with pytest.raises(Forbidden):
            client.metrics()
    for command, words in ((["models"], "ready"), (["chat", "-m", "Hello"], "first token")):
        result = CliRunner().invoke(cli.app, [*command, "--url", url, "--api-key", secret])
        assert result.exit_code == 0 and words in result.output, result.output


def test_a_user_does_not_see_or_list_the_other_users_data(two, hers):
    _, ben = two
    for kind in ("files", "caches"):
        assert ben.http.get(f"/v1/{kind}").json()["data"] == []
        after = hers["image" if kind == "files" else "cache"]["id"]
        assert ben.http.get(f"/v1/{kind}", params={"after": after}).status_code == 404
    chunk = hers["cache"]["chunks"][0]["id"]
    for path in (hers["image"]["id"], f"{hers['text']['id']}/content", f"{chunk}/content"):
        assert ben.http.get(f"/v1/files/{path}").status_code == 404
    for id in (hers["cache"]["id"], chunk):
        for method, body in (("GET", None), ("DELETE", None), ("PATCH", {"ttl": 9})):
            assert ben.http.request(method, f"/v1/caches/{id}", json=body).status_code == 404
    assert ben.http.delete(f"/v1/files/{hers['image']['id']}").status_code == 404


def test_a_user_cannot_link_the_other_users_data(two, hers):
    _, ben = two
    cases = [
        ([{"type": "image", "handle": "MINE"}], "unknown_handle"),
        ([{"type": "file", "handle": "WORDS"}], "unknown_handle"),
        ([{"type": "image_url", "image_url": {"url": hers["image"]["id"]}}], "file_not_found"),
        ([{"type": "file", "file": {"file_id": hers["cache"]["chunks"][0]["id"]}}], "file_not_found"),
        ([{"type": "cache", "cache_id": hers["cache"]["id"]}], "cache_not_found"),
        ([{"type": "cache", "cache_id": hers["cache"]["chunks"][0]["id"]}], "cache_not_found"),
    ]
    for content, code in cases:
        assert refusal(ben.ask(content)) == (404, code)
    assert ben.usage("IMAGE#MINE FILE#WORDS?")["chunks"] == []
    unknown = ben.ask([{"type": "cache", "cache_id": "cache-" + "x" * 24}]).json()["error"]
    real = ben.ask([{"type": "cache", "cache_id": hers["cache"]["chunks"][0]["id"]}]).json()["error"]
    assert unknown["code"] == real["code"] and unknown.get("param") == real.get("param")


def test_equal_content_of_another_user_saves_no_time(two, hers):
    """Counts, tiers and reasons (and so times) do not reveal whether another user has sent the same content before."""
    ann, ben = two
    url = data_url(IMAGE)
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What is it?"}]
    assert ann.usage(content)["chunks"][0]["tier"] in ("device", "disk", "host")
    [his] = ben.usage(content)["chunks"]
    assert (his["tier"], his["reason"]) == ("compiled", "new")
    document = [{"type": "document", "text": TEXT.decode()}, {"type": "text", "text": "?"}]
    assert ann.usage(document)["chunks"][0]["tier"] in ("device", "disk", "host")
    assert ben.usage(document)["chunks"][0]["tier"] == "compiled"


@pytest.mark.parametrize("policy", ["prefix", "full", "reuse"])
def test_chats_of_one_user_are_in_no_prefix_of_the_other(two, policy):
    ann, ben = two
    text = f"tell me the secret of {policy} again and again"
    ann.usage(text, policy)
    again = ann.usage(text, policy)["tokens"]
    assert (again["prefix_hit"] > 0) == (policy != "full")
    assert ben.usage(text, policy)["tokens"]["prefix_hit"] < 12  # at most how every turn of his begins


def test_a_flood_of_one_user_evicts_no_chunk_of_the_other(two, hers):
    """One user fills the pool (64 pages) several times; the other's chunk leaves the device, but not the disk."""
    ann, ben = two
    for i in range(12):
        text = f"document number {i} " * 20
        ben.usage([{"type": "document", "text": text}, {"type": "text", "text": "?"}])
    [chunk] = ann.usage("IMAGE#MINE what?")["chunks"]
    assert chunk["tier"] in ("device", "host", "disk") and chunk["reason"] is None


def test_deleting_equal_content_leaves_the_other_users_copy(two, hers):
    ann, ben = two
    his = ben.upload(TEXT, "same.txt", handle="WORDS")
    assert his["id"] != hers["text"]["id"]
    assert ben.http.delete(f"/v1/files/{his['id']}").status_code == 200
    [chunk] = ann.usage("FILE#WORDS what?")["chunks"]
    assert chunk["tier"] in ("device", "host", "disk")


def test_a_users_flood_of_several_answers_each_refuses_the_user_and_nobody_else(two):
    ann, ben = two
    flood = {"n": 4, "temperature": 1.0, "max_tokens": 300}
    full, ended = threading.Event(), threading.Event()

    def ask_without_end():
        while not ended.is_set():
            answer = ann.ask("again", "full", **flood)
            if answer.status_code == 429:
                assert refusal(answer) == (429, "queue_full")
                full.set()

    with ThreadPoolExecutor(6) as threads:
        asking = [threads.submit(ask_without_end) for _ in range(6)]
        try:
            assert full.wait(60)
            assert [ben.ask(f"question {i}", "full").status_code for i in range(8)] == [200] * 8
        finally:
            ended.set()
        for one in asking:
            one.result()
