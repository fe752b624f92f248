"""Descriptions of fields in the OpenAPI document: the docstrings below the fields of nouns and request bodies.

Pydantic can read these too (`use_attribute_docstrings`), but does so for every class at start, which took a third of
the daemon's start. Here they are read at the first request for the document.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterator
from dataclasses import is_dataclass
from functools import cache
from itertools import pairwise
from typing import Any

from gpulease_protocol.codec import wire_name
from gpulease_protocol.model import Noun, Page
from gpulease_protocol.requests import RequestBody
from gpulease_server.api.openapi.schemas import INPUT


def add_field_descriptions(schemas: dict[str, Any]) -> None:
    """Add a description to every field of these schemas. The docstring of a subclass overrides an inherited one."""
    kinds = {kind.__name__: kind for kind in _subclasses(Noun, RequestBody)}
    for name, schema in schemas.items():
        kind = kinds.get(name.removesuffix(INPUT)) or (Page if name.endswith("Page") else None)  # GpuPage is a Page
        if kind is None:
            continue
        for parent in filter(is_dataclass, kind.__mro__):
            for field, text in _field_docstrings(parent).items():
                if (shown := wire_name(field)) in schema["properties"]:
                    schema["properties"][shown].setdefault("description", text)


def _subclasses(*roots: type) -> Iterator[type]:
    for root in roots:
        yield from root.__subclasses__()
        yield from _subclasses(*root.__subclasses__())


def _field_docstrings(kind: type) -> dict[str, str]:
    """The docstrings of the fields that a class declares, by name."""
    body = next(node.body for node in _classes(kind.__module__) if node.name == kind.__name__)
    return {
        declared.target.id: inspect.cleandoc(text.value.value)
        for declared, text in pairwise(body)
        if isinstance(declared, ast.AnnAssign)
        and isinstance(declared.target, ast.Name)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
        and isinstance(text.value.value, str)
    }


@cache
def _classes(module: str) -> tuple[ast.ClassDef, ...]:
    source = inspect.getsource(sys.modules[module])
    return tuple(node for node in ast.parse(source).body if isinstance(node, ast.ClassDef))
