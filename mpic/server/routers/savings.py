"""``/v1/savings``: the savings by reuse, over time."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Annotated, Literal

from fastapi import APIRouter, Query, Request, Response

from mpic.api.savings import ReuseOfItem, Savings, SavingsDay, SavingsSum, SavingsUser
from mpic.errors import Forbidden
from mpic.library import File, Reference
from mpic.server.auth import CurrentUser
from mpic.server.routers.common import listed
from mpic.server.savings import DAYS_KEPT, ChunkReuse
from mpic.server.state import State, StateDep

router = APIRouter(prefix="/v1/savings", tags=["savings"])

ITEMS = 1_000
"""Files or references whose reuse is shown: the oldest."""
DAY = 86_400


@router.get("", response_model=Savings)
async def savings(
    request: Request,
    state: StateDep,
    user: CurrentUser,
    days: Annotated[int, Query(ge=1, le=DAYS_KEPT, description="number of days, today included")] = 30,
    scope: Annotated[
        Literal["mine", "all"], Query(description="`all` (for admins): every user and the references")
    ] = "mine",
) -> Response:
    """Show the prompt tokens that were not computed because of reuse, by day, and the files that were never reused.

    Milliseconds saved are `ms_per_token` times the saved tokens.
    """
    if scope == "all" and user.role != "admin":
        raise Forbidden("only admins may see the savings of all users", param="scope")
    return await listed(request, state, lambda: _savings(state, None if scope == "all" else user.id, days))


def _savings(state: State, whose: str | None, days: int) -> Savings:
    """Return the savings of a user, or of all."""
    ledger = state.savings
    first = time.strftime("%Y-%m-%d", time.gmtime(time.time() - (days - 1) * DAY))
    by_day = ledger.days(whose, first)
    since = ledger.begun(whose)
    items, more_items = _items(state, whose)
    return Savings(
        scope="all" if whose is None else "mine",
        since=None if since is None else int(since),
        total=_sum([row[1:] for row in by_day]),
        days=tuple(SavingsDay(day=day, **_named(rest)) for day, *rest in by_day),
        ms_per_token=ledger.ms_per_token(whose),
        users=tuple(SavingsUser(user=name, **_named(rest)) for name, *rest in ledger.users(first))
        if whose is None
        else (),
        items=tuple(items),
        more_items=more_items,
    )


def _items(state: State, user: str | None) -> tuple[list[ReuseOfItem], bool]:
    """Return the reuse of a user's files, or of the references if None, the least reused first, and whether there are
    newer ones that were left out."""
    uses = state.savings.uses(user)
    if user is None:
        page = state.library.references.listing(None, ITEMS, "asc", None)
        items = [
            _reuse(reference, reference.title, [str(reference.key)], uses) for reference in page.references
        ]
    else:
        page = state.library.files.page(user, limit=ITEMS, order="asc")
        # prompts link the pieces of a document that is cut, in place of the whole
        pieces = state.library.files.with_pieces(user, uses)
        items = [
            _reuse(file, file.label, [str(file.key), *pieces.get(file.id, ())], uses) for file in page.files
        ]
    return sorted(items, key=lambda item: item.uses), page.has_more


def _reuse(
    item: File | Reference, name: str, keys: Iterable[str], uses: dict[str, ChunkReuse]
) -> ReuseOfItem:
    """Return the reuse of what is linked as these chunks. An answer links all of them, so uses are not added up."""
    used = [uses[key] for key in dict.fromkeys(keys) if key in uses]
    return ReuseOfItem(
        id=item.id,
        name=name,
        kind=item.kind,
        bytes=item.bytes,
        created_at=int(item.created_at),
        uses=max((one.uses for one in used), default=0),
        saved_tokens=sum(one.saved for one in used),
        last_used=int(max(one.last for one in used)) if used else None,
    )


def _sum(rows: list[tuple[int, ...]]) -> SavingsSum:
    return SavingsSum(**_named([sum(column) for column in zip(*rows, strict=True)] or [0, 0, 0]))


def _named(values: Iterable[int]) -> dict[str, int]:
    return dict(zip(("answers", "prompt_tokens", "saved_tokens"), values, strict=True))
