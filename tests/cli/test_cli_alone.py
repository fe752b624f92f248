"""Errors that the program finds in its own command line, before any request."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest

from gpulease_cli import main
from gpulease_cli.failures import COMMANDS_ELSEWHERE
from gpulease_cli.snapshot import Snapshot
from gpulease_protocol.durations import parse_duration
from gpulease_protocol.errors import DaemonUnavailable
from tests.cli.programs import environ
from tests.client.fake_daemon import FakeDaemon
from tests.imported_program import completed

NOWHERE = "http://127.0.0.1:9"


def gpulease(*arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    return completed(arguments, environ(GPULEASE_URL=NOWHERE) | more, timeout_s=60)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("90s", 90), ("10m", 600), ("2h", 7200), ("1.5h", 5400), ("300", 300), ("0", 0), ("1d", 86400), (" 5M ", 300)],
)
def test_durations(text: str, expected: float) -> None:
    assert parse_duration(text) == expected


@pytest.mark.parametrize("text", ["", "m", "-5", "5x", "1h30m", "inf", "nan", "1e3", "٣", "9" * 400])
def test_an_invalid_duration_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="write it like"):
        parse_duration(text)


@pytest.mark.alone
@pytest.mark.parametrize(
    "arguments",
    [
        ("status",),
        ("acquire",),
        ("leases",),
        ("jobs",),
        ("logs", "j"),
        ("logs", "-f", "j"),
        ("wait", "j"),
        ("submit", "--", "true"),
        ("explain", "job-1"),
    ],
)
def test_without_a_daemon_it_exits_3_soon_and_says_what_to_do(arguments: tuple[str, ...]) -> None:
    took_s: list[float] = []
    while not took_s or (took_s[-1] >= 4 and len(took_s) < 3):  # Python may take long to start on a busy machine
        begun = time.monotonic()
        result = gpulease(*arguments)
        took_s.append(time.monotonic() - begun)
    assert took_s[-1] < 4, took_s
    assert result.returncode == 3
    assert result.stderr.split("\n")[:3] == [
        "gpulease: daemon unavailable",
        f"  why: No daemon answers at {NOWHERE} (Connection refused).",
        "  do:  Check the address (GPULEASE_URL), and that the daemon runs there.",
    ]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("nonsense",), "nonsense"),
        (("run", "-n", "two", "--", "true"), "-n/--gpus: 'two' is not a whole number"),
        (("run", "-n", "0", "--", "true"), "-n/--gpus: must be 1 to 4096, not 0"),
        (("run", "-n", "-1", "--", "true"), "-n/--gpus: must be 1 to 4096, not -1"),
        (("acquire", "-n", "5000"), "-n/--gpus: must be 1 to 4096, not 5000"),
        (("acquire", "--ttl", "0"), "--ttl: must be over 0"),
        (("run", "--wait", "5x", "--", "true"), "'5x' is not a duration"),
        (("run",), "COMMAND... is missing"),
        (("submit", "--env", "NOVALUE", "--", "train.py"), "'NOVALUE' is not NAME=VALUE"),
        (("submit", "--launcher", "mpirun", "--", "train.py"), "mpirun"),
        (("submit", "-n", "0", "--", "train.py"), "-n/--gpus: must be 1 to 4096, not 0"),
        (("serve", "--port", "70000"), "--port"),
        (("cancel",), "JOB... is missing; --mine is for all of yours"),
        (("node", "drain"), "See `gpulease node drain --help`."),
        (("statsu",), "there is no command statsu. Did you mean status?"),
        (("stauts",), "Did you mean status?"),
        (("ps",), "Use `gpulease jobs`."),
        (("scancel", "3"), "Use `gpulease cancel`."),
        (("salloc",), "Use `gpulease shell`."),
        (("run", "--gres=gpu:2", "--", "true"), "there is no option --gres"),
        (("run", "--gres=gpu:2", "--", "true"), "-n 2 asks for two GPUs."),
        (("run", "-it", "--", "bash"), "your terminal already"),
        (("run", "-n"), "-n needs a value"),
        (("--url", "nonsense", "status"), "--url: 'nonsense' is not the address"),
        (("status", "--url", "nonsense"), "--url: 'nonsense' is not the address"),
        (("release", "job-1"), "`gpulease cancel job-1`"),
        (("jobs", "--state", "done"), "--state: 'done' is not one of queued, starting"),
        (("jobs", "--limit", "0"), "--limit"),
        (("status", "--watch", "--json"), "--watch and --json"),
    ],
)
def test_invalid_usage_exits_2_with_three_lines_that_name_the_mistake(arguments: tuple[str, ...], said: str) -> None:
    result = gpulease(*arguments)
    assert result.returncode == 2
    assert said in result.stderr
    assert "Traceback" not in result.stderr
    assert len(result.stderr.strip().split("\n")) == 3


@pytest.mark.parametrize(
    ("arguments", "code"),
    [(("-n", "1"), 3), (("-n", "0"), 2), (("--nonsense",), 2), (("-n", "1", "--wait", "5x"), 2)],
)
def test_eval_of_a_refused_acquire_fails_with_its_exit_code(arguments: tuple[str, ...], code: int) -> None:
    result = gpulease("acquire", *arguments)
    again = shlex.join(["printf", "%s", result.stdout]) + f"; exit {result.returncode}"
    for command in (f'eval "$({again})"', f"eval $({again})"):
        shell = ["sh", "-c", f"{command}; echo $?"]
        ran = subprocess.run(shell, capture_output=True, text=True, timeout=60, check=False)
        assert ran.stdout == f"{code}\n", command


def test_a_refusal_prints_no_json() -> None:
    assert gpulease("acquire", "--json").stdout == ""


@pytest.mark.parametrize("words", [(), ("run",), ("node",), ("node", "drain")])
def test_dash_h_is_help(words: tuple[str, ...]) -> None:
    result = gpulease(*words, "-h")
    assert result.returncode == 0
    assert result.stdout == gpulease(*words, "--help").stdout
    assert result.stdout.startswith(f"Usage: gpulease {' '.join(words)}".rstrip())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--", "no-such-train.py"), "There is no script 'no-such-train.py' in "),
        (("--launcher", "accelerate", "--", "no/such/train.py", "--epochs", "3"), "'no/such/train.py'"),
        (("--", "."), "There is no program '.'"),
        (("--launcher", "plain", "--", "no-such-program"), "There is no program 'no-such-program' on PATH"),
        (("--launcher", "plain", "--", "./no-such-program"), "'./no-such-program'"),
        (("--launcher", "plain", "--env", "PATH=/nowhere", "--", "sh"), "There is no program 'sh' on PATH"),
        (("--launcher", "torchrun", "--", "sh"), "There is no script 'sh' in "),
    ],
)
def test_submit_of_a_missing_command_is_refused_before_any_request(arguments: tuple[str, ...], said: str) -> None:
    result = gpulease("submit", *arguments)
    assert result.returncode == 1
    assert result.stderr.startswith("gpulease: the job was not submitted\n")
    assert said in result.stderr
    assert len(result.stderr.strip().split("\n")) == 3


@pytest.mark.parametrize("command", [("-m", "package.train"), (os.path.relpath(__file__),), (__file__, "no-such-file")])
def test_submit_does_not_mistake_modules_or_arguments_for_files(command: tuple[str, ...]) -> None:
    assert gpulease("submit", "--interpreter", sys.executable, "--", *command).returncode == 3


def test_submit_to_another_host_leaves_the_check_to_that_host() -> None:
    result = gpulease("submit", "--", "no-such-train.py", GPULEASE_URL="http://gpubox.invalid:9")
    assert result.returncode == 3, result.stderr


@pytest.mark.parametrize(
    "words",
    [
        ("submit", "--", "/bin/echo", "caf\udce9"),
        ("acquire", "--label", "caf\udce9"),
        ("run", "--model", "caf\udce9", "--", "true"),
        ("release", "caf\udce9"),
        ("logs", "caf\udce9"),
    ],
)
def test_arguments_that_are_not_utf_8_are_invalid_usage(words: tuple[str, ...]) -> None:
    stand_in = FakeDaemon()
    try:
        result = gpulease(*words, GPULEASE_URL=stand_in.url)
    finally:
        stand_in.stop()
    assert result.returncode == 2, result.stderr
    assert "UTF-8" in result.stderr
    assert len(result.stderr.strip().split("\n")) == 3
    assert not stand_in.leases


def test_an_invalid_address_is_invalid_usage() -> None:
    result = gpulease("status", GPULEASE_URL="nowhere")
    assert result.returncode == 2
    assert "GPULEASE_URL: 'nowhere'" in result.stderr


def test_options_after_the_command_belong_to_the_command() -> None:
    # Were -n and --help taken for options of `run`, this would not get as far as looking for a daemon.
    assert gpulease("run", "true", "-n", "3", "--help").returncode == 125


@pytest.mark.parametrize(("command", "module"), [("serve", "gpulease_server"), ("worker", "gpulease_worker")])
def test_without_the_package_of_the_command_it_says_what_to_install(command: str, module: str) -> None:
    program = (
        f"import sys; sys.modules['{module}'] = None; from gpulease_cli import main; sys.exit(main(['{command}']))"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60)
    assert result.returncode == 1
    assert "pip install 'gpulease[" in result.stderr


@pytest.mark.parametrize("words", [("--version",), ("-V",), ("version",)])
def test_the_version_is_printed(words: tuple[str, ...]) -> None:
    assert gpulease(*words).stdout.startswith("gpulease ")


@pytest.mark.parametrize("words", [(), ("node",), ("db",)])
def test_a_group_alone_prints_its_help(words: tuple[str, ...]) -> None:
    alone, asked = gpulease(*words), gpulease("help", *words)
    assert (alone.returncode, alone.stderr) == (0, "")
    assert alone.stdout == asked.stdout == gpulease(*words, "--help").stdout


@pytest.mark.parametrize("word", ["--time", "--after", "users-of"])
def test_a_word_that_is_like_none_gets_no_suggestion(word: str) -> None:
    assert "Did you mean" not in gpulease("acquire", word).stderr


def test_global_options_count_before_and_after_the_command_and_not_within_that_of_run() -> None:
    elsewhere = "http://127.0.0.1:7"
    for words in (("--url", elsewhere, "status"), ("status", "--url", elsewhere), ("node", "list", "--url", elsewhere)):
        assert f"No daemon answers at {elsewhere} " in gpulease(*words).stderr, words
    for words in (("run", "--", "true", "--url", elsewhere), ("run", "true", "--url", elsewhere)):
        assert f"No daemon answers at {NOWHERE} " in gpulease(*words).stderr, words


def test_an_address_needs_no_scheme() -> None:
    assert "No daemon answers at http://localhost:9 " in gpulease("status", "--url", "localhost:9").stderr


def test_what_is_suggested_for_a_habit_exists() -> None:
    for words in COMMANDS_ELSEWHERE.values():
        assert gpulease("help", *[word for word in words.split() if not word.startswith("-")]).returncode == 0, words


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_an_output_of_which_only_the_beginning_was_written_is_an_error(tmp_path: Path, unbuffered: str) -> None:
    with (tmp_path / "settings").open("wb") as output:
        result = subprocess.run(
            ["sh", "-c", 'ulimit -f 2; exec "$@"', "sh", sys.executable, "-m", "gpulease_cli", "config", "show"],
            env=environ(PYTHONUNBUFFERED=unbuffered),
            stdout=output,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            check=False,
        )
    assert (tmp_path / "settings").stat().st_size == 1024  # of sh the unit is 512 bytes
    assert result.returncode == 1
    assert result.stderr.splitlines()[1:] == [
        "  why: File too large",
        "  do:  Raise `ulimit -f`, or write it elsewhere.",
    ]


def test_status_watch_in_a_pipe_continues_through_an_outage(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    table = Snapshot(gpus=(), leases=(), jobs=(), nodes=(), at=datetime.now(UTC))
    away = DaemonUnavailable("No daemon answers.")
    outcomes = iter([table, away, away, table, away, KeyboardInterrupt()])

    def fetch(_: object) -> Snapshot:
        outcome = next(outcomes)
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    monkeypatch.setattr(Snapshot, "fetch", fetch)
    monkeypatch.setattr("gpulease_cli.commands.status.REFRESH_S", 0.0)
    assert main(["status", "--watch"]) == 0
    printed = capsys.readouterr()
    assert printed.err == "gpulease: No daemon answers. Trying again.\n" * 2
    assert printed.out.count("No GPUs are known") == 2
    outcomes = iter([away])
    assert main(["status", "--watch"]) == 3
