"""`gpulease idle`, and what a holder is told of it with each renewal."""

from __future__ import annotations

import json

from gpulease import Client
from tests.cli.programs import Program, wait_until


def idle_s(client: Client, lease_id: str, token: int) -> float:
    return client.renew(lease_id, token).idle_s or 0.0


def test_idle_leases_are_listed_by_what_they_waste_and_their_holders_are_told(
    client: Client, gpulease: Program
) -> None:
    with client.lease(count=1, wait_s=60) as small, client.lease(count=2, wait_s=60, label="notebook") as large:
        wait_until(lambda: min(idle_s(client, one.id, one.fencing_token) for one in (small, large)) >= 2.0)
        renewed = client.renew(large.id, large.fencing_token)
        assert renewed.held_for_s is not None
        assert 2.0 <= (renewed.idle_s or 0.0) <= renewed.held_for_s
        found = json.loads(gpulease("idle", "--for", "1s", "--json").stdout)["items"]
        assert [one["id"] for one in found] == [large.id, small.id]
        shown = gpulease("idle", "--for", "1s").stdout.splitlines()
        assert shown[0].split() == ["LEASE", "HOLDER", "GPUS", "HELD", "IDLE", "WASTED"]
        assert "(notebook)" in shown[1]
        assert gpulease("idle", "--for", "1d").stdout.startswith("no lease has been idle for 1d")
        assert gpulease("idle", "--for", "1s", "--user", "someone-else").stdout.startswith("no lease")
