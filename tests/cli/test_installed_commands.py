"""Commands that the server and the worker bring by entry points, and the settings that they declare."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

from gpulease_cli import installed_commands, main, output
from gpulease_cli.command_groups import Commands
from gpulease_cli.command_table import COMMANDS
from gpulease_cli.program import PROGRAM
from gpulease_protocol.host.settings import declarations
from gpulease_server.core.limit_records import UserLimits
from gpulease_server.core.policy import Policy
from gpulease_server.settings import ServeSettings
from gpulease_server.store.retention import RetentionLimits
from gpulease_worker.jobs.job_settings import JobSettings
from gpulease_worker.jobs.reconciler import KEEP_JOBS
from gpulease_worker.probe.probe_protocol import IDLE_BYTES, Pace
from gpulease_worker.settings import WorkerSettings


def test_the_program_has_the_commands_of_every_installed_package() -> None:
    assert {"serve", "db", "worker", "doctor", "status"} <= set(PROGRAM.commands)
    assert set(PROGRAM.commands["db"].commands) == {"upgrade", "current", "check", "backup"}


def test_a_command_of_the_client_imports_neither_server_nor_worker() -> None:
    program = (
        "import sys; from gpulease_cli import main; main(['status', '--nonsense'])\n"
        "print([name for name in sys.modules if name.startswith(('gpulease_server', 'gpulease_worker'))])"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert ran.stdout == "[]\n"


def test_help_names_the_extra_of_a_package_that_cannot_be_imported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "gpulease_server.commands.serve", None)
    assert Commands(COMMANDS)["serve"].help == "Not installed; needs the extra `server`."


def test_an_installation_older_than_the_program_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(installed_commands, "entry_points", dict)
    monkeypatch.setattr(PROGRAM, "commands", Commands(COMMANDS))
    assert main(["serve"]) == output.USAGE
    assert "No installed package provides 'serve'" in capsys.readouterr().err


def test_defaults_of_settings_are_those_of_the_parts_that_they_set() -> None:
    serve, worker = ServeSettings(), WorkerSettings()
    policy = Policy()
    for name in ("max_bypass", "max_bypass_s", "max_observation_age_s", "retained_memory_s"):
        assert getattr(serve, name) == getattr(policy, name), name
    limits = UserLimits(
        leases=serve.max_leases_per_user,
        gpus=serve.max_gpus_per_user,
        queued=serve.max_queue_per_user,
        queued_bytes=serve.max_queue_bytes_per_user,
    )
    assert limits == UserLimits()
    assert (
        RetentionLimits(age_s=serve.keep_days * 86400, ended=serve.keep_ended, events=serve.keep_events)
        == RetentionLimits()
    )
    pace = Pace(processes_s=worker.processes_s, health_s=worker.health_s, call_deadline_s=worker.call_deadline_s)
    assert pace == Pace()
    assert replace(worker.of_jobs, node=None, open_files=None) == JobSettings()  # these are of this host
    assert (worker.keep_jobs, worker.idle_memory_bytes) == (KEEP_JOBS, IDLE_BYTES)


@pytest.mark.parametrize(("name", "settings"), [("serve", ServeSettings), ("worker", WorkerSettings)])
def test_every_declared_setting_is_an_option(name: str, settings: type) -> None:
    options = {option.name for option in PROGRAM.commands[name].params}
    assert set(declarations(settings)) <= options


def test_a_command_whose_extra_is_missing_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "gpulease_mcp.server", None)
    assert main(["mcp", "--agent", "tester"]) == output.REFUSED
    assert "pip install 'gpulease[mcp]'" in capsys.readouterr().err
