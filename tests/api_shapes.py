"""Checks answers against the published schema, which is stricter than the classes the SDK reads them with."""

from typing import Any

import jsonschema
from pydantic import TypeAdapter


def assert_shape(kind: Any, body: Any) -> None:
    """Fail unless ``body`` has exactly the fields that the schema of ``kind`` allows."""
    jsonschema.validate(body, TypeAdapter(kind).json_schema(mode="serialization"))
