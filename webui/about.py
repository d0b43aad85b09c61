"""Facts about the server for the page: ``/ui/about``, ``/ui/live``, ``/ui/policy``, ``/ui/samples``."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import FileResponse, JSONResponse, Response
from starlette.concurrency import run_in_threadpool

from mpic.errors import MPICError, NotFound, cut
from mpic.link import parse_policy
from mpic.version import VERSION
from mpic.webui import live, policies
from mpic.webui.plots import plots
from mpic.webui.proxy import ROOT
from mpic.webui.samples import sample_files, samples
from mpic.webui.sessions import Visitor

NO_STORE = {"cache-control": "no-store"}

PARAMETERS = {"demo": 6.6, "demo-plain": 6.6, "large": 13.7, "large-plain": 13.7}
"""Millions, of each demo model."""

DEMO_KNOWS = {
    "knows": [
        "drawings of coloured shapes and digits: what is where, which colour, how many",
        "short texts about people: where they live, their job, pet and friend",
        "cards and codes in short texts, across several documents at once",
    ],
    "not": "Nothing else. It has {} million parameters and has never seen a photograph or a fact about the world, "
    "so questions about those get a confident and wrong answer.",
    "instead": "mpic serve --model PATH_OR_HUB_ID",
}
OTHER_KNOWS = {
    "knows": [],
    "not": "What it knows, its own model card says.",
    "instead": None,
}


def knows(model: str) -> dict[str, Any]:
    """Returns what a model knows, what it does not know, and what a user can do in that case."""
    if model not in PARAMETERS:
        return OTHER_KNOWS
    return {**DEMO_KNOWS, "not": str(DEMO_KNOWS["not"]).format(PARAMETERS[model])}


def _about(app: FastAPI, visitor: Visitor) -> dict[str, Any]:
    """Returns the visitor, the model, the policies and the sample questions."""
    state = app.state.mpic
    info = state.engine.info
    return {
        "user": visitor.user,
        "role": visitor.role,
        "keyed": visitor.key is not None,
        "version": VERSION,
        "model": {
            **{name: getattr(info, name) for name in ("name", "dtype", "device", "context_length")},
            "images": "image" in info.modalities,
            **knows(info.name),
        },
        "policies": policies.menu(state.engine.policies(), state.config.engine.policy),
        "presses": policies.press_menu(state.engine.presses(), state.config.engine.press),
        "retrieval": policies.RETRIEVAL,
        "samples": [asdict(sample) for sample in samples(info.name)],
        "plots": [{"name": p.name, "title": p.title, "text": p.text} for p in plots()],
    }


def router(app: FastAPI) -> APIRouter:
    routes = APIRouter(prefix=ROOT, include_in_schema=False)

    @routes.get("/about")
    def about(request: Request) -> JSONResponse:
        return JSONResponse(_about(app, request.state.visitor), headers=NO_STORE)

    @routes.get("/alive")
    async def alive(request: Request) -> JSONResponse:
        """Shows that the server answers, and to whom: an open page then notices that somebody else has logged in. A
        visitor who is logged out gets 401."""
        state = app.state.mpic
        user = request.state.visitor.user
        try:
            state.engine.ready()
            await run_in_threadpool(state.library.folder.check)
        except MPICError as error:
            return JSONResponse({"ready": False, "message": error.message, "user": user}, headers=NO_STORE)
        return JSONResponse({"ready": True, "user": user}, headers=NO_STORE)

    @routes.get("/policy")
    def policy(name: str = "") -> JSONResponse:
        """Returns whether this server runs a policy of this name, and its description."""
        try:
            known = parse_policy(name[:80])
        except MPICError as error:
            return JSONResponse({"error": error.message}, headers=NO_STORE)
        if not app.state.mpic.engine.supports(known):
            refused = f"policy {known} does not run on this server's engine"
            return JSONResponse({"error": refused}, headers=NO_STORE)
        return JSONResponse({"name": known.name, "about": known.explanation}, headers=NO_STORE)

    @routes.get("/live")
    async def figures(request: Request) -> JSONResponse:
        """Returns the figures of the server, for administrators."""
        if request.state.visitor.role != "admin":
            return JSONResponse({"admin": False}, headers=NO_STORE)
        text = await run_in_threadpool(app.state.mpic.metrics.text)
        return JSONResponse({"admin": True, **live.figures(text.decode())}, headers=NO_STORE)

    @routes.get("/samples/{handle}")
    def sample(handle: str) -> Response:
        """Returns the original of a sample file."""
        path: Any = sample_files(app.state.mpic.engine.info.name).get(handle)
        if path is None:
            raise NotFound(f"no sample {cut(handle)!r}")
        return FileResponse(path, media_type="image/png" if path.suffix == ".png" else "text/plain")

    return routes
