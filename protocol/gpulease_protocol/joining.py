"""How a host joins: a join token, with the fingerprint of the authority that the daemon must show.

The token is three words with dots between: id and secret of a bearer token of role `join`, and the fingerprint. The new
host fetches the authority's certificate over a connection that nothing vouches for, and takes it only if its
fingerprint is this one. Only then, over a connection that this authority vouches for, does it send the secret.

The fingerprint is that of the whole certificate, not of its key alone: the standard library can compute it, and a
token lives for hours, while the certificate lives for years.
"""

from __future__ import annotations

import hashlib
import re
import ssl

from gpulease_protocol.errors import InvalidRequest
from gpulease_protocol.lazy_dataclass import dataclass
from gpulease_protocol.model import Noun

FORM = re.compile(r"(?P<bearer>[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+)(\.(?P<fingerprint>[0-9a-f]{64}))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Authority(Noun):
    """The certificate authority of the daemon, and where other hosts reach it."""

    certificate: str | None = None
    """The authority's certificate, PEM; null where the daemon has no authority of its own."""
    fingerprint: str | None = None
    """SHA-256 of that certificate in DER, as hex; null without one."""
    urls: tuple[str, ...] = ()
    """Where other hosts reach the daemon over TLS; empty where it listens on loopback alone, or does not know."""


def fingerprint(certificate: str) -> str:
    """SHA-256 of a certificate in DER, as hex. Raises ValueError unless it is one certificate in PEM."""
    if certificate.count("-----BEGIN") != 1:
        raise ValueError("not one certificate")
    return hashlib.sha256(ssl.PEM_cert_to_DER_cert(certificate)).hexdigest()


def join_token(bearer: str, authority: str | None) -> str:
    """What the new host is given. `authority`: fingerprint; None where the system of the new host trusts the daemon."""
    return bearer if authority is None else f"{bearer}.{authority}"


def parse_join_token(token: str) -> tuple[str, str | None]:
    """The bearer token and the fingerprint in a join token. Raises InvalidRequest; the error does not repeat it."""
    found = FORM.fullmatch(token.strip())
    if found is None:
        detail = "This is no join token: it should be token-ID.SECRET.FINGERPRINT."
        raise InvalidRequest(detail, remedy="Copy the whole command that `gpulease node add` printed.")
    return found["bearer"], found["fingerprint"]
