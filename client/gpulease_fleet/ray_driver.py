"""The process that asks Ray for a pool: a *driver* of the cluster. One question a line on stdin, one answer on stdout.

If its raylet has ended, or its GCS was away for a minute, Ray ends a driver at once and without an exception. A pool
goes on then, so it has its driver in a process of its own; `gpulease_fleet.ray_process` starts the next one.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any

from gpulease_fleet.carrier import PilotName
from gpulease_protocol.host.process_tree import signal_on_parent_death

NAMESPACE = "gpulease"
WHERE_S = 3.0
"""How long pilots may take to say where they are; one that has no node yet does not answer. Seconds."""
QUESTIONS = ("gpus", "start", "pilots", "stop")


class RayDriver:
    """A connection to a cluster. All raise what Ray raises: `ConnectionError`, `RuntimeError`, errors of its own.

    Args:
        address: As `ray.init(address=...)`.
        ray: The module.
    """

    def __init__(self, address: str, ray: Any) -> None:
        self._ray = ray
        ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, configure_logging=False)

    def gpus(self) -> list[int]:
        """How many GPUs each living node has."""
        return [int(node["Resources"].get("GPU", 0)) for node in self._ray.nodes() if node.get("Alive")]

    def start(self, name: str, gpus: int, script: str, log: str) -> str:
        """Start a pilot; the id of its actor. Raises ValueError where there is one of that name."""
        made = self._ray.remote(num_cpus=0, num_gpus=gpus, max_restarts=0, max_task_retries=0)(pilot_class())
        actor = made.options(name=name, namespace=NAMESPACE, lifetime="detached").remote(script, log)
        return str(actor._actor_id.hex())

    def pilots(self, pool: str) -> list[dict[str, str]]:
        """All pilots of a pool: `name`, `handle`, `host` (empty: it did not say), `ended` (why; empty: it has not)."""
        ray, asked = self._ray, {}
        names = [PilotName.parse(one["name"]) for one in ray.util.list_named_actors(all_namespaces=True)]
        for name in (one for one in names if one is not None and one.pool == pool):
            try:
                actor = ray.get_actor(str(name), namespace=NAMESPACE)
            except ValueError:
                continue  # it has just ended
            asked[name] = (actor, actor.where.remote())
        answers = [answer for _, answer in asked.values()]
        ready = set(ray.wait(answers, num_returns=len(answers), timeout=WHERE_S)[0]) if answers else set()
        said = {name: answer if answer in ready else None for name, (_, answer) in asked.items()}
        return [self._pilot(name, actor, said[name]) for name, (actor, _) in asked.items()]

    def _pilot(self, name: PilotName, actor: Any, answer: Any) -> dict[str, str]:
        host, ended, errors = "", "", self._ray.exceptions
        if answer is not None:
            try:
                host = str(self._ray.get(answer))
            except errors.ActorUnavailableError:
                pass  # for the moment
            except errors.RayActorError as error:
                ended = words(error)
        return {"name": str(name), "handle": str(actor._actor_id.hex()), "host": host, "ended": ended}

    def stop(self, name: str, at_once: bool) -> None:
        """End a pilot: its worker leaves; `at_once`: whatever it does."""
        try:
            actor = self._ray.get_actor(name, namespace=NAMESPACE)
        except ValueError:
            return  # it has ended
        if at_once:
            self._ray.kill(actor)
        else:
            actor.leave.remote()


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
                    ["/bin/sh"],
                    stdin=subprocess.PIPE,  # every user of the host can read command lines, and the token is in it
                    stdout=output,
                    stderr=output,
                    env=os.environ | {"RAYLET": str(os.getppid())},
                    start_new_session=True,
                )
            assert self.shell.stdin is not None
            self.shell.stdin.write(script.encode())
            self.shell.stdin.close()

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


def words(error: Exception) -> str:
    """An error in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:500]


def main(address: str) -> int:
    """Answer until stdin ends. Connects with the first question."""
    signal_on_parent_death(signal.SIGKILL)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # Ray prints there
    driver = None
    for line in sys.stdin:
        question = json.loads(line)
        try:
            if driver is None:
                import ray  # noqa: PLC0415 - only pools of Ray need it

                driver = RayDriver(address, ray)
            assert question["ask"] in QUESTIONS
            answer = {"answer": getattr(driver, question["ask"])(**question["arguments"])}
        except ModuleNotFoundError as error:
            answer = {"error": f"the package {error.name} is not installed here"}
        except Exception as error:  # Ray's own
            answer = {"error": words(error)}
        print(json.dumps(answer), file=answers, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
