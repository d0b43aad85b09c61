"""Computes digests of the weights that vLLM loads by streaming their files, without loading them, and remembers the
result."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PretrainedConfig
from transformers.utils import cached_file

from mpic.config import EngineConfig
from mpic.kv.chunk import digest
from mpic.model import identity
from mpic.model.checkpoint import NotStreamable, stored_fingerprint, streamed_digest
from mpic.model.load import DTYPES, empty_model, load_weights
from mpic.model.quantized_checkpoint import quantization_of

log = logging.getLogger(__name__)


def fingerprint(config: EngineConfig, found: PretrainedConfig, dtype: str, digests: Path | None) -> str:
    """Return the fingerprint of the weights as transformers loads them in this dtype (``identity.fingerprint``).

    Args:
        found: the model's own configuration.
        digests: file that keeps digests between starts; without it, every start reads the weights.
    """
    return _remembered(config, dtype, digests, "", lambda: _fingerprint(config, found, DTYPES[dtype]))


def weights_digest(config: EngineConfig, found: PretrainedConfig, dtype: str, digests: Path | None) -> str:
    """Return the digest by which an adapter knows the weights (``identity.weights_digest``); see ``fingerprint``. The
    checkpoint must not be quantised."""
    return _remembered(config, dtype, digests, "packet", lambda: _weights(config, found, DTYPES[dtype]))


def _fingerprint(config: EngineConfig, found: PretrainedConfig, dtype: torch.dtype) -> str:
    def streamed(cache: str | None) -> str:
        if quantization_of(found) is not None:  # vLLM unpacks weights that transformers may not be able to
            return stored_fingerprint(config.model, found, cache)
        return streamed_digest(
            config.model, empty_model(found, dtype, config.trust_remote_code), dtype, cache
        )

    return _streamed_or_loaded(config, found, dtype, streamed, identity.fingerprint)


def _weights(config: EngineConfig, found: PretrainedConfig, dtype: torch.dtype) -> str:
    def streamed(cache: str | None) -> str:
        empty = empty_model(found, dtype, config.trust_remote_code)
        return streamed_digest(config.model, empty, dtype, cache, identity.weights_digest_of)

    return _streamed_or_loaded(config, found, dtype, streamed, identity.weights_digest)


def _streamed_or_loaded(
    config: EngineConfig,
    found: PretrainedConfig,
    dtype: torch.dtype,
    streamed: Callable[[str | None], str],
    loaded: Callable[[Any], str],
) -> str:
    """Make a digest of the weights from their files, given vLLM's folder of fetched models (``streamed``), or from the
    loaded model (``loaded``) where they cannot be read file by file."""
    try:
        return streamed(download_dir(config.vllm_args))
    except NotStreamable as why:
        log.info("the weights of %s are loaded for that: %s", config.model, why)
        return loaded(load_weights(config.model, found, dtype, config.trust_remote_code))


def _remembered(
    config: EngineConfig, dtype: str, digests: Path | None, kind: str, read: Callable[[], str]
) -> str:
    """Return a digest of the weights; ``kind`` distinguishes digests of the same weights. Computing one takes a pass
    over the files, so it is remembered until a file of the model changes."""
    name = _files_digest(config.model, dtype, kind)
    known = _read(digests)
    if name not in known:
        log.info("reading the weights of %s once, for their fingerprint", config.model)
        made = read()
        name = _files_digest(config.model, dtype, kind)  # for a hub id, the files exist only after the fetch
        known = {**known, name: made}
        if digests is not None:
            _write(digests, known)
    return known[name]


def download_dir(vllm_args: str) -> str | None:
    """Return the folder for the weights that vLLM fetches; None for the hub's own cache."""
    try:
        given = json.loads(vllm_args or "{}")
    except ValueError:  # ``options.engine_args`` refuses it with the reason
        return None
    return given.get("download_dir") if isinstance(given, dict) else None


def _files_digest(path: str, dtype: str, kind: str) -> str:
    folder = Path(path)
    if not folder.is_dir():
        found = cached_file(path, "config.json", _raise_exceptions_for_missing_entries=False)
        folder = Path(found).parent if found else folder
    files = []
    for file in sorted(p for p in folder.rglob("*") if p.is_file()) if folder.is_dir() else ():
        status = file.stat()
        files.append(f"{file.relative_to(folder)}|{status.st_size}|{status.st_mtime_ns}")
    parts = ("files", str(folder.resolve()), dtype, transformers.__version__, *files)
    return digest(*parts, kind) if kind else digest(*parts)


def _read(digests: Path | None) -> dict[str, str]:
    try:
        known = json.loads(digests.read_text(encoding="utf-8")) if digests is not None else {}
    except (OSError, ValueError):  # the file does not exist yet, or is damaged and will be written again
        return {}
    return known if isinstance(known, dict) else {}


def _write(digests: Path, known: dict[str, str]) -> None:
    try:
        digests.parent.mkdir(parents=True, exist_ok=True)
        partial = digests.with_suffix(".partial")
        partial.write_text(json.dumps(known), encoding="utf-8")
        partial.replace(digests)
    except OSError as error:
        log.warning("the model's fingerprint could not be kept: %s", error)
