"""JSON of nouns and bodies: the names of their fields, what is left out, and words of another version."""

from __future__ import annotations

import copy
import json
from dataclasses import fields
from datetime import UTC, datetime
from typing import Any

import pytest

from gpulease.sansio.effects import Flow, Response
from gpulease.sansio.failover import Destination, Failover
from gpulease_protocol import endpoints
from gpulease_protocol.codec import WIRE_NAMES, from_json, is_known, to_body, to_json
from gpulease_protocol.errors import InvalidRequest
from gpulease_protocol.model import (
    Demand,
    Event,
    Holder,
    Job,
    JobState,
    Launcher,
    Lease,
    LeaseState,
    Liveness,
    Page,
)
from gpulease_protocol.node_requests import DrainRequest, PauseRequest
from gpulease_protocol.requests import ArrayRequest, CancelRequest, HolderProof, JobRequest, LeaseRequest
from gpulease_protocol.tokens import TokenRequest

LEASE = Lease(
    id="lease-1",
    state=LeaseState.ACTIVE,
    holder=Holder(user="ann"),
    demand=Demand(),
    fencing_token=7,
    ttl_s=60.0,
    liveness=Liveness.HEARTBEAT,
    created_at=datetime(2026, 11, 22, tzinfo=UTC),
)
GRANT = Event(seq=1, at=LEASE.created_at, kind="lease.granted", cause="request-1", fencing_token=7)


def test_a_fencing_token_is_called_token_in_json() -> None:
    for noun in (LEASE, GRANT, HolderProof(fencing_token=7)):
        there = to_json(noun)
        assert there["token"] == 7
        assert "fencing_token" not in there
        assert from_json(type(noun), there) == noun
    assert to_json(Page(items=(LEASE,)))["items"][0]["token"] == 7


def test_no_noun_has_a_field_that_another_is_called_in_json() -> None:
    for kind in (Lease, Event, HolderProof):
        assert not {item.name for item in fields(kind)} & set(WIRE_NAMES.values())


def test_a_body_leaves_out_what_is_at_its_default() -> None:
    assert to_body(LeaseRequest()) == {}
    assert to_body(LeaseRequest(count=2, queue=False, ttl_s=300)) == {"count": 2, "queue": False}
    array = ArrayRequest(indices="0-3")
    assert to_body(JobRequest(command=["a.py"], array=array)) == {"command": ["a.py"], "array": {"indices": "0-3"}}
    assert endpoints.request_lease(LeaseRequest(count=1), "key").body == {"count": 1}
    # The launcher goes with it: an older daemon takes torchrun where none is named.
    assert endpoints.submit(JobRequest(command=["a.py"]), "key").body == {"command": ["a.py"], "launcher": "torchrun"}
    assert endpoints.submit(JobRequest(command=["./a"]), "key").body == {"command": ["./a"], "launcher": "plain"}


BODIES = {
    LeaseRequest: {},
    JobRequest: {"command": ["a.py"]},
    ArrayRequest: {"indices": "0"},
    TokenRequest: {"user": "ann"},
    CancelRequest: {},
    DrainRequest: {},
    PauseRequest: {},
}
DEFAULTS: dict[str, dict[str, object]] = {
    "LeaseRequest": {
        "nodes": 1,
        "queue": True,
        "ttl_s": 300.0,
        "label": "",
        "watch_owner": True,
        "adopt": False,
        "topology": "preferred",
        "priority": "normal",
        "agent": "",
        "session": "",
    },
    "JobRequest": {
        "gpus": 1,
        "nodes": 1,
        "environment": {},
        "name": "",
        "max_restarts": 0,
        "retries": 0,
        "limits": {},
        "topology": "preferred",
        "priority": "normal",
        "after": [],
        "agent": "",
        "session": "",
    },
    "ArrayRequest": {},
    "TokenRequest": {"role": "user", "note": ""},
    "CancelRequest": {"grace_s": 35.0},
    "DrainRequest": {},
    "PauseRequest": {"force": False},
}
"""Those that are not null. A client that leaves a field out means the default that it knows, not that of its daemon.

`launcher` was `torchrun` before the first release. What is chosen now where it is null is torchrun for every command
that torchrun could start, but for a script whose name does not end in `.py`."""


@pytest.mark.parametrize("kind", BODIES)
def test_the_default_of_a_field_never_changes(kind: type) -> None:
    named = BODIES[kind]
    assert {
        name: value for name, value in to_json(kind(**named)).items() if value is not None and name not in named
    } == (DEFAULTS[kind.__name__])


def test_an_unknown_word_is_carried() -> None:
    newer = to_json(LEASE) | {"state": "suspended", "liveness": "lighthouse", "end_reason": "evicted", "of_tomorrow": 1}
    lease = from_json(Lease, newer)
    assert (str(lease.state), lease.liveness.value, lease.end_reason) == ("suspended", "lighthouse", "evicted")
    assert lease.state not in tuple(LeaseState)
    assert not is_known(lease.state)
    assert is_known(LEASE.state)
    assert to_json(lease) == {name: value for name, value in newer.items() if name != "of_tomorrow"}
    assert copy.deepcopy(lease) == lease
    assert f"{lease.state:>12}" == "   suspended"


def test_what_people_ask_for_is_still_checked() -> None:
    from_json(Lease, to_json(LEASE) | {"state": "suspended"})
    with pytest.raises(ValueError, match="suspended"):
        LeaseState("suspended")


@pytest.mark.parametrize("word", [None, 3, True, {}, []])
def test_a_word_that_is_no_text_is_refused(word: object) -> None:
    with pytest.raises(ValueError):
        from_json(Lease, to_json(LEASE) | {"state": word})


def test_a_job_in_an_unknown_state_has_ended_when_it_has_an_end() -> None:
    job = Job(
        id="job-1",
        state=JobState.RUNNING,
        lease_id="lease-1",
        launcher=Launcher.PLAIN,
        command=("true",),
        created_at=LEASE.created_at,
    )
    assert not from_json(Job, to_json(job) | {"state": "suspended"}).ended
    assert from_json(Job, to_json(job) | {"state": "preempted", "ended_at": "2026-11-22T00:00:00Z"}).ended
    assert from_json(Job, to_json(job) | {"state": "failed"}).ended


def test_a_renewal_that_is_answered_is_a_renewal_whatever_it_contains() -> None:
    read = endpoints.keep(LEASE).read
    assert read(to_json(LEASE) | {"liveness": "lighthouse"}).liveness == "lighthouse"
    assert read({"id": "lease-1", "state": {"of": "tomorrow"}}) == LEASE
    for other in ({}, [], "ok", {"id": "lease-2"}, None):
        with pytest.raises(ValueError, match="not about lease lease-1"):
            read(other)


def refuse(call: endpoints.ApiCall[Lease], detail: str) -> tuple[Flow[Lease], Any]:
    """A flow that has sent the call and been refused with this text; and its next effect."""
    flow = Failover(Destination.of("http://127.0.0.1:8750", None, 1.0)).send(call)
    next(flow)
    problem = {"code": "invalid_request", "status": 422, "detail": detail}
    return flow, flow.send(Response(422, "Unprocessable", json.dumps(problem).encode()))


def test_an_older_daemon_that_refuses_what_a_client_says_of_itself_is_asked_again_without() -> None:
    call = endpoints.request_lease(LeaseRequest(count=2, owner_pid=7, owner_start_ticks=8), "key")
    flow, again = refuse(call, "owner_start_ticks: is not a field of this request.")
    assert (again.call.body, again.call.idempotency_key) == ({"count": 2, "owner_pid": 7}, "key")
    with pytest.raises(StopIteration) as answered:
        flow.send(Response(201, "Created", json.dumps(to_json(LEASE)).encode()))
    assert answered.value.value == LEASE


def test_a_daemon_that_refuses_what_is_asked_for_is_believed() -> None:
    call = endpoints.request_lease(LeaseRequest(count=2, gpu_model="H100", owner_pid=7), "key")
    for detail in ("gpu_model: is not a field of this request.", "owner_pid: must be a process id, over 0."):
        with pytest.raises(InvalidRequest, match=detail):
            refuse(call, detail)
