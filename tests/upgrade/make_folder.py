"""Makes the data folder of this version, which later versions must be able to open (``test_upgrade.py``).

Run it once for a release, after the version was raised::

    PYTHONPATH=tests .venv/bin/python tests/upgrade/make_folder.py

It writes ``VERSION.tar.gz`` (the folder as a stopped server leaves it) and ``VERSION.json`` (what users had in it)
beside this file. Both are committed and never made again.
"""

from __future__ import annotations

import io
import json
import sys
import tarfile
import tempfile
from pathlib import Path

from old_model import save_model
from server_helpers import png

from mpic import MPIC
from mpic.keys import KeyStore
from mpic.version import VERSION
from mpic_lab.demo import running_server

HERE = Path(__file__).parent
FLAGS = ("--pool-bytes", str(64 * 12_288))
TEXT = "The office opens at nine. It closes at five. On Fridays it closes at noon."


def fill(url: str, keys: dict[str, str]) -> dict[str, object]:
    """Do what users do: uploads, a cache, a reference, a deletion. Return what a later version must find."""
    with MPIC(url, keys["alice"]) as alice:
        image = alice.files.create(("red.png", png()), "RED", wait=True)
        text = alice.files.create(("office.txt", TEXT.encode()), "OFFICE", wait=True)
        gone = alice.files.create(("gone.txt", b"It was deleted."), "GONE", wait=True)
        alice.files.delete(gone.id)
        cache = alice.caches.create(TEXT, split={"mode": "sentence", "tokens": 32}, name="hours", wait=True)
    with MPIC(url, keys["bob"]) as bob:
        other = bob.files.create(("blue.png", png("blue")), "RED", wait=True)
    with MPIC(url, keys["root"]) as root:
        reference = root.references.create(
            ("green.png", png("green")), "Green", metadata={"year": 2025}, id="ref_green", wait=True
        )
    return {
        "keys": keys,
        "alice": {"files": {"RED": image.id, "OFFICE": text.id}, "deleted": gone.id, "cache": cache.id},
        "cache_chunks": [chunk.id for chunk in cache.chunks],
        "bob": {"files": {"RED": other.id}},
        "reference": reference.id,
    }


def main() -> None:
    """Make both files of the running version."""
    archive = HERE / f"{VERSION}.tar.gz"
    if archive.exists():
        sys.exit(f"{archive.name} is there already; what a version wrote is not made again")
    with tempfile.TemporaryDirectory() as scratch:
        data = Path(scratch) / "data"
        data.mkdir()
        store = KeyStore(data)
        roles = {"alice": "user", "bob": "user", "root": "admin"}
        keys = {user: store.create(user, role)[0] for user, role in roles.items()}
        store.close()
        model = save_model(Path(scratch) / "tiny")
        with running_server(data, str(model), *FLAGS) as (url, _):
            expected = fill(url, keys)
        (data / "server.log").unlink()
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w:gz") as tar:
            tar.add(data, arcname="data")
    archive.write_bytes(packed.getvalue())
    archive.with_name(f"{VERSION}.json").write_text(json.dumps(expected, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
