"""``/v1/savings``: the savings by reuse, over time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Annotated, Literal

from fastapi import APIRouter, Query

from mpic.api.savings import ReuseOfItem, Savings, SavingsDay, SavingsSum, SavingsUser
from mpic.errors import Forbidden
from mpic.library import File, Reference
from mpic.server.auth import CurrentUser
from mpic.server.savings import DAYS_KEPT, ChunkReuse
from mpic.server.state import State, StateDep

router = APIRouter(prefix="/v1/savings", tags=["savings"])

ITEMS = 1_000
DAY = 86_400


@router.get("")
def savings(
    state: StateDep,
    user: CurrentUser,
    days: Annotated[int, Query(ge=1, le=DAYS_KEPT, description="number of days, today included")] = 30,
    scope: Annotated[
        Literal["mine", "all"], Query(description="`all` (for admins): every user and the references")
    ] = "mine",
) -> Savings:
    """Show the prompt tokens that were not computed because of reuse, by day, and the files that were never reused.

    Milliseconds saved are `ms_per_token` times the saved tokens.
    """
    if scope == "all" and user.role != "admin":
        raise Forbidden("only admins may see the savings of all users", param="scope")
    ledger, whose = state.savings, None if scope == "all" else user.id
    first = time.strftime("%Y-%m-%d", time.gmtime(time.time() - (days - 1) * DAY))
    by_day = ledger.days(whose, first)
    since = ledger.begun()
    return Savings(
        scope=scope,
        since=None if since is None else int(since),
        total=_sum([row[1:] for row in by_day]),
        days=tuple(SavingsDay(day=day, **_named(rest)) for day, *rest in by_day),
        ms_per_token=ledger.ms_per_token(),
        users=tuple(SavingsUser(user=name, **_named(rest)) for name, *rest in ledger.users(first))
        if scope == "all"
        else (),
        items=_items(state, whose),
    )


def _items(state: State, user: str | None) -> tuple[ReuseOfItem, ...]:
    """Returns the reuse of a user's files, or of the references if None, the least reused first."""
    if user is None:
        references = state.library.references.listing(None, ITEMS, "asc", None).references
        items = _counted(references, state.savings.uses(None), lambda reference: reference.title)
    else:
        files = state.library.files.page(user, limit=ITEMS, order="asc").files
        items = _counted(files, state.savings.uses(user), lambda file: file.label)
    return tuple(sorted(items, key=lambda item: item.uses))


def _counted(
    found: Iterable[File] | Iterable[Reference], uses: dict[str, ChunkReuse], name: Callable[..., str]
) -> list[ReuseOfItem]:
    out = []
    for item in found:
        used = uses.get(str(item.key))
        out.append(
            ReuseOfItem(
                id=item.id,
                name=name(item),
                kind=item.kind,
                bytes=item.bytes,
                created_at=int(item.created_at),
                uses=used.uses if used else 0,
                saved_tokens=used.saved if used else 0,
                last_used=int(used.last) if used else None,
            )
        )
    return out


def _sum(rows: list[tuple[int, ...]]) -> SavingsSum:
    return SavingsSum(**_named([sum(column) for column in zip(*rows, strict=True)] or [0, 0, 0]))


def _named(values: Iterable[int]) -> dict[str, int]:
    return dict(zip(("answers", "prompt_tokens", "saved_tokens"), values, strict=True))
