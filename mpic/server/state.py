"""What the routes share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

from fastapi import Depends, Request

from mpic.server.workers import Rooms

if TYPE_CHECKING:
    from mpic.config import Config
    from mpic.engine.base import Engine
    from mpic.keys import KeyStore
    from mpic.library import Library
    from mpic.prompt import ChatTemplate
    from mpic.retriever import Retriever
    from mpic.server.metrics import Metrics
    from mpic.server.quotas import Quotas


@dataclass(frozen=True)
class State:
    """The parts a server is made of.

    Args:
        started: Unix time at which the server was made.
        rooms: threads for what may take long.
    """

    engine: Engine
    library: Library
    template: ChatTemplate
    config: Config
    started: int
    keys: KeyStore
    quotas: Quotas
    metrics: Metrics
    retriever: Retriever
    rooms: Rooms = field(default_factory=Rooms)


def get_state(request: Request) -> State:
    return request.app.state.mpic


StateDep = Annotated[State, Depends(get_state)]
