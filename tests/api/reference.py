"""The reference of the REST API, made from its OpenAPI document: docs/rest.md, and the page that the daemon serves at
`/docs`.

Both have the same entries. Their text is put together once; in it backticks are code and `[Lease]` is a link to the
type of that name.
"""

from __future__ import annotations

import html
import inspect
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from gpulease_protocol.errors import ERRORS_BY_CODE, GpuleaseError
from gpulease_server.api.openapi.document import TAGS
from gpulease_server.api.problems import SHARED_STATUSES

SUBJECTS = tuple(TAGS)
"""The order of the page; other tags follow."""
ERRORS, TYPES = "Errors", "Types"
"""Sections whose entries are linked to."""
STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
code { font: 13px/1.5 ui-monospace, monospace; overflow-wrap: anywhere; }
h3 code { font-weight: bold; }
h3 { margin: 2rem 0 0; border-top: 1px solid #8886; padding-top: .5rem; font-size: 1rem; }
table { border-collapse: collapse; margin: .5rem 0; width: 100%; }
td { vertical-align: top; padding: .15rem 1rem .15rem 0; }
td:first-child { width: 12rem; } td:nth-child(2) { width: 14rem; }
"""
BOUNDS = {
    "minimum": "at least {}",
    "exclusiveMinimum": "over {}",
    "maximum": "at most {}",
    "exclusiveMaximum": "under {}",
    "minLength": "at least {} characters",
    "maxLength": "at most {} characters",
    "minItems": "at least {}",
    "maxItems": "at most {}",
}
"""Keywords of JSON Schema, in words."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A route, or a type."""

    subject: str
    """The section of the page."""
    name: str
    """Method and path, or the name of the type."""
    text: str
    """What it does or means."""
    rows: tuple[tuple[str, str, str], ...]
    """Its parameters and answers, or its fields: name, type, meaning."""


def entries(document: Mapping[str, Any]) -> Iterator[Entry]:
    """Everything in an OpenAPI document, in the order of the page."""
    yield from _operations(document["paths"])
    for code, kind in {**ERRORS_BY_CODE, GpuleaseError.code: GpuleaseError}.items():
        yield Entry(ERRORS, code, f"Status {kind.status}. {inspect.cleandoc(kind.__doc__ or '')}", ())
    yield from _schemas(document["components"]["schemas"])


def introduction(document: Mapping[str, Any]) -> str:
    """What holds for every route."""
    shared = ", ".join(map(str, SHARED_STATUSES))
    return f"{document['info']['description']} Every route may also answer {shared}: OpenAPI has them as `default`."


def html_page(document: Mapping[str, Any]) -> str:
    """The page at `/docs`."""
    title = "The REST API of gpulease"
    style = f"<meta charset=utf-8><meta name=viewport content='width=device-width'><style>{STYLE}</style>"
    lines = [f"<!doctype html><html lang=en><title>{title}</title>{style}", f"<h1>{title}</h1>"]
    lines.append(f"<p>{_text(introduction(document))} For programs: <a href=/openapi.json>/openapi.json</a>.")
    subject = ""
    for entry in entries(document):
        if entry.subject != subject:
            subject = entry.subject
            lines.append(f"<h2 id={subject.lower()}>{subject}</h2><p>{_text(TAGS.get(subject.lower(), ''))}")
        name = html.escape(entry.name)
        place = f" id={name}" if subject in (ERRORS, TYPES) else ""
        cells = "".join(
            f"<tr><td><code>{html.escape(what)}</code><td>{_text(kind)}<td>{_text(meaning)}"
            for what, kind, meaning in entry.rows
        )
        text = _text(entry.text).replace("\n\n", "<p>")
        lines.append(f"<h3{place}><code>{name}</code></h3><p>{text}<table>{cells}</table>")
    return "\n".join(lines) + "\n"


def _operations(paths: Mapping[str, Any]) -> Iterator[Entry]:
    every = [(path, method, operation) for path, methods in paths.items() for method, operation in methods.items()]
    for path, method, operation in sorted(every, key=_subject):
        parameters = [
            (parameter["name"], f"{parameter['in']}, {kind_of(parameter['schema'])}", parameter["description"])
            for parameter in operation.get("parameters", ())
            if parameter["in"] != "path"
        ]
        if "requestBody" in operation:
            parameters.append(("body", kind_of(_content(operation["requestBody"])), ""))
        answers = [
            (status, kind_of(_content(answer)), "" if status == "200" else answer["description"])
            for status, answer in sorted(operation["responses"].items())
            if status != "default"
        ]
        subject = operation["tags"][0].capitalize()
        text = f"{operation['description']}\n\nOperation `{operation['operationId']}`."
        yield Entry(subject, f"{method.upper()} {path}", text, (*parameters, *answers))


def _subject(entry: tuple[str, str, Any]) -> tuple[int, str]:
    tag = entry[2]["tags"][0]
    return (SUBJECTS.index(tag) if tag in SUBJECTS else len(SUBJECTS), tag)


def _schemas(schemas: Mapping[str, Any]) -> Iterator[Entry]:
    for name, schema in sorted(schemas.items()):
        text = schema.get("description", "") + (f" One of {kind_of(schema)}." if "enum" in schema else "")
        fields = schema.get("properties", {}).items()
        rows = tuple((field, kind_of(about), about.get("description", "")) for field, about in fields)
        yield Entry(TYPES, name, text.strip(), rows)


def _content(part: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema of a body or an answer."""
    for content in part.get("content", {}).values():
        return dict(content.get("schema", {}))
    return {}


def kind_of(schema: Mapping[str, Any]) -> str:
    """A schema in a few words."""
    if "$ref" in schema:
        return f"[{schema['$ref'].rpartition('/')[2]}]"
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    default = schema.get("default")
    ending = f", default {json.dumps(default)}" if default not in (None, "", []) else ""
    if alternatives := schema.get("anyOf"):
        return " or ".join(kind_of(one) for one in alternatives) + ending
    kind = str(schema.get("type", ""))
    if kind == "array":
        kind = f"list of {kind_of(schema.get('items', {}))}"
    bounds = [words.format(_number(schema[key])) for key, words in BOUNDS.items() if key in schema]
    return ", ".join([kind, *bounds]) + ending


def _number(bound: float) -> str:
    """A bound as people write it."""
    power = bound.bit_length() - 1 if isinstance(bound, int) else 0
    return f"2^{power}" if power > 20 and bound == 1 << power else f"{bound:g}" if bound < 1e6 else str(int(bound))


def _text(text: str) -> str:
    """Text as HTML."""
    coded = re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(text))
    return re.sub(r"\[([A-Z]\w+)\]", r"<a href='#\1'>\1</a>", coded)
