"""The daemon's own certificate authority: TLS without a certificate from elsewhere (`--tls-auto`).

In the data directory's `tls/`, made once under the lock of that directory:

| file | mode | what it is |
|---|---|---|
| `ca.key` | 0600 | the authority's key; anyone who has it can pass for the daemon |
| `ca.pem` | 0644 | its certificate, for clients (`GPULEASE_CACERT`); valid for ten years |
| `server.pem` | 0600 | the daemon's certificate and key, in one file, so that it is replaced as a whole |

The server's certificate is for every name and address of the host. It is made again when it has less than 30 days left,
when the host has got another name or address, when the authority is another one, or when it is of the future: the
wall clock was wrong then. Each file is written beside its
place and renamed, the key first: after a crash there is the old one or the new one.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import os
import socket
import threading
from collections.abc import Iterable
from datetime import datetime, timedelta
from pathlib import Path

import psutil
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from gpulease_server.listeners import CannotStart
from gpulease_server.runtime import clock

AUTHORITY_LIFETIME, LIFETIME = timedelta(days=3650), timedelta(days=397)
"""For how long the authority's certificate and the server's are valid."""
RENEW_BEFORE = timedelta(days=30)
BACKDATED = timedelta(days=1)
"""Certificates count from so long ago on: the clocks of other hosts may be behind."""
RESOLVE_S = 2.0
"""How long the host's full name may take to be found."""

Names = tuple[x509.GeneralName, ...]
log = logging.getLogger("gpulease.serve")


class TlsAuthority:
    """The authority and the certificate of one daemon. The lock of the data directory must be held.

    Args:
        directory: Where its files are.
        names: Further names and addresses that clients may call the daemon by.
    """

    def __init__(self, directory: Path, names: Iterable[str] = ()) -> None:
        self._directory = directory
        self._more_names = tuple(names)

    @property
    def certificate(self) -> str:
        """The authority's certificate, PEM. Raises OSError."""
        return (self._directory / "ca.pem").read_text()

    def renew(self) -> bool:
        """Make what is missing or due. True if the server's certificate is a new one. Blocks for at most RESOLVE_S.

        Raises `CannotStart` for files that cannot be used.
        """
        try:
            if not self._directory.is_dir():
                self._directory.mkdir()
                self._directory.chmod(0o755)  # clients read `ca.pem`, whatever the umask is
            key, authority = self._authority()
            names = _general_names((*host_names(), *self._more_names))
            if self._is_current(authority, names):
                return False
            self._issue(key, authority, names)
        except (OSError, ValueError) as error:
            detail = f"The certificates in {self._directory} cannot be used: {error}."
            remedy = "Put them back from a backup. Else a new authority is made, which no host trusts yet."
            raise CannotStart(detail, remedy=remedy) from None
        return True

    def _authority(self) -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate]:
        key_file, file = self._directory / "ca.key", self._directory / "ca.pem"
        if file.exists():
            found = serialization.load_pem_private_key(key_file.read_bytes(), None)
            if not isinstance(found, ec.EllipticCurvePrivateKey):
                raise ValueError("ca.key is not a key of the curve P-256")
            return found, x509.load_pem_x509_certificate(file.read_bytes())
        key, now = ec.generate_private_key(ec.SECP256R1()), clock.now().at
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"gpulease of {socket.gethostname()}"[:64])])
        certificate = (
            _builder(name, name, key.public_key(), now, now + AUTHORITY_LIFETIME)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_key_usage(signs_certificates=True), critical=True)
            .sign(key, hashes.SHA256())
        )
        _write(key_file, _pem_key(key), 0o600)
        _write(file, certificate.public_bytes(serialization.Encoding.PEM), 0o644)
        log.info("this daemon has its own certificate authority now: %s", file)
        return key, certificate

    def _is_current(self, authority: x509.Certificate, names: Names) -> bool:
        """True if the server's certificate is for all these names, of this authority, and valid for a while."""
        try:
            found = x509.load_pem_x509_certificate((self._directory / "server.pem").read_bytes())
            found.verify_directly_issued_by(authority)
            known = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        except FileNotFoundError:
            return False
        except Exception as error:  # whatever is wrong with it, it is made again
            log.warning("server.pem is made again: %s", error)
            return False
        now = clock.now().at
        is_valid = found.not_valid_before_utc <= now < found.not_valid_after_utc - RENEW_BEFORE
        return is_valid and set(names) <= set(known)

    def _issue(self, key: ec.EllipticCurvePrivateKey, authority: x509.Certificate, names: Names) -> None:
        own, now = ec.generate_private_key(ec.SECP256R1()), clock.now().at
        until = min(now + LIFETIME, authority.not_valid_after_utc)
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "gpulease daemon")])
        certificate = (
            _builder(subject, authority.subject, own.public_key(), now, until)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_key_usage(signs_certificates=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(key.public_key()), critical=False)
            .sign(key, hashes.SHA256())
        )
        content = certificate.public_bytes(serialization.Encoding.PEM) + _pem_key(own)
        _write(self._directory / "server.pem", content, 0o600)
        log.info("the certificate is for %s, until %s", ", ".join(str(name.value) for name in names), until.date())


def host_names() -> tuple[str, ...]:
    """The names and addresses of this host that a client may call it by."""
    names = {"localhost", socket.gethostname()}
    full: list[str] = []
    # A name server may not answer.
    asking = threading.Thread(target=lambda: full.append(socket.getfqdn()), daemon=True)
    asking.start()
    asking.join(RESOLVE_S)
    names.update(full)
    for addresses in psutil.net_if_addrs().values():
        for one in addresses:
            with contextlib.suppress(ValueError):  # a hardware address
                address = ipaddress.ip_address(one.address.partition("%")[0])
                if not address.is_link_local:
                    names.add(str(address))
    return tuple(sorted(names))


def _general_names(names: Iterable[str]) -> Names:
    found: dict[x509.GeneralName, None] = {}
    for name in names:
        with contextlib.suppress(ValueError):  # a name of other characters, which no URL can have either
            try:
                address = ipaddress.ip_address(name)
            except ValueError:
                found[x509.DNSName(name)] = None
            else:
                if not address.is_unspecified:  # as in `--host 0.0.0.0`
                    found[x509.IPAddress(address)] = None
    return tuple(found)


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, now: datetime, until: datetime
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - BACKDATED)
        .not_valid_after(until)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def _key_usage(signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def _pem_key(key: ec.EllipticCurvePrivateKey) -> bytes:
    form, plain = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    return key.private_bytes(serialization.Encoding.PEM, form, plain)


def _write(path: Path, content: bytes, mode: int) -> None:
    """Replace a file as a whole; its content is on disk before it has its name."""
    beside = path.with_name(f".{path.name}.new")
    beside.unlink(missing_ok=True)
    descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
    try:
        os.fchmod(descriptor, mode)  # whatever the umask is
        os.write(descriptor, content)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    beside.rename(path)
