"""Pilots as detached actors of Ray: each has all GPUs of one node, and runs the worker of that node.

| rule | what it is for |
|---|---|
| a pilot asks for all GPUs of a node | Ray gives them to no one else, and there is one pilot on a node |
| the actor ends with its worker | a pilot whose worker is gone is seen to be gone, and the next one comes |
| the worker leaves when the actor or its raylet has ended | Ray gives their GPUs away, and leaves what they started |
| the worker leaves when its token is refused | the GCS has given up a raylet that lives on, or has lost its state |

Ray never starts a pilot again (`max_restarts=0`): that is what the pool does, with the next generation. A pilot runs
the worker through a shell, because Ray kills the children of an actor that was killed, and the worker has to leave.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gpulease_fleet.carrier import Carried, CarriedState, EngineUnavailable, Finding, PilotName, SubmitError
from gpulease_fleet.worker_script import worker_script

NAMESPACE = "gpulease"
ANSWER_S = 3.0
"""How long pilots may take to say where they are; one that has no node yet does not answer. Seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RayOptions:
    """What every pilot of a pool asks Ray for, and how its worker is started."""

    url: str
    """Where workers reach the daemon."""
    gpus: int
    """GPUs of each node: all that it has."""
    address: str = "auto"
    """As `ray.init(address=...)`."""
    shared: bool = False
    """True where several nodes of Ray are on one host; a node is then called `HOST-POOL-ORDINAL`."""
    worker: tuple[str, ...] = ()
    """Further options of `gpulease worker`."""
    program: str
    """Path of the program `gpulease` on the hosts."""
    directory: str
    """Directory for logs of pilots and data of workers."""
    leave_s: float = 60.0
    """How long leaving may take. Seconds."""


class RayCarrier:
    """Starts, lists and ends pilots in a cluster of Ray, to which it connects at the first call."""

    engine = "ray"
    gone_s = 10.0
    leaves_s = 15.0

    def __init__(self, options: RayOptions, ray: Any = None) -> None:
        self._options = options
        self._module = ray
        self._is_connected = False

    def doctor(self) -> list[Finding]:
        """What would go wrong on this cluster, before it does."""
        try:
            nodes = [node for node in self._ray().nodes() if node.get("Alive")]
        except EngineUnavailable as error:
            return [
                Finding(ok=False, what=f"Ray does not answer: {error}", remedy="Check `ray status`, and --address.")
            ]
        gpus = sorted(int(node["Resources"].get("GPU", 0)) for node in nodes)
        whole = [one for one in gpus if one == self._options.gpus]
        if whole:
            return [Finding(ok=True, what=f"{len(whole)} of {len(nodes)} nodes have {self._options.gpus} GPUs")]
        return [
            Finding(
                ok=False,
                what=f"no node has {self._options.gpus} GPUs; they have {', '.join(map(str, gpus)) or 'none'}",
                remedy="Say with --gpus how many each node has: with fewer, Ray would give the others away.",
            )
        ]

    def start(self, name: PilotName, token: str) -> str:
        """Start a pilot and return the id of its actor. Raises `SubmitError`: also where one of that name is there."""
        ray = self._ray()
        try:
            made = ray.remote(num_cpus=0, num_gpus=self._options.gpus, max_restarts=0, max_task_retries=0)(
                pilot_class()
            )
            actor = made.options(name=str(name), namespace=NAMESPACE, lifetime="detached").remote(
                self._script(name, token), f"{self._options.directory}/pilot-{name.ordinal}-{name.generation}.log"
            )
        except Exception as error:  # Ray's own, and ValueError for a name that is taken
            raise SubmitError(_words(error)) from error
        return str(actor._actor_id.hex())

    def list(self, pool: str) -> list[Carried]:
        """All pilots of a pool. Raises `EngineUnavailable`."""
        ray = self._ray()
        try:
            names = [PilotName.parse(one["name"]) for one in ray.util.list_named_actors(all_namespaces=True)]
            asked = {}
            for name in (one for one in names if one is not None and one.pool == pool):
                try:
                    actor = ray.get_actor(str(name), namespace=NAMESPACE)
                except ValueError:
                    continue  # it has just ended
                asked[name] = (actor, actor.where.remote())
            answers = [answer for _, answer in asked.values()]
            ready = set(ray.wait(answers, num_returns=len(answers), timeout=ANSWER_S)[0]) if answers else set()
            return [self._carried(name, actor, answer, answer in ready) for name, (actor, answer) in asked.items()]
        except Exception as error:  # Ray's own
            raise EngineUnavailable(_words(error)) from error

    def stop(self, pilot: Carried, *, at_once: bool) -> None:
        """End a pilot: its worker leaves; `at_once`: whatever it does. Raises `EngineUnavailable`."""
        ray = self._ray()
        try:
            actor = ray.get_actor(str(pilot.name), namespace=NAMESPACE)
            if at_once:
                ray.kill(actor)
            else:
                actor.leave.remote()
        except ValueError:
            return  # it has ended
        except Exception as error:  # Ray's own
            raise EngineUnavailable(_words(error)) from error

    def node_of(self, pilot: Carried) -> str:
        """The name of the node that it carries, as the daemon knows it; empty before it has a host."""
        if not pilot.host or not self._options.shared:
            return pilot.host
        return f"{pilot.host}-{pilot.name.pool}-{pilot.name.ordinal}"

    def _carried(self, name: PilotName, actor: Any, answer: Any, is_ready: bool) -> Carried:
        state, host, why = CarriedState.PENDING, "", "it waits for a node with so many free GPUs"
        if is_ready:
            try:
                state, host, why = CarriedState.RUNNING, str(self._ray().get(answer)), ""
            except self._ray().exceptions.RayActorError as error:
                state, why = CarriedState.GONE, _words(error)
        return Carried(name=name, handle=str(actor._actor_id.hex()), state=state, host=host, why=why)

    def _script(self, name: PilotName, token: str) -> str:
        options = self._options
        return worker_script(
            program=options.program,
            url=options.url,
            token=token,
            directory=options.directory,
            node=f"$(hostname)-{name.pool}-{name.ordinal}" if options.shared else "$(hostname)",
            # The shell's parent is the actor, whose own is the raylet.
            allocation="pid:$PPID,$RAYLET",
            leave_s=options.leave_s,
            options=options.worker,
        )

    def _ray(self) -> Any:
        if self._module is None:
            try:
                import ray  # noqa: PLC0415 - only pools of Ray need it
            except ModuleNotFoundError as error:
                raise EngineUnavailable("the package ray is not installed here") from error
            self._module = ray
        if not self._is_connected:
            try:
                self._module.init(
                    address=self._options.address,
                    namespace=NAMESPACE,
                    log_to_driver=False,
                    ignore_reinit_error=True,
                    configure_logging=False,
                )
            except Exception as error:  # Ray's own
                raise EngineUnavailable(_words(error)) from error
            self._is_connected = True
        return self._module


def pilot_class() -> type[Any]:
    """The actor. Made in a function, so that Ray sends its source, and the hosts' Python needs no gpulease."""

    class Pilot:
        def __init__(self, script: str, log: str) -> None:
            import os  # noqa: PLC0415 - all that is used is sent with it
            import subprocess  # noqa: PLC0415
            import threading  # noqa: PLC0415

            os.makedirs(os.path.dirname(log), mode=0o700, exist_ok=True)
            with open(log, "ab") as output:
                self.shell = subprocess.Popen(
                    ["/bin/sh", "-c", script],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    env=os.environ | {"RAYLET": str(os.getppid())},
                    start_new_session=True,
                )

            def end_with_worker() -> None:
                self.shell.wait()
                os._exit(0)

            threading.Thread(target=end_with_worker, daemon=True).start()

        def where(self) -> str:
            import socket  # noqa: PLC0415

            return socket.gethostname()

        def leave(self) -> None:
            self.shell.terminate()

    return Pilot


def _words(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:500]
