"""Loads a model from a local folder or a hub id: configuration, weights, processor, self-test."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoProcessor,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
)

from mpic.errors import ModelRefused
from mpic.model.dtype_choice import HALF, DtypeChoice, dtype_on_cpu, own_dtype
from mpic.model.graft import folder_of
from mpic.model.image_selftest import image_self_test
from mpic.model.image_structure import layout_note
from mpic.model.loaded import LoadedModel
from mpic.model.own_code import own_code
from mpic.model.program_proof import use_program
from mpic.model.quantize import quantize_weights, refuse_quantize
from mpic.model.quantized_checkpoint import described, quantization_of, refuse_quantized
from mpic.model.refusals import refuse_unsupported
from mpic.model.selftest import self_test
from mpic.model.video_selftest import video_self_test

log = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def choose_device(name: str = "auto") -> torch.device:
    """Return the device of that name; ``auto`` takes CUDA, then MPS, then the CPU.

    Raises:
        ModelRefused: the device does not exist. There is no fallback.
    """
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ModelRefused(f"device '{name}' was asked for and torch sees no CUDA device")
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise ModelRefused(f"device '{name}' was asked for and torch sees no MPS device")
    return device


def load_model(
    path: str,
    *,
    device: str = "auto",
    dtype: str = "auto",
    kv_dtype: str = "auto",
    quantize: str = "",
    trust_remote_code: bool = False,
) -> LoadedModel:
    """Load, hook and self-test a model.

    Args:
        path: local folder or hub id of any transformers decoder or vision-language model, a GGUF file, or a
            graft.
        dtype: ``auto`` means the checkpoint's own on accelerators, and what ``dtype_choice`` says on the CPU.
        kv_dtype: ``float16`` keeps keys and values of a float32 model on the CPU in 16 bits; ``auto`` as the model's.
        quantize: ``int8`` or ``int4`` rounds the decoder's weights (``mpic.model.quantize``); empty for none.

    Raises:
        ModelRefused: the model cannot be loaded, would give wrong results, or fails the self-test; the message says
            which.
    """
    path = folder_of(path, dtype)
    where = choose_device(device)
    config = load_config(path, dtype, trust_remote_code)
    refuse_quantized(config)
    if kv_dtype != "auto" and kv_dtype not in DTYPES:
        raise ModelRefused(f"unknown kv_dtype '{kv_dtype}'; available: auto, float16")
    if quantize:
        refuse_quantize(quantize, where, quantization_of(config))
    chosen = _choose_dtype(path, config, dtype, where, kv_dtype, quantize)
    model = load_weights(path, config, DTYPES.get(chosen.name, "auto"), trust_remote_code, where)
    parameters = sum(p.numel() for p in model.parameters())
    details = quantize_weights(model, quantize) if quantize else described(config, model)
    processor = load_processor(path, is_vision(config), trust_remote_code)
    name = model_name(path)
    loaded = LoadedModel(model, processor, name, None if kv_dtype == "auto" else DTYPES[kv_dtype])
    try:
        error = _tested(loaded)
    except ModelRefused as refused:
        is_inexact = "difference" in refused.details
        if not is_inexact or dtype != "auto" or chosen.name != HALF or quantize:
            raise
        raise ModelRefused(
            f"{refused.message} (in {HALF}, which 'auto' means here; with --dtype float32 it may pass)",
            **refused.details,
        ) from refused
    use_program(loaded)
    log.info("%s: self-test passed, relative error %.1e (%s)", name, error, loaded.attention_name)
    if loaded.attention_note:
        log.warning("%s: decoding is slower than it could be: %s", name, loaded.attention_note)
    if loaded.has_vision and (note := layout_note(loaded)):
        log.warning("%s: %s", name, note)
        loaded.info.details["image_layout_note"] = note
    loaded.info.details["dtype_note"] = chosen.note
    loaded.info.details["self_test"] = "passed at this start"
    loaded.info.details["self_test_error"] = error
    loaded.info.details["transformers"] = transformers.__version__
    if details is not None:
        loaded.info.details.update(quantization=details, parameters=parameters)
    return loaded


def _choose_dtype(
    path: str, config: PretrainedConfig, asked: str, device: torch.device, kv_dtype: str, quantize: str
) -> DtypeChoice:
    """Return the dtype to load a model in; ``auto`` on an accelerator, where transformers takes the checkpoint's."""
    if asked != "auto" or device.type != "cpu":
        return DtypeChoice(asked)
    packed = quantization_of(config) is not None
    return dtype_on_cpu(own_dtype(path, config), kv_dtype=kv_dtype, quantize=bool(quantize), packed=packed)


def _tested(loaded: LoadedModel) -> float:
    """Return the largest error of the self-tests that a model must pass. Raise ModelRefused if it fails one."""
    error = self_test(loaded)
    if loaded.has_vision:
        error = max(error, image_self_test(loaded))
    if loaded.no_clips is None:
        error = max(error, _clips_tested(loaded))
    return error


def _clips_tested(loaded: LoadedModel) -> float:
    """Return the error of the self-test with clips. A model that fails it takes none, and says why."""
    try:
        return video_self_test(loaded)
    except ModelRefused as error:
        log.warning("%s takes no videos: %s", loaded.info.name, error.message)
        loaded.refuse_clips(
            f"this model takes no videos ({error.message}); send the frames you want seen as images"
        )
        return 0.0


def model_name(path: str) -> str:
    """Return the name that a model is served under: a local folder's own, or the hub id."""
    return Path(path).name if Path(path).exists() else path


def is_vision(config: PretrainedConfig) -> bool:
    return hasattr(config, "vision_config")


def load_config(path: str, dtype: str, trust_remote_code: bool) -> PretrainedConfig:
    """Return a model's configuration.

    Raises:
        ModelRefused: there is no configuration, the model would give wrong results, or ``dtype`` is neither auto nor
            one of ``DTYPES``.
    """
    if dtype != "auto" and dtype not in DTYPES:
        raise ModelRefused(f"unknown dtype '{dtype}'; available: auto, {', '.join(DTYPES)}")
    if trust_remote_code and (code := own_code_of(path)):
        log.warning("%s: running Python that comes with the model: %s", model_name(path), ", ".join(code))
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    except Exception as error:
        _refuse_own_code(path, trust_remote_code, error)
        why = str(error).strip().partition("\n")[0]
        where = (
            "" if Path(path).exists() else ", neither a folder here nor one of the hub that can be reached"
        )
        raise ModelRefused(f"no transformers model at '{path}'{where}: {why}") from error
    refuse_unsupported(config, config.get_text_config())
    return config


def load_weights(
    path: str,
    config: PretrainedConfig,
    dtype: torch.dtype | str,
    trust_remote_code: bool,
    device: torch.device | None = None,
) -> PreTrainedModel:
    """Load a model onto a device (None: the CPU).

    Raises:
        ModelRefused: its weights cannot be loaded, or some of them are missing.
    """
    auto = AutoModelForImageTextToText if is_vision(config) else AutoModelForCausalLM
    options: dict[str, Any] = {"dtype": dtype, "trust_remote_code": trust_remote_code}
    elsewhere = device is not None and device.type != "cpu"
    packed = quantization_of(config) is not None
    if packed and elsewhere:  # some quantised models cannot be moved once they are loaded
        options["device_map"] = {"": device}
    try:
        loaded: Any = auto.from_pretrained(path, output_loading_info=True, **options)
        model, report = loaded
    except Exception as error:
        _refuse_own_code(path, trust_remote_code, error)
        raise ModelRefused(f"the weights at '{path}' could not be loaded: {error}") from error
    absent = sorted([*report["missing_keys"], *(name for name, *_ in report["mismatched_keys"])])
    if absent:  # transformers gives them random values
        raise ModelRefused(
            f"the weights at '{path}' lack {len(absent)} that the model has, such as {absent[0]}"
        )
    return model.to(device) if elsewhere and not packed else model


def empty_model(config: PretrainedConfig, dtype: torch.dtype, trust_remote_code: bool) -> PreTrainedModel:
    """Return the model of a configuration without weights, on the meta device."""
    auto = AutoModelForImageTextToText if is_vision(config) else AutoModelForCausalLM
    with torch.device("meta"):
        return auto.from_config(config, dtype=dtype, trust_remote_code=trust_remote_code)


def load_processor(path: str, vision: bool, trust_remote_code: bool = False) -> object:
    """Return the processor of a vision model, or the tokenizer of a text model. Raise ModelRefused if there is
    none."""
    kind = AutoProcessor if vision else AutoTokenizer
    try:
        return kind.from_pretrained(path, trust_remote_code=trust_remote_code)
    except Exception as error:
        _refuse_own_code(path, trust_remote_code, error)
        what = "processor" if vision else "tokenizer"
        raise ModelRefused(f"the model at '{path}' has no usable {what}: {error}") from error


def own_code_of(path: str) -> list[str]:
    """Return the names of Python code that comes with the model (``own_code``); none if its files cannot be read,
    which loading will report."""
    try:
        return own_code(path)
    except (OSError, ValueError):
        return []


def _refuse_own_code(path: str, trust_remote_code: bool, error: Exception) -> None:
    """Raise ModelRefused if loading failed because the model's own code was not allowed to run."""
    if trust_remote_code or not isinstance(error, ValueError) or "trust_remote_code" not in str(error):
        return
    raise ModelRefused(
        f"the model at '{path}' comes with Python of its own ({', '.join(own_code_of(path))}), which is run only with "
        "trust_remote_code (--trust-remote-code); set it if you trust its author"
    ) from error
