"""One page of a list: a noun of `gpulease_protocol.model`."""

from __future__ import annotations

from typing import Generic, TypeVar

from gpulease_protocol.lazy_dataclass import dataclass
from gpulease_protocol.noun import Noun

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True, kw_only=True)
class Page(Noun, Generic[Item]):
    """One page of a list."""

    items: tuple[Item, ...]
    """The nouns of this page."""
    next: str | None = None
    """Pass as `cursor` for the next page; null at the end."""
