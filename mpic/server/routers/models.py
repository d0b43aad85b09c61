"""``/v1/models``: the served model."""

from __future__ import annotations

from fastapi import APIRouter

from mpic.api.resources import ModelList, ModelObject
from mpic.errors import ModelNotFound, cut
from mpic.server.state import State, StateDep

router = APIRouter(prefix="/v1/models", tags=["models"])


def check_model(state: State, name: str | None) -> None:
    """Raise ModelNotFound unless ``name`` is the served model (or not given)."""
    served = state.engine.info.name
    if name is not None and name != served:
        raise ModelNotFound(f"model {cut(name)!r} is not served here; {served!r} is", param="model")


def _served(state: State) -> ModelObject:
    info = state.engine.info
    return ModelObject(
        id=info.name,
        created=state.started,
        context_length=info.context_length,
        modalities=tuple(info.modalities),
        policies=tuple(state.engine.policies()),
        presses=tuple(state.engine.presses()),
    )


@router.get("")
def list_models(state: StateDep) -> ModelList:
    """List the served model."""
    return ModelList(data=(_served(state),))


@router.get("/{model:path}")
def get_model(model: str, state: StateDep) -> ModelObject:
    """Show the served model, by name."""
    check_model(state, model)
    return _served(state)
