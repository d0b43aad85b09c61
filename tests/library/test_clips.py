"""Uploads that are clips, and clips that come inside requests."""

from __future__ import annotations

from unittest.mock import Mock

import numpy as np
import pytest
from library_tools import encoded
from video_kit import animation, movie, pictures

from mpic.errors import (
    AnimatedImage,
    BadRequest,
    InvalidVideo,
    TooLarge,
    UnsupportedModality,
    UnsupportedType,
    VideoTooLarge,
)
from mpic.kv.chunk import ChunkKey

FRAMES = pictures(1, 6)
GIF = animation(FRAMES)


def taking(library):
    library.files.no_clips = None
    return library


def test_a_clip_comes_back_as_its_user_knows_it(library):
    file = taking(library).files.add("ann", GIF, "walk.gif", handle="WALK")
    assert file.kind == "video" and file.key == ChunkKey.of_clip(GIF)
    chunk = library.files.chunk("ann", file)
    assert (chunk.kind, chunk.label, chunk.file_id) == ("video", "WALK", file.id)
    asked = []
    clip = chunk.load_clip(lambda facts: asked.append(facts) or (1, 4))
    assert [facts.frames for facts in asked] == [6] and chunk.load_image is None
    assert np.array_equal(clip.frames[1], FRAMES[4])
    assert [f.id for f in library.files.page("ann", kinds=("image", "video")).files] == [file.id]
    assert not library.files.page("ann", kinds=("text",)).files


def test_what_comes_inside_a_request_has_no_more_bytes_than_an_upload_may_have(open_library):
    library = taking(open_library(upload_bytes=len(GIF) - 1))
    for inline, data in (
        (library.files.inline_clip, GIF),
        (library.files.inline_image, encoded() + bytes(len(GIF))),
    ):
        with pytest.raises(TooLarge, match=f"more than {len(GIF) - 1} bytes"):
            inline("ann", data)


@pytest.mark.parametrize("format", ["GIF", "WEBP", "PNG"])
def test_animated_images_are_clips_only_where_clips_are_taken(open_library, format):
    library, data = open_library(), animation(FRAMES, format=format)
    if format == "GIF":
        assert library.files.add("ann", data, "walk").kind == "image", "its first frame"
    else:
        with pytest.raises(AnimatedImage):
            library.files.add("ann", data, "walk")
    assert taking(library).files.add("ann", data, "walk").kind == "video"
    still = animation(FRAMES[:1], format="PNG")
    assert library.files.add("ann", still, "still").kind == "image"


def test_an_animated_gif_stays_its_first_frame_where_the_operator_says_so(open_library):
    library = taking(open_library(gif=True))
    assert library.files.add("ann", GIF, "walk.gif").kind == "image"
    assert library.files.inline_clip("ann", GIF).kind == "video", "asked for as a clip"


def test_a_video_is_refused_with_the_reason(library, tmp_path):
    data = movie(FRAMES, tmp_path)
    library.files.no_clips = "this model takes no videos; send the frames"
    with pytest.raises(UnsupportedType, match="MP4 or QuickTime is not accepted; this model takes no videos"):
        library.files.add("ann", data, "walk.mp4")
    with pytest.raises(UnsupportedModality, match="this model takes no videos; send the frames"):
        library.files.inline_clip("ann", data)
    assert taking(library).files.add("ann", data, "walk.mp4").kind == "video"


def test_a_damaged_clip_leaves_nothing(library, tmp_path):
    data = animation(pictures(2, 40))
    with pytest.raises(InvalidVideo):
        taking(library).files.add("ann", data[: len(data) // 2], "walk.gif")
    assert not library.files.page("ann").files and not library.files.paths()


def test_a_clip_that_is_too_long_is_refused(open_library):
    library = taking(open_library(video_seconds=1))
    with pytest.raises(VideoTooLarge, match="longer than 1 seconds"):
        library.files.add("ann", GIF, "walk.gif")


def test_only_documents_are_cut(library):
    with pytest.raises(BadRequest, match="a clip is one chunk"):
        taking(library).files.add("ann", GIF, "walk.gif", split={"mode": "tokens"}, split_asked=True)


def test_an_inline_clip_is_decoded_once_for_each_user(library, monkeypatch):
    from mpic.library import inline

    decoded = Mock(wraps=inline.clip_key)
    monkeypatch.setattr(inline, "clip_key", decoded)
    chunks = [taking(library).files.inline_clip("ann", GIF) for _ in range(3)]
    assert decoded.call_count == 1 and len({chunk.key for chunk in chunks}) == 1
    assert library.files.inline_clip("bob", GIF).owner == "bob" and decoded.call_count == 2


def test_clips_survive_a_start_a_backup_of_the_catalogue_and_its_loss(open_library):
    library = taking(open_library())
    file = library.files.add("ann", GIF, "walk.gif", handle="WALK")
    library.close()
    again = open_library()
    assert again.files.by_handle("ann", "walk").kind == "video"
    assert again.files.chunk("ann", file.id).key == file.key
