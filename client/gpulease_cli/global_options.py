"""The program's own options. They may be given before and after the name of a command.

They go into the environment, where the client library and what `run` starts find them.
"""

from __future__ import annotations

import os
from typing import Any

import click
from click.core import ParameterSource

from gpulease_cli.parameters import Option
from gpulease_protocol.host import variables


def _into_environment(context: click.Context, parameter: click.Parameter, value: str | None) -> None:
    if value:
        os.environ[str(parameter.envvar)] = value


def _url(context: click.Context, parameter: click.Parameter, value: str | None) -> None:
    """Blame the option for a mistake in it: from the environment the library would blame the variable."""
    if value and context.get_parameter_source("url") is ParameterSource.COMMANDLINE:
        from gpulease_protocol.host.addresses import candidates  # noqa: PLC0415 - where it is typed

        candidates(value, source="--url")
    _into_environment(context, parameter, value)


def _file(context: click.Context, parameter: click.Parameter, value: str | None) -> None:
    _into_environment(context, parameter, value and os.path.abspath(value))


def _configuration_file(context: click.Context, parameter: click.Parameter, value: str | None) -> None:
    """Name the file in the environment, and take the defaults of a command that has a section there."""
    _file(context, parameter, value)
    section = getattr(context.command, "section", "")
    if section and not context.resilient_parsing:
        from gpulease_cli import settings  # noqa: PLC0415 - for the daemon's own commands alone
        from gpulease_protocol.host import config_file  # noqa: PLC0415

        program, sections = context.find_root().command, config_file.load()
        settings.check(program, sections)
        context.default_map = settings.from_files(program, sections, section)


def _default_url(_: object) -> str:
    from gpulease_protocol.host.addresses import candidates  # noqa: PLC0415 - for `config show` alone

    return ",".join(address.url for address in candidates())


def _default_daemon_users(_: object) -> str:
    from gpulease_protocol.host.server_owner import user_name  # noqa: PLC0415 - for `config show` alone

    return ",".join(dict.fromkeys(("root", user_name(os.geteuid()))))


def _global(*names: str, callback: Any = _into_environment, **more: Any) -> Option:
    # Eager: what a command reads from files depends on it.
    return Option(
        list(names), default=None, expose_value=False, is_eager=True, show_envvar=True, callback=callback, **more
    )


GLOBAL_OPTIONS: tuple[Option, ...] = (
    _global(
        "--url",
        metavar="URL",
        envvar=variables.URL,
        callback=_url,
        help="Address of the daemon: http://host:port or unix:///path; several separated by commas.",
        show_default="the local socket, else http://127.0.0.1:8750",
        derive=_default_url,
    ),
    _global(
        "--token",
        metavar="TOKEN",
        envvar=variables.TOKEN,
        help="Bearer token. Visible in `ps`; prefer GPULEASE_TOKEN or the configuration file.",
    ),
    _global(
        "--daemon-user",
        metavar="USER",
        envvar=variables.DAEMON_USER,
        help="User that the daemon of this host runs as; several separated by commas. Nothing is sent to any"
        " other user at its address.",
        show_default="root, or you",
        derive=_default_daemon_users,
    ),
    _global(
        "--cacert",
        "ca_file",  # its key in a configuration file
        metavar="FILE",
        envvar=variables.CA_FILE,
        callback=_file,
        help="Certificates to trust for https, in PEM format: the daemon's own, or that of its authority.",
        show_default="the system's",
    ),
    _global(
        "--config",
        metavar="FILE",
        envvar=variables.CONFIG,
        callback=_configuration_file,
        help="The configuration file.",
        show_default="/etc/gpulease/config.toml, then ~/.config/gpulease/config.toml",
    ),
)
