"""`gpulease submit` takes what people type, and refuses at once what cannot start."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from gpulease import Client
from gpulease_cli import submitted_command
from gpulease_cli.job_script import option_lines
from gpulease_protocol.launchers import choose_launcher
from gpulease_protocol.model import JobState, Launcher
from tests.cli.programs import Program, environ
from tests.daemon import eventually
from tests.imported_program import completed

NOWHERE = "unix:///nowhere/gpulease.sock"


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory of a user with scripts in it, which is the current one."""
    (tmp_path / "train.py").write_text("print('trained')")
    (tmp_path / "plain.sh").write_text("echo plain $1")
    (tmp_path / "bash.sh").write_text(
        "#!/usr/bin/env bash\n#GPULEASE -n 2 --name digits --time 1h\n\necho ${BASH_VERSION%%.*}"
    )
    (tmp_path / "tool").write_text("#!/bin/sh\necho tool")
    (tmp_path / "tool").chmod(0o755)
    (tmp_path / "binary").write_bytes(b"\x7fELF\0\0")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("words", "command", "launcher"),
    [
        (["train.py", "-x"], ["train.py", "-x"], Launcher.TORCHRUN),
        (["-m", "pkg.train"], ["-m", "pkg.train"], Launcher.TORCHRUN),
        (["sh", "train.py"], ["sh", "train.py"], Launcher.PLAIN),
        (["./tool"], ["./tool"], Launcher.PLAIN),
        (["tool", "a"], ["./tool", "a"], Launcher.PLAIN),
        (["plain.sh", "a"], ["/bin/sh", "plain.sh", "a"], Launcher.PLAIN),
        (["./plain.sh"], ["/bin/sh", "./plain.sh"], Launcher.PLAIN),
        (["bash.sh"], ["/usr/bin/env", "bash", "bash.sh"], Launcher.PLAIN),
        (["sh", "-c", "exit"], ["sh", "-c", "exit"], Launcher.PLAIN),
        (["binary"], ["binary"], Launcher.PLAIN),
        (["no-such"], ["no-such"], Launcher.PLAIN),
    ],
)
def test_a_command_is_started_as_people_mean_it(
    place: Path, words: list[str], command: list[str], launcher: Launcher
) -> None:
    found = submitted_command.startable(words, None, place, os.environ["PATH"])
    assert (found, choose_launcher(found)) == (command, launcher)


def test_a_program_on_path_comes_before_a_file_of_this_directory(place: Path) -> None:
    (place / "sh").write_text("echo mine")
    assert submitted_command.startable(["sh"], None, place, os.environ["PATH"]) == ["sh"]


def test_a_launcher_that_was_named_gets_the_words_as_they_are(place: Path) -> None:
    assert submitted_command.startable(["plain.sh"], Launcher.TORCHRUN, place, "") == ["plain.sh"]


@pytest.mark.parametrize(("command", "why"), [("binary", "is not executable"), ("no-such", "no such file in")])
def test_what_is_no_program_is_refused(place: Path, command: str, why: str) -> None:
    found = submitted_command.not_found([command], Launcher.PLAIN, place, {"PATH": os.environ["PATH"]})
    assert found is not None
    assert why in found[0]


def alone(*words: str, **more: str):
    """The program without a daemon: 3 means that it would have asked one."""
    return completed(words, environ(GPULEASE_URL=NOWHERE) | more, timeout_s=60)


@pytest.fixture(scope="module")
def bare_python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Python that has no torch."""
    place = tmp_path_factory.mktemp("bare")
    venv.create(place, symlinks=True)
    return str(place / "bin" / "python")


def test_a_python_without_the_launcher_is_refused_with_how_to_name_another(bare_python: str) -> None:
    refused = alone("submit", "--interpreter", bare_python, "train.py")
    assert refused.returncode == 1
    assert f"torchrun is not installed for {bare_python}: it has no module torch." in refused.stderr
    assert "--interpreter PATH; without a launcher: gpulease submit -- python train.py" in refused.stderr
    only_python3 = Path(bare_python).parent / "only"
    only_python3.mkdir()
    elsewhere = alone("submit", "--interpreter", bare_python, "train.py", PATH=str(only_python3))
    assert "gpulease submit -- python3 train.py" in elsewhere.stderr
    (only_python3 / "python3").symlink_to(bare_python)
    no_python = alone("submit", "--", "python", "train.py", PATH=str(only_python3))
    assert "do:  Use python3, or activate" in no_python.stderr
    of_shell = alone("submit", "train.py", VIRTUAL_ENV=str(Path(bare_python).parents[1]))
    assert f"torchrun is not installed for {bare_python}" in of_shell.stderr
    assert alone("submit", "--interpreter", bare_python, "--launcher", "plain", "--", "sh").returncode == 3
    missing = alone("submit", "--interpreter", "/nowhere/python", "train.py")
    assert "The interpreter /nowhere/python cannot be started: No such file or directory." in missing.stderr


def test_a_python_that_does_not_answer_is_left_to_the_worker(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = place / "slow"
    slow.write_text("#!/bin/sh\nexec sleep 60")
    slow.chmod(0o755)
    monkeypatch.setattr(submitted_command, "CHECK_S", 0.1)
    assert submitted_command.launcher_missing(Launcher.TORCHRUN, ["train.py"], str(slow), os.environ) is None


def test_the_options_of_a_script_end_with_its_head(place: Path) -> None:
    script = place / "s.sh"
    script.write_text(
        "#!/bin/sh\n\n#GPULEASE -n 2  # two\n# GPULEASE -n 3\n#GPULEASED\n#GPULEASE\nset -e\n#GPULEASE -n 4\n"
    )
    assert [(line.number, line.words) for line in option_lines(script)] == [(3, ["-n", "2"]), (6, [])]
    assert list(option_lines(place / "binary")) == []
    assert list(option_lines(place / "none")) == []


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("-n two", "s.sh, line 2: Invalid value for '-n' / '--gpus': 'two' is not a whole number"),
        ("-n 0", "s.sh, line 2: Invalid value for '-n' / '--gpus': must be 1 to 4096, not 0"),
        ("--gres=gpu:2", "s.sh, line 2: No such option"),
        ("-n 2 train.py", "s.sh, line 2: 'train.py' is not an option."),
        ("-n", "s.sh, line 2: "),
        ("--url http://other", "s.sh, line 2: --url cannot be set in a script."),
        ("--name 'a", "s.sh, line 2: No closing quotation"),
    ],
)
def test_a_bad_line_is_an_error_that_names_it(place: Path, line: str, why: str) -> None:
    (place / "s.sh").write_text(f"#!/bin/sh\n#GPULEASE {line}\n")
    refused = alone("submit", "s.sh")
    assert refused.returncode == 2, refused.stderr
    assert why in refused.stderr


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("--array", "x", "true"), '--array: must be like "0-19"'),
        (("--array", "5-1", "true"), "--array: '5-1' must go upwards"),
        (
            ("--after", "lease-0123456789abcdef", "true"),
            "--after: 'lease-0123456789abcdef' is neither a job nor an array.",
        ),
        (("--notify", "ftp://x", "true"), "--notify: must be an http or https URL with a host, or a command."),
    ],
)
def test_a_mistake_is_said_of_the_option_that_was_typed(words: tuple[str, ...], why: str) -> None:
    refused = alone("submit", *words)
    assert refused.returncode == 2
    assert why in refused.stderr


def test_a_module_is_named_as_after_python(bare_python: str) -> None:
    said = alone("submit", "-n", "2", "--interpreter", bare_python, "-m", "pkg.train", "-n", "3").stderr
    assert f"torchrun is not installed for {bare_python}" in said
    assert "passed to it" not in said


def test_options_of_a_script_count_unless_others_are_typed(client: Client, gpulease: Program) -> None:
    job = client.job(gpulease("submit", "bash.sh").stdout.strip())
    assert (job.name, job.gpu_count, job.timeout_s, job.launcher) == ("digits", 2, 3600.0, Launcher.PLAIN)
    assert client.wait_job(job.id).state is JobState.SUCCEEDED
    job = client.job(gpulease("submit", "-n", "1", "--timeout", "5m", "--", "bash.sh").stdout.strip())
    assert (job.name, job.gpu_count, job.timeout_s) == ("digits", 1, 300.0)
    client.wait_job(job.id)


def test_python_of_a_script_runs_without_a_launcher(client: Client, gpulease: Program) -> None:
    said = gpulease("submit", "--follow", "--", sys.executable, "train.py")
    assert (said.returncode, said.stdout.split("\n", 1)[1]) == (0, "trained\n")


@pytest.mark.parametrize(
    ("words", "hinted"),
    [(("sleep", "0", "-n", "2"), True), (("--", "sleep", "0", "-n"), False), (("sh", "-c", "exit"), False)],
)
def test_an_option_behind_the_script_is_hinted_at(words: tuple[str, ...], hinted: bool) -> None:
    assert ("-n comes after sleep, so it is passed to it" in alone("submit", *words).stderr) is hinted


def test_a_job_after_another_and_told_of(client: Client, gpulease: Program, place: Path) -> None:
    first = gpulease("submit", "--name", "first", "--", "sleep", "60").stdout.strip()
    told = place / "told"
    words = ("--after", first, "--notify", f"echo $GPULEASE_JOB_STATE >{told}")
    second = gpulease("submit", *words, "--", "true").stdout.strip()
    third = gpulease("submit", "--after", f"any:{second}, any:{first}", "--notify", f"touch {told}", "--", "true")
    assert [one.when for one in client.job(third.stdout.strip()).after] == ["ended", "ended"]
    waits = gpulease("submit", "--after", "first", "--dry-run", "--", "true")
    assert waits.stdout == f"Would wait: it waits until {first} has succeeded; then it joins the queue.\n"
    assert gpulease("cancel", first, "--grace", "0").returncode == 0
    assert client.wait_job(second).state is JobState.CANCELLED
    assert client.wait_job(third.stdout.strip()).state is JobState.SUCCEEDED
    assert "no job of this name" in gpulease("submit", "--after", "any:nonsense", "--", "true").stderr
    refused = gpulease("submit", "--after", second[:12], "--", "true")
    assert refused.returncode == 2, refused.stderr
    assert f"why: --after: {second} was cancelled, and only its success would let this job start." in refused.stderr
    assert "do:  Leave it out, or wait for any end: --after any:JOB" in refused.stderr


def test_a_dry_run_says_what_would_be(client: Client, gpulease: Program) -> None:
    def fits_now(text: str, *words: str) -> bool:
        """Soon: the readings of a busy machine may be too old at first."""
        said = gpulease("submit", "--dry-run", *words, "plain.sh")
        return said.returncode == 0 and text in said.stdout

    before = client.jobs()
    eventually(lambda: fits_now("Fits now: GPUs 0, 1, 2, 3 of ", "-n", "4"), 60)
    never = gpulease("submit", "--dry-run", "-n", "5", "plain.sh")
    assert (never.returncode, never.stdout.startswith("Never: asked for 5 GPUs.")) == (1, True)
    holding = gpulease("submit", "--", "sleep", "60").stdout.strip()
    waits = gpulease("submit", "--dry-run", "-n", "4", "plain.sh")
    assert waits.stdout.startswith("Would wait: asked for 4 GPUs; number 1 in the queue.")
    assert holding in waits.stdout
    eventually(lambda: fits_now('"verdict": "fits_now"', "--json"), 60)
    gpulease("cancel", holding, "--grace", "0")
    assert len(client.jobs()) == len(before) + 1
    client.wait_job(holding)


def test_a_directory_that_was_removed_is_said(place: Path) -> None:
    (place / "gone").mkdir()
    command = 'rmdir ../gone; exec "$0" -m gpulease_cli submit -- true'
    submitted = subprocess.run(
        ["sh", "-c", command, sys.executable],
        env=environ(GPULEASE_URL=NOWHERE),
        cwd=place / "gone",
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert submitted.returncode == 2
    assert "the current directory has been removed" in submitted.stderr
    assert "Traceback" not in submitted.stderr


def test_ctrl_c_before_the_answer_says_that_the_job_may_have_been_submitted() -> None:
    """Who takes it for not submitted submits it again, and has two trainings that write to one directory."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(60)
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        command = [sys.executable, "-m", "gpulease_cli", "submit", "--", "true"]
        with subprocess.Popen(command, env=environ(GPULEASE_URL=url), stderr=subprocess.PIPE, text=True) as submitting:
            connection, _ = silent.accept()
            with connection:
                connection.settimeout(60)
                assert connection.recv(5) == b"POST "
                submitting.send_signal(signal.SIGINT)
                _, said = submitting.communicate(timeout=60)
    assert submitting.returncode == 130
    assert "the job may have been submitted: `gpulease jobs --mine` shows it" in said


@pytest.mark.parametrize("words", [("--json",), ()])
def test_a_job_is_named_on_stderr_where_its_id_could_not_be_written(
    client: Client, url: str, words: tuple[str, ...]
) -> None:
    before = client.jobs()
    with open("/dev/full", "w") as full:
        result = subprocess.run(
            [sys.executable, "-m", "gpulease_cli", "submit", *words, "--", "true"],
            env=environ(GPULEASE_URL=url),
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            check=False,
        )
    (job,) = [job for job in client.jobs() if job.id not in [earlier.id for earlier in before]]
    assert result.returncode == 1
    assert f"gpulease: {job.id} was submitted" in result.stderr
    assert "why: No space left on device" in result.stderr
