"""The host that most attacks share, and the words in which they talk to it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.attack.attacked import Attacked
from tests.attack.host import Host, python
from tests.attack.kernel_keys import KEYS

SECRET_KEY = "gpulease-attack-key-of-root"
CANARY_OF_ROOT = "canary-in-the-environment-of-the-daemon"
LOGIN = f"""
{KEYS}
assert join() >= 0
assert add(b"{SECRET_KEY}", b"SECRET-OF-ROOT") >= 0
os.execvp(sys.argv[1], sys.argv[1:])
"""
"""Root logs in (a session keyring with a key in it, as pam_keyinit makes one), and then starts a program."""
JOB_PIDS = 100
"""How many processes a job may have at once on the host that attacks share."""


@pytest.fixture(scope="package")
def shared() -> Iterator[Attacked]:
    """A host with a daemon that root has started in a login session, with private command lines."""
    with Host() as host:
        daemon = host.daemon(
            *("--show-commands", "own", "--kill-leftovers", "--retained-memory-s", "2"),
            before=python(LOGIN),
            GPULEASE_JOB_PIDS=str(JOB_PIDS),
            SECRET_OF_ROOT=CANARY_OF_ROOT,
        )
        try:
            daemon.start()
            yield Attacked(host, daemon)
        finally:
            daemon.stop()


@pytest.fixture
def attacked(shared: Attacked) -> Iterator[Attacked]:
    """That host, with all GPUs free before and after."""
    shared.host.show_on_gpus({})
    shared.daemon.wait_free()
    yield shared
    shared.host.show_on_gpus({})
    shared.daemon.give_everything_back()
