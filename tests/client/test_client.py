"""The SDK against a real engine on a tiny random model; every test over every way to reach it."""

import inspect
import io
import os
import tempfile
import threading
import time

import pytest
from engine_kit import until
from server_helpers import SMALL_POOL, png

import mpic
from mpic.client import endpoints

LONG = {"max_tokens": 400, "mpic": {"ignore_eos": True}}


@pytest.fixture
def image(client):
    """An uploaded and compiled image with a handle of its own."""
    file = client.files.create(("red.png", png()), f"SDK{time.monotonic_ns()}", wait=True)
    yield file
    client.files.delete(file.id)


class Watched(io.BytesIO):
    """A file that remembers how much is read of it at a time, and that breaks at a place."""

    def __init__(self, data, breaks=None):
        super().__init__(data)
        self.most, self.breaks = 0, breaks

    def read(self, size=-1):
        if self.breaks is not None and self.tell() >= self.breaks:
            raise OSError("the disk is gone")
        data = super().read(size)
        self.most = max(self.most, len(data))
        return data


def test_a_file_is_put_under_a_handle_and_never_read_as_a_whole(client, tmp_path):
    told, handle, words = [], f"PUT{time.monotonic_ns()}", b"words of a text\n" * 50_000
    source = Watched(words)
    made = client.files.put(handle, ("w.md", source), split="none", progress=lambda *at: told.append(at))
    assert (made.outcome, made.handle, made.filename, made.bytes) == ("created", handle, "w.md", len(words))
    assert told[-1] == (len(words), len(words)) and len(told) > 3 and source.most <= 256 << 10
    assert client.files.put(handle, ("w.md", words), split="none").outcome == "unchanged"
    path = tmp_path / "notes.txt"
    path.write_bytes(b"other words")
    assert client.files.put(handle, path, ttl=60, wait=True).outcome == "replaced"
    with pytest.raises(mpic.HandleTaken):
        client.files.put(handle, b"third words", replace=False)
    with pytest.raises(mpic.BadRequest, match="handle"):
        client.files.put("no handle", b"words")
    [file] = [file for file in client.files.list() if file.handle == handle]
    client.files.delete(file.id)


def test_a_file_in_parts_that_was_interrupted_goes_on_where_it_was(client):
    told, words = [], os.urandom(300_000).hex().encode()
    handle = f"PARTS{time.monotonic_ns()}"
    begun = client.uploads.create("w.txt", len(words), handle, ttl=600, split={"mode": "fixed", "tokens": 64})
    assert (begun.status, begun.parts) == ("pending", ())
    with pytest.raises(OSError, match="disk is gone"):
        client.uploads.send(begun.id, Watched(words, 200_000), part_bytes=100_000)
    there = client.uploads.retrieve(begun.id).parts
    assert [part.bytes for part in there] == [100_000] * 2
    source = Watched(words)
    made = client.uploads.send(begun.id, source, part_bytes=100_000, progress=lambda *at: told.append(at))
    assert source.most <= 100_000 and told == [(at, len(words)) for at in range(100_000, 600_001, 100_000)]
    assert (made.outcome, made.handle, made.bytes) == ("created", handle, len(words))
    assert client.files.content(made.id) == words
    assert client.uploads.send(begun.id, source).id == made.id  # the answer of the first was lost
    client.files.delete(made.id)


def test_what_an_upload_in_parts_refuses_is_an_error_of_the_sdk(client):
    begun = client.uploads.create("w.txt", 10)
    with pytest.raises(mpic.ClientError, match="ended after 9 bytes"):
        client.uploads.send(begun.id, b"123456789", part_bytes=4)
    with pytest.raises(
        mpic.ClientError, match="has 11 bytes"
    ):  # of which no part is stored as if it were all
        client.uploads.send(begun.id, b"12345678901", part_bytes=4)
    part = client.uploads.add_part(begun.id, b"0123456789")
    with pytest.raises(mpic.errors.ChecksumMismatch):
        client.uploads.complete(begun.id, [part.id], "0" * 32)
    assert client.uploads.cancel(begun.id).status == "cancelled"
    with pytest.raises(mpic.errors.UploadEnded):
        client.uploads.add_part(begun.id, b"0")
    with pytest.raises(ValueError, match="one byte"):
        client.uploads.send(begun.id, b"x", part_bytes=0)


def test_a_file_from_upload_to_deletion(client, tmp_path):
    path = tmp_path / "notes.txt"
    path.write_bytes(b"n" * 200_000)
    told = []
    with pytest.raises(mpic.CompileFailed, match="context"):
        client.files.create(
            path, "TOO_LONG", split="none", wait=True, progress=lambda sent, total: told.append((sent, total))
        )
    assert told[-1] == (200_000, 200_000) and len(told) > 2 and told == sorted(told)
    [failed] = [f for f in client.files.list() if f.handle == "TOO_LONG"]
    assert client.files.delete(failed.id).deleted

    path.write_bytes(b"some notes")
    made = client.files.create(path, "SDK_NOTES", expires_in=1000)
    assert (made.filename, made.kind, made.mention) == ("notes.txt", "text", "FILE#SDK_NOTES")
    done = client.files.wait(made.id)
    assert (done.state, done.tokens, done.tiers, done.status) == ("ready", 10, ("disk",), "processed")
    assert done.expires_at - done.created_at in (1000, 1001)
    assert done.object == "file"  # a field that has no name in the SDK is kept
    assert client.files.content(made.id) == b"some notes"
    assert client.files.update(made.id, None).expires_at is None
    assert client.files.update(made.id, 5000).expires_at - done.created_at >= 5000
    with pytest.raises(ValueError, match="frozen"):
        done.state = "failed"
    assert made.outcome == "created"
    again = client.files.create(path, "SDK_NOTES", ttl=5000, wait=True)
    assert (again.outcome, again.id) == ("unchanged", made.id)
    with pytest.raises(TypeError, match="older name of ttl"):
        client.files.create(path, "SDK_NOTES", ttl=1, expires_in=1)
    path.write_bytes(b"other notes")
    with pytest.raises(mpic.HandleTaken):
        client.files.create(path, "SDK_NOTES")
    made = client.files.create(path, "SDK_NOTES", replace=True)
    assert made.outcome == "replaced" and client.files.content(made.id) == b"other notes"
    assert client.files.delete(made.id).deleted
    with pytest.raises(mpic.FileNotFound) as caught:
        client.files.retrieve(made.id)
    assert isinstance(caught.value, mpic.NotFound) and caught.value.code == "file_not_found"


def test_files_come_from_bytes_and_open_files_too(client):
    for source, name in (
        (b"abc", "upload"),
        (("a.txt", b"abc"), "a.txt"),
        (("b.txt", io.BytesIO(b"abc")), "b.txt"),
    ):
        file = client.files.create(source)
        assert (file.filename, file.bytes) == (name, 3)
        client.files.delete(file.id)


def test_a_listing_is_one_page_or_all_of_it(client):
    ids = [client.files.create(f"text {i}".encode()).id for i in range(5)]
    listed = [f.id for f in client.files.list(limit=2)]
    assert listed[:5] == ids[::-1]
    assert [f.id for f in client.files.list(limit=2, after=ids[2])][:2] == [ids[1], ids[0]]
    for id in ids:
        client.files.delete(id)


def test_items_may_be_deleted_while_they_are_listed(client):
    ids = [client.files.create(f"text {i}".encode()).id for i in range(5)]
    deleted = [client.files.delete(f.id).id for f in client.files.list(limit=2) if f.id in ids]
    assert deleted == ids[::-1]


def test_a_chat_reports_what_it_reused(client, image):
    answer = client.chat.completions.create(
        f"{image.mention} what?", policy="mpic-4", trace=True, max_tokens=4, seed=1, temperature=0
    )
    ours = answer.usage.mpic
    assert answer.text == answer.choices[0].message.content
    assert (ours.policy, ours.tokens.reused, ours.tokens.recomputed) == ("mpic-4", 12, 4)
    found = ours.tokens.prefix_hit  # other tests that use this server may have left how the prompt begins
    assert answer.usage.prompt_tokens_details.cached_tokens == 12 + found
    assert [c.label for c in ours.chunks] == [image.handle]
    spans = ours.trace.spans
    assert spans[0].start == 0 and spans[-1].end == ours.trace.tokens == answer.usage.prompt_tokens
    assert {s.file_id for s in spans if s.kind == "image"} == {image.id}
    assert client.chat.completions.create("hi", max_tokens=1).usage.mpic.trace is None


def test_a_stream_is_the_whole_answer_in_pieces(client, image):
    ask = {"messages": f"{image.mention} again", "policy": "mpic-4", "max_tokens": 12}
    whole = client.chat.completions.create(**ask)
    with client.chat.completions.create(**ask, stream=True) as stream:
        chunks = list(stream)
    assert "".join(c.text for c in chunks) == whole.text
    assert all(c.choices for c in chunks) and chunks[-1].choices[0].finish_reason
    assert stream.usage.completion_tokens == whole.usage.completion_tokens
    assert stream.usage.mpic.tokens.reused + stream.usage.mpic.tokens.prefix_hit > 0
    assert "".join(client.chat.completions.create(**ask, stream=True).texts()) == whole.text
    asked = list(client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}))
    assert asked[-1].choices == () and asked[-1].usage is not None


def test_leaving_a_stream_ends_the_work(client):
    with client.chat.completions.create("count", stream=True, **LONG) as stream:
        for _ in zip(range(3), stream):
            pass
    until(lambda: (engine := client.health().engine)["running"] == engine["waiting"] == 0)
    assert stream.usage is None


@pytest.mark.parametrize("stream", [False, True])
def test_the_servers_errors_are_raised_here(client, stream):
    def ask(text="x", **options):
        return client.chat.completions.create(text, stream=stream, **options)

    with pytest.raises(mpic.UnknownPolicy) as caught:
        ask(policy="best")
    assert caught.value.status == 400 and "best" in caught.value.message
    with pytest.raises(mpic.UnknownHandle, match="NOBODY"):
        ask([{"role": "user", "content": [{"type": "image", "handle": "NOBODY"}]}])
    with pytest.raises(mpic.ContextLengthExceeded):
        ask("x" * 5000)
    with pytest.raises(mpic.UnsupportedParameter, check=lambda error: error.param == "modalities"):
        ask(extra_body={"modalities": ["audio"]})
    with pytest.raises(mpic.ModelNotFound):
        ask(model="other")
    with pytest.raises(TypeError, match="unknown option 'polcy'"):
        ask(polcy="full")


def test_caches(client):
    text = "First sentence. Second sentence. Third one."
    cache = client.caches.create(text, split={"mode": "sentence", "tokens": 20}, name="s", ttl=100, wait=True)
    assert (cache.state, cache.name, len(cache.chunks)) == ("ready", "s", 3)
    assert "".join(text[c.start : c.end] for c in cache.chunks) == text
    assert client.caches.retrieve(cache.chunks[1].id).tokens == cache.chunks[1].tokens
    assert client.caches.update(cache.id, None).expires_at is None
    assert cache.id in [c.id for c in client.caches.list()]
    parts = [{"type": "cache", "cache_id": c.id} for c in reversed(cache.chunks)]
    content = [*parts, {"type": "text", "text": "?"}]
    answer = client.chat.completions.create(
        [{"role": "user", "content": content}], policy="reuse", max_tokens=2
    )
    assert answer.usage.mpic.tokens.reused == sum(c.tokens for c in cache.chunks)
    assert client.caches.delete(cache.id).deleted
    with pytest.raises(mpic.CacheNotFound):
        client.caches.retrieve(cache.id)
    with pytest.raises(mpic.BadRequest, match="either text or chunks"):
        client.caches.create()


def test_references(client):
    id = f"ref_red{time.monotonic_ns()}"
    made = client.references.create(
        ("circle.png", png("red")), "a red picture", metadata={"year": 2025}, id=id, wait=True
    )
    assert (made.state, made.version, made.title) == ("ready", 1, "a red picture")
    assert made.metadata == {"year": 2025}
    again = client.references.replace(
        made.id, ("circle.png", png("green")), description="now green", wait=True
    )
    assert (again.version, again.title, again.description) == (2, "a red picture", "now green")
    assert [r.id for r in client.references.list(kind="image")] == [id]
    [hit] = client.references.search("a picture", top_k=3, filter={"year": 2025})
    assert hit.id == id and -1 <= hit.score <= 1
    assert client.references.content(made.id) == png("green")
    with pytest.raises(mpic.ReferenceExists):
        client.references.create(b"text", id=id)
    assert client.references.delete(made.id).deleted
    with pytest.raises(mpic.ReferenceNotFound):
        client.references.retrieve(made.id)


def test_what_is_served(client):
    [model] = client.models.list()
    assert (model.id, model.context_length) == ("tiny", 2048)
    assert client.models.retrieve("tiny").modalities == ("text", "image")
    health = client.health()
    assert health.ready and "mpic-K" in health.policies and health.model["name"] == "tiny"
    assert "# TYPE" in client.metrics()


def test_both_clients_have_the_same_methods():
    """The synchronous client has the same names, arguments and defaults as the asynchronous one."""

    def methods(client):
        found = {}
        for name, resource in {"": client, "completions": client.chat.completions, **vars(client)}.items():
            if name == "" or type(resource).__module__.startswith("mpic.client"):
                for called in dir(resource):
                    if not called.startswith("_") and inspect.isroutine(method := getattr(resource, called)):
                        parameters = inspect.signature(method).parameters.values()
                        found[f"{name}.{called}"] = [(p.name, p.kind, p.default) for p in parameters]
        return found

    both = methods(mpic.MPIC()), methods(mpic.AsyncMPIC())
    assert both[0] == both[1] and len(both[0]) > 25


def test_names_come_from_where_users_import_them():
    assert mpic.MPIC.__module__ == mpic.client.AsyncStream.__module__ == "mpic.client"


def test_mpic_options_in_extra_body_are_merged():
    extra = {"mpic": {"ignore_eos": True}, "verbosity": "low"}
    body = endpoints.chat([], False, {"policy": "full", "trace": True, "extra_body": extra}).json
    assert body["mpic"] == {"policy": "full", "trace": True, "ignore_eos": True}
    assert body["verbosity"] == "low" and extra["mpic"] == {"ignore_eos": True}


def test_an_empty_id_never_means_everything(client):
    with pytest.raises(ValueError, match="empty"):
        client.files.delete("")


def test_a_local_server_leaves_nothing_behind(tiny_model, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def loops():
        return sum(t.name == "mpic-in-process" for t in threading.enumerate())

    before = loops()
    with mpic.MPIC.local(tiny_model, **SMALL_POOL) as client:
        assert client.health().ready and list(tmp_path.iterdir())
    assert list(tmp_path.iterdir()) == []
    assert loops() == before
    with pytest.raises(mpic.BadRequest, match="polcy") as caught:
        mpic.MPIC.local(tiny_model, polcy="full")
    assert caught.value.code == "config_error" and list(tmp_path.iterdir()) == []


def test_a_kept_folder_is_reused(tiny_model, tmp_path):
    with mpic.MPIC.local(tiny_model, tmp_path, **SMALL_POOL) as client:
        client.files.create(b"some notes", "KEPT", wait=True)
    with mpic.MPIC.local(tiny_model, tmp_path, **SMALL_POOL) as client:
        answer = client.chat.completions.create("FILE#KEPT ?", policy="reuse", max_tokens=1)
    assert [c.tier for c in answer.usage.mpic.chunks] == ["disk"]


@pytest.mark.parametrize(
    ("given", "address"),
    [
        ("127.0.0.1:9000", "http://127.0.0.1:9000"),
        (":9000", "http://127.0.0.1:9000"),
        ("localhost:9000/v1/", "http://localhost:9000"),
        ("https://api.example.org/v1", "https://api.example.org"),
    ],
)
def test_an_address_needs_no_scheme(given, address, monkeypatch):
    from mpic.client.httpx_options import DEFAULT_URL, server_address

    assert server_address(given) == address
    monkeypatch.setenv("MPIC_URL", given)
    assert server_address(None) == address
    monkeypatch.delenv("MPIC_URL")
    assert server_address(None) == DEFAULT_URL


@pytest.mark.parametrize("given", ["", "ftp://host", "http://", "http://host:port", "ho st"])
def test_what_is_no_address_is_refused_at_once(given):
    with pytest.raises(mpic.BadRequest, match="is not the address"):
        mpic.MPIC(given)
