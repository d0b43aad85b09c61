"""Makes the digest of what a passed self-test is a proof about: the model, and everything that computes with it.

Covered are the model (every weight as it lies in memory, its configuration, its tokenizer and image processor), how it
is run (dtype, device, attention, threads, environment), our own sources, those of transformers that are loaded and of
the classes of model and processor, the versions and libraries below them, the kernels that were built here, and the
machine. A source is covered by its size and by the time at which its file last changed in any way (ctime), which the
system sets, unlike the time of modification that copies preserve.
"""

from __future__ import annotations

import hashlib
import os
import platform
import sys
from collections.abc import Iterator
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import psutil
import torch

from mpic.kernels import c_kernel
from mpic.model.loaded import LoadedModel
from mpic.version import VERSION

RESULTS = ("self_test", "self_test_error")
"""Details of a model that the tests themselves write."""
_SOURCES = (".py", ".c", ".h", ".json")
_PACKAGES = ("mpic", "mpic.kernels")
_LIBRARIES = ("numpy", "PIL", "tokenizers", "safetensors", "torchvision", "transformers", "triton", "cv2")
_PARTS = ("tokenizer", "image_processor", "video_processor")
_PREFIXES = ("ATEN_", "CUDA_", "CUBLAS_", "CUDNN_", "DNNL_", "GOMP_", "KMP_", "MKL_", "NVIDIA_", "OMP_")
_PREFIXES += ("ONEDNN_", "PYTORCH_", "TORCH", "TRANSFORMERS_", "TRITON_")
"""Prefixes of the environment variables that change what torch and its libraries compute."""


def subject(loaded: LoadedModel, test: str) -> str | None:
    """Return the digest under which a self-test's proof is kept.

    Args:
        test: name of the self-test.

    Returns:
        SHA-256 (hex); None where no proof can be kept: a source is not a file, or has changed since this process began,
        so that what runs need not be what lies there.
    """
    try:
        found = {path: os.stat(path) for path in (*_own_sources(), *_model_sources(loaded))}
    except OSError:  # also for a module that was imported from an archive
        return None
    if max(one.st_ctime for one in found.values()) >= _began() - 1:
        return None
    h = hashlib.sha256()
    for line in (test, *_model(loaded), *_software(), *_machine(loaded.device)):
        h.update(f"{len(line)}:{line}\n".encode())
    for path, one in sorted(found.items()):
        h.update(f"{path} {one.st_size} {one.st_ctime_ns}\n".encode())
    for kernel, digest in sorted(c_kernel.libraries.items()):
        h.update(f"{kernel} {digest}\n".encode())
    return h.hexdigest()


def _began() -> float:
    """Return the time at which this process began."""
    return psutil.Process().create_time()


@cache
def _own_sources() -> tuple[str, ...]:
    roots = {str(files(name)) for name in _PACKAGES}
    walks = (walk for root in sorted(roots) for walk in os.walk(root))
    return tuple(
        f"{folder}/{name}" for folder, _, names in walks for name in names if name.endswith(_SOURCES)
    )


def _model_sources(loaded: LoadedModel) -> set[str]:
    """Return the files of transformers that are loaded, and those that define the classes of the model's modules and
    of the parts of its processor."""
    objects: list[Any] = [*loaded.model.modules(), loaded.config, loaded.text_config, loaded.processor]
    objects += [getattr(loaded.processor, part, None) for part in _PARTS]
    names = {cls.__module__ for kind in set(map(type, objects)) for cls in kind.__mro__}
    names |= {name for name in sys.modules if name.startswith("transformers.")}
    known = (vars(module).get("__file__") for name in names if (module := sys.modules.get(name)) is not None)
    return {file for file in known if file is not None}


def _model(loaded: LoadedModel) -> Iterator[str]:
    """Yield everything about the model and how it is run."""
    yield from (loaded.digest, loaded.preprocessing, loaded.sampling, str(loaded.no_clips))
    details = {key: value for key, value in loaded.info.details.items() if key not in RESULTS}
    yield from (str(loaded.dtype), str(loaded.device), loaded.attention_name, str(details))
    yield str([(name, type(module).__qualname__) for name, module in loaded.model.named_modules()])


def _software() -> Iterator[str]:
    """Yield the versions of what runs, the settings of torch, and the environment."""
    yield from (VERSION, sys.version, str(sys.flags), torch.__version__, str(torch.version.git_version))
    for name in _LIBRARIES:
        yield f"{name} {getattr(sys.modules.get(name), '__version__', None)}"
    for library in sorted(Path(torch.__file__).parent.glob("lib/*")):  # hundreds of MB: too much to read
        found = library.stat()
        yield f"{library.name} {found.st_size} {found.st_ctime_ns}"
    yield f"{torch.get_num_threads()} threads, {torch.get_num_interop_threads()} between operations"
    yield f"{torch.get_float32_matmul_precision()} {torch.are_deterministic_algorithms_enabled()}"
    yield f"{torch.backends.mkldnn.enabled} {torch.is_autocast_enabled('cpu')} {torch.__config__.show()}"
    yield from (f"{key}={value}" for key, value in sorted(os.environ.items()) if key.startswith(_PREFIXES))


def _machine(device: torch.device) -> Iterator[str]:
    """Yield what tells machines apart: name, system, processor with its features, and the GPU with its driver."""
    yield from (platform.node(), platform.platform(), torch.backends.cpu.get_cpu_capability())
    yield _processor()
    if device.type == "cuda":
        yield str(torch.cuda.get_device_properties(device))
        yield f"{torch.version.cuda} {torch.backends.cudnn.version()} {torch.backends.cuda.matmul.allow_tf32}"
        driver = Path("/proc/driver/nvidia/version")
        yield driver.read_text() if driver.exists() else ""


def _processor() -> str:
    """Return the lines of the first processor in Linux's list that do not change while it runs."""
    info = Path("/proc/cpuinfo")
    if not info.exists():
        return platform.processor()
    first = info.read_text().split("\n\n")[0].splitlines()
    return "\n".join(line for line in first if not line.startswith(("cpu MHz", "bogomips", "BogoMIPS")))
