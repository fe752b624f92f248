"""The class of every public noun."""

from __future__ import annotations

from typing import Any, ClassVar

from gpulease_protocol.codec import wire_name


class Noun:
    """Marks a public noun: field docstrings become the OpenAPI descriptions.

    Its schemas are made when they are first used: FastAPI asks for one per route, a sixth of the daemon's start.
    """

    __slots__ = ()
    __pydantic_config__: ClassVar[dict[str, Any]] = {
        "allow_inf_nan": False,
        "alias_generator": wire_name,
        "serialize_by_alias": True,
        "defer_build": True,
    }
