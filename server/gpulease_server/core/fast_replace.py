"""`dataclasses.replace` for the core's records, at less than half of its cost.

The standard function passes each field through `__init__` by name: 6 us for a lease of 26 fields, and a grant makes six
copies. This one copies the slots, then sets what changes. mypy checks its calls as those of the standard function.
"""

from __future__ import annotations

import dataclasses
import operator
from collections import deque
from collections.abc import Callable
from functools import cache
from itertools import repeat
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dataclasses import replace as replace  # noqa: PLC0414 - mypy wants it so
else:

    def replace(instance, /, **changes):
        """A copy of a dataclass instance with other values of these fields.

        Raises:
            TypeError: No such field.
        """
        slots = _slots(type(instance))
        if slots is None:
            return dataclasses.replace(instance, **changes)
        read, setters, by_name = slots
        copied = object.__new__(type(instance))
        deque(map(operator.call, setters, repeat(copied), read(instance)), maxlen=0)
        for name, value in changes.items():
            if name not in by_name:
                raise TypeError(f"{type(instance).__name__} has no field {name!r}")
            by_name[name](copied, value)
        return copied


Setter = Callable[[Any, Any], None]


@cache
def _slots(kind: type) -> tuple[Callable[[Any], tuple[Any, ...]], list[Setter], dict[str, Setter]] | None:
    """How the slots of a class are read and set; None for a class that is to be made by its `__init__`."""
    fields = dataclasses.fields(kind)
    names = [field.name for field in fields]
    is_plain = hasattr(kind, "__slots__") and not hasattr(kind, "__post_init__") and all(one.init for one in fields)
    if not is_plain or len(names) < 2:
        return None
    by_name = {name: getattr(kind, name).__set__ for name in names}
    return operator.attrgetter(*names), list(by_name.values()), by_name
