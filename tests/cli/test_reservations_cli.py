"""`gpulease reservations` against a daemon."""

from __future__ import annotations

import getpass
import json
from datetime import datetime

from gpulease import Client
from gpulease_protocol import endpoints
from gpulease_protocol.model import LeaseState
from gpulease_protocol.requests import LeaseRequest
from tests.cli.programs import Program


def test_what_is_reserved_goes_to_no_one_else_and_is_told(client: Client, gpulease: Program) -> None:
    gpus = client.gpus()
    node, total = gpus[0].node, len(gpus)
    add = ("reservations", "add", "--node", node, "-n", str(total), "--from", "0s", "--to", "2h")
    made = gpulease(*add, "--user", "zoe-lab", "--reason", "course", "--json")
    assert made.returncode == 0, made.stderr
    noun = json.loads(made.stdout)
    assert (len(noun["gpus"]), noun["user"], noun["made_by"]) == (total, "zoe-lab", getpass.getuser())
    assert "Reserved: GPUs " in gpulease("status").stdout
    listed = gpulease("reservations", "list")
    assert "zoe-lab" in listed.stdout
    assert "course" in listed.stdout
    waits = client.request_lease(LeaseRequest(count=1))
    assert waits.state is LeaseState.QUEUED
    explained = client.explain(waits.id)
    assert {one.code for one in explained.obstacles} == {"reserved"}
    assert f"reserved for user zoe-lab from {noun['from_at'][:10]}" in explained.sentence
    again = gpulease(*add, "--group", "@none")
    assert again.returncode == 1
    assert "There is no group none." in again.stderr
    cancelled = gpulease("reservations", "cancel", noun["id"])
    assert (cancelled.returncode, cancelled.stdout) == (0, f"cancelled {noun['id']}\n")
    granted = client.send(endpoints.lease(waits.id, 60.0, LeaseState.QUEUED))
    assert granted.state is LeaseState.ACTIVE
    client.release(granted.id, granted.fencing_token)
    assert not client.reservations()
    gone = gpulease("reservations", "cancel", noun["id"])
    assert gone.returncode == 1
    assert "gpulease reservations list" in gone.stderr
    events = [one for one in client.events() if (one.reason or "").startswith(noun["id"])]
    assert [one.kind for one in events] == ["reservation.created", "reservation.cancelled"]
    begin = datetime.fromisoformat(noun["from_at"])
    assert f", {begin:%Y-%m-%d %H:%M:%S} UTC to " in (events[0].reason or ""), "as the events of other things say it"


def test_without_a_node_the_options_that_name_gpus_are_named(gpulease: Program) -> None:
    window = ("--from", "1h", "--to", "2h", "--user", "zoe-lab")
    for which in ((), ("--gpus", "2"), ("--node", "a"), ("--gpu", "GPU-1", "--gpus", "2")):
        refused = gpulease("reservations", "add", *which, *window)
        assert refused.returncode == 2
        assert "Give --node NAME and --gpus N, or --gpu GPU" in refused.stderr


def test_gpus_are_named_and_a_reservation_is_cancelled_as_in_other_commands(client: Client, gpulease: Program) -> None:
    add = ("reservations", "add", "--gpu", "0", "--user", "zoe-lab", "--from", "4h")
    refused = gpulease(*add, "--to", "2h")
    assert refused.returncode == 2
    assert "why: --to is not after --from.\n" in refused.stderr
    assert "There is no GPU 99." in gpulease(*add, "--gpu", "99", "--to", "6h").stderr
    made = gpulease(*add, "--to", "6h", "--json")
    assert made.returncode == 0, made.stderr
    noun = json.loads(made.stdout)
    assert [device["uuid"] for device in noun["gpus"]] == [client.gpus()[0].uuid]
    assert gpulease("reservations", "cancel", noun["id"][:-8]).stdout == f"cancelled {noun['id']}\n"
