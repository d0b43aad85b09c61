"""The decoder: images are decoded within budgets of bytes, places and processes."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from engine_kit import until
from odd_images import EXIF_BOMBS, flat_png, many_scans, photo, saved, two_headers
from threads_kit import started

from mpic.errors import DecoderBusy, ImageTooCostly, ImageTooLarge, OutOfMemory
from mpic.imaging import decoder as decoder_module
from mpic.imaging import worker_pool
from mpic.imaging.budget import Budget, on_behalf_of
from mpic.imaging.decoder import Decoder
from mpic.imaging.image_header import read_header
from mpic.imaging.pixels import ImageRules

RULES = ImageRules(40_000_000, 200.0)
BUDGET = 1 << 30
LARGE = [flat_png(1700, 20 * seed) for seed in range(6)]  # 2.9 million pixels


@pytest.fixture
def decoder():
    made = Decoder(workers=2)
    yield made
    made.workers.close()


def test_a_forked_process_leaves_the_workers_to_the_one_that_started_them():
    shared = decoder_module.decoder()
    shared.identify(LARGE[0], RULES, BUDGET)
    assert (pids := shared.workers.pids)
    child = os.fork()
    if child == 0:
        os._exit(len(decoder_module.decoder().workers.pids))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert shared.workers.pids == pids


def test_a_small_image_is_decoded_here_and_starts_no_process(decoder):
    assert decoder.identify(saved(photo(), "PNG"), RULES, BUDGET)[:2] == (61, 43)
    assert decoder.workers.started == 0
    assert (decoder.in_process.most_running, decoder.in_process.bytes) == (1, 0)


def test_a_large_image_is_decoded_in_a_process_that_serves_the_next_too(decoder):
    first = decoder.identify(LARGE[0], RULES, BUDGET)
    [pid] = decoder.workers.pids
    assert decoder.decode(LARGE[0], RULES, BUDGET).size == (first.width, first.height) == (1700, 1700)
    assert decoder.workers.pids == [pid] and decoder.workers.started == 1
    assert decoder.in_process.most_running == 0


def test_too_many_pixels_are_refused_without_a_process(decoder):
    with pytest.raises(ImageTooLarge, match="1700x1700"):
        decoder.identify(LARGE[0], RULES._replace(pixels=1_000_000), BUDGET)
    assert decoder.workers.started == 0


def test_images_that_come_together_stay_within_bytes_and_places(decoder):
    needed = max(read_header(data).bytes_needed(3 * len(data), RULES.pixels) for data in LARGE)
    with ThreadPoolExecutor(6) as threads:
        found = list(threads.map(lambda data: decoder.identify(data, RULES, BUDGET), LARGE))
    assert len({one.digest for one in found}) == 6
    assert decoder.in_workers.most_running == 2 and needed < decoder.in_workers.most_bytes <= 2 * needed
    assert decoder.workers.started == 2
    tight = Decoder(workers=4)
    with ThreadPoolExecutor(6) as threads:
        list(threads.map(lambda data: tight.identify(data, RULES, needed * 4 // 3 + 10), LARGE))
    assert tight.in_workers.most_running == 1 and tight.in_workers.most_bytes <= needed + 10
    tight.workers.close()


def test_an_image_larger_than_the_budget_is_decoded_alone(decoder):
    assert decoder.identify(LARGE[0], RULES, 1000).width == 1700
    assert decoder.in_workers.most_bytes == 750


def test_callers_are_served_in_order_so_small_images_do_not_overtake_a_large_one_for_ever():
    budget, order = Budget(most=2, most_waiting=9), []

    def take(name, size, hold):
        with budget.taken(size, 100):
            order.append(name)
            hold.wait(60)

    holds = [threading.Event() for _ in range(3)]
    threads = []
    for i, size in enumerate((60, 95, 10)):
        threads.append(started(take, i, size, holds[i]))
        until(lambda i=i: len(order) + budget.waiting == i + 1)
    assert order == [0]  # the third would fit beside the first, but the second came before
    for i, hold in enumerate(holds):
        hold.set()
        threads[i].join(60)
    assert order == [0, 1, 2] and budget.bytes == budget.running == 0


def test_when_too_many_wait_more_are_refused_but_not_the_engines_own():
    budget, release = Budget(most=1, most_waiting=4), threading.Event()

    def hold(patient=False):
        with budget.taken(1, 10, patient):
            release.wait(60)

    threads = [started(hold) for _ in range(3)]
    until(lambda: budget.waiting == 2)
    with pytest.raises(DecoderBusy, check=lambda error: error.status == 429 and error.retry_after > 0):
        hold()
    threads.append(started(hold, True))
    until(lambda: budget.waiting == 3)
    release.set()
    for thread in threads:
        thread.join(60)
    assert budget.running == 0


def test_users_take_turns_and_none_fills_the_line():
    budget, release = Budget(most=1, most_waiting=16), threading.Event()
    order, refused = [], []

    def take(user):
        try:
            with on_behalf_of(user), budget.taken(1, 10):
                release.wait(60)
                order.append(user)
        except DecoderBusy:
            refused.append(user)

    threads = []
    for user in (*["mallory"] * 40, "alice", "bob", "alice"):
        threads.append(started(take, user))
        until(lambda: budget.running + budget.waiting + len(refused) == len(threads))
    assert refused == ["mallory"] * 31 and budget.waiting == 8 + 3
    release.set()
    for thread in threads:
        thread.join(60)
    assert order[:6] == ["mallory", "alice", "bob", "mallory", "alice", "mallory"]
    assert not (budget._line or budget._inside or budget._turns or budget.running)


@pytest.mark.parametrize(("size", "scans"), [((900, 900), 300), ((6000, 5000), 60)])
def test_a_jpeg_of_more_scans_than_any_picture_has_is_refused_before_it_is_decoded(size, scans, decoder):
    with pytest.raises(ImageTooCostly, match="ordinary JPEG", check=lambda error: error.param == "file"):
        decoder.identify(many_scans(size, scans), RULES, BUDGET)
    assert decoder.workers.started == decoder.in_process.most_running == 0


def test_scans_are_counted_in_the_first_image_of_a_file_only_and_not_in_its_data():
    plain = saved(photo((300, 200)), "JPEG", progressive=True)
    scans = read_header(plain).scans
    assert 5 < scans < 16
    assert read_header(plain + plain * 60 + b"\xff\xda" * 999).scans == scans
    comment = b"\xff\xfe\x03\xea" + b"\xff\xda" * 500
    assert read_header(plain[:2] + comment + plain[2:]).scans == scans
    last = plain.rindex(b"\xff\xda")
    assert read_header(plain[:last] + comment + plain[last:]).scans == scans
    assert read_header(many_scans((50, 40), 200)).scans > 200


def test_a_process_that_is_killed_is_a_passing_error_and_replaced(decoder, monkeypatch):
    decoder.identify(LARGE[0], RULES, BUDGET)
    [pid] = decoder.workers.pids
    os.kill(pid, signal.SIGKILL)
    until(lambda: psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    assert decoder.identify(LARGE[0], RULES, BUDGET).width == 1700  # it was idle: nobody notices
    [pid] = decoder.workers.pids
    real = worker_pool.WorkerProcess.run

    def killed(self, order, data):
        os.kill(self.pid, signal.SIGKILL)
        return real(self, order, data)

    monkeypatch.setattr(worker_pool.WorkerProcess, "run", killed)
    with pytest.raises(OutOfMemory, check=lambda error: (error.status, error.code) == (503, "out_of_memory")):
        decoder.identify(LARGE[0], RULES, BUDGET)
    monkeypatch.undo()
    assert decoder.identify(LARGE[0], RULES, BUDGET).width == 1700
    assert decoder.in_workers.running == 0 and not psutil.pid_exists(pid)


def test_an_image_whose_decoding_does_not_end_is_refused_by_its_own_code(decoder, monkeypatch):
    monkeypatch.setattr(decoder_module, "CPU_SECONDS", 0)
    endless = many_scans((2500, 1000), 20_000)
    monkeypatch.setattr("mpic.imaging.image_header.MOST_SCANS", 1 << 20)
    monkeypatch.setattr("mpic.imaging.image_header.SCANNED_PIXELS", 1 << 40)
    began = time.process_time()
    with pytest.raises(ImageTooCostly) as error:
        decoder.identify(endless, RULES, BUDGET)
    assert (error.value.status, error.value.code) == (413, "image_too_costly")
    assert time.process_time() - began < 1  # the peak of this process
    monkeypatch.undo()
    assert decoder.identify(LARGE[0], RULES, BUDGET).width == 1700


def test_a_process_that_hangs_is_ended(decoder, monkeypatch):
    monkeypatch.setattr(worker_pool, "WALL_SECONDS", 0.5)
    real = worker_pool.WorkerProcess.run

    def stopped(self, order, data):
        os.kill(self.pid, signal.SIGSTOP)
        return real(self, order, data)

    monkeypatch.setattr(worker_pool.WorkerProcess, "run", stopped)
    with pytest.raises(Exception, match="within") as error:
        decoder.identify(LARGE[0], RULES, BUDGET)
    assert error.value.status == 503 and decoder.workers.pids == []


def test_a_decoder_that_takes_more_memory_than_was_set_aside_ends_its_own_image_only(decoder, monkeypatch):
    # 61 pixels wide; in the server's own process they would take 2.8 GB and 0.3 GB
    for name in ("PNG", "JPEG"):
        with pytest.raises(ImageTooCostly, match="memory"):
            decoder.identify(EXIF_BOMBS[name], RULES, BUDGET)
    assert decoder.identify(EXIF_BOMBS["MPO"], RULES, BUDGET).width == 61  # Pillow goes on without its index
    assert decoder.in_process.most_running == 0
    monkeypatch.setattr(decoder_module, "MARGIN", -(60 << 20))
    with pytest.raises((ImageTooCostly, OutOfMemory)):
        decoder.identify(flat_png(3000), RULES, BUDGET)
    monkeypatch.undo()
    assert decoder.identify(flat_png(3000), RULES, BUDGET).width == 3000


def test_a_memory_limit_of_the_server_is_not_blamed_on_the_image():
    """A worker that may not take what an image needs says so before it tries."""
    script = """
        import resource
        from odd_images import flat_png
        from mpic.errors import MPICError
        from mpic.imaging.decoder import Decoder
        from mpic.imaging.pixels import ImageRules
        resource.setrlimit(resource.RLIMIT_AS, (300 << 20, 300 << 20))
        decoder = Decoder(workers=1)
        for side in (6000, 1700):
            try:
                print(decoder.identify(flat_png(side), ImageRules(40_000_000, 200.0), 1 << 30).width)
            except MPICError as error:
                print(error.code)
    """
    assert run(script).stdout.split() == ["out_of_memory", "1700"]


def test_a_file_with_more_pixels_than_its_header_is_decoded_in_a_worker(decoder):
    assert decoder.identify(two_headers(), RULES, BUDGET).width == 3000
    assert decoder.in_workers.most_bytes > 4 * 3000 * 3000


def test_idle_processes_end(decoder, monkeypatch):
    decoder.identify(LARGE[0], RULES, BUDGET)
    [pid] = decoder.workers.pids
    monkeypatch.setattr(worker_pool, "IDLE_SECONDS", 1.0)
    decoder.identify(LARGE[0], RULES, BUDGET)
    until(lambda: decoder.workers.pids == [] and not psutil.pid_exists(pid))


def run(script, *args):
    """Run a script as a process and return its output."""
    command = [sys.executable, "-c", textwrap.dedent(script), *map(str, args)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    return subprocess.run(command, capture_output=True, text=True, env=environment)


def ended(pid):
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_processes_end_with_the_one_that_started_them(tmp_path):
    path = tmp_path / "large.png"
    path.write_bytes(LARGE[0])
    script = """
        import os, signal, sys
        from mpic.imaging.decoder import decoder
        from mpic.imaging.pixels import ImageRules
        decoder().identify(open(sys.argv[1], "rb").read(), ImageRules(40_000_000, 200.0), 1 << 30)
        print(decoder().workers.pids[0], flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    done = run(script, path)
    assert done.returncode == -signal.SIGKILL
    pid = int(done.stdout)
    until(lambda: ended(pid))


def test_eight_large_images_at_once_take_the_memory_of_two_and_it_is_given_back(tmp_path):
    """The margins are wide: all at once and in one piece the images would take 900 MB."""
    path = tmp_path / "large.png"
    path.write_bytes(flat_png(2600))  # 7 million pixels, 27 MB in Pillow
    script = """
        import sys, threading, time, psutil
        from concurrent.futures import ThreadPoolExecutor
        from mpic.imaging.decoder import Decoder
        from mpic.imaging.pixels import ImageRules
        data, rules = open(sys.argv[1], "rb").read(), ImageRules(40_000_000, 200.0)
        me, decoder, peak, done = psutil.Process(), Decoder(workers=2), 0, threading.Event()

        def total():
            found = me.memory_info().rss
            for child in me.children():
                try:
                    found += child.memory_info().rss
                except psutil.Error:
                    pass
            return found

        def watch():
            global peak
            while not done.is_set():
                peak = max(peak, total())
                time.sleep(0.005)

        decoder.identify(data, rules, 1 << 30)
        before = total()
        watcher = threading.Thread(target=watch)
        watcher.start()
        with ThreadPoolExecutor(8) as threads:
            list(threads.map(lambda i: decoder.identify(data, rules, 1 << 30), range(8)))
        done.set()
        watcher.join()
        decoder.workers.close()
        print((peak - before) >> 20, (me.memory_info().rss - before) >> 20)
    """
    done = run(script, path)
    peak, later = map(int, done.stdout.split())
    assert peak < 200 and later < 30, done.stderr
