"""What eve can do to the daemon's own socket and port: be taken for someone else, or for the daemon."""

from __future__ import annotations

import json
import os
import signal
import subprocess

import pytest

from tests.attack.attacked import Attacked
from tests.attack.host import UIDS, python

pytestmark = pytest.mark.slow

ASK = """
import json, os, socket, sys
BODY = b'{"count": 1, "ttl_s": 5, "queue": false, "label": "asked"}'
def ask(connection, host="127.0.0.1:8750", path="/v1/me", method="POST", body=BODY):
    head = [f"{method} {path} HTTP/1.1", f"Host: {host}", "Connection: close", f"Content-Length: {len(body)}", "", ""]
    connection.sendall("\\r\\n".join(head).encode("latin-1") + body)
    answer = b""
    while part := connection.recv(65536):
        answer += part
    head, _, body = answer.partition(b"\\r\\n\\r\\n")
    return int(head.split()[1]), body.decode()
"""
IN_A_USER_NAMESPACE = (
    ASK
    + """
found = []
for family, to in ((socket.AF_UNIX, "/var/lib/gpulease/gpulease.sock"), (socket.AF_INET, ("127.0.0.1", 8750))):
    connection = socket.socket(family)
    connection.connect(to)
    found.append(ask(connection, path="/v1/leases"))
print(json.dumps([os.getuid(), found]))
"""
)
HOSTS = (
    ASK
    + """
found = {}
for host in sys.argv[1:]:
    connection = socket.create_connection(("127.0.0.1", 8750))
    found[host] = ask(connection, host, "/v1/gpus", "GET", b"")[0]
print(json.dumps(found))
"""
)
FROM_A_PORT = (
    ASK
    + """
import struct
connection = socket.socket()
connection.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
connection.bind(("127.0.0.1", int(sys.argv[1])))
connection.connect(("127.0.0.1", 8750))
if sys.argv[2] == "leave":
    head = ["POST /v1/leases HTTP/1.1", "Host: 127.0.0.1:8750", f"Content-Length: {len(BODY)}", "", ""]
    connection.sendall("\\r\\n".join(head).encode() + BODY)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()
else:
    print("connected", flush=True)
    print(ask(connection, path="/v1/gpus", method="GET", body=b"")[0], flush=True)
"""
)


def test_eve_as_root_of_a_user_namespace_is_eve_or_no_one(attacked: Attacked) -> None:
    code, printed = attacked.host.completed("eve", "unshare", "--user", "--map-root-user", *python(IN_A_USER_NAMESPACE))
    if code != 0:
        assert "unshare" in printed, printed  # this kernel lets users make none, so that eve cannot try it
        return
    uid, answers = json.loads(printed)
    assert uid == 0, "not root even there"
    for status, body in answers:
        assert status in (201, 401, 403), body
        assert status != 201 or json.loads(body)["holder"]["user"] == "eve"


def test_a_request_from_a_port_that_root_uses_again_is_not_roots(attacked: Attacked) -> None:
    """The daemon is late: eve has asked and gone, and the port has another user, when it looks whose the port is."""
    port = "20123"  # below those that the kernel gives to other connections
    assert attacked.daemon.process is not None
    os.kill(attacked.daemon.process.pid, signal.SIGSTOP)
    try:
        code, printed = attacked.host.completed("eve", *python(FROM_A_PORT, port, "leave"))
        assert code == 0, printed
        root = attacked.host.start("root", *python(FROM_A_PORT, port, "stay"))
        root.wait_for("connected")
    finally:
        os.kill(attacked.daemon.process.pid, signal.SIGCONT)
    root.wait_for("200")
    asked = attacked.daemon.get("/v1/leases?limit=1000").json["items"]
    assert [lease for lease in asked if lease["holder"]["label"] == "asked" and lease["holder"]["user"] != "eve"] == []


def test_only_the_exact_name_of_the_loopback_host_is_served(attacked: Attacked) -> None:
    """Another one is that of a web page, whose name leads here."""
    wrong = ["evil@127.0.0.1:8750", "127.0.0.1.evil.example", "evil.example:8750", "", "x:127.0.0.1"]
    code, printed = attacked.host.completed("eve", *python(HOSTS, "127.0.0.1:8750", *wrong))
    assert code == 0, printed
    answers = json.loads(printed)
    assert answers.pop("127.0.0.1:8750") == 200
    assert {host: status for host, status in answers.items() if status not in (400, 403)} == {}


def test_no_user_can_listen_beside_the_daemon(attacked: Attacked) -> None:
    """On no address that leads to its port: a client would take it for the daemon."""
    source = """
import json, socket
got = []
for family, host in ((2, "127.0.0.1"), (2, "0.0.0.0"), (10, "::1"), (10, "::"), (10, "::ffff:127.0.0.1")):
    for option in (None, socket.SO_REUSEADDR, socket.SO_REUSEPORT):
        try:
            one = socket.socket(family)
            if family == 10:
                one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, host != "::ffff:127.0.0.1")
            if option:
                one.setsockopt(socket.SOL_SOCKET, option, 1)
            one.bind((host, 8750))
            one.listen()
            got.append(host)
            one.close()
        except OSError:
            pass
print(json.dumps(got))
"""
    code, printed = attacked.host.completed("eve", *python(source))
    assert (code, json.loads(printed)) == (0, [])


def test_the_users_are_users_to_the_kernel(attacked: Attacked) -> None:
    """Otherwise no attack would show anything."""
    names = {}
    for user in UIDS:
        _, printed = attacked.host.completed(user, "sh", "-c", "id -un; id -u; grep CapEff /proc/self/status")
        names[user] = printed.split()
    assert names["eve"] == ["eve", str(UIDS["eve"]), "CapEff:", "0" * 16]
    assert names["ada"] == ["ada", str(UIDS["ada"]), "CapEff:", "0" * 16]
    assert names["root"][:2] == ["root", "0"]
    listed = subprocess.run(["getent", "passwd", "eve"], capture_output=True, text=True, check=False)
    assert listed.stdout == "", "the users are on no other host than theirs"
