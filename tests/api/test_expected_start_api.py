"""When a waiting request starts, over plain HTTP."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from tests.api.test_leases_api import ask
from tests.daemon import PATIENT, DaemonProcess, eventually

pytestmark = pytest.mark.usefixtures("each_way")


def _in_s(answer: Any, to: str = "expected_at") -> float:
    at = datetime.fromisoformat(answer[to].replace("Z", "+00:00"))
    return (at - datetime.now(UTC)).total_seconds()


def test_a_waiting_request_says_when_it_starts_by_declared_times(api: DaemonProcess) -> None:
    ask(api, {"count": 4, "time_s": 3600})
    first, second = (ask(api, {"count": 4, "time_s": 60, "queue": True}).json for _ in range(2))
    assert first["expected_at"] is None, "nothing is computed while a request is made"
    shown = [api.call("GET", f"/v1/leases/{lease['id']}").json for lease in (first, second)]
    assert [lease["expected_basis"] for lease in shown] == ["declared"] * 2
    assert 3570 < _in_s(shown[0]) <= 3601
    assert 3630 < _in_s(shown[1]) <= 3661
    listed = {lease["id"]: lease for lease in api.call("GET", "/v1/leases").json["items"]}
    assert listed[first["id"]]["expected_at"] == shown[0]["expected_at"]
    explained = api.call("GET", f"/v1/leases/{second['id']}/explain").json
    assert (explained["expected_at"], explained["expected_basis"]) == (shown[1]["expected_at"], "declared")
    at = shown[1]["expected_at"].replace("T", " ").replace("Z", " UTC")
    assert (
        f"It starts at about {at} if every lease lasts as long as was declared and no newer request passes."
        in explained["sentence"]
    )


def test_a_start_that_an_unknown_end_decides_is_not_said(api: DaemonProcess) -> None:
    ask(api, {"count": 3})
    holder = ask(api, {"count": 1, "time_s": 600}).json
    one, two = (ask(api, {"count": count, "queue": True}).json["id"] for count in (1, 2))
    assert api.call("GET", f"/v1/leases/{one}").json["expected_basis"] == "declared"
    explained = api.call("GET", f"/v1/leases/{two}/explain").json
    assert explained["expected_at"] is None
    assert explained["expected_basis"] != "declared"
    assert "It starts" not in explained["sentence"]
    active = api.call("GET", f"/v1/leases/{holder['id']}").json
    assert active["expected_at"] is None


def test_a_restart_keeps_what_is_expected(tmp_path: Path) -> None:
    hardware = tmp_path / "hardware.json"
    hardware.write_text('{"gpus": [{"uuid": "GPU-00000000-0000-0000-0000-000000000000"}]}')
    running = DaemonProcess(tmp_path / "d", "--simulate", str(hardware), "--node", "n1", environment=PATIENT)
    try:
        running.start()
        ask(running, {"count": 1, "time_s": 3600, "ttl_s": 3600})
        waiting = ask(running, {"count": 1, "queue": True, "ttl_s": 3600}).json["id"]
        before = running.call("GET", f"/v1/leases/{waiting}").json
        running.stop()
        running.start()

        def is_kept() -> bool:
            after = running.call("GET", f"/v1/leases/{waiting}").json
            return after["expected_basis"] == "declared" and abs(_in_s(after) - _in_s(before)) < 30

        assert before["expected_basis"] == "declared"
        eventually(is_kept, 30)
    finally:
        running.stop()
