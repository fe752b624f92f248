"""Conditions on leases, in SQL."""

from __future__ import annotations

from typing import Any

from sqlalchemy import ColumnElement, Text, cast, or_

from gpulease_server.store.dialects import json_text
from gpulease_server.store.tables import lease


def has_gpu(uuid: str) -> ColumnElement[bool]:
    """That a lease has or had a GPU."""
    return has_value("uuid", uuid, lease.c.gpus, lease.c.members)


def on_node(node: str) -> ColumnElement[bool]:
    """That a lease has or had GPUs of a node: its first GPU is there, or a member of a gang is."""
    return or_(lease.c.gpus[0, "node"].as_string() == node, has_value("node", node, lease.c.members))


def has_value(key: str, value: str, *columns: ColumnElement[Any]) -> ColumnElement[bool]:
    """That one of these JSON columns has this key with this value somewhere."""
    texts = [f'"{key}":{separator}{json_text(value)}' for separator in ("", " ")]  # see `json_text`
    return or_(*(cast(column, Text).contains(text, autoescape=True) for column in columns for text in texts))


def is_elastic() -> ColumnElement[bool]:
    """That the nodes of a lease may have come and gone."""
    most: ColumnElement[int] = lease.c.demand["max_nodes"].as_integer()
    return most.is_not(None)
