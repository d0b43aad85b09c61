"""The command line, against a real server where one is needed."""

import errno
import io
import json
import os
import re
import subprocess
import sys
from unittest.mock import Mock

import httpx
import pytest
from server_helpers import png
from typer.main import get_command

from mpic import cli
from mpic.cli import common, upload
from mpic.errors import BadRequest
from mpic.handles import is_handle, of_file
from mpic.library import Library
from mpic.table import COMMANDS, PlainConsole


@pytest.fixture
def pictures(tmp_path):
    paths = [tmp_path / "eiffel 2025.png", tmp_path / "notes.txt"]
    paths[0].write_bytes(png("green"))
    paths[1].write_text("some notes of mine")
    return paths


def test_short_help_defaults_and_whole_sentences(mpic):
    status, out, _ = mpic("serve", "-h")
    told = " ".join(re.sub("[│╭╰─╮╯]", " ", out).split())
    assert status == 0 and "0 lets the system choose. Default: 8000." in told
    assert "they are exempt from max_connections_per_address, and X-Forwarded-For" in told  # not cut off
    assert mpic("-h")[0] == 0 and mpic("files", "list", "-h")[0] == 0


def offered(words, **environment):
    """Return the completions of these words, as bash asks for them."""
    code = "import sys; sys.argv = ['mpic']; from mpic.cli import main; main()"
    settings = {
        "_MPIC_COMPLETE": "complete_bash",
        "COMP_WORDS": words,
        "COMP_CWORD": str(len(words.split()) - 1),
    }
    environment = {**os.environ, **settings, **environment}
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    return ran.stdout.split()


def test_the_tab_key_offers_policies_and_handles(mpic, url, pictures):
    assert {"mpic-16", "mpic-32"} <= set(offered("mpic chat --policy mpic"))
    assert "legolink-16" in offered("mpic serve --policy lego")
    mpic("upload", *pictures, "--url", url)
    assert offered(f"mpic files show --url {url} EI") == ["EIFFEL_2025"]
    assert "EIFFEL_2025" in offered("mpic files delete NOTES E", MPIC_URL=url)
    assert offered("mpic files show EI", MPIC_URL="http://127.0.0.1:9") == []
    assert mpic("files", "delete", "EIFFEL_2025", "NOTES", "--url", url)[0] == 0


def test_the_address_comes_from_the_environment_too(mpic, monkeypatch):
    monkeypatch.setenv("MPIC_URL", "127.0.0.1:9")
    status, _, err = mpic("files", "list")
    assert status == 1 and "http://127.0.0.1:9" in err
    status, _, err = mpic("files", "list", "--url", "ftp://x")
    assert status == 1 and "is not the address" in err


def test_every_configuration_key_is_a_flag(mpic, monkeypatch, tmp_path):
    seen = []
    monkeypatch.setattr("mpic.server.run.serve", lambda config, as_json: seen.append((config, as_json)))
    file = tmp_path / "mpic.toml"
    file.write_text('[server]\nport = 1\n[engine]\npolicy = "reuse"\n')
    flags = ("--port", "2", "--disk-bytes", "5", "--image-aspect", "3.5", "--gif")
    assert mpic("serve", "--config", file, *flags)[0] == 0
    [(config, as_json)] = seen
    assert (config.server.port, config.engine.policy, config.library.disk_bytes) == (2, "reuse", 5)
    assert (config.library.image_aspect, config.library.gif, as_json) == (3.5, True, False)


def test_mistakes_are_one_line(mpic, tmp_path):
    file = tmp_path / "mpic.toml"
    file.write_text("[engine]\nmodle = 1\n")
    status, out, err = mpic("serve", "--config", file)
    assert status == 1 and out == "" and err.count("\n") == 1
    assert "unknown key 'modle'" in err and "[config_error]" in err
    status, _, err = mpic("serve", "--host", "0.0.0.0")
    assert status == 1 and "no API keys" in err and err.count("\n") == 1
    status, _, err = mpic("keys", "list", "--data-dir", file)
    assert status == 1 and str(file) in err and "[database_failed]" in err and err.count("\n") == 1
    status, _, err = mpic("chat", "-m", os.fsdecode(b"caf\xe9"), "--url", "http://127.0.0.1:9")
    assert (
        status == 1 and "messages cannot be sent" in err and "[bad_request]" in err and err.count("\n") == 1
    )
    status, _, err = mpic("files", "show", os.fsdecode(b"file-\xe9"), "--url", "http://127.0.0.1:9")
    assert status == 1 and "[bad_request]" in err and err.count("\n") == 1


def test_a_folder_that_must_not_be_looked_at_is_one_line(mpic, monkeypatch, tmp_path):
    stat = os.stat

    def refusing(path, *args, **options):
        if not isinstance(path, int) and str(path).startswith(str(tmp_path)):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return stat(path, *args, **options)

    monkeypatch.setattr("os.stat", refusing)  # the superuser may look at everything
    for args in (("serve", "--model", tmp_path), ("serve", "--data-dir", tmp_path)):
        status, out, err = mpic(*args, "--port", "0")
        assert status == 1 and out == "" and err.count("\n") == 1
        assert str(tmp_path) in err and "Permission denied" in err


@pytest.mark.parametrize(("flag", "value"), [("--port", "70000"), ("--log-level", "verbose")])
def test_a_port_or_log_level_that_is_none_is_one_line(mpic, flag, value):
    status, out, err = mpic("serve", flag, value)
    assert status == 1 and out == "" and err.count("\n") == 1
    assert value in err and "[config_error]" in err


def test_options_of_a_search_that_are_not_json_are_a_wrong_command_line(mpic):
    status, _, err = mpic("chat", "-m", "hi", "--retrieval", '{"mode"', "--url", "http://127.0.0.1:9")
    assert status == 2 and "not JSON" in err and "--retrieval" in err


def test_piped_text_that_is_not_utf_8_is_a_wrong_command_line(mpic, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9"), encoding="utf-8"))
    status, _, err = mpic("caches", "create", "--url", "http://127.0.0.1:9")
    assert status == 2 and "standard input" in err and "utf-8" in err


def test_a_server_that_is_not_there(mpic):
    status, _, err = mpic("files", "list", "--url", "http://127.0.0.1:9")
    assert status == 1 and "[unreachable]" in err and "mpic serve" in err and err.count("\n") == 1


def test_upload_list_chat_delete(mpic, pictures, url):
    status, out, _ = mpic("upload", *pictures, "--url", url)
    assert status == 0 and "IMAGE#EIFFEL_2025" in out and "FILE#NOTES" in out and "ready" in out
    status, out, _ = mpic("files", "list", "--url", url, "--json")
    files = {f["handle"]: f for f in json.loads(out)}
    assert files["NOTES"]["tokens"] == len("some notes of mine")

    question = "IMAGE#EIFFEL_2025 and FILE#NOTES"
    ask = ("chat", "-m", question, "--max-tokens", "4", "--policy", "mpic-4", "--url", url)
    status, out, err = mpic(*ask)
    assert status == 0 and "mpic-4 · first token" in err and "reused 26 · recomputed 8" in err
    status, whole, _ = mpic(*ask, "--json")
    assert status == 0 and json.loads(whole)["choices"][0]["message"]["content"] == out.rstrip("\n")

    status, _, err = mpic("files", "delete", "EIFFEL_2025", "NOBODY", "--url", url)
    assert status == 1 and "'NOBODY'" in err and err.count("\n") == 1
    assert mpic("files", "show", "EIFFEL_2025", "--url", url)[0] == 0  # nothing was deleted
    status, out, _ = mpic("files", "delete", "EIFFEL_2025", "IMAGE#eiffel_2025", "--url", url)
    assert status == 0 and "deleted EIFFEL_2025" in out
    status, out, _ = mpic("files", "delete", files["NOTES"]["id"], "--url", url, "--json")
    assert status == 0 and json.loads(out)[0]["deleted"]
    status, _, err = mpic("files", "delete", "EIFFEL_2025", "--url", url)
    assert status == 1 and "[file_not_found]" in err
    status, _, err = mpic("chat", "-m", question, "--url", url)
    assert status == 0 and "FILE#NOTES stayed text: no file with the handle 'NOTES'" in " ".join(err.split())


def test_a_large_file_is_uploaded_in_parts_of_which_a_failure_leaves_none(mpic, tmp_path, url, monkeypatch):
    made, send = [], upload._send_parts
    monkeypatch.setattr(upload, "IN_PARTS", 1000)
    monkeypatch.setattr(
        upload, "_send_parts", lambda client, id, *rest: made.append(id) or send(client, id, *rest)
    )
    path = tmp_path / "large.txt"
    path.write_bytes(b"words of a text\n" * 100)
    status, out, _ = mpic("upload", path, "--url", url, "--ttl", "600", "--no-wait", "--json")
    [file] = json.loads(out)
    assert status == 0 and (file["outcome"], file["handle"], file["bytes"]) == ("created", "LARGE", 1600)
    path.write_bytes(b"\xff" * 1600)
    status, _, err = mpic("upload", path, "--handle", "BAD", "--url", url)
    assert status == 1 and "[invalid_text]" in err
    found = [httpx.get(f"{url}/v1/uploads/{id}", timeout=60).json()["status"] for id in made]
    assert found == ["completed", "cancelled"]


def test_an_upload_may_be_repeated(mpic, pictures, url):
    assert mpic("upload", *pictures, "--url", url)[0] == 0
    status, out, err = mpic("upload", *pictures, "--url", url, "--ttl", "500")
    assert status == 0 and out.count("unchanged") == 2 and "2 files: 2 unchanged" in err
    status, out, _ = mpic("upload", pictures[1], "--url", url, "--expires", "900", "--json")
    [file] = json.loads(out)
    assert status == 0 and file["outcome"] == "unchanged" and file["expires_at"] is not None
    status, _, err = mpic("upload", pictures[1], "--url", url, "--expires", "9", "--ttl", "9")
    assert status == 2 and "older name" in err
    pictures[1].write_text("other notes of mine")
    status, _, err = mpic("upload", pictures[1], "--url", url)
    assert status == 1 and "[handle_taken]" in err and "--replace" in err
    status, out, _ = mpic("upload", pictures[1], "--replace", "--url", url)
    assert status == 0 and "replaced" in out
    assert mpic("files", "delete", "EIFFEL_2025", "NOTES", "--url", url)[0] == 0


def test_a_batch_goes_on_after_a_failure(mpic, pictures, url, tmp_path):
    broken, gone = tmp_path / "broken.png", tmp_path / "gone.png"
    broken.write_bytes(png()[:40])
    batch = (gone, pictures[0], tmp_path, broken, pictures[1])
    status, out, err = mpic("upload", *batch, "--url", url)
    assert status == 1 and "IMAGE#EIFFEL_2025" in out and "FILE#NOTES" in out
    assert "5 files: 2 created, 3 failed" in err
    assert "gone.png: error: " in err and "No such file" in err and "[invalid_image]" in err
    status, out, _ = mpic("upload", *batch, "--url", url, "--json")
    told = json.loads(out)
    assert status == 1 and [("error" in one) for one in told] == [True, False, True, True, False]
    assert mpic("files", "delete", "EIFFEL_2025", "NOTES", "--url", url)[0] == 0
    # nothing can be uploaded at all
    status, _, err = mpic("upload", *pictures, "--url", "http://127.0.0.1:9")
    assert status == 1 and err.count("[unreachable]") == 1


def test_one_handle_names_one_file(mpic, pictures, url):
    status, _, err = mpic("upload", *pictures, "--handle", "BOTH", "--url", url)
    assert status == 2 and "one file" in err


def test_a_question_is_needed_and_conversations_are_elsewhere(mpic, url):
    status, _, err = mpic("chat", "--url", url)
    assert status == 2 and "/ui" in err and "-m" in err


def test_handles_from_file_names():
    names = {
        "eiffel 2025.jpg": "EIFFEL_2025",
        "Ünï.txt": "ÜNÏ",
        "a.b.png": "A_B",
        "图片.png": "图片",
        "фото.jpg": "ФОТО",
        "صورة.png": "صورة",
        "हिन्दी.txt": "हिन्दी",
        "e\u0301te\u0301.txt": "ÉTÉ",
        "straße.txt": "STRASSE",
        "日本 語.jpg": "日本_語",
        "😀.png": "IMAGE_1F600",
        "🎉.png": "IMAGE_1F389",
        "-": "FILE_2D",
        "...": "FILE_2E_2E_2E",
        "é" * 99: "É" * 64,
    }
    assert {name: of_file(name) for name in names} == names
    assert all(is_handle(handle) and of_file(f"{handle}.x") == handle for handle in names.values())


@pytest.mark.parametrize("command", ["", "files list", *cli.COMMANDS])
def test_help_teaches_every_command(mpic, command):
    status, out, _ = mpic(*command.split(), "--help")
    assert status == 0 and "Usage" in out and f"mpic {command}" in out
    assert ("--install-completion" in out) == (command == "")


def test_the_list_of_commands_needs_none_of_them():
    """The first command that a user tries must answer at once, so it imports no torch, no server and no command."""
    code = (
        "import sys; from mpic.cli import main; sys.argv = ['mpic', '--help']\n"
        "try: main()\nexcept SystemExit: pass\n"
        "heavy = ('torch', 'httpx', 'fastapi', 'mpic.config', 'mpic.cli.files')\n"
        "print([m for m in heavy if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.rstrip().endswith("[]")


# names that send commands to a terminal

HOSTILE = "a\x1b[31m\x1b]8;;http://evil\x1b\\b\x07\rc\x9b2J\u202egnp.exe\u2066 [red]d[/red] \x7f\x00"


@pytest.mark.parametrize("terminal", [False, True])
def test_no_name_sends_commands_to_a_terminal(monkeypatch, capsys, terminal):
    shown = io.StringIO()
    console = PlainConsole(file=shown, force_terminal=terminal, color_system=None, width=300, **common.PLAIN)
    monkeypatch.setattr(common, "out", console)
    common.print_table(("name", "id"), [(HOSTILE, HOSTILE)], "")
    common.print_table(("name",), [], HOSTILE)
    common.print_fields({"name": HOSTILE})
    common.print_result({}, HOSTILE, False)
    console.print(common.error_line(BadRequest(HOSTILE)), style="red", soft_wrap=True)
    console.print(common.error_line(OSError(errno.ENOENT, "No such file", HOSTILE)), style="red")
    text = shown.getvalue()
    assert text.count("gnp.exe") == 7 and "[red]d[/red]" in text
    assert not COMMANDS.search(text)
    common.print_json({"name": HOSTILE})
    printed = capsys.readouterr().out
    assert json.loads(printed) == {"name": HOSTILE} and not COMMANDS.search(printed)


def test_what_was_typed_sends_no_commands_either(mpic):
    for args in (
        ("upload", "--\x1b[31m"),
        ("\x1b[31m",),
        ("--\x1b[31m",),
        ("library", "import", "\x1b]0;x\x07"),
        ("library", "quota", "\x1b[31m\u202e", "--data-dir", "/nowhere/\x1b[31m"),
        ("serve", "--config", "/nowhere/\x1b[31m.toml"),
    ):
        status, out, err = mpic(*args)
        assert status in (1, 2) and not COMMANDS.search(out + err), args


# data folders that cannot be opened

LIBRARY = [
    ("serve", "--port", "0"),
    ("calibrate", "--questions", "1"),
    ("library", "ls"),
    ("library", "check"),
    ("library", "quota", "ann"),
    ("library", "backup", "{tmp}/backup"),
    ("library", "recover"),
    ("keys", "create", "ann"),
    ("keys", "list"),
    ("keys", "revoke", "x"),
]
"""Every command with a data folder."""


def commands(group, *names):
    """Yield the words of every command below a group, and its options."""
    for name in group.list_commands(None):
        command = group.get_command(None, name)
        if hasattr(command, "load"):
            command = get_command(command.load())
        if hasattr(command, "list_commands"):
            yield from commands(command, *names, name)
        else:
            yield (*names, name), {opt for parameter in command.params for opt in parameter.opts}


EVERY = dict(commands(get_command(cli.app)))


def test_every_command_with_a_data_folder_is_tried():
    here = {words for words, options in EVERY.items() if "--data-dir" in options}
    tried = {words for words in EVERY if any(line[: len(words)] == words for line in LIBRARY)}
    assert here - {("library", "restore")} == tried


@pytest.mark.parametrize("place", ["dangling", "dangling/x", "/proc/x", "file", "file/x", "/dev/null", ""])
@pytest.mark.parametrize("command", LIBRARY, ids=" ".join)
def test_a_data_folder_that_is_none_is_one_line(mpic, tmp_path, monkeypatch, command, place):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "dangling").symlink_to("/nonexistent/disk")
    (tmp_path / "file").write_text("x")
    before = sorted(os.listdir(tmp_path))
    folder = f"{tmp_path}/{place}" if place and not place.startswith("/") else place
    words = [word.format(tmp=tmp_path) for word in command]
    for given in (("--data-dir", folder), (f"--data-dir={folder}",)):
        status, out, err = mpic(*words, *given)
        assert "Traceback" not in out + err
        if place == "" and command[0] == "serve":
            assert status == 1 and "data_dir is empty" in err
        elif place == "":
            assert status == 2 and "it is empty" in err
        else:
            assert status == 1 and err.count("\n") <= 1 + 4 * (words[:2] == ["keys", "create"])
            assert err.splitlines()[-1].startswith("error: ") and folder.split("/x")[0] in err
    assert sorted(os.listdir(tmp_path)) == before


@pytest.mark.parametrize(
    "words", [words for words in EVERY if words[0] not in ("serve", "analyze", "train")], ids=" ".join
)
def test_an_empty_path_is_refused_by_every_option_that_takes_one(mpic, tmp_path, monkeypatch, words):
    monkeypatch.chdir(tmp_path)
    paths = {"--data-dir", "--config", "--output", "-o", "--samples", "--out", "--table", "--image"}
    for option in EVERY[words] & paths:
        for given in ((option, ""), (f"{option}=",)):
            status, _, err = mpic(*words, *given)
            assert status == 2 and "it is empty" in err, (option, err)
    assert os.listdir(tmp_path) == []


def test_an_empty_data_folder_in_a_file_is_refused(mpic, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mpic.toml").write_text('[library]\ndata_dir = ""\n')
    status, _, err = mpic("library", "ls", "--config", "mpic.toml")
    assert status == 1 and "data_dir is empty" in err and err.count("\n") == 1


@pytest.mark.parametrize("home", ["", None])
def test_without_a_home_a_data_folder_must_be_given(mpic, tmp_path, monkeypatch, home):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("XDG_DATA_HOME", raising=False)
    monkeypatch.setenv("HOME", home) if home is not None else monkeypatch.delenv("HOME")
    if home is None:
        monkeypatch.setattr("pwd.getpwuid", Mock(side_effect=KeyError("uid")))
    status, _, err = mpic("library", "ls")
    assert status == 1 and "no home folder" in err and "--data-dir" in err and err.count("\n") == 1
    assert mpic("serve", "--help")[0] == 0 and os.listdir(tmp_path) == []


# consoles that cannot show everything


@pytest.mark.parametrize("encoding", ["ascii", "cp1252", "utf-8", "latin-1"])
@pytest.mark.parametrize(
    "words", [("--help",), ("serve", "--help"), ("library", "check"), ("library", "check", "--json")]
)
def test_what_a_console_cannot_show_is_replaced(monkeypatch, tmp_path, encoding, words):
    with Library.open(tmp_path / "\u7b80\u5386") as library:
        file = library.files.add("local", b"some text", "\u7b80\u5386.txt", metadata={"a": "\U0001f600"})
        file.path.write_bytes(b"other text")
    streams = {name: io.TextIOWrapper(io.BytesIO(), encoding=encoding) for name in ("stdout", "stderr")}
    for name, stream in streams.items():
        monkeypatch.setattr(sys, name, stream)
    folder = ("--data-dir", str(library.root)) if words[0] == "library" else ()
    monkeypatch.setattr("sys.argv", ["mpic", *words, *folder])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    shown = streams["stdout"].buffer.getvalue().decode(encoding)
    assert ended.value.code == (1 if folder else 0) and shown
    if "--json" in words:
        assert json.loads(shown)["problems"][0]["name"] == "local: \u7b80\u5386.txt"


@pytest.mark.parametrize("words", ["--help", "library ls", "library ls --json", "keys list"])
def test_a_reader_that_goes_away_or_is_not_there_makes_no_traceback(tmp_path, words):
    Library.open(tmp_path / "library").close()
    folder = "" if words == "--help" else f"--data-dir {tmp_path}/library"
    mpic = f"{sys.executable} -m mpic.cli {words} {folder}"
    for line in (f"{mpic} | :", f"{mpic} >&-", f"{mpic} >/dev/full", f"{mpic} 2>&- >/dev/full"):
        ran = subprocess.run(["bash", "-c", line], capture_output=True, text=True)
        assert "Traceback" not in ran.stderr and "Exception ignored" not in ran.stderr, (line, ran.stderr)
