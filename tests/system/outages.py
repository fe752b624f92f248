"""Clients of a daemon whose database goes away, and what must be true of what they were told."""

from __future__ import annotations

import contextlib
import http.client
import threading
import time
import uuid
from collections.abc import Callable
from typing import Any

from tests.daemon import Answer, DaemonProcess, events, eventually
from tests.system.test_storm import check_events

CLIENTS = 8
TTL_S = 9.0
"""Of the lease that is held all the time: shorter than the outages, so that a holder who is not heard would lose it."""
PATIENT_S = 60.0


class Clients:
    """Threads that ask, renew and release through plain HTTP, and write down what they were told.

    Each sends a request that was answered with 503, or not at all, again under the same key.
    """

    def __init__(self, running: DaemonProcess) -> None:
        self.running = running
        self.granted: dict[str, dict[str, Any]] = {}
        self.released: set[str] = set()
        self.refused = 0
        self.renewed_in_outage = 0
        self.keys: dict[str, str] = {}
        self.wrong: list[str] = []
        self.stop = threading.Event()
        self.threads = [threading.Thread(target=self._live) for _ in range(CLIENTS)]

    def __enter__(self) -> Clients:
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop.set()
        for thread in self.threads:
            thread.join(PATIENT_S)
            assert not thread.is_alive(), "a client waits forever"

    def until_answered(self, path: str, body: object, **headers: str) -> Answer | None:
        """The first answer that is no 503; each of those must be whole and say when to come again."""
        until_s = time.monotonic() + PATIENT_S
        while time.monotonic() < until_s:
            try:
                answer = self.running.call("POST", path, body, **headers)
            except (OSError, http.client.HTTPException):  # killed, also within an answer, or on its way up again
                self.stop.wait(0.05)
                continue
            if answer.status != 503:
                return answer
            self.refused += 1
            if answer.problem()[1] != "unavailable" or int(answer.headers["retry-after"]) < 1:
                self.wrong.append(f"a 503 without what it takes: {answer.content!r}")
            self.stop.wait(0.05)
        self.wrong.append(f"{path} was refused for {PATIENT_S} s")
        return None

    def _live(self) -> None:
        try:
            while not self.stop.is_set():
                self._one()
        except Exception as error:
            self.wrong.append(repr(error))

    def _one(self) -> None:
        key = uuid.uuid4().hex
        answer = self.until_answered("/v1/leases?wait_s=60", {"ttl_s": 60}, **{"Idempotency-Key": key})
        while answer is not None and answer.status == 202:  # the same key asks for the same lease
            answer = self.until_answered("/v1/leases?wait_s=60", {"ttl_s": 60}, **{"Idempotency-Key": key})
        if answer is None or answer.status != 201:
            self.wrong.append(f"asked, and answered {answer and answer.content!r}")
            return
        lease = answer.json
        self.granted[lease["id"]] = lease
        self.keys[key] = lease["id"]
        for _ in range(3):
            self.stop.wait(0.05)
            renewed = self.until_answered(f"/v1/leases/{lease['id']}/renew", {"token": lease["token"]})
            if renewed is None or renewed.status != 200:
                self.wrong.append(f"a lease was lost: {renewed and renewed.content!r}")
                return
        done = self.until_answered(f"/v1/leases/{lease['id']}/release", {"token": lease["token"]})
        if done is None or done.status != 200:
            self.wrong.append(f"not released: {done and done.content!r}")
        else:
            self.released.add(lease["id"])


def check(clients: Clients) -> None:
    """What was acknowledged is there, and nothing is there twice."""
    running = clients.running
    assert not clients.wrong, (clients.wrong[:5], running.story())
    log = events(running)
    check_storm = [event for event in log if not (event["kind"] == "lease.ended" and not event["gpus"])]
    held = holders_at_the_end(check_storm)
    granted = {event["lease_id"]: event for event in log if event["kind"] == "lease.granted"}
    ended = {event["lease_id"]: event for event in log if event["kind"] == "lease.ended"}
    for lease_id, lease in clients.granted.items():
        assert granted[lease_id]["token"] == lease["token"]
        assert granted[lease_id]["gpus"] == [gpu["uuid"] for gpu in lease["gpus"]]
    for lease_id in clients.released:
        assert ended[lease_id]["reason"] == "released"
    assert not [event for event in log if event["kind"] == "lease.lost"], "the database was away, and a lease was lost"
    assert set(granted) == set(clients.granted), "a request that was sent again was granted a second time"
    assert held <= set(clients.granted)


def holders_at_the_end(log: list[dict[str, Any]]) -> set[str]:
    """Leases that hold GPUs at the end of the log; no GPU was ever in two."""
    ended = {event["lease_id"] for event in log if event["kind"] == "lease.ended"}
    held = {event["lease_id"] for event in log if event["kind"] == "lease.granted"} - ended
    closing = [
        {**event, "kind": "lease.ended", "seq": len(log) + 1 + number}
        for number, event in enumerate(e for e in log if e["kind"] == "lease.granted" and e["lease_id"] in held)
    ]
    check_events([*log, *closing])
    return held


def down(running: DaemonProcess, words: str) -> Callable[[], bool]:
    """True once `/readyz` says that nothing can be recorded, with these words."""

    def look() -> bool:
        answer = running.call("GET", "/readyz")
        return answer.status == 503 and words in answer.json["detail"]

    return look


class Holder:
    """A client that holds a lease all the time and renews it from its own thread."""

    def __init__(self, running: DaemonProcess) -> None:
        self.running = running
        self.lease: dict[str, Any] = running.call("POST", "/v1/leases?wait_s=60", {"ttl_s": TTL_S}).json
        assert self.lease["state"] == "active"
        self.renewals = 0
        self.lost: Answer | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._keep)

    def __enter__(self) -> Holder:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(PATIENT_S)
        assert not self._thread.is_alive()

    def _keep(self) -> None:
        path, proof = f"/v1/leases/{self.lease['id']}/renew", {"token": self.lease["token"]}
        while not self._over.wait(0.2):
            with contextlib.suppress(OSError):  # killed, or on its way up again
                answer = self.running.call("POST", path, proof)
                self.renewals += answer.status == 200
                if answer.status not in (200, 503):
                    self.lost = answer
                    return

    def renews(self, for_s: float) -> None:
        """For so long, and once more: it is heard, as it must be to trust its lease."""
        until_s = time.monotonic() + for_s
        while (left_s := until_s - time.monotonic()) > 0 or left_s > -0.5:
            before = self.renewals
            eventually(lambda before=before: self.lost is not None or self.renewals > before, 60, self.running.story)
            assert self.lost is None, self.lost.content


def still_serves(running: DaemonProcess, held: Holder) -> None:
    """What must work while nothing can be recorded."""
    assert running.call("GET", "/healthz").status == 200
    assert running.call("GET", "/v1/gpus").status == 200
    assert running.call("GET", f"/v1/leases/{held.lease['id']}").json["state"] == "active"
    refused = running.call("POST", "/v1/leases", {})
    assert refused.problem() == (503, "unavailable")
    assert int(refused.headers["retry-after"]) >= 1


def serves_again(
    running: DaemonProcess, clients: Clients, held: Holder, *, releases: int = 5, within_s: float = 40
) -> None:
    """The database is back: the daemon finds that out by itself, and everyone goes on."""
    eventually(lambda: running.answers("/readyz"), PATIENT_S, running.story)
    so_far = len(clients.released)
    eventually(lambda: len(clients.released) >= so_far + releases, 60, running.story)
    held.renews(0.1)
