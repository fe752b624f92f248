"""A second host joins: one command on the daemon's host, and the one that it prints on the other."""

from __future__ import annotations

import json
import shlex
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cabled_hosts import Host, connect
from tests.daemon import eventually

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

DAEMON, SECOND = "10.99.7.1", "10.99.7.2"
URL = f"https://{DAEMON}:8750"
WORKER = "/var/lib/gpulease/worker"
UP_S = 120.0


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[tuple[Host, Host]]:
    """A daemon's host, on which `gpulease serve` runs as root, and another one."""
    with Host("gpubox1") as first, Host("gpubox2") as second:
        connect(first, second, (DAEMON, SECOND))
        log = tmp_path / "serve.log"
        first.start(log, "serve", "--host", DAEMON, "--tls-auto", "--simulate", "1")
        eventually(lambda: bool(_nodes(first)), UP_S, lambda: log.read_text(errors="replace"))
        yield first, second


def _nodes(host: Host) -> dict[str, dict[str, object]]:
    listed = host.gpulease("node", "list", "--json")
    return {one["name"]: one for one in json.loads(listed.stdout)["items"]} if listed.returncode == 0 else {}


def added(host: Host, *words: str) -> list[str]:
    """The words of the command that `node add` prints, without the name of the program."""
    printed = host.gpulease("node", "add", *words)
    assert printed.returncode == 0, printed.stderr
    program, *rest = shlex.split(printed.stdout)
    assert program == "gpulease"
    return rest


def worker_variables(host: Host) -> dict[str, str]:
    """What `node join` has written down for the worker."""
    lines = host.run("cat", f"{WORKER}/environment").stdout.splitlines()
    return {name: shlex.split(value)[0] for name, _, value in (line.partition("=") for line in lines)}


def test_a_second_host_joins_with_one_command_and_its_jobs_reach_the_daemon(
    hosts: tuple[Host, Host], tmp_path: Path
) -> None:
    first, second = hosts
    joined = second.gpulease(*added(first, "gpubox2"))
    assert joined.returncode == 0, joined.stderr
    assert "This host is node gpubox2" in joined.stdout
    found = worker_variables(second)
    assert (found["GPULEASE_URL"], found["GPULEASE_NODE"]) == (URL, "gpubox2")
    modes = second.run("stat", "-c", "%n %a", *(f"{WORKER}/{name}" for name in ("token", "environment", "ca.pem")))
    assert modes.stdout.split()[1::2] == ["600", "600", "644"]
    log = tmp_path / "worker.log"
    second.start(log, "worker", "--simulate", "2", **found)
    eventually(lambda: _nodes(first).get("gpubox2", {}).get("address"), UP_S, lambda: log.read_text(errors="replace"))
    nodes = _nodes(first)
    assert {name: (one["address"], one["interface"]) for name, one in nodes.items()} == {
        "gpubox1": (DAEMON, "wire0"),
        "gpubox2": (SECOND, "wire0"),
    }
    script = 'echo "$GPULEASE_URL $GPULEASE_CACERT ${GPULEASE_TOKEN-none} ${GPULEASE_TOKEN_FILE-none}" > /srv/told'
    submitted = first.gpulease("submit", "--node", "gpubox2", "--json", "--", "sh", "-c", script)
    ended = first.gpulease("wait", json.loads(submitted.stdout)["id"])
    told = second.run("cat", "/srv/told").stdout.split()
    assert told[:2] + told[3:] == [URL, f"{WORKER}/ca.pem", "none"], ended.stderr
    assert told[2].startswith("lease-"), "its own token, and not the worker's"
    reports = ("fine", f"It is node gpubox2 of {URL}, and its worker reports.")
    # A worker that is slow for 3 s is missed for a moment.
    eventually(lambda: checked(second) == reports, UP_S, lambda: str(checked(second)))
    assert checked(second, "gpubox9") == (
        "wrong",
        "A worker on host gpubox2 reports for node gpubox2; this is host gpubox9.",
    )
    listed = second.gpulease(
        "token",
        "list",
        GPULEASE_TOKEN_FILE=f"{WORKER}/token",
        **{name: found[name] for name in ("GPULEASE_URL", "GPULEASE_CACERT")},
    )
    assert listed.returncode == 1
    assert "not allowed" in listed.stderr


@pytest.mark.parametrize(
    ("listens", "route"),
    [("0.0.0.0", False), ("::", False), ("::", True)],
    ids=["IPv4 without a router", "IPv6 and IPv4 without a router", "IPv6 and IPv4 with a router of IPv4"],
)
def test_a_daemon_on_all_addresses_knows_one_at_which_others_reach_it(
    tmp_path: Path, listens: str, route: bool
) -> None:
    with Host("gpubox1") as first, Host("gpubox2") as second:
        connect(first, second, (DAEMON, SECOND))
        if route:
            assert first.run("ip", "route", "add", "default", "via", SECOND).returncode == 0
        log = tmp_path / "serve.log"
        first.start(log, "serve", "--host", listens, "--tls-auto", "--simulate", "1")
        eventually(lambda: _nodes(first).get("gpubox1", {}).get("address"), UP_S, lambda: log.read_text("utf-8"))
        assert _nodes(first)["gpubox1"]["address"] == DAEMON, "a training over several nodes cannot use this one"
        assert added(first, "gpubox2")[2] == URL


def checked(host: Host, name: str = "") -> tuple[str, str]:
    """What `gpulease doctor` says of the node, on a host of this name."""
    renamed = ("unshare", "--uts", "sh", "-c", '[ -z "$0" ] || hostname "$0"; exec "$@"', name)
    printed = host.run(*renamed, sys.executable, "-m", "gpulease_cli", "doctor", "--json")
    findings = json.loads(printed.stdout)["items"]
    return next((one["health"], one["sentence"]) for one in findings if one["check"] == "node")


def test_doctor_on_the_second_host_says_what_is_wrong(hosts: tuple[Host, Host]) -> None:
    first, second = hosts
    assert checked(second) == ("fine", "This host has not joined a daemon elsewhere.")
    second.gpulease(*added(first, "gpubox2"))
    assert checked(second) == ("warning", f"No worker reports for node gpubox2 of {URL}.")

    def says(word: str, *change: str) -> None:
        assert second.run("sh", "-c", " ".join(change)).returncode == 0
        health, sentence = checked(second)
        assert (health, word in sentence) == ("wrong", True), sentence

    says("other users may read", f"chmod 644 {WORKER}/token")
    second.run("chmod", "600", f"{WORKER}/token")
    says("is to be node gpubox3", f"sed -i s/NODE=gpubox2/NODE=gpubox3/ {WORKER}/environment")
    second.run("sed", "-i", "s/NODE=gpubox3/NODE=gpubox2/", f"{WORKER}/environment")
    token_id = json.loads(first.gpulease("token", "list", "--json").stdout)["items"][0]["id"]
    assert first.gpulease("token", "revoke", token_id).returncode == 0
    says("does not take this host's token", "true")
    says("cannot be read", f"mv {WORKER}/ca.pem {WORKER}/gone.pem")
    second.run("mv", f"{WORKER}/gone.pem", f"{WORKER}/ca.pem")
    says("No daemon answers", "ip link set wire0 down")


def test_a_join_token_is_for_one_node_once_and_of_this_daemon_alone(hosts: tuple[Host, Host]) -> None:
    first, second = hosts
    command = added(first, "gpubox2", "--expires", "1h")
    secret = command[-1].split(".")[1]

    def refused(*words: str) -> str:
        answer = second.gpulease(*words)
        assert answer.returncode in (1, 2, 3), answer.stdout
        assert secret not in answer.stdout + answer.stderr
        assert second.run("test", "-e", f"{WORKER}/token").returncode == 1
        return answer.stderr

    other_name = [word if word != "gpubox2" else "gpubox3" for word in command]
    assert "for node gpubox2 and for no other" in refused(*other_name)
    bearer, mark = command[-1].rsplit(".", 1)
    assert "it shows another authority. The token was not sent" in refused(*command[:-1], f"{bearer}.{'0' * 64}")
    assert "SSL" in refused(*command[:-1], bearer) or "not trusted" in refused(*command[:-1], bearer)
    assert "was used already, has expired" in refused(*command[:-1], f"{bearer[:-4]}xxxx.{mark}")
    assert "no join token" in refused(*command[:-1], "nonsense")
    assert "No daemon answers" in refused("node", "join", f"https://{SECOND}:8750", command[-1])
    assert "plain HTTP" in refused("node", "join", f"http://{DAEMON}:8750", command[-1])
    assert second.gpulease(*command[:-1], "-", text=command[-1]).returncode == 0
    assert second.run("rm", "-r", WORKER).returncode == 0
    assert "was used already" in refused(*command)
    listed = json.loads(first.gpulease("token", "list", "--json").stdout)["items"]
    assert [(one["role"], one["node"]) for one in listed] == [("worker", "gpubox2")]


def test_with_ssh_the_command_runs_there_and_its_token_is_in_no_command_line(
    hosts: tuple[Host, Host], tmp_path: Path
) -> None:
    first, _ = hosts
    seen = tmp_path / "seen"
    program = tmp_path / "gpulease"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m gpulease_cli "$@" --data-dir /srv/joined\n')
    ssh = tmp_path / "ssh"
    ssh.write_text(f'#!/bin/sh\necho "$@" > {seen}\n[ "$3" = root@there ] || exit 255\nexec sh -c "$4"\n')
    for path in (program, ssh):
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    path_variable = f"{tmp_path}:/usr/sbin:/usr/bin:/sbin:/bin"
    joined = first.gpulease("node", "add", "root@there", "--ssh", PATH=path_variable)
    assert joined.returncode == 0, joined.stderr
    assert seen.read_text().startswith(f"-T -- root@there gpulease node join {URL} --node there -")
    assert "token-" not in seen.read_text()
    assert first.run("cat", "/srv/joined/token").stdout.startswith("token-")
    failed = first.gpulease("node", "add", "elsewhere", "--ssh", PATH=path_variable)
    assert failed.returncode == 1
    assert "elsewhere has not joined" in failed.stderr
    listed = json.loads(first.gpulease("token", "list", "--json").stdout)["items"]
    assert [(one["role"], one["node"]) for one in listed] == [("worker", "there")], "what failed is revoked"
