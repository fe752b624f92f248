"""The canonical form of a GPU's UUID."""

from __future__ import annotations

import re

from gpulease_protocol.bounds import MAX_UUID

VALID_UUID = re.compile(rf"[!-+\-.0-~]{{1,{MAX_UUID}}}")
"""Printable ASCII without space, comma and slash."""


def canonical_uuid(uuid: str) -> str:
    """A GPU UUID in the one spelling that CUDA takes: `GPU-` and lower-case hex."""
    return uuid.strip().lower().replace("gpu-", "GPU-", 1)


def is_valid_uuid(uuid: str) -> bool:
    """True if the UUID is canonical, and safe in a URL path and in a comma-separated list."""
    return VALID_UUID.fullmatch(uuid) is not None and uuid == canonical_uuid(uuid) and uuid.strip(".") != ""
