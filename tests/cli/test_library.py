"""``mpic library`` on a folder, with a running server and without one."""

import json

import pytest
from library_tools import encoded, flip, make_chunk
from remote_kit import settled

from mpic.kv.chunk import ChunkKey, KVKey, Recipe
from mpic.library import Library
from mpic.library.store import Objects, RemoteTier


@pytest.fixture
def mpic(mpic):
    return lambda *args: mpic("library", *args)


@pytest.fixture
def root(tmp_path):
    with Library.open(tmp_path / "library") as library:
        file = library.files.add("local", b"some text", "t.txt", handle="T", metadata={"a": 1})
        library.store.save(make_chunk(KVKey("local", file.key, "a1" * 32, Recipe("float32"))))
        library.files.add("bob", encoded(), "b.png")
    return tmp_path / "library"


COMMANDS = ["ls", "check", "quota", "backup", "restore", "recover"]


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_teaches(mpic, command):
    status, out, _ = mpic(*command.split(), "--help")
    assert status == 0 and "Usage" in out and len(out.splitlines()) > 8


def test_ls_says_who_holds_what_beside_a_server_too(mpic, root):
    with Library.open(root):  # a server has it open
        status, out, _ = mpic("ls", "--data-dir", root)
        assert status == 0 and out.count("original") == 2 and "bob" in out and "compiled chunks:" in out
        status, out, _ = mpic("ls", "--user", "bob", "--data-dir", root, "--json")
        (row,) = json.loads(out)
        assert (row["owner"], row["count"], row["bytes"]) == ("bob", 1, len(encoded()))
        status, out, err = mpic("quota", "bob", "--data-dir", root)
        assert status == 1 and "another process" in err and "[library_in_use]" in err


def test_check_reads_everything_and_its_status_says_what_it_found(mpic, root):
    status, out, _ = mpic("check", "--data-dir", root)
    assert status == 0 and "as it was stored" in out
    (path,) = root.glob("kv/*/*/*")
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    assert mpic("check", "--quick", "--data-dir", root)[0] == 0
    status, out, _ = mpic("check", "--data-dir", root)
    assert status == 1 and "removed; compiled again" in out
    assert json.loads(mpic("check", "--data-dir", root, "--json")[1])["problems"] == []


GONE = [
    (["export", "e.tar", "--user", "ann", "--json"], "mpic library backup"),
    (["import", "folder", "--user", "ann"], "mpic references import"),
    (["gc", "--dry-run"], "quarantine"),
    (["give", "local", "alice"], "mpic keys create"),
    (["show", "NAME", "--json"], "mpic files show"),
    (["pin", "NAME", "--off"], "mpic files pin"),
    (["press", "knorm-50", "--replace"], "mpic serve --press"),
    (["backup", "folder", "--user", "ann"], "mpic files content"),
    (["recover", "--dry-run"], "can be moved back"),
    (["recover", "--without-sidecars"], "upload the originals"),
]


@pytest.mark.parametrize(("words", "instead"), GONE, ids=[" ".join(words) for words, _ in GONE])
def test_a_command_or_an_option_that_is_gone_names_the_one_that_does_it(mpic, root, words, instead):
    status, _, err = mpic(*words, "--data-dir", root)
    assert status == 1 and "[bad_request]" in err and instead in err


def test_quota(mpic, root):
    assert "files 1" in mpic("quota", "bob", "--files", 1, "--data-dir", root)[1]
    assert "1 files" in mpic("ls", "--data-dir", root)[1]


def test_a_folder_without_a_library_is_an_error_and_stays_empty(mpic, tmp_path):
    for command in ("ls", "check"):
        status, _, err = mpic(command, "--data-dir", tmp_path / "none")
        assert status == 1 and "no library" in err and not (tmp_path / "none").exists()


def test_a_lost_catalogue_is_recovered_as_the_error_of_a_start_says(mpic, root):
    for command in (["check"], ["ls"]):
        (root / "catalog.sqlite").rename(root / "saved")
        status, _, err = mpic(*command, "--data-dir", root)
        assert status == 1 and ("mpic library recover" in err or "no library" in err)
        (root / "saved").rename(root / "catalog.sqlite")
    status, _, err = mpic("recover", "--data-dir", root)
    assert status == 1 and "in order" in err
    (root / "catalog.sqlite").write_bytes(b"damaged")
    status, out, _ = mpic("recover", "--data-dir", root, "--json")
    done = json.loads(out)
    assert done["counts"] == {"files": 2, "chunks": 1, "users": 2} and not done["troubles"]
    assert "damaged" in done["aside"]


def test_a_recovery_that_misses_something_says_what_and_ends_with_1(mpic, root):
    (root / "catalog.sqlite").unlink()
    (sidecar,) = (path for path in root.glob("files/*/*.json") if '"handle": "T"' in path.read_text())
    sidecar.unlink()
    status, out, _ = mpic("recover", "--data-dir", root)
    assert status == 1 and sidecar.stem in out and "has no sidecar" in out
    status, out, _ = mpic("check", "--data-dir", root)
    assert status == 0 and "1 files or quotas that the catalogue does not list stay as they are" in out
    assert json.loads(mpic("check", "--data-dir", root, "--json")[1])["recovered"]["unlisted_files"] == 1


def test_a_backup_and_a_restore(mpic, root, tmp_path):
    with Library.open(root):  # a server has it open
        status, out, _ = mpic("backup", tmp_path / "b", "--chunks", "--data-dir", root)
        assert status == 0 and "2 files" in out and "1 chunks" in out
    status, _, err = mpic("restore", tmp_path / "b", "--data-dir", root)
    assert status == 1 and "[foreign_folder]" in err
    status, out, _ = mpic("restore", tmp_path / "b", "--data-dir", tmp_path / "r")
    assert status == 0 and "2 files" in out
    assert mpic("check", "--data-dir", tmp_path / "r")[0] == 0
    for words, says in ((["backup", tmp_path / "b"], "not empty"), (["restore", root], "not a backup")):
        status, _, err = mpic(*words, "--data-dir", root)
        assert status == 1 and says in err


def test_a_backup_without_the_savings_says_so_and_succeeds(mpic, root, tmp_path):
    (root / "savings.sqlite").write_bytes(b"damaged" * 1_000)
    status, out, err = mpic("backup", tmp_path / "b", "--data-dir", root)
    assert status == 0 and "2 files" in out
    assert (
        "the savings ledger is damaged" in err and "has no savings.sqlite" in err and "key store" not in err
    )
    status, out, _ = mpic("backup", tmp_path / "c", "--data-dir", root, "--json")
    assert status == 0 and len(json.loads(out)["notes"]) == 1


def test_check_works_beside_a_running_server_and_names_handles(mpic, tmp_path):
    root = tmp_path / "served"
    with Library.open(root) as library:  # open it as a server does
        good = library.files.add("alice", b"some text", "good.txt", handle="GOOD")
        bad = library.files.add("alice", b"some text too", "bad.txt", handle="BAD")
        old = library.files.add("alice", b"old text", "old.txt", handle="OLD")
        bad.path.write_bytes(b"other text ..")
        with library.catalog.write() as db:
            db.execute("UPDATE files SET expires_at = 1 WHERE id = ?", (old.id,))
        before = {path: path.read_bytes() for path in root.rglob("*.json")}
        status, out, err = mpic("check", "--data-dir", root)
        assert status == 1 and "alice: BAD" in out and "GOOD" not in out and "nothing is changed" in err
        assert {path: path.read_bytes() for path in root.rglob("*.json")} == before
        assert good.path.exists() and old.path.exists()
        status, _, err = mpic("quota", "bob", "--data-dir", root)
        assert status == 1 and "[library_in_use]" in err and "--data-dir" in err


@pytest.fixture
def remote(tmp_path, root):
    """A server's configuration with a remote store that has a chunk of this folder and one of another server's user."""
    store = tmp_path / "store"
    store.mkdir()
    config = tmp_path / "mpic.toml"
    config.write_text(f'[library]\ndata_dir = "{root}"\nremote = "file://{store}"\n')
    for folder, owner in ((root, "local"), (tmp_path / "other", "carl")):
        with Library.open(folder, remote=[RemoteTier(Objects.at(f"file://{store}", 60.0))]) as library:
            chunk = make_chunk(KVKey(owner, ChunkKey.of_text("some text"), "a1" * 32, Recipe("float32")))
            library.store.disk.save(chunk)
            library.store.find([chunk.key])
            settled(library)
    return config


def test_check_reads_every_byte_of_the_remote_store_if_asked(mpic, remote, tmp_path):
    store = tmp_path / "store"
    assert mpic("check", "--remote", "--config", remote)[0] == 0
    damaged = sorted(store.rglob("*.safetensors"))[0]
    flip(damaged, 4096 + 7)
    assert mpic("check", "--config", remote)[0] == 0
    assert mpic("check", "--remote", "--quick", "--config", remote)[0] == 0
    status, out, _ = mpic("check", "--remote", "--config", remote, "--json")
    (problem,) = json.loads(out)["problems"]
    assert status == 1 and "layer 0" in problem["what"] and damaged.name in problem["path"]
    assert not damaged.exists() and damaged.with_suffix(".damaged").exists()
    assert mpic("check", "--remote", "--config", remote)[0] == 1
    assert not damaged.with_suffix(".damaged").exists()
    assert mpic("check", "--remote", "--config", remote)[0] == 0


def test_check_deletes_what_a_deletion_has_left_in_the_remote_store(mpic, remote, tmp_path):
    store = tmp_path / "store"
    left = sorted(store.rglob("*.safetensors"))[0]
    tombstone = store / "deleted" / left.parent.relative_to(store / "chunks")
    tombstone.parent.mkdir(parents=True)
    tombstone.write_text("{}")
    status, out, _ = mpic("check", "--remote", "--config", remote, "--json")
    (problem,) = json.loads(out)["problems"]
    assert (status, problem["then"], left.exists()) == (1, "deleted now", False)


def test_check_refuses_to_check_a_remote_store_that_is_not_configured(mpic, root):
    status, _, err = mpic("check", "--remote", "--data-dir", root)
    assert status == 1 and "there is no remote store" in err and "[config_error]" in err
