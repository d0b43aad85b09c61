"""The types of what a sidecar holds. It comes from a disk, so nothing in it is believed before this check."""

from __future__ import annotations

from functools import cache
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from mpic.kv.chunk import Kind

Text = Annotated[str, Field(min_length=1)]
Whole = Annotated[int, Field(ge=0, lt=1 << 63)]
Time = Annotated[float, Field(ge=0, lt=253_402_300_800, allow_inf_nan=False)]
"""Seconds since the epoch, before the year 10000, as Python's dates need it."""
Digest = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
Number = Annotated[float, Field(allow_inf_nan=False)]
TYPES: dict[str, Any] = {
    **dict.fromkeys(("id", "owner", "name"), Text),
    **dict.fromkeys(("filename", "title", "description", "press"), str),
    **dict.fromkeys(("sha256", "digest"), Digest),
    **dict.fromkeys(("bytes", "version", "position", "start", "end"), Whole),
    **dict.fromkeys(("quota_files", "quota_bytes", "quota_disk"), Whole | None),
    **dict.fromkeys(("created_at", "updated_at"), Time),
    "expires_at": Time | None,
    "handle": Text | None,
    "kind": Kind,
    "metadata": dict[str, str | bool | int | Number],
    "pinned": bool,
    "split": dict[str, str | bool | int | Number | None] | None,
}
"""The type of every column."""
STRICT = ConfigDict(strict=True)


def check_record(record: Any, columns: tuple[str, ...], chunk_columns: tuple[str, ...]) -> None:
    """Check the types of a sidecar's record.

    Args:
        columns: of the record.
        chunk_columns: of each of its ``chunks``; empty where it has none.

    Raises:
        ValueError: one is wrong; the message names it.
    """
    try:
        _model(columns, chunk_columns).model_validate(record)
    except ValidationError as error:
        [first, *_] = error.errors(include_url=False)
        raise ValueError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from error


@cache
def _model(columns: tuple[str, ...], chunk_columns: tuple[str, ...]) -> type[BaseModel]:
    fields: dict[str, Any] = {column: (TYPES[column], ...) for column in columns}
    if chunk_columns:
        inner: dict[str, Any] = {column: (TYPES[column], ...) for column in chunk_columns}
        fields["chunks"] = (list[create_model("chunk", __config__=STRICT, **inner)], ...)  # type: ignore[misc]
    return create_model("record", __config__=STRICT, **fields)
