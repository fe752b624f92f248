"""The nouns and request bodies as JSON, both ways.

Both ends may be of different versions, one release apart:

| one end | sends | the other end |
|---|---|---|
| newer | a field that the other does not know | passes over it in a noun; a daemon refuses it in a body |
| older | no field that the other knows | takes the default |
| newer | a word that the other does not know | carries it: equal to its text, and to no word that it knows |

So a body leaves out every field that is at its default (`to_body`): a newer client meets a refusal by an older daemon
only where it uses what that daemon cannot do. A default is therefore part of the contract, and never changes.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass
from datetime import date, datetime
from enum import Enum
from functools import cache
from typing import Any, TypeVar

T = TypeVar("T")

WIRE_NAMES = {"fencing_token": "token", "result_id": "made", "complete": "fresh"}
"""Fields that have another name in JSON, OpenAPI and the database. Every other name is the same everywhere."""
_PLAIN = frozenset({str, int, float, bool, type(None)})
"""Classes of values that are the same in JSON: most values, so they are told apart first."""
_FIELD_NAMES = {wire: name for name, wire in WIRE_NAMES.items()}


def wire_name(field_name: str) -> str:
    """The name that a field has in JSON and as a column."""
    return WIRE_NAMES.get(field_name, field_name)


def field_name(name: str) -> str:
    """The field that has this name in JSON and as a column."""
    return _FIELD_NAMES.get(name, name)


def to_json(noun: Any) -> dict[str, Any]:
    """A noun or body as JSON-ready values: times in ISO 8601 with offset, days without, enums by value."""
    plain: dict[str, Any] = _plain(noun)
    return plain


def to_body(body: Any) -> dict[str, Any]:
    """A request body as `to_json`, without the fields that are at their default."""
    sparse = {}
    for item in fields(body):
        value = getattr(body, item.name)
        if value != (item.default if item.default_factory is MISSING else item.default_factory()):
            sparse[wire_name(item.name)] = to_body(value) if is_dataclass(value) else _plain(value)
    return sparse


def is_known(word: Enum) -> bool:
    """False for a word of another version, which this version only passes on."""
    return word.value in type(word)._value2member_map_


def _plain(value: Any) -> Any:
    kind: type = type(value)
    if kind in _PLAIN:
        return value
    names = _names(kind)
    if names is not None:
        return {wire: item if type(item := getattr(value, name)) in _PLAIN else _plain(item) for name, wire in names}
    if isinstance(value, dict):
        return {key: item if type(item) in _PLAIN else _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [item if type(item) in _PLAIN else _plain(item) for item in value]
    if isinstance(value, datetime):
        return value.isoformat().replace("+00:00", "Z")
    if isinstance(value, date):
        return value.isoformat()
    return value.value if isinstance(value, Enum) else value


def from_json(kind: type[T], value: Any) -> T:
    """The noun for JSON values. Ignores unknown fields, and keeps unknown words (`is_known`).

    Raises ValueError when a field is missing or of another shape.
    """
    try:
        read: T = _reader(typing.cast(Any, kind))(value)
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"not a {getattr(kind, '__name__', kind)}: {error}") from error
    return read


@cache
def _names(kind: type) -> tuple[tuple[str, str], ...] | None:
    """The fields of a noun or body, each with its name in JSON; None for any other class."""
    return tuple((item.name, wire_name(item.name)) for item in fields(kind)) if is_dataclass(kind) else None


@cache
def _types(kind: type) -> dict[str, Any]:
    hints = typing.get_type_hints(kind)
    return {item.name: hints[item.name] for item in fields(kind)}


def _as_it_is(value: Any) -> Any:
    return value


@cache
def _reader(kind: Any, item: Any = None) -> Callable[[Any], Any]:
    """What makes a `kind` of JSON; `item` is what the type variable of a page stands for. Made once for each type: a
    daemon reads tens of thousands of nouns when it starts."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if isinstance(kind, TypeVar):
        return _reader(item)
    if origin in (types.UnionType, typing.Union):
        inner = [argument for argument in arguments if argument is not type(None)]
        one = _reader(inner[0]) if len(inner) == 1 else _as_it_is
        return one if one is _as_it_is else lambda value: None if value is None else one(value)
    if origin is tuple:
        entry = _reader(arguments[0], item)
        return tuple if entry is _as_it_is else lambda value: tuple(map(entry, value))
    if origin is dict:
        entry = _reader(arguments[1])
        return lambda value: {key: entry(found) for key, found in value.items()}
    if is_dataclass(origin or kind):
        return _noun_reader(origin or kind, *arguments[:1])
    if kind is datetime:
        return datetime.fromisoformat
    if kind is date:
        return date.fromisoformat
    return _word_reader(kind) if isinstance(kind, type) and issubclass(kind, Enum) else _as_it_is


def _word_reader(kind: Any) -> Callable[[Any], Any]:
    known = kind._value2member_map_

    def read(value: Any) -> Any:
        if value in known:
            return known[value]
        if not isinstance(value, str) or not issubclass(kind, str):
            return kind(value)
        # Not by `_missing_`: what people ask for is still checked against the words that there are.
        word = str.__new__(kind, value)
        word._name_ = word._value_ = value
        return word

    return read


def _noun_reader(kind: Any, item: Any = None) -> Callable[[Any], Any]:
    readers = {name: _reader(hint, item) for name, hint in _types(kind).items()}
    special = [(name, reader) for name, reader in readers.items() if reader is not _as_it_is]
    wire_names = [(name, wire_name(name)) for name in readers]

    def read(value: Any) -> Any:
        given = {name: value[wire] for name, wire in wire_names if wire in value}
        for name, reader in special:
            if name in given:
                given[name] = reader(given[name])
        return kind(**given)

    return read
