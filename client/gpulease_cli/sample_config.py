"""A configuration file to begin with: every setting with its meaning and its default, commented out."""

from __future__ import annotations

import json
from collections.abc import Mapping
from textwrap import wrap
from typing import Any

from gpulease_cli import settings
from gpulease_protocol.host import config_file

HEAD = """\
# Settings of gpulease on this host. A setting without `#` counts; the others show their defaults. An option on the
# command line and an environment variable take precedence. `gpulease config check` finds mistakes, and `gpulease config
# show` says what counts. Restart the daemon after a change: leases and jobs survive that. See docs/configuration.md.
"""
SECTION_HEADS = {
    "client": "For users: where the daemon is.",
    "serve": "For the daemon. Under systemd its addresses are in gpulease.socket, and passwords belong in\n"
    "# /etc/gpulease/environment, which only root reads.",
    "worker": "For the worker of this host.",
}
WIDTH = 118


def sample(program: Any, chosen: Mapping[str, Mapping[str, Any]] | None = None) -> str:
    """The text of the file. `chosen`: values that count, by section and key."""
    parts = [HEAD]
    for section in config_file.SECTIONS:
        parts.append(f"# {SECTION_HEADS[section]}\n[{section}]\n")
        for key, parameter in settings.declared(program, section).items():
            value = (chosen or {}).get(section, {}).get(key)
            parts.append(_entry(key, parameter, value))
    return "\n".join(parts)


def _entry(key: str, parameter: Any, value: Any) -> str:
    meaning = parameter.help or ""
    default = [] if parameter.multiple else parameter.default
    if not isinstance(default, (bool, int, float, str, list)) or default == "":
        # It depends on the host, or there is none: the file shows what kind of value it takes.
        meaning += f" By default {parameter.show_default}." if isinstance(parameter.show_default, str) else ""
        default = parameter.metavar or key.upper()
    lines = "".join(f"# {line}\n" for line in wrap(meaning, WIDTH))
    return lines + (f"#{key} = {_toml(default)}\n" if value is None else f"{key} = {_toml(value)}\n")


def _toml(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
