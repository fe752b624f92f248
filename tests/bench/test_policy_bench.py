"""`python -m bench.policy`: the readers of traces, the small models, and the core beside them on Tiresias' 60 jobs."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.policy import traces
from bench.policy.__main__ import main
from bench.policy.comparison import ORACLES, POLICIES, Workload, results
from bench.policy.small_models import Nodes, by_arrival, by_duration, erlang_wait_s, schedule, two_queues
from bench.policy.validation import checks
from gpulease_protocol.model import Demand
from gpulease_server.replay.recorded_requests import RecordedRequest, uniform_nodes


def job(name: str, at_s: float, duration_s: float, count: int = 1, nodes: int = 1) -> RecordedRequest:
    return RecordedRequest(id=name, asked_at_s=at_s, duration_s=duration_s, demand=Demand(count=count, nodes=nodes))


def starts(requests: list[RecordedRequest], sizes: list[int], **rule: object) -> dict[str, float | None]:
    chosen = {"order": by_arrival, "greedy": False} | rule
    return {one.request.id: one.granted_at_s for one in schedule(requests, sizes, **chosen)}  # type: ignore[arg-type]


def test_the_core_starts_every_one_of_the_sixty_jobs_when_the_small_model_does() -> None:
    found = list(checks([], poisson_requests=1000))

    beside_model = [check for check in found if "mean completion" in check.what]
    assert len(beside_model) == 10
    assert {check.verdict for check in beside_model} == {"the same start of every job"}


def test_strict_order_waits_for_the_first_and_fit_first_does_not() -> None:
    jobs = [job("a", 0, 100, 2), job("b", 1, 10, 4), job("c", 2, 10, 2)]

    assert starts(jobs, [4]) == {"a": 0, "b": 100, "c": 110}
    assert starts(jobs, [4], greedy=True) == {"a": 0, "b": 100, "c": 2}
    assert starts(jobs, [4, 4], greedy=True) == {"a": 0, "b": 1, "c": 2}


def test_the_shortest_goes_first_for_the_oracle() -> None:
    jobs = [job("a", 0, 100), job("long", 1, 50), job("short", 2, 5)]

    assert starts(jobs, [1], order=by_duration, greedy=True) == {"a": 0, "short": 100, "long": 105}


def test_a_job_takes_the_node_with_the_fewest_free_gpus_and_a_gang_whole_ones() -> None:
    nodes = Nodes([4, 4, 2])

    assert nodes.take(2, 1) == [2]
    assert nodes.take(4, 2) == [0, 1]
    assert nodes.take(1, 1) is None
    nodes.give(4, [0, 1])
    assert nodes.take(3, 1) == [0]
    assert nodes.free == [1, 4, 0]


def test_two_queues_stop_a_long_job_for_a_new_one_and_lose_nothing() -> None:
    long, short = job("long", 0, 20 * 3600.0, 1), job("short", 17 * 3600.0, 600.0, 1)

    assert two_queues([long, short], 1) == [pytest.approx(20 * 3600 + 600), pytest.approx(600)]


def test_erlangs_formula_for_one_server_is_that_of_mm1() -> None:
    assert erlang_wait_s(1, 0.5, 10.0) == pytest.approx(10.0)
    assert erlang_wait_s(2, 0.5, 10.0) == pytest.approx(10 / 3)


def test_traces_are_read_as_their_authors_wrote_them(tmp_path: Path) -> None:
    sixty = traces.tiresias()
    assert (len(sixty), sixty[1].asked_at_s, sixty[1].duration_s, sixty[1].demand.count) == (60, 30.0, 147.0, 8)
    assert len({one.user for one in sixty}) > 3
    workload = tmp_path / "workload-1.csv"
    workload.write_text("name,time,application,num_replicas,batch_size\ncifar10-0,107,cifar10,6,2048\n")
    (one,) = traces.pollux(workload)
    assert (one.asked_at_s, one.duration_s, one.demand.count) == (107.0, 940.0, 6)
    philly = tmp_path / "philly.csv"
    philly.write_text(
        "timestamp,duration,num_gpus,gpu_time,cluster\n"
        "2017-10-09 07:01:55,66.0,1,66.0,b\n2017-10-09 07:01:25,5.0,16,80.0,a\n"
    )
    first, second = traces.philly(str(philly))
    assert (first.user, first.asked_at_s, second.user, second.asked_at_s) == ("a", 0.0, "b", 30.0)
    gang, _ = traces.on_nodes([first, second], uniform_nodes(4, 8))
    assert (gang.demand.count, gang.demand.nodes) == (8, 2)
    gavel = tmp_path / "2869ce.trace"
    gavel.write_text("ResNet-18 (batch size 32)\tcd x && python3 main.py\t--num_steps\t1\t1537674\t251699.000000\t4\n")
    (one,) = traces.gavel([gavel])
    assert (one.user, one.asked_at_s, one.demand.count) == ("2869ce", 251699.0, 4)


def test_only_an_https_address_is_fetched() -> None:
    with pytest.raises(ValueError, match="only https"):
        traces.philly("file:///etc/passwd")


def test_every_policy_and_oracle_serves_every_job() -> None:
    workload = Workload("sixty", traces.tiresias(), 2, 4)

    found = {one.policy: one.outcome for one in results(workload)}

    assert list(found) == [*POLICIES, *ORACLES]
    assert {(one.requests, one.refused, one.never_granted) for one in found.values()} == {(60, 0, 0)}
    assert found["oracle: shortest first"].wait_mean_s < found["strict order (max_bypass 0)"].wait_mean_s


def test_what_is_not_run_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--only-compare", "--only", "tiresias", "--policy", "fit first (no bound)"]) == 0

    printed = capsys.readouterr()
    assert printed.err.splitlines() == [
        f"Not run: {name} (its trace was not given)." for name in ("--pollux", "--philly", "--gavel")
    ]
    assert printed.out.count("\n| fit first") == 1
