"""The configuration files: where they are, and their entries with line numbers.

A setting's value is that of the option, else of the environment variable, else of the file, else its default. There are
two files; a key in the user's file overrides the same key in the system's:

| file | owner |
|---|---|
| `/etc/gpulease/config.toml` | the system; ignored for users who may not read it |
| `~/.config/gpulease/config.toml`, or under XDG_CONFIG_HOME | the user; not read for root |

GPULEASE_CONFIG, or `gpulease --config`, names a file that is read instead of both, and must exist.

This module knows the sections and the keys of `[client]`, which the library itself reads when the environment does not
say where the daemon is. The other keys are settings of `serve` and `worker`, which `gpulease_cli.settings` checks.
Importing this module reads no file.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from gpulease_protocol.errors import InvalidRequest
from gpulease_protocol.host import variables
from gpulease_protocol.lazy_dataclass import dataclass

SYSTEM = Path("/etc/gpulease/config.toml")
"""The system's file."""
SECTIONS = ("client", "serve", "worker")
CLIENT_KEYS = ("url", "token", "daemon_user", "ca_file")
"""Keys of `[client]`; each is a string."""
VARIABLE = variables.CONFIG
MAX_BYTES = 2**20
"""Size limit of a configuration file."""


class ConfigurationRefused(InvalidRequest):
    """A configuration file is invalid. Correct the line that is named."""

    code, title = "configuration_refused", "Configuration refused"
    line: int | None = None
    """The line, where it could be determined."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One key's entry in a file."""

    value: Any
    """As TOML parses it."""
    file: Path
    """The file it is in."""
    line: int | None
    """Its line; null if that could not be determined."""

    @property
    def place(self) -> str:
        """File and line, for people."""
        return _place(self.file, self.line)


Sections = dict[str, dict[str, Entry]]


def files(environ: Mapping[str, str] = os.environ) -> tuple[Path, ...]:
    """The files to read; later ones override earlier ones. Only a file named by GPULEASE_CONFIG must exist."""
    if environ.get(VARIABLE):
        return (Path(environ[VARIABLE]).absolute(),)
    home = Path(environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config"))
    if os.geteuid() == 0 or not home.is_absolute():
        return (SYSTEM,)
    return (SYSTEM, home / "gpulease" / "config.toml")


def load(environ: Mapping[str, str] = os.environ) -> Sections:
    """The entries of all files by section. Raises `ConfigurationRefused` for invalid TOML and unknown sections."""
    found: Sections = {section: {} for section in SECTIONS}
    for path in files(environ):
        for section, entries in read(path, required=bool(environ.get(VARIABLE))).items():
            found[section] |= entries
    return found


def read(path: Path, *, required: bool = True) -> Sections:
    """The entries of one file. A file that is not `required` may be absent, and the system's may be unreadable."""
    found, mistakes = examine(path, required=required)
    if mistakes:
        raise mistakes[0]
    return found


def examine(path: Path, *, required: bool = True) -> tuple[Sections, list[ConfigurationRefused]]:
    """The entries of one file as `read`, and what is wrong with its sections. Raises `ConfigurationRefused` for a file
    that is not TOML."""
    text = _text(path, required)
    if not text:
        return {}, []
    import tomllib  # noqa: PLC0415 - costs the library its start-up time, and most have no file

    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigurationRefused(f"{path}: {_lower(str(error))}.", remedy="See docs/configuration.md.") from None
    found: Sections = {}
    mistakes = []
    for section, keys in document.items():
        if section in SECTIONS and isinstance(keys, dict):
            found[section] = {key: Entry(value, path, _line(text, section, key)) for key, value in keys.items()}
        elif section in SECTIONS:
            remedy = f"Write [{section}] on a line above its keys."
            line = _line(text, "", section)
            mistakes.append(_mistake(path, line, f"{section} is a section, not a key", remedy))
        else:
            line = _line(text, section) or _line(text, "", section)
            what = f"unknown section [{section}]" if isinstance(keys, dict) else f"{section} is outside any section"
            mistakes.append(_mistake(path, line, what, _known(section, SECTIONS, "[{}]")))
    return found, mistakes


def client(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The values under `[client]`. Raises `ConfigurationRefused`."""
    return checked_client(load(environ)["client"])


def checked_client(entries: Mapping[str, Entry]) -> dict[str, str]:
    """The values of `[client]`. Raises `ConfigurationRefused` for unknown keys and values that are not strings."""
    for mistake in client_mistakes(entries):
        raise mistake
    return {key: entry.value for key, entry in entries.items()}


def client_mistakes(entries: Mapping[str, Entry]) -> Iterator[ConfigurationRefused]:
    """What is wrong with the entries of `[client]`."""
    for key, entry in entries.items():
        if key not in CLIENT_KEYS:
            yield unknown_key("client", key, entry, CLIENT_KEYS)
        elif not isinstance(entry.value, str) or not entry.value:
            yield refused("client", key, entry, 'must be a string, such as "http://127.0.0.1:8750"')


def trusted_client_value(key: str, environ: Mapping[str, str] = os.environ) -> str | None:
    """The value of a key of `[client]` that says whom to trust; None if no file has it. Raises `ConfigurationRefused`
    for a file that another user owns: they could give the key any value."""
    entries = load(environ)["client"]
    value = checked_client(entries).get(key)
    if value is not None and entries[key].file.stat().st_uid not in (0, os.geteuid()):
        raise refused("client", key, entries[key], "counts only in a file of root's or of your own")
    return value


def unknown_key(section: str, key: str, entry: Entry, known: Iterable[str]) -> ConfigurationRefused:
    """The error for an unknown key."""
    what = f"unknown key {key} in [{section}]"
    return _mistake(entry.file, entry.line, what, _known(key, tuple(known), "{}"))


def refused(section: str, key: str, entry: Entry, why: str) -> ConfigurationRefused:
    """The error for an invalid value."""
    return _mistake(entry.file, entry.line, f"{key} in [{section}] {why}", "See docs/configuration.md.")


def _mistake(file: Path, line: int | None, what: str, remedy: str) -> ConfigurationRefused:
    error = ConfigurationRefused(f"{_place(file, line)}: {what}.", remedy=remedy)
    error.line = line
    return error


def _text(path: Path, required: bool) -> str:
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise ConfigurationRefused(f"{path}: is larger than 1 MiB.", remedy="Check the path.")
        return content.decode()
    except UnicodeDecodeError as error:
        raise ConfigurationRefused(f"{path}: is not UTF-8 at byte {error.start}.", remedy="Save it as UTF-8.") from None
    except (FileNotFoundError, NotADirectoryError) as error:
        if not required:
            return ""
        raise _unread(path, error) from None
    except OSError as error:
        if not required and path == SYSTEM and isinstance(error, PermissionError):
            return ""
        raise _unread(path, error) from None


def _unread(path: Path, error: OSError) -> ConfigurationRefused:
    return ConfigurationRefused(f"{path}: {error.strerror}.", remedy="Check the path and the file's permissions.")


def _known(word: str, known: tuple[str, ...], form: str) -> str:
    import difflib  # noqa: PLC0415 - after a slip only

    near = difflib.get_close_matches(word, known, 1, 0.5)
    return f"Did you mean {form.format(near[0])}?" if near else f"Known: {', '.join(map(form.format, known))}."


def _place(file: Path, line: int | None) -> str:
    return str(file) if line is None else f"{file}:{line}"


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:]


def _line(text: str, section: str, key: str | None = None) -> int | None:
    """The line of a section's heading, or of a key in it. The parser does not report it; for error messages only."""
    here = ""
    for number, line in enumerate(text.splitlines(), 1):
        head = re.match(r"\s*\[\s*[\"']?([^\"'\]]+?)[\"']?\s*\]", line)
        if head:
            here = head[1]
            if key is None and here == section:
                return number
        elif key is not None and here == section and re.match(rf"\s*[\"']?{re.escape(key)}[\"']?\s*[=.]", line):
            return number
    return None
