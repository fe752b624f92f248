"""Requests for GPUs on several nodes: what they mean, and what is refused before it is sent."""

from __future__ import annotations

from typing import Any

import pytest

from gpulease_protocol.codec import from_json, to_body, to_json
from gpulease_protocol.model import Demand
from gpulease_protocol.requests import JobRequest, LeaseRequest


def test_a_request_asks_for_so_many_gpus_on_each_of_so_many_nodes() -> None:
    assert LeaseRequest(nodes=3, count=4).demand() == Demand(nodes=3, count=4)
    assert LeaseRequest(nodes=3, devices="4").demand() == Demand(nodes=3, count=4)
    assert LeaseRequest(nodes=2).demand() == Demand(nodes=2, count=1)
    job = JobRequest(command=["train.py"], nodes=3, gpus=4)
    assert (job.demand(), job.spec().nodes, job.spec().gpus) == (Demand(nodes=3, count=4), 3, 4)


def test_a_request_for_one_node_says_nothing_of_nodes_to_an_older_daemon() -> None:
    assert to_body(LeaseRequest(count=2)) == {"count": 2}
    assert to_body(LeaseRequest(nodes=2, count=2)) == {"nodes": 2, "count": 2}


def test_a_demand_of_an_older_daemon_is_for_one_node() -> None:
    older = {name: value for name, value in to_json(Demand(count=2)).items() if name != "nodes"}
    assert from_json(Demand, older) == Demand(count=2, nodes=1)


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"nodes": 0}, "nodes: must be 1 to 256, not 0"),
        ({"nodes": 257}, "nodes: must be 1 to 256, not 257"),
        ({"nodes": 2, "devices": -1}, "devices: with nodes over 1 must be a count"),
        ({"nodes": 2, "devices": "auto"}, "devices: with nodes over 1 must be a count"),
        ({"nodes": 2, "devices": [0, 1]}, "devices: with nodes over 1 must be a count"),
        ({"nodes": 2, "node": "n1"}, "nodes: cannot be over 1 with node"),
        ({"nodes": 256, "count": 17}, "nodes: 256 nodes with 17 GPUs each are over 4096"),
        (
            {"nodes": 2, "adopt": True, "owner_pid": 7},
            "adopt: takes the GPUs that the process uses, so leave out nodes",
        ),
    ],
)
def test_a_request_that_means_nothing_on_several_nodes_is_refused(fields: dict[str, Any], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        LeaseRequest(**fields)


def test_a_job_on_several_nodes_names_no_node() -> None:
    with pytest.raises(ValueError, match="nodes: cannot be over 1 with node"):
        JobRequest(command=["train.py"], nodes=2, node="n1")


def test_an_elastic_job_asks_for_a_range_of_nodes() -> None:
    job = JobRequest(command=["train.py"], nodes=2, max_nodes=4, gpus=8)
    assert (job.demand().nodes, job.demand().max_nodes, job.spec().max_nodes) == (2, 4, 4)
    assert to_body(job)["max_nodes"] == 4
    assert "max_nodes" not in to_body(JobRequest(command=["train.py"], nodes=2)), "an older daemon would refuse it"


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"max_nodes": 3}, "nodes: must be 2 or more with max_nodes"),
        ({"nodes": 3, "max_nodes": 2}, "max_nodes: must be at least nodes, which is 3"),
        ({"nodes": 2, "max_nodes": 257}, "max_nodes: must be 2 to 256, not 257"),
        ({"nodes": 2, "max_nodes": 256, "gpus": 17}, "max_nodes: 256 nodes with 17 GPUs each are over 4096"),
        ({"nodes": 2, "max_nodes": 3, "launcher": "accelerate"}, "max_nodes: only torchrun can run on a number of"),
        ({"nodes": 2, "max_nodes": 3, "max_restarts": 1}, "max_restarts: must be 0 with nodes over 1"),
    ],
)
def test_an_elastic_job_that_means_nothing_is_refused(fields: dict[str, Any], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        JobRequest(command=["train.py"], **fields)
