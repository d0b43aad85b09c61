"""``/v1/models``: the served model."""

from __future__ import annotations

from fastapi import APIRouter

from mpic.api.resources import ModelList, ModelObject
from mpic.config import model_names
from mpic.errors import ModelNotFound, cut
from mpic.server.state import State, StateDep

router = APIRouter(prefix="/v1/models", tags=["models"])


def check_model(state: State, name: str | None) -> None:
    """Raise ModelNotFound unless ``name`` is not given, or a name of the served model."""
    known = _names(state)
    if name is not None and name not in known and "*" not in known:
        raise ModelNotFound(
            f"model {cut(name)!r} is not served here; {known[0]!r} is, and would answer to other names that its "
            "administrator lists in [server] model_names",
            param="model",
        )


def _names(state: State) -> list[str]:
    own = state.engine.info.name
    return [own, *(name for name in dict.fromkeys(model_names(state.config.server)) if name != own)]


def _served(state: State, name: str) -> ModelObject:
    info = state.engine.info
    return ModelObject(
        id=name,
        created=state.started,
        context_length=info.context_length,
        modalities=tuple(info.modalities),
        policies=tuple(state.engine.policies()),
        presses=tuple(state.engine.presses()),
    )


@router.get("")
def list_models(state: StateDep) -> ModelList:
    """List the served model under each of its names, its own first."""
    return ModelList(data=tuple(_served(state, name) for name in _names(state) if name != "*"))


@router.get("/{model:path}")
def get_model(model: str, state: StateDep) -> ModelObject:
    """Show the served model, by one of its names."""
    check_model(state, model)
    return _served(state, model)
