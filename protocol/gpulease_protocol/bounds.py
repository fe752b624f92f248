"""What a field of a request may be, in the words of JSON Schema, so that the OpenAPI document says it, too.

It only tells: what is refused is decided where a body is made (`gpulease_protocol.requests`), and a
test compares the two.
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


MAX_NAME = 255
"""Characters in the name of a node, GPU model or other thing, at most; as many as a host name may have."""
MAX_PATH = 4096
"""Characters in a path, at most: PATH_MAX of Linux."""
MAX_UUID = 96
"""Characters in the UUID of a GPU, at most."""
NAME = Bounds(maxLength=MAX_NAME)
OVER_0 = Bounds(exclusiveMinimum=0)
MEMORY = Bounds(minimum=0, exclusiveMaximum=2**62)
