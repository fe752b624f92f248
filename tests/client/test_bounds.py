"""A request may have in a field what its bounds say, and so the OpenAPI document: no less, no more."""

from __future__ import annotations

import typing
from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import Any

import pytest
from pydantic import TypeAdapter

from gpulease_protocol import requests, tokens
from gpulease_protocol.bounds import Bounds
from gpulease_protocol.job_parts import JobDependency
from gpulease_protocol.requests import RequestBody

NEEDED: dict[type[RequestBody], dict[str, Any]] = {
    requests.ArrayRequest: {"indices": "0-1"},
    requests.JobRequest: {"command": ["train.py"]},
    tokens.TokenRequest: {"user": "ann", "role": tokens.Role.WORKER},
}
"""Fields that have to be given beside the one that is tried."""
BESIDE = {
    "owner_start_ticks": {"owner_pid": 1},
    "max_restarts": {"launcher": "torchrun"},
    "max_nodes": {"launcher": "torchrun", "nodes": 2},
    **{name: {"role": tokens.Role.USER} for name in ("max_gpus", "max_lease_s", "gpu_hours_per_day")},
}
"""Fields that say nothing alone, or not with those of `NEEDED`."""
BOOT = "0f6cbd8b-6b3e-4a3f-9a1c-1f2e3d4c5b6a"
OF_PATTERN = {
    "indices": (["0", "0-19", "1,4,9", "0-100:10", " 3 , 5-6 "], ["", "a", "1-", "1,,2", "-1", "1:2", "٣"]),
    "working_directory": (["/", "/home/ann"], ["", "home", "./x"]),
    "owner_realm": ([f"{BOOT}/pid:[4026531836]"], ["", BOOT, f"{BOOT}/pid:[]", f"{BOOT}/net:[1]", f"x{BOOT}/pid:[1]"]),
    "user": (["ann", "ann-2@lab"], ["", "an n", "ann:", " ann"]),
}
"""Texts that a pattern takes, and texts that it does not."""


def bounded() -> Iterator[tuple[type[RequestBody], str, dict[str, Any]]]:
    for module in (requests, tokens):
        for kind in vars(module).values():
            if (
                isinstance(kind, type)
                and issubclass(kind, RequestBody)
                and kind is not RequestBody
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


def dependencies(count: int) -> list[JobDependency]:
    return [JobDependency(job=f"job-{number:016x}") for number in range(count)]


CASES = [(kind, name, keyword, bound) for kind, name, said in bounded() for keyword, bound in said.items()]


@pytest.mark.parametrize(
    ("kind", "name", "keyword", "bound"), CASES, ids=lambda case: str(getattr(case, "__name__", case))[:40]
)
def test_a_documented_bound_is_enforced(kind: type[RequestBody], name: str, keyword: str, bound: Any) -> None:
    beside = NEEDED.get(kind, {}) | BESIDE.get(name, {})
    inside, outside = OF_PATTERN[name] if keyword == "pattern" else EDGES[keyword](bound)
    if name == "after":
        inside, outside = ([dependencies(len(items)) for items in tried] for tried in (inside, outside))
    if name == "working_directory" and keyword == "maxLength":
        inside, outside = (["/" + text[1:] for text in texts] for texts in (inside, outside))
    for value in inside:
        kind(**beside | {name: value})
    for value in outside:
        with pytest.raises(ValueError, match=name):
            kind(**beside | {name: value})


LONG = "x" * 500_000
TOO_LONG: list[tuple[type[RequestBody], dict[str, Any]]] = [
    (requests.LeaseRequest, {"node": LONG}),
    (requests.LeaseRequest, {"gpu_model": LONG}),
    (requests.LeaseRequest, {"label": LONG}),
    (requests.LeaseRequest, {"among": [LONG]}),
    (requests.LeaseRequest, {"devices": LONG}),
    (requests.LeaseRequest, {"devices": [LONG]}),
    (requests.LeaseRequest, {"devices": [f"GPU-{LONG}"]}),
    (requests.LeaseRequest, {"devices": [f"no-{number}" for number in range(4096)]}),
    (requests.ArrayRequest, {"indices": LONG}),
    (requests.JobRequest, {"node": LONG}),
    (requests.JobRequest, {"gpu_model": LONG}),
    (requests.JobRequest, {"name": LONG}),
    (requests.JobRequest, {"interpreter": LONG}),
    (requests.JobRequest, {"working_directory": f"/{LONG}"}),
    (requests.JobRequest, {"command": [LONG]}),
    (requests.JobRequest, {"command": [f"-{'x' * 100_000}"]}),
    (requests.JobRequest, {"environment": {LONG: ""}}),
    (requests.JobRequest, {"environment": {"NAME": LONG}}),
    (requests.JobRequest, {"limits": {LONG: [0, 1]}}),
    (tokens.TokenRequest, {"user": LONG}),
    (tokens.TokenRequest, {"note": LONG}),
]


@pytest.mark.parametrize(("kind", "values"), TOO_LONG, ids=lambda case: str(getattr(case, "__name__", case))[:40])
def test_what_is_too_long_is_refused_and_not_repeated(kind: type[RequestBody], values: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(values))) as refused:
        kind(**NEEDED.get(kind, {}) | values)
    assert len(str(refused.value)) < 500


def test_every_text_of_a_request_is_bounded() -> None:
    """Also of a field that is added later."""
    by_bytes = {"command", "environment"}
    for kind in {case[0] for case in CASES}:
        properties = TypeAdapter(kind).json_schema()["properties"]
        for name, schema in properties.items():
            for one in schema.get("anyOf", [schema]):
                bounded_text = {"maxLength", "enum", "const", "pattern"} & set(one)
                assert one.get("type") != "string" or bounded_text or name == "devices", f"{kind.__name__}.{name}"
                is_list = one.get("type") == "array" and name not in by_bytes | {"devices"}
                assert not is_list or "maxItems" in one, f"{kind.__name__}.{name}"


def test_the_fields_with_bounds_are_found() -> None:
    assert {"count", "ttl_s", "command", "umask", "indices", "grace_s", "expires_s"} <= {case[1] for case in CASES}


@pytest.mark.parametrize(
    ("kind", "values", "said"),
    [
        (requests.LeaseRequest, {"count": "2"}, "count: must be 1 to 4096, not '2'"),
        (requests.LeaseRequest, {"ttl_s": "1h"}, "ttl_s: must be over 0 seconds, not '1h'"),
        (requests.LeaseRequest, {"label": 5}, "label: must be at most 4096 characters, not 5"),
        (requests.LeaseRequest, {"devices": {0, 1}}, r"devices: must be a count, -1, .*, not \{0, 1\}"),
        (requests.LeaseRequest, {"devices": [0, 1.5]}, r"devices: must be a count, -1, .*, not \[0, 1\.5\]"),
        (requests.JobRequest, {"gpus": "two"}, "gpus: must be 1 to 4096, not 'two'"),
        (requests.JobRequest, {"environment": {"SEED": 7}}, "environment: names and values must be text"),
    ],
    ids=lambda case: str(getattr(case, "__name__", case))[:40],
)
def test_a_value_of_the_wrong_kind_is_refused_by_the_name_of_its_field(
    kind: type[RequestBody], values: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=f"^{said}$"):
        kind(**NEEDED.get(kind, {}) | values)
