"""Every command and program of the README and the pages for users is run unchanged, twice in the same shell."""

import os
import re
import shutil
import subprocess
import sys
from itertools import groupby
from pathlib import Path

import pytest
from small_models import SMALL_SAMPLES

from mpic import MPIC
from mpic.data.bundled import DEFAULT, samples_folder

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", "docs/quickstart.md", "docs/api.md", "docs/sdk.md")


def blocks(page):
    """Return (language, code) of the fenced blocks that are to be run."""
    return re.findall(r"^```(sh|python)\n(.*?)^```$", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)


def as_script(shown):
    """Return the blocks of a page as one shell script; consecutive programs run in one process."""
    parts = []
    for language, run in groupby(shown, key=lambda block: block[0]):
        code = "\n".join(code for _, code in run)
        parts.append(code if language == "sh" else f".venv/bin/python - <<'PROGRAM'\n{code}PROGRAM\n")
    return "\n".join(parts)


@pytest.fixture
def place(url, tiny_model):
    """Replace the server that a reader starts by the server of the tests, and remove the remaining files from it."""
    swaps = {
        "http://127.0.0.1:8000": url,
        "MPIC()": f"MPIC({url!r})",
        "MPIC.local(": f"MPIC.local({tiny_model!r}, pool_bytes=1 << 20, ",
        f'model="{DEFAULT}"': 'model="tiny", max_tokens=8',  # the tiny model seldom ends an answer by itself
        "mpic chat -m": "mpic chat --max-tokens 8 -m",
        '"mpic": {"policy"': '"max_tokens": 8, "mpic": {"policy"',
        'GARDEN?", policy': 'GARDEN?", max_tokens=8, policy',
    }

    def swap(code):
        for old, new in swaps.items():
            code = code.replace(old, new)
        return code

    yield swap
    with MPIC(url) as client:
        for file in client.files.list():
            client.files.delete(file.id)


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
@pytest.mark.parametrize("page", PAGES)
def test_the_page_can_be_followed_twice_in_one_shell(page, place, url, tmp_path):
    tools = tmp_path / ".venv" / "bin"
    tools.mkdir(parents=True)
    for name, run in {"mpic": "-m mpic.cli", "python": ""}.items():
        (tools / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {run} "$@"\n')
        (tools / name).chmod(0o755)
    (tmp_path / "data").mkdir()
    # samples for which the tiny model has room, under the name of those of the default model
    (tmp_path / "data" / samples_folder(DEFAULT).name).symlink_to(SMALL_SAMPLES)
    shown = blocks(page)
    assert shown
    # a server inside the process keeps nothing for a second time: its folder is temporary
    kept = [(language, code) for language, code in shown if "MPIC.local(" not in code]
    script = f"{place(as_script(shown))}\necho 'the second time'\n{place(as_script(kept))}"
    environment = {k: v for k, v in os.environ.items() if k != "MPIC_API_KEY"}
    environment |= {"PYTHONPATH": str(ROOT), "MPIC_URL": url, "TQDM_DISABLE": "1"}
    ran = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=environment,
    )
    assert ran.returncode == 0, f"{ran.stdout}\n{ran.stderr}"
    first, _, second = ran.stdout.partition("the second time\n")
    for said in (first, second):
        assert said.strip() and '{"error"' not in said, said
    if page == "README.md":
        assert "created" in first and "unchanged" not in first
        assert second.count("unchanged") == 3 and "created " not in second
