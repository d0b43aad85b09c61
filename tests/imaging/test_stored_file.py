"""Large files are decoded from their descriptor: as their bytes would be, and no fault of the disk is theirs."""

import os
import random
from unittest.mock import Mock

import pytest
from document_kit import docx, pdf
from odd_images import FILES as IMAGES
from odd_images import many_scans, photo, saved
from PIL import Image
from video_kit import RULES as CLIPS
from video_kit import animation, movie, pictures

from mpic.errors import ImageTooCostly, MPICError, StorageFailed
from mpic.imaging import image_header, stored_file, worker_pool
from mpic.imaging.clip_header import is_animated, is_fragmented, movie_seconds
from mpic.imaging.documents import DocumentRules
from mpic.imaging.image_header import MOST_SCANS, read_header
from mpic.imaging.pixels import ImageRules
from mpic.imaging.stored_file import StoredFile
from mpic.kv.chunk import ChunkKey

RULES, PAGES, BUDGET = ImageRules(40_000_000, 200.0), DocumentRules(100, 1 << 20), 1 << 30
NOISE = saved(Image.frombytes("RGB", (900, 700), random.Random(1).randbytes(900 * 700 * 3)), "PNG")
FILES = IMAGES | {
    f"animated {format}": animation(pictures(1, 5), format=format) for format in ("GIF", "WEBP", "PNG")
}


@pytest.fixture
def store(tmp_path):
    """Return a function that writes bytes to a file and opens it."""
    opened = []

    def one(data):
        path = tmp_path / f"{len(opened)}"
        path.write_bytes(data)
        opened.append(os.open(path, os.O_RDONLY))
        return StoredFile(opened[-1], len(data))

    yield one
    for fd in opened:
        os.close(fd)


def outcome(call, *args):
    try:
        return call(*args)
    except MPICError as error:
        return error.code, error.message


@pytest.fixture
def small_windows(monkeypatch):
    monkeypatch.setattr(stored_file, "WINDOW", 16)
    monkeypatch.setattr(stored_file, "PIECE", 40)
    monkeypatch.setattr(image_header, "WINDOW", 16)


def test_a_file_is_sliced_as_its_bytes_are(store, small_windows):
    data = random.Random(2).randbytes(200)
    file, edges = store(data), [None, *range(-210, 211, 7)]
    assert len(file) == 200 and b"".join(file.pieces()) == file[:] == data
    for begin in edges:
        assert all(file[begin:end] == data[begin:end] for end in edges)
    assert [file[at] for at in range(-200, 200)] == [data[at] for at in range(-200, 200)]
    with pytest.raises(IndexError):
        file[200]
    assert file.startswith((b"x", data[:5])) and not file.startswith(b"x")


@pytest.mark.parametrize("name", FILES)
def test_headers_are_read_through_windows_as_from_all_bytes(store, small_windows, name):
    data = FILES[name]
    for look in (read_header, is_animated, is_fragmented, movie_seconds, ChunkKey.of_clip):
        assert look(store(data)) == look(data)


def test_a_marker_on_the_edge_of_a_window_is_found(store, small_windows):
    data = many_scans((50, 40), 3)
    for before in range(40):
        shifted = data[:2] + b"\xff" * before + data[2:]
        assert read_header(store(shifted)) == read_header(shifted) == read_header(data)


def test_a_jpeg_of_markers_without_end_is_refused_after_a_bounded_number_of_steps(monkeypatch, decoder):
    steps = Mock(wraps=image_header._marker)
    monkeypatch.setattr(image_header, "_marker", steps)
    data = saved(photo(), "JPEG", progressive=True)
    at = data.rindex(b"\xff\xda")
    with pytest.raises(ImageTooCostly):
        decoder.identify(data[:at] + b"\xff\xfe\0\2" * 100_000 + data[at:], RULES, BUDGET)
    assert steps.call_count <= image_header.SCAN_MARKERS * MOST_SCANS


@pytest.mark.parametrize("name", FILES)
def test_a_worker_makes_of_a_descriptor_what_it_makes_of_bytes(store, decoder, name):
    data = FILES[name] + b"\0" * 1000
    away = [
        outcome(decoder._run_in_worker, "identify", file, RULES, BUDGET, read_header(data), {})
        for file in (data, store(data))
    ]
    assert away[0] == away[1]


@pytest.mark.parametrize("format", ["GIF", "WEBP", "PNG", "mp4", "avi", "webm"])
def test_clips_are_decoded_from_a_descriptor(store, decoder, tmp_path, format):
    frames = pictures(3, 12, 64, 48)
    codes = {"mp4": "mp4v", "avi": "MJPG", "webm": "VP80"}
    data = (
        movie(frames, tmp_path, 10.0, codes[format], format)
        if format in codes
        else animation(frames, format=format)
    )
    clip, stored = (decoder.clip(one, CLIPS, BUDGET, lambda facts: (0, 7)) for one in (data, store(data)))
    assert clip.facts == stored.facts and (clip.frames == stored.frames).all()


@pytest.mark.parametrize("data", [pdf(["one", "two"]), docx(["words"])], ids=["pdf", "docx"])
def test_documents_are_read_from_a_descriptor(store, decoder, data):
    assert decoder.document(store(data), PAGES, BUDGET) == decoder.document(data, PAGES, BUDGET)


def work(decoder, file, what):
    if what == "image":
        return decoder._run_in_worker("identify", file, RULES, BUDGET, read_header(NOISE), {})
    if what == "clip":
        return decoder.clip_facts(file, CLIPS, BUDGET)
    return decoder.document(file, PAGES, BUDGET)


CONTENT = {"image": NOISE, "clip": animation(pictures(4, 60, 320, 240)), "document": docx(["x" * 500_000])}


@pytest.mark.parametrize("what", CONTENT)
def test_a_disk_that_fails_while_a_worker_reads_is_not_the_files_fault(store, decoder, what):
    data = CONTENT[what]
    there = store(data)
    work(decoder, there, what)
    workers = decoder.workers.pids
    with open("/proc/self/mem", "rb") as unreadable:  # of which the first page gives EIO
        file = StoredFile(unreadable.fileno(), len(data), lambda size, at: os.pread(there.fd, size, at))
        with pytest.raises(
            StorageFailed, match="Input/output error", check=lambda error: error.param is None
        ):
            work(decoder, file, what)
    work(decoder, there, what)
    assert decoder.workers.pids == workers


@pytest.mark.parametrize("what", CONTENT)
def test_a_file_that_becomes_shorter_while_a_worker_reads_is_not_called_invalid(
    store, decoder, monkeypatch, what
):
    file = store(CONTENT[what])
    run = worker_pool.WorkerProcess.run

    def shortened(*args):
        os.truncate(f"/proc/self/fd/{file.fd}", len(file) // 2)
        return run(*args)

    monkeypatch.setattr(worker_pool.WorkerProcess, "run", shortened)
    with pytest.raises(StorageFailed, match="became shorter"):
        work(decoder, file, what)


def test_a_file_that_is_cut_off_in_itself_stays_invalid(store, decoder):
    whole = outcome(decoder.identify, NOISE[: len(NOISE) // 2], RULES, BUDGET)
    assert whole[0] == "invalid_image"
    assert outcome(work, decoder, store(NOISE[: len(NOISE) // 2]), "image") == whole


def test_files_that_are_decoded_as_they_are_read_take_no_memory_for_their_bytes(store, decoder):
    """So that eight of them need not wait for each other."""
    taken, gif = decoder.in_workers, CONTENT["clip"]
    jpeg = saved(photo((2000, 1500)), "JPEG")
    for data, decode in (
        (jpeg, lambda file: decoder.identify(file, RULES, 1 << 40)),
        (gif, lambda file: decoder.clip_facts(file, CLIPS, 1 << 40)),
    ):
        needed = []
        for file in (data, store(data.ljust(5 << 20, b"\0")), store(data.ljust(40 << 20, b"\0"))):
            taken.most_bytes = 0
            decode(file)
            needed.append(taken.most_bytes)
        assert needed[0] > needed[1] == needed[2]
