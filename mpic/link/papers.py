"""The publications that policies come from."""

from __future__ import annotations

from mpic.method import Paper

A3 = Paper("A3", "https://arxiv.org/abs/2511.17560")
CACHEBLEND = Paper("CacheBlend", "https://arxiv.org/abs/2405.16444")
EPIC = Paper("EPIC", "https://arxiv.org/abs/2410.15332")
MEPIC = Paper("MEPIC", "https://arxiv.org/abs/2512.16822")
KV_PACKET = Paper("KV Packet", "https://arxiv.org/abs/2604.13226")
MPIC = Paper("MPIC", "https://arxiv.org/abs/2502.01960")
SGLANG = Paper("SGLang", "https://arxiv.org/abs/2312.07104")
