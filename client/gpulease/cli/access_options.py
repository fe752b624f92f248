"""Options of `gpulease serve` that say who may reach the daemon, and what one user may have."""

from __future__ import annotations

import re
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from gpulease.cli.options import fraction

MANY = 1_000_000
"""More of anything than one daemon could serve."""


ORIGIN = re.compile(r"(?P<scheme>https?)://(?P<host>[a-z0-9._-]+|\[[0-9a-f:.]+\])(:(?P<port>[0-9]{1,5}))?")
USUAL_PORTS = {"http": 80, "https": 443}


class Commands(StrEnum):
    """Whose command lines a caller is shown."""

    OWN = "own"
    ALL = "all"


def origins(given: list[str] | None) -> list[str] | None:
    """Origins as browsers spell them: lower case, without a usual port. Raises BadParameter."""
    return None if given is None else [_origin(text) for text in given]


def _origin(text: str) -> str:
    if "*" in text or text.lower() == "null":
        raise typer.BadParameter(f"{text!r} would be anybody's page, in whosever browser; list each origin by itself")
    found = ORIGIN.fullmatch(text.lower())
    if found is None or not 0 < int(found["port"] or 1) < 65536:
        raise typer.BadParameter(
            f"{text!r} is no origin; write it like https://dashboard.example or http://gpubox:3000"
        )
    scheme, host, port = found["scheme"], found["host"], found["port"]
    usual = port is None or int(port) == USUAL_PORTS[scheme]
    return f"{scheme}://{host}" if usual else f"{scheme}://{host}:{int(port)}"


def octal(text: str) -> int:
    """A file mode as chmod takes it. Raises BadParameter."""
    if not re.fullmatch(r"0?[0-7]{3}", text):
        raise typer.BadParameter(f"{text!r} is no file mode; write it like 0666 or 0660")
    return int(text, 8)


Host = Annotated[
    str,
    typer.Option(
        # LISTEN_, because Kubernetes and Docker set NAME_PORT for a service of that name, to an address.
        envvar="GPULEASE_LISTEN_HOST",
        help="Address to listen on; other than loopback only with TLS or --behind-proxy.",
    ),
]
Socket = Annotated[
    Path | None,
    typer.Option(envvar="GPULEASE_SOCKET", help="Unix socket.", show_default="gpulease.sock in the data directory"),
]
SocketMode = Annotated[
    str, typer.Option(metavar="MODE", envvar="GPULEASE_SOCKET_MODE", help="Its file mode: who may connect to it.")
]
TlsCert = Annotated[
    Path | None, typer.Option(envvar="GPULEASE_TLS_CERT", help="Speak TLS on TCP, with this certificate (PEM).")
]
TlsKey = Annotated[Path | None, typer.Option(envvar="GPULEASE_TLS_KEY", help="The key of that certificate (PEM).")]
BehindProxy = Annotated[
    bool,
    typer.Option(
        "--behind-proxy/--no-behind-proxy",
        envvar="GPULEASE_BEHIND_PROXY",
        help="A proxy speaks TLS: callers over TCP are known by token alone.",
    ),
]
Admins = Annotated[
    list[str] | None,
    typer.Option(
        "--admin",
        metavar="USER",
        envvar="GPULEASE_ADMINS",
        help="An administrator, beside root and the daemon's own user; repeatable.",
    ),
]
CorsOrigins = Annotated[
    list[str] | None,
    typer.Option(
        "--cors-origin",
        metavar="ORIGIN",
        envvar="GPULEASE_CORS_ORIGINS",
        callback=origins,
        help="An origin, scheme://host[:port], whose web pages may ask with a token; repeatable.",
    ),
]
ShowCommands = Annotated[
    Commands,
    typer.Option(envvar="GPULEASE_SHOW_COMMANDS", help="Whose processes' command lines a user is shown."),
]
MaxLeasesPerUser = Annotated[
    int,
    typer.Option(
        min=0, max=MANY, envvar="GPULEASE_MAX_LEASES_PER_USER", help="Active leases of one user; 0: any number."
    ),
]
MaxGpusPerUser = Annotated[
    int,
    typer.Option(min=0, max=MANY, envvar="GPULEASE_MAX_GPUS_PER_USER", help="Leased GPUs of one user; 0: any number."),
]
MaxQueuePerUser = Annotated[
    int,
    typer.Option(
        min=0, max=MANY, envvar="GPULEASE_MAX_QUEUE_PER_USER", help="Waiting requests of one user; 0: any number."
    ),
]
MaxRpsPerUser = Annotated[
    float,
    typer.Option(
        min=0,
        max=MANY,
        callback=fraction,
        envvar="GPULEASE_MAX_RPS_PER_USER",
        help="Requests per second of one user; 0: any number.",
    ),
]
