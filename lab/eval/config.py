"""The configuration of ``mpic eval run``: one TOML file, of which ``mpic eval example`` prints one (``cli.EXAMPLE``).

In addition to the options in the example there are ``title`` (of the report; left out: the model's name), ``at_once``
(questions in flight; more is faster, and leaves times out), ``fidelity``, ``device``, ``dtype`` (``auto`` is float32
on every CPU, so that results can be compared; a server's may not be), ``kv_dtype``,
``quantize`` (``int8``, ``int4``), ``packet`` (an adapter's file instead of the one beside the model), and ``pressed``
with ``presses``: policies that are asked over chunks under each of those presses (``mpic-16+snapkv-50``; it may stand
among the policies, as ``single`` may: ``mpic_lab.eval.single``). ``generation`` (1 or 2) says how large the images and
documents of the generated world are; left out: 2 for a model with 8,192 tokens of context or more, else 1; a hub id is
taken to have them.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache

from mpic.config import bundled_model
from mpic.config_values import ConfigError, read_toml
from mpic.data.bundled import generation_for
from mpic_lab.eval.contents import cell_name, digest_of
from mpic_lab.eval.linking import parse_linking
from mpic_lab.eval.metrics import METRICS
from mpic_lab.eval.tasks import Options, find
from mpic_lab.generator.worlds import WORLDS

DEFAULT_POLICIES = (
    "full", "prefix", "reuse", "mpic-8", "mpic-16", "mpic-32", "legolink-0", "legolink-16", "attnlink-16", "block-1",
    "cacheblend-15", "random-15", "nocache",
)  # fmt: skip


@dataclass(frozen=True)
class TaskEntry:
    """A ``[[task]]``: one cell for every number of chunks. ``source`` is the place where its file is published,
    ``metric`` the metric that the task is scored by instead of its own."""

    name: str
    path: str | None = None
    images: str | None = None
    chunks: tuple[int, ...] = (4,)
    questions: int | None = None
    split: str = "passage"
    tokens: int = 512
    max_length: int | None = None
    source: str | None = None
    metric: str | None = None
    lengths: tuple[int, ...] = Options.lengths
    depths: tuple[int, ...] = Options.depths


@dataclass(frozen=True)
class Judge:
    """An OpenAI-compatible endpoint that grades answers; the key comes from the environment, never from the file.
    ``images`` says whether it is shown the images; left out: as the rubric has it."""

    base_url: str
    model: str
    rubric: str | None = None
    images: bool | None = None
    key_variable: str = "JUDGE_API_KEY"


@dataclass(frozen=True)
class EvalConfig:
    """See the module's docstring. ``policies`` always include ``full``, with which all others are compared, and every
    policy of ``pressed`` over chunks under each of ``presses``."""

    tasks: tuple[TaskEntry, ...]
    model: str = field(default_factory=bundled_model)
    policies: tuple[str, ...] = DEFAULT_POLICIES
    pressed: tuple[str, ...] = ()
    presses: tuple[str, ...] = ()
    questions: int = 50
    seed: int = 0
    fidelity: bool = True
    at_once: int = 1
    judge: Judge | None = None
    folder: Path = Path()
    title: str | None = None
    device: str = "auto"
    dtype: str = "auto"
    kv_dtype: str = "auto"
    quantize: str = ""
    packet: str = ""
    generation: int | None = None

    def cells(self) -> list[tuple[str, Options]]:
        """Return (task, options) of every task and number of chunks."""
        found = []
        generation = self.generation or _generation_of(self.model)
        for entry in self.tasks:
            counts = entry.chunks if find(entry.name).counts_chunks else (0,)
            for count in counts:
                options = Options(
                    path=self._resolve(entry.path),
                    images=self._resolve(entry.images),
                    chunks=count,
                    questions=entry.questions or self.questions,
                    seed=self.seed,
                    split=entry.split,
                    tokens=entry.tokens,
                    max_length=entry.max_length,
                    metric=entry.metric,
                    lengths=entry.lengths,
                    depths=entry.depths,
                    generation=generation,
                )
                found.append((entry.name, options))
        return found

    def missing(self) -> list[str]:
        """Return a line for each local file or folder that a task reads and that does not exist, with its source, and
        for the adapter of packets."""
        lines = []
        if self.packet and not Path(self.packet).is_file():
            lines.append(
                f"packet {self.packet} does not exist; `mpic train packet --model {self.model}` makes it"
            )
        for entry in self.tasks:
            if not find(entry.name).reads_file:
                continue
            source = f"; published at {entry.source}" if entry.source else ""
            wanted = {"path": entry.path, "images": entry.images}
            if entry.path is None:
                lines.append(f"{entry.name} reads a local file: give its `path`{source}")
            for key, path in wanted.items():
                if path is not None and not (self.folder / path).exists():
                    lines.append(f"{entry.name}: {key} {self.folder / path} does not exist{source}")
        return lines

    def missing_model(self) -> str | None:
        """Return a line if the model is not on this disk, with the place where it is published: a first run fetches
        it."""
        if Path(self.model).is_dir():
            return None
        try:
            found = try_to_load_from_cache(self.model, "config.json")
        except ValueError:  # not a hub id either
            return f"model {self.model} does not exist"
        there = isinstance(found, str)
        return (
            None if there else f"model {self.model} is not here yet; published at huggingface.co/{self.model}"
        )

    def data(self) -> dict[str, list[Any]]:
        """Return the data that the samples of each cell come from, so that runs can be distinguished. Answers are kept
        by task and number of chunks.

        Raises:
            ConfigError: two tasks would answer under the same name and number of chunks.
        """
        found: dict[str, list[Any]] = {}
        for name, options in self.cells():
            cell = cell_name(name, options)
            if cell in found:
                raise ConfigError(
                    f"{cell}: asked for twice; give another split or file a run (--out) of its own"
                )
            file = None if options.path is None else options.path.name
            found[cell] = [file, options.split, options.tokens]
            if options.max_length is not None:
                found[cell].append(options.max_length)
            if options.metric is not None:
                found[cell].append(options.metric)
            if name.startswith("world-") and options.generation != 1:
                found[cell].append(f"generation {options.generation}")
        return found

    def _resolve(self, path: str | None) -> Path | None:
        return None if path is None else (self.folder / path).absolute()

    def fingerprint(self) -> str:
        """Return a fingerprint of the settings that must not change during a run: the model, its numbers and the seed.
        Policies and questions may be added to a run."""
        kept = {"model": _identity(self.model), "seed": self.seed, "dtype": self.dtype}
        if self.quantize:
            kept["quantize"] = self.quantize
        if self.kv_dtype != "auto":
            kept["kv_dtype"] = self.kv_dtype
        return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:16]


def load_eval_config(
    path: Path, model: str | None = None, *, questions: int | None = None, packet: Path | None = None
) -> EvalConfig:
    """Read a configuration.

    Args:
        model: a folder or hub id in place of the file's.
        questions: number of questions in every cell; overrides the file.
        packet: an adapter's file in place of the file's.

    Raises:
        ConfigError: a value cannot be used.
        UnknownPolicy, UnknownPress, TaskError: there is no policy, press or task of that name.
        UnsupportedParameter: a policy cannot be combined with a press.
    """
    body = read_toml(path)
    entries = body.pop("task", [])
    if not entries:
        raise ConfigError(f"{path} has no [[task]]")
    if not isinstance(entries, list):
        raise ConfigError(f"{path}: task is a list of tables: write [[task]]")
    tasks = tuple(_build(TaskEntry, entry, f"[[task]] {n}") for n, entry in enumerate(entries, 1))
    for number, entry in enumerate(tasks, 1):
        find(entry.name)
        if entry.metric is not None and entry.metric not in METRICS:
            raise ConfigError(
                f"[[task]] {number}: metric is one of {', '.join(METRICS)}, not {entry.metric!r}"
            )
    judge = _build(Judge, body.pop("judge"), "[judge]") if "judge" in body else None
    config = _build(EvalConfig, {**body, "tasks": tasks, "judge": judge, "folder": path.parent}, str(path))
    asked = [
        *config.policies,
        *(f"{policy}+{press}" for policy in config.pressed for press in config.presses),
    ]
    policies = tuple(dict.fromkeys(("full", *(parse_linking(name).name for name in asked))))
    model = config.model if model is None else str(model)
    if model == config.model and (path.parent / model / "config.json").is_file():
        model = str((path.parent / model).absolute())
    adapter = packet or (path.parent / config.packet if config.packet else None)
    if config.generation is not None and config.generation not in WORLDS:
        raise ConfigError(f"{path}: generation is 1 or 2, not {config.generation}")
    config = dataclasses.replace(
        config, policies=policies, model=model, packet=str(adapter.absolute()) if adapter else ""
    )
    if questions is not None:
        tasks = tuple(dataclasses.replace(entry, questions=None) for entry in tasks)
        config = dataclasses.replace(config, tasks=tasks, questions=questions)
    config.data()
    return config


def _identity(model: str) -> list[Any]:
    """Return a hub id as it is; of a local folder its name, configuration and digests of its weight files."""
    folder = Path(model)
    if not folder.is_dir():
        return [model]
    weights = sorted(path for path in folder.iterdir() if path.suffix in (".safetensors", ".bin"))
    config = folder / "config.json"
    return [
        folder.name,
        config.read_text(encoding="utf-8") if config.is_file() else "",
        *((path.name, digest_of(path)) for path in weights),
    ]


def _generation_of(model: str) -> int:
    """Return the generation of the world that suits a model; a hub id is assumed to have room for the second."""
    path = Path(model) / "config.json"
    if not path.is_file():
        return 2
    config = json.loads(path.read_text(encoding="utf-8"))
    text = config.get("text_config", config)
    return generation_for(int(text.get("max_position_embeddings", 8192)))


_TYPES: dict[str, tuple[type, str, str]] = {
    "int": (int, "a whole number", "whole numbers"),
    "str": (str, "a string", "strings"),
    "bool": (bool, "true or false", "true or false"),
}
_POSITIVE = ("questions", "at_once", "tokens", "chunks", "max_length", "lengths")


def _build(cls: type, values: Any, where: str) -> Any:
    if not isinstance(values, dict):
        raise ConfigError(f"{where} is a table, not {values!r}")
    hints = {f.name: str(f.type) for f in dataclasses.fields(cls)}
    unknown = sorted(set(values) - set(hints))
    if unknown:
        raise ConfigError(f"{where}: unknown {', '.join(unknown)}; known: {', '.join(sorted(hints))}")
    for name, value in values.items():
        _check(where, name, value, hints[name])
    tuples = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
    try:
        return cls(**tuples)
    except TypeError as error:  # a required field is missing
        raise ConfigError(f"{where}: {error}") from None


def _check(where: str, name: str, value: Any, hint: str) -> None:
    """Check a value of the file against the type that its field is annotated with."""
    several = hint.startswith("tuple[")
    plain = hint.removeprefix("tuple[").removesuffix(", ...]").removesuffix(" | None")
    if plain not in _TYPES:
        return  # this field is computed, not read from the file
    kind, one, many = _TYPES[plain]
    parts = value if several else [value]
    if not isinstance(parts, list) or not all(type(part) is kind for part in parts):
        raise ConfigError(f"{where}: {name} is {f'a list of {many}' if several else one}, not {value!r}")
    if name in _POSITIVE and (not parts or min(parts) < 1):
        raise ConfigError(f"{where}: {name} is at least 1, not {value!r}")
