"""Schemas of the OpenAPI document in the form that generators of clients read well.

| pydantic makes | here it is | because else |
|---|---|---|
| `Page_Gpu_`, titled `Page` | `GpuPage`; the name is the title | generators that name by title drop all pages but one |
| optional fields in answers | all required, null or not | a field has three states where there are two |
| `default` of a field | in its description | openapi-typescript makes it mandatory |
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gpulease_server.api.request_body import JsonBody

PREFIX = "#/components/schemas/"
PAGE = re.compile(r"\bPage_(\w+?)_\b")
INPUT = "Input"
"""Ends the name of a noun in a request: there it may leave out what an answer always has."""


def with_named_pages(document: dict[str, Any]) -> dict[str, Any]:
    """The document with `GpuPage` for `Page_Gpu_`."""
    renamed: dict[str, Any] = json.loads(PAGE.sub(r"\1Page", json.dumps(document)))
    return renamed


def body_schemas(bodies: Sequence[JsonBody[Any]], answers: Mapping[str, Any]) -> dict[str, Any]:
    """The schemas of request bodies, and of what they contain, by name. Words that answers have are left out."""
    found: dict[str, Any] = {}
    for body in bodies:
        found |= body.schemas()
    names = {name: f"{name}{INPUT}" for name, schema in found.items() if name in answers and "properties" in schema}
    text = re.sub(f'"{PREFIX}(\\w+)"', lambda name: f'"{PREFIX}{names.get(name[1], name[1])}"', json.dumps(found))
    return {
        names.get(name, name): schema
        for name, schema in json.loads(text).items()
        if name in names or name not in answers
    }


def shape_answers(schemas: dict[str, Any]) -> None:
    """Say of the nouns in answers that they have all their fields: the daemon leaves none out."""
    for schema in schemas.values():
        if fields := schema.get("properties"):
            schema["required"] = list(fields)
            for field in fields.values():
                field.pop("default", None)


def shape_requests(schemas: dict[str, Any]) -> None:
    """Put the default of each field of request bodies into its description."""
    for schema in schemas.values():
        for field in schema.get("properties", {}).values():
            default = field.pop("default", None)
            if default not in (None, "", [], {}):
                field["description"] = f"{field['description'].rstrip('.')}. Default: {json.dumps(default)}."


def drop_null_parameters(paths: Mapping[str, Any]) -> None:
    """Let query parameters be absent, and not null as well: a URL has no null."""
    for parameter in (
        one for methods in paths.values() for what in methods.values() for one in what.get("parameters", ())
    ):
        match parameter["schema"]:
            case {"anyOf": [kind, {"type": "null"}]}:
                parameter["schema"] = kind


def drop_titles(document: dict[str, Any]) -> None:
    """Give each schema its name as its title, and take the titles from everything in it: they are made of its name."""
    for name, schema in document["components"]["schemas"].items():
        _without_titles(schema)
        schema["title"] = name
    _without_titles(document["paths"])


def _without_titles(part: Any) -> None:
    if isinstance(part, dict):
        if isinstance(part.get("title"), str):
            del part["title"]
        for inner in part.values():
            _without_titles(inner)
    elif isinstance(part, list):
        for inner in part:
            _without_titles(inner)


def used_schemas(document: Mapping[str, Any]) -> dict[str, Any]:
    """The schemas that the paths of a document refer to, directly or through others."""
    schemas, used = document["components"]["schemas"], set[str]()
    pending = list(_references({key: part for key, part in document.items() if key != "components"}))
    pending += _references({key: part for key, part in document["components"].items() if key != "schemas"})
    while pending:
        name = pending.pop()
        if name not in used:
            used.add(name)
            pending += _references(schemas[name])
    return {name: schema for name, schema in schemas.items() if name in used}


def _references(part: Any) -> Iterator[str]:
    """The names of the schemas that a part of a document refers to."""
    if isinstance(part, dict):
        if isinstance(reference := part.get("$ref"), str) and reference.startswith(PREFIX):
            yield reference.removeprefix(PREFIX)
        for inner in part.values():
            yield from _references(inner)
    elif isinstance(part, list):
        for inner in part:
            yield from _references(inner)
