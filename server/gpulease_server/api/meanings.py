"""What the fields of nouns and bodies mean, for the OpenAPI document: the docstrings below them.

Pydantic reads these too (`use_attribute_docstrings`), but whenever it meets a class, and a third of the daemon's start
went into that. Here they are read when somebody asks for the document.
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

from gpulease.model import Noun
from gpulease.wire import Body


def describe(schemas: dict[str, Any]) -> None:
    """Give every field of these schemas its meaning. An inherited field has that of its own class, if there is one."""
    kinds = {kind.__name__: kind for kind in _kinds(Noun, Body)}
    for name, schema in schemas.items():
        kind = kinds.get(name.partition("_")[0])  # Page_Gpu_ is a Page
        if kind is None:
            continue
        for parent in filter(is_dataclass, kind.__mro__):
            for field, text in _meanings(parent).items():
                if field in schema["properties"]:
                    schema["properties"][field].setdefault("description", text)


def _kinds(*roots: type) -> Iterator[type]:
    for root in roots:
        yield from root.__subclasses__()
        yield from _kinds(*root.__subclasses__())


def _meanings(kind: type) -> dict[str, str]:
    """The docstrings of the fields that are declared in a class, by name."""
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
