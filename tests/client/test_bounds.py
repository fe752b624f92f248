"""What the OpenAPI document says of a field is what a request may have in it: no less, no more."""

from __future__ import annotations

import typing
from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import Any

import pytest

from gpulease import access, wire
from gpulease.bounds import Bounds
from gpulease.wire import Body

NEEDED: dict[type[Body], dict[str, Any]] = {
    wire.ArrayRequest: {"indices": "0-1"},
    wire.JobRequest: {"command": ["train.py"]},
    access.TokenRequest: {"user": "ann"},
}
"""Fields that have to be given beside the one that is tried."""
BESIDE = {"owner_start_ticks": {"owner_pid": 1}, "max_restarts": {"launcher": "torchrun"}}
"""Fields that say nothing alone."""
OF_PATTERN = {
    "indices": (["0", "0-19", "1,4,9", "0-100:10", " 3 , 5-6 "], ["", "a", "1-", "1,,2", "-1", "1:2", "٣"]),
    "working_directory": (["/", "/home/ann"], ["", "home", "./x"]),
    "user": (["ann", "ann-2@lab"], ["", "an n", "ann:", " ann"]),
}
"""Texts that a pattern takes, and texts that it does not."""


def bounded() -> Iterator[tuple[type[Body], str, dict[str, Any]]]:
    for module in (wire, access):
        for kind in vars(module).values():
            if (
                isinstance(kind, type)
                and issubclass(kind, Body)
                and kind is not Body
                and kind.__module__ == module.__name__
            ):
                hints = typing.get_type_hints(kind, include_extras=True)
                for field in fields(kind):  # type: ignore[arg-type]
                    for said in getattr(hints[field.name], "__metadata__", ()):
                        assert isinstance(said, Bounds)
                        yield kind, field.name, said.keywords


EDGES: dict[str, Callable[[Any], tuple[list[Any], list[Any]]]] = {
    "minimum": lambda bound: ([bound], [bound - 1]),
    "exclusiveMinimum": lambda bound: ([bound + 1e-9], [bound, bound - 1]),
    "maximum": lambda bound: ([bound], [bound + 1]),
    "exclusiveMaximum": lambda bound: ([bound - 1], [bound]),
    "minLength": lambda bound: (["a" * bound], ["a" * (bound - 1)]),
    "maxLength": lambda bound: (["a" * bound], ["a" * (bound + 1)]),
    "minItems": lambda bound: ([["a"] * bound], [["a"] * (bound - 1)]),
    "maxItems": lambda bound: ([listed(bound)], [listed(bound + 1)]),
    "propertyNames": lambda bound: ([{word: [0, 1]} for word in bound["enum"]], [{"nonsense": [0, 1]}]),
}
"""By keyword: values just inside, and values just outside."""


def listed(count: int) -> list[str]:
    return [f"GPU-{number}" for number in range(count)]


CASES = [(kind, name, keyword, bound) for kind, name, said in bounded() for keyword, bound in said.items()]


@pytest.mark.parametrize(
    ("kind", "name", "keyword", "bound"), CASES, ids=lambda case: str(getattr(case, "__name__", case))[:40]
)
def test_a_bound_in_the_document_is_the_one_that_is_kept(kind: type[Body], name: str, keyword: str, bound: Any) -> None:
    beside = NEEDED.get(kind, {}) | BESIDE.get(name, {})
    inside, outside = OF_PATTERN[name] if keyword == "pattern" else EDGES[keyword](bound)
    for value in inside:
        kind(**beside | {name: value})
    for value in outside:
        with pytest.raises(ValueError, match=name):
            kind(**beside | {name: value})


def test_the_fields_that_have_bounds_are_found() -> None:
    assert {"count", "ttl_s", "command", "umask", "indices", "grace_s", "expires_s"} <= {case[1] for case in CASES}
