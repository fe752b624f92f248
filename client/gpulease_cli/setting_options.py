"""Makes a command's options from declared settings, see `gpulease_protocol.host.settings`.

```python
@command()
@takes_settings(ServeSettings)
def serve(settings: ServeSettings) -> int: ...
```
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from enum import Enum
from functools import wraps
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

import click

from gpulease_cli.option_types import Number, OneOf
from gpulease_cli.parameters import Option
from gpulease_protocol.host.settings import Declaration, declarations

LEAST_FRACTION = 0.001
"""A fraction is 0 or at least this: a smaller one is a slip of the pen, and dividing by it gives infinity."""


class SettingOption(Option):
    """The option of one setting."""

    def __init__(
        self, names: Any, *, declaration: Declaration, kind: Any, default: Any = None, factory: Any = None
    ) -> None:
        several = get_origin(kind) is tuple
        kind = list[str] if several else kind
        default = default.value if isinstance(default, Enum) else default
        super().__init__(
            names,
            kind=kind,
            type=_type(declaration, kind),
            is_flag=kind is bool or None,
            multiple=several,
            default=None if several else default,
            envvar=declaration.variable,
            show_envvar=True,
            help=declaration.help,
            metavar=declaration.metavar,
            show_default=declaration.default_text or True,
            heading=declaration.group,
            derive=declaration.derive or (factory and (lambda _: factory())),
        )
        self.check = declaration.check

    def type_cast_value(self, ctx: click.Context, value: Any) -> Any:
        """The value, in its usual form. Fails for one that is not allowed."""
        converted = super().type_cast_value(ctx, value)
        if self.check is None or converted is None:
            return converted
        try:
            return self.check(converted)
        except ValueError as error:
            raise click.BadParameter(str(error), ctx, self) from error


class Fraction(Number):
    """A float that is 0 or at least `LEAST_FRACTION`."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The number. Fails as `Number` does, and for a slip of the pen."""
        number = super().convert(value, param, ctx)
        if 0 < abs(number) < LEAST_FRACTION:
            small = f"{number:g} is out of range; use at least {LEAST_FRACTION:g}, or 0 where that is allowed"
            self.fail(small, param, ctx)
        return number


def setting_option(
    name: str, declaration: Declaration, kind: Any, default: Any = None, factory: Any = None
) -> Callable[[Any], Any]:
    """The option for one setting of type `kind`, which may also be None. `factory` makes a default of this host."""
    flag, kind = declaration.flag or f"--{name.replace('_', '-')}", _without_none(kind)
    more = {"declaration": declaration, "kind": kind, "default": default, "factory": factory}
    return click.option(name, flag, cls=SettingOption, **more)


def takes_settings(settings: type[Any]) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Give a command an option for each declared setting; it is called with an object of that class as `settings`."""
    declared, kinds = declarations(settings), get_type_hints(settings)
    defaults = {one.name: one.default for one in dataclasses.fields(settings)}
    factories = {
        one.name: one.default_factory
        for one in dataclasses.fields(settings)
        if one.default_factory is not dataclasses.MISSING
    }

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
            raise click.UsageError(str(error), click.get_current_context()) from error

    def decorate(command: Callable[..., int]) -> Callable[..., int]:
        @wraps(command)
        def call(**values: Any) -> int:
            chosen = {name: values.pop(name) for name in declared}
            return command(settings=make(chosen), **values)

        decorated: Callable[..., int] = call
        for name, declaration in reversed(declared.items()):
            default = None if defaults[name] is dataclasses.MISSING else defaults[name]
            decorated = setting_option(name, declaration, kinds[name], default, factories.get(name))(decorated)
        return decorated

    return decorate


def _type(declaration: Declaration, kind: Any) -> click.ParamType[Any]:
    if kind is float:
        return Fraction(float, declaration.minimum, declaration.maximum)
    if kind is int:
        return Number(int, declaration.minimum, declaration.maximum)
    if kind is Path:
        return click.Path(file_okay=declaration.metavar != "DIR", path_type=Path)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return OneOf(kind)
    return click.BOOL if kind is bool else click.STRING


def _without_none(kind: Any) -> Any:
    return next(one for one in get_args(kind) if one is not NoneType) if NoneType in get_args(kind) else kind
