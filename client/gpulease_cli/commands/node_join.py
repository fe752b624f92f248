"""`gpulease node join`: this host becomes a node of a daemon elsewhere."""

from __future__ import annotations

import http.client
import json
import os
import shlex
import ssl
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

import click

from gpulease.client import Client
from gpulease.sansio.failover import Destination
from gpulease_cli import output
from gpulease_cli.help_format import command
from gpulease_cli.parameters import argument, option
from gpulease_protocol import endpoints
from gpulease_protocol.errors import DaemonUnavailable, GpuleaseError, InvalidRequest, NotAllowed, NotAuthenticated
from gpulease_protocol.host import addresses, certificates, variables
from gpulease_protocol.host.addresses import Address
from gpulease_protocol.host.settings import host_node_name
from gpulease_protocol.joining import fingerprint, parse_join_token

FETCH_S = 10.0
"""How long the daemon may take to answer."""
MAX_BYTES = 2**16
"""Size limit of what it may say before it is trusted."""
ENVIRONMENT, TOKEN, CA, NEW_CA = "environment", "token", "ca.pem", ".new-ca.pem"
"""Files in the worker's directory."""


@command(examples=("gpulease node join https://gpubox:8750 --node gpubox2 -",))
@argument("address", metavar="URL", help="The daemon; several addresses of one service are separated by commas.")
@argument("join_token", metavar="TOKEN", help="The join token of `gpulease node add`; - reads it from standard input.")
@option("--node", metavar="NAME", show_default="the host name", help="The node that the token is for.")
@option(
    "--data-dir",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    show_default="as of `gpulease worker`",
    help="Directory of the worker, in which its token and the daemon's certificate are kept.",
)
def join(address: str, join_token: str, node: str | None, data_dir: Path | None) -> int:
    """Make this host a node of a daemon elsewhere. `gpulease node add` prints the command.

    Writes the certificate of the daemon's authority, a token for the worker, and the worker's variables into the
    directory of the worker, and says how to start that.
    """
    bearer, expected = parse_join_token(sys.stdin.read(4096) if join_token == "-" else join_token)  # noqa: S105
    found, name = addresses.for_joining(address, "URL"), node or host_node_name()
    directory = (data_dir or addresses.default_data_dir() / "worker").absolute()
    try:
        _make_directory(directory)
        ca_file = _trusted(found, expected, directory)
        with Client.for_destination(
            Destination(found, True, bearer, FETCH_S, obeys=True, plain_http=False, ca_file=ca_file), retry_s=0.0
        ) as client:
            made = client.send(endpoints.join_node(name))
        if expected is not None:  # not before: a join that fails leaves a host as it was
            ca_file = str(directory / CA)
            os.replace(directory / NEW_CA, ca_file)
        _write(directory / TOKEN, f"{made.bearer}\n", 0o600)
        own = {
            variables.URL: ",".join(one.url for one in found),
            variables.TOKEN_FILE: str(directory / TOKEN),
            "GPULEASE_NODE": name,
            "GPULEASE_WORKER_DIR": str(directory),
        } | ({} if ca_file is None else {variables.CA_FILE: ca_file})
        lines = [f"{variable}={shlex.quote(value)}\n" for variable, value in own.items()]
        _write(directory / ENVIRONMENT, "".join(lines), 0o600)
    except OSError as error:
        detail = f"{error.filename or directory} cannot be written: {error.strerror}."
        raise InvalidRequest(detail, remedy="Run it as root, or name another --data-dir.") from None
    except NotAuthenticated as error:
        detail = "The daemon does not take this join token: it was used already, has expired, or was revoked."
        raise NotAuthenticated(detail, remedy=f"Have an administrator run `gpulease node add {name}` again.") from error
    except NotAllowed as error:
        raise _as_command(error, name) from error
    finally:
        with suppress(OSError):
            (directory / NEW_CA).unlink(missing_ok=True)
    click.echo(f"This host is node {name} of {found[0].shown} once its worker runs. Start it in one of these ways:")
    click.echo("  systemctl enable --now gpulease-worker    (docs/many-hosts.md says how to install the unit)")
    click.echo(f"  (set -a; . {shlex.quote(str(directory / ENVIRONMENT))}; exec gpulease worker)")
    click.echo("A worker that runs already is to be started again: it knows its former token.")
    return output.DONE


def _as_command(error: NotAllowed, name: str) -> GpuleaseError:
    """The refusal of a token for another node, or of one that is no join token."""
    if "for node" in error.detail:
        return error
    detail = "This is no join token: it may be used for something else."
    return NotAllowed(detail, remedy=f"Have an administrator run `gpulease node add {name}`, and take what it prints.")


def _make_directory(directory: Path) -> None:
    """Make the worker's directory, and see that it can be written: before the token is used up. Raises OSError."""
    addresses.prepare_data_directory(directory)
    with tempfile.TemporaryFile(dir=directory):
        pass


def _trusted(found: tuple[Address, ...], expected: str | None, directory: Path) -> str | None:
    """The file of certificates to trust. Fetches that of the daemon's authority where the token has its fingerprint.

    Only this one certificate is kept: others in the answer are vouched for by no one. Raises GpuleaseError, OSError.
    """
    if expected is None:
        named = certificates.ca_file(found)
        return named and os.path.abspath(named)
    secure = next((one for one in found if one.origin.startswith("https:")), None)
    if secure is None:
        detail = f"URL: {found[0].shown} is not https, and the join token names a certificate."
        raise InvalidRequest(detail, remedy="Give the daemon's https address; through a tunnel https://127.0.0.1:PORT.")
    certificate = _fetch(secure)
    try:
        shown = fingerprint(certificate)
        alone = ssl.DER_cert_to_PEM_cert(ssl.PEM_cert_to_DER_cert(certificate))
    except ValueError:
        shown, alone = "", ""
    if shown != expected:
        raise DaemonUnavailable(
            f"What answers at {found[0].shown} is not the daemon that made this token: it shows another authority. The"
            " token was not sent.",
            remedy="Check the address. If it is right, someone is between this host and the daemon.",
        )
    path = directory / NEW_CA
    _write(path, alone, 0o644)
    return str(path)


def _fetch(address: Address) -> str:
    """The certificate that what answers there shows for its authority. Raises DaemonUnavailable."""
    parts, context = urlsplit(address.origin), ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # the fingerprint decides
    connection = http.client.HTTPSConnection(str(parts.hostname), parts.port or 443, timeout=FETCH_S, context=context)
    try:
        connection.request("GET", f"{parts.path}/v1/ca")
        answer = connection.getresponse()
        document = json.loads(answer.read(MAX_BYTES))
        return str(document["certificate"])
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        detail = f"No daemon answers at {address.shown}: {reason}."
        remedy = f"Check the address, and that a firewall lets port {parts.port or 443} through."
        raise DaemonUnavailable(detail, remedy=remedy) from None
    except (ValueError, KeyError, TypeError):
        detail = f"What answers at {address.shown} shows no authority of a daemon."
        raise DaemonUnavailable(detail, remedy="Check the address, and that the daemon runs with --tls-auto.") from None
    finally:
        connection.close()


def _write(path: Path, text: str, mode: int) -> None:
    """Replace a file as a whole. Raises OSError."""
    descriptor, beside = tempfile.mkstemp(prefix=".new-", dir=path.parent)
    try:
        with open(descriptor, "w") as file:
            os.fchmod(file.fileno(), mode)
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except BaseException:
        Path(beside).unlink(missing_ok=True)
        raise
