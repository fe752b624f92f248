"""The driver of a pool on Ray ends, hangs and prints as it likes: each answer comes within a bound, or an error."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from gpulease_fleet import ray_process
from gpulease_fleet.carrier import EngineUnavailable
from gpulease_fleet.ray_process import RayProcess
from gpulease_protocol.host.process_id import ProcessId
from gpulease_protocol.host.process_tree import descendants
from tests.daemon import eventually

RAY = """
import os, pathlib, time
here = pathlib.Path(__file__).parent

def init(**options):
    print("what Ray prints")

def nodes():
    if (here / "end").exists():
        os._exit(1)
    if (here / "hang").exists():
        time.sleep(600)
    if (here / "fail").exists():
        raise RuntimeError("Version mismatch")
    return [{"Alive": True, "Resources": {"GPU": 8.0}}]
"""


@pytest.fixture
def ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module `ray` for drivers, and what it does."""
    (tmp_path / "ray.py").write_text(RAY)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path


def test_a_driver_that_ray_has_ended_is_followed_by_another(ray: Path) -> None:
    driver = RayProcess("auto")
    assert driver.ask("gpus") == [8]
    (ray / "end").touch()
    with pytest.raises(EngineUnavailable, match="Ray has ended the driver of this pool"):
        driver.ask("gpus")
    (ray / "end").unlink()
    assert driver.ask("gpus") == [8]
    driver.close()


def test_so_is_one_that_fails_or_hangs(ray: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = RayProcess("auto")
    (ray / "fail").touch()
    with pytest.raises(EngineUnavailable, match="RuntimeError: Version mismatch"):
        driver.ask("gpus")
    (ray / "fail").unlink()
    assert driver.ask("gpus") == [8]
    (ray / "hang").touch()
    monkeypatch.setattr(ray_process, "ANSWER_S", 0.1)
    with pytest.raises(EngineUnavailable, match=r"it did not answer within 0\.1 s"):
        driver.ask("gpus")
    (ray / "hang").unlink()
    assert driver.ask("gpus") == [8]
    driver.close()


def test_a_driver_ends_with_its_pool(ray: Path) -> None:
    (ray / "hang").touch()
    code = "from gpulease_fleet.ray_process import RayProcess; RayProcess('auto').ask('gpus')"
    pool = subprocess.Popen([sys.executable, "-c", code])
    found: set[ProcessId] = set()
    eventually(lambda: bool(found.update(descendants(pool.pid)) or found), 60)
    eventually(lambda: all(_is_hanging(process) for process in found), 60)
    os.kill(pool.pid, signal.SIGKILL)
    pool.wait()
    eventually(lambda: not any(process.alive() for process in found), 60)


def _is_hanging(process: ProcessId) -> bool:
    return "hrtimer_nanosleep" in Path(f"/proc/{process.pid}/wchan").read_text()


ACTOR = """
import sys
from gpulease_fleet.ray_driver import pilot_class
pilot = pilot_class()(sys.argv[1], sys.argv[2])
print(pilot.shell.pid, flush=True)
sys.stdin.read()
"""


def test_the_token_of_a_pilot_is_on_no_command_line_and_its_actor_ends_with_its_script(tmp_path: Path) -> None:
    """Every user of a host can read its command lines."""
    log = tmp_path / "logs" / "pilot.log"
    script = "export GPULEASE_TOKEN=secret\nset -- sh -c 'echo $GPULEASE_TOKEN; exec sleep 600'\n\"$@\" &\nwait\n"
    command = [sys.executable, "-c", ACTOR, script.replace("secret", "$SECRET"), str(log)]
    environment = os.environ | {"SECRET": "secret"}
    with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as actor:
        assert actor.stdout is not None
        shell = int(actor.stdout.readline())
        eventually(lambda: log.exists() and log.read_text() == "secret\n", 60)
        assert b"GPULEASE_TOKEN" not in Path(f"/proc/{shell}/cmdline").read_bytes()
        os.killpg(shell, signal.SIGKILL)
        assert actor.wait(60) == 0
