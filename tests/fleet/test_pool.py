"""A pool keeps its pilots, whatever breaks: no generation is submitted twice, none is lost, none is left behind."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpulease_fleet.carrier import CarriedState, PilotName
from gpulease_fleet.pool import AGAIN_S, FORGET_S, GONE, MAX_FAILED_STARTS, MAX_FAILED_SUBMISSIONS, STOP_S
from tests.fleet.play import GONE_S, World

MAX_STEPS = 14
"""More than a round with one submission has."""


def world_of(tmp_path: Path, least: int = 2, most: int | None = None, **what: object) -> World:
    world = World(tmp_path)
    world.up(least, most, **what)
    return world


def handle_of(world: World, ordinal: int) -> str:
    return next(one.handle for one in world.alive() if one.name.ordinal == ordinal)


def states(world: World) -> list[str]:
    return [row.state for row in world.rows()]


def test_a_pool_comes_up_one_pilot_at_a_time(tmp_path: Path) -> None:
    world = world_of(tmp_path, 3)
    world.tick()
    world.tick()
    assert [str(one.name) for one in world.alive()] == ["gpulease:p:0:1"], "one waits at a time"
    world.rounds(12)
    assert states(world) == ["running"] * 3
    assert {row.node for row in world.rows()} == {"n0", "n1", "n2"}
    assert all(row.was_ready and row.ends_at for row in world.rows())


def test_a_pilot_that_ended_is_replaced_by_the_next_generation(tmp_path: Path) -> None:
    world = world_of(tmp_path, 2)
    world.rounds(10)
    world.end(handle_of(world, 0))
    world.rounds(int(FORGET_S) + 10)
    assert [(row.ordinal, row.generation, row.state) for row in world.rows()] == [(0, 2, "running"), (1, 1, "running")]
    assert world.forgotten == ["n0"]
    assert sorted(world.tokens.values()) == ["gpulease:p:0:2", "gpulease:p:1:1"], "the old one is not heard any more"


def test_one_whose_node_has_left_is_not_forgotten_again(tmp_path: Path) -> None:
    world = world_of(tmp_path, 1)
    world.rounds(6)
    world.end(handle_of(world, 0), left=True)
    world.rounds(6)
    assert world.forgotten == []


def test_a_worker_that_lives_on_keeps_its_node_until_it_is_not_heard_any_more(tmp_path: Path) -> None:
    """Its slurmstepd was killed, so Slurm has ended the job and none of its processes."""
    world = world_of(tmp_path, 1)
    world.rounds(6)
    world.end(handle_of(world, 0))
    world.reports.add("n0")
    world.tick()
    world.tick()
    assert states(world) == ["ended"]
    assert world.tokens == {}, "it is refused from now on"
    world.reports.discard("n0")
    world.rounds(int(FORGET_S) + 6)
    assert world.forgotten == ["n0"]
    assert states(world) == ["running"]


def test_a_node_is_forgotten_when_its_refused_worker_has_ended_its_jobs_and_not_before(tmp_path: Path) -> None:
    """They are tried elsewhere from then on. Ray gives up a raylet that does not answer, and whose worker lives on."""
    world = world_of(tmp_path, 1)
    world.rounds(6)
    world.end(handle_of(world, 0))
    world.tick()
    assert world.tokens == {}, "it is refused from now on"
    world.tick(FORGET_S - 1.0)
    assert world.forgotten == []
    world.tick()
    assert world.forgotten == ["n0"]


@pytest.mark.parametrize("step", range(8))
def test_a_refused_worker_has_its_time_wherever_the_program_was_killed(tmp_path: Path, step: int) -> None:
    """Between the revocation and its record as well: that a pilot was listed may be long ago by then."""
    world = world_of(tmp_path, 1)
    world.rounds(6)
    del world.engine[handle_of(world, 0)]
    world.reports.clear()
    world.now += GONE_S + 10 * FORGET_S  # no program has looked for so long
    world.crash_at = step
    world.tick()
    world.crash_at = None
    refused_at = world.now if world.tokens == {} else None
    while world.forgotten == [] and world.tick(1.0):
        refused_at = world.now if refused_at is None and world.tokens == {} else refused_at
        assert refused_at is None or world.now - refused_at <= FORGET_S + 2.0
    assert refused_at is not None
    assert world.now - refused_at >= FORGET_S


def test_the_worker_of_a_pilot_that_ended_may_still_say_that_its_node_leaves(tmp_path: Path) -> None:
    """Else its jobs would be tried again only while they have a retry left. A busy host takes seconds for it."""
    world = world_of(tmp_path, 2)
    world.leaves_s = 15.0
    world.rounds(10)
    for ordinal in (0, 1):
        world.end(handle_of(world, ordinal))
    world.tick()
    assert sorted(world.tokens.values()) == ["gpulease:p:0:1", "gpulease:p:1:1"], "they are heard"
    world.known.discard("n0")
    world.tick()
    assert world.forgotten == []
    assert "gpulease:p:0:1" not in world.tokens.values(), "it has said so"
    world.tick(15.0)
    assert "gpulease:p:1:1" not in world.tokens.values(), "it had its time"


@pytest.mark.parametrize("step", range(MAX_STEPS))
def test_killed_at_any_step_the_next_program_goes_on(tmp_path: Path, step: int) -> None:
    world = world_of(tmp_path, 2)
    world.crash_at = step
    for _ in range(3):
        world.tick()
        world.advance()
        world.check()
    world.crash_at = None
    world.rounds(int(GONE_S) + 20)
    assert len(world.alive()) == 2
    assert states(world) == ["running", "running"]
    world.check()


@pytest.mark.parametrize("step", range(MAX_STEPS))
@pytest.mark.parametrize("what", ["end", "down", "idle"])
def test_killed_at_any_step_of_an_end_the_next_program_goes_on(tmp_path: Path, what: str, step: int) -> None:
    world = world_of(tmp_path, 0 if what == "idle" else 2, 2, idle_s=0.0)
    world.waits = what == "idle"
    world.rounds(12)
    world.waits = False
    if what == "end":
        world.end(handle_of(world, 0))
    world.up(0 if what == "idle" else 2, 2, down=what == "down")
    world.crash_at = step
    for _ in range(4):
        world.tick()
        world.advance()
        world.check()
    world.crash_at = None
    world.rounds(int(STOP_S) + 10)
    world.check()
    expected = 2 if what == "end" else 0
    assert len(world.alive()) == expected
    assert set(world.tokens.values()) == {str(one.name) for one in world.alive()}, "only those that run are heard"
    assert world.pool().paused == ""


def test_a_submission_of_unknown_outcome_is_adopted_by_its_name(tmp_path: Path) -> None:
    world = world_of(tmp_path, 1)
    world.crash_at = 5  # token twice, row twice, before the engine; then it has it
    world.tick()
    assert len(world.alive()) == 1
    assert [row.handle for row in world.rows()] == [""]
    world.rounds(5)
    assert [row.handle for row in world.rows()] == [world.alive()[0].handle]
    assert len(world.submitted) == 1


def test_one_that_shows_up_after_its_generation_was_given_up_is_cancelled(tmp_path: Path) -> None:
    world = world_of(tmp_path, 1)
    world.late_list = True
    world.tick()
    world.tick(GONE_S)
    assert [row.generation for row in world.rows()] == [2]
    world.late_list = False
    world.rounds(10)
    world.check()
    assert len(world.alive()) == 1
    assert world.alive()[0].name.generation == world.rows()[0].generation


def test_nothing_is_decided_while_the_engine_or_the_daemon_is_away(tmp_path: Path) -> None:
    world = world_of(tmp_path, 2)
    world.rounds(8)
    before = world.rows()
    world.away = True
    for _ in range(5):
        assert not world.tick(GONE_S)
    world.away = False
    assert [row.state for row in world.rows()] == [row.state for row in before]
    world.rounds(3)
    assert len(world.submitted) == 2, "an engine that was away for minutes has lost nothing"
    world.end(handle_of(world, 1))
    world.daemon_away = True
    for _ in range(5):
        world.tick()
    assert len(world.submitted) == 2, "a worker needs a token"


def test_an_engine_that_refuses_is_asked_ten_times(tmp_path: Path) -> None:
    world = world_of(tmp_path, 1)
    world.refuses = "Invalid partition name specified"
    world.rounds(60)
    assert 4 <= world.pool().failed_submissions < MAX_FAILED_SUBMISSIONS, "each waits longer than the last"
    for _ in range(2 * MAX_FAILED_SUBMISSIONS):
        world.tick(AGAIN_S)
    pool = world.pool()
    assert pool.failed_submissions == MAX_FAILED_SUBMISSIONS
    assert pool.paused == "10 submissions in a row failed; the last: Invalid partition name specified"
    world.refuses = ""
    world.rounds(5)
    assert world.alive() == [], "it waits for someone who looks"
    assert world.tokens == {}
    world.up(1, paused="", failed_submissions=0)
    world.rounds(6)
    assert states(world) == ["running"]


def test_pilots_that_end_before_their_worker_reports_pause_the_pool(tmp_path: Path) -> None:
    world = world_of(tmp_path, 1)
    for _ in range(40):
        world.tick()
        for pilot in world.alive():
            world.end(pilot.handle, why="FAILED: NonZeroExitCode")
    assert world.submitted.total() == MAX_FAILED_STARTS
    assert "3 pilots in a row ended before their worker reported; the last: FAILED: NonZero" in world.pool().paused


def test_programs_that_are_killed_before_the_engine_is_asked_do_not_pause_the_pool(tmp_path: Path) -> None:
    world = world_of(tmp_path, 1)
    world.crash_at = 4  # token twice, row twice
    world.tick()
    for generation in range(2, MAX_FAILED_STARTS + 3):
        assert [(row.generation, row.state) for row in world.rows()] == [(generation - 1, "submitting")]
        world.crash_at = 12  # before that the last one is given up: ended, to be revoked, revoked, gone
        world.tick(GONE_S)
        assert world.pool().paused == ""
    assert world.alive() == []
    world.tick(GONE_S)
    world.rounds(10)
    assert states(world) == ["running"]


def test_a_pool_that_goes_down_ends_its_pilots_and_starts_none(tmp_path: Path) -> None:
    world = world_of(tmp_path, 3)
    world.rounds(15)
    world.up(3, down=True)
    world.rounds(6)
    assert world.alive() == []
    assert set(states(world)) == {GONE}
    assert world.tokens == {}
    assert world.forgotten == [], "they have left"


def test_a_pilot_that_does_not_end_when_asked_is_ended(tmp_path: Path) -> None:
    world = world_of(tmp_path, 1)
    world.rounds(6)
    world.up(1, down=True)
    world.tick()
    assert [one.state for one in world.alive()] == [CarriedState.ENDING]
    world.tick(STOP_S)
    world.tick()
    assert world.alive() == []


def test_one_that_was_not_told_to_end_is_told_again_before_it_is_ended(tmp_path: Path) -> None:
    world = world_of(tmp_path, 1)
    world.rounds(6)
    world.up(1, down=True)
    world.crash_at = 2  # the row is written, and the engine is not told
    world.tick()
    assert (states(world), [one.state for one in world.alive()]) == (["ending"], [CarriedState.RUNNING])
    world.tick()
    assert [one.state for one in world.alive()] == [CarriedState.ENDING], "its jobs have their grace period"


def test_one_that_does_not_say_where_it_is_has_its_grace_period_all_the_same(tmp_path: Path) -> None:
    """An actor of Ray on a busy host does not answer in time, as one does not that waits for a node."""
    world = world_of(tmp_path, 1)
    world.rounds(6)
    (own,) = world.alive()
    world.engine[own.handle] = replace(own, state=CarriedState.PENDING)
    world.up(1, down=True)
    world.tick()
    assert [one.state for one in world.alive()] == [CarriedState.ENDING]
    world.engine[own.handle] = replace(own, state=CarriedState.PENDING)
    world.tick()
    assert [one.state for one in world.alive()] == [CarriedState.ENDING], "it is asked again"
    world.tick(STOP_S)
    assert world.alive() == []


def test_of_two_pilots_of_one_name_the_one_on_record_stays(tmp_path: Path) -> None:
    world = world_of(tmp_path, 1)
    world.rounds(6)
    (own,) = world.alive()
    world.engine["0000"] = replace(own, handle="0000", host="n7")  # as text it comes before
    world.tick()
    assert [one.handle for one in world.alive()] == [own.handle]


def test_nodes_come_while_requests_wait_and_go_when_idle(tmp_path: Path) -> None:
    world = world_of(tmp_path, 0, 3, idle_s=30.0)
    world.rounds(5)
    assert world.alive() == []
    world.waits = True
    world.rounds(20)
    assert len(world.alive()) == 3
    world.waits, world.busy = False, {"n1"}
    world.rounds(20)
    assert len(world.alive()) == 3, "not idle for long enough"
    world.rounds(40)
    assert [one.host for one in world.alive()] == ["n1"]
    world.waits = True
    world.rounds(20)
    assert len(world.alive()) == 3
    world.check()


def test_rounds_of_several_programs_end_an_idle_node(tmp_path: Path) -> None:
    """`up --once` from cron: what one has seen, the next one knows."""
    world = world_of(tmp_path, 0, 1, idle_s=30.0)
    world.waits = True
    world.rounds(5)
    world.waits, world.busy = False, {"n0"}
    world.tick(60.0)
    world.busy = set()
    world.tick(60.0)
    assert states(world) == ["running"], "idle from now on"
    world.tick(20.0)
    assert states(world) == ["running"]
    world.tick(20.0)
    assert states(world) == ["ending"]


def test_a_node_that_was_needed_meanwhile_was_not_idle(tmp_path: Path) -> None:
    world = world_of(tmp_path, 0, 2, idle_s=30.0)
    world.waits, world.hosts = True, 1
    world.rounds(8)
    world.waits = False
    world.tick(20.0)
    world.waits = True
    world.tick(20.0)
    world.waits = False
    world.tick(20.0)
    assert states(world)[0] == "running", "it may have served that request"


def test_pilots_are_adopted_when_the_records_are_lost(tmp_path: Path) -> None:
    world = world_of(tmp_path, 2)
    world.rounds(10)
    for path in tmp_path.glob("p.db*"):
        path.unlink()
    world.up(2)
    world.rounds(5)
    assert world.submitted.total() == 2
    assert states(world) == ["running", "running"]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["crash", "end", "away", "late", "tick", "old"]), st.integers(0, 13)), max_size=25
    )
)
def test_no_generation_is_ever_submitted_twice(
    tmp_path_factory: pytest.TempPathFactory, story: list[tuple[str, int]]
) -> None:
    world = world_of(tmp_path_factory.mktemp("pool"), 2)
    for what, number in story:
        world.away = what == "away"
        world.late_list = what == "late"
        world.crash_at = number if what == "crash" else None
        if what == "end" and (alive := world.alive()):
            world.end(alive[number % len(alive)].handle, left=number % 2 == 0)
        world.tick(GONE_S if what in ("late", "old") else 1.0)
        world.advance()
        world.check()
    world.away, world.late_list, world.crash_at = False, False, None
    world.up(2, paused="", failed_starts=0, failed_submissions=0)
    world.rounds(int(GONE_S) + 30)
    assert len(world.alive()) == 2
    assert all(
        one.name.generation == row.generation
        for one in world.alive()
        for row in world.rows()
        if row.ordinal == one.name.ordinal
    )
    world.check()


@pytest.mark.parametrize("text", ["gpulease:p:0", "gpulease:P:0:1", "gpulease:p:0:1:2", "other", "gpulease:p:x:1"])
def test_other_names_are_of_no_pilot(text: str) -> None:
    assert PilotName.parse(text) is None
