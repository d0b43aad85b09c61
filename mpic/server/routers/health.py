"""``/health``: liveness, readiness, and the model and engine that run."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from fastapi import APIRouter
from fastapi.responses import JSONResponse
from starlette.concurrency import run_in_threadpool

from mpic.api.resources import AutoChoice, Health
from mpic.errors import MPICError
from mpic.link import AUTO, named_policy
from mpic.server.auth import CurrentUser
from mpic.server.state import State, StateDep
from mpic.version import VERSION

router = APIRouter(prefix="/health", tags=["health"])


@router.get("")
async def health(state: StateDep, user: CurrentUser) -> JSONResponse:
    """Readiness, the model, the attention implementation and the policies on offer. `engine` holds the engine's
    counters (queue, pages by state) for admins alone, because they reveal the activity of other users. When the engine
    is not ready it holds `error`, for everybody. `tiers`, for admins too, holds those of the tiers of compiled chunks;
    of a remote one they tell why chunks are not loaded from it (`up`, `slower`)."""
    stats: dict[str, Any] = {}
    tiers: dict[str, dict[str, int]] = {}
    try:
        await _check(state)
        if user.role == "admin":
            stats = await run_in_threadpool(state.engine.stats)
            tiers = await run_in_threadpool(state.library.store.tiers)
        ready = True
    except MPICError as exc:
        stats, ready = {"error": exc.code}, False
    body = Health(
        status="ok" if ready else "unavailable",
        live=True,
        ready=ready,
        version=VERSION,
        model=asdict(state.engine.info),
        engine=stats,
        policy=(named_policy(state.config.engine.policy) or state.auto.default).name,
        auto=AutoChoice(
            default=state.config.engine.policy == AUTO,
            policies=state.auto.policies,
            why=state.auto.explanation,
        ),
        policies=tuple(state.engine.policies()),
        press=state.config.engine.press,
        presses=tuple(state.engine.presses()),
        tiers=tiers,
    )
    shown = body.model_dump(mode="json", exclude_unset=True)  # counters of the engine
    return JSONResponse(shown, status_code=200 if ready else 503)


@router.get("/live")
async def live() -> dict[str, bool]:
    """Answer while the process runs."""
    return {"live": True}


@router.get("/ready")
async def ready(state: StateDep) -> JSONResponse:
    """Succeed while the engine takes requests, the library's folder exists, and its disk can be read and written."""
    try:
        await _check(state)
    except MPICError as exc:
        return JSONResponse({"ready": False, "error": exc.code, "message": exc.message}, status_code=503)
    return JSONResponse({"ready": True})


async def _check(state: State) -> None:
    """Raise the MPICError that keeps the server from working, if there is one. It waits for none of the threads that
    requests use."""
    state.engine.ready()
    await state.probe.run()
