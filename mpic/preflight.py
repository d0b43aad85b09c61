"""Checks everything that can prevent a server from starting, in the first second, before torch is imported.

Nothing is changed here. Everything is checked again when it is used, because it may change until then.
"""

from __future__ import annotations

import fcntl
import importlib.util
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from mpic.config import Config, ConfigError, EngineConfig, RetrievalConfig, origins
from mpic.data.published import gguf_path, graft_folder, is_gguf, language_model_of
from mpic.errors import LibraryInUse, ModelRefused, MPICError
from mpic.file_status import is_file, is_folder, status_of
from mpic.http.listening import bind
from mpic.keys import any_keys, check_not_lost

DTYPES = ("auto", "float32", "bfloat16", "float16")
DEVICE = re.compile(r"auto|cpu|mps|cuda(:\d+)?")
ATTENTION = ("auto", "cpu-stream", "cpu-flash", "reference", "cuda-flash", "cuda-efficient", "triton")
"""Attention implementations of the native engine, and `auto`, which chooses among them."""


def check(config: Config) -> None:
    """Check everything about a configuration that needs no model.

    Raises:
        ConfigError: a setting is not valid, the port is taken, or a file that a setting names does not exist.
        ModelRefused: the model is a folder that does not exist or holds no model.
        LibraryInUse: another process has the library open.
        DatabaseFailed, DatabaseDamaged: the API keys cannot be read.
        KeysLost: the folder has had API keys, and has none now.
    """
    root = Path(config.library.data_dir)
    has_keys = any_keys(root)
    if "*" in origins(config.server) and not has_keys:
        raise ConfigError(
            "cors_origins = * needs API keys: without them any page on the web could read every upload. Name the "
            "origins, or make a key with `mpic keys create NAME --role admin`.",
            param="cors_origins",
        )
    bind(config.server.host, config.server.port, has_keys).close()
    check_folder(root)
    check_not_lost(root)
    check_engine(config.engine)
    check_model(config.engine.model)
    check_embedder(config.retrieval)


def check_folder(root: Path) -> None:
    """Check that a library can be opened or made in a folder. Raise ConfigError, LibraryInUse."""
    with _looking_at(root, ConfigError, "data_dir"):
        there = next(p for p in (root.absolute(), *root.absolute().parents) if status_of(p) or p.is_symlink())
        can_hold = is_folder(there)
    if not can_hold and there.is_symlink():
        leads = os.readlink(there)
        raise ConfigError(
            f"{there} is a link to {leads}, which is not a folder: is its disk mounted?", param="data_dir"
        )
    if not can_hold:
        raise ConfigError(f"{there} is not a folder: give another one as --data-dir", param="data_dir")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ConfigError(
            f"{there} cannot be written to: give another folder as --data-dir", param="data_dir"
        )
    if there != root.absolute():
        return
    with _looking_at(root, ConfigError, "data_dir"):
        fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:  # the lock that FolderLock holds; file systems that cannot lock folders are left to FolderLock
        with suppress(OSError):
            try:
                fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                raise LibraryInUse(
                    f"another process has the library in {root} open, perhaps another `mpic serve`: stop it, or give "
                    "another folder as --data-dir"
                ) from None
    finally:
        os.close(fd)


def check_engine(config: EngineConfig) -> None:
    """Check the names in an engine's settings. Raise ConfigError."""
    if not DEVICE.fullmatch(config.device):
        raise ConfigError(
            f"unknown device {config.device!r}; available: auto, cpu, cuda, cuda:N, mps", param="device"
        )
    if config.dtype not in DTYPES:
        raise ConfigError(f"unknown dtype {config.dtype!r}; available: {', '.join(DTYPES)}", param="dtype")
    if config.engine == "native" and config.attention not in ATTENTION:
        raise ConfigError(
            f"unknown attention {config.attention!r}; available: {', '.join(ATTENTION)}", param="attention"
        )
    if config.engine == "vllm" and importlib.util.find_spec("vllm") is None:
        raise ConfigError(
            "engine = vllm needs vLLM: `make setup-vllm`, or pip install 'mpic[vllm]'", param="engine"
        )
    if config.vllm_args:
        try:
            right = isinstance(json.loads(config.vllm_args), dict)
        except ValueError:
            right = False
        if not right:
            raise ConfigError("vllm_args must be a JSON object", param="vllm_args")


def check_model(model: str) -> None:
    """Check that the folder or the GGUF file of a model exists, if it is named by a path; of a graft, its language
    model. Raise ModelRefused."""
    with _looking_at(model, ModelRefused):
        graft = graft_folder(model)
    if graft:
        check_model(language_model_of(graft))
        return
    if is_gguf(model):
        gguf_path(model)
        return
    path = Path(model)
    with _looking_at(model, ModelRefused):
        folder, exists = is_folder(path), status_of(path) is not None
        holds_model = folder and is_file(path / "config.json")
    if folder:
        if not holds_model:
            raise ModelRefused(f"{model} holds no model: it has no config.json")
    elif exists:
        raise ModelRefused(
            f"{model} is a file; --model takes a model's folder, a .gguf file, or an id of the hub"
        )
    elif not is_hub_id(model):
        raise ModelRefused(f"there is no folder {model}; --model takes a model's folder, or an id of the hub")


def check_embedder(config: RetrievalConfig) -> None:
    """Check that the folder of an embedder exists, if it is named by a path. Raise ConfigError."""
    name, weights = config.embedder, config.embedder_weights
    path = Path(name)
    with _looking_at(name, ConfigError, "embedder"):
        folder = is_folder(path)
        holds_model = folder and is_file(path / "open_clip_config.json")
    if folder:
        if not holds_model:
            raise ConfigError(
                f"{name} holds no open_clip model: it has no open_clip_config.json", param="embedder"
            )
    elif path.is_absolute() or name.startswith((".", "~")):
        raise ConfigError(f"there is no folder {name} with an embedder", param="embedder")
    elif ":" not in name and not weights:
        raise ConfigError(
            f"the embedder {name!r} has no weights: name them in embedder_weights", param="embedder_weights"
        )
    if not (weights and (Path(weights).is_absolute() or weights.startswith((".", "~")))):
        return
    with _looking_at(weights, ConfigError, "embedder_weights"):
        exists = is_file(weights)
    if not exists:
        raise ConfigError(f"there is no file {weights} with weights", param="embedder_weights")


@contextmanager
def _looking_at(path: str | Path, error: type[MPICError], param: str | None = None) -> Iterator[None]:
    """Raise this error instead of OSError, such as that of a folder that this user may not enter."""
    try:
        yield
    except OSError as why:
        raise error(f"{path} cannot be looked at ({why.strerror})", param=param) from why


def is_hub_id(name: str) -> bool:
    """Return whether a name may be a hub id, such as ``gpt2`` or ``Qwen/Qwen2.5-VL-3B-Instruct``."""
    return re.fullmatch(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", name) is not None
