"""What the attacks share: a host with a running daemon, leases and jobs of its users, and what is public of them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from gpulease_protocol.host.process_id import ProcessId
from tests.attack.host import UIDS, Host, HostDaemon
from tests.daemon import FINAL, Answer, eventually

END_S = 30.0
"""How long the end of a job, or of the draining of its GPU, may take whatever others do. Alone it takes a second."""


@dataclass(frozen=True)
class Attacked:
    """A host and its daemon."""

    host: Host
    daemon: HostDaemon

    def call(self, user: str, method: str, path: str, body: Any = None, **more: Any) -> Answer:
        """One request of a user over the socket."""
        return self.host.call(user, method, path, body, **more)

    def lease(self, user: str, count: int = 1, **fields: Any) -> dict[str, Any]:
        """GPUs that a user holds until they are released, or until a process of that user ends."""
        pid = self.host.start(user, "sleep", "1000").pid
        owner = ProcessId.of(pid)
        assert owner is not None
        eventually(lambda: pid in self.pids(user), 60)
        owned = {"owner_pid": pid, "owner_start_ticks": owner.start_ticks}
        answer = self.call(user, "POST", "/v1/leases", {"count": count, **owned, **fields})
        assert answer.status == 201, answer.content
        return dict(answer.json)

    def release(self, user: str, lease: dict[str, Any]) -> None:
        """Give them back."""
        answer = self.call(user, "POST", f"/v1/leases/{lease['id']}/release", {"token": lease["token"]})
        assert answer.status == 200, answer.content

    def submit(self, user: str, *command: str, **fields: Any) -> dict[str, Any]:
        """A job of a user, just submitted."""
        answer = self.call(user, "POST", "/v1/jobs", {"command": list(command), "launcher": "plain", **fields})
        assert answer.status == 201, answer.content
        return dict(answer.json)

    def running_job(self, user: str, *command: str, **fields: Any) -> dict[str, Any]:
        """A job of a user that runs."""
        job = self.submit(user, *(command or ("sleep", "1000")), **fields)
        self.daemon.wait_job(job["id"], "running", *FINAL)
        return self.daemon.job(job["id"])

    def completed_job(self, user: str, *command: str, **fields: Any) -> tuple[dict[str, Any], str]:
        """A job of a user that has ended, and what it has printed."""
        job = self.daemon.wait_job(self.submit(user, *command, **fields)["id"])
        return job, self.daemon.job_log(job["id"])

    def cancel(self, user: str, job: dict[str, Any]) -> None:
        """End a job at once, as its user."""
        assert self.call(user, "POST", f"/v1/jobs/{job['id']}/cancel", {"grace_s": 0}).status == 200

    def wait_ended(self, job: dict[str, Any], within_s: float = END_S) -> dict[str, Any]:
        """Wait until a job has ended."""
        eventually(lambda: self.daemon.job(job["id"])["state"] in FINAL, within_s, lambda: self._story(job["id"]))
        return self.daemon.job(job["id"])

    def wait_free(self, uuid: str, within_s: float = END_S) -> None:
        """Wait until a GPU is free."""
        eventually(lambda: self.gpu(uuid)["state"] == "free", within_s, lambda: f"the GPU: {self.gpu(uuid)}")

    def gpu(self, uuid: str) -> dict[str, Any]:
        """A GPU as it is now."""
        return dict(self.daemon.get(f"/v1/gpus/{uuid}").json)

    def events(self, kind: str, lease_id: str) -> list[dict[str, Any]]:
        """The events of a kind about a lease."""
        found = self.daemon.get(f"/v1/events?limit=1000&after={max(0, self.last_event() - 900)}").json["items"]
        return [event for event in found if event["kind"] == kind and event["lease_id"] == lease_id]

    def last_event(self) -> int:
        """Number of the last event."""
        after, step = 0, 1000
        while page := self.daemon.get(f"/v1/events?limit={step}&after={after}").json["items"]:
            after = int(page[-1]["seq"])
        return after

    def public_lease(self, lease_id: str) -> str:
        """The id of a lease, as eve finds it."""
        listed = self.call("eve", "GET", "/v1/leases?state=active&limit=1000").json["items"]
        (found,) = [lease["id"] for lease in listed if lease["id"] == lease_id]
        return str(found)

    def pids(self, user: str) -> list[int]:
        """The processes of a user on the host."""
        found = []
        for pid in self.host.processes():
            try:
                owner = os.stat(f"/proc/{pid}").st_uid
            except OSError:
                continue
            found += [pid] if owner == UIDS[user] else []
        return found

    def _story(self, job_id: str) -> str:
        return (
            f"the job: {self.daemon.job(job_id)}; GPUs: {[(gpu['state'], gpu['reason']) for gpu in self.daemon.gpus()]}"
        )
