"""`/docs`: /openapi.json as a page to read.

Made here and not by FastAPI's own page, which loads scripts from elsewhere: a machine with GPUs may have no way out,
and a script in a page of this origin could release anybody's lease. So it has no script at all, and says so (CSP).
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import HTMLResponse

from .problems import ANYWHERE

router = APIRouter()
POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
SUBJECTS = ("leases", "jobs", "gpus", "nodes", "events", "tokens", "service")
"""The order of the page: what one comes for first. Others follow."""
EVERYWHERE = tuple(sorted(str(kind.status) for kind in ANYWHERE))
"""Answers of every address, which the page says once."""
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


@router.get("/docs", include_in_schema=False)
async def docs(request: Request) -> HTMLResponse:
    """The reference of this API."""
    return HTMLResponse(_page(request.app), headers={"Content-Security-Policy": POLICY})


@lru_cache(maxsize=1)
def _page(app: FastAPI) -> str:
    """The whole page; the document does not change while the daemon runs."""
    document = app.openapi()
    title = f"gpulease {document['info']['version']}"
    style = f"<meta charset=utf-8><meta name=viewport content='width=device-width'><style>{STYLE}</style>"
    head = f"<!doctype html><html lang=en><title>{title}</title>{style}"
    anywhere = f"Every address may answer {', '.join(EVERYWHERE)}, too."
    source = f"For programs: <a href=/openapi.json>/openapi.json</a>. {anywhere}"
    intro = f"<h1>{title}</h1><p>{_text(document['info']['description'])} {source}"
    return "\n".join([head, intro, *_operations(document["paths"]), *_schemas(document["components"]["schemas"])])


def _operations(paths: Mapping[str, Any]) -> Iterator[str]:
    tag = ""
    every = [(path, method, operation) for path, methods in paths.items() for method, operation in methods.items()]
    for path, method, operation in sorted(every, key=_subject):
        if operation["tags"][0] != tag:
            tag = operation["tags"][0]
            yield f"<h2 id={_text(tag)}>{_text(tag).capitalize()}</h2>"
        yield f"<h3><code>{method.upper()} {_text(path)}</code></h3><p>{_text(operation['description'])}"
        asked = [
            (parameter["name"], f"{parameter['in']}, {_type(parameter['schema'])}", _text(parameter["description"]))
            for parameter in operation.get("parameters", ())
            if parameter["in"] != "path"
        ]
        if "requestBody" in operation:
            asked.append(("body", _type(_content(operation["requestBody"])), ""))
        answers = [
            (status, _type(_content(answer)), "" if status == "200" else _text(answer["description"]))
            for status, answer in sorted(operation["responses"].items())
            if status not in EVERYWHERE
        ]
        yield _table([*asked, *answers])


def _subject(entry: tuple[str, str, Any]) -> tuple[int, str]:
    tag = entry[2]["tags"][0]
    return (SUBJECTS.index(tag) if tag in SUBJECTS else len(SUBJECTS), tag)


def _schemas(schemas: Mapping[str, Any]) -> Iterator[str]:
    yield "<h2>Nouns</h2>"
    for name, schema in sorted(schemas.items()):
        yield f"<h3 id={_text(name)}><code>{_text(name)}</code></h3><p>{_text(schema.get('description', ''))}"
        if "enum" in schema:
            yield f"<p>{_type(schema)}"
        fields = schema.get("properties", {}).items()
        yield _table([(field, _type(about), _text(about.get("description", ""))) for field, about in fields])


def _content(part: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema of a body or an answer."""
    for content in part.get("content", {}).values():
        return dict(content.get("schema", {}))
    return {}


def _type(schema: Mapping[str, Any]) -> str:
    """A schema in a few words, with links to the nouns that it names."""
    if "$ref" in schema:
        name = _text(schema["$ref"].rpartition("/")[2])
        return f"<a href='#{name}'>{name}</a>"
    if "enum" in schema:
        return ", ".join(f"<code>{_text(str(value))}</code>" for value in schema["enum"])
    if alternatives := schema.get("anyOf"):
        return " or ".join(_type(one) for one in alternatives)
    if schema.get("type") == "array":
        return f"list of {_type(schema.get('items', {}))}"
    default = schema.get("default")
    return _text(str(schema.get("type", ""))) + (
        f", default {_text(json.dumps(default))}" if default not in (None, "") else ""
    )


def _table(rows: list[tuple[str, str, str]]) -> str:
    cells = "".join(f"<tr><td><code>{_text(name)}</code><td>{kind}<td>{what}" for name, kind, what in rows)
    return f"<table>{cells}</table>"


def _text(text: str) -> str:
    """Text for a page; what stands between backticks is code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(text))
