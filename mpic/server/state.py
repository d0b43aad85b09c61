"""What the routes share, and who is asking."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from fastapi import Depends, Request

if TYPE_CHECKING:
    from mpic.config import Config
    from mpic.engine.base import Engine
    from mpic.library import Library
    from mpic.prompt import ChatTemplate

LOCAL_USER = "local"


@dataclass(frozen=True)
class State:
    """The parts a server is made of.

    Args:
        started: Unix time at which the server was made.
    """

    engine: Engine
    library: Library
    template: ChatTemplate
    config: Config
    started: int


def get_state(request: Request) -> State:
    return request.app.state.mpic


def get_user(request: Request) -> str:
    """Whose caches a request may see. Without API keys there is one user, and the server binds to loopback only."""
    return LOCAL_USER


StateDep = Annotated[State, Depends(get_state)]
UserDep = Annotated[str, Depends(get_user)]
