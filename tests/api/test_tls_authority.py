"""The daemon's own certificate authority: what it makes, what it makes again, and who trusts it."""

from __future__ import annotations

import os
import socket
import ssl
import stat
import threading
from datetime import timedelta
from pathlib import Path

import pytest
from cryptography import x509

from gpulease_server import tls_authority
from gpulease_server.listeners import CannotStart
from gpulease_server.runtime import clock
from gpulease_server.tls_authority import TlsAuthority, host_names


def names_of(directory: Path) -> set[str]:
    found = x509.load_pem_x509_certificate((directory / "server.pem").read_bytes())
    names = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return {str(name.value) for name in names}


def shakes_hands(directory: Path, name: str) -> str | None:
    """Why a client that trusts the authority alone, and is strict, refuses the server; None if it does not."""
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(directory / "server.pem")
    client = ssl.create_default_context(cafile=str(directory / "ca.pem"))
    client.verify_flags |= ssl.VERIFY_X509_STRICT
    near, far = socket.socketpair()

    def serve() -> None:
        try:
            server.wrap_socket(far, server_side=True).close()
        except OSError:
            far.close()

    serving = threading.Thread(target=serve)
    serving.start()
    try:
        client.wrap_socket(near, server_hostname=name).close()
    except ssl.SSLCertVerificationError as error:
        return error.verify_message
    finally:
        near.close()
        serving.join(60)
    return None


def test_a_certificate_is_made_once_for_all_names_of_the_host(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        authority = TlsAuthority(tmp_path / "tls", ("gpubox.example", "0.0.0.0", "::"))
        assert authority.renew()
    finally:
        os.umask(before)
    assert not authority.renew()
    assert {"localhost", "127.0.0.1", socket.gethostname(), "gpubox.example"} <= names_of(tmp_path / "tls")
    assert not {"0.0.0.0", "::"} & names_of(tmp_path / "tls")
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "tls").iterdir()}
    assert modes == {"ca.key": 0o600, "ca.pem": 0o644, "server.pem": 0o600}
    assert stat.S_IMODE((tmp_path / "tls").stat().st_mode) == 0o755
    for name in ("127.0.0.1", "localhost", "gpubox.example"):
        assert shakes_hands(tmp_path / "tls", name) is None
    assert "not valid for" in (shakes_hands(tmp_path / "tls", "elsewhere.example") or "")


def test_a_certificate_is_made_again_when_it_ends_soon_or_the_host_has_another_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = TlsAuthority(tmp_path / "tls")
    assert authority.renew()
    trusted, first = authority.certificate, (tmp_path / "tls" / "server.pem").read_bytes()
    monkeypatch.setattr(tls_authority, "host_names", lambda: (*host_names(), "198.51.100.7"))
    assert authority.renew()
    assert not authority.renew()
    assert "198.51.100.7" in names_of(tmp_path / "tls")
    at = clock.now()
    monkeypatch.setattr(clock, "now", lambda: type(at)(at.at + timedelta(days=360), at.mono_s))
    assert not authority.renew()
    monkeypatch.setattr(clock, "now", lambda: type(at)(at.at + timedelta(days=370), at.mono_s))
    assert authority.renew()
    assert authority.certificate == trusted, "clients trust it still"
    assert (tmp_path / "tls" / "server.pem").read_bytes() != first


def test_a_certificate_of_a_clock_that_was_ahead_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No client would believe it for more than a year, and it would not end soon."""
    authority, at = TlsAuthority(tmp_path / "tls"), clock.now()
    authority.renew()
    with monkeypatch.context() as ahead:
        ahead.setattr(clock, "now", lambda: type(at)(at.at + timedelta(days=500), at.mono_s))
        assert authority.renew()
    assert authority.renew()
    assert shakes_hands(tmp_path / "tls", "localhost") is None
    assert not authority.renew()


def test_files_that_are_broken_are_made_again_or_named(tmp_path: Path) -> None:
    authority = TlsAuthority(tmp_path / "tls")
    authority.renew()
    (tmp_path / "tls" / "server.pem").write_bytes(b"half a certi")
    assert authority.renew()
    assert shakes_hands(tmp_path / "tls", "localhost") is None
    (tmp_path / "tls" / "ca.key").unlink()
    with pytest.raises(CannotStart, match=r"No such file .*ca\.key") as refused:
        authority.renew()
    assert "backup" in refused.value.remedy
    # The key is written before the certificate, so a daemon that was killed in between had no authority yet.
    (tmp_path / "tls" / "ca.pem").unlink()
    assert authority.renew()
    assert shakes_hands(tmp_path / "tls", "localhost") is None
