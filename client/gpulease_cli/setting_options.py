"""Makes a command's options from declared settings, see `gpulease_protocol.host.settings`.

```python
@takes_settings(ServeSettings)
def serve(settings: ServeSettings) -> int: ...
```
"""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable
from types import NoneType
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer

from gpulease_protocol.host.settings import Declaration, declarations

LEAST_FRACTION = 0.001
"""A fraction is 0 or at least this: a smaller one is a slip of the pen, and dividing by it gives infinity."""


def setting_option(declaration: Declaration, kind: Any) -> Any:
    """The annotation of a command's parameter for one setting of type `kind`."""
    kind, optional = _without_none(kind)
    if get_origin(kind) is tuple:
        kind, optional = list[get_args(kind)[0]], True  # type: ignore[misc]
    callback = _callback(declaration, kind)
    option = typer.Option(
        *([declaration.flag] if declaration.flag else []),
        envvar=declaration.variable,
        help=declaration.help,
        metavar=declaration.metavar,
        min=declaration.minimum,
        max=declaration.maximum,
        callback=callback,
        show_default=declaration.default_text or True,
        rich_help_panel=declaration.group,
        file_okay=declaration.metavar != "DIR",
    )
    return Annotated[kind | None if optional or declaration.default_text else kind, option]


def takes_settings(settings: type[Any]) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Give a command an option for each declared setting; it is called with an object of that class as `settings`."""
    declared, kinds = declarations(settings), get_type_hints(settings)
    defaults = {one.name: one.default for one in dataclasses.fields(settings)}

    def make(chosen: dict[str, Any]) -> Any:
        # What was not chosen and has no fixed default takes the one of this host or user.
        values = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in chosen.items()
            if value is not None and not (value == "" and defaults[name] is dataclasses.MISSING)
        }
        try:
            return settings(**values)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from error

    def decorate(command: Callable[..., int]) -> Callable[..., int]:
        def call(**values: Any) -> int:
            chosen = {name: values.pop(name) for name in declared}
            return command(settings=make(chosen), **values)

        own = [one for one in inspect.signature(command, eval_str=True).parameters.values() if one.name != "settings"]
        options = [
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=_default(defaults[name]),
                annotation=setting_option(declaration, kinds[name]),
            )
            for name, declaration in declared.items()
        ]
        parameters = [*options, *(one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in own)]
        call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        call.__annotations__ = {one.name: one.annotation for one in parameters}
        call.__name__, call.__doc__, call.__module__ = command.__name__, command.__doc__, command.__module__
        return call

    return decorate


def _default(default: Any) -> Any:
    return None if default is dataclasses.MISSING or default == () else default


def _without_none(kind: Any) -> tuple[Any, bool]:
    others = [one for one in get_args(kind) if one is not NoneType]
    return (others[0], True) if NoneType in get_args(kind) else (kind, False)


def _callback(declaration: Declaration, kind: Any) -> Callable[[Any], Any] | None:
    """What checks a value beyond its type and bounds, with errors that name the option."""
    check = declaration.check or (_fraction if kind is float else None)
    if check is None:
        return None

    def checked(value: Any) -> Any:
        try:
            return check(value)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from error

    return checked


def _fraction(value: float | None) -> float | None:
    if value is None or value == 0 or (math.isfinite(value) and abs(value) >= LEAST_FRACTION):
        return value
    raise ValueError(f"{value:g} is out of range; use at least {LEAST_FRACTION:g}, or 0 where that is allowed")
