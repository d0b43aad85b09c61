"""Adopts originals without sidecars, for a lost catalogue of a version that wrote none."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from typing import Any

from mpic.errors import MPICError
from mpic.keys import KeyStore, any_keys
from mpic.library.folder.layout import owner_folder
from mpic.library.intake.decode import NO_CLIPS, content_key
from mpic.library.limits import Limits
from mpic.library.records import SHARED
from mpic.library.repair.adopt import Adoption


def salvage(
    adoption: Adoption, root: Path, originals: Iterable[str], owners: Iterable[str], limits: Limits
) -> list[str]:
    """Adopts originals without sidecars as far as they can be identified. An upload is named by its id and has no
    handle, a reference is titled by its id. The hash in the path identifies the owner, provided that the owner is
    ``local``, has a key, or is among ``owners``.

    Args:
        originals: paths relative to the root.

    Returns:
        The originals that were not adopted: the owner is not known, the content is not accepted, or it is a chunk of an
        explicit cache.
    """
    known = {owner_folder(owner): owner for owner in ("local", SHARED, *_users(root), *owners)}
    rest = []
    for path in originals:
        owner = known.get(path.split("/")[1])
        try:
            record = None if owner is None else _describe(root / path, owner, limits)
        except (MPICError, OSError):  # the content is not accepted
            record = None
        adopt = adoption.reference if owner == SHARED else adoption.file
        if record is None or not adopt(record, path):
            rest.append(path)
    return rest


def _users(root: Path) -> list[str]:
    """Returns every user who ever had a key of this library."""
    if not any_keys(root):
        return []
    with closing(KeyStore(root)) as keys:
        return [key.user for key in keys.listing()]


def _describe(path: Path, owner: str, limits: Limits) -> dict[str, Any] | None:
    """Returns the record that a sidecar of this original would hold, as far as that can be known. Raises MPICError if
    the content is not accepted, OSError if it cannot be read."""
    data = path.read_bytes()
    key = content_key(data, limits, no_clips=NO_CLIPS if owner == SHARED else None)  # no reference is a clip
    at = path.stat().st_mtime
    record = {
        "kind": key.kind,
        "digest": key.digest,
        "filename": path.name,
        "bytes": len(data),
        "sha256": hashlib.sha256(data).hexdigest(),
        "created_at": at,
        "metadata": {},
        "pinned": False,
    }
    if owner == SHARED and "@" in path.name:
        reference = path.name.rpartition("@")[0]
        words = {"title": reference.removeprefix("ref_"), "description": "", "filename": reference}
        return record | words | {"id": reference, "version": 1, "updated_at": at}
    if owner != SHARED and path.name.startswith("file-"):
        return record | {
            "id": path.name,
            "owner": owner,
            "handle": None,
            "expires_at": None,
            "split": None,
            "press": "",
        }
    return None
