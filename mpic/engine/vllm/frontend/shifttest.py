"""The engine's self-test that keys move as the model's rotary embedding says: the same text computed at two positions.

The first layer's keys depend on tokens and positions only, not on what stands before them. So the keys of a text behind
start tokens must equal those of the text alone, rotated by the number of start tokens. If not, the model does more to
keys than rotate them (HunYuan normalises them afterwards), and its chunks could not be moved.
"""

from __future__ import annotations

import shutil
import uuid
from pathlib import Path

import torch

from mpic.engine.vllm.frontend.client import VLLMClient
from mpic.engine.vllm.frontend.compiled import SPOOL, compute
from mpic.engine.vllm.frontend.linktest import OWNER
from mpic.engine.vllm.frontend.model import ModelDescription
from mpic.engine.vllm.frontend.prompts import token_prompt
from mpic.errors import ModelRefused, MPICError
from mpic.kernels.attention import QueryRotation, rotate

TOKENS, MOVE = 24, 37
"""Tokens of the text, and of the start before it."""
TOLERANCE = {"float32": 1e-4, "float16": 5e-3, "bfloat16": 3e-2}
"""Maximum difference, as a share of the largest number in a key."""


def shift_test(model: ModelDescription, client: VLLMClient, root: Path) -> None:
    """Compare moved keys with keys that were computed at the target positions.

    Args:
        root: folder of the chunk store.

    Raises:
        ModelRefused: they differ, or could not be computed.
    """
    ids = model.some_words(TOKENS, seed=4)

    def first_keys(start: int) -> torch.Tensor:
        folder = uuid.uuid4().hex
        prompt = token_prompt([model.bos] * start + ids, folder)
        try:
            _, kv = client.wait(compute(client, root, folder, prompt, start, OWNER))
        finally:
            shutil.rmtree(root / SPOOL / folder, ignore_errors=True)
        return kv[0, 0].float()

    try:
        alone, behind = first_keys(0), first_keys(MOVE)
    except (MPICError, OSError) as error:
        raise ModelRefused(f"linking in vLLM: the self-test could not run: {error}") from error
    check_shift(alone, behind, *client.ask_workers("key_rotation")[0], model.dtype)


def check_shift(
    alone: torch.Tensor, behind: torch.Tensor, frequencies: list[float], interleaved: bool, dtype: str
) -> None:
    """Check that ``behind [kv_heads, n, head_dim]`` is ``alone`` rotated by ``MOVE`` positions.

    Raises:
        ModelRefused: it is not.
    """
    angle = MOVE * torch.tensor(frequencies, dtype=torch.float64)
    moved = rotate(alone, QueryRotation(angle.cos().float(), angle.sin().float(), interleaved))
    difference = float((moved - behind).abs().max() / behind.abs().max())
    limit = TOLERANCE.get(dtype, TOLERANCE["float32"])
    if not difference <= limit:
        raise ModelRefused(
            "linking in vLLM: its keys change with positions in a way that its rotary embedding does not explain "
            f"(by {difference:.1e} of the largest, limit {limit:.0e})"
        )
