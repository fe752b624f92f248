"""What a field of a request may be: one declaration, from which the check and the OpenAPI document follow.

@dataclass(frozen=True)
class Resize:
    count: Annotated[int, Bounds(minimum=1, maximum=8)]

    def __post_init__(self) -> None:
        check_bounds(self)  # Resize(count=9): ValueError("count: must be 1 to 8, not 9")
"""

from __future__ import annotations

import functools
import math
import re
import typing
from collections.abc import Callable
from dataclasses import fields
from typing import Any


class Bounds:
    """Keywords of JSON Schema beside the type of a field: `Annotated[int, Bounds(minimum=1)]`.

    Args:
        rule: The error for a value out of bounds, such as "must be absolute"; by default it follows from the keywords.
        keywords: `minimum`, `maxLength`, `pattern` and so on. A keyword without a check is a KeyError.
    """

    def __init__(self, *, rule: str | None = None, **keywords: Any) -> None:
        self.rule = rule
        self.keywords = keywords
        self._checks = [(CHECKS[keyword], bound) for keyword, bound in keywords.items()]

    def __get_pydantic_json_schema__(self, core_schema: Any, handler: Any) -> dict[str, Any]:
        """Called by pydantic. Where null is allowed the bounds are those of the other kind."""
        schema: dict[str, Any] = handler(core_schema)
        if "anyOf" not in schema:
            return schema | self.keywords
        kinds = [kind if kind == {"type": "null"} else kind | self.keywords for kind in schema["anyOf"]]
        return schema | {"anyOf": kinds}

    def check(self, name: str, value: Any) -> None:
        """Raise ValueError that names the field, unless the value is null or within the bounds."""
        try:
            rule, shown = self.broken_rule(name, value), f", not {value}" if isinstance(value, int | float) else ""
        except TypeError:  # it is of a kind that cannot be compared with the bounds
            rule, shown = self.rule or self._rule(name), f", not {repr(value)[:80]}"
        if rule:
            raise ValueError(f"{name}: {rule}{shown}")

    def broken_rule(self, name: str, value: Any) -> str | None:
        """The rule that a value of this field breaks, in words; None if it is null or within the bounds."""
        if value is None or all(within(value, bound) for within, bound in self._checks):
            return None
        return self.rule or self._rule(name)

    def _rule(self, name: str) -> str:
        """The keywords in words: "must be 1 to 100", "must be over 0 seconds", "must be at most 9 characters"."""
        keywords, unit = self.keywords, " seconds" if name.endswith("_s") else ""
        if "minimum" in keywords and "maximum" in keywords:
            return f"must be {keywords['minimum']} to {keywords['maximum']}{unit}"
        return "must be " + " and ".join(WORDS[keyword].format(bound) + unit for keyword, bound in keywords.items())


def _matches(text: str, pattern: str) -> bool:
    """Whether a text matches as JSON Schema says: `$` is its very end, and not before a last newline as in Python."""
    return re.search(re.sub(r"\$$", r"\\Z", pattern), text) is not None


CHECKS: dict[str, Callable[[Any, Any], bool]] = {
    "minimum": lambda value, bound: value >= bound,
    "exclusiveMinimum": lambda value, bound: math.isfinite(value) and value > bound,
    "maximum": lambda value, bound: value <= bound,
    "exclusiveMaximum": lambda value, bound: value < bound,
    "minLength": lambda value, bound: len(value) >= bound,
    "maxLength": lambda value, bound: len(value) <= bound,
    "minItems": lambda value, bound: len(value) >= bound,
    "maxItems": lambda value, bound: len(value) <= bound,
    "pattern": _matches,
    "propertyNames": lambda value, bound: set(value) <= set(bound["enum"]),
}
"""By keyword of JSON Schema: whether a value is within this bound."""
WORDS = {
    "minimum": "{} or more",
    "exclusiveMinimum": "over {}",
    "maximum": "at most {}",
    "exclusiveMaximum": "under {}",
    "minLength": "at least {} characters",
    "maxLength": "at most {} characters",
    "minItems": "at least {} entries",
    "maxItems": "at most {} entries",
}


def check_field(condition: bool, name: str, rule: str) -> None:
    """Raise ValueError that names the field, unless the condition holds."""
    if not condition:
        raise ValueError(f"{name}: {rule}")


def bounds_of(body: type, name: str) -> list[Bounds]:
    """The bounds of one field of a dataclass."""
    return next((bounds for field, bounds, _ in _declared_bounds(body) if field == name), [])


def check_bounds(body: Any) -> None:
    """Raise ValueError that names the first field of a dataclass, or entry of it, that is out of its bounds."""
    for name, bounds, of_entry in _declared_bounds(body.__class__):
        value = getattr(body, name)
        for one in bounds:
            one.check(name, value)
        for entry in (value or ()) if of_entry else ():
            for one in of_entry:
                one.check(name, entry)


@functools.cache
def _declared_bounds(kind: type) -> list[tuple[str, list[Bounds], list[Bounds]]]:
    """The name of each field that has bounds, its own bounds, and those of an entry where it is a list."""
    hints = typing.get_type_hints(kind, include_extras=True)
    found = [(field.name, _bounds_of(hints[field.name]), _entry_bounds(hints[field.name])) for field in fields(kind)]
    return [one for one in found if one[1] or one[2]]


def _bounds_of(hint: Any) -> list[Bounds]:
    return [one for one in getattr(hint, "__metadata__", ()) if isinstance(one, Bounds)]


def _entry_bounds(hint: Any) -> list[Bounds]:
    if typing.get_origin(hint) is list:
        return _bounds_of(typing.get_args(hint)[0])
    if typing.get_origin(hint) is dict:
        return []
    return [bounds for part in typing.get_args(hint) for bounds in _entry_bounds(part)]


MAX_NAME = 255
"""Characters in the name of a node, GPU model or other thing, at most; as many as a host name may have."""
MAX_PATH = 4096
"""Characters in a path, at most: PATH_MAX of Linux."""
MAX_UUID = 96
"""Characters in the UUID of a GPU, at most."""
NAME = Bounds(maxLength=MAX_NAME)
OVER_0 = Bounds(exclusiveMinimum=0)
MAX_HELD_S = 366 * 24 * 3600
"""The longest time for which GPUs may be asked for: a year. None declared is no limit."""
TIME = Bounds(exclusiveMinimum=0, maximum=MAX_HELD_S, rule=f"must be over 0 and at most {MAX_HELD_S} seconds (a year)")
MEMORY = Bounds(minimum=0, exclusiveMaximum=2**62, rule="must be 0 to 2^62")
