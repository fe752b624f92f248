"""Hypothesis plays the REST API against a small model, restarts included; the checker has the last word.

The application, the writer and the store are the real ones, on the simulation's clock and without its faults: here the
order of the calls is what is searched, and a failing one is made short.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
    run_state_machine_as_test,
)

from tests.databases import PostgresServer
from tests.simulation.__main__ import fresh_sqlite
from tests.simulation.checker import check
from tests.simulation.world import World

Line = dict[str, Any]
TTL_S = 4.0


class ApiMachine(RuleBasedStateMachine):
    """Two nodes of four and two GPUs. The model: what the last answer about each lease was."""

    held = Bundle("held")
    fresh_database = staticmethod(fresh_sqlite)

    def __init__(self) -> None:
        super().__init__()
        self._stack = contextlib.ExitStack()
        self.world = World(0, 10**9, self._stack.enter_context(self.fresh_database()), clients=0)
        self.world.calm = True
        self._stack.callback(self.world.loop.close)
        self._stack.enter_context(self.world.in_place())
        self.asked: dict[str, tuple[Line, str]] = {}
        """By key: the body, and the lease that was made."""
        self.over: dict[str, str] = {}
        """By lease: as what it was ended, once that was confirmed."""

    @initialize()
    def begin(self) -> None:
        self.world.begin()
        for node in self.world.nodes.values():
            self.world.spawn(node.run())
        self.pass_time(0.5)

    def teardown(self) -> None:
        if self.world.daemon is not None:
            self.world.calm = True
            self.world.kill("at the end")
            self.world.start()
            log = self.world.loop.run_until_complete(self.world.finish())
            complaints = check(log, self.world.lines, 0.002)
            self._stack.close()
            assert complaints == []
        else:
            self._stack.close()

    def call(self, method: str, path: str, body: Any = None, key: str | None = None) -> tuple[int, Any]:
        """One request; nothing is lost."""
        called = self.world.network.call("machine", method, path, body, key=key, patience_s=30.0)
        return self.world.loop.run_until_complete(called)

    def told(self, what: str, sent_s: float, status: int, told: Line, **more: Any) -> None:
        line = {"sent_s": sent_s, "status": status, **more}
        self.world.see(what, **line, **({"lease": told} if status < 300 else {"code": told["code"]}))

    @rule(target=held, count=st.integers(1, 5), queue=st.booleans())
    def ask(self, count: int, queue: bool) -> Any:
        key = f"k{len(self.asked)}"
        body = {"count": count, "queue": queue, "ttl_s": TTL_S, "label": key}
        sent_s = self.world.now_s
        status, lease = self.call("POST", "/v1/leases", body, key)
        self.told("asked", sent_s, status, lease, key=key, final=True)
        if status not in (201, 202):
            assert (status, lease["code"]) in {(409, "not_now"), (422, "never_fits")}
            return multiple()
        assert (lease["state"], len(lease["gpus"])) == (("active", count) if status == 201 else ("queued", 0))
        self.asked[key] = (body, lease["id"])
        return key

    @rule(key=held)
    def ask_again(self, key: str) -> None:
        body, made = self.asked[key]
        sent_s = self.world.now_s
        status, lease = self.call("POST", "/v1/leases", body, key)
        self.told("asked", sent_s, status, lease, key=key, final=True)
        if status == 410:
            assert (lease["code"], lease["lease"]["id"], lease["lease"]["state"]) == ("lease_lost", made, "ended")
        else:
            assert (status in (201, 202), lease["id"]) == (True, made)

    @rule(key=held)
    def ask_something_else(self, key: str) -> None:
        status, problem = self.call("POST", "/v1/leases", self.asked[key][0] | {"label": "other"}, key)
        assert (status, problem["code"]) == (422, "idempotency_mismatch")

    @rule(key=held)
    def renew(self, key: str) -> None:
        self._prove(key, "renew")

    @rule(key=held)
    def release(self, key: str) -> None:
        self._prove(key, "release")

    @rule(key=consumes(held))
    def release_twice(self, key: str) -> None:
        self._prove(key, "release")
        self._prove(key, "release")

    def _prove(self, key: str, verb: str) -> None:
        lease_id = self.asked[key][1]
        before = self.call("GET", f"/v1/leases/{lease_id}")[1]
        sent_s = self.world.now_s
        status, lease = self.call("POST", f"/v1/leases/{lease_id}/{verb}", {"token": before["token"]})
        known = {"lease_id": lease_id, "token": before["token"]}
        self.told(f"{verb}ed" if verb == "renew" else "released", sent_s, status, lease, **known)
        if lease_id in self.over:
            assert (
                (status, lease.get("end_reason")) == (200, self.over[lease_id]) if verb == "release" else status == 410
            )
        elif status == 200 and verb == "release":
            assert lease["state"] == "ended"
            self.over[lease_id] = lease["end_reason"]
        else:
            assert status in (200, 410, 412), "412: it was granted between the two calls"

    @rule(key=held)
    def prove_with_another_token(self, key: str) -> None:
        lease_id = self.asked[key][1]
        status, problem = self.call("POST", f"/v1/leases/{lease_id}/release", {"token": 10**6})
        assert (status, problem["code"]) == (412, "stale_token")

    @rule(node=st.sampled_from("ab"), index=st.integers(0, 3), verb=st.sampled_from(["cordon", "uncordon"]))
    def cordon(self, node: str, index: int, verb: str) -> None:
        gpus = list(self.world.nodes[node].gpus)
        assert self.call("POST", f"/v1/gpus/{gpus[index % len(gpus)]}/{verb}")[0] == 200

    @rule(node=st.sampled_from("ab"), verb=st.sampled_from(["drain", "resume", "resume"]))
    def drain(self, node: str, verb: str) -> None:
        assert self.call("POST", f"/v1/nodes/{node}/{verb}")[0] == 200

    @rule(node=st.sampled_from("ab"), index=st.integers(0, 3))
    def process(self, node: str, index: int) -> None:
        gpus = list(self.world.nodes[node].gpus.values())
        gpu = gpus[index % len(gpus)]
        if gpu.processes:
            gpu.processes.clear()
        else:
            self.world.nodes[node].start_process(gpu.uuid, None)

    @rule()
    def restart(self) -> None:
        self.world.kill("by the machine")
        self.world.start()
        self.pass_time(0.5)

    @rule(seconds=st.sampled_from([0.05, 0.5, 2.0, 5.0]))
    def pass_time(self, seconds: float) -> None:
        self.world.loop.run_until_complete(self.world.wait(seconds))

    @invariant()
    def no_one_holds_what_another_holds(self) -> None:
        if self.world.daemon is None:
            return
        status, page = self.call("GET", "/v1/leases?state=active&limit=1000")
        assert status == 200
        gpus = [gpu["uuid"] for lease in page["items"] for gpu in lease["gpus"]]
        assert len(set(gpus)) == len(gpus)
        assert not {lease["id"] for lease in page["items"]} & self.over.keys(), "what was released is held again"


class ApiMachineOnPostgresql(ApiMachine):
    """The same with a database of its own on a PostgreSQL server."""


@pytest.fixture
def on_postgresql(postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the machine databases of this server."""

    @contextlib.contextmanager
    def fresh() -> Iterator[str]:
        url = postgres.database()
        yield url
        postgres.drop(url)

    monkeypatch.setattr(ApiMachineOnPostgresql, "fresh_database", staticmethod(fresh))


QUICK = settings(max_examples=6, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck))
LONG = settings(QUICK, max_examples=500, stateful_step_count=60)


def test_the_api_keeps_its_promises() -> None:
    run_state_machine_as_test(ApiMachine, settings=QUICK)


@pytest.mark.usefixtures("on_postgresql")
def test_the_api_keeps_its_promises_on_postgresql() -> None:
    run_state_machine_as_test(ApiMachineOnPostgresql, settings=settings(QUICK, max_examples=3))


@pytest.mark.soak
@pytest.mark.timeout(3000)
def test_the_api_keeps_its_promises_for_long() -> None:
    run_state_machine_as_test(ApiMachine, settings=LONG)


@pytest.mark.soak
@pytest.mark.timeout(3000)
@pytest.mark.usefixtures("on_postgresql")
def test_the_api_keeps_its_promises_for_long_on_postgresql() -> None:
    run_state_machine_as_test(ApiMachineOnPostgresql, settings=settings(LONG, max_examples=100))
