"""Effective settings: the values from options, variables, configuration files and defaults, and which of them counts.

The settings of `[serve]` and `[worker]` are declared as fields (`gpulease_protocol.host.settings`), from which
`setting_options` makes the options of the commands; `[client]` has the options of the program itself. This module reads
everything else off those options: a key is the parameter's name, with the option's type and bounds.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any

import click

from gpulease_protocol.host import config_file
from gpulease_protocol.host.config_file import ConfigurationRefused, Entry, Sections
from gpulease_protocol.lazy_dataclass import dataclass
from gpulease_protocol.model import Noun

OF_WORKER = frozenset({"kill_leftovers", "manage_compute_mode"})
"""Options of `serve` that it only passes on: their key is in `[worker]`."""
CHOSEN_BY_SERVE = frozenset({"url", "node", "data_dir", "log_format", "log_level"})
"""Settings that `serve` chooses for its worker in any case."""
NOT_IN_FILES = frozenset({"config"})
SECRET = frozenset({"token"})
SIMULATE = "simulate"
"""A number, or the path of a file."""
HIDDEN = "..."
"""Stands for a secret."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting(Noun):
    """One setting, its value, and where that comes from."""

    section: str
    """`client`, `serve` or `worker`."""
    key: str
    """Its name in that section of a configuration file."""
    value: Any
    """The value that counts; secrets are left out. Null where there is none."""
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
    """Raise `ConfigurationRefused` for the first unknown key or value that is not allowed."""
    for mistake in mistakes(program, sections):
        raise mistake


def mistakes(program: Any, sections: Sections) -> Iterator[ConfigurationRefused]:
    """Every unknown key and every value that is not allowed."""
    yield from config_file.client_mistakes(sections.get("client", {}))
    for section in ("serve", "worker"):
        entries = sections.get(section, {})
        known = declared(program, section) if entries else {}
        for key, entry in entries.items():
            if section == "serve" and key in OF_WORKER:
                yield config_file.refused(section, key, entry, "belongs in [worker]")
            elif key not in known:
                yield config_file.unknown_key(section, key, entry, known)
            else:
                try:
                    _value(section, known[key], entry, click.Context(program))
                except ConfigurationRefused as mistake:
                    yield mistake


def from_files(program: Any, sections: Sections, section: str) -> dict[str, Any]:
    """The `default_map` of a command with options of a section: the values that files have for them."""
    known = declared(program, section) if sections[section] else {}
    context = click.Context(program)
    return {key: _value(section, known[key], entry, context) for key, entry in sections[section].items()}


def effective(program: Any, sections: Sections, section: str, arguments: Sequence[str] = ()) -> Iterator[Setting]:
    """Every setting of a section as its command would have it with these arguments. Raises `click.BadParameter`."""
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


def worker_options(program: Any, sections: Sections) -> tuple[str, ...]:
    """Options for the worker of `serve`: everything that environment and files say for a worker, checked now.

    A worker that is restarted hours later so has the settings with which the daemon was started.
    """
    words: list[str] = []
    for parameter, value, origin in _resolved(program, sections, "worker", ()):
        if origin == "default" or parameter.name in CHOSEN_BY_SERVE:
            continue
        if parameter.is_flag:
            words.append(parameter.opts[0] if value else parameter.secondary_opts[0])
        else:
            words += [parameter.opts[0], str(getattr(value, "value", value))]
    return tuple(words)


def shown(key: str, value: Any) -> Any:
    """A value for printing, without secrets."""
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
    """(option, value, origin) for every setting of a section. A default that depends on the host is what it is here."""
    command = program if section == "client" else program.commands[section]
    known = declared(program, section)
    context = command.context_class(command, info_name="gpulease" if command is program else f"gpulease {section}")
    context.default_map = {
        key: _value(section, known[key], entry, context) for key, entry in sections.get(section, {}).items()
    }
    given, _, _ = command.make_parser(context).parse_args(list(arguments))
    origins = {"COMMANDLINE": "option", "ENVIRONMENT": "environment", "DEFAULT_MAP": "file"}
    values: dict[str, Any] = {}
    found = []
    for name, parameter in known.items():
        value, source = parameter.consume_value(context, given)
        values[name] = parameter.type_cast_value(context, value)
        found.append((parameter, origins.get(source.name, "default")))
    for parameter, origin in found:
        if values[parameter.name] is None and parameter.derive is not None:
            values[parameter.name] = parameter.derive(values)
        yield parameter, values[parameter.name], origin


def _value(section: str, parameter: Any, entry: Entry, context: click.Context) -> Any:
    """The entry as a value for the option. Raises `ConfigurationRefused` unless its type and bounds allow it."""
    kind_of_value = kind(parameter)
    value = entry.value
    if parameter.name == SIMULATE and type(value) is int:
        value = str(value)
    fits = {
        "boolean": isinstance(value, bool),
        "list of strings": isinstance(value, list) and all(isinstance(item, str) for item in value),
        "integer": type(value) is int,
        "number": type(value) in (int, float) and math.isfinite(value),
    }.get(kind_of_value, isinstance(value, str) and bool(value))
    if not fits:
        article = "an" if kind_of_value == "integer" else "a"
        why = f"must be {article} {kind_of_value}, not {_shown_in_error(entry.value)}"
        raise config_file.refused(section, parameter.name, entry, why)
    if is_path(parameter) and not (parameter.name == SIMULATE and value.isdecimal()):
        value = str(entry.file.parent / Path(value).expanduser())
    try:
        parameter.type_cast_value(context, value)
    except click.BadParameter as error:
        raise config_file.refused(section, parameter.name, entry, f"is not allowed: {error.message}") from None
    return value


def kind(parameter: Any) -> str:
    """The type of a setting in words, as a file has to give it."""
    annotation = parameter.kind
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return f"string, one of {', '.join(annotation)}"
    words = {bool: "boolean", int: "integer", float: "number", list[str]: "list of strings"}
    return words.get(annotation, "string")


def is_path(parameter: Any) -> bool:
    """True for a path: in a file it may begin with `~`, and is otherwise taken from the file's directory."""
    return parameter.kind is Path or parameter.name == SIMULATE


def _shown_in_error(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return repr(value) if isinstance(value, (int, float, str)) else f"a {type(value).__name__}"
