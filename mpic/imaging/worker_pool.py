"""The server's pool of decoding processes: they are started on demand, ended when they are idle, and replaced when they
die."""

from __future__ import annotations

import atexit
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from multiprocessing.reduction import send_handle
from typing import Any

from PIL import Image

from mpic import errors, memory
from mpic.errors import InvalidDocument, InvalidImage, InvalidVideo, MPICError, OutOfMemory, Unavailable
from mpic.imaging.pixels import HeaderMismatch
from mpic.imaging.stored_file import FileBytes, StoredFile
from mpic.imaging.worker import CLIP, DOCUMENT, FULL, IMAGE, TOO_COSTLY

log = logging.getLogger(__name__)

CPU_SECONDS = 30
"""CPU seconds that one image may take. A progressive JPEG of 40 million pixels takes two to four seconds."""
CLIP_CPU_SECONDS = 90
"""CPU seconds that one walk over a clip may take."""
DOCUMENT_CPU_SECONDS = 30
"""CPU seconds that reading a document may take. A thousand pages of a book take a second or two."""
INVALID = {IMAGE: InvalidImage, CLIP: InvalidVideo, DOCUMENT: InvalidDocument}
WALL_SECONDS = 180.0
"""Seconds after which a worker that does not answer is ended, for example because it was suspended."""
ENDING_SECONDS = 5.0
"""Seconds to wait for the end of a worker whose socket has closed: the kernel closes it before there is an exit
status."""
IDLE_SECONDS = 30.0
LONGEST_MESSAGE = 64 << 20
BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from mpic.imaging.worker import main; main(int(sys.argv[2]))"
)
CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGABRT, signal.SIGTRAP)
REFUSALS = {
    c.code: c
    for c in (
        errors.AnimatedImage,
        errors.DocumentTooCostly,
        errors.ImageTooCostly,
        errors.ImageTooLarge,
        errors.InvalidDocument,
        errors.InvalidImage,
        errors.InvalidVideo,
        errors.NoDocumentReader,
        errors.NoImageDecoder,
        errors.NoText,
        errors.NoVideoDecoder,
        errors.OutOfMemory,
        errors.StorageFailed,
        errors.TooLarge,
        errors.TooManyPages,
        errors.UnsupportedType,
        errors.VideoTooCostly,
        errors.VideoTooLarge,
    )
}


class Reply:
    """The reply of a worker.

    Args:
        frames: buffer into which the frames of a clip are written one after the other.

    Attributes:
        result: the requested value or bytes.
        image: the image, if one was requested; it is assembled from strips as they arrive.
        pages: the text of each page of a document.
        ended: the worker has sent the last message of the reply, which may be an error.
    """

    def __init__(self, frames: Sequence[memoryview] = ()) -> None:
        self.result: Any = None
        self.image: Image.Image | None = None
        self.pages: list[str] = []
        self.ended = False
        self._top = 0
        self._frames = iter(frames)

    def take(self, message: bytes) -> bool:
        """Take one message and return whether it was the last one. Raise the error that the worker reports."""
        kind, body = message[:1], memoryview(message)[1:]
        if kind == b"p":
            assert self.image is not None  # its size came first
            strip = Image.frombuffer("RGB", (self.image.width, len(body) // 3 // self.image.width), body)  # ty: ignore[invalid-argument-type] (any buffer will do)
            self.image.paste(strip, (0, self._top))
            self._top += strip.height
            return False
        if kind == b"f":
            target = next(self._frames, None)
            if target is None or len(target) != len(body):
                raise InvalidVideo("the frames of the clip change their size", param="file")
            target[:] = body
            return False
        if kind == b"t":
            self.pages.append(str(body, "utf-8"))
            return False
        if kind == b"s":
            self.image = Image.new("RGB", tuple(json.loads(bytes(body))))
            return False
        self.ended = True
        if kind == b"c":
            raise HeaderMismatch
        if kind == b"e":
            code, text = json.loads(bytes(body))
            raise REFUSALS[code](text, param=None if issubclass(REFUSALS[code], Unavailable) else "file")
        self.result = bytes(body) if kind == b"b" else json.loads(bytes(body))
        return True


class WorkerProcess:
    """A decoding process. Only one thread may use it at a time."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        path = json.dumps([entry or os.getcwd() for entry in sys.path])
        with theirs:
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-c", BOOT, path, str(theirs.fileno())],
                    stdin=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                )
            except OSError as error:
                ours.close()
                raise OutOfMemory(f"a process to decode the image cannot be started: {error}") from error
        self._connection = Connection(ours.detach())
        self._late = False

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def run(self, order: dict[str, Any], data: FileBytes, frames: Sequence[memoryview] = ()) -> Reply:
        """Decode one image, clip or document in the worker, which may be used again if it is ``alive`` afterwards.

        Args:
            frames: buffer that receives the frames of a clip.

        Raises:
            MPICError: the file is refused, or the worker has died.
            HeaderMismatch: see ``pixels.HeaderMismatch``.
        """
        watch = threading.Timer(WALL_SECONDS, self._give_up)
        watch.daemon = True
        watch.start()
        reply = Reply(frames)
        try:
            self._send(order, data)
            while not reply.take(self._connection.recv_bytes(LONGEST_MESSAGE)):
                pass
            return reply
        except (EOFError, ConnectionError) as error:
            raise self._end(order["what"], order["seconds"]) from error
        except (*TOO_COSTLY.values(), OutOfMemory):  # its heap may stay fragmented
            self.close()
            raise
        except BaseException:
            if not reply.ended:  # the rest of this reply would be taken for the next one
                self.close()
            raise
        finally:
            watch.cancel()

    def _send(self, order: dict[str, Any], data: FileBytes) -> None:
        if isinstance(data, StoredFile):
            self._connection.send_bytes(json.dumps(order | {"size": len(data)}).encode())
            send_handle(self._connection, data.fd, self.pid)
        else:
            self._connection.send_bytes(json.dumps(order).encode())
            self._connection.send_bytes(data)

    def _give_up(self) -> None:
        self._late = True
        self._process.kill()

    def _end(self, what: str, seconds: int) -> MPICError:
        """Return the error that explains the death of this worker while it decoded ``what`` within ``seconds`` of CPU
        time."""
        self._connection.close()
        # it might only have closed its socket, or be about to end by itself
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(ENDING_SECONDS)
        self._process.kill()
        code = self._process.wait()
        log.warning("a process that decoded %s has ended with %s", what, code)
        if self._late:
            return Unavailable(f"{what} was not decoded within {WALL_SECONDS:g} s")
        if code == -signal.SIGXCPU:
            return TOO_COSTLY[what](
                f"{what} takes more than {seconds} s of computing to decode", param="file"
            )
        # parsers of documents in C++ and Rust end like this when they are refused memory
        if code == FULL or (what == DOCUMENT and code == -signal.SIGABRT):
            return TOO_COSTLY[what](
                f"{what} takes far more memory to decode than its size explains", param="file"
            )
        if -code in CRASHES:
            return INVALID[what](f"{what} cannot be decoded (the decoder crashed)", param="file")
        return OutOfMemory(f"the process that decoded {what} was ended, probably for lack of memory")

    def close(self) -> None:
        self._connection.close()
        self._process.kill()
        self._process.wait()


class WorkerPool:
    """The idle workers. The caller bounds how many workers there are at a time. Thread-safe.

    Attributes:
        started: number of workers that have been started so far.
    """

    def __init__(self) -> None:
        self.started = 0
        self._idle: list[WorkerProcess] = []
        self._lock = threading.Lock()
        self._reaper: threading.Timer | None = None
        atexit.register(self.close)

    @contextmanager
    def one(self) -> Iterator[WorkerProcess]:
        """Lend a worker to the caller alone. Raise OutOfMemory if none can be started."""
        worker = self._take()
        try:
            yield worker
        finally:
            self._put(worker)

    @property
    def pids(self) -> list[int]:
        """Return the process ids of the idle workers."""
        with self._lock:
            return [worker.pid for worker in self._idle]

    def close(self) -> None:
        """End the idle workers."""
        with self._lock:
            idle, self._idle = self._idle, []
            if self._reaper is not None:
                self._reaper.cancel()
                self._reaper = None
        for worker in idle:
            worker.close()

    def forget(self) -> None:
        """Forget the workers in a forked child; they belong to the process that started them."""
        self._lock, self._idle, self._reaper = threading.Lock(), [], None

    def _take(self) -> WorkerProcess:
        with self._lock:
            while self._idle:
                worker = self._idle.pop()
                if worker.alive:
                    return worker
                worker.close()
            self.started += 1
        with memory.as_errors():
            return WorkerProcess()

    def _put(self, worker: WorkerProcess) -> None:
        if not worker.alive:
            with suppress(OSError):
                worker.close()
            return
        try:
            with self._lock:
                self._idle.append(worker)
                if self._reaper is not None:
                    self._reaper.cancel()
                self._reaper = threading.Timer(IDLE_SECONDS, self.close)
                self._reaper.daemon = True
                self._reaper.start()
        except RuntimeError:  # there is no memory to start a thread, so nothing would end the worker later
            self.close()
