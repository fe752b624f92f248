"""A bearer token in a file: it shows in neither a command line nor an environment.

A file that other users may read or change is refused: anyone who has read it has the token.
"""

from __future__ import annotations

import os
import stat

from gpulease_protocol.errors import InvalidRequest
from gpulease_protocol.host import variables

MAX_BYTES = 4096
"""Size limit of such a file."""


def from_environment() -> str | None:
    """The token in GPULEASE_TOKEN, else in the file that GPULEASE_TOKEN_FILE names; None without both. Raises
    InvalidRequest."""
    if os.environ.get(variables.TOKEN):
        return checked(os.environ[variables.TOKEN], variables.TOKEN)
    path = os.environ.get(variables.TOKEN_FILE)
    return read(path, variables.TOKEN_FILE) if path else None


def checked(token: str, source: str) -> str:
    """The token without the white space around it. Raises InvalidRequest, which does not show it, for what is none."""
    if not isinstance(token, str) or not token.isascii() or len(token.split()) != 1 or not token.strip().isprintable():
        raise InvalidRequest(
            f"{source}: this is no token.", remedy="Set it to what `gpulease token create` prints, and no more."
        )
    return token.strip()


def read(path: str, source: str) -> str:
    """The token in a file. `source`: who named it, for the error.

    Raises InvalidRequest for a file that cannot be read, holds no token, or that other users may read or change.
    """
    try:
        # Not blocking: it may be a FIFO.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        remedy = "Check the path and the file's permissions."
        raise InvalidRequest(f"{source}: {path} cannot be read: {reason}.", remedy=remedy) from None
    try:
        seen = os.fstat(descriptor)
        if not stat.S_ISREG(seen.st_mode):
            raise InvalidRequest(f"{source}: {path} is no file.", remedy="Name the file that holds the token.")
        if seen.st_mode & (stat.S_IRWXO | stat.S_IWGRP) or seen.st_uid not in (0, os.geteuid()):
            raise InvalidRequest(
                f"{source}: other users may read or change {path}, so its token is no secret.",
                remedy=f"chmod 600 {path}, as its owner, and replace the token if someone may have read it.",
            )
        content = os.read(descriptor, MAX_BYTES + 1)
    finally:
        os.close(descriptor)
    try:
        token = content.decode().strip() if len(content) <= MAX_BYTES else ""
    except UnicodeDecodeError:
        token = ""
    if not token.isascii() or len(token.split()) != 1:
        raise InvalidRequest(
            f"{source}: {path} holds no token.", remedy="Put into it what `gpulease token create` prints, and no more."
        )
    return token
