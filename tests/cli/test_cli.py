"""The command line, against a real server where one is needed."""

import errno
import io
import json
import os
import re
import subprocess
import sys
from unittest.mock import Mock

import pytest
from server_helpers import png
from typer.testing import CliRunner

from mpic import cli
from mpic.handles import is_handle, of_file


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
    """Returns the completions of these words, as bash asks for them."""
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


def test_a_conversation(mpic, url):
    typed = "/policy full\nhello\n/policy best\nhello\n/reset\n/nonsense\n\n/quit\n"
    result = CliRunner().invoke(cli.app, ["chat", "--url", url, "--max-tokens", "3"], input=typed)
    status, out = result.exit_code, result.output
    assert status == 0
    assert "tiny, policy mpic-16" in out and "policy full" in out and "full · first token" in out
    assert "[unknown_policy]" in out and "unknown command /nonsense" in out


def test_commands_of_a_conversation_are_checked_at_once(mpic, url, pictures):
    path = str(pictures[0]).replace(" ", "\\ ")
    lines = [f"/upload {path} SHOWN", "/upload /no/file", "/upload", "/policy best", "/policy mpic-7"]
    lines += ["/upload it's.png", "/upload ~nobody-here/a.png"]
    lines += ["/retrieval sometimes", "/retrieval always", "/retrieval"]
    lines += ["/help", "/files", "/again best", "/quit"]
    result = CliRunner().invoke(cli.app, ["chat", "--url", url], input="\n".join(lines) + "\n")
    status, out = result.exit_code, result.output
    assert status == 0 and "IMAGE#SHOWN: created" in out and "/no/file: No such file" in out
    assert "write /upload PATH" in out and out.count("[unknown_policy]") == 2 and "policy mpic-7" in out
    assert "it's.png: No closing quotation" in out and "~nobody-here/a.png: No such file" in out
    assert "unknown mode 'sometimes'" in out and "retrieval always" in out and "retrieval off" in out
    assert "Ctrl-C cancels the line" in out and "first token" not in out  # nothing was asked
    assert mpic("files", "delete", "SHOWN", "--url", url)[0] == 0


def test_ctrl_c_cancels_the_line_and_ctrl_d_ends(monkeypatch, capsys):
    from types import SimpleNamespace

    from mpic.cli.repl import ReplSession, run_repl

    typed = Mock(side_effect=[KeyboardInterrupt, KeyboardInterrupt, EOFError])
    monkeypatch.setattr("builtins.input", typed)
    health = SimpleNamespace(model={"name": "tiny"}, policy="mpic-16", policies=("full",))
    run_repl(ReplSession(SimpleNamespace(health=lambda: health)), cli.out)
    assert typed.call_count == 3 and "/help explains" in capsys.readouterr().out


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
