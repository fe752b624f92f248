"""Which certificates a client of the daemon trusts: its setting, declared once.

By default those of the system, or of SSL_CERT_FILE. A file that is named here counts instead of them.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from gpulease_protocol.errors import InvalidRequest
from gpulease_protocol.host import config_file, variables
from gpulease_protocol.host.addresses import Address

CA_KEY = "ca_file"
"""Its key under `[client]` in a configuration file."""


def ca_file(addresses: Iterable[Address], environ: Mapping[str, str] = os.environ) -> str | None:
    """The file with the certificates to trust at these addresses; None for those of the system, and without https.

    A configuration file counts only if it is root's or one's own. Raises InvalidRequest for a file that cannot be read.
    """
    if not any(address.origin.startswith("https:") for address in addresses):
        return None
    path, source = environ.get(variables.CA_FILE), variables.CA_FILE
    if not path:
        named = config_file.trusted_client_value(CA_KEY, environ)
        if named is None:
            return None
        entry = config_file.load(environ)["client"][CA_KEY]
        path, source = str(entry.file.parent / Path(named).expanduser()), entry.place
    try:
        with open(path, "rb"):
            return path
    except OSError as error:
        raise InvalidRequest(
            f"{source}: {path} cannot be read: {error.strerror}.", remedy="Check the path and the file's permissions."
        ) from None
