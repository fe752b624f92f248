"""Under which address a node is reached: by the route to its daemon, or as an administrator says."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gpulease_protocol.host.addresses import Address, parse, unix
from gpulease_worker.node_address import NodeAddress
from gpulease_worker.settings import valid_address

SOCKET = unix(Path("/run/gpulease.sock"))


def found(daemon: Address, daemon_address: str | None = None, configured: str | None = None) -> tuple[str | None, ...]:
    """The address and the interface after one look."""

    async def look() -> tuple[str | None, ...]:
        here = NodeAddress(configured)
        here.refresh(daemon, daemon_address)
        assert here._looking is not None
        await here._looking
        return here.address, here.interface

    return asyncio.run(look())


@pytest.mark.parametrize(
    "daemon", [SOCKET, parse("http://127.0.0.1:8750"), parse("http://localhost:8750")], ids=lambda one: one.url
)
def test_a_daemon_on_loopback_is_reached_from_loopback(daemon: Address) -> None:
    address, interface = found(daemon)
    assert address in ("127.0.0.1", "::1")
    assert interface == "lo"


def test_a_tunnel_on_loopback_to_a_daemon_elsewhere_is_not_taken_for_its_host() -> None:
    assert found(parse("http://127.0.0.1:8750"), daemon_address="192.0.2.77") == ("127.0.0.1", "lo")


def test_what_an_administrator_says_counts_and_needs_no_interface() -> None:
    assert found(SOCKET, configured="192.0.2.7") == ("192.0.2.7", None)


def test_a_name_that_does_not_resolve_leaves_what_was_known() -> None:
    async def look() -> tuple[str | None, ...]:
        here = NodeAddress(None)
        for daemon in (SOCKET, parse("https://no-such-host.invalid:8750")):
            here.refresh(daemon, None)
            assert here._looking is not None
            await here._looking
        return here.address, here.interface

    assert asyncio.run(look()) == ("127.0.0.1", "lo")


IN_NAMESPACE = """
from gpulease_protocol.host.addresses import parse
from tests.worker.test_node_address import SOCKET, found
print(*found(parse("https://10.9.8.1:8750")))
print(*found(parse("https://[fd00::1]:8750")))
print(*found(SOCKET, daemon_address="10.9.8.9"))
print(*found(parse("http://127.0.0.1:8750"), daemon_address="10.9.8.9"))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="a network namespace takes root")
def test_the_address_is_that_of_the_route_and_on_the_daemons_host_the_one_it_listens_on() -> None:
    made = (
        "ip link set lo up && ip link add wires type bridge && ip link set wires up && "
        "ip addr add 10.9.8.7/24 dev wires && ip addr add 10.9.8.9/24 dev wires && "
        'ip addr add fd00::7/64 dev wires nodad && exec "$0" -c "$1"'
    )
    command = ["unshare", "--net", "sh", "-c", made, sys.executable, IN_NAMESPACE]
    printed = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout
    assert printed.splitlines() == ["10.9.8.7 wires", "fd00::7 wires", "10.9.8.9 wires", "10.9.8.9 wires"]


@pytest.mark.parametrize(("text", "usual"), [("10.0.0.7", "10.0.0.7"), (" FD00::0007 ", "fd00::7")])
def test_an_address_is_kept_in_its_usual_form(text: str, usual: str) -> None:
    assert valid_address(text) == usual


@pytest.mark.parametrize("text", ["gpubox", "10.0.0.0/8", "0.0.0.0", "::", "224.0.0.1", "10.0.0.7; rm", ""])
def test_what_no_one_can_connect_to_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="address"):
        valid_address(text)


def test_after_a_report_that_failed_the_address_is_looked_up_again_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    daemon, moves = parse("https://198.51.100.1:8750"), iter(["192.0.2.7", "192.0.2.8"])
    monkeypatch.setattr("gpulease_worker.node_address._address_towards", lambda _: next(moves))

    async def look() -> list[str | None]:
        here, seen = NodeAddress(None), []
        for has_failed in (False, False, True):
            if has_failed:
                here.look_soon()
            here.refresh(daemon, None)
            assert here._looking is not None
            await here._looking
            seen.append(here.address)
        return seen

    assert asyncio.run(look()) == ["192.0.2.7", "192.0.2.7", "192.0.2.8"]
