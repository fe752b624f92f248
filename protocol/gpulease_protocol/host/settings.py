"""Declarations of settings. Each setting of `serve` and `worker` is declared once, as a field of a dataclass:

```python
@dataclass(frozen=True, slots=True, kw_only=True)
class ServeSettings:
    port: int = setting(8750, "TCP port.", variable="GPULEASE_LISTEN_PORT", minimum=0, maximum=65535)
```

From the field follow the option `--port`, its type and bounds, its line in `--help`, the variable, the key `port` in
the configuration file, its row in docs/configuration.md, and the attribute `settings.port`. This module only declares;
`gpulease_cli.setting_options` makes the options, so the daemon and the worker do not need the program.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import field, fields
from socket import gethostname
from typing import Any

from gpulease_protocol.lazy_dataclass import dataclass

DECLARATION = "setting"
"""Key of the declaration in a field's metadata."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Declaration:
    """What is declared of a setting beside its name, type and default."""

    help: str
    """One or two sentences for `--help` and docs/configuration.md; ends with the unit if there is one."""
    variable: str
    """Its environment variable."""
    group: str = "Options"
    """The heading under which `--help` lists it."""
    flag: str | None = None
    """Its option, where that is not the name with dashes; `--yes/--no` for a switch."""
    metavar: str | None = None
    """What stands for the value in `--help`."""
    minimum: float | None = None
    maximum: float | None = None
    default_text: str | None = None
    """The default in words, where it depends on the host or the user."""
    derive: Callable[[Mapping[str, Any]], Any] | None = None
    """Makes the default from the values of all settings, where it depends on others."""
    check: Callable[[Any], Any] | None = None
    """Returns the value in its usual form. Raises ValueError for a value that is not allowed."""
    for_worker: bool = False
    """An option of `serve` that it only passes to its worker: the key is in `[worker]`."""


def setting(default: Any, help: str, **more: Any) -> Any:
    """A dataclass field that is a setting; `more` are the other fields of `Declaration`.

    A callable default is called for each object, for defaults that depend on the host or the user.
    """
    return shared(default, Declaration(help=help, **more))


def shared(default: Any, declaration: Declaration) -> Any:
    """A field for a setting that `serve` and `worker` both have; the default as for `setting`."""
    metadata = {DECLARATION: declaration}
    return (
        field(default_factory=default, metadata=metadata)
        if callable(default)
        else field(default=default, metadata=metadata)
    )


def declarations(settings: type[Any]) -> dict[str, Declaration]:
    """The settings that a dataclass declares, by name, in order. Other fields are left out."""
    return {one.name: one.metadata[DECLARATION] for one in fields(settings) if DECLARATION in one.metadata}


def host_node_name() -> str:
    """The name of this host's node: its host name, in characters that are safe in a URL path."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", gethostname())[:255] or "localhost"


HARDWARE, LOG = "Hardware", "Log"

SIMULATE = Declaration(
    help="Simulate N GPUs, or the GPUs described in FILE, instead of reading hardware.",
    variable="GPULEASE_SIMULATE",
    metavar="N|FILE",
    group=HARDWARE,
)
NODE = Declaration(
    help="Name of this host's node.",
    variable="GPULEASE_NODE",
    metavar="NAME",
    default_text="the host name",
    group=HARDWARE,
)
KILL_LEFTOVERS = Declaration(
    help="End the processes that users leave on a GPU after their lease.",
    variable="GPULEASE_KILL_LEFTOVERS",
    flag="--kill-leftovers/--no-kill-leftovers",
    group=HARDWARE,
)
MANAGE_COMPUTE_MODE = Declaration(
    help="Set a GPU's compute mode to EXCLUSIVE_PROCESS during a lease; needs root.",
    variable="GPULEASE_MANAGE_COMPUTE_MODE",
    flag="--manage-compute-mode/--no-manage-compute-mode",
    group=HARDWARE,
)
LOG_FORMAT = Declaration(
    help="Log lines for people or as JSON; auto means for people on a terminal and in systemd's journal.",
    variable="GPULEASE_LOG_FORMAT",
    group=LOG,
)
LOG_LEVEL = Declaration(help="The lowest level that is logged.", variable="GPULEASE_LOG_LEVEL", group=LOG)
DATA_DIR = Declaration(
    help="Directory for everything the daemon keeps.",
    variable="GPULEASE_DATA_DIR",
    metavar="DIR",
    default_text="/var/lib/gpulease for root, else ~/.local/share/gpulease",
    group="Data",
)
"""The daemon's; `gpulease doctor` and `gpulease db` look there too."""
