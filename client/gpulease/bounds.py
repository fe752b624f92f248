"""What a field of a request may be, in the words of JSON Schema, so that the OpenAPI document says it, too.

It only tells: what is refused is decided where a body is made (`gpulease.wire`), and a test compares the two.
"""

from __future__ import annotations

from typing import Any


class Bounds:
    """Keywords of JSON Schema beside the type of a field: `Annotated[int, Bounds(minimum=1)]`."""

    def __init__(self, **keywords: Any) -> None:
        self.keywords = keywords

    def __get_pydantic_json_schema__(self, core_schema: Any, handler: Any) -> dict[str, Any]:
        """Called by pydantic. Where null is allowed the bounds are those of the other kind."""
        schema: dict[str, Any] = handler(core_schema)
        if "anyOf" not in schema:
            return schema | self.keywords
        kinds = [kind if kind == {"type": "null"} else kind | self.keywords for kind in schema["anyOf"]]
        return schema | {"anyOf": kinds}


OVER_0 = Bounds(exclusiveMinimum=0)
MEMORY = Bounds(minimum=0, exclusiveMaximum=2**62)
