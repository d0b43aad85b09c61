"""Builds deploy/Dockerfile without Docker and tries the image: ``make image``.

Debian's ``buildah`` builds in a chroot, on a base that ``debootstrap`` makes of Debian's packages, so neither a daemon
nor a registry of images is needed. Root only, on Debian or Ubuntu; it takes minutes and a few GB below var/image. Then
the image's own entrypoint, command and health check are run as its user, on port 8000 of this machine: a key, a server,
an upload, a question, SIGTERM.

Arguments are options of ``buildah build``: ``make image ARGS="--build-arg BASE=debian:bookworm-slim"`` takes another
base. Where pip needs a configuration or a certificate of this machine, mount them: ``--volume
/etc/pip.conf:/etc/pip.conf:ro``.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "var/image"
STORE = ["--root", FOLDER / "store", "--runroot", FOLDER / "run", "--storage-driver", "vfs"]
NAME = "mpic"
READY_SECONDS = 600
QUESTION, ANSWER = "IMAGE#EIFFEL2025 What is the colour of the circle in image EIFFEL2025?", "red"
"""One of the sample questions, with what is expected."""
FORCED = 70
"""Exit status of a server that could not close everything (``mpic.server.shutdown``). buildah has 1 for SIGTERM, with
which the others end."""


def buildah(*words: object, **options: object) -> str:
    """Run buildah and return its output. Raise subprocess.CalledProcessError."""
    command = ["buildah", *map(str, STORE), *map(str, words)]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, **options).stdout.strip()


def install_tools() -> None:
    missing = [tool for tool in ("buildah", "debootstrap") if shutil.which(tool) is None]
    if missing:
        subprocess.run(["apt-get", "update", "-qq"], check=True)
        subprocess.run(["apt-get", "install", "-y", "-qq", "--no-install-recommends", *missing], check=True)


def make_base(base: str) -> None:
    """Make an image ``debian:SUITE-slim`` from Debian's packages, once. End the script if the base is a different
    one."""
    image = f"docker.io/library/{base}"
    if image in buildah("images", "--format", "{{.Name}}:{{.Tag}}").split():
        return
    named = re.fullmatch(r"debian:(\w+)-slim", base)
    if named is None:
        sys.exit(f"{base} cannot be made of Debian's packages; pull it: buildah pull {base}")
    tree = FOLDER / named[1]
    shutil.rmtree(tree, ignore_errors=True)
    subprocess.run(
        ["debootstrap", "--variant=minbase", named[1], tree], check=True, stdout=subprocess.DEVNULL
    )
    made = buildah("from", "scratch")
    buildah("add", "--quiet", made, tree, "/")
    buildah("commit", "--quiet", "--rm", made, image)
    shutil.rmtree(tree)


def base_of(options: list[str]) -> str:
    """Return the base that the options or the Dockerfile name."""
    text = (ROOT / "deploy/Dockerfile").read_text(encoding="utf-8") + "\n".join(options)
    return re.findall(r"\bBASE=(\S+)", re.sub(r"^#.*", "", text, flags=re.MULTILINE))[-1]


def attempt(image: str) -> None:
    """Run the image's entrypoint, command and health check as its user. Raise subprocess.CalledProcessError or
    AssertionError."""
    config = json.loads(buildah("inspect", "--type", "image", image))["Docker"]["config"]
    mpic, command, probe = config["Entrypoint"], config["Cmd"], config["Healthcheck"]["Test"][1:]
    container = buildah("from", "--pull-never", image)
    run = ["run", "--isolation", "chroot", container, "--"]
    key = buildah(*run, *mpic, "keys", "create", "me", "--role", "admin", "--data-dir", "/data").split()[-1]
    server = subprocess.Popen(["buildah", *map(str, [*STORE, *run, *mpic, *command])])
    try:
        start = time.monotonic()
        while subprocess.run(
            ["buildah", *map(str, [*STORE, *run, *probe])], stderr=subprocess.DEVNULL
        ).returncode:
            assert server.poll() is None and time.monotonic() < start + READY_SECONDS, (
                "the server is not ready"
            )
            time.sleep(1)
        print(f"ready after {time.monotonic() - start:.0f} s, as user {buildah(*run, 'id', '-un')}")
        asked = [f"MPIC_API_KEY={key}", *mpic]
        print(buildah(*run, "env", *asked, "upload", "/opt/mpic/data/samples-large/eiffel2025.png"))
        answer = buildah(*run, "env", *asked, "chat", "-m", QUESTION)
        print(answer)
    finally:
        if server.poll() is None:
            os.kill(server_process(server.pid), signal.SIGTERM)
            server.wait(timeout=60)
        buildah("rm", container)
    assert ANSWER in answer, f"the answer is not {ANSWER}: {answer}"
    assert server.returncode != FORCED, "the server has ended by force"


def server_process(pid: int) -> int:
    """Return the container's process, which is a child of buildah's processes; ending those directly would kill it."""
    while not Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"/opt/mpic/"):
        threads = Path(f"/proc/{pid}/task").glob("*/children")
        pid = int("".join(thread.read_text() for thread in threads).split()[0])
    return pid


def main() -> None:
    if os.geteuid() != 0:
        sys.exit("only root can build in a chroot; with Docker: docker build -f deploy/Dockerfile -t mpic .")
    options = sys.argv[1:]
    install_tools()
    FOLDER.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    make_base(base_of(options))
    print(f"base {base_of(options)} after {time.monotonic() - start:.0f} s", flush=True)
    # OCI's format has no HEALTHCHECK
    isolated = ["--isolation", "chroot", "--pull-never", "--format", "docker"]
    file = ["-f", ROOT / "deploy/Dockerfile", "-t", NAME]
    print(buildah("build", *isolated, *file, *options, ROOT), flush=True)
    print(f"built after {time.monotonic() - start:.0f} s", flush=True)
    attempt(f"localhost/{NAME}")


if __name__ == "__main__":
    main()
