"""Chooses the frames of a clip that a model sees: its own video processor samples them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from transformers.video_utils import VideoMetadata

from mpic.errors import ContextLengthExceeded, InvalidVideo
from mpic.imaging.clip_header import NO_CLIPS
from mpic.imaging.clips import Clip, ClipFacts, Sample
from mpic.kv.chunk import digest

RATE = 2.0
"""Frames a second where a processor names none (Qwen2-VL and Qwen2.5-VL): what ``qwen-vl-utils``, the models' own
preprocessing, samples. transformers' processors would take every frame."""

COPIES = 3
"""Times that a processor holds the frames at once: enlarged, normalised, and cut into patches."""


def refusal(inner: Any, processor: Any, mrope: int) -> str | None:
    """Return why a model takes no clips, or None.

    Args:
        inner: the model below the output projection.
        mrope: axes of its rotary positions; clips need one for their time.
    """
    whole = callable(processor) and getattr(processor, "tokenizer", None) is not None
    parts = [getattr(processor, name, None) for name in ("video_processor", "video_token")]
    encodes = hasattr(inner, "get_video_features") and mrope == 3
    return None if whole and encodes and None not in parts else NO_CLIPS


def metadata_of(facts: ClipFacts, indices: Iterable[int] | None = None) -> VideoMetadata:
    """Return what transformers' processors want to know of a clip and, if they are chosen already, its frames."""
    return VideoMetadata(
        total_num_frames=facts.frames,
        fps=facts.rate,
        width=facts.width,
        height=facts.height,
        duration=facts.frames / facts.rate,
        frames_indices=None if indices is None else list(indices),
    )


def sampler(video_processor: Any, context: int) -> Sample:
    """Return what chooses the frames that a processor samples.

    Args:
        context: most tokens of the model.
    """

    def sample(facts: ClipFacts) -> list[int]:
        """Raise InvalidVideo: fewer frames than the processor reads at a time; ContextLengthExceeded: too many."""
        least = getattr(video_processor, "temporal_patch_size", None) or 1
        if facts.frames < least:
            raise InvalidVideo(
                f"the clip has {facts.frames} frames and the model reads {least} at a time: send an image",
                param="file",
            )
        indices = video_processor.sample_frames(metadata=metadata_of(facts), **_options(video_processor))
        chosen = [int(index) for index in indices]
        _check_tokens(video_processor, len(chosen), facts, context)
        return chosen

    return sample


def sampling_digest(processor: Any, preprocessing: str) -> str:
    """Return a digest of all that decides what a model sees of a clip: of its processor's ``preprocessing`` for texts
    and images, of its video processor, and of how frames are sampled. Part of the recipe of clips alone, so that
    compiled images and texts stay when it changes."""
    videos = processor.video_processor
    settings = json.dumps(videos.to_dict(), sort_keys=True, default=str)
    return digest(
        "clips",
        preprocessing,
        type(processor).__name__,
        type(videos).__name__,
        settings,
        str(_options(videos)),
    )


def _options(video_processor: Any) -> dict[str, float]:
    named = any(getattr(video_processor, name, None) is not None for name in ("fps", "num_frames"))
    return {} if named else {"fps": RATE}


def bytes_needed(video_processor: Any, clip: Clip) -> int:
    """Return the bytes that a processor takes for a clip's frames, which it may enlarge: as fp32, ``COPIES`` times. 0
    where the processor cannot tell."""
    patches = _patches(video_processor, len(clip.indices), clip.facts)
    size = getattr(video_processor, "patch_size", 0) ** 2 * getattr(video_processor, "temporal_patch_size", 1)
    return COPIES * 3 * 4 * patches * size


def _patches(video_processor: Any, frames: int, facts: ClipFacts) -> int:
    """Return the patches of so many frames, 0 where the processor cannot tell."""
    count = getattr(video_processor, "get_num_of_video_patches", None)
    if count is None or getattr(video_processor, "cap_pixels_per_frame", None):
        return 0
    return int(count(frames, facts.height, facts.width, {}))


def _check_tokens(video_processor: Any, frames: int, facts: ClipFacts, context: int) -> None:
    """Refuse a clip that cannot fit, before its frames are decoded, where the processor can tell."""
    patches = _patches(video_processor, frames, facts)
    tokens = patches // video_processor.merge_size**2 if patches else 0
    if tokens >= context:
        raise ContextLengthExceeded(
            f"the clip has {tokens} tokens ({frames} frames of it are seen); the model's context is {context}: send a "
            "shorter one, or one of fewer pixels",
            prompt_tokens=tokens,
            context_length=context,
        )
