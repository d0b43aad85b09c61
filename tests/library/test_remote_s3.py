"""The remote tier over an S3 server of moto on loopback: what differs from a folder, and a server that is killed."""

import json
import sys

import pytest
import torch
from library_tools import chunks, make_chunk, read, text_key
from remote_kit import PATIENCE, s3_server, server, settled, tier_of

from mpic.config import ConfigError, load_config
from mpic.library.store.objects import Objects, StoreUnavailable, connect
from mpic.library.store.remote import content_of, object_of


@pytest.fixture(scope="module")
def s3():
    with s3_server() as running:
        yield running


@pytest.fixture
def reached(monkeypatch):
    """Give the environment of a process that reaches an S3 server."""

    def reach(running):
        for name, value in running.options().items():
            monkeypatch.setenv(name.upper(), value)

    return reach


def names_in(client):
    return {found["path"] for page in client.list() for found in page}


def test_chunks_are_shared_by_the_url_and_credentials_of_the_environment(tmp_path, s3, reached):
    """One of the chunks is uploaded in several parts, and read by ranges."""
    reached(s3)
    small, large = make_chunk(image=True), make_chunk(text_key("large"), n=600, layers=4, heads=8, dim=64)
    config = load_config(None, {"data_dir": str(tmp_path), "remote": "s3://bucket/shared"}).library
    a, b = (server(tmp_path / name, objects=config.objects()) for name in "ab")
    with a, b:
        for chunk in (small, large):
            a.store.save(chunk)
        assert settled(a)["saved"] == 2
        found = b.store.find([small.key, large.key])
        for chunk in (small, large):
            assert found[chunk.key].tier == "remote"
            assert torch.equal(read(found[chunk.key], chunk.kv), chunk.kv)
        assert tier_of(b).stats()["bytes_per_second"] > 0
    assert names_in(s3.client(prefix="shared")) == {object_of(small.key), object_of(large.key)}


def test_an_object_that_was_cut_or_changed_is_moved_aside(tmp_path, s3):
    client, some = s3.client(prefix="cut"), chunks(3)
    with server(tmp_path / "a", client) as a, server(tmp_path / "b", client) as b:
        for chunk in some:
            a.store.save(chunk)
        settled(a)
        names = [object_of(chunk.key) for chunk in some]
        whole = bytes(client.get(names[0]).bytes())
        client.put(names[0], whole[:1000])
        client.put(names[1], b"")
        client.put(names[2], whole)  # another chunk's
        assert b.store.find([chunk.key for chunk in some]) == {}
        assert settled(b)["damaged"] == 3 and tier_of(b).stats()["up"] == 1
        assert names_in(client) == {name.replace(".safetensors", ".damaged") for name in names}


def test_a_deletion_leaves_the_tombstone_alone(tmp_path, s3):
    client = s3.client(prefix="deletion")
    with server(tmp_path / "a", client) as a:
        file = a.files.add("ann", b"some text", "t")
        for sink in (0, 4):
            a.store.save(make_chunk(text_key(sink=sink)))
        settled(a)
        a.files.delete("ann", file.id)
        assert settled(a)["deleted"] == 2
    (name,) = names_in(client)
    assert name == f"deleted/{content_of('ann', file.key)}"
    assert json.loads(bytes(client.get(name).bytes())) == {"library": a.folder.id}


def test_a_bucket_that_is_not_there_counts_as_a_store_that_has_failed(tmp_path, s3):
    with server(tmp_path / "a", s3.client("nobody")) as a:
        a.store.save(make_chunk())
        tier = tier_of(a)
        with tier._changed:
            assert tier._changed.wait_for(lambda: tier.objects.writes.error, PATIENCE)


def test_a_server_that_is_killed_in_the_middle_of_a_load_ends_it_and_the_next_request_is_not_kept_waiting(
    tmp_path, reached
):
    chunk = make_chunk(n=600, layers=12, heads=8, dim=64)
    with s3_server() as running:
        reached(running)
        client = connect("s3://bucket/killed", PATIENCE, retries=0)
        with server(tmp_path / "a", client) as a, server(tmp_path / "b", client) as b:
            a.store.save(chunk)
            settled(a)
            layers = b.store.find([chunk.key])[chunk.key].read_layers(torch.empty_like(chunk.kv))
            next(layers)
            running.kill()
            with pytest.raises(StoreUnavailable):
                list(layers)
            assert tier_of(b).stats()["up"] == 0 and b.store.find([chunk.key]) == {}
            assert a.store.find([chunk.key])[chunk.key].tier == "disk"


@pytest.mark.parametrize("url", ["mnt/shared", "s3://", "ftp://host/x", "redis://host/0", "file://"])
def test_what_is_no_store_is_refused_by_its_key(url):
    with pytest.raises(ConfigError, match=r"\[library\] remote must be a URL") as refused:
        load_config(None, {"data_dir": "x", "remote": url})
    assert refused.value.param == "remote"


def test_a_server_without_obstore_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "obstore.store", None)
    config = load_config(None, {"data_dir": "x", "remote": "s3://bucket/prefix"}).library
    with pytest.raises(ConfigError, match=r"install mpic\[remote\]") as refused:
        config.remote_tiers()
    assert refused.value.param == "remote"


def test_a_folder_that_is_not_there_is_refused_by_its_key(tmp_path):
    with pytest.raises(ConfigError, match=r"\[library\] remote cannot be") as refused:
        Objects.at(f"file://{tmp_path}/none", 1.0)
    assert refused.value.param == "remote" and not (tmp_path / "none").exists()
