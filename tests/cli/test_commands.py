"""Commands over the API: files, caches, models, keys from the environment, completion of handles in a session."""

import io
import json
import os
import subprocess
import sys

import pytest
from rich.console import Console
from server_helpers import png
from typer.testing import CliRunner

from mpic import MPIC, cli
from mpic.cli import chat


@pytest.fixture
def mpic(url, monkeypatch):
    """Run a command against the server and return its standard output."""
    monkeypatch.setattr(cli.out, "width", 200, raising=False)

    def run(*args, fails=False):
        result = CliRunner().invoke(cli.app, [*map(str, args), "--url", url])
        assert (result.exit_code != 0) is fails, result.output
        return result.exception if fails else result.stdout

    return run


@pytest.fixture
def image(url):
    with MPIC(url) as client:
        file = client.files.create(("red.png", png()), "CLI_RED", wait=True)
        yield file
        client.files.delete(file.id)


def test_one_file(mpic, image, tmp_path):
    for name in ("CLI_RED", "IMAGE#CLI_RED", image.id):
        shown = mpic("files", "show", name)
        assert image.id in shown and "IMAGE#CLI_RED" in shown and "ready" in shown and "never" in shown
    told = image.model_dump(mode="json") | {"outcome": None}  # only an upload has an outcome
    assert json.loads(mpic("files", "show", "CLI_RED", "--json")) == told
    target = tmp_path / "copy.png"
    mpic("files", "content", "CLI_RED", "-o", target)
    assert target.read_bytes() == png()
    assert "expires: 2" in mpic("files", "extend", "CLI_RED", "--ttl", "100")
    assert "expires: never" in mpic("files", "extend", "CLI_RED")
    assert mpic("files", "show", "NOBODY", fails=True).code == "file_not_found"


def test_a_file_and_a_cache_are_pinned_prefetched_and_keep_their_kv_for_a_while(mpic, image, tmp_path):
    show = lambda: json.loads(mpic("files", "show", "CLI_RED", "--json"))
    assert "IMAGE#CLI_RED is pinned" in mpic("files", "pin", "CLI_RED") and show()["pinned"]
    assert "pinned" in mpic("files", "show", "CLI_RED")
    assert "is not pinned" in mpic("files", "pin", "CLI_RED", "--off") and not show()["pinned"]
    assert "unused for 3,600 s" in mpic("files", "kv-ttl", "CLI_RED", "--kv-ttl", "3600")
    assert show()["kv_ttl"] == 3600 and show()["expires_at"] is None
    mpic("files", "kv-ttl", "CLI_RED")
    assert show()["kv_ttl"] is None
    assert "is being prefetched" in mpic("files", "prefetch", "CLI_RED")
    text = tmp_path / "note.txt"
    text.write_text("A note.")
    [sent] = json.loads(mpic("upload", text, "--kv-ttl", "60", "--json"))
    assert sent["kv_ttl"] == 60
    mpic("files", "delete", sent["id"])
    [made] = json.loads(mpic("caches", "create", text, "--json"))
    assert json.loads(mpic("caches", "pin", made["id"], "--json"))["pinned"]
    assert json.loads(mpic("caches", "kv-ttl", made["id"], "--kv-ttl", "60", "--json"))["kv_ttl"] == 60
    assert "is being prefetched" in mpic("caches", "prefetch", made["id"])
    mpic("caches", "delete", made["id"])


def test_uploads_are_listed_and_get_other_handles(mpic, image):
    for command in (("ls",), ("files", "list")):
        assert image.id in mpic(*command) and "IMAGE#CLI_RED" in mpic(*command)
    assert json.loads(mpic("ls", "--json")) == json.loads(mpic("files", "list", "--json"))
    assert "cli_red is IMAGE#CLI_SCARLET now" in mpic("files", "rename", "cli_red", "CLI_SCARLET")
    assert image.id in mpic("files", "show", "CLI_SCARLET")
    assert mpic("files", "show", "CLI_RED", fails=True).code == "file_not_found"
    assert mpic("files", "rename", image.id, "not a handle", fails=True).code == "bad_request"
    renamed = json.loads(mpic("files", "rename", image.id, "CLI_RED", "--json"))
    assert (renamed["id"], renamed["handle"]) == (image.id, "CLI_RED")


def test_handles_ignore_case(mpic, image):
    for name in ("cli_red", "IMAGE#Cli_Red"):
        assert image.id in mpic("files", "show", name)


def test_content_that_cannot_be_written_is_a_wrong_command_line(mpic, image, tmp_path):
    assert mpic("files", "content", "CLI_RED", "-o", tmp_path / "no" / "x", fails=True).code == 2


def test_caches_from_files_to_deletion(mpic, tmp_path):
    text = tmp_path / "manual.txt"
    text.write_text("First sentence. Second sentence.")
    [made] = json.loads(mpic("caches", "create", text, "--split", "sentence", "--tokens", "20", "--json"))
    assert (made["name"], made["state"], len(made["chunks"])) == ("manual.txt", "ready", 2)
    listed, shown = mpic("caches", "list"), mpic("caches", "show", made["id"])
    assert made["id"] in listed and "manual.txt" in listed and made["chunks"][1]["id"] in shown
    assert made["chunks"][0]["id"] in mpic("caches", "show", made["chunks"][0]["id"])
    assert "expires: never" in mpic("caches", "extend", made["id"])
    assert "deleted" in mpic("caches", "delete", made["id"])
    assert mpic("caches", "show", made["id"], fails=True).code == "cache_not_found"
    text.write_bytes(b"\xff")
    assert isinstance(mpic("caches", "create", text, fails=True), SystemExit)


def test_caches_that_were_made_before_a_file_that_cannot_be_read_are_shown(url, tmp_path):
    good, bad = tmp_path / "good.txt", tmp_path / "bad.txt"
    good.write_text("A sentence.")
    bad.write_bytes(b"\xff")
    result = CliRunner().invoke(cli.app, ["caches", "create", str(good), str(bad), "--json", "--url", url])
    assert result.exit_code != 0
    [made] = json.loads(result.stdout)
    with MPIC(url) as client:
        assert [one.id for one in client.caches.list() if one.name == "good.txt"] == [made["id"]]
        client.caches.delete(made["id"])


def test_models(mpic):
    assert mpic("models").startswith("tiny: text, image, 2,048 tokens") and "policy mpic-16" in mpic("models")
    assert json.loads(mpic("models", "--json"))[0]["id"] == "tiny"


def test_the_key_is_sent_and_a_refusal_is_one_line(url):
    """Run as a process, because the exit status and the streams are the interface."""
    command = [sys.executable, "-m", "mpic.cli", "files", "show", "file-nobody", "--url", url]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "MPIC_API_KEY": "mpic_x"}
    )
    assert done.returncode == 1 and done.stdout == "" and done.stderr.count("\n") == 1
    assert "[file_not_found]" in done.stderr
    done = subprocess.run([*command, "--nonsense"], capture_output=True, text=True)
    assert done.returncode == 2 and "No such option" in done.stderr


def test_a_name_in_another_script_is_uploaded_asked_about_shown_and_deleted(mpic, url, tmp_path):
    names = {"图片.png": "IMAGE#图片", "фото.png": "IMAGE#ФОТО", "हिन्दी.txt": "FILE#हिन्दी"}
    names["😀.png"] = "IMAGE#IMAGE_1F600"
    paths = [tmp_path / name for name in names]
    for i, path in enumerate(paths):
        path.write_bytes(png((i, 9, 9)) if path.suffix == ".png" else b"some words")
    uploaded = json.loads(mpic("upload", *paths, "--json"))
    with MPIC(url) as client:
        found = [client.files.retrieve(one["id"]) for one in uploaded]
        assert {file.filename: file.mention for file in found} == names
        for file in found:
            for written in (file.mention, file.mention.partition("#")[0] + "#" + file.handle.lower()):
                usage = client.chat.completions.create(f"{written}, what?", max_tokens=1).usage.mpic
                assert len(usage.chunks) == 1 and usage.unlinked_handles is None
            assert file.id in mpic("files", "show", file.handle.lower())
            mpic("files", "delete", file.mention)


def test_shell_completion_knows_the_commands():
    env = {**os.environ, "_MPIC_COMPLETE": "complete_bash", "COMP_WORDS": "mpic files ", "COMP_CWORD": "2"}
    code = "import sys; sys.argv = ['mpic']; from mpic.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert {"list", "show", "content", "extend", "delete"} <= set(done.stdout.split()), done


def test_two_files_that_would_get_one_handle_are_refused_before_one_replaces_the_other(mpic, tmp_path):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "notes.txt").write_text(f"notes of {folder}")
    both = [tmp_path / folder / "notes.txt" for folder in ("a", "b")]
    assert isinstance(mpic("upload", *both, "--replace", fails=True), SystemExit)
    assert "NOTES" not in mpic("ls")


def test_a_file_whose_name_is_not_utf_8_or_very_long_is_uploaded(mpic, tmp_path):
    odd = tmp_path / os.fsdecode(b"caf\xe9.txt")
    odd.write_text("some coffee")
    long = tmp_path / f"{'long ' * 30}.txt"
    long.write_text("a long name")
    shown = json.loads(mpic("upload", odd, long, "--json"))
    assert [file["handle"] for file in shown] == ["CAF", ("LONG_" * 30)[:64].strip("_")]
    assert shown[0]["filename"] == "caf\ufffd.txt"
    mpic("files", "delete", *(file["id"] for file in shown))


def test_a_batch_with_a_refused_file_or_handle_that_is_not_utf_8_is_told_whole(url, tmp_path):
    bad, good = tmp_path / os.fsdecode(b"bad\xe9.png"), tmp_path / "good of a batch.txt"
    bad.write_bytes(b"\xff\x00 neither a picture nor a text")
    good.write_text("some good text")

    def told(*args):
        result = CliRunner().invoke(cli.app, ["upload", *map(str, args), "--json", "--url", url])
        assert result.exit_code == 1
        return json.loads(result.stdout)

    refused, uploaded = told(bad, good)
    assert refused["path"].endswith("bad\ufffd.png") and "code" in refused["error"]
    with MPIC(url) as client:
        client.files.delete(uploaded["id"])
    [refused] = told(good, "--handle", os.fsdecode(b"caf\xe9"))
    assert (refused["handle"], refused["error"]["param"]) == ("caf\ufffd", "handle")


@pytest.mark.parametrize("handle", ["file-notes", "ref_notes"])
def test_a_handle_that_begins_like_an_id_names_its_file(mpic, tmp_path, handle):
    text = tmp_path / "notes.txt"
    text.write_text(f"notes called {handle}")
    [made] = json.loads(mpic("upload", text, "--handle", handle, "--json"))
    for name in (handle, f"FILE#{handle}", made["id"]):
        assert json.loads(mpic("files", "show", name, "--json"))["id"] == made["id"]
    mpic("files", "delete", handle)
    assert mpic("files", "show", handle, fails=True).code == "file_not_found"


def test_ids_stay_whole_in_a_narrow_terminal(mpic, monkeypatch, tmp_path):
    text = tmp_path / "book.txt"
    text.write_text("Some text of a book.")
    monkeypatch.setattr(cli.out, "width", 60, raising=False)
    made = json.loads(mpic("caches", "create", text, "--ttl", "500", "--json"))[0]
    assert made["id"] in mpic("caches", "list")
    assert made["chunks"][0]["id"] in mpic("caches", "show", made["id"])
    mpic("caches", "delete", made["id"])


def test_an_answer_is_piped_as_it_is_and_sends_no_commands_to_a_terminal(monkeypatch):
    answer = "all:\n\tcc -o a a.c\x1b]0;title\x07\n"
    for terminal, expected in (
        (False, answer),
        (True, answer.replace("\x1b", "\ufffd").replace("\x07", "\ufffd")),
    ):
        out = Console(file=io.StringIO(), force_terminal=terminal)
        chat.write(answer, out)
        assert out.file.getvalue() == expected
