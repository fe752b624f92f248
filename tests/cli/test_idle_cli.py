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
        kept = gpulease("keep", large.id[:14], "--reason", "slow copy", "--for", "1h")
        assert (kept.returncode, kept.stdout) == (
            0,
            f"{large.id} may be idle for 1h 00m from now: no notice goes out. It ends as before.\n",
        )
        shown = gpulease("idle", "--for", "1s").stdout.splitlines()
        assert shown[0].split()[-1] == "KEPT"
        assert shown[1].endswith(": slow copy")
        said = dict(line.split(maxsplit=1) for line in gpulease("show", large.id).stdout.splitlines())
        assert said["kept"].startswith("for ")
        assert gpulease("keep", large.id, "--reason", "x", "--for", "30d").returncode == 2
        assert gpulease("keep", "--for", "1h", "--reason", "x").returncode == 2, "this shell has no lease"
        assert gpulease("idle", "--for", "1d").stdout.startswith("no lease has been idle for 1d")
        assert gpulease("idle", "--for", "1s", "--user", "someone-else").stdout.startswith("no lease")


def test_a_lease_agrees_that_idle_gpus_are_taken_back(client: Client, gpulease: Program) -> None:
    asked = ("acquire", "-n", "1", "--detach", "--wait", "1m")
    lease = json.loads(gpulease(*asked, "--reclaim-idle-after", "30m", "--json").stdout)
    assert (lease["demand"]["reclaim_idle_after_s"], lease["reclaim_at"]) == (1800.0, None)
    assert " without work, if others wait" in gpulease("show", lease["id"]).stdout
    client.release(lease["id"], lease["token"])
    refused = gpulease(*asked, "--reclaim-idle-after", "10s")
    assert refused.returncode == 2
    assert "--reclaim-idle-after" in refused.stderr
    said = gpulease("submit", "--dry-run", "--reclaim-idle-after", "1h", "--", "true")
    assert said.returncode == 0, said.stderr
