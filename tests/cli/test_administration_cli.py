"""`gpulease node` and `gpulease gpu` against a daemon."""

from __future__ import annotations

import getpass
import json
import re
from datetime import timedelta
from pathlib import Path

import pytest

from gpulease import Client, GpuState, LeaseRequest
from gpulease_cli import output
from gpulease_protocol.codec import to_json
from gpulease_protocol.endpoints import ApiCall
from gpulease_protocol.node_protocol import NodeReport
from tests.cli.programs import Program, wait_until
from tests.daemon import USUAL, daemon, eventually, workers_of


def test_pause_returns_once_nvml_is_closed_and_resume_undoes_it(client: Client, gpulease: Program) -> None:
    (node,) = client.nodes()
    try:
        paused = gpulease("node", "pause", node.name)
        assert (paused.returncode, paused.stdout) == (0, f"node {node.name} is paused (paused by an administrator)\n")
        listed = gpulease("node", "list").stdout.split("\n")
        assert listed[0].split()[:4] == ["NODE", "STATE", "MODE", "GPUS"]
        assert listed[1].split()[:4] == [node.name, "unknown", "paused", "4"]
    finally:
        resumed = gpulease("node", "resume", node.name, "--json")
    assert json.loads(resumed.stdout)["mode"] == "active"
    wait_until(lambda: {gpu.state for gpu in client.gpus()} == {GpuState.FREE})


def test_pausing_a_node_in_use_is_refused_with_a_remedy(client: Client, gpulease: Program) -> None:
    (node,) = client.nodes()
    with client.lease(count=1, wait_s=60) as lease:
        refused = gpulease("node", "pause", node.name)
        assert refused.returncode == 1
        said = refused.stderr.strip().split("\n")
        assert said[0] == "gpulease: in use"
        assert lease.id in said[1]
        assert "force" in said[2]
        assert "--force" in said[2]
        drained = gpulease("node", "drain", node.name, "--reason", "till 15:00")
        who = getpass.getuser()
        assert drained.stdout == f"node {node.name} is draining ({who}: till 15:00)\n"
        assert f"{who}: till 15:00" in gpulease("node", "list").stdout
        waits = gpulease("run", "-n", "1", "--", "true").stderr
        assert f"being drained by {who}: till 15:00" in waits
        gpulease("node", "resume", node.name)


def test_a_node_that_is_gone_is_forgotten_and_one_that_reports_is_not(client: Client, gpulease: Program) -> None:
    (here,) = client.nodes()
    refused = gpulease("node", "forget", here.name)
    said = refused.stderr.strip().split("\n")
    assert (refused.returncode, said[0]) == (1, "gpulease: in use")
    assert f"Node {here.name} reports." in said[1]

    report = to_json(NodeReport(worker_id="w", host="h", problem="no driver", hold_s=0.0))
    client.send(ApiCall(method="POST", path="/v1/nodes/n9/exchange", body=report, read=lambda _: None))
    wait_until(lambda: client.node("n9").reason == "node n9 has been silent for over 3 s")
    assert gpulease("node", "forget", "n9").stdout == "node n9 is forgotten, with 0 GPUs\n"
    assert "n9" not in gpulease("node", "list").stdout
    assert gpulease("node", "forget", "n9").returncode == 1


def test_a_gpu_is_cordoned_and_uncordoned(client: Client, gpulease: Program) -> None:
    gpu = client.gpus()[3]
    cordoned = gpulease("gpu", "cordon", gpu.uuid)
    assert cordoned.stdout == f"GPU 3 of {gpu.node} is cordoned by an administrator\n"
    assert gpulease("gpu", "uncordon", gpu.uuid).stdout == f"GPU 3 of {gpu.node} is free\n"
    assert gpulease("gpu", "cordon", "GPU-nothing").returncode == 1


def test_a_gpu_may_be_named_by_uuid_prefix_or_by_node_and_index(client: Client, gpulease: Program) -> None:
    gpus = client.gpus()
    for name in ("2", f"{gpus[2].node}:2", gpus[2].uuid[:12], gpus[2].uuid[4:12], gpus[2].uuid.upper()):
        assert gpulease("gpu", "cordon", name).stdout.startswith("GPU 2 of "), name
        assert gpulease("gpu", "uncordon", name, "--json").returncode == 0
    # A digit is an index, although some UUID begins with it.
    for name in (*"456789", "elsewhere:2", "", "GPU-", "GPU-zzzz"):
        assert gpulease("gpu", "cordon", name).returncode == 1, name
    assert not [gpu for gpu in client.gpus() if gpu.state is GpuState.CORDONED]


def test_doctor_finds_the_daemon_fine_and_exits_1_if_a_check_fails(client: Client, url: str, gpulease: Program) -> None:
    place = url.removeprefix("unix://").removesuffix("/gpulease.sock")
    result = gpulease("doctor", "--json", "--data-dir", place)
    health = {item["check"]: item["health"] for item in json.loads(result.stdout)["items"]}
    assert (health["daemon"], health["socket"], health["clock"]) == ("fine", "fine", "fine")
    assert result.returncode == ("wrong" in health.values())
    *lines, last = gpulease("doctor", "--data-dir", place).stdout.splitlines()
    assert [line.split()[0] for line in lines] == list(health.values())
    assert last.endswith(" wrong")
    assert (health["workers"], health["version"]) == ("fine", "fine")


def test_doctor_says_what_to_do_about_a_node_that_is_silent_or_paused(tmp_path: Path) -> None:
    with daemon(tmp_path, "--simulate", "1", "--node", "box", **USUAL) as running:
        assert running.process is not None
        (worker,) = workers_of(running.process.pid)
        worker.suspend()
        try:
            eventually(lambda: running.get("/readyz").status == 503, within_s=60)
            items = json.loads(running.gpulease("doctor", "--json").stdout)["items"]
        finally:
            worker.resume()
        silent = {item["check"]: item for item in items}
        running.wait_free()
        running.gpulease("node", "pause", "box")
        paused = {item["check"]: item for item in json.loads(running.gpulease("doctor", "--json").stdout)["items"]}
    assert (silent["workers"]["health"], paused["workers"]["health"]) == ("wrong", "fine")
    assert "silent" in silent["workers"]["sentence"]
    assert "gpulease doctor" in silent["workers"]["remedy"]
    assert "gpulease node resume box" in paused["workers"]["sentence"]
    assert silent["daemon"]["sentence"] == paused["daemon"]["sentence"] == "It answers."
    assert "wrong" not in (silent["driver"]["health"], paused["driver"]["health"])  # its GPUs are simulated


def test_a_list_of_nothing_is_a_sentence_and_no_heads_of_a_table(tmp_path: Path) -> None:
    with daemon(tmp_path, "--no-worker") as running:
        for words in ("leases", "leases --all", "limits list", "token list", "reservations list"):
            printed = running.gpulease(*words.split())
            assert (printed.returncode, printed.stdout, printed.stderr[:3]) == (0, "", "No "), printed
        printed = running.gpulease("usage", "--by", "day")
        assert printed.stdout.startswith("\nGPU-hours from "), printed
        assert printed.stderr == "No GPU was leased.\n"


@pytest.mark.parametrize(
    ("user", "role", "said"),
    [
        ("elsewhere", "viewer", ["has no user elsewhere", "this token is revoked"]),
        ("elsewhere", "user", ["has no user elsewhere", "this token is revoked", "until then no worker runs jobs"]),
        ("elsewhere", "worker", []),
        ("nobody", "user", []),
    ],
)
def test_what_becomes_of_a_token_of_an_unknown_user_is_said_when_it_is_made(
    client: Client, gpulease: Program, user: str, role: str, said: list[str]
) -> None:
    made = gpulease("token", "create", "--user", user, "--role", role)
    client.revoke_token(made.stdout.partition(".")[0])
    assert ("has no user" in made.stderr) is bool(said)
    assert "--expires 30d would limit that" in made.stderr
    for words in said:
        assert words in made.stderr


def test_a_token_with_a_budget_gets_no_more_than_that(client: Client, gpulease: Program, url: str) -> None:
    budget = ("--max-gpus", "1", "--max-lease-time", "4h", "--gpu-hours-per-day", "8")
    made = gpulease("token", "create", "--user", "elsewhere", *budget, "--expires", "1d")
    assert "What may be held with it: 1 GPU, 4h 00m a lease, 8 GPU-hours a day." in made.stderr, made.stderr
    bearer = made.stdout.strip()
    assert "1 GPU, 4h 00m a lease, 8 GPU-hours a day" in gpulease("token", "list").stdout
    refused = gpulease("run", "-n", "2", "--", "true", GPULEASE_TOKEN=bearer)
    assert refused.returncode == 125
    assert "may have 1 at a time" in refused.stderr
    with Client(url, bearer) as agent:
        held = agent.request_lease(LeaseRequest(agent="a", session="s"))
        waits = agent.request_lease(LeaseRequest())
    assert (held.holder.agent, held.holder.session, held.holder.token_id) == ("a", "s", bearer.partition(".")[0])
    assert held.granted_at is not None
    assert held.ends_at is not None
    assert timedelta(hours=3.9) < held.ends_at - held.granted_at <= timedelta(hours=4.01)
    assert "its budget is 1 at a time" in gpulease("explain", waits.id).stdout
    assert "a:s" not in gpulease("usage", "--by", "agent").stdout
    assert re.search(r"^a +", gpulease("usage", "--by", "agent").stdout, re.MULTILINE)
    client.revoke_token(bearer.partition(".")[0])
    client.release(waits.id, None)
    client.release(held.id, held.fencing_token)
    wrong = gpulease("token", "create", "--user", "elsewhere", "--role", "viewer", "--max-gpus", "1")
    assert wrong.returncode == output.USAGE, wrong.stderr
    assert "role user" in wrong.stderr


def test_a_token_is_created_listed_used_and_revoked(client: Client, gpulease: Program) -> None:
    made = gpulease(
        "token", "create", "--user", "elsewhere", "--role", "viewer", "--expires", "30d", "--note", "laptop"
    )
    assert made.returncode == 0, made.stderr
    (bearer,) = made.stdout.split()
    assert "it is not shown again" in made.stderr
    assert "by itself" not in made.stderr
    token_id = bearer.partition(".")[0]
    rows = [line.split() for line in gpulease("token", "list").stdout.splitlines()]
    (row,) = [row for row in rows if row[0] == token_id]
    assert row[1:3] == ["elsewhere", "viewer"]
    assert row[-1] == "laptop"
    assert bearer not in gpulease("token", "list", "--json").stdout
    viewer = gpulease("status", GPULEASE_TOKEN=bearer)
    assert viewer.returncode == 0, viewer.stderr
    refused = gpulease("acquire", GPULEASE_TOKEN=bearer)
    assert refused.returncode == 1
    assert "viewer" in refused.stderr
    assert gpulease("token", "revoke", token_id).stdout == f"{token_id} of elsewhere is revoked\n"
    unknown = gpulease("status", GPULEASE_TOKEN=bearer)
    assert unknown.returncode == 1
    assert unknown.stderr.startswith("gpulease: not authenticated\n")
    assert gpulease("token", "revoke", token_id).returncode == 1


def test_everything_that_an_agent_asks_for_bears_its_name(client: Client, gpulease: Program, python: Program) -> None:
    agent = {"GPULEASE_AGENT": "coder", "GPULEASE_SESSION": "s-1"}
    assert gpulease("run", "--wait", "60s", "--", "true", **agent).returncode == 0
    job = gpulease("submit", "--", "true", **agent).stdout.strip()
    assert python("import gpulease\nwith gpulease.usable_cuda_devices(1): pass", **agent).returncode == 0
    held = json.loads(gpulease("acquire", "--wait", "60s", "--detach", "--json", **agent).stdout)
    client.wait_job(job, 60)
    asked = [lease for lease in client.leases("ended") if lease.holder.session == "s-1"]
    assert {lease.job_id for lease in asked} == {None, job}
    assert [lease.holder.agent for lease in asked] == ["coder"] * 3
    assert (held["holder"]["agent"], held["holder"]["session"]) == ("coder", "s-1")
    client.release(held["id"], held["token"])
    refused = gpulease("run", "--", "true", GPULEASE_AGENT="a" * 101)
    assert (refused.returncode, "agent: must be at most 100 characters" in refused.stderr) == (2, True), refused.stderr
