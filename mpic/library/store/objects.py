"""Objects of a shared store (S3, GCS, Azure, a mounted folder), read and written by obstore within time limits.

The store is at the other end of a network: it may be slow, gone, or hold anything. A call that fails or outlasts its
limit opens a *breaker*: nothing waits for the store any more until a pause has passed; then whoever comes first tries
it. Reads and writes have a breaker each, so that a store that can be read and not written is still read.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from mpic.config_values import ConfigError
from mpic.durable import FileSystem
from mpic.kv.file import HEAD_BYTES

THREADS = 32
"""Loads under way at a time, and as many look-ups: a prompt may link hundreds of chunks, and most of a call is
latency."""
AHEAD, AHEAD_BYTES = 4, 128 << 20
"""Ranges of a chunk that are asked for before they are needed, and the bytes of all of them together."""
PAUSE, LONGEST_PAUSE = 2.0, 60.0
"""Seconds until a store that has failed is tried again for the first time, and at most between two times."""
LOOK_UP = 0.2
"""The part of the limit that a look-up may take: it is about less than a load."""
RETRIES = 3
WRITE_SECONDS = 120.0
"""Limit of one request of an upload, for which nobody waits."""
WEIGHT = 0.3
"""The weight of the newest measurement in the averages."""
FULL_WEIGHT = 1 << 20
"""Bytes of a measurement that counts fully."""

T = TypeVar("T")
log = logging.getLogger(__name__)


class StoreUnavailable(OSError):
    """The store has failed, or has not answered within its limit. What it holds may be intact."""

    reason = "unavailable"
    """The reason of a chunk that is compiled therefore; see ``ChunkUse``."""


def connect(url: str, seconds: float, retries: int = RETRIES) -> Any:
    """Return the obstore client of a URL such as ``s3://bucket/prefix`` or ``file:///mnt/shared``. Nothing is sent
    yet. Credentials and endpoints are those of the environment, by the names that the cloud's own tools use.

    Args:
        seconds: limit of one request, its retries included.

    Raises:
        ConfigError: there is no such store, or obstore is not installed.
    """
    try:
        from obstore.exceptions import BaseError
        from obstore.store import from_url
    except ImportError:
        raise ConfigError("[library] remote needs obstore: install mpic[remote]", param="remote") from None
    limit = timedelta(seconds=seconds)
    backoff = {"init_backoff": limit / 100, "max_backoff": limit / 4}
    if url.startswith("file:"):
        options: dict[str, Any] = {"automatic_cleanup": True}  # of folders that are empty
    else:
        options = {
            # without TLS only where the endpoint says so
            "client_options": {"timeout": limit, "connect_timeout": limit / 2, "allow_http": True},
            "retry_config": {"max_retries": retries, "retry_timeout": limit, "backoff": backoff},
        }
    try:
        return from_url(url, **options)  # ty: ignore[no-matching-overload] (an overload for each kind of store)
    except (BaseError, ValueError, OSError) as error:
        says = str(error).partition("\n")[0]
        raise ConfigError(f"[library] remote cannot be {url!r}: {says}", param="remote") from None


class Breaker:
    """Remembers that a store has failed: nothing uses it until a pause has passed, which doubles until something has
    succeeded. Thread-safe.

    Args:
        what: what cannot be done while it is open, for the log.
    """

    def __init__(self, what: str, clock: Callable[[], float]) -> None:
        self._what, self._clock, self._lock = what, clock, threading.Lock()
        self._pause, self._due = PAUSE, 0.0
        self.error: str | None = None
        """The last failure, until something succeeds."""

    @property
    def open(self) -> bool:
        return self.pause() > 0

    def failed(self, error: BaseException) -> None:
        with self._lock:
            if self.error is None:
                log.warning("the remote store is not %s for now: %s", self._what, _line(error))
            elif self.open:
                return  # calls that were under way together fail together
            self.error = _line(error)
            self._due = self._clock() + self._pause
            self._pause = min(2 * self._pause, LONGEST_PAUSE)

    def succeeded(self) -> None:
        with self._lock:
            if self.error is not None:
                log.warning("the remote store is %s again", self._what)
            self.error, self._pause, self._due = None, PAUSE, 0.0

    def pause(self) -> float:
        """Return the seconds until the store is to be tried again, at least 0."""
        return max(0.0, self._due - self._clock())


class TransferRate:
    """Measures latency and bandwidth by real reads, as moving averages. Thread-safe.

    A first small read of an object measures the latency. The bandwidth is that of all other reads together: the bytes
    that came while at least one was under way, over that time less one latency. Reads that share the line are therefore
    not counted as a slow line.

    Attributes:
        latency: seconds, or None before the first measurement.
        seconds_per_byte: the inverse of the bandwidth, or None.
        measured: time of the last measurement of the bandwidth.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock, self._lock = clock, threading.Lock()
        self.latency: float | None = None
        self.seconds_per_byte: float | None = None
        self.measured = clock()
        self._reading = self._bytes = 0
        self._began = 0.0

    def answered(self, seconds: float) -> None:
        """Record the time that a first small read took."""
        with self._lock:
            self.latency = _mean(self.latency, seconds, WEIGHT)

    def begin(self) -> None:
        """Note that a read of an object's body begins; ``end`` must follow."""
        with self._lock:
            if not self._reading:
                self._began, self._bytes = self._clock(), 0
            self._reading += 1

    def end(self, size: int) -> None:
        """Note that it has ended, with so many bytes; 0 if it failed."""
        with self._lock:
            self._reading -= 1
            self._bytes += size
            if self._reading or not self._bytes:
                return
            seconds = max(0.0, self._clock() - self._began - (self.latency or 0.0))
            weight = WEIGHT * min(1.0, self._bytes / FULL_WEIGHT)
            self.seconds_per_byte = _mean(self.seconds_per_byte, seconds / self._bytes, weight)
            self.measured = self._clock()

    def seconds(self, size: int) -> float | None:
        """Return how long a read of so many bytes is expected to take, ``latency + size / bandwidth``; None before the
        first measurement."""
        if self.seconds_per_byte is None:
            return None
        return (self.latency or 0.0) + size * self.seconds_per_byte


class Head(NamedTuple):
    """The first bytes of an object, with its size and the mark of this version of it."""

    data: memoryview
    size: int
    etag: str | None


class Objects:
    """The objects below a URL. Thread-safe.

    Args:
        seconds: how long anybody waits for a load, and five times as long as for a look-up.
        client: reads, with obstore's methods; tests wrap it.
        writer: the same with more patience, for uploads; None: the client.
        clock: function that returns seconds.
    """

    def __init__(
        self,
        seconds: float,
        client: Any,
        writer: Any = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.seconds, self.clock = seconds, clock
        self._client, self._writer = client, client if writer is None else writer
        self.reads, self.writes = Breaker("read", clock), Breaker("written", clock)
        self.rate = TransferRate(clock)
        self._pool = ThreadPoolExecutor(THREADS, "mpic-remote-read")
        self._look_ups = ThreadPoolExecutor(THREADS, "mpic-remote-look")  # they do not wait behind loads
        self._ahead_bytes = 0
        self._lock = threading.Lock()

    @classmethod
    def at(cls, url: str, seconds: float) -> Objects:
        """Return the objects below a URL. Raise ConfigError: see ``connect``."""
        return cls(seconds, connect(url, seconds), connect(url, max(seconds, WRITE_SECONDS)))

    # Reading, for which somebody waits

    def heads(self, names: list[str]) -> dict[str, Head]:  # ty: ignore[invalid-type-form] (`list` below is a method)
        """Return the heads of those objects that exist and answer within the limit of a look-up."""
        if self.reads.open:
            return {}
        limit = LOOK_UP * self.seconds
        futures = {name: self._look_ups.submit(self.head, name) for name in names}
        answered, late = wait(futures.values(), limit)
        under_way = [future for future in late if not future.cancel()]
        if under_way and not answered:  # else it is busy, and not dead
            self.reads.failed(TimeoutError(f"no answer within {limit:g} s"))
        found = {}
        for name, future in futures.items():
            try:
                head = None if future in late else future.result()
            except StoreUnavailable:
                continue
            if head is not None:
                found[name] = head
        return found

    def head(self, name: str) -> Head | None:
        """Return the head of an object, or None. Raise StoreUnavailable."""
        began = self.clock()
        try:
            head = self._use(self.reads, self._read_head, name)
        except FileNotFoundError:
            head = None
        seconds = self.clock() - began
        self.rate.answered(seconds)
        if seconds <= LOOK_UP * self.seconds:
            self.reads.succeeded()
        elif self.reads.error is not None:
            self.reads.failed(TimeoutError("it answers too slowly"))
        return head

    def _read_head(self, name: str) -> Head:
        try:
            result = self._client.get(name, options={"range": (0, HEAD_BYTES)})
            return Head(memoryview(result.bytes()), result.meta["size"], result.meta["e_tag"])
        except Exception as error:
            if "range" not in str(error).lower():
                raise
            # an empty object has no range
            found = self._client.head(name)
            return Head(memoryview(b""), found["size"], found["e_tag"])

    def ask(self, name: str, start: int, size: int, etag: str | None) -> Future[memoryview]:
        """Begin to read a range; see ``await_range``."""
        return self._pool.submit(self._range, name, start, size, etag)

    def await_range(self, future: Future[memoryview], deadline: float | None) -> memoryview:
        """Wait for a range.

        Args:
            deadline: of the load that it belongs to; None: the range may take the limit by itself.

        Raises:
            FileNotFoundError: the object is gone, or is another version now.
            StoreUnavailable: the store has failed, or the deadline has passed.
        """
        slow = StoreUnavailable(f"the load took longer than {self.seconds:g} s")
        left = self.seconds if deadline is None else deadline - self.clock()
        if left <= 0:
            raise slow
        try:
            return future.result(left)
        except TimeoutError as error:
            if deadline is not None or future.cancel():  # a slow store or a busy one, and not a dead one
                raise slow from None
            raise self._failed(self.reads, error) from None

    def _range(self, name: str, start: int, size: int, etag: str | None) -> memoryview:
        from obstore.exceptions import PreconditionError

        done = 0
        self.rate.begin()
        try:
            options: dict[str, Any] = {"range": (start, start + size)}
            if etag is not None:
                options["if_match"] = etag
            data = memoryview(self._use(self.reads, lambda: self._client.get(name, options=options).bytes()))
            done = len(data)
            return data
        except PreconditionError:
            raise FileNotFoundError(f"{name} was replaced while it was read") from None
        finally:
            self.rate.end(done)

    def reserve_ahead(self, size: int) -> bool:
        """Count bytes that are read ahead, if there is room for them."""
        with self._lock:
            if self._ahead_bytes + size > AHEAD_BYTES:
                return False
            self._ahead_bytes += size
            return True

    def release_ahead(self, size: int) -> None:
        with self._lock:
            self._ahead_bytes -= size

    # Writing and listing, for which nobody waits

    def exists(self, name: str) -> dict[str, Any] | None:
        """Return size and version of an object, or None."""
        try:
            return self._use(self.writes, self._writer.head, name)
        except FileNotFoundError:
            return None

    def get(self, name: str) -> bytes | None:
        """Return a small object, or None."""
        try:
            return bytes(self._use(self.writes, lambda: self._writer.get(name).bytes()))
        except FileNotFoundError:
            return None

    def put(self, name: str, data: bytes | Path) -> None:
        """Write an object, which appears as a whole or not at all. Raise FileNotFoundError: the file is gone."""
        try:
            self._use(self.writes, self._writer.put, name, data)
        except FileNotFoundError as error:
            if isinstance(data, Path) and not data.exists():
                raise
            raise self._failed(self.writes, error) from error  # there is no such bucket or folder

    def delete(self, name: str) -> None:
        """Delete an object, if it is there."""
        with suppress(FileNotFoundError):
            self._use(self.writes, self._writer.delete, name)

    def rename(self, name: str, new: str) -> None:
        self._use(self.writes, self._writer.rename, name, new)

    def list(self, prefix: str) -> Iterator[dict[str, Any]]:
        """Yield ``path``, ``size``, ``last_modified`` and ``e_tag`` of every object below a prefix."""
        pages = iter(self._use(self.writes, self._client.list, prefix))
        while (page := self._use(self.writes, next, pages, None)) is not None:
            yield from page

    def close(self) -> None:
        for pool in (self._pool, self._look_ups):
            pool.shutdown(wait=False, cancel_futures=True)

    # Inside

    def _use(self, breaker: Breaker, call: Callable[..., T], *args: Any) -> T:
        """Call the client. Raise StoreUnavailable for any error that is not about the one object."""
        from obstore.exceptions import PreconditionError

        try:
            return call(*args)
        except (FileNotFoundError, PreconditionError):
            raise
        except Exception as error:  # obstore's BaseError, and whatever a folder's file system raises
            raise self._failed(breaker, error) from error

    def _failed(self, breaker: Breaker, error: BaseException) -> StoreUnavailable:
        if not str(error):
            error = TimeoutError(f"no answer within {self.seconds:g} s")
        breaker.failed(error)
        return StoreUnavailable(f"the remote store cannot be used: {_line(error)}")


class ObjectReader(FileSystem):
    """One version of an object, as ``ChunkFile`` reads a file."""

    def __init__(self, objects: Objects, name: str, head: Head) -> None:
        super().__init__()
        self._objects, self._name, self._head = objects, name, head
        self._end = 0  # nothing is read ahead from this offset on
        self._ahead: deque[tuple[int, int, Future[memoryview]]] = deque()
        self._deadline: float | None = None

    def begin(self, end: int) -> None:
        """Begin a load, which is to end within the limit. Ranges that follow one another are read ahead, up to
        ``end``."""
        self._end = end
        self._deadline = self._objects.clock() + self._objects.seconds

    @property
    def etag(self) -> str | None:
        return self._head.etag

    def open(self, path: Path) -> int:
        return 0

    def size(self, fd: int) -> int:
        return self._head.size

    def close(self, fd: int) -> None:
        pass

    def end(self) -> None:
        """End the load: what was read ahead is of no use."""
        while self._ahead:
            _, size, future = self._ahead.popleft()
            future.cancel()
            self._objects.release_ahead(size)

    def read(self, fd: int, into: memoryview, offset: int) -> int:
        """Read a range from the head, from what was read ahead, or from the store. Raise as
        ``Objects.await_range``."""
        wanted = min(len(into), self._head.size - offset)
        if wanted <= 0:
            return 0
        if offset + wanted <= len(self._head.data):
            data = self._head.data[offset : offset + wanted]
        else:
            data = self._from_store(offset, wanted)
        into[: len(data)] = data
        return len(data)

    def _from_store(self, offset: int, size: int) -> memoryview:
        objects = self._objects
        if objects.reads.open:
            raise StoreUnavailable(f"the remote store cannot be used: {objects.reads.error}")
        if self._ahead and self._ahead[0][:2] == (offset, size):
            _, _, future = self._ahead.popleft()
            objects.release_ahead(size)
        else:
            self.end()
            future = objects.ask(self._name, offset, size, self._head.etag)
        self._read_ahead(offset + size, size)
        return objects.await_range(future, self._deadline)

    def _read_ahead(self, at: int, size: int) -> None:
        if self._ahead:
            at = self._ahead[-1][0] + self._ahead[-1][1]
        while at < self._end and len(self._ahead) < AHEAD:
            step = min(size, self._end - at)
            if not self._objects.reserve_ahead(step):
                return
            future = self._objects.ask(self._name, at, step, self._head.etag)
            self._ahead.append((at, step, future))
            at += step


def _mean(old: float | None, new: float, weight: float) -> float:
    return new if old is None else old + weight * (new - old)


def _line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
