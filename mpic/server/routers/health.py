"""``/health``: is it alive, will it answer, and what runs."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from fastapi import APIRouter
from fastapi.responses import JSONResponse
from starlette.concurrency import run_in_threadpool

from mpic import __version__
from mpic.errors import MPICError
from mpic.link import policy_names
from mpic.server.auth import CurrentUser
from mpic.server.state import State, StateDep

router = APIRouter(prefix="/health", tags=["health"])


@router.get("")
async def health(state: StateDep, user: CurrentUser) -> JSONResponse:
    """Readiness, the model, the attention implementation and the policies on offer. `engine` holds the engine's
    counters (queue, pages by state) for admins, and nothing for other users, whom they would tell what others do; when
    the engine is not ready it holds `error`, for everybody."""
    stats: dict[str, Any] = {}
    try:
        await _check(state)
        if user.role == "admin":
            stats = await run_in_threadpool(state.engine.stats)
        ready = True
    except MPICError as exc:
        stats, ready = {"error": exc.code}, False
    body = {
        "status": "ok" if ready else "unavailable",
        "live": True,
        "ready": ready,
        "version": __version__,
        "model": asdict(state.engine.info),
        "engine": stats,
        "policy": state.config.engine.policy,
        "policies": policy_names(),
    }
    return JSONResponse(body, status_code=200 if ready else 503)


@router.get("/live")
async def live() -> dict[str, bool]:
    """The process answers."""
    return {"live": True}


@router.get("/ready")
async def ready(state: StateDep) -> JSONResponse:
    """The engine takes requests, and the library's folder is there."""
    try:
        await _check(state)
    except MPICError as exc:
        return JSONResponse({"ready": False, "error": exc.code, "message": exc.message}, status_code=503)
    return JSONResponse({"ready": True})


async def _check(state: State) -> None:
    """Raises an error of the tree: what keeps the server from working."""
    state.engine.ready()
    await run_in_threadpool(state.library.home.check)
