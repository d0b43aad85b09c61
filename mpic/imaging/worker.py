"""The program of a decoding process: it decodes images, clips and documents one by one, each within given limits of
memory and time.

The server's process sends an order (JSON) and then the file: its bytes or, if the order names a size, an open
descriptor, so that a large file is read here and nowhere else. A message to the server's process begins with a letter:
``s`` the size of an image (JSON), ``p`` a strip of its pixels (RGB), ``f`` a frame of a clip (RGB), ``t`` the text of a
page and, at the end, ``r`` the result (JSON), ``b`` the result (bytes), ``e`` an error (JSON) or ``c`` a
``HeaderMismatch``. Nothing that comes back is ever unpickled: whatever a hostile file makes a decoder send is data.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import resource
import signal
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from typing import Any

from mpic.errors import DocumentTooCostly, ImageTooCostly, MPICError, OutOfMemory, VideoTooCostly
from mpic.imaging import pixels
from mpic.imaging.stored_file import FileBytes, StoredFile

IMAGE, CLIP, DOCUMENT = "the image", "the clip", "the document"
"""Subject of an order -> how error messages name it."""
FULL = 28
"""Exit status of a process whose memory a document has filled."""
TOO_COSTLY = {IMAGE: ImageTooCostly, CLIP: VideoTooCostly, DOCUMENT: DocumentTooCostly}

NO_MEMORY = OutOfMemory.code, "the server does not have enough memory to decode the file now"


def main(fd: int) -> None:
    """Serve the socket ``fd`` until the other end is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the server, which then closes the socket
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    connection, base, ready = Connection(fd), _address_space(), False
    with suppress(EOFError, ConnectionError):
        while True:
            order = json.loads(connection.recv_bytes())
            data = _file(connection, order)
            if order["what"] == CLIP and not ready:
                base, ready = _with_libraries(), True
            if _bound(base, order["memory"], order["seconds"]):
                refusal = _serve(connection, order, data)
            else:
                refusal = NO_MEMORY
            if isinstance(data, StoredFile):
                os.close(data.fd)
            del data
            _tidy()
            if refusal is not None:
                connection.send_bytes(b"e" + json.dumps(refusal).encode())


def _file(connection: Connection, order: dict[str, Any]) -> FileBytes:
    if "size" in order:
        return StoredFile(recv_handle(connection), order["size"])
    return connection.recv_bytes()


def _serve(connection: Connection, order: dict[str, Any], data: FileBytes) -> tuple[str, str] | None:
    """Send the reply, or return the code and the message of the error to report."""
    refusal, last = None, b""
    try:
        last = _answer(connection, order, data)
    except pixels.HeaderMismatch:
        last = b"c"
    except MPICError as error:
        refusal = error.code, error.message
    if isinstance(data, StoredFile) and data.fault is not None:  # whatever error the decoder made of it
        return data.fault.code, data.fault.message
    if refusal is None:
        connection.send_bytes(last)
    if refusal is not None and refusal[0] == OutOfMemory.code and _available(order["memory"] * 3 // 4):
        # the decoder's memory is free again, so there was enough of it
        what = order["what"]
        return TOO_COSTLY[what].code, f"{what} takes far more memory to decode than its size explains"
    return refusal


def _answer(connection: Connection, order: dict[str, Any], data: FileBytes) -> bytes:
    """Send all of the reply except its last message, and return the last message."""
    if order["what"] == CLIP:
        return _answer_clip(connection, order, data)
    if order["what"] == DOCUMENT:
        return _answer_document(connection, order, data)
    rules = pixels.ImageRules(*order["rules"])
    if order["do"] == "identify":
        return b"r" + json.dumps(pixels.identify(data, rules)).encode()
    if order["do"] == "thumbnail":
        return b"b" + pixels.thumbnail(data, rules, **order["options"])
    with pixels.opened(data, rules) as upright:
        connection.send_bytes(b"s" + json.dumps(upright.size).encode())
        for strip in upright.strips():
            connection.send_bytes(b"p" + strip.tobytes())
    return b"rnull"


def _answer_clip(connection: Connection, order: dict[str, Any], data: FileBytes) -> bytes:
    from mpic.imaging import clips

    rules = clips.ClipRules(*order["rules"])
    if order["do"] == "facts":
        return b"r" + json.dumps(clips.facts(data, rules)).encode()
    for frame in clips.frames(data, rules, **order["options"]):
        connection.send_bytes(b"f" + frame)
    return b"rnull"


def _answer_document(connection: Connection, order: dict[str, Any], data: FileBytes) -> bytes:
    from mpic.imaging import documents

    try:
        document = documents.read(data, documents.DocumentRules(*order["rules"]))
        for page in document.pages:
            connection.send_bytes(b"t" + page.encode())
    except MemoryError:
        os._exit(FULL)  # the parser's objects fill the memory, so that not even an error could be built
    return b"r" + json.dumps(document.format).encode()


def _with_libraries() -> int:
    """Load the libraries that decode clips, which take address space of their own, and return the size of the address
    space."""
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (hard, hard))  # the limit set for the last image
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    from mpic.imaging import clip_readers

    clip_readers.load()
    return _address_space()


def _bound(base: int, memory: int, seconds: int) -> bool:
    """Limit this process to ``memory`` bytes beyond those it began with, and to ``seconds`` of computing time from
    now. Return False if the memory limit that the server itself was started with allows less."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    spent = int(used.ru_utime + used.ru_stime) + 1
    with suppress(ValueError):  # a lower hard limit still applies
        resource.setrlimit(resource.RLIMIT_CPU, (spent + seconds, hard))
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    if hard != resource.RLIM_INFINITY and hard < base + memory:
        return False
    if base:
        resource.setrlimit(resource.RLIMIT_AS, (base + memory, hard))
    return True


def _available(size: int) -> bool:
    """Return whether that much memory can still be allocated; if so, it was the image that took more than its share."""
    try:
        mmap.mmap(-1, size).close()
    except (OSError, MemoryError):
        return False
    return True


def _address_space() -> int:
    """Return the size of the address space in bytes; 0 if the system neither reports nor bounds it."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def _tidy() -> None:
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
