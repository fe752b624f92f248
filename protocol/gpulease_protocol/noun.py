"""The class of every public noun."""

from __future__ import annotations

from typing import Any, ClassVar

from gpulease_protocol.codec import wire_name


class Noun:
    """Marks a public noun: field docstrings become the OpenAPI descriptions."""

    __slots__ = ()
    __pydantic_config__: ClassVar[dict[str, Any]] = {
        "allow_inf_nan": False,
        "alias_generator": wire_name,
        "serialize_by_alias": True,
    }
