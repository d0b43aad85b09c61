"""Sidecars for what was stored before there were any."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable

from mpic.errors import MPICError
from mpic.library.catalog import Catalog
from mpic.library.sidecars import Sidecars

log = logging.getLogger(__name__)


class Backfill:
    """Writes missing sidecars on a thread of its own, one at a time, and rests as long as it works, so that a server
    that has just been upgraded answers as usual. What it does not get to, the next start finds missing again."""

    def __init__(self, catalog: Catalog, sidecars: Sidecars) -> None:
        self._catalog = catalog
        self._sidecars = sidecars
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(
        self, files: Iterable[str], references: Iterable[str], caches: Iterable[str], owners: Iterable[str]
    ) -> None:
        """Begin, unless there is nothing to do.

        Args:
            files, references, caches, owners: ids of what has no sidecar.
        """
        write = self._sidecars
        work = [(lambda db, id: write.rewrite_files(db, [id]), id) for id in files]
        work += [(write.rewrite_reference, id) for id in references]
        work += [(write.rewrite_cache, id) for id in caches]
        work += [(write.rewrite_owner, id) for id in owners]
        if work:
            self._thread = threading.Thread(target=self._run, args=(work,), name="mpic-sidecars", daemon=True)
            self._thread.start()

    def wait(self) -> None:
        """Until everything is written."""
        if self._thread is not None:
            self._thread.join()

    def stop(self) -> None:
        """Leave the rest for the next start."""
        self._stop.set()
        self.wait()

    def _run(self, work: list) -> None:
        log.warning("writing the sidecars of %d uploads of an earlier version, in the background", len(work))
        for write, id in work:
            begun = time.monotonic()
            try:
                with self._catalog.write() as db:  # so that nothing is written for what is deleted meanwhile
                    write(db, id)
            except (MPICError, OSError) as error:
                log.error("the sidecars are not complete, the next start goes on: %s", error)
                return
            if self._stop.wait(time.monotonic() - begun):
                return
        log.warning("every upload has its sidecar now")
