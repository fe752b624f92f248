"""Read by schemathesis in its own process: what it makes up must not keep it waiting, or wait for a job's end."""

from __future__ import annotations

from typing import Any

import schemathesis

SHORT_S = 0.05
OTHER_WORDS = frozenset({"1", "0", "on", "off", "yes", "no", "y", "n", "t", "f"})
"""Taken for true or false by FastAPI, too, which no schema says; what must be refused is put in their place."""


@schemathesis.hook
def before_call(context: Any, case: Any, kwargs: dict[str, Any]) -> None:
    """Shorten the waits that it asks for; those that the daemon has to refuse stay as they are."""
    if isinstance(case.query, dict):
        case.query = {name: shortened(name, value) for name, value in case.query.items()}
    if isinstance(case.body, dict) and "hold_s" in case.body:
        case.body = case.body | {"hold_s": shortened("hold_s", case.body["hold_s"])}


def shortened(name: str, value: Any) -> Any:
    """The value, or a shorter one of its kind."""
    if name in {"follow", "frames"} and str(value).lower() in OTHER_WORDS:
        return "perhaps"
    if name == "follow" and str(value).lower() == "true":
        return False
    if name not in {"wait_s", "hold_s"}:
        return value
    try:
        return SHORT_S if SHORT_S < float(value) <= 3600 and not isinstance(value, bool) else value
    except (TypeError, ValueError):
        return value
