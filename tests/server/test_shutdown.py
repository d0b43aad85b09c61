"""The process ends in time, whatever a thread does, and loses nothing that it has acknowledged."""

import asyncio
import json
import os
import resource
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest
from anyio import to_thread
from server_helpers import fake_server

from mpic.library import Library
from mpic.library.upkeep import check
from mpic.server import shutdown
from mpic.server.descriptors import RESERVE

TESTS = Path(__file__).parents[1]
PATIENCE = 120  # seconds, for a machine that is busy; nothing here should take more than a few

WATCHED = """
import ctypes, importlib.util, logging, signal, sys, threading, time
spec = importlib.util.spec_from_file_location("shutdown", sys.argv[1])
shutdown = importlib.util.module_from_spec(spec)
spec.loader.exec_module(shutdown)
logging.basicConfig()
timer = shutdown.ShutdownTimer(float(sys.argv[2]), float(sys.argv[3]))
for one in (signal.SIGTERM, signal.SIGINT):
    signal.signal(one, lambda *_: timer.signalled())
block = lambda: open(sys.argv[4])
print("ready", flush=True)
"""
DESCRIPTORS = 400
ARMED = """
import faulthandler
armed, dump_later = threading.Event(), faulthandler.dump_traceback_later
faulthandler.dump_traceback_later = lambda *args, **options: (dump_later(*args, **options), armed.set())
"""
BLOCKED = {
    "the event loop waits for a file": "block()",
    "the main thread computes": "while True: pass",
    "a thread holds the lock of the log": "logging.getLogger().handlers[0].acquire(); block()",
    "the interpreter waits for a thread at its exit": "threading.Thread(target=block).start(); time.sleep(0.2)",
}


@contextmanager
def process(*command, log=subprocess.PIPE):
    """Start processes, and end them even if a test fails."""
    pipe = subprocess.PIPE
    one = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=log, text=True)
    try:
        yield one
    finally:
        one.kill()
        one.wait()
        one.stdin.close()
        one.stdout.close()
        if one.stderr:
            one.stderr.close()


@pytest.fixture
def fifo(tmp_path):
    """A file whose reader waits for ever."""
    os.mkfifo(tmp_path / "fifo")
    return tmp_path / "fifo"


@contextmanager
def watched(fifo, body, grace=0.2, closing=0.3):
    """A process with a shutdown timer."""
    times = str(grace), str(closing)
    with process(sys.executable, "-c", WATCHED + body, shutdown.__file__, *times, str(fifo)) as one:
        assert one.stdout.readline() == "ready\n"
        yield one


@pytest.mark.parametrize("where", BLOCKED)
def test_the_shutdown_timer_ends_a_process_in_which(fifo, where):
    with watched(fifo, BLOCKED[where]) as one:
        time.sleep(0.3)
        one.send_signal(signal.SIGTERM)
        assert one.wait(PATIENCE) == shutdown.FORCED
        if "log" not in where:
            assert "thread MainThread: " in one.stderr.read()


def test_the_shutdown_timer_needs_no_lock_of_the_interpreter(fifo):
    """A thread holds that lock for ever after the signal; then a timer in C ends the process."""
    with watched(fifo, ARMED + "timer.signalled(); armed.wait(); ctypes.PyDLL(None).sleep(1000)") as one:
        assert one.wait(PATIENCE) == 1
        assert "Timeout" in one.stderr.read()


def test_a_second_signal_ends_the_grace(fifo):
    with watched(fifo, "block()", grace=1000) as one:
        for number in (signal.SIGTERM, signal.SIGINT):
            one.send_signal(number)
            time.sleep(0.2)
        assert one.wait(PATIENCE) == shutdown.FORCED


@pytest.mark.parametrize("reader", ["is blocked", "has gone"])
def test_nobody_has_to_read_the_last_words_for_the_process_to_end(fifo, reader):
    full = "import os; os.set_blocking(2, False)\ntry:\n    while True: os.write(2, b'x' * 512)\n"
    full += "except BlockingIOError: os.set_blocking(2, True)\n"
    with watched(fifo, f"{full if reader == 'is blocked' else ''}input(); timer.signalled(); block()") as one:
        if reader == "has gone":
            one.stderr.close()
        one.stdin.write("go on\n")
        one.stdin.flush()
        assert one.wait(PATIENCE) == shutdown.FORCED


def test_threads_left_after_an_orderly_end_are_not_a_failure(fifo):
    body = "threading.Thread(target=block, name='reader').start(); timer.signalled(); timer.closed()"
    with watched(fifo, body, grace=1000) as one:
        assert one.wait(PATIENCE) == 0
        assert "thread reader: " in one.stderr.read()


# ---- the whole server


async def test_requests_on_all_threads_do_not_keep_the_application_from_closing(tmp_path, template):
    running = fake_server(tmp_path, template)
    server = await running.__aenter__()
    go_on = threading.Event()
    threads = int(to_thread.current_default_thread_limiter().total_tokens)
    requests = [asyncio.create_task(to_thread.run_sync(go_on.wait)) for _ in range(threads)]
    await asyncio.sleep(0)
    try:
        await asyncio.wait_for(running.__aexit__(None, None, None), PATIENCE)
    finally:
        go_on.set()
        await asyncio.gather(*requests)
    assert server.engine.closed


@pytest.fixture(scope="module")
def whole(tmp_path_factory, tiny_model):
    """(process, url, folder) of a server with few descriptors, whose engine blocks when there is a FIFO in its folder;
    the last test ends it."""
    folder = tmp_path_factory.mktemp("whole")
    limited = f'ulimit -Sn 200 && ulimit -Hn {DESCRIPTORS} && exec "$@"'
    command = ["/bin/sh", "-c", limited, "sh", sys.executable, TESTS / "stuck_server.py", folder / "fifo"]
    command += shlex.split(f"--json --port 0 --data-dir {folder / 'data'} --model {tiny_model}")
    command += shlex.split(f"--log-level warning --pool-bytes {64 * 12_288} --header-seconds 60")
    command += shlex.split("--grace-seconds 0.5 --closing-seconds 1")
    with (folder / "log").open("wb") as log, process(*command, log=log) as one:
        line = one.stdout.readline()
        assert line, (folder / "log").read_text()
        yield one, json.loads(line)["url"], folder


def upload(url, number):
    files = {"file": ("a.txt", f"Text number {number}.".encode())}
    made = httpx.post(f"{url}/v1/files", data={"purpose": "user_data"}, files=files, timeout=PATIENCE)
    assert made.status_code == 200, made.text
    return made.json()["id"]


def test_the_limit_of_open_files_is_raised_and_shown(whole):
    one, _, folder = whole
    assert resource.prlimit(one.pid, resource.RLIMIT_NOFILE) == (DESCRIPTORS, DESCRIPTORS)
    assert f"may open {DESCRIPTORS} files, so at most" in (folder / "log").read_text()


def test_more_half_sent_headers_than_descriptors_do_not_exclude_other_clients(whole):
    one, url, _ = whole
    flood, address = [], ("127.0.0.1", httpx.URL(url).port)
    for i in range(DESCRIPTORS + 50):
        flood.append(socket.create_connection(address, source_address=(f"127.0.0.{2 + i % 5}", 0)))
        flood[-1].sendall(b"GET /v1/models HTTP/1.1\r\nHost: 127.0.0.1\r\n")
    assert psutil.Process(one.pid).num_fds() < DESCRIPTORS - RESERVE // 2
    assert httpx.get(f"{url}/v1/models", timeout=PATIENCE).status_code == 200
    upload(url, 1)
    for sock in flood:
        sock.close()


def test_a_server_that_had_no_descriptor_left_accepts_again(whole):
    one, url, _ = whole
    resource.prlimit(one.pid, resource.RLIMIT_NOFILE, (3, DESCRIPTORS))
    with pytest.raises(httpx.HTTPError):
        httpx.get(f"{url}/health/live", timeout=1)
    resource.prlimit(one.pid, resource.RLIMIT_NOFILE, (DESCRIPTORS, DESCRIPTORS))
    assert httpx.get(f"{url}/health/live", timeout=PATIENCE).status_code == 200


def test_a_server_whose_engine_never_returns_ends_by_force_and_loses_nothing(whole):
    one, url, folder = whole
    os.mkfifo(folder / "fifo")
    ids = [upload(url, number) for number in range(2, 6)]
    one.terminate()
    code, told = one.wait(PATIENCE), (folder / "log").read_text()
    assert code == shutdown.FORCED, told
    assert "ends by force" in told and "thread mpic-engine: " in told and "stuck_server.py" in told
    with Library.open(folder / "data") as library:
        assert check(library) == []
        assert set(ids) <= {file.id for file in library.files.page("local").files}
        for number, id in enumerate(ids, 2):
            assert library.files.content("local", id) == f"Text number {number}.".encode()
