"""All walks, on one host."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from tests.attack.host import Host
from tests.walks import administrator, researcher
from tests.walks.walk import Walk

PROGRAMS = {"gpulease": "-m gpulease_cli", "python": ""}


def walk_the_first_hour(write: Callable[[str], object]) -> list[str]:
    """Walk on a new host, write the transcript as it grows, and return what was not as it should be."""
    with Host() as host:
        make_programs(host.directory / "bin")
        walk = Walk(host, write)
        walk.part(researcher.before_the_daemon)
        walk.part(administrator.configuration)
        lonely = host.daemon("--no-worker")
        lonely.start()
        walk.part(administrator.without_a_worker)
        lonely.stop()
        daemon = host.daemon("--retained-memory-s", "2")
        daemon.start()
        try:
            for part in (
                researcher.errors_and_waits,
                researcher.what_people_submit,
                researcher.names_and_habits,
                researcher.shells_and_notebooks,
                administrator.care,
            ):
                walk.part(part)
                daemon.give_everything_back()
        finally:
            daemon.stop()
        certificate, key = make_certificate(host.directory)
        secured = host.daemon("--tls-cert", str(certificate), "--tls-key", str(key))
        secured.start()
        try:
            walk.part(partial(administrator.certificates, url="https://127.0.0.1:8750"))
        finally:
            secured.stop()
        return walk.failures


def make_certificate(directory: Path) -> tuple[Path, Path]:
    """A certificate that no authority has signed, and its key."""
    certificate, key = directory / "cert.pem", directory / "key.pem"
    words = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=127.0.0.1"]
    subprocess.run([*words, "-keyout", key, "-out", certificate], check=True, capture_output=True)
    return certificate, key


def make_programs(directory: Path) -> None:
    """`gpulease` and `python` as a virtual environment has them on PATH."""
    directory.mkdir(mode=0o755)
    for name, words in PROGRAMS.items():
        (directory / name).write_text(f'#!/bin/sh\nexec {sys.executable} {words} "$@"\n')
        (directory / name).chmod(0o755)
