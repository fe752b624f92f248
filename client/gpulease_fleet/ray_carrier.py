"""Pilots as detached actors of Ray: each has all GPUs of one node, and runs the worker of that node.

| rule | what it is for |
|---|---|
| a pilot asks for all GPUs of a node | Ray gives them to no one else, and there is one pilot on a node |
| the actor ends with its worker | a pilot without its worker is seen to be gone, and the next one comes |
| the worker leaves when the actor or its raylet has ended | Ray gives their GPUs away, and leaves what they started |
| the worker leaves when its token is refused | the GCS has given up a raylet that lives on, or has lost its state |

Ray never starts a pilot again (`max_restarts=0`): that is what the pool does, with the next generation. A pilot runs
the worker through a shell, because Ray kills the children of an actor that was killed, and the worker has to leave.
"""

from __future__ import annotations

from typing import Any, Protocol

from gpulease_fleet.carrier import Carried, CarriedState, EngineUnavailable, Finding, PilotName, SubmitError
from gpulease_fleet.ray_process import RayProcess
from gpulease_fleet.worker_script import worker_script
from gpulease_protocol.lazy_dataclass import dataclass

WAITS = "it waits for a node with so many free GPUs"
AWAY = (
    "Check `ray status`, and --address. A GCS that has ended takes its cluster with it, unless it kept its state in "
    "Redis or RocksDB: start the cluster again, and the pool starts new pilots."
)


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


class Ask(Protocol):
    """Asks Ray, see `gpulease_fleet.ray_driver.RayDriver`. Raises `EngineUnavailable`."""

    def __call__(self, what: str, **arguments: Any) -> Any:
        """The answer."""


class RayCarrier:
    """Starts, lists and ends pilots in a cluster of Ray, to which it connects at the first call."""

    engine = "ray"
    gone_s = 10.0
    leaves_s = 15.0

    def __init__(self, options: RayOptions, ask: Ask | None = None) -> None:
        self._options = options
        self._ask = ask or RayProcess(options.address).ask
        self._hosts: dict[str, str] = {}
        """By handle: where a pilot once said that it is."""

    def doctor(self) -> list[Finding]:
        """What would go wrong on this cluster, before it does."""
        try:
            gpus: list[int] = sorted(self._ask("gpus"))
        except EngineUnavailable as error:
            return [Finding(ok=False, what=f"Ray does not answer: {error}", remedy=AWAY)]
        whole = [one for one in gpus if one == self._options.gpus]
        if whole:
            return [Finding(ok=True, what=f"{len(whole)} of {len(gpus)} nodes have {self._options.gpus} GPUs")]
        return [
            Finding(
                ok=False,
                what=f"no node has {self._options.gpus} GPUs; they have {', '.join(map(str, gpus)) or 'none'}",
                remedy="Say with --gpus how many each node has: with fewer, Ray would give the others away.",
            )
        ]

    def start(self, name: PilotName, token: str) -> str:
        """Start a pilot and return the id of its actor. Raises `SubmitError`: also where one of that name is there."""
        log = f"{self._options.directory}/pilot-{name.ordinal}-{name.generation}.log"
        try:
            handle = self._ask(
                "start", name=str(name), gpus=self._options.gpus, script=self._script(name, token), log=log
            )
        except EngineUnavailable as error:
            raise SubmitError(str(error)) from error
        return str(handle)

    def list(self, pool: str) -> list[Carried]:
        """All pilots of a pool. Raises `EngineUnavailable`."""
        answer = self._ask("pilots", pool=pool)
        said = {one["handle"]: one["host"] for one in answer if one["host"]}
        self._hosts = {one["handle"]: self._hosts.get(one["handle"], "") for one in answer} | said
        return [carried for one in answer if (carried := self._carried(**one)) is not None]

    def stop(self, pilot: Carried, *, at_once: bool) -> None:
        """End a pilot: its worker leaves; `at_once`: whatever it does. Raises `EngineUnavailable`."""
        self._ask("stop", name=str(pilot.name), at_once=at_once)

    def node_of(self, pilot: Carried) -> str:
        """The name of the node that it carries, as the daemon knows it; empty before it has a host."""
        if not pilot.host or not self._options.shared:
            return pilot.host
        return f"{pilot.host}-{pilot.name.pool}-{pilot.name.ordinal}"

    def _carried(self, *, name: str, handle: str, host: str, ended: str) -> Carried | None:
        parsed = PilotName.parse(name)
        if parsed is None:
            return None
        host = host or self._hosts.get(handle, "")  # busy or away for the moment, it does not wait for a node again
        state, why = (CarriedState.RUNNING, "") if host else (CarriedState.PENDING, WAITS)
        if ended:
            state, why = CarriedState.GONE, ended
        return Carried(name=parsed, handle=handle, state=state, host=host, why=why)

    def _script(self, name: PilotName, token: str) -> str:
        options = self._options
        return worker_script(
            program=options.program,
            url=options.url,
            token=token,
            directory=options.directory,
            node=f"$(hostname)-{name.pool}-{name.ordinal}" if options.shared else "$(hostname)",
            # The shell's parent is the actor; the actor's parent is the raylet.
            allocation="pid:$PPID,$RAYLET",
            leave_s=options.leave_s,
            options=options.worker,
        )
