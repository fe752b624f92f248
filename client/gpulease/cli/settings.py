"""Settings: what `serve`, `worker` and every client command can be told, and who told them.

A setting is declared once, as an option of its command with a variable. From that declaration come the key of the
configuration file (the parameter's name), its type and bounds, `gpulease config show`, and the table in
docs/configuration.md. `[client]` has the options of the program itself.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import typer

from gpulease import config_file
from gpulease.config_file import Entry, Sections
from gpulease.model import Noun

OF_WORKER = frozenset({"kill_leftovers", "manage_compute_mode"})
"""Options of `serve` that it only passes on: their key is in `[worker]`."""
TOLD_BY_SERVE = frozenset({"url", "node", "data_dir", "log_format", "log_level"})
"""What `serve` tells its worker in any case."""
NOT_IN_FILES = frozenset({"config"})
SECRET = frozenset({"token"})
SIMULATE = "simulate"
"""A number, or the path of a file."""
HIDDEN = "..."
"""Stands for a secret."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting(Noun):
    """One setting, its value, and who gave it."""

    section: str
    """`client`, `serve` or `worker`."""
    key: str
    """Its name in that section of a configuration file."""
    value: Any
    """What is in force; secrets are left out. Null where the default depends on the host or the user."""
    origin: str
    """`option`, `environment`, `file` or `default`."""
    place: str | None
    """The option, the variable, or file and line; null for a default."""


def declared(program: Any, section: str) -> dict[str, Any]:
    """The options that are settings of a section, by key. `program` is the whole command line."""
    command = program if section == "client" else program.commands[section]
    left_out = NOT_IN_FILES | (OF_WORKER if section == "serve" else frozenset())
    return {
        parameter.name: parameter for parameter in command.params if parameter.envvar and parameter.name not in left_out
    }


def check(program: Any, sections: Sections) -> None:
    """Raise `ConfigurationRefused` for the first key that is not known or whose value cannot be."""
    config_file.checked_client(sections.get("client", {}))
    for section in ("serve", "worker"):
        for key, entry in sections.get(section, {}).items():
            known = declared(program, section)
            if section == "serve" and key in OF_WORKER:
                raise config_file.refused(section, key, entry, f"belongs into [worker]: {key} is the worker's")
            if key not in known:
                raise config_file.unknown_key(section, key, entry, known)
            _value(section, known[key], entry)


def defaults(program: Any, sections: Sections) -> dict[str, Any]:
    """The `default_map` of the program's context: what the files say, for each command that has such an option."""
    said = {
        section: {key: _value(section, declared(program, section)[key], entry) for key, entry in entries.items()}
        for section, entries in sections.items()
    }
    of_daemon = {key: value for key, value in said["serve"].items() if key in ("data_dir", "database_url")}
    databases = {name: of_daemon for name in program.commands["db"].commands}
    return said | {"db": databases, "doctor": of_daemon}


def effective(program: Any, sections: Sections, section: str, arguments: Sequence[str] = ()) -> Iterator[Setting]:
    """Every setting of a section as its command would have it with these arguments. Raises `typer.BadParameter`."""
    for parameter, value, origin in _resolved(program, sections, section, arguments):
        match origin:
            case "option":
                place = parameter.opts[0]
            case "environment":
                place = parameter.envvar
            case "file":
                place = sections[section][parameter.name].place
            case _:
                place = None
        yield Setting(
            section=section, key=parameter.name, value=shown(parameter.name, value), origin=origin, place=place
        )


def options_of_worker(program: Any, sections: Sections) -> tuple[str, ...]:
    """What the worker of `serve` is told: all that environment and files say to a worker, checked now.

    So the worker that is started again after hours has the settings with which the daemon was started.
    """
    words: list[str] = []
    for parameter, value, origin in _resolved(program, sections, "worker", ()):
        if origin == "default" or parameter.name in TOLD_BY_SERVE:
            continue
        if parameter.is_flag:
            words.append(parameter.opts[0] if value else parameter.secondary_opts[0])
        else:
            words += [parameter.opts[0], str(getattr(value, "value", value))]
    return tuple(words)


def shown(key: str, value: Any) -> Any:
    """A value as it may be printed: without secrets."""
    if isinstance(value, (list, tuple)):
        return [shown(key, item) for item in value]
    if key in SECRET and value:
        return HIDDEN
    value = getattr(value, "value", value)
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, str) and "://" in value:
        value = re.sub(r"(//[^/@:]*:)[^/@]*@", rf"\1{HIDDEN}@", value)
        return re.sub(r"([?&][a-z]*password=)[^&]*", rf"\1{HIDDEN}", value)
    return value


def _resolved(
    program: Any, sections: Mapping[str, Mapping[str, Entry]], section: str, arguments: Sequence[str]
) -> Iterator[tuple[Any, Any, str]]:
    """(option, value, origin) for every setting of a section."""
    command = program if section == "client" else program.commands[section]
    known = declared(program, section)
    from_files = {key: _value(section, known[key], entry) for key, entry in sections.get(section, {}).items()}
    context = command.context_class(command, info_name=section, default_map=from_files)
    given, _, _ = command.make_parser(context).parse_args(list(arguments))
    origins = {"COMMANDLINE": "option", "ENVIRONMENT": "environment", "DEFAULT_MAP": "file"}
    for parameter in known.values():
        value, source = parameter.consume_value(context, given)
        yield parameter, parameter.process_value(context, value), origins.get(source.name, "default")


def _value(section: str, parameter: Any, entry: Entry) -> Any:
    """The entry as the option takes it. Raises `ConfigurationRefused` unless its type and bounds allow it."""
    wanted = kind(parameter)
    value = entry.value
    if parameter.name == SIMULATE and type(value) is int:
        value = str(value)
    fits = {
        "true or false": isinstance(value, bool),
        "list of texts": isinstance(value, list) and all(isinstance(item, str) for item in value),
        "whole number": type(value) is int,
        "number": type(value) in (int, float) and math.isfinite(value),
    }.get(wanted, isinstance(value, str) and bool(value))
    if not fits:
        raise config_file.refused(section, parameter.name, entry, f"has to be a {wanted}, not {_spelt(entry.value)}")
    if is_place(parameter) and not (parameter.name == SIMULATE and value.isdecimal()):
        value = str(entry.file.parent / Path(value).expanduser())
    try:
        parameter.process_value(None, value)
    except typer.BadParameter as error:
        raise config_file.refused(section, parameter.name, entry, f"cannot be that: {error.message}") from None
    return value


def kind(parameter: Any) -> str:
    """The type of a setting in words, as a file has to give it."""
    wanted = parameter.type_descriptor.annotation
    if isinstance(wanted, type) and issubclass(wanted, Enum):
        return f"text, one of {', '.join(wanted)}"
    words = {bool: "true or false", int: "whole number", float: "number", list[str]: "list of texts"}
    return words.get(wanted, "text")


def is_place(parameter: Any) -> bool:
    """True for a path: in a file it may begin with `~`, and is otherwise taken from the file's directory."""
    return parameter.type_descriptor.annotation is Path or parameter.name == SIMULATE


def _spelt(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return repr(value) if isinstance(value, (int, float, str)) else f"a {type(value).__name__}"
