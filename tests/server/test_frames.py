"""The sliding window of frames that agents keep, sent as data URLs: the example of docs/examples, run unchanged."""

from __future__ import annotations

import runpy
from pathlib import Path
from unittest.mock import Mock

import httpx
import openai
import pytest
from server_helpers import POOL_PAGES, data_url, png

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "agent_frames.py"
STEPS, WINDOW, FRAME = 80, 6, 16


@pytest.fixture(scope="module")
def steps(url):
    """Return the server's counts for each step. All frames together do not fit its pool."""
    assert STEPS > POOL_PAGES
    watch = runpy.run_path(str(EXAMPLE))["watch"]
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        return [usage for _, usage in watch(client, STEPS, WINDOW, "mpic-4")]


def test_each_frame_is_compiled_once_in_the_step_in_which_it_arrives(steps):
    assert [usage["tokens"]["compiled"] for usage in steps] == [FRAME] * STEPS
    for usage in steps:
        assert [chunk["tier"] for chunk in usage["chunks"]][-1] == "compiled"


def test_frames_keep_their_order_and_the_oldest_is_dropped(steps):
    keys = [[chunk["key"] for chunk in usage["chunks"]] for usage in steps]
    for before, after in zip(keys[WINDOW - 1 :], keys[WINDOW:]):
        assert len(after) == WINDOW and after[:-1] == before[1:] and after[-1] not in before


def test_what_is_computed_does_not_grow_once_the_window_is_full(steps):
    """Texts have one token per byte here, and step numbers have one or two digits. The prefix cache finds the system
    prompt and common first digits."""
    counts = [usage["tokens"] for usage in steps[10 + WINDOW :]]
    assert len({tokens["computed"] + tokens["prefix_hit"] for tokens in counts}) == 1
    assert len({tokens["reused"] for tokens in counts}) == 1


def test_frames_that_left_the_window_are_evicted_from_the_device(steps, url):
    engine = httpx.get(f"{url}/health", timeout=60).json()["engine"]
    assert engine["chunks_resident"] < STEPS
    assert engine["pages"]["chunks"] <= POOL_PAGES


async def test_a_frame_that_is_sent_again_is_not_decoded_again(server, monkeypatch):
    from mpic.library import inline

    decoded = Mock(wraps=inline.image_key)
    monkeypatch.setattr(inline, "image_key", decoded)
    url = data_url(png())
    for _ in range(3):
        answer = await server.ask([{"type": "image_url", "image_url": {"url": url}}])
        assert answer.status_code == 200, answer.text
    assert decoded.call_count == 1
    other = server.library.files.inline_image("somebody else", png())
    assert decoded.call_count == 2 and other.owner == "somebody else", (
        "what another user sent is not looked up"
    )


@pytest.mark.parametrize("kind", ["video", "input_video"])
async def test_other_names_for_a_video_are_refused(server, kind):
    part = {"type": kind, kind: {"url": "data:video/mp4;base64,AAAA"}}
    answer = await server.ask([{"type": "text", "text": "What happens?"}, part])
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["code"] == "unsupported_modality" and "video_url" in error["message"]
