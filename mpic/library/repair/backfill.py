"""Writes sidecars for files that were stored by versions that wrote none."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence

from mpic.errors import MPICError
from mpic.library.catalog.database import Catalog
from mpic.library.folder.sidecars import SidecarKind, Sidecars

log = logging.getLogger(__name__)


class SidecarBackfill:
    """Writes missing sidecars on a thread of its own, one at a time. After each it rests for as long as it worked, so
    that a server that has just been upgraded answers as usual. The next start writes the remaining ones."""

    def __init__(self, catalog: Catalog, sidecars: Sidecars) -> None:
        self._catalog = catalog
        self._sidecars = sidecars
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, missing: Sequence[tuple[SidecarKind, str]]) -> None:
        """Starts the thread, unless nothing is missing.

        Args:
            missing: kind and id of every row without a sidecar.
        """
        if missing:
            self._thread = threading.Thread(
                target=self._run, args=(missing,), name="mpic-sidecars", daemon=True
            )
            self._thread.start()

    def wait(self) -> None:
        """Waits until everything is written."""
        if self._thread is not None:
            self._thread.join()

    def stop(self) -> None:
        """Stops soon and leaves the rest for the next start."""
        self._stop.set()
        self.wait()

    def _run(self, missing: Sequence[tuple[SidecarKind, str]]) -> None:
        log.warning(
            "writing the sidecars of %d uploads of an earlier version, in the background", len(missing)
        )
        for kind, id in missing:
            begun = time.monotonic()
            try:
                with self._catalog.write() as db:  # a row that is deleted meanwhile gets no sidecar
                    self._sidecars.rewrite(db, kind, id)
            except IsADirectoryError as error:
                log.error("the sidecar of %s cannot be written: %s", id, error)
            except (MPICError, OSError) as error:
                log.error("not all sidecars could be written; the next start continues: %s", error)
                return
            if self._stop.wait(time.monotonic() - begun):
                return
        log.warning("every upload has its sidecar now")
