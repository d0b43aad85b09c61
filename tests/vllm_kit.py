"""Building blocks for tests of the vLLM engine: tiny checkpoints that transformers and vLLM both load, and engines.

A checkpoint is a folder as a hub repository is: config, safetensors, tokenizer, processor. Its weights are those of
``families.py``, fp32, with heads of 32 (the smallest that vLLM's CPU attention takes).
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch
from engine_kit import ids
from families import IMAGE_TOKEN, TEXT_FAMILIES, TYPES, VISION_FAMILIES, make_model, random_image
from missing import vllm_is_installed
from PIL import Image
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoProcessor,
    LlavaNextProcessor,
    LlavaProcessor,
    PreTrainedTokenizerFast,
    Qwen2VLProcessor,
    Qwen2VLVideoProcessor,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
)

from mpic_lab.models.on_vllm import save_model

if TYPE_CHECKING:
    from vllm import LLM

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TORCH_COMPILE_DISABLE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB; more than the tiny models need
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine runs in this process
    "VLLM_LOGGING_LEVEL": "ERROR",
}
"""Environment of every process that runs vLLM in tests. vLLM must not be imported before it is set."""
for _name, _value in ENVIRONMENT.items():
    os.environ.setdefault(_name, _value)
V2 = os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1"
"""Engines in this process have vLLM's second model runner (``tests/vllm/test_runner_v2.py`` starts such processes)."""
if V2:  # it needs Triton, of which vLLM's CPU build takes a backend named "cpu" only: here that is the interpreter
    os.environ["TRITON_INTERPRET"] = "1"
    from triton.backends import backends as _triton_backends

    _triton_backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True))

TEXT = ("llama", "mistral", "qwen2", "qwen3")
VISION = tuple(name for name in VISION_FAMILIES if name not in ("qwen2_vl_odd", *TYPES))  # those are refused
FAMILIES = (*TEXT, *VISION)
assert set(TEXT) <= set(TEXT_FAMILIES)

SIZES = {"vocab_size": 300, "hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
"""Heads of 32. The vocabulary is the tokenizer's, so every random id is a token."""
BLOCK = 32
"""Tokens of a page; vLLM's CPU attention wants a multiple of 32."""
IMAGE_PADS = (6, IMAGE_TOKEN, 7)
"""Qwen-VL's image in a prompt of ids: vision start, one placeholder, vision end."""

_CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{% if p.type == 'image' %}@IMAGE@{% else %}{{ p.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


available = vllm_is_installed


def quick_or_parity(quick: Sequence[str], names: Sequence[str] = FAMILIES) -> list[Any]:
    """Parameters of a test over families: those in ``quick`` run always, the others in ``make parity``."""
    return [name if name in quick else pytest.param(name, marks=pytest.mark.parity) for name in names]


def is_qwen_vl(name: str) -> bool:
    return name.startswith("qwen") and name in VISION


def image_ids(name: str) -> list[int]:
    """Return an image in a prompt of ids, before vLLM or the processor widens it."""
    return list(IMAGE_PADS) if is_qwen_vl(name) else [IMAGE_TOKEN]


@functools.cache
def _root() -> Path:
    folder = tempfile.TemporaryDirectory(prefix="mpic-vllm-models-")
    atexit.register(folder.cleanup)
    return Path(folder.name)


def checkpoint(name: str, seed: int = 0, layers: int = 3) -> Path:
    """Return the folder of a family's tiny model, which is made once a process and removed at its end.

    Args:
        name: one of ``FAMILIES``.
        seed: of the weights.
    """
    folder = _root() / f"{name}-{seed}-{layers}"
    if folder.exists():
        return folder
    sizes: dict[str, Any] = {**SIZES, "num_hidden_layers": layers}
    if name == "mistral":
        sizes["sliding_window"] = None  # as from version 0.2 on
    model, image_processor = make_model(name, seed, sizes)
    save_model(model, folder)
    tokenizer = make_tokenizer(name)
    if image_processor is None:
        tokenizer.save_pretrained(folder)
    else:
        _processor(name, image_processor, tokenizer).save_pretrained(folder)
    return folder


def make_tokenizer(name: str) -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per byte from id 10 on. Lower ids are the control tokens of ``families.py``,
    higher ones unused words."""
    image = "<|image_pad|>" if is_qwen_vl(name) else "<image>"
    control = ["<pad>", "<s>", "</s>", "<|im_start|>", "<|im_end|>", image]
    control += ["<|vision_start|>", "<|vision_end|>", "<|video_pad|>", "<unk>"]
    words = [*control, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    words += [f"<{i}>" for i in range(len(words), SIZES["vocab_size"])]
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, [], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in control])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    shown = f"<|vision_start|>{image}<|vision_end|>" if is_qwen_vl(name) else image
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        unk_token="<unk>",
        extra_special_tokens=control[3:9],
        chat_template=_CHATML.replace("@IMAGE@", shown),
    )


def _processor(name: str, image_processor: object, tokenizer: PreTrainedTokenizerFast) -> Any:
    template = tokenizer.chat_template
    if is_qwen_vl(name):
        cls, video = {
            "qwen2_vl": (Qwen2VLProcessor, Qwen2VLVideoProcessor),
            "qwen2_5_vl": (Qwen2VLProcessor, Qwen2VLVideoProcessor),
            "qwen3_vl": (Qwen3VLProcessor, Qwen3VLVideoProcessor),
        }[name]
        return cls(image_processor, tokenizer, video(patch_size=8), chat_template=template)
    cls = LlavaNextProcessor if name == "llava_next" else LlavaProcessor
    return cls(
        image_processor=image_processor,
        tokenizer=tokenizer,
        patch_size=8,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        image_token="<image>",
        chat_template=template,
    )


# engines

staying = ExitStack()
"""Drops the engine that stays for several files when another one starts, for a process has one at a time."""


@contextmanager
def engine(folder: Path | str, **options: Any) -> Iterator[LLM]:
    """An in-process ``vllm.LLM`` in fp32 on a checkpoint, dropped at the end with all it held.

    Args:
        options: of ``LLM``, over the defaults below.
    """
    from vllm import LLM

    staying.close()
    settings: dict[str, Any] = {
        "dtype": "float32",
        "enforce_eager": True,
        "block_size": BLOCK,
        "max_model_len": 1024,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 1024,
        "max_logprobs": -1,
        "seed": 0,
        "disable_log_stats": True,
        "limit_mm_per_prompt": {"image": 8, "video": 0},
        **options,
    }
    config = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
    if "vision_config" not in config:
        settings.pop("limit_mm_per_prompt")
    look_at(*config["architectures"])
    llm = LLM(str(folder), **settings)
    try:
        yield llm
    finally:
        drop(llm)


def look_at(architecture: str) -> None:
    """Has vLLM look at a model's class in this process. vLLM keeps what it sees in its cache folder, and would
    otherwise start a process for it that imports all of vLLM."""
    from vllm.model_executor.models import registry

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(registry, "_run_in_subprocess", lambda look: look())
        registry.ModelRegistry.models[architecture].inspect_model_cls()


def drop(llm: LLM) -> None:
    """Free an in-process engine, so that another one can start."""
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    llm.llm_engine.engine_core.shutdown()
    llm.__dict__.clear()
    cleanup_dist_env_and_memory()


class GreedyAnswer(NamedTuple):
    """A greedy answer.

    Args:
        ids: its tokens.
        logprobs: log-distribution of the first token, ``[vocabulary]``.
        prompt: ids of the prompt, with images widened by vLLM.
        cached: prompt tokens that vLLM found in its prefix cache.
    """

    ids: list[int]
    logprobs: torch.Tensor
    prompt: list[int]
    cached: int


def generate(
    llm: LLM,
    prompts: Sequence[dict[str, Any]],
    tokens: int = 8,
    params: Sequence[dict[str, Any] | None] | None = None,
) -> list[GreedyAnswer]:
    """Return the greedy answers to a batch.

    Args:
        prompts: as vLLM takes them (``prompt_token_ids``, ``multi_modal_data``, ``cache_salt``).
        params: ``kv_transfer_params`` of each.
    """
    from vllm import SamplingParams

    settings = {"temperature": 0, "max_tokens": tokens, "ignore_eos": True, "logprobs": -1}
    given = params or [None] * len(prompts)
    extra = [{"kv_transfer_params": each} if each is not None else None for each in given]
    sampling = [SamplingParams(extra_args=each, **settings) for each in extra]
    done = llm.generate(list(prompts), sampling, use_tqdm=False)
    return [_answer(output) for output in done]


def settle(llm: LLM) -> Any:
    """Let an engine in this process step until it holds nothing more for requests that have ended, such as the blocks
    of chunks that are still read; return its scheduler."""
    core = llm.llm_engine.engine_core.engine_core
    while core.scheduler.has_requests():
        core.step()
    return core.scheduler


def _answer(output: Any) -> GreedyAnswer:
    first = output.outputs[0]
    row = torch.full((SIZES["vocab_size"],), float("-inf"))
    for token, entry in first.logprobs[0].items():
        row[token] = entry.logprob
    return GreedyAnswer(
        list(first.token_ids), row, list(output.prompt_token_ids), output.num_cached_tokens or 0
    )


# the reference


@functools.cache
def stock(name: str, seed: int = 0) -> tuple[nn.Module, Any]:
    """Return the checkpoint in plain transformers and its processor (None for text). Tests share it, and ``Oracle``
    changes it."""
    return load_stock(name, seed)


def load_stock(name: str, seed: int = 0) -> tuple[nn.Module, Any]:
    """Return the same, unshared."""
    folder = checkpoint(name, seed)
    auto = AutoModelForImageTextToText if name in VISION else AutoModelForCausalLM
    model = auto.from_pretrained(folder, dtype=torch.float32).eval()
    return model, AutoProcessor.from_pretrained(folder) if name in VISION else None


@torch.no_grad()
def expected(
    name: str, prompt: Sequence[int], images: Sequence[Image.Image] = (), tokens: int = 8
) -> GreedyAnswer:
    """Return the greedy answer of plain transformers.

    Args:
        prompt: ids with as many image tokens as the images have (``GreedyAnswer.prompt``).
    """
    model, processor = load_stock(name)
    inputs: dict[str, torch.Tensor] = {"input_ids": torch.tensor([list(prompt)])}
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    if images:
        inputs.update(processor.image_processor(images=list(images), return_tensors="pt"))
    if is_qwen_vl(name):
        inputs["mm_token_type_ids"] = (inputs["input_ids"] == IMAGE_TOKEN).long()
    greedy = {"max_new_tokens": tokens, "do_sample": False, "pad_token_id": 0}
    done = model.generate(**inputs, **greedy, return_dict_in_generate=True, output_logits=True)
    ids = done.sequences[0, len(prompt) :].tolist()
    return GreedyAnswer(ids, done.logits[0][0].float().log_softmax(-1), list(prompt), 0)


def assert_as_transformers(llm: LLM, name: str) -> None:
    """Check that an engine gives what plain transformers gives for a prompt, with images if the family has them."""
    if name in VISION:
        images, picture = [random_image(1), random_image(2, 72, 40)], image_ids(name)
        prompt = [1, *ids(1, 9), *picture, *ids(2, 7), *picture, *ids(3, 12)]
        request = {"prompt_token_ids": prompt, "multi_modal_data": {"image": images}}
    else:
        images, request = [], {"prompt_token_ids": [1, *ids(1, 90)]}
    (answer,) = generate(llm, [request])
    truth = expected(name, answer.prompt, images)
    assert answer.ids == truth.ids
    torch.testing.assert_close(answer.logprobs, truth.logprobs, atol=1e-4, rtol=0)
