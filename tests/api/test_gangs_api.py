"""Gangs over HTTP: the same by the hot path and by the application."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpulease_protocol.codec import to_body
from gpulease_protocol.node_protocol import NodeReport
from tests.api.test_hot_path import same
from tests.api.two_ways import ADA, EVE, ROOT, Side
from tests.core.build import gpu, uuid


async def report(side: Side, name: str, address: str | None, gpus: int = 2) -> None:
    """A node shows its GPUs clean, as its worker would."""
    ticket = None
    for _ in range(2):
        side.clock.passed_s += 0.01
        view = NodeReport(
            worker_id=f"w-{name}",
            host=name,
            address=address,
            interface="eth0",
            gpus=tuple(gpu(index, name) for index in range(gpus)),
            ticket=ticket,
        )
        answer = await side.send("POST", f"/v1/nodes/{name}/exchange", to_body(view) | {"hold_s": 0})
        assert answer.status == 200, answer.body
        ticket = answer.json["ticket"]


def test_the_life_of_a_gang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def conversation(side: Side) -> None:
        await report(side, "b", "10.0.0.2")
        await report(side, "c", "10.0.0.3")
        made = await side.send("POST", "/v1/leases", {"count": 2, "nodes": 2}, peer=ADA)
        assert made.status == 201, made.body
        lease = made.json
        assert [(one["rank"], one["node"], one["address"]) for one in lease["members"]] == [
            (0, "b", "10.0.0.2"),
            (1, "c", "10.0.0.3"),
        ]
        assert [one["uuid"] for one in lease["gpus"]] == [uuid(0, "b"), uuid(1, "b"), uuid(0, "c"), uuid(1, "c")]
        assert lease["env"] == lease["members"][0]["env"]
        assert lease["members"][1]["env"]["NODE_RANK"] == "1"
        path, proof = f"/v1/leases/{lease['id']}", {"token": lease["token"]}

        for peer in (ROOT, ADA):
            assert (await side.send("GET", path, peer=peer)).json["members"] == lease["members"]
        shown = (await side.send("GET", path, peer=EVE)).json
        assert [(one["node"], one["env"]) for one in shown["members"]] == [("b", {}), ("c", {})], "env is the holder's"
        (listed,) = (await side.send("GET", "/v1/leases?node=c", peer=EVE)).json["items"]
        assert [one["env"] for one in listed["members"]] == [{}, {}]

        assert (await side.send("POST", f"{path}/renew", proof, peer=ADA)).json["members"] == lease["members"]
        second = (await side.send("POST", "/v1/leases", {"count": 2, "nodes": 2}, peer=ADA)).json
        assert (second["state"], second["members"]) == ("queued", [])
        why = (await side.send("GET", f"/v1/leases/{second['id']}/explain", peer=ADA)).json
        assert "asked for 2 GPUs on each of 2 nodes" in why["sentence"]
        ready = {one["node"]: one["ready"] for one in why["nodes"]}
        assert ready == {"a": False, "b": False, "c": False}, "node a has no address"
        assert (await side.send("POST", f"{path}/release", proof, peer=ADA)).status == 200
        lost = await side.send("POST", f"{path}/renew", proof, peer=ADA)
        assert lost.status == 410
        for name, address in (("b", "10.0.0.2"), ("c", "10.0.0.3")):
            await report(side, name, address)
        granted = (await side.send("GET", f"/v1/leases/{second['id']}", peer=ADA)).json
        assert [one["node"] for one in granted["members"]] == ["b", "c"]

    assert same(tmp_path, monkeypatch, conversation).hot.total() > 10


def test_what_a_gang_cannot_be_is_said_before_it_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def conversation(side: Side) -> None:
        await report(side, "b", "10.0.0.2")
        for body, field in (
            ({"nodes": 0}, "nodes: must be 1 to 256"),
            ({"nodes": 2, "devices": "auto"}, "devices: with nodes over 1 must be a count"),
            ({"nodes": 2, "node": "b"}, "nodes: cannot be over 1 with node"),
            ({"nodes": "two"}, "nodes"),
        ):
            refused = await side.send("POST", "/v1/leases", body)
            assert (refused.status, refused.json["code"]) == (422, "invalid_request")
            assert field in refused.json["detail"]
        never = await side.send("POST", "/v1/leases", {"nodes": 3, "count": 2})
        assert (never.status, never.json["code"]) == (422, "never_fits")
        assert "No 3 nodes have 2 GPUs like that each; 2 nodes have." in never.json["detail"]
        fits = await side.send("POST", "/v1/leases/explain", {"nodes": 2, "count": 2})
        assert fits.json["verdict"] == "not_now", "node a has no address"
        await report(side, "c", "10.0.0.3")
        fits = await side.send("POST", "/v1/leases/explain", {"nodes": 2, "count": 2})
        assert fits.json["sentence"].startswith("Fits now: GPUs 0, 1 of b; GPUs 0, 1 of c.")

    same(tmp_path, monkeypatch, conversation)
