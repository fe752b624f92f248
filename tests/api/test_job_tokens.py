"""A job on another host shows a token of its own, which allows little and ends with it."""

from __future__ import annotations

import os
import pwd
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpulease_server.api.auth import job_callers
from gpulease_server.api.auth.access_rules import ACCESS_RULES, AccessRule
from tests.daemon import Answer, DaemonProcess
from tests.http_as_user import call

USER = pwd.getpwuid(os.getuid()).pw_name
OPEN = {operation for operation, rule in ACCESS_RULES.items() if rule is AccessRule.ANYONE}


class Lab:
    """A daemon that knows callers by token alone, as those of other hosts, and two nodes that the test plays."""

    def __init__(self, directory: Path) -> None:
        self.running = DaemonProcess(directory / "d", "--no-worker", "--behind-proxy").start(ready=False)
        self.user = self.token(user=USER)
        self.workers = {node: self.token(user="w", role="worker", node=node) for node in ("n1", "n2")}
        self.tickets: dict[str, int | None] = {"n1": None, "n2": None}

    def token(self, **fields: Any) -> str:
        made = call(self.running.socket, "POST", "/v1/tokens", fields)
        assert made.status == 201, made.content
        return str(made.json["bearer"])

    def ask(self, bearer: str, method: str, path: str, body: Any = None, **more: Any) -> Answer:
        return call(self.running.port, method, path, body, bearer=bearer, **more)

    def report(self, node: str, *jobs: dict[str, Any], here: bool = False) -> dict[str, Any]:
        """Report for a node with two idle GPUs, over the network or from the daemon's own host; the answer."""
        gpus = [
            {"uuid": f"GPU-{node}-{index}", "node": node, "index": index, "memory_total_bytes": 2**30}
            | {"memory_used_bytes": 0, "processes": []}
            for index in range(2)
        ]
        body = {"worker_id": node, "host": "h", "ticket": self.tickets[node], "gpus": gpus, "hold_s": 0.05}
        body |= {"jobs": jobs}
        path = f"/v1/nodes/{node}/exchange"
        answer = (
            call(self.running.socket, "POST", path, body) if here else self.ask(self.workers[node], "POST", path, body)
        )
        assert answer.status == 200, answer.content
        self.tickets[node] = answer.json["ticket"]
        return dict(answer.json)

    def start_job(self, node: str, **fields: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """Submit a job for a node and report for that until it is ordered; the job and its order."""
        body = {"command": ["sleep", "1"], "launcher": "plain", "node": node}
        for other in ("n1", "n2"):
            self.report(other)
        made = self.ask(self.user, "POST", "/v1/jobs", body | fields)
        assert made.status == 201, made.content
        while True:
            for order in self.report(node)["jobs"]:
                if order["job_id"] == made.json["id"]:
                    return self.ask(self.user, "GET", f"/v1/jobs/{order['job_id']}").json, order


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    made = Lab(tmp_path)
    try:
        yield made
    finally:
        made.running.stop()


def test_what_a_job_may_do_and_that_it_may_do_nothing_else(lab: Lab) -> None:
    job, order = lab.start_job("n1")
    other, _ = lab.start_job("n2")
    bearer, lease_id = order["env"]["GPULEASE_TOKEN"], job["lease_id"]

    me = lab.ask(bearer, "GET", "/v1/me").json
    assert (me["user"], me["role"], me["identified_by"]) == (USER, "job", "token")
    assert (me["may"], me["may_own"]) == ([], ["getJobLogs", "keepLease", "renewLease"])
    lease = lab.ask(bearer, "GET", f"/v1/leases/{lease_id}")
    assert lease.json["env"]["CUDA_VISIBLE_DEVICES"] == lease.json["gpus"][0]["uuid"]
    assert lab.ask(bearer, "GET", f"/v1/leases/{lease_id}/explain").status == 200
    renewed = lab.ask(bearer, "POST", f"/v1/leases/{lease_id}/renew", {"token": lease.json["token"]})
    assert renewed.status == 200, renewed.content
    assert lab.ask(bearer, "GET", f"/v1/jobs/{job['id']}").json["command"] == ["sleep", "1"]
    assert lab.ask(bearer, "GET", f"/v1/jobs/{job['id']}/logs").status == 200
    gpus = {gpu["uuid"]: gpu for gpu in lab.ask(bearer, "GET", "/v1/gpus").json["items"]}
    assert gpus.keys() == {"GPU-n1-0", "GPU-n1-1"}
    assert [node["name"] for node in lab.ask(bearer, "GET", "/v1/nodes").json["items"]] == ["n1"]

    named = {"lease_id": lease_id, "job_id": job["id"], "name": "n1", "uuid": "GPU-n1-0"}
    others = {"lease_id": other["lease_id"], "job_id": other["id"], "name": "n2", "uuid": "GPU-n2-0"}
    neither = {"token_id": "token-none", "reservation_id": "reservation-none", "kind": "user"}
    for operation in sorted(set(ACCESS_RULES) - OPEN):
        method, path = operation.split(" ", 1)
        raw = b"{" if method == "POST" else None
        allowed = operation in job_callers.OPERATIONS
        own = lab.ask(bearer, method, path.format(**named, **neither), raw=raw)
        assert (own.status != 403) is allowed, operation
        if "{" in path:
            of_another = lab.ask(bearer, method, path.format(**others, **neither), raw=raw)
            assert of_another.problem() == (403, "not_allowed"), operation
    assert lab.ask(lab.user, "GET", f"/v1/leases/{lease_id}").json["state"] == "active"


def test_who_uses_the_other_gpus_of_its_node_is_not_shown_to_a_job(lab: Lab) -> None:
    _, order = lab.start_job("n1")
    lab.report("n1")
    held = lab.ask(lab.user, "POST", "/v1/leases", {"node": "n1", "queue": True, "label": "private"}).json
    while lab.ask(lab.user, "GET", f"/v1/leases/{held['id']}").json["state"] != "active":
        lab.report("n1")
    assert b"private" not in lab.ask(order["env"]["GPULEASE_TOKEN"], "GET", "/v1/gpus").content


def test_the_token_is_worth_nothing_after_the_end_and_the_next_attempt_has_another(lab: Lab) -> None:
    job, order = lab.start_job("n1", retries=1)
    bearer, path = order["env"]["GPULEASE_TOKEN"], f"/v1/jobs/{job['id']}"
    begun = "2026-11-22T00:00:00Z"
    ended = {"job_id": job["id"], "state": "exited", "exit_code": 1, "started_at": begun, "ended_at": begun}
    lab.report("n1", ended)
    assert lab.ask(bearer, "GET", path).problem() == (401, "not_authenticated")
    while not (orders := lab.report("n1")["jobs"]):
        pass
    again = orders[0]["env"]["GPULEASE_TOKEN"]
    assert again != bearer
    assert lab.ask(again, "GET", path).status == 200
    assert lab.ask(bearer, "GET", path).problem() == (401, "not_authenticated")
    lab.report("n1", ended | {"attempt": 2})
    assert lab.ask(again, "GET", path).problem() == (401, "not_authenticated")


@pytest.mark.parametrize(
    "wrong", ["{lease}.", "{lease}.0", "{lease}.{mac}0", "lease-0000000000000000.{mac}", "{lease}"]
)
def test_a_token_that_is_made_up_is_refused(lab: Lab, wrong: str) -> None:
    _, order = lab.start_job("n1")
    lease_id, _, mac = order["env"]["GPULEASE_TOKEN"].partition(".")
    assert lab.ask(wrong.format(lease=lease_id, mac=mac), "GET", "/v1/me").problem() == (401, "not_authenticated")


def test_it_stays_the_same_over_a_restart_and_is_nowhere_but_in_the_order(lab: Lab) -> None:
    job, order = lab.start_job("n1")
    bearer = order["env"]["GPULEASE_TOKEN"]
    lab.running.kill()
    lab.running.start(ready=False)
    assert lab.ask(bearer, "GET", f"/v1/jobs/{job['id']}").status == 200
    lab.tickets["n1"] = None
    while not (orders := lab.report("n1")["jobs"]):
        pass
    assert orders[0]["env"]["GPULEASE_TOKEN"] == bearer
    for path in ("/v1/leases", f"/v1/leases/{job['lease_id']}", "/v1/jobs", "/v1/events?limit=1000", "/v1/tokens"):
        assert bearer.encode() not in call(lab.running.socket, "GET", path).content
    stored = b"".join(file.read_bytes() for file in lab.running.data_dir.rglob("*") if file.is_file())
    assert bearer.encode() not in stored + lab.running.output.read_bytes()


def test_none_is_given_where_the_job_has_one_or_runs_on_the_daemons_own_host(lab: Lab) -> None:
    _, order = lab.start_job("n1", environment={"GPULEASE_TOKEN": "own"})
    assert "GPULEASE_TOKEN" not in order["env"]
    lab.start_job("n2")
    (here,) = lab.report("n2", here=True)["jobs"]
    assert "GPULEASE_TOKEN" not in here["env"]


def test_no_token_can_be_made_with_this_role(lab: Lab) -> None:
    refused = call(lab.running.socket, "POST", "/v1/tokens", {"user": "ann", "role": "job"})
    assert refused.problem() == (422, "invalid_request")
