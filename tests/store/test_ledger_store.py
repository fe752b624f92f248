"""What is written is what is read back, all of it or nothing; on either database."""

from __future__ import annotations

from dataclasses import replace

import pytest
from sqlalchemy import event, select, text, update
from sqlalchemy.exc import DataError

from gpulease_protocol.budgets import Budget
from gpulease_protocol.codec import to_json
from gpulease_protocol.limits import LimitKind
from gpulease_protocol.model import EndReason, Event, JobState, LeaseState, Mask, NodeMode, Priority
from gpulease_protocol.node_protocol import JobReport, OwnerState, RunState
from gpulease_server.core.happenings import IdempotencyKey, KeepRequested
from gpulease_server.core.kept_leases import kept_now
from gpulease_server.core.ledger import MAX_ENDED_IN_MEMORY, Ledger
from gpulease_server.core.limit_changes import limit_use
from gpulease_server.core.limit_records import LimitKey
from gpulease_server.core.policy import Policy
from gpulease_server.core.records import Instant
from gpulease_server.core.token_budgets import budget_use
from gpulease_server.core.usage import usage_of
from gpulease_server.runtime import clock
from gpulease_server.runtime.outage import reset_deadlines
from gpulease_server.store import rows, tables
from gpulease_server.store.gpu_metrics_table import leases_of_job
from gpulease_server.store.ledger_store import MAX_PAGE_CHARACTERS, Store, StoreFailed, is_stored
from tests.core.build import World, uuid


@pytest.fixture
def store(database_url: str):
    store = Store(database_url)
    yield store
    store.close()


def test_the_reason_of_an_end_that_a_newer_version_wrote_is_kept(store: Store) -> None:
    world = World().node()
    lease = world.lease()
    world.release(lease)
    save(store, world)
    with store.engine.begin() as connection:
        connection.execute(update(tables.lease).values(end_reason="eaten"))
    kept = store.lease(lease.id)
    assert kept is not None
    assert kept.lease.end_reason == "eaten"
    [loaded] = store.load().leases.values()
    assert to_json(loaded.lease)["end_reason"] == "eaten"


REFUSE = {
    "sqlite": ["CREATE TRIGGER refuse BEFORE INSERT ON event BEGIN SELECT RAISE(ABORT, 'full'); END"],
    "postgresql": [
        "CREATE FUNCTION refuse() RETURNS trigger AS $$ BEGIN RAISE EXCEPTION 'full'; END $$ LANGUAGE plpgsql",
        "CREATE TRIGGER refuse BEFORE INSERT ON event FOR EACH ROW EXECUTE FUNCTION refuse()",
    ],
}


def save(store: Store, world: World) -> None:
    """Write what the world has decided since the last time."""
    store.write([change for change in world.changes if is_stored(change)], world.ledger)
    world.changes.clear()


def lasting(ledger: Ledger) -> dict[str, object]:
    """The parts of a ledger that outlive a restart."""
    names = (
        "leases",
        "jobs",
        "gpus",
        "nodes",
        "keys",
        "queue",
        "watched_owners",
        "unclaimed",
        "usage",
        "next_number",
        "next_token",
        "next_seq",
    )
    return {name: getattr(ledger, name) for name in names}


def busy_world() -> World:
    """Leases in every state, a job, a draining GPU, a cordoned one, a drained node, a key."""
    world = World().node("a", gpus=4).node("b", gpus=2)
    world.lease(2, key=IdempotencyKey(key="k", fingerprint="f"))
    world.release(world.lease(1))
    world.submit(1, umask=0o027, limits={"nofile": (64, -1)}, retries=2)
    world.lease(4)
    world.lease(1, owner=7)
    world.lease(1, ttl_s=0.5, gpu_model="H100")
    world.pass_time(1, silent=("b",))
    world.cordon(1, "b")
    world.set_mode(NodeMode.DRAINING, "b")
    return world


def test_a_ledger_is_read_back_as_it_was(store: Store) -> None:
    world = busy_world()
    save(store, world)
    assert lasting(store.load()) == lasting(world.ledger)


@pytest.mark.parametrize("claimed", [False, True])
def test_a_restart_does_not_claim_a_grant_that_no_one_has_asked_about(store: Store, claimed: bool) -> None:
    """Its owner is a shell or a notebook that lives on: it would hold the GPU for as long as that."""
    before = World().node(gpus=1)
    before.owners[7] = OwnerState.ALIVE
    holder = before.lease(1, ttl_s=1000)
    waiter = before.lease(1, owner=7, ttl_s=5)
    before.release(holder)
    before.report()
    assert before.now_of(waiter).state is LeaseState.ACTIVE
    if claimed:
        before.renew(before.now_of(waiter))
    save(store, before)
    world = World(ledger=store.load(), nodes=before.nodes, at_s=before.at_s, owners=before.owners)
    reset_deadlines(world.ledger, world.now)
    world.pass_time(4)
    assert world.now_of(waiter).state is LeaseState.ACTIVE, "a full ttl from the restart on"
    world.pass_time(60)
    assert world.now_of(waiter).end_reason is (None if claimed else EndReason.EXPIRED)


def test_turn_after_turn_is_read_back(store: Store) -> None:
    world = World().node(gpus=2)
    for _ in range(5):
        lease = world.lease(2)
        save(store, world)
        world.release(lease)
        save(store, world)
        world.report()
        save(store, world)
    assert lasting(store.load()) == lasting(world.ledger)


def test_of_a_lease_that_is_only_renewed_nothing_else_is_written(store: Store) -> None:
    world = World().node(gpus=2)
    lease, other = world.lease(1), world.lease(1, ttl_s=1000)
    save(store, world)
    texts: list[str] = []
    event.listen(store.engine, "before_cursor_execute", lambda *given: texts.append(given[2]))
    for _ in range(3):
        world.pass_time(1)
        world.renew(lease)
        world.renew(other)
        save(store, world)
        assert lasting(store.load()) == lasting(world.ledger)
        world.renew(lease)
        save(store, world)  # the first one after a restart writes all of it
        texts.clear()
        world.pass_time(1)
        world.renew(lease)
        save(store, world)
        assert not [text for text in texts if text.startswith("INSERT INTO lease ")]
        assert lasting(store.load()) == lasting(world.ledger)
    world.renew(lease)
    world.release(lease)
    save(store, world)
    assert lasting(store.load()) == lasting(world.ledger)


def test_of_a_lease_that_has_ended_only_the_end_is_written(store: Store) -> None:
    world = World().node(gpus=4)
    released, expired, renewed, watched = world.lease(1), world.lease(1, ttl_s=1), world.lease(1), world.lease(owner=7)
    save(store, world)
    texts: list[str] = []
    event.listen(store.engine, "before_cursor_execute", lambda *given: texts.append(given[2]))
    world.release(released)
    world.pass_time(2)
    world.owners[7] = OwnerState.GONE
    world.report()
    save(store, world)
    assert not [text for text in texts if text.startswith("INSERT INTO lease ")]
    assert lasting(store.load()) == lasting(world.ledger)
    world.renew(expired)  # which revives it
    world.renew(renewed)
    world.release(renewed)
    save(store, world)
    loaded = store.load()
    assert lasting(loaded) == lasting(world.ledger)
    ends = {one.id: loaded.leases[one.id].lease.end_reason for one in (released, expired, renewed, watched)}
    assert list(ends.values()) == [EndReason.RELEASED, None, EndReason.RELEASED, EndReason.HOLDER_DIED]


@pytest.mark.parametrize("ends", [False, True])
def test_a_renewal_or_end_of_a_lease_that_the_database_lacks_fails(store: Store, ends: bool) -> None:
    world = World().node(gpus=2)
    lease = world.lease(1)
    save(store, world)
    with store.engine.begin() as connection:
        connection.execute(text("DELETE FROM lease"))
    (world.release if ends else world.renew)(lease)
    with pytest.raises(StoreFailed, match="not in the database"):
        save(store, world)


def test_after_a_restart_every_holder_has_a_full_ttl_and_draining_goes_on(store: Store) -> None:
    world = busy_world()
    save(store, world)
    ledger, now = store.load(), clock.now()
    reset_deadlines(ledger, now)
    live = [record.lease for record in ledger.leases.values() if record.lease.state is not LeaseState.ENDED]
    assert {lease.id: now.mono_s + lease.ttl_s for lease in live if lease.job_id is None} == ledger.deadlines
    assert set(ledger.draining_since) == {gpu.device.uuid for gpu in ledger.gpus.values() if gpu.draining}


def test_numbers_are_not_used_again_although_their_rows_are_gone(store: Store) -> None:
    world = busy_world()
    save(store, world)
    with store.engine.begin() as connection:
        for table in ("lease", "job", "event"):
            connection.execute(text(f"DELETE FROM {table}"))
    ledger = store.load()
    assert (ledger.next_number, ledger.next_token, ledger.next_seq) == (
        world.ledger.next_number,
        world.ledger.next_token,
        world.ledger.next_seq,
    )


def test_a_turn_that_cannot_be_committed_leaves_nothing(store: Store) -> None:
    world = busy_world()
    save(store, world)
    before = lasting(store.load())
    with store.engine.begin() as connection:
        for statement in REFUSE[store.engine.dialect.name]:
            connection.execute(text(statement))
    world.release(next(record.lease for record in world.ledger.leases.values() if record.lease.state == "active"))
    with pytest.raises(StoreFailed, match="full"):
        save(store, world)
    assert lasting(store.load()) == before


def test_numbers_of_a_turn_that_was_not_committed_are_stored_with_the_next_one(store: Store) -> None:
    store.write([], Ledger(next_number=5, next_token=6, next_seq=7))
    with store.engine.begin() as connection:
        for statement in REFUSE[store.engine.dialect.name]:
            connection.execute(text(statement))
    ahead = Ledger(next_number=15, next_token=16, next_seq=17)
    happened = Event(seq=16, at=clock.now().at, kind="lease.granted", cause="request-1")
    with pytest.raises(StoreFailed, match="full"):
        store.write([happened], ahead)
    other = Store(store.engine.url.render_as_string(hide_password=False))
    for ledger in (ahead, Ledger(next_number=15, next_token=16, next_seq=18), ahead):
        store.write([], ledger)
        found = other.load()
        assert (found.next_number, found.next_token, found.next_seq) == (15, 16, ledger.next_seq)
    other.close()


@pytest.mark.parametrize("loaded", [False, True])
def test_a_turn_is_not_written_behind_one_that_the_database_has_lost(store: Store, loaded: bool) -> None:
    """As after a failover to a replica that lagged behind, of which no connection says anything."""
    world = World().node(gpus=4)
    save(store, world)
    world.lease()
    save(store, world)
    if loaded:
        world.ledger = store.load()
    with store.engine.begin() as connection:
        connection.execute(update(tables.counter).where(tables.counter.c.name == "seq").values(value=2))
    world.lease()
    with pytest.raises(StoreFailed, match="lacks what was written"):
        save(store, world)


def test_a_commit_is_on_the_disk(store: Store) -> None:
    with store.engine.connect() as connection:
        if store.engine.dialect.name == "sqlite":
            assert connection.execute(text("PRAGMA journal_mode")).scalar() == "wal"
            assert connection.execute(text("PRAGMA synchronous")).scalar() == 2, "not FULL: a power cut could undo it"
        else:
            assert connection.execute(text("SHOW synchronous_commit")).scalar() == "on"


def test_text_comes_back_whatever_it_is(store: Store) -> None:
    world = World().node(gpus=1)
    strange = "\u0001 \\ '; DROP TABLE lease; -- \u200f\U0001f600 {index} %s :x \r\n" + "ü" * 4000
    job = world.submit(environment={strange: strange})
    save(store, world)
    store.write([replace(world.ledger.jobs[job], log_directory=strange)], world.ledger)
    found = store.job(job)
    assert found is not None
    assert (found.spec.environment, found.log_directory) == ({strange: strange}, strange)


def test_what_a_job_waits_for_and_has_tried_comes_back(store: Store) -> None:
    world = World().node(gpus=1)
    first = world.submit(retries=1, notify="mail ada")
    second = world.submit(after={first: "succeeded"})
    third = world.submit(after={second: "ended", first: "ended"})
    world.ended(first, 3)
    save(store, world)
    loaded = store.load()
    for name in ("queue", "waiting_for_jobs", "unmet", "dependents", "jobs"):
        assert getattr(loaded, name) == getattr(world.ledger, name), name
    assert [attempt.exit_code for attempt in loaded.jobs[first].job.attempt_history] == [3]
    assert loaded.jobs[first].spec.notify == "mail ada"
    assert set(loaded.unmet) == {second, third}


def test_who_has_opted_in_to_be_preempted_is_known_after_a_restart_also_of_an_older_version(store: Store) -> None:
    world = World(policy=Policy(preemption=True)).node(gpus=3)
    leases = [world.lease(1, priority=Priority.SCAVENGE), world.lease(1, preemptible=True), world.lease(1)]
    job_id = world.submit(1, preemptible=True)
    save(store, world)
    loaded = store.load()
    assert loaded.preemptible.keys() == {leases[0].id, leases[1].id}
    assert [loaded.leases[one.id].lease.demand.preemptible for one in leases] == [True, True, False]
    assert loaded.jobs[job_id].spec.preemptible
    assert lasting(loaded) == lasting(world.ledger)

    with store.engine.begin() as connection:
        for row in connection.execute(select(tables.lease.c.id, tables.lease.c.demand)).all():
            older = {name: value for name, value in row.demand.items() if name != "preemptible"}
            connection.execute(tables.lease.update().where(tables.lease.c.id == row.id).values(demand=older))
    loaded = store.load()
    assert loaded.preemptible.keys() == {leases[0].id}, "an older version knew priorities alone"
    assert [loaded.leases[one.id].lease.demand.preemptible for one in leases] == [True, False, False]


def test_a_preempted_job_has_its_old_place_after_a_restart_and_what_ends_for_whom_is_known(store: Store) -> None:
    world = World(policy=Policy(preemption=True, preempt_after_s=5.0, preempt_notice_s=5.0)).node(gpus=2)
    scavenge = {"priority": Priority.SCAVENGE, "user": "bob"}
    job_id = world.submit(1, **scavenge)
    world.jobs["a"] = [JobReport(job_id=job_id, state=RunState.RUNNING, started_at=world.now.at)]
    held, later = world.lease(1, **scavenge), world.lease(1, **scavenge)
    world.pass_time(6.0)
    waits = world.lease(2, ttl_s=1e6)
    world.pass_time(2.0)
    save(store, world)
    loaded = store.load()
    assert loaded.preemptions.keys() == {waits.id}
    assert loaded.preempting.keys() == {world.ledger.jobs[job_id].job.lease_id, held.id}
    reset_deadlines(loaded, Instant(at=world.now.at, mono_s=7.0))
    one = loaded.preemptions[waits.id]
    assert one.end_s == pytest.approx(7.0 + (one.preempt_at - one.noticed_at).total_seconds()), "the whole notice"

    newest, after = store.leases((), None, 3)
    world.ended(job_id, code=143)
    save(store, world)
    older, _ = store.leases((), after, 3)
    assert [one.number for one in [*newest, *older]] == [4, 3, 2, 1], "who reads page by page misses none"
    loaded = store.load()
    next_id = loaded.jobs[job_id].job.lease_id
    assert loaded.jobs[job_id].job.preempted == 1
    assert [lease_id for _, lease_id in loaded.queue] == [next_id, later.id, waits.id]
    first_id = loaded.jobs[job_id].job.attempt_history[0].lease_id
    assert [one.lease.id for one in leases_of_job(store.engine, job_id)] == [first_id, next_id]
    assert lasting(loaded) == lasting(world.ledger)


def test_what_was_used_of_a_budget_comes_back_and_what_is_held_meanwhile_counts(store: Store) -> None:
    world, budget = World().node(gpus=4), Budget(max_gpus=3, max_lease_s=3000, gpu_hours_per_day=2.5)
    world.release(world.lease(1, token="gone", budget=budget))
    world.lease(2, token="t", budget=budget, ttl_s=3000)
    world.pass_time(36)
    world.lease(1, token="t", budget=budget, ttl_s=3000)
    save(store, world)
    loaded = store.load()
    for name in ("budgets", "leases_of_tokens"):
        assert getattr(loaded, name) == getattr(world.ledger, name), name
    world.ledger, world.at_s = loaded, world.at_s + 360
    reset_deadlines(loaded, world.now)
    used = budget_use(loaded, "t", budget, world.now)
    assert (used.gpus, round(used.gpu_hours_today, 2)) == (3, round((2 * 36 + 3 * 360) / 3600, 2))
    world.wall_jump_s = 7200
    assert budget_use(loaded, "t", budget, world.now) == used, "counted on the monotonic clock from here on"
    world.node(gpus=4)
    world.pass_time(3000 - 396 + 1)
    assert {record.lease.state for record in loaded.leases.values() if len(record.lease.gpus) == 2} == {"ended"}
    save(store, world)
    assert store.load().budgets["t"] == world.ledger.budgets["t"]


def test_what_users_have_used_comes_back_and_orders_the_queue_as_before(store: Store) -> None:
    policy = Policy(fair_share=True)
    world = World(policy=policy).node(gpus=4)
    for user, gpus in (("ada", 4), ("ben", 1)):
        lease = world.lease(gpus, user=user, ttl_s=1e6)
        world.at_s += 36_000.0
        world.report()
        world.release(lease)
        world.report()
    full = world.lease(4, user="eve", ttl_s=1e6)
    waiting = [world.lease(4, user=user, ttl_s=1e6) for user in ("ada", "ben")]
    save(store, world)
    again = World(policy=policy, ledger=store.load(), at_s=50.0, nodes=world.nodes)
    again.wall_jump_s = world.at_s - again.at_s
    reset_deadlines(again.ledger, again.now)
    again.report()
    now = usage_of(again.ledger, "ada", again.now, policy)
    assert abs(now.used_s - usage_of(world.ledger, "ada", world.now, policy).used_s) < 1
    again.release(full)
    again.report()
    assert [again.now_of(lease).state for lease in waiting] == [LeaseState.QUEUED, LeaseState.ACTIVE]
    again.check()
    save(store, again)
    assert store.load().usage == again.ledger.usage


def test_limits_hold_after_a_restart_with_the_gpu_time_that_was_held_meanwhile(store: Store) -> None:
    world = World().node(gpus=4)
    world.limit("vision", "group", members=("ada", "bob"), max_gpus=3, gpu_hours=1.0)
    world.limit("gone", max_gpus=1, gpu_hours=1.0)
    world.limit("gone")
    world.lease(2, user="ada", ttl_s=3000)
    waits = world.lease(2, user="bob", ttl_s=3000)
    world.pass_time(36)
    save(store, world)
    loaded = store.load()
    kept = ("records", "gpu_time", "group_of", "leases", "gpus", "queued", "limited_users")
    for name in kept:
        assert getattr(loaded.limits, name) == getattr(world.ledger.limits, name), name
    world.ledger, world.at_s = loaded, world.at_s + 360
    reset_deadlines(loaded, world.now)
    world.node(gpus=4)
    assert world.now_of(waits).state == "queued"
    group = LimitKey(LimitKind.GROUP, "vision")
    used = limit_use(loaded.limits, group, world.policy.limits, world.now).gpu_hours_used
    assert used is not None
    assert abs(used * 3600 - 2 * (36 + 360)) < 1
    world.limit("vision", "group")
    assert world.now_of(waits).state == "active"
    save(store, world)
    assert not store.load().limits.records
    assert not store.load().limits.gpu_time


def test_a_turn_that_was_lost_with_the_daemon_is_taken_again_and_starts_what_waits_once(store: Store) -> None:
    """The end of a job is reported until the daemon takes it in; the first time it is killed before its commit."""
    world = World().node(gpus=1)
    first = world.submit()
    second = world.submit(after={first: "succeeded"})
    save(store, world)
    world.ended(first)
    for _ in range(2):
        world.changes.clear()
        world.ledger = store.load()
        reset_deadlines(world.ledger, world.now)
        assert world.ledger.jobs[second].job.state is JobState.QUEUED
        world.ended(first)
    save(store, world)
    loaded = store.load()
    assert loaded.jobs[second].job.state is JobState.STARTING
    assert [record.lease.state for record in loaded.leases.values() if record.lease.job_id == second] == ["active"]
    assert not loaded.unmet


@pytest.mark.parametrize("mask", [None, Mask.UUIDS, Mask.INDICES])
def test_how_a_jobs_gpus_are_named_comes_back_and_older_rows_do_not_say(store: Store, mask: Mask | None) -> None:
    world = World().node(gpus=1)
    job = world.submit(mask=mask)
    save(store, world)
    found = store.job(job)
    assert found is not None
    assert found.spec.mask is mask
    with store.engine.begin() as connection:
        older = {name: value for name, value in to_json(found.spec).items() if name != "mask"}
        connection.execute(update(tables.job).values(spec=older))
    found = store.job(job)
    assert found is not None
    assert found.spec.mask is None


def test_numbers_of_any_size_that_a_request_may_have_come_back(store: Store) -> None:
    world = World().node(gpus=1)
    world.submit(1, limits={"nofile": (2**63 - 1, -1)})
    world.ledger.next_token = 2**63 - 2
    world.lease(1)
    save(store, world)
    assert lasting(store.load()) == lasting(world.ledger)


def test_a_row_that_cannot_be_kept_is_not_taken_for_a_database_that_fails(store: Store) -> None:
    world = World().node(gpus=1)
    record = world.ledger.leases[world.lease().id]
    save(store, world)
    with pytest.raises((DataError, OverflowError)):
        store.write([replace(record, number=2**70)], world.ledger)
    assert lasting(store.load()) == lasting(world.ledger)


def test_a_list_never_shows_a_lease_in_another_state_than_it_asks_for(store: Store) -> None:
    world = World().node(gpus=1)
    lease = world.lease()
    before = world.ledger.leases[lease.id]
    save(store, world)
    world.release(lease)
    save(store, world)  # a reader still has the lease as it was before this commit
    ended, _ = store.leases([LeaseState.ENDED], None, 10, known={lease.id: before})
    assert [record.lease.end_reason for record in ended] == ["released"]


def test_pages_come_newest_first_and_end(store: Store) -> None:
    world = World().node(gpus=8)
    ids = [world.lease().id for _ in range(5)]
    save(store, world)
    first, after = store.leases([], None, 2)
    second, after = store.leases([], after, 2)
    third, end = store.leases([], after, 2)
    assert [record.lease.id for page in (first, second, third) for record in page] == ids[::-1]
    assert end is None
    assert store.leases(["ended"], None, 10) == ([], None)
    assert [event.seq for event in store.history(1, 2)[0]] == [2, 3]


def test_an_id_is_found_by_its_beginning(store: Store) -> None:
    world = World().node(gpus=2)
    jobs = [world.submit() for _ in range(12)]
    save(store, world)

    def found(prefix: str) -> set[str]:
        records = [*store.jobs([], None, 100, id_prefix=prefix)[0]] if prefix.startswith(("job", "array")) else []
        leases = store.leases([], None, 100, id_prefix=prefix)[0] if prefix.startswith("lease") else []
        return {record.job.id for record in records} | {record.lease.id for record in leases}

    for digit in "123456789":
        assert found(f"job-{digit}") == {job for job in jobs if job.startswith(f"job-{digit}")}
        leases = {lease for lease in world.ledger.leases if lease.startswith(f"lease-{digit}")}
        assert found(f"lease-{digit}") == leases
    assert found("job-f") == found("array-0") == set()


def test_a_gang_is_read_as_it_was_granted_and_found_by_each_of_its_nodes(store: Store) -> None:
    world = World().node("a", gpus=2).node("b", gpus=2).node("c", gpus=2)
    single, gang, waiting = world.lease(1), world.lease(2, nodes=2), world.lease(2, nodes=2)
    assert [member.node for member in gang.members] == ["b", "c"]
    save(store, world)
    assert store.load().leases == world.ledger.leases
    read = store.lease(gang.id)
    assert read is not None
    assert read.lease.members == gang.members

    def on(node: str) -> list[str]:
        return [record.lease.id for record in store.leases([], None, 10, node=node)[0]]

    assert (on("a"), on("b"), on("c"), on("%")) == ([single.id], [gang.id], [gang.id], [])
    assert waiting.state is LeaseState.QUEUED


def test_pages_are_of_one_user_label_node_and_name(store: Store) -> None:
    world = World().node(gpus=8)
    ann = [world.lease(user="ann", label=label).id for label in ("a", "b", "a")]
    bob = world.lease(user="bob", label="a").id
    save(store, world)

    def found(**only: str) -> list[str]:
        return [record.lease.id for record in store.leases([], None, 10, **only)[0]]

    assert found(user="ann") == ann[::-1]
    assert found(label="a") == [bob, ann[2], ann[0]]
    assert found(label="a", user="ann", node="a") == [ann[2], ann[0]]
    assert found(node="b") == found(user="a%") == found(label="") == []
    assert [record.lease.id for record in store.leases([], None, 1, user="ann")[0]] == [ann[2]]


def test_a_page_ends_early_where_its_texts_are_long(store: Store) -> None:
    world = World().node(gpus=8)
    among = (uuid(0), *(f"GPU-{number:036d}" for number in range(100)))
    ids = [world.lease(among=among).id for _ in range(200)]
    save(store, world)
    found: list[str] = []
    after = None
    while True:
        page, after = store.leases([], after, 1000)
        assert 4000 * (len(page) - 1) <= MAX_PAGE_CHARACTERS
        found += [record.lease.id for record in page]
        if after is None:
            break
    assert found == ids[::-1]


def test_a_record_in_memory_is_not_read_for_a_page(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment of a job that lives may have 1 MiB, and a page a thousand jobs."""
    world = World().node(gpus=2)
    running, other = world.submit(), world.submit()
    save(store, world)
    read, read_job = [], rows.job_record
    monkeypatch.setattr(rows, "job_record", lambda row: read.append(row.id) or read_job(row))
    page, _ = store.jobs((), None, 10, known={running: world.ledger.jobs[running]})
    assert [record.job.id for record in page] == [other, running]
    assert read == [other]


def test_what_is_no_longer_in_memory_is_still_found(store: Store) -> None:
    world = World().node(gpus=1)
    first = world.lease()
    world.release(first)
    for _ in range(MAX_ENDED_IN_MEMORY + 1):
        world.report()
        world.release(world.lease())
    save(store, world)
    assert first.id not in world.ledger.leases
    found = store.lease(first.id)
    assert found is not None
    assert found.lease.fencing_token == first.fencing_token
    assert len(store.load().ended_leases) == MAX_ENDED_IN_MEMORY


@pytest.mark.parametrize(("jump_s", "left_s"), [(0.0, 2700.0), (-86400.0, 3600.0), (600.0, 2100.0)])
def test_what_is_kept_comes_back_for_no_longer_than_was_asked_for(store: Store, jump_s: float, left_s: float) -> None:
    """Also where the wall clock was put back meanwhile."""
    world = World().node(gpus=1)
    lease = world.lease(1, ttl_s=1e6)
    world.turn(
        KeepRequested(cause="k", lease_id=lease.id, fencing_token=lease.fencing_token, reason="slow copy", for_s=3600.0)
    )
    save(store, world)
    loaded = store.load()
    assert lasting(loaded) == lasting(world.ledger)
    world.ledger, world.at_s, world.wall_jump_s = loaded, world.at_s + 900, jump_s
    reset_deadlines(loaded, world.now)
    world.wall_jump_s = 0.0
    world.at_s += left_s - 1
    assert kept_now(loaded.leases[lease.id], world.now) is not None
    world.at_s += 1
    assert kept_now(loaded.leases[lease.id], world.now) is None
