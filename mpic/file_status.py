"""Tells a path with nothing there from one that cannot be looked at.

``Path.exists``, ``is_dir`` and ``is_file`` are for places where that makes no difference: from Python 3.14 on, they
return False for every error of the system, such as that of a folder that this user may not enter.
"""

from __future__ import annotations

import os
from pathlib import Path
from stat import S_ISDIR, S_ISREG


def status_of(path: str | Path) -> os.stat_result | None:
    """Return the status of what a path leads to, over symbolic links; None if there is nothing.

    Raises:
        OSError: it cannot be looked at.
    """
    try:
        return os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except ValueError:  # no file has such a name: there is a NUL in it, or what the system cannot encode
        return None


def is_folder(path: str | Path) -> bool:
    """Return whether a path leads to a folder. Raise OSError: it cannot be looked at."""
    found = status_of(path)
    return found is not None and S_ISDIR(found.st_mode)


def is_file(path: str | Path) -> bool:
    """Return whether a path leads to a regular file. Raise OSError: it cannot be looked at."""
    found = status_of(path)
    return found is not None and S_ISREG(found.st_mode)


def is_own_file(path: str | Path) -> bool:
    """Return whether this path itself is a regular file, not a symbolic link to one."""
    try:
        return S_ISREG(os.lstat(path).st_mode)
    except OSError:
        return False
