"""One family inside vLLM: a tiny checkpoint, served as ``mpic serve --engine vllm`` serves it, and links of one prompt
with two chunks (texts, then images) against the oracle."""

from __future__ import annotations

import copy
import re
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from torch import nn
from transformers import AutoProcessor, PreTrainedTokenizerFast

from mpic.config import ConfigError, EngineConfig
from mpic.engine import load_engine
from mpic.engine.base import Engine
from mpic.engine.vllm.frontend.options import prepare_environment
from mpic.errors import ModelRefused, MPICError
from mpic.kv.chunk import ChunkInputs
from mpic.model.refusals import refuse_on_vllm
from mpic_lab.llava_folder import published_name
from mpic_lab.models.check import LIMIT, Row, over_policies, text_prompt
from mpic_lab.models.instances import build, class_names, one_line, shortened
from mpic_lab.models.on_vllm_images import (
    NOT_LINKED,
    TRANSPOSED,
    Images,
    ProcessorError,
    compare_images,
    complete,
    images_of,
)
from mpic_lab.oracle import StockOracle

SIZES = {
    "hidden_size": 128,
    "head_dim": 32,
    "swa_head_dim": 32,
    "global_head_dim": 32,
    "sliding_window": 512,
    "sliding_window_size": 512,
}
"""Heads that vLLM's attention takes on a CPU, and windows that are as long as the context."""
VOCABULARY = 300
_OUTER = "Engine core initialization failed"
"""The words with which vLLM reports any error in its processes."""
_FOLDER = re.compile(r"[^\s'\"]*/mpic-famil[\w-]*(/mpic-family-\w*)?")
"""The path of a checkpoint's temporary folder, which messages name only as ``FOLDER``."""
_OPTIONS = {"pool_bytes": 1 << 26, "max_running": 8, "vllm_args": '{"block_size": 32}'}


def check_on_vllm(family: str, kind: str, log: Path) -> Row:
    """Check one family. Report every failure in the row.

    Args:
        log: where the standard error of this process goes, and so that of vLLM's.
    """
    torch.set_num_threads(1)
    try:
        prepare_environment()
        result, reason = _checked(family, kind)
    except ModelRefused as refusal:
        result, reason = "refused", refusal.message
    except ConfigError as error:  # vLLM did not start; a refusal of our parts in its processes is in its log
        refused = _last(log, r"ModelRefused: (.+)")
        said = refused or _last(log, r"(\w+(?:Error|Exception): .+|\w+Error$)") or error.message
        result, reason = ("refused" if refused else "not started"), said
    except Exception as error:
        result, reason = "failed", one_line(error)
    return Row(family, kind, result, shortened(_FOLDER.sub("FOLDER", reason)))


def _checked(family: str, kind: str) -> tuple[str, str]:
    """Return result and reason. Raise ModelRefused for a family that is refused, ConfigError if vLLM does not
    start."""
    from vllm.model_executor.models import ModelRegistry

    if not set(class_names(family, kind)) & set(ModelRegistry.get_supported_archs()):
        return "not in vLLM", ""
    try:
        model = build(family, kind, sizes=SIZES)
    except ModelRefused as error:
        return "not built", error.message
    refuse_on_vllm(model.config, model.config.get_text_config())
    images = None
    if kind == "image-text-to-text":
        complete(family, model.config)
        try:
            images = images_of(family, model, VOCABULARY)
        except ProcessorError as error:
            return "not built", str(error)
    with tempfile.TemporaryDirectory(prefix="mpic-family-") as folder:
        save(model, Path(folder), images)
        if images is not None:  # the oracle prepares images as vLLM will: by what is on the disk
            images.loaded.processor = AutoProcessor.from_pretrained(folder)
        engine, _ = load_engine(EngineConfig(engine="vllm", model=folder, dtype="float32", **_OPTIONS))
        try:
            return _compared(engine, model, images)
        except MPICError as error:
            if any(words in error.message for words in NOT_LINKED):
                return "refused", error.message
            return "failed", f"it is served, then {one_line(error)}"
        finally:
            engine.close()


def _compared(engine: Engine, model: nn.Module, images: Images | None) -> tuple[str, str]:
    """Return result and reason of a served model: links of texts, and of images if it has any."""
    plain, worst = compare(engine, model)
    shown = ""
    if images is not None and worst <= LIMIT:
        plain, worst = (
            max(pair) for pair in zip((plain, worst), compare_images(engine, model, images), strict=True)
        )
        shown = "with images, "
    if plain > LIMIT:
        said = f"without a link, vLLM's log-probabilities differ from transformers' by {plain:.1e}"
        return "differs", shown + said
    if worst > LIMIT:
        return "failed", f"{shown}differs from the oracle by {worst:.1e}"
    return "verified", f"{worst:.0e}"


def save_model(model: nn.Module, folder: Path) -> None:
    """Write a model's configuration and weights under names that transformers and vLLM both know."""
    model.config.architectures = [type(model).__name__]
    model.config.dtype = torch.float32
    if "Llava" in type(model).__name__:
        # transformers writes CLIP's weights under names that vLLM does not know; both know the published names
        model.config.save_pretrained(folder)
        model.generation_config.save_pretrained(folder)
        state = {published_name(name): value.clone() for name, value in model.state_dict().items()}
        save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    else:
        model.save_pretrained(folder)


def save(model: nn.Module, folder: Path, images: Images | None = None) -> None:
    """Write a model as a folder that transformers and vLLM both load, with the processor for its images, else a
    tokenizer of one word a token."""
    save_model(model, folder)
    if model.config.model_type in TRANSPOSED:
        path = folder / "model.safetensors"
        state = {
            name: value.transpose(1, 2).contiguous() if ".experts." in name else value
            for name, value in load_file(path).items()
        }
        save_file(state, path, metadata={"format": "pt"})
    if images is not None:
        images.processor.save_pretrained(folder)
        return
    words = {f"<{i}>": i for i in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<3>"))
    special = dict(zip(("pad_token", "bos_token", "eos_token", "unk_token"), words, strict=False))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)


def compare(engine: Engine, model: nn.Module) -> tuple[float, float]:
    """Compare a served model with the oracle as ``over_policies`` does, for a prompt with two texts as chunks."""
    prompt, chunks = text_prompt(model.config)
    inputs = [
        ChunkInputs(
            torch.tensor(chunk.token_ids), torch.arange(len(chunk.token_ids))[None], len(chunk.token_ids)
        )
        for chunk in chunks
    ]
    oracle = StockOracle(copy.deepcopy(model), 1, None, {})
    return over_policies(engine, oracle, prompt, inputs)


def _last(log: Path, pattern: str) -> str:
    """Return a pattern's group from the last line of a log that matches; empty if no line does."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.exists() else []
    found = (re.search(pattern, line) for line in reversed(lines) if _OUTER not in line)
    return next((match[1] for match in found if match), "")
