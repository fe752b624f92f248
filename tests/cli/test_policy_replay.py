"""`gpulease policy replay` on traces: its tables, its JSON, its picture, and where the present policy comes from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.programs import environ
from tests.imported_program import completed

# ann asks for six hours of two GPUs; bob comes later, with a minute's work.
TRACE = """asked_at_s,user,count,duration_s
0,ann,1,3600
1,ann,1,3600
2,ann,1,3600
3,ann,1,3600
4,ann,1,3600
5,ann,1,3600
100,bob,1,60
"""


@pytest.fixture
def trace(tmp_path: Path) -> str:
    file = tmp_path / "trace.csv"
    file.write_text(TRACE)
    return str(file)


def gpulease(*arguments: str, **environment: str) -> Any:
    return completed(arguments, environ() | environment, timeout_s=60)


def replay(trace: str, *options: str, **environment: str) -> dict[str, Any]:
    """What `--json` prints."""
    ran = gpulease("policy", "replay", "--trace", trace, "--gpus", "1x2", "--json", *options, **environment)
    assert ran.returncode == 0, ran.stderr
    found: dict[str, Any] = json.loads(ran.stdout)
    return found


def wait_of(user: str, outcome: dict[str, Any]) -> float:
    (found,) = (one["wait_mean_s"] for one in outcome["users"] if one["user"] == user)
    return float(found)


def test_two_policies_stand_side_by_side_in_eighty_columns(trace: str) -> None:
    ran = gpulease("policy", "replay", "--trace", trace, "--gpus", "1x2", "--fair-share", "--plot")

    assert ran.returncode == 0, ran.stderr
    lines = ran.stdout.splitlines()
    assert lines[0] == "7 requests of 2 users in 3h 01m, on 2 GPUs of 1 node."
    assert lines[1] == "Tried: --fair-share"
    assert max(map(len, lines)) <= 80
    (bob,) = (line.split() for line in lines if line.startswith("bob"))
    assert bob[:7] == ["bob", "1", "0.0", "2h", "58m", "58m", "20s"]
    assert [line.split(":")[0] for line in lines if line.startswith("Requests waiting")] == [
        "Requests waiting, now",
        "Requests waiting, tried",
    ]


def test_json_has_both_outcomes_and_nothing_is_tried_without_options(trace: str) -> None:
    alone, both = replay(trace), replay(trace, "--fair-share")

    assert alone["tried"] is None
    assert (both["nodes"], both["gpus"], both["recorded"]) == (1, 2, None)
    assert both["now"] == alone["now"]
    assert wait_of("bob", both["now"]) == pytest.approx(3 * 3600 - 100, abs=10)
    assert wait_of("bob", both["tried"]) == pytest.approx(3600 - 100, abs=10)
    assert both["now"]["gpu_hours_held"] == pytest.approx(6 + 1 / 60, abs=0.001)


def test_what_is_refused_is_said_with_its_code(trace: str) -> None:
    options = ("--trace", trace, "--gpus", "1x2", "--max-queue-per-user", "1")
    ran = gpulease("policy", "replay", *options)

    lines = ran.stdout.splitlines()
    assert "Tried: --max-queue-per-user 1" in lines
    assert "Refused tried: over_quota 3" in lines
    assert [line.split() for line in lines if line.startswith("refused")] == [["refused", "0", "3"]]


def test_the_present_policy_is_that_of_file_and_environment(trace: str, tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text("[serve]\nfair_share = true\n")

    from_file = replay(trace, GPULEASE_CONFIG=str(file))
    from_variable = replay(trace, "--no-fair-share", GPULEASE_FAIR_SHARE="1")

    assert from_file["tried"] is None
    assert wait_of("bob", from_file["now"]) == wait_of("bob", from_variable["now"]) < 3600
    assert wait_of("bob", from_variable["tried"]) > 10_000


def test_a_user_may_be_tried_with_another_priority(trace: str) -> None:
    found = replay(trace, "--as", "ann=scavenge")

    assert wait_of("bob", found["now"]) > 10_000
    assert wait_of("bob", found["tried"]) < 3600


def test_limits_of_a_file_may_be_tried(trace: str, tmp_path: Path) -> None:
    file = tmp_path / "limits.json"
    file.write_text('{"items": [{"kind": "group", "name": "all", "members": ["ann"], "max_gpus": 1}]}')

    found = replay(trace, "--limits", str(file))

    assert wait_of("bob", found["now"]) > 10_000
    assert wait_of("bob", found["tried"]) < 1  # ann has one of the two GPUs
    ran = gpulease("policy", "replay", "--trace", trace, "--gpus", "1x2", "--limits", str(file))
    assert f"Tried: --limits {file}" in ran.stdout.splitlines()


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (("--trace", "none.csv", "--gpus", "1x2"), "none.csv: No such file"),
        (("--trace", "none.csv"), "a trace does not say which GPUs there are"),
        (("--gpus", "two"), "'two' is not NODESxGPUS"),
        (("--as", "ann=urgent"), "'ann=urgent' is not USER=PRIORITY"),
        (("--preemption",), "there is no option --preemption"),
        (("--max-overtakes", "0"), "must be 1 to"),
        (("--data-dir", "nowhere"), "nowhere/gpulease.db does not exist"),
        (("--since", "2h", "--until", "3h"), "must be before now and before --until"),
    ],
    ids=" ".join,
)
def test_what_cannot_be_replayed_is_said(tmp_path: Path, options: tuple[str, ...], why: str) -> None:
    ran = gpulease("policy", "replay", *options, HOME=str(tmp_path))

    assert ran.returncode in (1, 2)
    assert why in " ".join(ran.stderr.split())
    assert "Traceback" not in ran.stderr


def test_a_trace_that_no_node_can_serve_says_so(tmp_path: Path) -> None:
    file = tmp_path / "trace.csv"
    file.write_text("asked_at_s,user,count,duration_s\n0,ann,9,10\n")

    ran = gpulease("policy", "replay", "--trace", str(file), "--gpus", "2x4")

    assert ran.returncode == 2
    assert "None of the 1 requests can be granted" in ran.stderr
