"""The base classes of all responses of the server."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any, Generic, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, WithJsonSchema

T = TypeVar("T")


def one_of(*values: str) -> WithJsonSchema:
    """Annotate a string that is one of ``values`` today.

    The published schema lists them. The SDK accepts others too, because a newer server may know more.
    """
    return WithJsonSchema({"enum": list(values), "type": "string"})


def _open(schema: dict[str, Any]) -> None:
    schema.pop("additionalProperties", None)


def _closed(schema: dict[str, Any]) -> None:
    schema["additionalProperties"] = False


OPEN = ConfigDict(extra="allow", json_schema_extra=_open)
"""For typed dictionaries: further fields are kept."""
CLOSED = ConfigDict(extra="allow", json_schema_extra=_closed)
"""The same, while the published schema allows no further fields."""


class ApiObject(BaseModel):
    """An object of an answer. It is frozen, and fields that this version does not know are kept as attributes.

    A field that is added to an existing class gets a default, so that the SDK still reads the answers of older servers.
    """

    model_config = ConfigDict(frozen=True, **OPEN)


class ReadAsDict(ApiObject):
    """An object that earlier versions of the SDK gave as a dictionary, and that may still be read like one."""

    def __getitem__(self, name: str) -> Any:
        return self.model_dump()[name]

    def get(self, name: str, default: Any = None) -> Any:
        """Return a field, or ``default`` if there is none or it is None."""
        value = self.model_dump().get(name)
        return default if value is None else value


class ClosedObject(ApiObject):
    """An object whose published schema allows no further fields, so that tests notice every field that is added."""

    model_config = CLOSED


def moment(seconds: int | None) -> datetime | None:
    """Return a Unix time as a datetime in UTC."""
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC)


class Created(ApiObject):
    """An object with a time of creation."""

    created_at: int

    @property
    def created_time(self) -> datetime:
        """``created_at`` as a datetime in UTC."""
        return datetime.fromtimestamp(self.created_at, UTC)


class Expiring(Created):
    """An object that may have an end."""

    expires_at: int | None = None

    @property
    def expires_time(self) -> datetime | None:
        """``expires_at`` as a datetime in UTC; None: it never expires."""
        return moment(self.expires_at)


class ItemList(ApiObject, Generic[T]):
    """All items at once."""

    object: Literal["list"] = "list"
    data: tuple[T, ...]


class ItemPage(ItemList[T], Generic[T]):
    """A page of a listing."""

    first_id: str | None
    last_id: str | None
    has_more: bool

    @classmethod
    def of(cls, items: Iterable[Any], has_more: bool) -> Self:
        """Return the page with these items; each has an ``id``."""
        data = tuple(items)
        ends = (data[0].id, data[-1].id) if data else (None, None)
        return cls(data=data, first_id=ends[0], last_id=ends[1], has_more=has_more)


class Deleted(ApiObject):
    """The id of what was deleted."""

    id: str
    deleted: bool = True
