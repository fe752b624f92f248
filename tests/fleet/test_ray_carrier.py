"""Pilots as actors of Ray, against a stand-in for its API."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpulease_cli import main, output
from gpulease_fleet.carrier import CarriedState, EngineUnavailable, PilotName, SubmitError
from gpulease_fleet.ray_carrier import RayCarrier, RayOptions
from gpulease_fleet.ray_driver import RayDriver, pilot_class, words

NAME = PilotName(pool="p", ordinal=0, generation=1)
OPTIONS = RayOptions(url="http://127.0.0.1:1", gpus=8, program="/opt/gpulease", directory="/srv/w", worker=("--x=1",))


class ActorDied(Exception):
    """As `ray.exceptions.RayActorError`."""


class ActorUnavailable(ActorDied):
    """As `ray.exceptions.ActorUnavailableError`."""


@dataclass
class StandIn:
    """The part of Ray's API that pilots use. An actor is a dict."""

    actors: dict[str, dict[str, Any]] = field(default_factory=dict)
    total: dict[str, Any] = field(default_factory=dict)
    away: bool = False
    exceptions: Any = field(
        default_factory=lambda: SimpleNamespace(RayActorError=ActorDied, ActorUnavailableError=ActorUnavailable)
    )

    def init(self, **options: Any) -> None:
        if self.away:
            raise ConnectionError("no cluster")

    def nodes(self) -> list[dict[str, Any]]:
        return [{"Alive": True, "Resources": {"CPU": 1.0}}, {"Alive": True, "Resources": {"GPU": 8.0}}]

    def remote(self, **what: Any) -> Any:
        self.total = what
        return lambda kind: SimpleNamespace(options=lambda **options: SimpleNamespace(remote=self._start(options)))

    def _start(self, options: dict[str, Any]) -> Any:
        def start(script: str, log: str) -> Any:
            if options["name"] in self.actors:
                raise ValueError(f"The name {options['name']} is already taken")
            self.actors[options["name"]] = options | {"script": script, "log": log, "state": "pending"}
            return self.get_actor(options["name"], "gpulease")

        return start

    @property
    def util(self) -> Any:
        return SimpleNamespace(
            list_named_actors=lambda all_namespaces: [{"name": name, "namespace": "gpulease"} for name in self.actors]
        )

    def get_actor(self, name: str, namespace: str) -> Any:
        if name not in self.actors:
            raise ValueError(f"no actor {name}")
        actor = self.actors[name]
        return SimpleNamespace(
            _actor_id=SimpleNamespace(hex=lambda: f"id of {name}"),
            where=SimpleNamespace(remote=lambda: name),
            leave=SimpleNamespace(remote=lambda: actor.update(state="leaving")),
            name=name,
        )

    def wait(self, asked: list[str], num_returns: int, timeout: float) -> tuple[list[str], list[str]]:
        return [name for name in asked if self.actors[name]["state"] != "pending"], []

    def get(self, asked: str) -> str:
        if self.actors[asked]["state"] == "dead":
            raise ActorDied("its node has died")
        if self.actors[asked]["state"] == "unavailable":
            raise ActorUnavailable("the connection was broken")
        return "host1"

    def kill(self, actor: Any) -> None:
        del self.actors[actor.name]


@pytest.fixture
def ray() -> StandIn:
    return StandIn()


def carrier_of(ray: StandIn, options: RayOptions = OPTIONS) -> RayCarrier:
    """A carrier whose driver is in this process, and another one after each failure."""
    drivers: list[RayDriver] = []

    def ask(what: str, **arguments: Any) -> Any:
        try:
            if not drivers:
                drivers.append(RayDriver(options.address, ray))
            return json.loads(json.dumps(getattr(drivers[0], what)(**arguments)))
        except Exception as error:
            drivers.clear()
            raise EngineUnavailable(words(error)) from error

    return RayCarrier(options, ask)


def test_a_pilot_has_all_gpus_of_a_node_and_is_never_started_again_by_ray(ray: StandIn) -> None:
    carrier = carrier_of(ray)
    assert carrier.start(NAME, "secret") == "id of gpulease:p:0:1"
    assert ray.total == {"num_cpus": 0, "num_gpus": 8, "max_restarts": 0, "max_task_retries": 0}
    actor = ray.actors[str(NAME)]
    assert (actor["namespace"], actor["lifetime"]) == ("gpulease", "detached")
    assert "GPULEASE_TOKEN=secret" in actor["script"]
    assert '--allocation="pid:$PPID,$RAYLET"' in actor["script"]
    assert '--node="$(hostname)"' in actor["script"]


def test_no_generation_is_there_twice(ray: StandIn) -> None:
    carrier = carrier_of(ray)
    carrier.start(NAME, "secret")
    with pytest.raises(SubmitError, match="already taken"):
        carrier.start(NAME, "other")


def test_what_is_listed(ray: StandIn) -> None:
    carrier = carrier_of(ray)
    carrier.start(NAME, "secret")
    ray.actors["someone's own"] = {"state": "running"}
    assert [(one.state, one.host) for one in carrier.list("p")] == [(CarriedState.PENDING, "")]
    ray.actors[str(NAME)]["state"] = "running"
    (pilot,) = carrier.list("p")
    assert (pilot.name, pilot.state, carrier.node_of(pilot)) == (NAME, CarriedState.RUNNING, "host1")
    assert carrier.list("other") == []
    ray.actors[str(NAME)]["state"] = "dead"
    assert [(one.state, one.why) for one in carrier.list("p")] == [(CarriedState.GONE, "ActorDied: its node has died")]


def test_a_pilot_that_does_not_answer_for_a_moment_does_not_wait_for_a_node_again(ray: StandIn) -> None:
    """It would be ended without its jobs' grace period, as one that has no node yet."""
    carrier = carrier_of(ray)
    carrier.start(NAME, "secret")
    ray.actors[str(NAME)]["state"] = "running"
    carrier.list("p")
    for state in ("pending", "unavailable"):
        ray.actors[str(NAME)]["state"] = state
        assert [(one.state, one.host, one.why) for one in carrier.list("p")] == [(CarriedState.RUNNING, "host1", "")]


def test_several_nodes_on_one_host_have_names_of_their_own(ray: StandIn) -> None:
    carrier = carrier_of(ray, RayOptions(url="u", gpus=8, program="g", directory="d", shared=True))
    carrier.start(NAME, "secret")
    ray.actors[str(NAME)]["state"] = "running"
    (pilot,) = carrier.list("p")
    assert carrier.node_of(pilot) == "host1-p-0"
    assert '--node="$(hostname)-p-0"' in ray.actors[str(NAME)]["script"]


def test_a_pilot_leaves_or_is_ended(ray: StandIn) -> None:
    carrier = carrier_of(ray)
    carrier.start(NAME, "secret")
    (pilot,) = carrier.list("p")
    carrier.stop(pilot, at_once=False)
    assert ray.actors[str(NAME)]["state"] == "leaving"
    carrier.stop(pilot, at_once=True)
    assert carrier.list("p") == []
    carrier.stop(pilot, at_once=True)


def test_doctor_wants_whole_nodes(ray: StandIn) -> None:
    assert [one.ok for one in carrier_of(ray).doctor()] == [True]
    (found,) = carrier_of(ray, RayOptions(url="u", gpus=4, program="g", directory="d")).doctor()
    assert not found.ok
    assert found.what == "no node has 4 GPUs; they have 0, 8"


def test_a_cluster_that_is_away_is_no_reason_to_decide_anything() -> None:
    carrier = carrier_of(StandIn(away=True))
    with pytest.raises(EngineUnavailable, match="no cluster"):
        carrier.list("p")
    (found,) = carrier.doctor()
    assert found.what == "Ray does not answer: ConnectionError: no cluster"


def test_the_actor_needs_no_gpulease_on_its_host() -> None:
    assert "<locals>" in pilot_class().__qualname__, "Ray sends such a class whole, and others by their names"


def test_without_ray_the_commands_say_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    (tmp_path / "ray.py").write_text("raise ModuleNotFoundError(name='ray')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("GPULEASE_FLEET_DIR", str(tmp_path))
    assert main(["fleet", "ray", "doctor", "--gpus", "8"]) == output.REFUSED
    assert "BAD  Ray does not answer: the package ray is not installed here" in capsys.readouterr().out
    up = ["fleet", "ray", "up", "--nodes", "1", "--worker-url", "https://gpubox", "--worker-dir", str(tmp_path)]
    assert main(up) == output.REFUSED
    assert "pool main was not started" in capsys.readouterr().err
    assert main(["fleet", "ray", "status"]) == output.REFUSED
    assert main(["fleet", "ray", "down"]) == output.REFUSED
    assert "There is no pool main" in capsys.readouterr().err
    assert main([*up, "--no-doctor", "--once"]) == output.DONE
    assert main(["fleet", "ray", "status"]) == output.DONE
    shown = capsys.readouterr().out
    assert "this may have changed, as nothing was decided since: the package ray is not installed here" in shown
    assert "look at it with `gpulease fleet slurm doctor`, or `ray doctor`" in shown
