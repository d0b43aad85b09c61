"""The savings by reuse, as ``/v1/savings`` returns them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from mpic.api.base import ApiObject, one_of


class SavingsSum(ApiObject):
    """Answers, and the tokens of their prompts. ``saved_tokens`` are those that were not computed."""

    answers: int
    prompt_tokens: int
    saved_tokens: int


class SavingsDay(SavingsSum):
    day: str = Field(description="date in UTC, such as 2026-03-31")


class SavingsUser(SavingsSum):
    user: str


class ReuseOfItem(ApiObject):
    """The number of times that answers have reused a file or a reference since the ledger was begun."""

    id: str
    name: str = Field(description="handle, file name or title")
    kind: Annotated[str, one_of("image", "text", "video")]
    bytes: int
    created_at: int
    uses: int = Field(description="answers that reused some of its tokens")
    saved_tokens: int
    last_used: int | None = Field(description="Unix time of the last of these answers")


class Savings(ApiObject):
    """Tokens that were not computed because their KV was there already, by day."""

    object: Literal["savings"] = "savings"
    scope: Annotated[str, one_of("mine", "all")]
    since: int | None = Field(
        description="Unix time of the first answer that was counted, or of the day of your first one"
    )
    total: SavingsSum
    days: tuple[SavingsDay, ...] = Field(description="days with answers, oldest first")
    ms_per_token: float | None = Field(
        description="milliseconds that computing one more prompt token takes, fitted to this server's answers; null: "
        "not known yet, because too few answers computed different numbers of tokens"
    )
    users: tuple[SavingsUser, ...] = Field((), description="with scope all: the users, most saved first")
    items: tuple[ReuseOfItem, ...] = Field(
        description="the oldest 1,000 files (with scope all: references), least reused first"
    )
    more_items: bool = Field(False, description="true: there are newer ones, which `items` leaves out")
