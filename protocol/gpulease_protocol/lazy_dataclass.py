"""`dataclasses.dataclass`, except that each method of a class is written when it is first called.

The standard function compiles six methods for each class when it is defined: 0.4 ms each, and 0.05 ms are left here. A
command imports 60 such classes and makes instances of a dozen; the daemon imports 250. The methods are those that the
standard function writes, and mypy checks classes as those of the standard function.

Except for `__init__` of a frozen class with slots. The standard one calls `object.__setattr__` for each field: 2.0 us
for a demand. Here an instance is of a class that may be changed for as long as its `__init__` runs: 0.6 us.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass  # noqa: PLC0414 - mypy wants it so
else:

    def dataclass(cls=None, /, **options):
        """Makes a class a dataclass. `options`: `frozen`, `slots`, `kw_only` and `eq`, as of the standard function."""
        return partial(_made, **options) if cls is None else _made(cls, **options)


_UNWRITTEN: dict[type, list[str]] = {}
"""The methods that each class still lacks."""


def write_methods() -> None:
    """Write the methods of all classes that are defined: before a fork, for every child."""
    for cls, names in list(_UNWRITTEN.items()):
        for name in tuple(names):
            _write(cls, name)


def _write(cls: Any, name: str) -> None:
    method = _thawing_init(cls) if name == "__init__" and _can_thaw(cls) else _standard(cls, name)
    setattr(cls, name, method)
    with suppress(ValueError):  # another thread has written it as well
        _UNWRITTEN[cls].remove(name)


def _standard(cls: Any, name: str) -> Any:
    """A method as the standard function writes it."""
    fields = [(field.name, field.type, field) for field in dataclasses.fields(cls)]
    namespace = {"__doc__": "."}  # without one, the standard function makes one of the signature
    if hasattr(cls, "__post_init__"):
        namespace["__post_init__"] = ""  # its name is all that is written
    written = dataclasses.make_dataclass(
        cls.__qualname__.rpartition(".")[2],
        fields,
        namespace=namespace,
        init=name == "__init__",
        repr=name == "__repr__",
        eq=name in ("__eq__", "__hash__"),
        frozen=cls.__dataclass_params__.frozen and name in ("__init__", "__hash__"),
    )
    return vars(written)[name]


def _can_thaw(cls: Any) -> bool:
    is_frozen = cls.__dataclass_params__.frozen and "__slots__" in vars(cls)
    return is_frozen and all(field.init for field in dataclasses.fields(cls))


def _thawing_init(cls: Any) -> Any:
    """An `__init__` with the parameters of the standard one."""
    names: dict[str, Any] = {"_set": object.__setattr__, "_unset": _UNSET}
    names |= {"_own": cls, "_own_thawed": thawed(cls), "_thawed": thawed}
    parameters: dict[bool, list[str]] = {False: ["self"], True: []}
    lines = ["_kind = self.__class__", "_set(self, '__class__', _own_thawed if _kind is _own else _thawed(_kind))"]
    for field in dataclasses.fields(cls):
        parameter = value = field.name
        if field.default is not dataclasses.MISSING:
            parameter, names[f"_default_{field.name}"] = f"{field.name}=_default_{field.name}", field.default
        elif field.default_factory is not dataclasses.MISSING:
            parameter, names[f"_make_{field.name}"] = f"{field.name}=_unset", field.default_factory
            value = f"_make_{field.name}() if {field.name} is _unset else {field.name}"
        parameters[bool(field.kw_only)].append(parameter)
        lines.append(f"self.{field.name} = {value}")
    lines += ["self.__class__ = _kind", *(["self.__post_init__()"] if hasattr(cls, "__post_init__") else [])]
    signature = ", ".join([*parameters[False], *(["*", *parameters[True]] if parameters[True] else [])])
    exec("\n    ".join([f"def __init__({signature}):", *lines]), names)  # noqa: S102 - of names of fields alone
    written = names["__init__"]
    written.__qualname__ = f"{cls.__qualname__}.__init__"
    written.__annotations__ = {field.name: field.type for field in dataclasses.fields(cls)} | {"return": None}
    return written


_UNSET = object()
"""The default of a field that each instance makes."""


@cache
def thawed(cls: Any) -> Any:
    """A class of the same layout as a frozen one, whose instances may be changed until their `__class__` is that one
    again."""
    may_change = {"__setattr__": object.__setattr__, "__delattr__": object.__delattr__}
    return type(f"thawed {cls.__name__}", (cls,), {"__slots__": (), **may_change})


def _made(cls: Any, *, frozen: bool = False, slots: bool = False, kw_only: bool = False, eq: bool = True) -> Any:
    own = vars(cls)
    missing = [name for name in ("__init__", "__repr__", *(("__eq__",) if eq else ())) if name not in own]
    if eq and own.get("__hash__") is None:
        missing.append("__hash__")
    # Below a frozen class the standard function insists on a frozen one, and compiles what refuses changes.
    below = frozen and any(dataclasses.is_dataclass(base) for base in cls.__mro__[1:])
    define = dataclasses.dataclass(init=False, repr=False, eq=False, frozen=below, slots=slots, kw_only=kw_only)
    made: Any = define(cls)
    options = made.__dataclass_params__
    options.init, options.repr, options.eq, options.frozen = True, True, eq, frozen
    if frozen and not below:
        made.__setattr__, made.__delattr__ = _refuse_to_set, _refuse_to_delete
        if slots and "__getstate__" not in own:
            made.__getstate__, made.__setstate__ = _state, _restore
    if eq and not frozen and "__hash__" in missing:
        missing.remove("__hash__")
        made.__hash__ = None
    for name in missing:
        setattr(made, name, _writes_first(made, name))
    _UNWRITTEN[made] = missing
    return made


def _writes_first(cls: type, name: str) -> Callable[..., Any]:
    def method(self: Any, *arguments: Any, **named: Any) -> Any:
        _write(cls, name)
        return getattr(cls, name)(self, *arguments, **named)

    return method


def _refuse_to_set(self: Any, name: str, value: Any) -> NoReturn:
    raise dataclasses.FrozenInstanceError(f"cannot assign to field {name!r}")


def _refuse_to_delete(self: Any, name: str) -> NoReturn:
    raise dataclasses.FrozenInstanceError(f"cannot delete field {name!r}")


def _state(self: Any) -> list[Any]:
    return [getattr(self, field.name) for field in dataclasses.fields(self)]


def _restore(self: Any, state: list[Any]) -> None:
    for field, value in zip(dataclasses.fields(self), state, strict=True):
        object.__setattr__(self, field.name, value)
