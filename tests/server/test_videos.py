"""Clips through the HTTP server: a tiny random Qwen2.5-VL, and a model that takes none."""

from __future__ import annotations

import pytest
from server_helpers import data_url, real_server, refusal
from video_kit import (
    animation,
    make_video_model,
    movie,
    pictures,
    save_video_model,
    stock_answer,
    stock_inputs,
)

FRAMES, OTHERS = pictures(1, 12), pictures(2, 8, 32, 48)
GIF, WEBP = animation(FRAMES), animation(OTHERS, format="WEBP")
MP4 = data_url(GIF, "video/mp4")


def clip(data: bytes) -> dict:
    return {"type": "video_url", "video_url": {"url": data_url(data, "video/mp4")}}


def text(words: str) -> dict:
    return {"type": "text", "text": words}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_video_model(tmp_path_factory.mktemp("video") / "model")


@pytest.fixture
async def seeing(tmp_path, model):
    async with real_server(tmp_path / "data", model, pool_bytes=1 << 22) as server:
        yield server


async def test_two_clips_are_answered_as_the_stock_model_answers(seeing):
    """One as data URL, one uploaded and called by its handle; the second question finds both compiled."""
    assert (await seeing.uploaded(WEBP, "other.webp", handle="OTHER"))["kind"] == "video"
    [file] = (await seeing.http.get("/v1/files", params={"purpose": "vision"})).json()["data"]
    assert file["state"] == "ready" and file["tokens"] > 0, file
    content = [text("First "), clip(GIF), text(" then FILE#OTHER differ?")]
    stock, processor = make_video_model("qwen2_5_vl")
    parts = [text("First "), {"type": "video"}, text(" then "), {"type": "video"}, text("(OTHER) differ?")]
    made = stock_inputs(processor, [{"role": "user", "content": parts}], [], [FRAMES, OTHERS], 5.0)
    said, _ = stock_answer(stock, made, 4)
    expected = processor.tokenizer.decode(said, skip_special_tokens=True)
    compiled = []
    for policy in ("full", "mpic-4", "mpic-4"):
        answer = await seeing.ask(
            content, mpic={"policy": policy, "trace": True, "ignore_eos": True}, max_tokens=4
        )
        assert answer.status_code == 200, answer.text
        body = answer.json()
        if policy == "full":
            assert body["choices"][0]["message"]["content"] == expected
        ours = body["usage"]["mpic"]
        assert body["usage"]["prompt_tokens"] == made["input_ids"].shape[1]
        compiled.append(ours["tokens"]["compiled"])
        assert {span["kind"] for span in ours["trace"]["spans"]} == {"text", "video"}
    assert compiled[0] == 0 and compiled[1] > 0 and compiled[2] == 0


async def test_a_movie_is_a_clip(seeing, tmp_path):
    answer = await seeing.ask(
        [text("What is this? "), clip(movie(FRAMES, tmp_path))], max_tokens=2, mpic={"policy": "reuse"}
    )
    assert answer.status_code == 200, answer.text
    assert [chunk["tier"] for chunk in answer.json()["usage"]["mpic"]["chunks"]] == ["compiled"]


async def test_the_model_says_that_it_takes_videos(seeing):
    [shown] = (await seeing.http.get("/v1/models")).json()["data"]
    assert "video" in str(shown)


@pytest.mark.parametrize(
    "part, refused",
    [
        ({"type": "video_url", "video_url": {"url": "https://localhost/a.mp4"}}, (400, "bad_request")),
        ({"type": "video_url", "video_url": {"url": "data:text/plain;base64,AAAA"}}, (400, "invalid_video")),
        ({"type": "video_url", "video_url": {"url": "data:video/mp4;base64,%%%%"}}, (400, "invalid_video")),
        (clip(b"no clip at all"), (400, "invalid_video")),
        (clip(GIF[: len(GIF) // 2]), (400, "invalid_video")),
        (clip(animation(FRAMES[:1], format="PNG")), (400, "invalid_video")),
        ({"type": "video_url", "video_url": {"url": MP4, "fps": 1}}, (400, "unsupported_parameter")),
        ({"type": "video_url", "video_url": {"url": "file-none"}}, (404, "file_not_found")),
        ({"type": "image_url", "image_url": {"url": data_url(WEBP, "image/webp")}}, (400, "animated_image")),
        ({"type": "input_video", "input_video": {"url": MP4}}, (400, "unsupported_modality")),
    ],
)
async def test_what_is_no_clip_is_refused_by_name(seeing, part, refused):
    answer = await seeing.ask([text("What happens?"), part])
    assert refusal(answer) == refused, answer.text
    assert answer.json()["error"]["param"].startswith("messages[0].content[1]")


async def test_an_image_is_no_video_by_its_id_either(seeing):
    file = await seeing.uploaded()
    answer = await seeing.ask([text("?"), {"type": "video_url", "video_url": {"url": file["id"]}}])
    assert refusal(answer) == (400, "bad_request") and "is not a video" in answer.text


async def test_a_clip_is_no_image_by_its_handle(seeing):
    await seeing.uploaded(GIF, "walk.gif", handle="WALK")
    answer = await seeing.ask([{"type": "image", "handle": "WALK"}])
    assert refusal(answer) == (404, "unknown_handle") and "write FILE#WALK" in answer.text


async def test_a_model_without_videos_refuses_them_and_says_what_to_send(server):
    answer = await server.ask([text("What happens?"), clip(GIF)])
    assert refusal(answer) == (400, "unsupported_modality")
    assert "this model takes no videos; send the frames" in answer.json()["error"]["message"]
    upload = await server.upload(b"\0\0\0\x18ftypmp42" + b"\0" * 40, "x.mp4")
    assert refusal(upload) == (400, "unsupported_type")
    assert "this model takes no videos; send the frames" in upload.json()["error"]["message"]


async def test_a_clip_in_the_library_of_another_model_is_refused_in_a_prompt(server):
    server.library.files.no_clips = None
    await server.upload(GIF, "walk.gif", handle="WALK")
    answer = await server.ask("What happens in FILE#WALK?")
    assert refusal(answer) == (400, "unsupported_modality")
    assert "takes no videos; send the frames" in answer.json()["error"]["message"]
