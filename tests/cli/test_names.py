"""Jobs, arrays and leases by id, by its beginning, and by the name of an own job; several at once; what has no log."""

from __future__ import annotations

import getpass
import json
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from gpulease import Client, JobRequest, JobState
from gpulease_cli import names
from gpulease_cli.commands.job_list import Filter, _fetch
from gpulease_protocol.errors import InvalidRequest, NotFound
from gpulease_protocol.model import Job, Launcher, Page
from gpulease_protocol.requests import ArrayRequest, LeaseRequest
from gpulease_protocol.tokens import Role
from tests.cli.programs import Program

NOW = datetime.now(UTC)


def job(digits: str, name: str = "", **more: Any) -> Job:
    return Job(
        **{
            "id": f"job-{digits:0<16}",
            "name": name,
            "state": JobState.RUNNING,
            "lease_id": f"lease-{digits:0<16}",
            "user": "ada",
            "launcher": Launcher.PLAIN,
            "command": ("x",),
            "created_at": NOW,
        }
        | more
    )


def ended(one: Job) -> Job:
    return replace(one, state=JobState.SUCCEEDED, ended_at=NOW)


class Daemon:
    """Answers about these jobs, newest first, and counts the requests."""

    def __init__(self, *jobs: Job, role: Role = Role.USER) -> None:
        self.known, self.role, self.requests = jobs, role, 0

    def me(self) -> Any:
        self.requests += 1
        return SimpleNamespace(user="ada", role=self.role)

    def send(self, call: Any) -> Page[Any]:
        self.requests += 1
        asked = dict(call.query)
        prefix = asked.get("id_prefix", "")
        found = [
            one for one in self.known if prefix in (one.array_id or "")[: len(prefix)] or one.id.startswith(prefix)
        ]
        found = [one for one in found if asked.get("name", one.name) == one.name]
        if call.path == "/v1/leases":
            leases = [
                SimpleNamespace(id=one.lease_id, job_id=one.id, holder=SimpleNamespace(label="")) for one in self.known
            ]
            return Page(items=tuple(lease for lease in leases if lease.id.startswith(prefix)))
        states = {value for name, value in call.query if name == "state"}
        found = [
            one for one in found if asked.get("user", one.user) == one.user and (not states or one.state in states)
        ]
        limit = int(asked.get("limit", 1000))
        return Page(items=tuple(found[:limit]), next="more" if len(found) > limit else None)

    def jobs(self, states: Any = (), *, array: str | None = None, **_: Any) -> tuple[Job, ...]:
        self.requests += 1
        return tuple(one for one in self.known if one.array_id == array)

    def job(self, job_id: str) -> Job:
        self.requests += 1
        return next(one for one in self.known if one.id == job_id)


def sweep(array: str = "array-" + "a" * 16, count: int = 3) -> list[Job]:
    return [job(f"{index}f", "sweep", array_id=array, array_index=index) for index in range(count)][::-1]


@pytest.mark.parametrize(
    ("word", "kind", "found"),
    [
        ("job-82c4", "job", "job-82c4000000000000"),
        ("82c4", "job", "job-82c4000000000000"),
        ("job-8", "job", "job-82c4000000000000"),
        ("lease-82c4", "lease", "lease-82c4000000000000"),
        ("resnet", "job", "job-82c4000000000000"),
        ("sweep", "array", "array-aaaaaaaaaaaaaaaa"),
        ("array-aa", "array", "array-aaaaaaaaaaaaaaaa"),
        ("sweep[2]", "job", "job-2f00000000000000"),
        ("array-aa[0]", "job", "job-0f00000000000000"),
    ],
)
def test_a_word_means_one_job_array_or_lease(word: str, kind: str, found: str) -> None:
    daemon = Daemon(job("82c4", "resnet"), *sweep())
    match = names.find(daemon, word, names.LEASES_TOO)  # type: ignore[arg-type]
    assert (match.kind, match.id) == (kind, found)
    assert daemon.requests <= 5


def test_a_full_id_costs_no_request() -> None:
    daemon = Daemon()
    assert names.find(daemon, "job-82c4b92c1f47e880").kind == "job"  # type: ignore[arg-type]
    assert daemon.requests == 0


def test_several_ids_with_one_beginning_are_listed() -> None:
    daemon = Daemon(job("82c4", "resnet"), job("82d5"))
    with pytest.raises(InvalidRequest, match=r"job-82c4000000000000 \(resnet\), job-82d5000000000000"):
        names.find(daemon, "job-82")  # type: ignore[arg-type]


def test_of_one_name_the_newest_that_lives_is_meant_and_to_end_it_it_must_be_the_only_one() -> None:
    old, newer = job("1", "resnet"), ended(job("2", "resnet"))
    assert names.find(Daemon(newer, old), "resnet").id == old.id  # type: ignore[arg-type]
    assert names.find(Daemon(newer, ended(old)), "resnet").id == newer.id  # type: ignore[arg-type]
    two = Daemon(job("3", "resnet"), old)
    assert names.find(two, "resnet").id == "job-3000000000000000"  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match=r"job-3000000000000000.*job-1000000000000000"):
        names.find(two, "resnet", single=True)  # type: ignore[arg-type]


def test_the_name_of_another_users_job_is_not_found() -> None:
    with pytest.raises(NotFound, match="ada has no job of this name"):
        names.find(Daemon(job("1", "resnet", user="bob")), "resnet")  # type: ignore[arg-type]


def test_an_administrator_may_name_another_users_job_where_it_is_the_only_one() -> None:
    bobs, eves = job("1", "resnet", user="bob"), job("2", "resnet", user="eve")
    admin = Daemon(bobs, ended(eves), role=Role.ADMIN)
    assert names.find(admin, "resnet").id == bobs.id  # type: ignore[arg-type]
    assert admin.requests <= 5
    own = Daemon(eves, bobs, job("3", "resnet"), role=Role.ADMIN)
    assert names.find(own, "resnet").id == "job-3000000000000000"  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match=r"may be any of job-2.*, job-1"):
        names.find(Daemon(eves, bobs, role=Role.ADMIN), "resnet")  # type: ignore[arg-type]


def test_of_an_array_it_is_said_how_to_name_one_job() -> None:
    with pytest.raises(InvalidRequest, match="is an array of jobs") as raised:
        names.find_job(Daemon(*sweep()), "sweep")  # type: ignore[arg-type]
    assert "sweep[INDEX]" in (raised.value.remedy or "")


def test_jobs_of_former_days_are_left_out_unless_they_live() -> None:
    midnight = NOW.astimezone().replace(hour=0, minute=0, second=0, microsecond=0)
    today = replace(ended(job("1")), ended_at=midnight)
    yesterday = replace(today, id="job-2000000000000000", ended_at=midnight - timedelta(milliseconds=1))
    lives = job("3", created_at=NOW - timedelta(days=9))
    for limit in (2, 50):  # with 2 it is on a later page
        which = Filter((), None, None, limit, today=True)
        page, older = _fetch(Daemon(today, yesterday, lives), which, midnight)  # type: ignore[arg-type]
        assert [one.id for one in page.items] == [today.id, lives.id]
        assert older
    which = Filter((), None, None, 50, today=False)
    page, older = _fetch(Daemon(today, yesterday), which, midnight)  # type: ignore[arg-type]
    assert (len(page.items), older) == (2, False)


@pytest.fixture
def held(client: Client) -> Iterator[Client]:
    """A client, while another lease holds every GPU."""
    with client.lease(4, wait_s=60, label="everything"):
        yield client
        for one in client.jobs("queued"):
            client.cancel_job(one.id)


def submit(client: Client, *command: str, **more: Any) -> Job:
    return client.submit(JobRequest(command=list(command), launcher="plain", **more))


def test_commands_take_beginnings_and_names(held: Client, gpulease: Program) -> None:
    named = submit(held, "true", name="by-name")
    array = submit(held, "true", name="many", array=ArrayRequest(indices="0-2"))
    shown = gpulease("show", "by-name").stdout
    assert named.id in shown
    assert "in the way" in shown
    assert "everything" in gpulease("explain", named.id[:10]).stdout
    assert "waits, so it has no log yet" in gpulease("logs", "by-name").stderr
    assert "waits, so it has no log yet" in gpulease("logs", "many[1]").stderr
    assert "3: 3 queued" in gpulease("show", "many").stdout
    refused = gpulease("metrics", array.array_id or "")
    assert (refused.returncode, f"{array.array_id}[INDEX]" in refused.stderr) == (2, True)
    queue = gpulease("queue").stdout
    assert "job by-name" in queue
    listed = json.loads(gpulease("queue", "--json").stdout)["items"]
    assert [lease["position"] for lease in listed] == [1, 2, 3, 4]


def test_several_are_cancelled_at_once(held: Client, gpulease: Program) -> None:
    first, second, third = (submit(held, "true", name=name) for name in ("a-job", "b-job", "c-job"))
    ended = gpulease("cancel", "a-job", second.id[:12])
    assert ended.stdout.splitlines() == [f"{one.id} is cancelled" for one in (first, second)]
    assert held.job(third.id).state is JobState.QUEUED
    wrong = gpulease("cancel", "c-job", "no-such-job")
    assert (wrong.returncode, held.job(third.id).state) == (1, JobState.QUEUED)
    submit(held, "true", name="c-job")
    assert gpulease("cancel", "c-job").returncode == 2  # which of the two?
    assert len(gpulease("cancel", "--name", "c-job").stdout.splitlines()) == 2
    submit(held, "true")
    assert "is cancelled" in gpulease("cancel", "--mine").stdout
    assert gpulease("cancel", "--mine").stdout == "you have no job to cancel\n"


@pytest.mark.parametrize("words", [("",), ("--name", ""), ("--yes", "--name", "")])
def test_a_variable_that_is_unset_cancels_nothing(client: Client, gpulease: Program, words: tuple[str, ...]) -> None:
    unnamed = client.submit(JobRequest(command=["sleep", "600"], launcher="plain"))
    try:
        refused = gpulease("cancel", *words)
        assert refused.returncode == 2, refused.stdout
        assert "is unset?" in refused.stderr
        assert client.job(unnamed.id).state in (JobState.QUEUED, JobState.STARTING, JobState.RUNNING)
        for command in (("wait", ""), ("logs", ""), ("release", ""), ("submit", "--after", "any:", "--", "true")):
            assert gpulease(*command).returncode == 2
    finally:
        client.cancel_job(unnamed.id, 0)


@pytest.mark.parametrize(
    "words",
    [
        ("events", "--lease="), ("events", "--kind="), ("timeline", "--node="), ("jobs", "-u", ""),
        ("usage", "--user="), ("run", "--node=", "--", "true"), ("acquire", "--model="),
        ("submit", "--model=", "--", "true"),
    ],
)  # fmt: skip
def test_a_variable_that_is_unset_is_no_option_that_was_left_out(gpulease: Program, words: tuple[str, ...]) -> None:
    """It would show the events of everyone, and take a GPU of any model."""
    refused = gpulease(*words)
    assert refused.returncode == 2, refused.stdout
    option = next(word for word in words if word.startswith("-")).rstrip("=")
    assert f"{option}: must not be empty" in refused.stderr.replace("-u/--user", "-u")


def test_explain_of_a_variable_that_is_unset_is_not_of_the_shells_own_lease(client: Client, gpulease: Program) -> None:
    lease = client.request_lease(LeaseRequest(count=1, queue=False))
    try:
        refused = gpulease("explain", "", GPULEASE_LEASE_ID=lease.id)
        assert (refused.returncode, refused.stdout) == (2, "")
        assert "is unset?" in refused.stderr
    finally:
        client.release(lease.id, lease.fencing_token)


def test_several_are_waited_for_and_the_first_failure_counts(client: Client, gpulease: Program) -> None:
    good, bad = submit(client, "true", name="good"), submit(client, "sh", "-c", "exit 7", name="bad")
    waited = gpulease("wait", good.id, "bad")
    assert waited.returncode == 7, waited.stderr
    assert bad.id in waited.stderr


def test_a_job_without_output_says_why_and_where_its_log_is(client: Client, gpulease: Program) -> None:
    silent = submit(client, "true")
    never = submit(client, "/no/such/program")
    for one in (silent, never):
        client.wait_job(one.id, 60)
    shown = gpulease("logs", silent.id)
    assert (shown.returncode, shown.stdout) == (0, "")
    assert f"{client.job(silent.id).log_directory}" in shown.stderr
    assert "/no/such/program" in gpulease("logs", never.id).stderr
    spoken = submit(client, "sh", "-c", "echo one; echo two")
    client.wait_job(spoken.id, 60)
    last = gpulease("logs", "-n", "1", spoken.id)
    assert (last.stdout, last.stderr) == ("two\n", "")


def test_a_gpu_and_a_node_are_shown_and_usage_is_summed(client: Client, gpulease: Program) -> None:
    with client.lease(1, wait_s=60, label="shown"):
        (gpu,) = (gpu for gpu in client.gpus() if gpu.state == "leased")
        by_uuid, by_index = (gpulease("show", word).stdout for word in (gpu.uuid[:10], str(gpu.index)))
        assert "(shown)" in by_uuid
        assert gpu.uuid in by_index
        assert gpu.uuid in gpulease("gpu", "list").stdout
        assert "simulated" in gpulease("show", gpu.node).stdout
        used = gpulease("usage", "--since", "1h", "--by", "label").stdout
        assert "shown" in used
    assert getpass.getuser() in gpulease("usage", "--user", getpass.getuser()).stdout
    assert gpulease("show", "no-such-thing").returncode == 1


def test_a_gpu_of_a_job_is_shown_with_the_job_and_its_time_limit(client: Client, gpulease: Program) -> None:
    job = submit(client, "sleep", "60", name="limited", timeout_s=1800.0)
    running = client.wait_job(job.id, 60, until=lambda one: one.state is JobState.RUNNING)
    shown = gpulease("show", running.gpus[0].uuid).stdout
    client.cancel_job(job.id, 0.0)
    assert "job limited" in shown
    assert "until" in shown
    assert "in at most 29m " in shown
