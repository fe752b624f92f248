"""What `gpulease setup` plans for a host, and what it does to one; tests/system/test_install.py follows the page."""

from __future__ import annotations

import os
import pwd
import re
import subprocess
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from gpulease_cli import main
from gpulease_protocol.host import systemd
from gpulease_server import host_setup
from gpulease_server.host_setup import (
    UNITS,
    CannotSetUp,
    CannotUninstall,
    Host,
    Places,
    Write,
    apply,
    planned,
    removal,
    unit_files,
)
from gpulease_server.running_programs import RunningProgram, of_installation

PROGRAM = Path("/opt/gpulease/bin/gpulease")
NEW = Host(program=PROGRAM, systemd=True, jobs=None)
READY = Host(
    program=PROGRAM,
    units=unit_files(),
    link=PROGRAM,
    config=True,
    kept=(Path("/etc/gpulease"), Path("/var/lib/gpulease")),
    systemd=True,
    enabled=frozenset(UNITS),
    active=frozenset(UNITS),
    daemon="a gpulease daemon of user root answers at unix:///var/lib/gpulease/gpulease.sock already",
)


DAEMON = RunningProgram("daemon", 11, "root", service="gpulease.service")
WORKER = RunningProgram("worker", 12, "root", service="gpulease-worker.service")
JOB = RunningProgram("job", 13, "root", "job-3", "gpulease-worker.service")


def steps(host: Host) -> list[str]:
    return [str(step) for step in planned(host, "text", unit_files()).steps]


def test_a_new_host_gets_all_three_units_a_link_and_settings_and_they_start() -> None:
    *files, reload, start = steps(NEW)
    assert [re.sub(r" \(.*", "", file) for file in files] == [
        "write /etc/systemd/system/gpulease.socket",
        "write /etc/systemd/system/gpulease.service",
        "write /etc/systemd/system/gpulease-worker.service",
        "link /usr/local/bin/gpulease to /opt/gpulease/bin/gpulease",
        "write /etc/gpulease/config.toml",
    ]
    assert reload == "run systemctl daemon-reload"
    assert start == "run systemctl enable --now gpulease.socket gpulease.service gpulease-worker.service"


def test_on_a_host_that_is_set_up_there_is_nothing_to_do() -> None:
    assert steps(READY) == []


def test_a_newer_version_replaces_its_units_and_restarts_what_runs() -> None:
    older = READY.units | {"gpulease-worker.service": "[Unit]"}
    assert steps(replace(READY, units=older)) == [
        "write /etc/systemd/system/gpulease-worker.service (another version is there)",
        "run systemctl daemon-reload",
        "run systemctl restart gpulease-worker.service",
    ]
    assert steps(replace(READY, outdated=(DAEMON, WORKER))) == [
        "run systemctl restart gpulease.service gpulease-worker.service"
    ]


def test_addresses_are_opened_only_while_the_daemon_does_not_run() -> None:
    """systemd refuses to start a socket unit of a service that runs: `systemctl restart gpulease.socket` fails."""
    older = READY.units | {"gpulease.socket": "[Unit]"}
    replaced = "write /etc/systemd/system/gpulease.socket (another version is there)"
    again = ["run systemctl stop gpulease.socket", "run systemctl restart gpulease.service"]
    assert steps(replace(READY, units=older)) == [replaced, "run systemctl daemon-reload", *again]
    upgraded = replace(READY, units=older, outdated=(DAEMON, WORKER))
    assert steps(upgraded)[2:] == [again[0], f"{again[1]} gpulease-worker.service"]
    enable = f"run systemctl enable --now {' '.join(UNITS)}"
    assert steps(replace(READY, active=frozenset(UNITS) - {"gpulease.socket"})) == [again[1], enable]
    alone = replace(READY, units=older, active=frozenset({"gpulease.socket"}), daemon=None)
    assert steps(alone)[2:] == ["run systemctl restart gpulease.socket", enable]


def test_a_worker_that_was_not_brought_along_is_started() -> None:
    without = frozenset(UNITS) - {"gpulease-worker.service"}
    assert steps(replace(READY, active=without)) == [
        "run systemctl enable --now gpulease.socket gpulease.service gpulease-worker.service"
    ]


def test_units_start_the_program_that_was_installed() -> None:
    elsewhere = Path("/srv/gpus/bin/gpulease")
    plan = planned(replace(NEW, program=elsewhere), "text", unit_files())
    texts = {step.path.name: step.text for step in plan.steps if isinstance(step, Write)}
    assert "ExecStart=/srv/gpus/bin/gpulease serve --no-worker\n" in texts["gpulease.service"]
    assert "/opt/gpulease" not in "".join(texts.values())


@pytest.mark.parametrize(
    ("host", "said"),
    [
        (replace(NEW, closed="Other users cannot enter /root, in which x is."), "cannot enter /root"),
        (replace(NEW, link_is_file=True), "/usr/local/bin/gpulease is not a link"),
        (replace(NEW, daemon="a gpulease daemon of user ada answers at x already"), "A gpulease daemon of user ada"),
    ],
)
def test_what_stands_in_the_way_is_said_before_anything_is_done(host: Host, said: str) -> None:
    with pytest.raises(CannotSetUp, match=said):
        planned(host, "text", unit_files())


def test_without_systemd_it_says_what_to_start() -> None:
    plan = planned(replace(NEW, systemd=False), "text", unit_files())
    assert not [step for step in plan.steps if "systemctl" in str(step)]
    assert list(plan.notes[1:3]) == [
        "/opt/gpulease/bin/gpulease serve --no-worker",
        "/opt/gpulease/bin/gpulease worker --url unix:///var/lib/gpulease/gpulease.sock",
    ]


def test_after_an_upgrade_without_systemd_it_names_what_to_restart() -> None:
    host = replace(READY, systemd=False, outdated=(replace(DAEMON, service=""), replace(WORKER, service="")))
    plan = planned(host, "text", unit_files())
    assert (plan.steps, plan.without_steps) == ((), "No file has to be changed.")
    assert plan.notes == (
        "Restart the programs that were started before this version was installed:"
        " a daemon (pid 11 of root); a worker (pid 12 of root).",
    )
    assert planned(replace(host, outdated=()), "text", unit_files()).without_steps == "Nothing to do."


def test_it_says_what_users_install() -> None:
    wheel = Path("/opt/gpulease/wheel/gpulease-0.1.0-py3-none-any.whl")
    for host in (replace(READY, wheel=wheel), replace(NEW, wheel=wheel, systemd=False)):
        assert planned(host, "text", unit_files()).notes[-1] == f"For training environments: pip install {wheel}"


def test_the_program_goes_and_what_it_has_recorded_stays_unless_it_is_to_be_purged() -> None:
    plan = removal(READY, purge=False)
    assert [str(step) for step in plan.steps] == [
        "run systemctl disable --now gpulease.socket gpulease.service gpulease-worker.service",
        "remove /etc/systemd/system/gpulease.socket",
        "remove /etc/systemd/system/gpulease.service",
        "remove /etc/systemd/system/gpulease-worker.service",
        "run systemctl daemon-reload",
        "remove /usr/local/bin/gpulease",
        "remove /opt/gpulease (the program)",
    ]
    assert plan.notes == ("Settings, records and logs stay. To remove them too: rm -r /etc/gpulease /var/lib/gpulease",)
    purged = [str(step) for step in removal(READY, purge=True).steps]
    assert purged[-3:-1] == ["remove /etc/gpulease (settings)", "remove /var/lib/gpulease (records and logs)"]


def test_nothing_is_removed_while_jobs_run() -> None:
    with pytest.raises(CannotUninstall, match="2 jobs have not ended: job-1, job-2") as refused:
        removal(replace(READY, jobs=("job-1", "job-2")), purge=True)
    assert refused.value.remedy == "gpulease cancel job-1 job-2"


def test_nothing_is_removed_while_a_job_runs_of_which_no_daemon_tells() -> None:
    down = replace(READY, daemon=None, jobs=None, active=frozenset(), running=(WORKER, JOB))
    with pytest.raises(CannotUninstall, match="1 job has not ended: job-3") as refused:
        removal(down, purge=True)
    assert refused.value.remedy == "Start the daemon, then gpulease cancel job-3; or without it: kill 13"


def test_nothing_is_removed_while_a_program_runs_that_systemd_would_not_end() -> None:
    by_hand = replace(WORKER, service="")
    with pytest.raises(CannotUninstall, match=r"a worker \(pid 12 of root\)") as refused:
        removal(replace(READY, running=(DAEMON, by_hand)), purge=False)
    assert refused.value.remedy.endswith("kill 12")
    assert removal(replace(READY, running=(DAEMON, WORKER)), purge=False).steps


def test_programs_of_the_installation_are_known_by_their_command_lines(tmp_path: Path) -> None:
    prefix, data = tmp_path / "opt", tmp_path / "data"
    lines = {
        11: [f"{prefix}/bin/python", f"{prefix}/bin/gpulease", "--url", "worker", "serve", "--no-worker"],
        12: [f"{prefix}/bin/python", "-P", "-m", "gpulease_cli", "worker"],
        13: [f"{prefix}/bin/python", "-P", "-m", "gpulease_worker.jobs.supervisor", f"{data}/worker/jobs/job-3.2"],
        14: ["/srv/python", "-P", "-m", "gpulease_worker.jobs.supervisor", f"{data}/worker/jobs/job-4"],
        15: [f"{prefix}/bin/python", f"{prefix}/bin/gpulease", "run", "-n", "1", "--", "x", "worker"],
        16: [f"{prefix}/bin/python", "-m", "gpulease_cli", "worker", "--with-parent"],
        17: ["/home/ada/bin/python", "/home/ada/bin/gpulease", "serve"],
        18: [f"{prefix}/bin/python", "/usr/local/bin/gpulease", "worker"],
    }
    for directory in (prefix, data, tmp_path / "elsewhere"):
        directory.mkdir()
    for pid, words in lines.items():
        process = tmp_path / "proc" / str(pid)
        process.mkdir(parents=True)
        (process / "root").symlink_to(tmp_path / "elsewhere" if pid == 18 else "/")
        (process / "cmdline").write_bytes(b"\0".join(map(os.fsencode, words)) + b"\0")
        (process / "cgroup").write_text("0::/system.slice/gpulease-worker.service/x\n" if pid == 12 else "0::/user\n")
        (process / "stat").write_text(Path("/proc/self/stat").read_text())
    found = of_installation(prefix, data, ("gpulease.service", "gpulease-worker.service"), tmp_path / "proc")
    assert [(one.pid, one.kind, one.name, one.service) for one in found] == [
        (11, "daemon", "", ""),
        (12, "worker", "", "gpulease-worker.service"),
        (13, "job", "job-3", ""),
        (14, "job", "job-4", ""),
    ]
    assert {one.user for one in found} == {pwd.getpwuid(os.getuid()).pw_name}
    assert all(0 <= time.time() - one.started_at_s < 10**6 for one in found)


@pytest.mark.parametrize("place", ["/root/.pyenv/versions/3.11.7/bin/python3.11", "/home/ada/venv/bin/gpulease"])
def test_what_is_in_a_home_is_no_program_for_all(place: str) -> None:
    assert "belongs to one user" in str(host_setup.unsafe(Path(place)))


def test_it_writes_once_and_keeps_what_an_administrator_has_changed(tmp_path: Path) -> None:
    places = Places(tmp_path / "units", tmp_path / "bin" / "gpulease", tmp_path / "etc" / "config.toml", tmp_path / "d")
    host = replace(NEW, systemd=False)
    assert len(list(apply(planned(host, "text", unit_files(), places)))) == 5
    assert places.link.readlink() == PROGRAM
    assert {file.name for file in places.units.iterdir()} == {*UNITS}
    assert [oct(file.stat().st_mode & 0o777) for file in (places.config, *places.units.iterdir())] == ["0o644"] * 4
    places.config.write_text("mine")
    again = replace(host, units=unit_files(), link=PROGRAM, config=True)
    assert planned(again, "text", unit_files(), places).steps == ()


SYSTEMCTL = """#!/bin/sh
echo "$@" >> "$0.asked"
case "$1 $3" in
    "is-enabled gpulease-worker.service") exit 1 ;;
    "is-active gpulease.socket") exit 3 ;;
esac
exit 0
"""
"""As systemctl: the worker is not enabled, the socket is not active."""


def test_what_systemd_says_is_taken_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "systemctl"
    program.write_text(SYSTEMCTL)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(systemd, "RUNS", tmp_path)
    runs = (replace(DAEMON, started_at_s=1.0), replace(WORKER, started_at_s=1e12))
    monkeypatch.setattr(host_setup.running_programs, "of_installation", lambda *_: runs)
    monkeypatch.setattr(host_setup.other_daemons, "usual_addresses", tuple)
    places = Places(tmp_path / "units", tmp_path / "gpulease", tmp_path / "config.toml", tmp_path / "d")
    host = host_setup.examine(places)
    assert host.systemd
    assert host.enabled == {"gpulease.socket", "gpulease.service"}
    assert host.active == {"gpulease.service", "gpulease-worker.service"}
    assert host.outdated == (runs[0],)
    assert (host.units, host.config, host.kept, host.daemon, host.jobs) == ({}, False, (tmp_path,), None, None)
    done = [str(step) for step in apply(planned(replace(host, closed=None), "text", unit_files(), places))]
    assert done[-3:] == [
        "run systemctl daemon-reload",
        "run systemctl restart gpulease.service gpulease-worker.service",
        "run systemctl enable --now gpulease.socket gpulease.service gpulease-worker.service",
    ]
    asked = (tmp_path / "systemctl.asked").read_text().splitlines()
    assert asked[-3:] == [step.removeprefix("run systemctl ") for step in done[-3:]]


def test_a_failure_half_way_says_what_is_done_and_what_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(words: tuple[str, ...], **_: object) -> None:
        raise subprocess.CalledProcessError(1, words, stderr="Unit gpulease-worker.service\nnot found.")

    monkeypatch.setattr(host_setup.subprocess, "run", run)
    places = Places(tmp_path / "units", tmp_path / "gpulease", tmp_path / "config.toml", tmp_path / "d")
    with pytest.raises(CannotSetUp) as failed:
        list(apply(planned(NEW, "text", unit_files(), places)))
    assert failed.value.detail.startswith(
        "Failed: run systemctl daemon-reload: Unit gpulease-worker.service not found. Done: write "
    )
    assert failed.value.detail.endswith(f"Not done: run systemctl enable --now {' '.join(UNITS)}.")
    with pytest.raises(CannotUninstall, match="Failed: run systemctl disable --now"):
        list(apply(removal(READY, purge=False)))


@pytest.fixture
def new_host(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The program finds a new host; the steps that it would make."""
    made: list[str] = []
    monkeypatch.setattr(host_setup, "examine", lambda: NEW)
    monkeypatch.setattr(host_setup, "apply", lambda plan: made.extend(map(str, plan.steps)) or plan.steps)
    return made


@pytest.mark.parametrize(
    ("words", "uid", "code", "said", "shown"),
    [
        (["--dry-run"], 1000, 0, "", True),
        ([], 0, 2, "There is no terminal to ask on", True),
        (["--yes"], 1000, 2, "Only root can do this", True),
        (["--yes", "--admin", "a b"], 0, 2, "neither a user nor a group", False),
        (["--yes", "--purge"], 0, 2, "--purge goes with --uninstall", False),
    ],
)
def test_nothing_is_done_by_one_who_may_not_or_was_not_asked(
    new_host: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    uid: int,
    code: int,
    said: str,
    shown: bool,
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: uid)
    assert (main(["setup", *words]), new_host) == (code, [])
    captured = capsys.readouterr()
    assert said in captured.err
    assert ("write /etc/systemd/system/gpulease.service (the unit)" in captured.out) is shown


@pytest.mark.parametrize("answer", ["y", "n"])
def test_it_shows_the_steps_and_then_asks(
    new_host: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], answer: str
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr("sys.stdin", SimpleNamespace(isatty=lambda: True))
    monkeypatch.setattr("builtins.input", lambda prompt="": answer)
    monkeypatch.setattr("click.termui.visible_prompt_func", lambda prompt="": answer)
    assert main(["setup"]) == (0 if answer == "y" else 1)
    assert len(new_host) == (7 if answer == "y" else 0)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes files of other users")
def test_a_program_that_another_user_may_change_or_no_other_can_read_is_refused() -> None:
    with tempfile.TemporaryDirectory() as name:
        directory, program = Path(name), Path(name, "bin", "gpulease")
        program.parent.mkdir()
        program.touch()
        assert f"Other users cannot enter {directory}" in str(host_setup.unsafe(program))
        assert "umask 022; /usr/bin/python3 -m venv" in host_setup.HOW_TO_INSTALL
        directory.chmod(0o755)
        assert host_setup.unsafe(program) is None
        os.chown(program.parent, 54321, 54321)
        assert f"{program.parent} does not belong to root" in str(host_setup.unsafe(program))
