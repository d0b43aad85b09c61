"""Computes digests of a checkpoint tensor by tensor from its safetensors shards. They equal those of the loaded model
(``identity.fingerprint``, ``identity.weights_digest``), but need no second copy of the weights in memory."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import PretrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
from transformers.utils import cached_file

from mpic.model.identity import fingerprint_of

log = logging.getLogger(__name__)

DigestOf = Callable[[Any, Iterable[tuple[str, torch.Tensor]]], str]
"""A function that makes a digest of a configuration and of tensors, which come in the order of their names."""
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
_FLOATING = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
"""The types that a model can be loaded in, by their names in safetensors files."""


class NotStreamable(Exception):
    """The weights of the model can only be known by loading the checkpoint; the message says why."""


def streamed_digest(
    path: str,
    model: PreTrainedModel,
    dtype: torch.dtype,
    cache: str | None = None,
    digest_of: DigestOf = fingerprint_of,
) -> str:
    """Return a digest of the model that the checkpoint makes in a dtype.

    Args:
        path: local folder or hub id.
        model: made from the checkpoint's configuration in this dtype, on the meta device.
        cache: folder of fetched models; None for the hub's own.
        digest_of: makes the digest; it is the fingerprint unless given.

    Raises:
        NotStreamable: there are no safetensors files of the weights that can be read, or the weights are converted
            while they are loaded.
    """
    try:
        return _streamed(_shards(path, cache), model, dtype, digest_of)
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise NotStreamable(f"its files cannot be read: {error!r}") from error


def stored_fingerprint(path: str, config: PretrainedConfig, cache: str | None = None) -> str:
    """Return a digest of a configuration and of the tensors as they are in the files. It is meant for quantised
    checkpoints, whose weights only the program that runs them unpacks.

    Raises:
        NotStreamable: there are no safetensors files of the weights that can be read.
    """
    try:
        with ExitStack() as files:
            opened = [files.enter_context(safe_open(shard, framework="pt")) for shard in _shards(path, cache)]
            where = {key: file for file in opened for key in file.keys()}  # noqa: SIM118 - not a dictionary
            return fingerprint_of(config, ((key, where[key].get_tensor(key)) for key in sorted(where)))
    except (OSError, ValueError, SafetensorError) as error:
        raise NotStreamable(f"its files cannot be read: {error!r}") from error


def stored_dtype(path: str, cache: str | None = None) -> str | None:
    """Return the dtype of a checkpoint's first floating tensor, as transformers' ``dtype="auto"`` finds it; None where
    no safetensors files can be read.

    Args:
        path, cache: see ``streamed_digest``.
    """
    try:
        for shard in _shards(path, cache):
            with safe_open(shard, framework="pt") as file:
                for key in file.keys():  # noqa: SIM118 - not a dictionary
                    found = _FLOATING.get(file.get_slice(key).get_dtype())
                    if found is not None:
                        return found
    except (NotStreamable, OSError, ValueError, SafetensorError) as error:
        log.info("the dtype of the weights of %s cannot be read: %s", path, error)
    return None


def _streamed(shards: list[Path], model: PreTrainedModel, dtype: torch.dtype, digest_of: DigestOf) -> str:
    if getattr(model, "_keep_in_fp32_modules", None) or getattr(model, "_keep_in_fp32_modules_strict", None):
        raise NotStreamable("some of its weights stay in float32")
    wanted = model.state_dict()
    sources = _sources(shards, model, wanted)
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    missing = sorted(name for name in wanted if tied.get(name, name) not in sources)
    if missing:
        raise NotStreamable(f"its files have no {missing[0]}")
    with ExitStack() as files:
        opened = {
            shard: files.enter_context(safe_open(shard, framework="pt"))
            for shard in {shard for shard, _ in sources.values()}
        }

        def tensors() -> Iterator[tuple[str, torch.Tensor]]:
            for name, like in sorted(wanted.items()):
                shard, key = sources[tied.get(name, name)]
                tensor = opened[shard].get_tensor(key)
                if tensor.shape != like.shape:
                    raise NotStreamable(f"{name} is {tuple(tensor.shape)} in its file")
                yield name, tensor.to(dtype) if tensor.is_floating_point() else tensor

        return digest_of(model.config, tensors())


def _shards(path: str, cache: str | None) -> list[Path]:
    """Return the safetensors files of a checkpoint. Those of a hub id that are not on this machine yet are fetched
    into the cache, where the program that loads the model finds them."""
    found = _listed(path, cache, offline=True)
    if found is None and not Path(path).is_dir():
        log.info("the weights of %s are not all on this machine; they are fetched first", path)
        found = _listed(path, cache, offline=False)
    if found is None:
        raise NotStreamable("its weights are in no safetensors files that can be had")
    return found


def _listed(path: str, cache: str | None, offline: bool) -> list[Path] | None:
    """Return the files that a checkpoint's index names, or its only file; None if one of them cannot be had.
    ``offline``: look on this machine only."""
    index = _find(path, INDEX, cache, offline)
    names = set(json.loads(index.read_text())["weight_map"].values()) if index is not None else {SINGLE}
    files = []
    for name in sorted(names):
        file = _find(path, name, cache, offline)
        if file is None:  # the others need not be fetched
            return None
        files.append(file)
    return files


def _find(path: str, name: str, cache: str | None, offline: bool) -> Path | None:
    if Path(path).is_dir():
        found = Path(path) / name
        return found if found.is_file() else None
    cached = cached_file(
        path, name, cache_dir=cache, local_files_only=offline, _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )  # fmt: skip
    return Path(cached) if cached else None


def _sources(
    shards: list[Path], model: PreTrainedModel, wanted: dict[str, Any]
) -> dict[str, tuple[Path, str]]:
    """Return for each weight, by its name in the model, the file and its name in the file. The names differ in the way
    in which transformers converts them when it loads the files."""
    mapping = get_model_conversion_mapping(model)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    prefix = model.base_model_prefix
    sources: dict[str, tuple[Path, str]] = {}
    for shard in shards:
        with safe_open(shard, framework="pt") as file:
            keys = list(file.keys())
        for key in keys:
            name, converted = rename_source_key(key, renamings, converters, prefix, wanted)
            if name not in wanted and key in wanted:
                name, converted = rename_source_key(key, [], [], prefix, wanted)
            if converted is not None:
                raise NotStreamable(f"{key} is converted when it is loaded")
            if name in sources:
                raise NotStreamable(f"{name} is there twice")
            sources[name] = (shard, key)
    return sources
