"""The publications that presses come from."""

from __future__ import annotations

from mpic.method import Paper

COMPACTOR = Paper("Compactor", "https://arxiv.org/abs/2507.08143")
CURDKV = Paper("CurDKV", "https://arxiv.org/abs/2509.15038")
KNORM = Paper("L2 norm", "https://arxiv.org/abs/2406.11430")
SNAPKV = Paper("SnapKV", "https://arxiv.org/abs/2404.14469")
STREAMING_LLM = Paper("StreamingLLM", "https://arxiv.org/abs/2309.17453")
TOVA = Paper("TOVA", "https://arxiv.org/abs/2401.06104")
