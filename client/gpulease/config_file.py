"""The configuration files: where they are, what they say, and in which line.

A setting's value is the option's, else the environment variable's, else the file's, else its default. There are two
files, and a key of the user's own stands over the same key of the system's:

| file | of whom |
|---|---|
| `/etc/gpulease/config.toml` | the system; a user who may not read it goes without |
| `~/.config/gpulease/config.toml`, under XDG_CONFIG_HOME where that is set | the user; none for root |

GPULEASE_CONFIG, or `gpulease --config`, names one that is read instead of both, and must be there.

This module knows the sections, and the keys of `[client]`, which the library reads itself when it looks for a daemon
and the environment does not say where. The other keys are options of `serve` and `worker`: `gpulease.cli.settings`
checks them. Importing it loads nothing; a file is read when somebody asks for it.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpulease.errors import InvalidRequest

SYSTEM = Path("/etc/gpulease/config.toml")
"""The file of the whole system."""
SECTIONS = ("client", "serve", "worker")
CLIENT_KEYS = ("url", "token")
"""Keys of `[client]`; each is a text."""
VARIABLE = "GPULEASE_CONFIG"
MAX_BYTES = 2**20
"""A file that is larger is none of ours."""


class ConfigurationRefused(InvalidRequest):
    """A configuration file cannot be used as it is. Correct the line that is named."""

    code, title = "configuration_refused", "Configuration refused"


@dataclass(frozen=True, slots=True)
class Entry:
    """What a file says for one key."""

    value: Any
    """As TOML has it."""
    file: Path
    """Where it stands."""
    line: int | None
    """In which line; null where that cannot be told."""

    @property
    def place(self) -> str:
        """File and line, for people."""
        return _place(self.file, self.line)


Sections = dict[str, dict[str, Entry]]


def files(environ: Mapping[str, str] = os.environ) -> tuple[Path, ...]:
    """Where configuration may be, what stands over others last. They need not be there, but for a named one."""
    if environ.get(VARIABLE):
        return (Path(environ[VARIABLE]).absolute(),)
    home = Path(environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config"))
    if os.geteuid() == 0 or not home.is_absolute():
        return (SYSTEM,)
    return (SYSTEM, home / "gpulease" / "config.toml")


def load(environ: Mapping[str, str] = os.environ) -> Sections:
    """What the files say, section by section. Raises `ConfigurationRefused` for what is no TOML or no known section."""
    found: Sections = {section: {} for section in SECTIONS}
    for path in files(environ):
        for section, entries in read(path, required=bool(environ.get(VARIABLE))).items():
            found[section] |= entries
    return found


def read(path: Path, *, required: bool = True) -> Sections:
    """What one file says. A file that is not `required` may be absent, and the system's closed to this user."""
    text = _text(path, required)
    if not text:
        return {}
    import tomllib  # noqa: PLC0415 - costs the library its start-up time, and most have no file

    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigurationRefused(f"{path}: {_lower(str(error))}.", remedy="See docs/configuration.md.") from None
    found: Sections = {}
    for section, keys in document.items():
        if section not in SECTIONS:
            place = _place(path, _line(text, section) or _line(text, "", section))
            what = f"[{section}] is no section" if isinstance(keys, dict) else f"{section} stands outside of a section"
            raise ConfigurationRefused(f"{place}: {what}.", remedy=_known(section, SECTIONS, "[{}]"))
        if not isinstance(keys, dict):
            place = _place(path, _line(text, "", section))
            raise ConfigurationRefused(f"{place}: {section} is a section.", remedy=f"Write [{section}] above its keys.")
        found[section] = {key: Entry(value, path, _line(text, section, key)) for key, value in keys.items()}
    return found


def client(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """What the files say under `[client]`. Raises `ConfigurationRefused`."""
    return checked_client(load(environ)["client"])


def checked_client(entries: Mapping[str, Entry]) -> dict[str, str]:
    """The texts of `[client]`. Raises `ConfigurationRefused` for another key, and for what is no text."""
    for key, entry in entries.items():
        if key not in CLIENT_KEYS:
            raise unknown_key("client", key, entry, CLIENT_KEYS)
        if not isinstance(entry.value, str) or not entry.value:
            raise refused("client", key, entry, 'has to be a text in quotes, such as "http://127.0.0.1:8750"')
    return {key: entry.value for key, entry in entries.items()}


def unknown_key(section: str, key: str, entry: Entry, known: Iterable[str]) -> ConfigurationRefused:
    """The error for a key that the section does not have."""
    return ConfigurationRefused(f"{entry.place}: [{section}] has no {key}.", remedy=_known(key, tuple(known), "{}"))


def refused(section: str, key: str, entry: Entry, why: str) -> ConfigurationRefused:
    """The error for a value that cannot be."""
    return ConfigurationRefused(f"{entry.place}: {key} in [{section}] {why}.", remedy="See docs/configuration.md.")


def _text(path: Path, required: bool) -> str:
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise ConfigurationRefused(f"{path}: is over 1 MiB.", remedy="Name the right file.")
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
    return ConfigurationRefused(f"{path}: {error.strerror}.", remedy="Name a file that can be read.")


def _known(word: str, known: tuple[str, ...], form: str) -> str:
    near = difflib.get_close_matches(word, known, 1, 0.5)
    return f"Did you mean {form.format(near[0])}?" if near else f"There are {', '.join(map(form.format, known))}."


def _place(file: Path, line: int | None) -> str:
    return str(file) if line is None else f"{file}:{line}"


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:]


def _line(text: str, section: str, key: str | None = None) -> int | None:
    """The line of a section's head, or of a key in it. The parser does not tell, and it is only for people."""
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
