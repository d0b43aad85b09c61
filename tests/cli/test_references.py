"""``mpic references`` against a real server."""

import json
import signal

import pytest
from server_helpers import png

from mpic.cli import references


@pytest.fixture
def run(mpic, url):
    """Run ``mpic references ...`` on the server and give the JSON it prints; the references go afterwards."""

    def call(*args, status=0):
        got, out, err = mpic("references", *args, "--url", url, "--json")
        assert got == status, err
        return json.loads(out) if status == 0 else err

    yield call
    for one in call("list"):
        call("remove", one["id"])


def test_references_are_added_found_replaced_shown_and_removed(run, tmp_path):
    text, picture = tmp_path / "lamp.txt", tmp_path / "red.png"
    text.write_text("The code of the lamp is 123.")
    picture.write_bytes(png("red"))
    (lamp,) = run("add", text, "--id", "ref_lamp", "--meta", "year=2024", "--meta", "room=hall")
    assert (lamp["title"], lamp["state"]) == ("lamp", "ready")
    assert lamp["metadata"] == {"year": 2024, "room": "hall"}
    (red,) = run("add", picture, "--title", "Red")
    assert [r["id"] for r in run("list")] == [red["id"], "ref_lamp"]
    assert [r["id"] for r in run("list", "--kind", "image")] == [red["id"]]
    assert run("search", "code of lamp", "--top-k", "1")[0]["id"] == "ref_lamp"
    assert run("search", "--image", picture, "--filter", '{"kind": "image"}')[0]["score"] > 0.99
    text.write_text("The code of the boat is 456.")
    (again,) = run("replace", "ref_lamp", text)
    assert again["version"] == 2 and run("show", "ref_lamp")["version"] == 2
    assert run("reindex")["missing"] == 0
    run("remove", "ref_lamp")
    assert "reference_not_found" in run("show", "ref_lamp", status=1)


def test_references_that_were_added_before_a_file_that_is_refused_are_shown(mpic, run, url, tmp_path):
    good, bad = tmp_path / "good.txt", tmp_path / "bad.png"
    good.write_text("The code of the lamp is 123.")
    bad.write_bytes(b"\xff\x00 neither a picture nor a text")
    status, out, err = mpic("references", "add", good, bad, "--url", url, "--json")
    (added,) = json.loads(out)
    assert status == 1 and added["title"] == "good" and "[" in err
    assert [one["id"] for one in run("list")] == [added["id"]]


def test_a_reference_expires_is_pinned_and_prefetched_and_a_server_without_a_folder_says_so(run, tmp_path):
    note = tmp_path / "note.txt"
    note.write_text("The code of the lamp is 123.")
    [added] = run("add", note, "--id", "ref_note", "--ttl", "3600")
    assert added["expires_at"] - added["created_at"] in (3600, 3601)
    assert run("extend", "ref_note")["expires_at"] is None
    assert run("pin", "ref_note")["pinned"] and not run("pin", "ref_note", "--off")["pinned"]
    assert run("prefetch", "ref_note")["id"] == "ref_note"
    run("remove", "ref_note")
    assert "sync_references" in run("sync", status=1)


def test_an_import_is_resumed_by_running_it_again(run, tmp_path):
    rows = [{"id": f"n{i}", "title": f"T{i}", "text": f"fact {i}", "metadata": {"i": i}} for i in range(3)]
    file = tmp_path / "some.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows[:2]))
    assert run("import", file)["counts"] == {"added": 2}
    file.write_text("".join(json.dumps(row) + "\n" for row in [{**rows[0], "title": "new"}, *rows[1:]]))
    assert run("import", file)["counts"] == {"replaced": 1, "unchanged": 1, "added": 1}
    assert run("search", "fact", "--filter", '{"i": {"gte": 1}}', "--top-k", "9") != []


def test_the_first_ctrl_c_ends_an_import(mpic, sigint, monkeypatch, tmp_path):
    added = []

    class Interrupted:
        largest = None

        def __init__(self, client):
            pass

        async def there(self, id):
            return None

        async def add(self, item, content):
            if len(added) == 1:
                signal.raise_signal(signal.SIGINT)
            added.append(item.id)
            return "text"

    monkeypatch.setattr(references, "IntoServer", Interrupted)
    file = tmp_path / "some.jsonl"
    file.write_text("".join(json.dumps({"id": f"n{i}", "title": "T", "text": "t"}) + "\n" for i in range(5)))
    status, out, _ = mpic("references", "import", file, "--json")
    assert (status, out, added) == (130, "", ["ref_n0"])


def test_a_search_like_a_folder_is_a_wrong_command_line(mpic, tmp_path):
    status, _, err = mpic("references", "search", "--image", tmp_path, "--url", "http://127.0.0.1:9")
    assert status == 2 and "--image" in err


def test_refusals_are_one_line_with_a_code(run):
    for args, code in (
        (("search", ""), "empty_query"),
        (("search", "x", "--top-k", "1000"), "bad_request"),
        (("remove", "ref_none"), "reference_not_found"),
    ):
        line = run(*args, status=1)
        assert f"[{code}]" in line and line.count("\n") == 1
