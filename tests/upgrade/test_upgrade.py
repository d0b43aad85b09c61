"""This version opens a data folder that an earlier version wrote, with everything that users had in it."""

import json
import re
import tarfile
from contextlib import closing
from pathlib import Path

import pytest
from old_model import save_model
from server_helpers import png

import mpic
from mpic import MPIC
from mpic.errors import EmbedderMismatch
from mpic.library import Library, upkeep
from mpic_lab.demo import running_server

HERE = Path(__file__).parent
VERSIONS = sorted(path.name.removesuffix(".tar.gz") for path in HERE.glob("*.tar.gz"))
TEXT = b"The office opens at nine. It closes at five. On Fridays it closes at noon."


def unpacked(version, folder):
    """The data folder that a version left, and what users had in it."""
    with tarfile.open(HERE / f"{version}.tar.gz") as tar:
        tar.extractall(folder, filter="data")
    return folder / "data", json.loads((HERE / f"{version}.json").read_text())


def numbers(version):
    return tuple(int(part) for part in version.split("."))


@pytest.fixture(scope="module", params=VERSIONS)
def upgraded(request, tmp_path_factory):
    """(URL, what the users had): a server of this version over the folder of an earlier one."""
    folder = tmp_path_factory.mktemp("old")
    data, had = unpacked(request.param, folder)
    with running_server(data, str(save_model(folder / "model")), "--pool-bytes", str(64 * 12_288)) as (
        url,
        _,
    ):
        yield url, had


def test_the_folder_of_the_version_before_is_kept():
    """Every release leaves its folder here (make_folder.py), so that the next one is tried on it."""
    released = re.findall(
        r"^## (\d+\.\d+\.\d+)", (HERE.parents[1] / "CHANGELOG.md").read_text(), re.MULTILINE
    )
    assert released[0] == mpic.__version__ and released == sorted(released, key=numbers, reverse=True)
    assert set(released[1:]) <= set(VERSIONS)


def test_keys_and_files_of_each_user_are_there(upgraded):
    url, had = upgraded
    for user, originals in {"alice": {"RED": png(), "OFFICE": TEXT}, "bob": {"RED": png("blue")}}.items():
        with MPIC(url, had["keys"][user]) as client:
            files = {file.handle: file for file in client.files.list()}
            assert {handle: file.id for handle, file in files.items()} == had[user]["files"]
            assert all(client.files.content(files[name].id) == data for name, data in originals.items())
    with pytest.raises(mpic.Unauthorized), MPIC(url, "mpic_00000000_" + "x" * 43) as stranger:
        list(stranger.files.list())


def test_what_was_deleted_stays_deleted(upgraded):
    url, had = upgraded
    with MPIC(url, had["keys"]["alice"]) as client, pytest.raises(mpic.FileNotFound):
        client.files.retrieve(had["alice"]["deleted"])


def test_references_are_found(upgraded):
    url, had = upgraded
    with MPIC(url, had["keys"]["root"]) as client:
        assert client.references.retrieve(had["reference"]).metadata == {"year": 2025}
        with pytest.raises(EmbedderMismatch, match="mpic references reindex"):
            client.references.search("green")  # the bundled CLIP of that version had other weights
        state = client.references.reindex()
        while state.reindexing and state.problem is None:
            state = client.references.index()
        assert [hit.id for hit in client.references.search("green", filter={"year": 2025})] == [
            had["reference"]
        ]


def test_compiled_chunks_are_linked_from_the_disk_without_compiling_again(upgraded):
    url, had = upgraded
    with MPIC(url, had["keys"]["alice"]) as client:
        cache = {"type": "cache", "cache_id": had["alice"]["cache"]}
        question = {"type": "text", "text": "IMAGE#RED FILE#OFFICE When does it close?"}
        answer = client.chat.completions.create(
            [{"role": "user", "content": [cache, question]}], policy="reuse", max_tokens=2
        )
    used = answer.usage.mpic
    assert len(used.chunks) == 2 + len(had["cache_chunks"])
    assert {chunk.tier for chunk in used.chunks} == {"disk"} and used.tokens.compiled == 0


@pytest.mark.parametrize("version", VERSIONS)
def test_every_byte_of_the_folder_is_verified_after_the_migration(version, tmp_path):
    data, _ = unpacked(version, tmp_path)
    with closing(Library.open(data)) as library:
        assert upkeep.check(library) == []
