"""``/metrics``: for Prometheus."""

from __future__ import annotations

from fastapi import APIRouter
from fastapi.responses import JSONResponse, PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.concurrency import run_in_threadpool

from mpic.server.auth import MonitorUser
from mpic.server.state import StateDep

router = APIRouter(tags=["health"])


@router.get(
    "/metrics",
    response_class=JSONResponse,
    responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}},
)
async def metrics(state: StateDep, user: MonitorUser) -> PlainTextResponse:
    """Show times of answers, tokens reused and recomputed, tiers, evictions and pages, in Prometheus' text format.
    With API keys it needs one with the role metrics or admin."""
    text = await run_in_threadpool(state.metrics.text)
    return PlainTextResponse(text, media_type=CONTENT_TYPE_LATEST)
