"""What failed about TLS, in words: an untrusted certificate, one of another name, an expired one, or no TLS at all.

OpenSSL reports the code of the check that failed; the codes are those of openssl-verification-options(1).
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from gpulease.sansio.effects import NotConnected, NotTrusted, ResponseLost
from gpulease.sansio.failover import Destination
from gpulease.sansio.server_check import check_server
from gpulease_protocol.host import variables
from gpulease_protocol.host.addresses import Address
from gpulease_protocol.host.certificates import CA_KEY

if TYPE_CHECKING:
    import ssl

NOT_YET_VALID, EXPIRED, OTHER_NAME, OTHER_IP = 9, 10, 62, 64
"""X509_V_ERR_* of OpenSSL; any other one is an untrusted certificate here."""
TRUST_REMEDY = (
    f"Name the file with its certificate, or that of its authority: gpulease --cacert FILE, {variables.CA_FILE}=FILE,"
    f" or {CA_KEY} under [client] in the configuration file."
)
NO_CERTIFICATE = "TLSV13_ALERT_CERTIFICATE_REQUIRED"
"""What a server says that wants one of the client: in TLS 1.3 after the greeting, when a call may have been sent."""
PROBE_TIMEOUT_S = 1.0
"""How long to try whether a server speaks TLS."""


def tls_failure(error: BaseException, failed: NotConnected | ResponseLost, address: Address) -> NotTrusted | None:
    """The failure to raise for a connection that TLS made fail; None for any other error, and once a call was sent that
    the server may have taken."""
    if not address.origin.startswith("https:"):
        return None
    import ssl  # noqa: PLC0415 - loaded already where https is used

    # In an event loop, a read that has to wait begins with an SSLWantReadError.
    causes = (cause for cause in _causes(error) if not isinstance(cause, ssl.SSLWantReadError))
    failure = next((cause for cause in causes if isinstance(cause, ssl.SSLError)), None)
    if failure is None or (isinstance(failed, ResponseLost) and failure.reason != NO_CERTIFICATE):
        return None
    if not isinstance(failure, ssl.SSLCertVerificationError):
        return _no_tls(failure, address)
    where, host, why = address.shown, urlsplit(address.origin).hostname, failure.verify_message.rstrip(".")
    if failure.verify_code in (OTHER_NAME, OTHER_IP):
        sentence = f"The certificate of {where} is not for {host}."
        remedy = "Use the name that is in the certificate, or give the daemon a certificate for this one."
    elif failure.verify_code in (EXPIRED, NOT_YET_VALID):
        state = "has expired" if failure.verify_code == EXPIRED else "is not valid yet"
        sentence = f"The certificate of {where} {state}."
        remedy = "Ask the daemon's administrator for a new one, and check the clocks of both hosts."
    else:
        sentence, remedy = f"The certificate of {where} is not trusted here: {why}.", TRUST_REMEDY
    return NotTrusted(f"its certificate is not accepted: {why}", remedy, sentence)


def may_speak_tls(failure: NotConnected | ResponseLost, address: Address) -> bool:
    """True if plain HTTP failed as it does at a server that speaks TLS: the connection ends instead of a response."""
    plain = address.socket is None and address.origin.startswith("http:")
    return plain and isinstance(failure, ResponseLost) and not failure.timed_out


def speaks_tls(address: Address, destination: Destination) -> bool:
    """True if the server at an address of plain HTTP speaks TLS: it answers a greeting, within 1 s at most.

    A stranger is sent none, as everywhere.
    """
    import ssl  # noqa: PLC0415 - 10 ms, for an error only

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    parts = urlsplit(address.origin)
    try:
        with socket.create_connection((parts.hostname or "", parts.port or 80), PROBE_TIMEOUT_S) as connection:
            check_server(connection, destination)
            context.wrap_socket(connection, server_hostname=parts.hostname).close()
    except (OSError, ValueError, NotConnected):
        return False
    return True


def use_https(address: Address) -> NotTrusted:
    """The failure of plain HTTP at a server that speaks TLS."""
    other = address.shown.replace("http:", "https:", 1)
    return NotTrusted("it speaks TLS", f"Use {other}.", f"The server at {address.shown} speaks TLS: use https://.")


def _no_tls(failure: ssl.SSLError, address: Address) -> NotTrusted:
    other = address.shown.replace("https:", "http:", 1)
    if failure.reason in ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "RECORD_LAYER_FAILURE", "PACKET_LENGTH_TOO_LONG"):
        return NotTrusted(
            "it does not speak TLS", f"Use {other}.", f"The server at {address.shown} does not speak TLS."
        )
    why = (failure.reason or str(failure)).lower().replace("_", " ")
    return NotTrusted(f"TLS failed: {why}", "Look at the daemon's log.", f"TLS with {address.shown} failed: {why}.")


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
