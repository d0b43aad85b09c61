"""Clips are decoded within bounds, in a process of their own; what a header says is not believed."""

from __future__ import annotations

import io
import socket
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from threads_kit import started
from video_kit import RULES, animation, movie, pictures

from mpic.errors import InvalidVideo, MPICError, NoVideoDecoder, VideoTooCostly, VideoTooLarge
from mpic.imaging import clip_readers, clips
from mpic.imaging import decoder as decoder_module
from mpic.imaging.clip_header import MOST_PARTS, container, is_animated, is_fragmented, movie_seconds
from mpic.imaging.clips import ClipFacts
from mpic.imaging.worker_pool import CLIP

BUDGET = 1 << 30
FRAMES = pictures(3, 7)


@pytest.mark.parametrize("format", ["GIF", "WEBP", "PNG"])
def test_an_animated_image_has_its_frames_and_their_rate(decoder, format):
    clip = decoder.clip(animation(FRAMES, 200, format), RULES, BUDGET, lambda facts: (0, 3, 6))
    assert clip.facts == ClipFacts(40, 32, 7, 5.0) and clip.indices == (0, 3, 6)
    assert np.array_equal(clip.frames, np.stack([np.asarray(FRAMES[i]) for i in (0, 3, 6)]))


@pytest.mark.parametrize(
    "code, suffix", [("mp4v", "mp4"), ("MJPG", "avi"), ("VP80", "webm"), ("mp4v", "mkv")]
)
def test_a_video_has_its_frames_and_their_rate(decoder, tmp_path, code, suffix):
    frames = [Image.new("RGB", (64, 48), (k * 10, 0, 250 - k * 10)) for k in range(23)]
    clip = decoder.clip(movie(frames, tmp_path, 10.0, code, suffix), RULES, BUDGET, lambda facts: (0, 11, 22))
    assert clip.facts == ClipFacts(64, 48, 23, pytest.approx(10.0))
    for index, frame in zip(clip.indices, clip.frames):
        difference = frame.astype(int) - np.asarray(frames[index]).astype(int)
        assert np.abs(difference).max() < 24, "compression loses a little"


def test_frames_are_decoded_in_a_process_and_none_may_be_left_out(decoder):
    with pytest.raises(InvalidVideo, match="no frame 7"):
        decoder.clip(animation(FRAMES), RULES, BUDGET, lambda facts: (0, 7))
    assert decoder.in_process.most_running == 0


def test_a_frame_may_be_asked_for_twice(decoder):
    clip = decoder.clip(animation(FRAMES), RULES, BUDGET, lambda facts: (2, 2, 4))
    assert np.array_equal(clip.frames[0], clip.frames[1]) and len(clip.frames) == 3


def test_bounds_on_time_frames_and_pixels(decoder):
    data = animation(FRAMES, 1000)
    for rules, why in (
        (RULES._replace(seconds=6), "longer than 6 seconds"),
        (RULES._replace(frame_pixels=40 * 32 - 1), "40x32 pixels"),
        (RULES._replace(pixels=7 * 40 * 32 - 1), "send a shorter or a smaller one"),
    ):
        with pytest.raises(VideoTooLarge, match=why):
            decoder.clip(data, rules, BUDGET, lambda facts: range(facts.frames))
    with pytest.raises(InvalidVideo, match="too narrow"):
        decoder.clip_facts(data, RULES._replace(aspect=1.1), BUDGET)


def test_a_stream_without_end_is_given_up_by_its_length(monkeypatch):
    """Whatever its header says of time: frames are counted, too."""

    def endless(data):
        from contextlib import nullcontext

        shown = clip_readers.Shown(0.0, None, lambda: FRAMES[0])
        return nullcontext(clip_readers.ClipReader(40, 32, 25.0, 3, 0.0, iter(lambda: shown, None)))

    monkeypatch.setattr(clips, "reader", endless)
    with pytest.raises(VideoTooLarge, match="longer than 1 seconds"):
        clips.facts(b"", RULES._replace(seconds=1))


def test_times_of_frames_are_believed_over_a_header_that_gives_the_ticks_of_its_clock():
    assert clips._rate(1000.0, 29.9) == 29.9
    assert clips._rate(30.0, 29.9) == 30.0, "times are rounded"
    assert clips._rate(0.0, 0.0) == clips._rate(float("nan"), 0.0) == clips.USUAL_RATE


@pytest.mark.parametrize("cut", [0.3, 0.6, 0.9])
@pytest.mark.parametrize("suffix", ["gif", "mp4", "avi"])
def test_a_clip_that_is_cut_short_is_refused(decoder, tmp_path, suffix, cut):
    frames = pictures(4, 60)
    data = animation(frames) if suffix == "gif" else movie(frames, tmp_path, 10.0, "MJPG", suffix)
    with pytest.raises(InvalidVideo):
        decoder.clip(data[: int(len(data) * cut)], RULES, BUDGET, lambda facts: range(60))


def test_a_clip_whose_decoding_does_not_end_is_refused_by_its_own_code(decoder, monkeypatch):
    """One large and flat frame, again and again: some thousand bytes, and seconds of computing."""
    flat = [Image.new("L", (1200, 1200), colour) for colour in (0, 255)]
    data = animation(flat, 20)
    at = data.rfind(b"\x2c\0\0\0\0" + 2 * (1200).to_bytes(2, "little")) - 8  # the second frame
    assert data[at : at + 3] == b"\x21\xf9\x04"
    endless = data[:at] + 600 * data[at:-1] + data[-1:]
    monkeypatch.setattr(decoder_module, "CLIP_CPU_SECONDS", 0)
    with pytest.raises(VideoTooCostly) as error:
        decoder.clip_facts(endless, RULES, BUDGET)
    assert (error.value.status, error.value.code) == (413, "video_too_costly")
    monkeypatch.undo()
    assert decoder.clip_facts(animation(FRAMES), RULES, BUDGET).frames == 7
    assert decoder.in_workers.running == decoder.clips.running == 0


def test_noise_in_a_clip_ends_in_an_error_of_ours_or_in_frames(decoder, tmp_path):
    generator = np.random.default_rng(0)
    for number, data in enumerate((animation(FRAMES), movie(pictures(4, 60), tmp_path))):
        for _ in range(8):
            damaged = bytearray(data)
            for at in generator.integers(40, len(data), 30):
                damaged[at] = generator.integers(256)
            try:
                clip = decoder.clip(bytes(damaged), RULES, BUDGET, lambda facts: range(facts.frames))
            except MPICError as error:
                assert error.status in (400, 413), (number, error.code)
            else:
                assert len(clip.frames) == clip.facts.frames


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\0\0\0\x18ftypisom" + b"\0" * 40,
        b"\x1aE\xdf\xa3" + bytes(range(200)),
        b"RIFF\0\0\0\0AVI LIST",
        b"#EXTM3U\nhttp://localhost/a.ts",
    ],
)
def test_what_only_claims_to_be_a_clip_is_refused(decoder, data):
    with pytest.raises((InvalidVideo, NoVideoDecoder)):
        decoder.clip_facts(data, RULES, BUDGET)


def test_a_session_description_that_begins_as_matroska_opens_no_socket():
    """FFmpeg goes by all of the bytes, and would listen on the port that they name."""
    pytest.importorskip("cv2")
    port = 1
    while port % 2 or f":{port:04X} " in Path("/proc/net/udp").read_text():  # streams come on even ports
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
    lines = ("v=0", "o=- 0 0 IN IP4 127.0.0.1", "c=IN IP4 127.0.0.1", f"m=video {port} RTP/AVP 96", "")
    data = b"\x1aE\xdf\xa3\n" + "\n".join(lines).encode()
    refused: list[BaseException] = []

    def read():
        try:
            clips.facts(data, RULES)
        except InvalidVideo as error:
            refused.append(error)

    reading = started(read, daemon=True)
    while reading.is_alive():
        assert f":{port:04X} " not in Path("/proc/net/udp").read_text()
        time.sleep(0.01)
    assert refused


def boxed(data: bytes, kind: bytes, at: int, value: int) -> bytes:
    """An MP4 with four bytes of a box replaced."""
    begin = data.index(kind) + 4 + at
    return data[:begin] + value.to_bytes(4, "big") + data[begin + 4 :]


def test_frames_that_an_edit_leaves_out_are_not_missing(tmp_path):
    whole = movie(pictures(4, 40, 64, 48), tmp_path, 10.0)
    scale = int.from_bytes(whole[whole.index(b"mdhd") + 16 :][:4], "big")
    trimmed = boxed(boxed(boxed(whole, b"elst", 8, 2000), b"elst", 12, 2 * scale), b"mvhd", 16, 2000)
    assert (movie_seconds(whole), movie_seconds(trimmed)) == (4.0, 2.0)
    assert clips.facts(trimmed, RULES) == ClipFacts(64, 48, 20, pytest.approx(10.0))
    unsaid = boxed(trimmed, b"mvhd", 16, 4000)  # the file says that it is shown for four seconds
    with pytest.raises(InvalidVideo, match="20 of 40 frames"):
        clips.facts(unsaid, RULES)


def test_a_fragmented_file_is_not_asked_how_many_frames_it_has(tmp_path):
    whole = movie(pictures(4, 10, 64, 48), tmp_path, 10.0)
    assert not is_fragmented(whole) and is_fragmented(whole + b"\0\0\0\x08moof")
    with clip_readers.reader(whole + b"\0\0\0\x08moof") as fragments, clip_readers.reader(whole) as known:
        assert (fragments.claimed, known.claimed, known.length) == (0, 10, 1.0)


def test_frames_of_another_size_than_the_first_walk_had_are_refused_and_end_the_process(decoder, monkeypatch):
    """The rest of their frames would be read as the reply to the next order, of another user perhaps."""
    data = animation(FRAMES)
    order = {"do": "frames", "what": CLIP, "rules": RULES, "seconds": 9, "memory": 1 << 30}
    with decoder.workers.one() as worker:
        small = [memoryview(bytearray(3)) for _ in range(7)]
        with pytest.raises(InvalidVideo, match="change their size"):
            worker.run(order | {"options": {"indices": list(range(7)), "size": None}}, data, small)
        assert not worker.alive
    with decoder.workers.one() as worker:
        with pytest.raises(InvalidVideo, match="change their size"):
            worker.run(order | {"options": {"indices": (0,), "size": (1, 1)}}, data, small)
        assert worker.alive, "it has said so itself"
    assert decoder.clip(data, RULES, BUDGET, lambda facts: (0,)).facts.frames == 7


def test_a_still_image_is_no_clip(decoder):
    with pytest.raises(InvalidVideo, match="a still image is sent as an image"):
        decoder.clip_facts(animation(FRAMES[:1], format="PNG"), RULES, BUDGET)


def test_a_video_without_a_decoder_names_the_command_that_installs_one(monkeypatch):
    monkeypatch.setattr(clip_readers.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(NoVideoDecoder, match=r"pip install 'mpic\[video\]'"):
        clips.facts(b"\0\0\0\x18ftypisom" + b"\0" * 40, RULES)
    assert clips.facts(animation(FRAMES), RULES).frames == 7, "Pillow decodes these"


def test_an_old_decoder_is_refused_with_the_command_that_renews_it(monkeypatch):
    cv2 = pytest.importorskip("cv2")
    monkeypatch.setattr(cv2, "__version__", "4.9.0")
    with pytest.raises(NoVideoDecoder, match=r"OpenCV 4.9.0 is too old.*mpic\[video\]"):
        clips.facts(b"\0\0\0\x18ftypisom" + b"\0" * 40, RULES)


def test_a_clip_is_known_by_its_first_bytes():
    assert container(b"\0\0\0\x18ftypmp42") == container(b"\0\0\0\x18ftypqt  ") == "MP4 or QuickTime"
    assert container(b"\0\0\0\x18ftypavif") is None, "an image"
    for format in ("GIF", "WEBP", "PNG"):
        assert is_animated(animation(FRAMES, format=format))
        assert not is_animated(animation(FRAMES[:1], format=format))
    out = io.BytesIO()
    FRAMES[0].save(out, "JPEG")
    assert not is_animated(out.getvalue())
    assert not is_animated(b"GIF89a")
    assert not is_animated(b"\x89PNG\r\n\x1a\n")


def test_an_image_that_claims_to_be_animated_and_has_one_frame_is_an_image():
    two, one = (animation(FRAMES[:n], format="PNG") for n in (2, 1))
    at = two.index(b"acTL") + 4
    assert is_animated(two) and not is_animated(two[:at] + (1).to_bytes(4, "big") + two[at + 4 :])
    assert not is_animated(one)
    webp = animation(FRAMES[:2], format="WEBP")
    first, second = webp.index(b"ANMF"), webp.rindex(b"ANMF")
    assert first < second and is_animated(webp) and not is_animated(webp[:second])


def test_only_so_many_parts_of_a_header_are_looked_at():
    many = 10 * MOST_PARTS
    assert is_animated(b"GIF89a" + bytes(7) + b"\x21\xf9\0" * many), "a process finds out"
    assert not is_animated(
        b"\x89PNG\r\n\x1a\n" + b"\0\0\0\0tEXt\0\0\0\0" * many + b"\0\0\0\x08acTL\0\0\0\x02"
    )
    assert not is_fragmented(b"\0\0\0\x08free" * many + b"\0\0\0\x08moof")


def test_an_image_is_decoded_after_a_clip_by_the_same_process(decoder):
    from odd_images import flat_png

    from mpic.imaging.pixels import ImageRules

    decoder.clip_facts(animation(FRAMES), RULES, BUDGET)
    started = decoder.workers.started
    assert decoder.identify(flat_png(1700, 1), ImageRules(40_000_000, 200.0), BUDGET)[:2] == (
        1700,
        1700,
    )
    assert decoder.workers.started == started and decoder_module.CLIP_PER_PIXEL > 0
