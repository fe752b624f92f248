"""What `GET /metrics` says is what `/v1` says, in a form that Prometheus takes."""

from __future__ import annotations

import gzip
import time
from collections import Counter
from pathlib import Path
from typing import Any

from tests.api.conftest import states
from tests.api.documents import whole_document
from tests.daemon import DaemonProcess, daemon, eventually
from tests.monitoring.conftest import GIB, WITHIN_S, steady
from tests.prometheus_scrape import OPENMETRICS, Scrape, promtool, scrape


def at_one_moment(running: DaemonProcess) -> tuple[Scrape, list[dict[str, Any]], list[dict[str, Any]]]:
    """A scrape, and the GPUs and leases that were the same before and after it."""

    def nouns() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        leases = running.call("GET", "/v1/leases?state=queued&state=active&limit=1000").json["items"]
        return running.call("GET", "/v1/gpus").json["items"], leases

    def lasting(gpus: list[dict[str, Any]], leases: list[dict[str, Any]]) -> list[Any]:
        shown = [(gpu["uuid"], gpu["state"], gpu["lease_id"], gpu["processes"]) for gpu in gpus]
        return [shown, [(lease["id"], lease["state"]) for lease in leases]]

    until_s = time.monotonic() + WITHIN_S
    while True:
        before = nouns()
        told = steady(running)
        known = all(gpu["state"] != "unknown" for gpu in before[0])
        if known and lasting(*before) == lasting(*nouns()):
            return told, *before
        assert time.monotonic() < until_s, "GPUs and leases never stay the same"


def test_promtool_finds_nothing_to_say(scene: DaemonProcess) -> None:
    checked = promtool("check", "metrics", stdin=scrape(scene).text)
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, "", "")
    wrong = promtool("check", "metrics", stdin="# TYPE gpulease_wrong counter\ngpulease_wrong 1\n")
    assert wrong.returncode != 0, "promtool would find nothing anywhere"


def test_gpus_are_those_of_the_api(scene: DaemonProcess) -> None:
    told, gpus, _ = at_one_moment(scene)
    states = Counter(gpu["state"] for gpu in gpus)
    assert states == {"leased": 2, "foreign": 1, "unhealthy": 1}
    assert {state: count for state, count in told.by("state", "gpulease_gpus").items() if count} == states
    for gpu in gpus:
        assert told.value("gpulease_gpu_state", uuid=gpu["uuid"], node="n1", state=gpu["state"]) == 1
        assert told.value("gpulease_gpu_info", uuid=gpu["uuid"], gpu=str(gpu["index"]), model=gpu["name"]) == 1
        assert told.value("gpulease_gpu_info", uuid=gpu["uuid"], pci_bus_id=gpu["pci_bus_id"]) == 1
        strangers = [process for process in gpu["processes"] if process["lease_id"] is None]
        memory = sum(process["memory_bytes"] or 0 for process in strangers)
        assert told.value("gpulease_gpu_foreign_processes", uuid=gpu["uuid"]) == len(strangers)
        assert told.value("gpulease_gpu_foreign_memory_bytes", uuid=gpu["uuid"]) == memory
    assert told.value("gpulease_gpu_foreign_memory_bytes", uuid=gpus[1]["uuid"]) == 3 * GIB
    assert told.value("gpulease_gpu_foreign_processes", uuid=gpus[1]["uuid"]) == 2
    held = {gpu["uuid"] for gpu in gpus if gpu["state"] == "leased"}
    assert set(told.by("uuid", "gpulease_gpu_holder")) == held == set(told.by("uuid", "gpulease_gpu_quiet_seconds"))
    for gpu in gpus:
        if gpu["state"] == "leased":
            assert told.value("gpulease_gpu_holder", uuid=gpu["uuid"], user=gpu["holder"]["user"]) == 1


def test_leases_queue_and_jobs_are_those_of_the_api(scene: DaemonProcess) -> None:
    told, _, leases = at_one_moment(scene)
    counts = Counter((lease["state"], lease["holder"]["user"]) for lease in leases)
    assert counts.total() == 3
    for (state, user), count in counts.items():
        assert told.value("gpulease_leases", state=state, user=user) == count
    assert told.value("gpulease_queue_length") == 1
    assert told.value("gpulease_queue_gpus") == 3
    assert told.value("gpulease_queue_oldest_seconds") > 0
    jobs = {state: count for state, count in told.by("state", "gpulease_jobs").items() if count}
    assert jobs == {"running": 1}


def test_the_node_and_the_daemon(scene: DaemonProcess) -> None:
    told = steady(scene)
    assert told.value("gpulease_node_ready", node="n1") == 1
    assert told.by("mode", "gpulease_node_mode", node="n1") == {"active": 1, "draining": 0, "paused": 0}
    assert 0 <= told.value("gpulease_probe_age_seconds", node="n1") < WITHIN_S
    assert 0 < told.value("gpulease_probe_duration_seconds", node="n1") < WITHIN_S
    assert told.value("gpulease_ready") == 1
    standings = {name: value for name, value in told.by("standing", "gpulease_standing").items() if value}
    assert standings == {"writer": 1}
    assert told.value("gpulease_build_info", version="0.1.0") == 1
    assert abs(told.value("gpulease_last_commit_timestamp_seconds") - time.time()) < 3600
    assert told.value("gpulease_commit_seconds_count") == told.value("gpulease_turn_happenings_count") > 0
    assert told.value("process_resident_memory_bytes") > 1e6


def test_a_gpu_that_works_is_not_quiet_and_its_time_counts_as_used(scene: DaemonProcess) -> None:
    first = scrape(scene)
    user, gpu = next(iter(first.by("user", "gpulease_gpu_held_seconds_total"))), scene.call("GET", "/v1/gpus").json
    before = {kind: first.value(f"gpulease_gpu_{kind}_seconds_total", user=user) for kind in ("held", "used")}

    def grown() -> bool:
        now = scrape(scene)
        return all(now.value(f"gpulease_gpu_{kind}_seconds_total", user=user) > before[kind] + 1 for kind in before)

    eventually(grown, WITHIN_S, scene.story)
    told = scrape(scene)
    assert told.value("gpulease_gpu_used_seconds_total", user=user) < told.value(
        "gpulease_gpu_held_seconds_total", user=user
    )
    uptime_s = time.time() - told.value("process_start_time_seconds")
    assert told.value("gpulease_gpu_held_seconds_total", user=user) <= 2 * uptime_s + 5
    working = gpu["items"][0]["uuid"]
    eventually(lambda: steady(scene).value("gpulease_gpu_quiet_seconds", uuid=working) < 5, WITHIN_S, scene.story)


def test_a_request_is_counted_under_the_template_of_its_route(scene: DaemonProcess) -> None:
    def statuses(told: Scrape, route: str) -> dict[str, float]:
        return told.by("status", "gpulease_http_requests_total", route=route, method="GET")

    routes = {"/v1/leases/{lease_id}": 404.0, "unmatched": 404.0}
    before = scrape(scene)
    for number in range(30):
        scene.call("GET", f"/v1/leases/lease-{number}")
        scene.call("GET", f"/nothing/{number}")
    scene.call("GET", "/v1/gpus", Host="elsewhere.example")
    scene.call("PUT", "/v1/gpus")
    after = scrape(scene)
    for route in routes:
        assert statuses(after, route)["404"] == statuses(before, route).get("404", 0) + 30
    headed = {"method": "HEAD", "route": "/v1/gpus", "status": "200"}
    assert scene.call("HEAD", "/v1/gpus").status == 200
    assert scrape(scene).value("gpulease_http_requests_total", **headed) == 1
    assert statuses(after, "unmatched")["403"] == statuses(before, "unmatched").get("403", 0) + 1
    assert "lease-1" not in after.text
    assert "/nothing" not in after.text
    known = set(whole_document()["paths"]) | {"unmatched", "/openapi.json", "/docs"}
    assert {sample.labels["route"] for sample in after.families["gpulease_http_requests"].samples} <= known
    assert (
        after.value("gpulease_http_request_duration_seconds_count", route="/v1/leases/{lease_id}", method="GET") >= 30
    )


def test_the_format_is_the_one_that_is_asked_for(scene: DaemonProcess) -> None:
    text, openmetrics = "text/plain; version=0.0.4; charset=utf-8", f"{OPENMETRICS}; charset=utf-8"
    prometheus = f"{OPENMETRICS};q=0.5,application/openmetrics-text;version=0.0.1;q=0.4,text/plain;version=0.0.4;q=0.3"
    for accept, wanted in (
        ("", text),
        ("*/*", text),
        ("text/plain", text),
        (f"{OPENMETRICS};q=0.1,text/plain;q=0.9", text),
        ("application/openmetrics-text;q=0", text),
        ("application/openmetrics-text;version=vvv;q=x", text),
        (OPENMETRICS, openmetrics),
        (prometheus, openmetrics),
    ):
        answer = scene.call("GET", "/metrics", Accept=accept)
        assert (answer.status, answer.headers["content-type"]) == (200, wanted), accept
    plain, exact = steady(scene), steady(scene, openmetrics=True)
    assert exact.text.endswith("# EOF\n")
    assert plain.value("gpulease_gpus", state="leased") == exact.value("gpulease_gpus", state="leased") == 2
    assert plain.names() == exact.names()
    packed = scene.call("GET", "/metrics", **{"Accept-Encoding": "gzip"})
    assert packed.headers["content-encoding"] == "gzip"
    assert Scrape(gzip.decompress(packed.content).decode()).value("gpulease_queue_length") == 1


def test_openapi_names_both_media_types(scene: DaemonProcess) -> None:
    operation = scene.call("GET", "/openapi.json").json["paths"]["/metrics"]["get"]
    assert set(operation["responses"]["200"]["content"]) == {"text/plain", "application/openmetrics-text"}


def test_grants_and_ends_are_counted_a_restart_counts_again_and_a_pause_is_seen(tmp_path: Path) -> None:
    with daemon(tmp_path, "--simulate", "2", "--node", "n1") as running:
        for _ in range(3):
            lease = running.call("POST", "/v1/leases?wait_s=30", {"count": 2, "ttl_s": 3600}).json
            assert lease["state"] == "active", lease
            running.call("POST", f"/v1/leases/{lease['id']}/release", {"token": lease["token"]})
        held = running.call("POST", "/v1/leases?wait_s=30", {"count": 2, "ttl_s": 3600}).json
        waits = running.call("POST", "/v1/leases", {"count": 1, "ttl_s": 3600}).json
        running.call("POST", f"/v1/leases/{waits['id']}/release", {"token": waits["token"]})
        told = scrape(running)
        assert told.value("gpulease_leases_granted_total") == told.value("gpulease_lease_wait_seconds_count") == 4
        ended = {reason: count for reason, count in told.by("reason", "gpulease_leases_ended_total").items() if count}
        assert ended == {"released": 3, "cancelled": 1}
        assert told.value("gpulease_grant_latency_seconds_count") <= 4, "those that had to wait are not among them"

        running.kill()
        running.start()
        told = scrape(running)
        assert told.value("gpulease_leases_granted_total") == 0
        assert told.value("gpulease_leases", state="active", user=held["holder"]["user"]) == 1
        assert len(told.by("uuid", "gpulease_gpu_holder")) == 2
        uptime_s = time.time() - told.value("process_start_time_seconds")
        assert told.value("gpulease_gpu_held_seconds_total") <= 2 * uptime_s + 5

        running.call("POST", f"/v1/leases/{held['id']}/release", {"token": held["token"]})
        eventually(lambda: states(running) == ["free"] * 2, WITHIN_S, running.story)
        assert running.call("POST", "/v1/nodes/n1/pause").status == 200
        eventually(
            lambda: (
                "closed" in running.call("GET", "/v1/nodes/n1").json["reason"]
                and scrape(running).value("gpulease_gpus", state="unknown") == 2
            ),
            WITHIN_S,
            running.story,
        )
        told = scrape(running)
        assert told.value("gpulease_node_ready", node="n1") == 0
        assert told.value("gpulease_node_mode", node="n1", mode="paused") == 1
        assert told.value("gpulease_ready") == 0
        assert told.by("uuid", "gpulease_gpu_foreign_processes") == {}
        assert len(told.by("uuid", "gpulease_gpu_info")) == 2
