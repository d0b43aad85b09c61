"""The facts about a loaded model, for both engines."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from mpic.imaging.clip_header import NO_CLIPS


@dataclass(frozen=True)
class ModelInfo:
    """Describes a loaded model, for /v1/models, /health and the catalogue. ``no_clips`` says why it takes no clips, or
    is None."""

    name: str
    digest: str
    family: str
    context_length: int
    dtype: str
    device: str
    modalities: tuple[str, ...]
    attention: str
    no_clips: str | None = NO_CLIPS
    details: dict[str, Any] = field(default_factory=dict)
