"""What `gpulease setup` plans for a host, and what it does to one; tests/system/test_install.py follows the page."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from gpulease_cli import main
from gpulease_server import host_setup
from gpulease_server.host_setup import UNITS, CannotSetUp, Host, Places, Write, apply, planned, removal, unit_files

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
    services = frozenset({"gpulease.service", "gpulease-worker.service"})
    assert steps(replace(READY, outdated=services)) == [
        "run systemctl restart gpulease.service gpulease-worker.service"
    ]


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
    assert list(plan.notes[1:]) == [
        "/opt/gpulease/bin/gpulease serve --no-worker",
        "/opt/gpulease/bin/gpulease worker --url unix:///var/lib/gpulease/gpulease.sock",
    ]


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
    assert plan.notes == ("Kept: /etc/gpulease and /var/lib/gpulease; --purge removes that too.",)
    purged = [str(step) for step in removal(READY, purge=True).steps]
    assert purged[-3:-1] == ["remove /etc/gpulease (settings)", "remove /var/lib/gpulease (records and logs)"]


def test_nothing_is_removed_while_jobs_run() -> None:
    with pytest.raises(CannotSetUp, match="2 jobs have not ended: job-1, job-2") as refused:
        removal(replace(READY, jobs=("job-1", "job-2")), purge=True)
    assert refused.value.remedy == "gpulease cancel job-1, job-2"


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
case "$*" in *gpulease.service*) since=1000000 ;; *) since=99999999999999 ;; esac
[ "$1" = show ] && echo $since || exit 0
"""
"""As systemctl: the worker is not enabled, the socket is not active, the daemon runs since a second after the boot."""


def test_what_systemd_says_is_taken_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "systemctl"
    program.write_text(SYSTEMCTL)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(host_setup, "SYSTEMD", tmp_path)
    monkeypatch.setattr(host_setup.other_daemons, "usual_addresses", tuple)
    places = Places(tmp_path / "units", tmp_path / "gpulease", tmp_path / "config.toml", tmp_path / "d")
    host = host_setup.examine(places)
    assert host.systemd
    assert host.enabled == {"gpulease.socket", "gpulease.service"}
    assert host.active == {"gpulease.service", "gpulease-worker.service"}
    assert host.outdated == {"gpulease.service"}
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
        ([], 0, 2, "There is no terminal on which to ask", True),
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
        directory.chmod(0o755)
        assert host_setup.unsafe(program) is None
        os.chown(program.parent, 54321, 54321)
        assert f"{program.parent} does not belong to root" in str(host_setup.unsafe(program))
