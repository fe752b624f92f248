"""Options, variables, files and defaults: precedence, refusals, and a daemon that follows them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any

import click
import psutil
import pytest

from gpulease.sansio.failover import Destination
from gpulease_cli import main, settings
from gpulease_cli.commands import config
from gpulease_cli.program import PROGRAM
from gpulease_protocol.codec import to_json
from gpulease_protocol.host import config_file
from gpulease_protocol.host.addresses import candidates
from gpulease_protocol.host.config_file import ConfigurationRefused
from gpulease_protocol.host.settings import host_node_name
from gpulease_protocol.model import NodeState
from gpulease_worker.settings import default_worker_dir
from tests.daemon import DaemonProcess, eventually, workers_of

ALL = [(section, key) for section in config_file.SECTIONS for key in settings.declared(PROGRAM, section)]


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No setting of this machine; the system's file is one of this test."""
    for name in [name for name in os.environ if name.startswith("GPULEASE_")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(config_file, "SYSTEM", tmp_path / "etc" / "config.toml")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home"))


@pytest.fixture
def file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], Path]:
    """Writes a file and names it in the environment."""

    def write(text: str) -> Path:
        path = tmp_path / "named.toml"
        path.write_text(text)
        monkeypatch.setenv("GPULEASE_CONFIG", str(path))
        return path

    return write


def shown(section: str, key: str, *arguments: str) -> dict[str, Any]:
    """What `config show` prints for a setting."""
    for setting in settings.effective(PROGRAM, config_file.load(), section, arguments):
        if setting.key == key:
            return to_json(setting)
    raise AssertionError(f"{section} has no {key}")


def written(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def samples(option: Any) -> tuple[Any, Any, Any]:
    """Three accepted values other than the default: for a file, a variable and an option."""
    wanted = option.kind
    if option.name == "cors_origins":
        return ["http://a", "https://b:1"], ["http://c", "http://[::1]:2"], ["http://e"]
    if option.name in ("gpu_weights", "group_shares"):
        return ["A100=2", "H100=3"], ["A100=0.5"], ["H100=4"]
    if option.name == "socket_mode":
        return "0600", "0660", "0700"
    if option.name == "address":
        return "10.0.0.1", "10.0.0.2", "10.0.0.3"
    if option.name == "reclaim_idle_interactive_after_s":
        return 60.0, 120.0, option.default
    if option.name == "simulate":
        return "2", "3", "4"
    if isinstance(wanted, type) and issubclass(wanted, Enum):
        others = [member.value for member in wanted if member.value != option.default]
        return others[0], others[1] if len(others) > 1 else option.default, others[0]
    if wanted is bool:
        return not option.default, bool(option.default), not option.default
    if wanted in (int, float):
        first = wanted(option.type.minimum if option.type.minimum is not None else 1)
        return first, first + (first or 1), option.default
    return {list[str]: (["a", "b"], ["c", "d"], ["e"]), Path: ("/file", "/variable", "/option")}.get(
        wanted, ("http://file:1", "http://variable:2", "http://option:3")
    )


@pytest.mark.parametrize(("section", "key"), ALL, ids=lambda word: word)
def test_option_overrides_variable_overrides_file_overrides_default(
    section: str,
    key: str,
    file: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    option = settings.declared(PROGRAM, section)[key]
    in_file, in_variable, in_option = samples(option)
    secret = (lambda value: settings.HIDDEN) if key in settings.SECRET else (lambda value: value)

    assert shown(section, key)["origin"] == "default"

    path = file(f"# a remark\n[{section}]\n{key} = {json.dumps(in_file)}\n")
    found = shown(section, key)
    assert (found["value"], found["origin"], found["place"]) == (secret(in_file), "file", f"{path}:3")

    spelt = " ".join(in_variable) if isinstance(in_variable, list) else str(in_variable)
    monkeypatch.setenv(option.envvar, spelt)
    found = shown(section, key)
    assert (found["value"], found["origin"], found["place"]) == (secret(in_variable), "environment", option.envvar)

    if option.is_flag:
        words = [option.opts[0] if in_option else option.secondary_opts[0]]
    else:
        words = [option.opts[0], in_option[0] if isinstance(in_option, list) else str(in_option)]
    found = shown(section, key, *words)
    assert (found["value"], found["origin"], found["place"]) == (secret(in_option), "option", option.opts[0])


def test_defaults_that_depend_on_the_host_are_shown_as_they_are_here(file: Callable[[str], Path]) -> None:
    path = file("[serve]\ndata_dir = 'd'\n")
    data_dir = path.parent / "d"
    assert shown("serve", "socket")["value"] == str(data_dir / "gpulease.sock")
    assert shown("serve", "database_url")["value"] == f"sqlite:///{data_dir}/gpulease.db"
    assert shown("serve", "node")["value"] == host_node_name()
    assert shown("worker", "data_dir")["value"] == str(default_worker_dir())
    assert shown("client", "url")["value"]
    assert shown("serve", "socket")["origin"] == "default"


def test_every_mistake_is_reported_with_its_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "c.toml"
    path.write_text(
        "[serve]\nprot = 3\nmax_bypass = 'x'\n[sevre]\na = 1\n[client]\nurll = 'x'\n[worker]\npoll_s = -1\n"
    )
    assert main(["config", "check", str(path)]) == 2
    *lines, last = capsys.readouterr().err.splitlines()
    assert last == "5 mistakes"
    assert [line.split(": ")[0] for line in lines] == [f"{path}:{number}" for number in (2, 3, 4, 7, 9)]
    assert lines[0].endswith("unknown key prot in [serve]. Did you mean port?")


def test_where_there_is_no_file_it_says_where_it_looked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("GPULEASE_CONFIG", raising=False)
    monkeypatch.setattr(config_file, "SYSTEM", tmp_path / "config.toml")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home"))
    assert main(["config", "check"]) == 0
    assert f"no configuration file; looked for {tmp_path / 'config.toml'}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "line", "said", "remedy"),
    [
        ("[serve]\nmax_bypas = 3\n", 2, "unknown key max_bypas in [serve]", "Did you mean max_bypass?"),
        ("[serve]\nzzz = 3\n", 2, "unknown key zzz in [serve]", "Known: host, port"),
        ("\n[sevre]\n", 2, "unknown section [sevre]", "Did you mean [serve]?"),
        ("max_bypass = 3\n", 1, "max_bypass is outside any section", "Known: [client], [serve], [worker]"),
        ("serve = 3\n", 1, "serve is a section", "Write [serve] on a line above its keys"),
        ("[serve]\nmax_bypass = '3'\n", 2, "must be an integer, not '3'", "configuration.md"),
        ("[serve]\nmax_bypass = 3.5\n", 2, "must be an integer, not 3.5", "configuration.md"),
        ("[serve]\nmax_bypass = true\n", 2, "must be an integer, not true", "configuration.md"),
        ("[serve]\nport = 70000\n", 2, "port in [serve] is not allowed", "configuration.md"),
        ("[serve]\nport = 8751\nmax_bypass = -1\n", 3, "max_bypass in [serve] is not allowed", "configuration.md"),
        ("[serve]\nmax_bypass_s = nan\n", 2, "must be a number, not nan", "configuration.md"),
        ("[worker]\npoll_s = inf\n", 2, "must be a number, not inf", "configuration.md"),
        ("[worker]\npoll_s = 0.01\n", 2, "poll_s in [worker] is not allowed", "configuration.md"),
        ("[serve]\nworker = 1\n", 2, "must be a boolean, not 1", "configuration.md"),
        ("[serve]\ndesktop_names = 'a'\n", 2, "must be a list of strings, not 'a'", "configuration.md"),
        ("[serve]\npeers = [1]\n", 2, "must be a list of strings, not a list", "configuration.md"),
        ("[serve]\nhost = ''\n", 2, "must be a string, not ''", "configuration.md"),
        ("[serve]\nlog_format = 'xml'\n", 2, "log_format in [serve] is not allowed", "configuration.md"),
        ("[serve]\nkill_leftovers = true\n", 2, "belongs in [worker]", "configuration.md"),
        ("[serve]\nwith_parent = true\n", 2, "unknown key with_parent in [serve]", "Known: "),
        (
            "[serve]\ncors_origins = ['http://a', '*']\n",
            2,
            "cors_origins in [serve] is not allowed",
            "configuration.md",
        ),
        ("[client]\nurl = 3\n", 2, "url in [client] must be a string", "configuration.md"),
        ("[client]\nurll = 'x'\n", 2, "unknown key urll in [client]", "Did you mean url?"),
    ],
    ids=lambda value: (
        value.strip().replace("\n", " ") if isinstance(value, str) and value.startswith(("[", "\n")) else ""
    ),
)
def test_a_mistake_is_refused_with_its_line_and_a_suggestion(
    text: str, line: int, said: str, remedy: str, file: Callable[[str], Path]
) -> None:
    path = file(text)
    with pytest.raises(ConfigurationRefused) as caught:
        settings.check(PROGRAM, config_file.load())
    assert caught.value.detail.startswith(f"{path}:{line}: ")
    assert said in caught.value.detail
    assert remedy in caught.value.remedy


@pytest.mark.parametrize("words", ["serve", "worker", "doctor", "db check", "config show", "config check"])
def test_every_command_for_the_daemon_refuses_an_invalid_file(
    words: str, file: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    path = file("[serve]\nmax_bypas = 3\n")
    assert main(words.split()) == 2
    assert capsys.readouterr().err == (
        "gpulease: configuration refused\n"
        f"  why: {path}:2: unknown key max_bypas in [serve].\n"
        "  do:  Did you mean max_bypass?\n"
    )


@pytest.mark.parametrize(
    ("content", "said"),
    [(b"[serve\n", "at line 1"), (b"[serve]\nport = \n", "at line 2"), (b"\xff", "UTF-8"), (b"#" * 2**21, "1 MiB")],
)
def test_a_file_that_is_not_toml_is_refused(content: bytes, said: str, tmp_path: Path) -> None:
    (tmp_path / "c").write_bytes(content)
    with pytest.raises(ConfigurationRefused, match=said):
        config_file.read(tmp_path / "c")


def test_a_named_file_must_exist(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("GPULEASE_CONFIG", str(tmp_path / "absent"))
    with pytest.raises(ConfigurationRefused, match="No such file"):
        config_file.load()
    monkeypatch.setenv("GPULEASE_CONFIG", os.devnull)
    assert not any(config_file.load().values())


def test_the_users_key_overrides_the_systems_and_root_reads_only_the_systems(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    written(config_file.SYSTEM, "[serve]\nport = 1\nmax_bypass = 1\n")
    written(tmp_path / "home" / "gpulease" / "config.toml", "[serve]\nport = 2\n[worker]\npoll_s = 0.2\n")

    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    both = config_file.load()
    assert {key: entry.value for key, entry in both["serve"].items()} == {"port": 2, "max_bypass": 1}
    assert both["worker"]["poll_s"].value == 0.2

    monkeypatch.setattr(os, "geteuid", lambda: 0)
    system = config_file.load()
    assert {key: entry.value for key, entry in system["serve"].items()} == {"port": 1, "max_bypass": 1}
    assert system["worker"] == {}


def test_a_mistake_in_a_daemon_setting_does_not_stop_clients(
    file: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    file("[serve]\nnonsense = 1\n[client]\nurl = 'http://127.0.0.1:9'\n")
    assert main(["status"]) == 3
    assert "No daemon answers at http://127.0.0.1:9" in capsys.readouterr().err
    file("[client]\nnonsense = 1\n")
    assert main(["status"]) == 2


def test_the_library_sends_the_files_token_only_to_the_files_address(
    file: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    file("[client]\nurl = 'http://lab:1,http://lab:2'\ntoken = 'of the lab'\n")
    found = Destination.of(None, None, 1.0)
    assert [address.url for address in found.addresses] == ["http://lab:1", "http://lab:2"]
    assert (found.bearer_token, found.interchangeable) == ("of the lab", True)
    assert [address.url for address in candidates()] == ["http://lab:1", "http://lab:2"]

    assert Destination.of("http://other:1", None, 1.0).bearer_token is None
    monkeypatch.setenv("GPULEASE_URL", "http://other:2")
    other = Destination.of(None, None, 1.0)
    assert ([address.url for address in other.addresses], other.bearer_token) == (["http://other:2"], None)
    assert Destination.of(None, "given", 1.0).bearer_token == "given"


def test_without_a_file_the_library_loads_no_toml_parser() -> None:
    program = "import sys; from gpulease import Client; Client(); print('tomllib' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert ran.stdout == "False\n"


@pytest.mark.parametrize(
    "given",
    ["postgresql://me:hunter2@host/name", "postgresql://me@host/name?password=hunter2&sslpassword=hunter2"],
)
def test_passwords_and_tokens_are_not_shown(
    given: str, file: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    peer = "http://me:hunter2@peer:1"
    file(f"[serve]\ndatabase_url = '{given}'\npeers = ['{peer}']\n[client]\ntoken = 'hunter2'\nurl = '{peer}'\n")
    for form in ((), ("--json",)):
        assert main(["config", "show", *form]) == 0
        printed = capsys.readouterr().out
        assert "hunter2" not in printed
        assert "host/name" in printed
        assert "@peer:1" in printed


@pytest.mark.parametrize(("uid", "words", "told"), [(1000, (), True), (1000, ("client",), False), (0, (), False)])
def test_a_user_is_told_whose_settings_are_shown(
    uid: int, words: tuple[str, ...], told: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(config, "has_system_socket", lambda: True)
    monkeypatch.setattr("os.geteuid", lambda: uid)
    assert main(["config", "show", *words]) == 0
    assert ("`sudo gpulease config show` shows its settings" in capsys.readouterr().err) is told


def test_json_may_follow_the_section_and_its_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "show", "serve", "--port", "9000", "--json"]) == 0
    values = {setting["key"]: setting["value"] for setting in json.loads(capsys.readouterr().out)["items"]}
    assert values["port"] == 9000


@pytest.mark.parametrize(("section", "usage"), [("serve", "gpulease serve"), ("client", "gpulease")])
def test_an_unknown_option_of_a_section_names_a_help_that_there_is(
    section: str, usage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["config", "show", section, "--nope"]) == 2
    assert f"See `{usage} --help`." in capsys.readouterr().err


def test_paths_are_relative_to_the_files_directory(file: Callable[[str], Path]) -> None:
    path = file("[serve]\ndata_dir = 'd'\nsocket = '~/s'\nsimulate = 'gpus.json'\n[worker]\nsimulate = 4\n")
    assert shown("serve", "data_dir")["value"] == str(path.parent / "d")
    assert shown("serve", "socket")["value"] == str(Path.home() / "s")
    assert shown("serve", "simulate")["value"] == str(path.parent / "gpus.json")
    assert shown("worker", "simulate")["value"] == "4"


@pytest.mark.parametrize("command", [["doctor"], ["db", "check"], ["db", "backup", "x"]], ids=" ".join)
def test_doctor_and_db_use_the_data_directory_from_the_file(command: list[str], file: Callable[[str], Path]) -> None:
    file("[serve]\ndata_dir = '/from/file'\n")
    context, words = PROGRAM.make_context("gpulease", list(command)), list(command)
    while isinstance(context.command, click.Group):
        name = words.pop(0)
        context = context.command.commands[name].make_context(name, list(words), parent=context)
    assert context.params["data_dir"] == Path("/from/file")


def test_daemon_and_worker_use_the_file_as_it_was_at_the_start(tmp_path: Path) -> None:
    config = tmp_path / "c.toml"
    config.write_text(
        "[serve]\nsimulate = 3\nnode = 'filed'\nmax_bypass = 2\n[worker]\npoll_s = 0.2\nkill_leftovers = true\n"
    )
    daemon = DaemonProcess(tmp_path / "d", "--node", "told", environment={"GPULEASE_CONFIG": str(config)})

    def worker() -> psutil.Process | None:
        assert daemon.process is not None
        return next(iter(workers_of(daemon.process.pid)), None)

    try:
        daemon.start()
        with daemon.client() as client:
            assert {gpu.node for gpu in client.gpus()} == {"told"}
            assert len(client.gpus()) == 3
            first = worker()
            assert first is not None
            words = first.cmdline()
            assert words[words.index("--poll-s") + 1] == "0.2"
            assert "--kill-leftovers" in words

            config.write_text("[worker]\nnonsense = 1\n")
            first.send_signal(signal.SIGKILL)
            eventually(lambda: (now := worker()) is not None and now.pid != first.pid, 60, daemon.story)
            again = worker()
            assert again is not None
            assert again.cmdline() == words
            eventually(lambda: client.nodes()[0].state is NodeState.READY, 60, daemon.story)
    finally:
        daemon.stop()


def test_an_invalid_worker_setting_is_refused_when_the_daemon_starts(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GPULEASE_")}
    ran = subprocess.run(
        [sys.executable, "-m", "gpulease_cli", "serve", "--port", "0", "--data-dir", str(tmp_path / "d")],
        env=environment | {"GPULEASE_POLL_S": "99"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ran.returncode == 2
    assert "--poll-s" in ran.stderr
    assert "Traceback" not in ran.stderr
