"""The policy ``auto``: the cheapest policy that a calibration of this very model has shown to lose little enough.

``mpic calibrate`` measures a model and writes a file, by the model's digest and the type of its stored KV. Where there
is none, ``auto`` is ``prefix``, which is exact.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from mpic.config import ConfigError
from mpic.errors import MPICError, UnsupportedParameter
from mpic.kv.chunk import Chunk
from mpic.link import Policy, parse_policy
from mpic.link.pressing import check_presses
from mpic.press import parse_press

log = logging.getLogger(__name__)

FOLDER = "calibrations"
"""The folder of calibrations in a library's folder."""
BUNDLED = "*/calibration-*.json"
"""The calibrations of the bundled models, beside their weights: one for each type of KV."""
MOST_BYTES = 1 << 16
"""The size in bytes up to which a calibration is read."""
EXACT = "prefix"
"""The policy of everything that is not calibrated."""
KINDS: dict[str, str] = {"image": "images", "text": "documents"}
"""Kinds of chunks that can be calibrated, and their names in the plural."""

_STRICT = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class MeasuredPolicy(BaseModel):
    """Points of 100 that a policy lost against ``full``, with the 95 % interval, over ``questions`` questions of one
    kind; the KL divergence of the first token in nats; how many times fewer operations than ``full``."""

    model_config = _STRICT
    policy: str
    questions: int = Field(ge=1)
    lost: float
    low: float
    high: float
    kl: float | None = None
    saved: float = Field(gt=0)

    @field_validator("policy")
    @classmethod
    def _serves_all(cls, name: str) -> str:
        if why := unfit(parse_policy(name)):
            raise ValueError(why)
        return name


class Calibration(BaseModel):
    """A calibration.

    Args:
        model: digest of the model, as its chunks have it.
        kv_dtype: type of the stored keys and values.
        name: name of the model, for people.
        bound: most points that a policy may lose: the upper end of its interval.
        kinds: kind of chunk -> the policies that were tried, cheapest first.
    """

    model_config = _STRICT
    format: Literal[1] = 1
    model: str
    kv_dtype: str
    name: str
    bound: float = Field(gt=0, le=100)
    kinds: dict[str, tuple[MeasuredPolicy, ...]]

    @field_validator("kinds")
    @classmethod
    def _are_known(cls, kinds: dict[str, Any]) -> dict[str, Any]:
        if unknown := kinds.keys() - KINDS.keys():
            raise ValueError(f"no kinds that can be calibrated: {', '.join(sorted(unknown))}")
        return kinds

    def path(self, folder: Path) -> Path:
        """Return the file in which a library's folder keeps it."""
        return path_of(folder, self.model, self.kv_dtype)


class Unusable(Exception):
    """A calibration that is not used; the message has its path and says why."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"{path} is not used: {reason}")


def unfit(policy: Policy) -> str | None:
    """Return the reason why ``auto`` may not choose a policy, or None: it must run on both engines, for every request,
    over chunks that are compiled as they are."""
    if needs := policy.needs():
        return f"{policy} cannot be chosen by auto: {', '.join(sorted(need.value for need in needs))}"
    return None if policy.context else f"{policy} cannot be chosen by auto: it leaves chunks out"


def path_of(folder: Path, model: str, kv_dtype: str) -> Path:
    """Return the file of a model's calibration in a library's folder."""
    return folder / FOLDER / f"{model[:16]}-{kv_dtype}.json"


def kv_dtype_of(info: Any) -> str:
    """Return the type of the KV that a model (``mpic.model.info.ModelInfo``) stores."""
    return info.details.get("kv_dtype", info.dtype)


def read_calibration(path: Path) -> Calibration:
    """Read a calibration. Raise Unusable, FileNotFoundError."""
    try:
        if path.exists() and not path.is_file():
            raise Unusable(path, "it is not a file")
        with path.open("rb") as file:
            content = file.read(MOST_BYTES + 1)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise Unusable(path, f"it cannot be read: {error}") from None
    if len(content) > MOST_BYTES:
        raise Unusable(path, f"it is larger than {MOST_BYTES} bytes")
    try:
        return Calibration.model_validate_json(content)
    except (ValidationError, MPICError) as error:
        first = error.errors()[0] if isinstance(error, ValidationError) else {"loc": (), "msg": str(error)}
        where = ".".join(map(str, first["loc"]))
        raise Unusable(path, f"it is damaged: {f'{where}: ' if where else ''}{first['msg']}") from None


@dataclass(frozen=True)
class Auto:
    """The choice of ``auto`` for one model.

    Args:
        kinds: the kinds of chunks that the model takes and that can be calibrated.
        calibration: the model's, if it has one.
        problem: why a calibration that was found is not used.
    """

    kinds: tuple[str, ...] = tuple(KINDS)
    calibration: Calibration | None = None
    problem: str = ""

    @classmethod
    def of_model(cls, info: Any, folder: Path) -> Auto:
        """Look for the calibration of a model in a library's folder, then among the bundled ones.

        A file that cannot be used is named in the log and in ``problem``, and the model counts as not calibrated.

        Args:
            info: the model's ``ModelInfo``.
        """
        kinds = tuple(kind for kind in KINDS if kind in info.modalities)
        try:
            return cls(kinds, _found(folder, info.digest, kv_dtype_of(info)))
        except Unusable as reason:
            log.warning("%s; auto serves %s", reason, EXACT)
            return cls(kinds, problem=str(reason))

    def for_chunks(self, chunks: Iterable[Chunk]) -> Policy:
        """Return the policy of a prompt with these chunks. That a press costs something is not counted: whoever
        compressed them has chosen it."""
        return self.for_kinds({chunk.kind for chunk in chunks} or self.kinds)

    def for_kinds(self, kinds: Collection[str]) -> Policy:
        """Return the cheapest policy that is within the bound for each of these kinds of chunks."""
        first, *others = [self._within(kind) for kind in sorted(kinds)]
        common = (name for name in first if all(name in names for names in others))
        return parse_policy(next(common, EXACT))

    def check_press(self, press: str) -> None:
        """Refuse a server's press that would have no effect or cannot be combined with the policy. Raise
        ConfigError."""
        try:
            check_presses(self.default, [press])
        except UnsupportedParameter as refused:
            raise ConfigError(refused.message, param="press") from None
        if parse_press(press) is not None and not self.default.uses_chunks:
            raise ConfigError(
                f"press {press} has no effect under policy auto, which is {self.explanation}", param="press"
            )

    @property
    def default(self) -> Policy:
        """The policy of a prompt with chunks of every kind that the model takes."""
        return self.for_kinds(self.kinds)

    @property
    def policies(self) -> dict[str, str]:
        """The policy of each kind that the model takes, by name."""
        return {kind: self.for_kinds([kind]).name for kind in self.kinds}

    @property
    def explanation(self) -> str:
        """One line that says what ``auto`` means here, and why."""
        if self.calibration is None:
            why = self.problem or "this model is not calibrated"
            return f"{EXACT}, exact: {why}. `mpic calibrate` measures what reuse costs, `--policy mpic-32` chooses it"
        chosen = {kind: (name, self._within(kind).get(name)) for kind, name in self.policies.items()}
        if all(shown is None for _, shown in chosen.values()):
            return f"{EXACT}, exact: no policy was shown to lose at most {self.calibration.bound:g} points of 100"
        parts = [
            f"{name} for {KINDS[kind]} (exact)" if shown is None
            else f"{name} for {KINDS[kind]} (at most {shown.high:.1f} points of 100 lost, {shown.questions} questions)"
            for kind, (name, shown) in chosen.items()
        ]  # fmt: skip
        return ", ".join(parts)

    def _within(self, kind: str) -> Mapping[str, MeasuredPolicy]:
        """Return the policies that are within the bound for a kind, cheapest first."""
        if self.calibration is None:
            return {}
        tried = self.calibration.kinds.get(kind, ())
        return {one.policy: one for one in tried if one.high <= self.calibration.bound}


def _found(folder: Path, model: str, kv_dtype: str) -> Calibration | None:
    """Return the calibration of a model, the operator's own before a bundled one. Raise Unusable."""
    own = path_of(folder, model, kv_dtype)
    with suppress(FileNotFoundError):
        found = read_calibration(own)
        if (found.model, found.kv_dtype) != (model, kv_dtype):
            raise Unusable(own, f"it is of another model or another type of KV ({found.name})")
        return found
    bundled = Path(str(files("mpic.data") / "models")).glob(BUNDLED)
    mine = (one for one in map(read_calibration, bundled) if (one.model, one.kv_dtype) == (model, kv_dtype))
    return next(mine, None)
