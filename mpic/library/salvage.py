"""Originals that no sidecar describes: stored by a version that wrote none, and whose catalogue is lost."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mpic.errors import MPICError
from mpic.keys import KeyStore, any_keys
from mpic.kv.chunk import ChunkKey
from mpic.library.adopt import Adoption
from mpic.library.decode import decode_text, image_key, sniff
from mpic.library.limits import Limits
from mpic.library.names import owner_folder
from mpic.library.records import SHARED


def salvage(
    adoption: Adoption, root: Path, originals: Iterable[str], owners: Iterable[str], limits: Limits
) -> list[str]:
    """Take in what can be told of originals without sidecars: an upload is called by its id and has no handle, a
    reference is titled by its id. Whose they are is told by the hash in their path, if the owner is ``local``, has a
    key, or is among ``owners``.

    Args:
        originals: paths relative to the root.

    Returns:
        Those that could not be taken in: the owner is not known, the content is none, or it is a piece of a cache.
    """
    known = {owner_folder(owner): owner for owner in ("local", SHARED, *_users(root), *owners)}
    rest = []
    for path in originals:
        owner = known.get(path.split("/")[1])
        name = Path(path).name
        try:
            record = None if owner is None else _describe(root / path, name, owner, limits)
        except (MPICError, OSError):  # no content that is accepted: it stays among the rest
            record = None
        adopt = adoption.reference if owner == SHARED else adoption.file
        if record is None or not adopt(record, path):
            rest.append(path)
    return rest


def _users(root: Path) -> list[str]:
    """Everybody who ever had a key here."""
    if not any_keys(root):
        return []
    keys = KeyStore(root)
    try:
        return [key.user for key in keys.listing()]
    finally:
        keys.close()


def _describe(path: Path, name: str, owner: str, limits: Limits) -> dict[str, Any] | None:
    """The record of a sidecar, as far as it can be told. Raises MPICError: the content is not accepted."""
    data = path.read_bytes()
    is_image = sniff(data[:32]) == "image"
    key = image_key(data, limits) if is_image else ChunkKey.of_text(decode_text(data, limits))
    at = path.stat().st_mtime
    record = {
        "kind": key.kind,
        "digest": key.digest,
        "filename": name,
        "bytes": len(data),
        "sha256": hashlib.sha256(data).hexdigest(),
        "created_at": at,
        "metadata": {},
        "pinned": False,
    }
    if owner == SHARED and "@" in name:
        reference = name.rpartition("@")[0]
        words = {"title": reference.removeprefix("ref_"), "description": "", "filename": reference}
        return record | words | {"id": reference, "version": 1, "updated_at": at}
    if owner != SHARED and name.startswith("file-"):
        return record | {"id": name, "owner": owner, "handle": None, "expires_at": None}
    return None
