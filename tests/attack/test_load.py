"""eve slows the daemon, its worker and the jobs of others: with processes, requests and connections."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from tests.attack.attacked import Attacked
from tests.attack.host import UUIDS, Host, python
from tests.daemon import eventually

pytestmark = [pytest.mark.slow, pytest.mark.busy, pytest.mark.budget(40)]

ALLOWED_S = 20.0
"""How long a job of ada's may take under an attack, from its submission. Alone it takes half a second."""
ROUNDS = 3
"""Jobs of ada's, one after the other, under one attack."""
LONG_ENVIRONMENT = """
import ctypes, os, resource, sys, time
libc = ctypes.CDLL(None)
if "again" not in sys.argv:
    hard = resource.getrlimit(resource.RLIMIT_STACK)[1]
    resource.setrlimit(resource.RLIMIT_STACK, (hard, hard))
    words = open("/proc/self/cmdline", "rb").read().split(b"\\0")[:-1]
    variables = [b"A%d=" % number + b"x" * 100_000 for number in range(55)]
    os.execve(words[0], [*words, b"again"], dict(one.split(b"=") for one in variables))
fields = open("/proc/self/stat").read().rpartition(")")[2].split()
begin, end = int(fields[47]), int(fields[48])
assert end - begin > 5_000_000, "the environment is short"
ctypes.memmove(begin, b"A=\\0" * ((end - begin) // 3), (end - begin) // 3 * 3)
"""
"""Begins a program that has the longest environment that execve(2) takes, with a variable of no length in each 3 bytes.
What it forks has it too, and takes no memory for it."""
MANY = (
    LONG_ENVIRONMENT
    + """
for _ in range(40):
    if os.fork() == 0:
        break
print("ready", flush=True)
time.sleep(1000)
"""
)
"""40 processes that sleep."""
ANCESTRY = (
    LONG_ENVIRONMENT
    + """
for _ in range(62):
    if os.fork():
        time.sleep(1000)
print(os.getpid(), "ready", flush=True)
time.sleep(1000)
"""
)
"""A process below 62 others."""
MAPPED = """
import ctypes, os, struct, sys, time
libc = ctypes.CDLL(None, use_errno=True)
libc.sbrk.restype = libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
size = 32 * 2**20
at = libc.mmap(None, size, 1, 0x4022, -1, 0)
field = open("/proc/self/stat").read().rpartition(")")[2].split()
code, end, stack, data, data_end, brk = (int(field[number - 3]) for number in (26, 27, 28, 45, 46, 47))
shown = struct.pack("12QII", code, end, data, data_end, brk, libc.sbrk(0), stack, *[at, at + size] * 2, 0, 0, 2**32 - 1)
for _ in range(64):
    if os.fork() == 0:
        if libc.prctl(35, 14, shown, ctypes.c_ulong(len(shown)), 0) != 0:
            print("prctl:", os.strerror(ctypes.get_errno()), flush=True)
        print(os.getpid(), "ready", flush=True)
        time.sleep(1000)
time.sleep(1000)
"""
"""Processes whose environment and command line are a mapping that takes no memory, as PR_SET_MM_MAP lets every user set
them: of any size, here of 32 MiB, so that the test harms no host where the attack succeeds."""
MANY_MAPPINGS = """
import ctypes, os, time
libc = ctypes.CDLL(None)
libc.mmap.restype = ctypes.c_void_p
for number in range(60_000):
    libc.mmap(None, 4096, number % 2, 0x22, -1, 0)
files = [os.open("/dev/null", os.O_RDONLY) for _ in range(1000)]
for _ in range(5):
    if os.fork() == 0:
        break
print("ready", flush=True)
time.sleep(1000)
"""
"""Processes with nearly as many mappings as the kernel allows, each a line of /proc/PID/maps."""


REQUESTS = """
import json, socket, sys, time
def connected():
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(sys.argv[1])
    return connection
def sent(method, path, body=b"", *headers):
    connection = connected()
    head = [f"{method} {path} HTTP/1.1", "Host: localhost", "Connection: close", f"Content-Length: {len(body)}"]
    connection.sendall("\\r\\n".join([*head, *headers, "", ""]).encode() + body)
    return connection
def read(connection):
    while connection.recv(65536):
        pass
open_ones = []
for number in range(300):
    try:
        one = connected()
        one.sendall(b"GET /v1/gpus HTTP/1.1\\r\\nHost:")
        open_ones.append(one)
        open_ones.append(sent("GET", "/v1/events?after=0", b"", "Accept: text/event-stream"))
    except OSError:
        break
variables = {f"V{number}": "x" * 100_000 for number in range(10)}
large = json.dumps({"command": ["true"], "launcher": "plain", "gpus": 4, "environment": variables}).encode()
print("ready", flush=True)
for number in range(10_000):
    try:
        submits = number % 10 == 0 and number < 200
        read(sent("POST", "/v1/jobs", large) if submits else sent("GET", "/v1/events?limit=1000"))
    except OSError:
        time.sleep(0.01)
"""
"""Streams, requests that do not end, and large ones."""


@pytest.fixture(scope="module")
def shared() -> Iterator[Attacked]:
    """A host of its own: what fails here may leave its node unknown."""
    with Host() as host:
        # A deadline that a busy machine does not miss, and an attack that succeeds does.
        daemon = host.daemon("--retained-memory-s", "2", GPULEASE_PROBE_DEADLINE_S="5")
        try:
            daemon.start()
            yield Attacked(host, daemon)
        finally:
            daemon.stop()


def serves_ada(attacked: Attacked, since: int, *, on: str | None = None) -> None:
    """Jobs and leases of ada's begin and end about as if ada were alone, and no GPU has been unknown."""
    begun_s = time.monotonic()
    for _ in range(ROUNDS):
        job = attacked.submit("ada", "true")
        ended = attacked.wait_ended(job, ALLOWED_S)
        assert ended["state"] == "succeeded", ended
        lease = attacked.lease("ada")
        attacked.release("ada", lease)
        attacked.wait_free(lease["gpus"][0]["uuid"], ALLOWED_S)
    assert time.monotonic() - begun_s < 2 * ALLOWED_S
    for gpu in attacked.daemon.gpus():
        assert gpu["state"] == ("foreign" if gpu["uuid"] == on else "free"), gpu
    told = attacked.daemon.get(f"/v1/events?limit=1000&after={since}").json["items"]
    assert [event["reason"] for event in told if event["kind"] == "node.unknown"] == []


def test_processes_with_long_environments_delay_no_one(attacked: Attacked) -> None:
    since = attacked.last_event()
    with attacked.host.running("eve", *python(MANY)) as eve:
        eventually(lambda: eve.output().count("ready") == 41, 60, eve.output)
        serves_ada(attacked, since)


def test_a_process_below_many_others_with_long_environments_delays_no_one(attacked: Attacked) -> None:
    """It is on a GPU, so that each reading must find out whose it is."""
    since = attacked.last_event()
    with attacked.host.running("eve", *python(ANCESTRY)) as eve:
        eve.wait_for("ready")
        attacked.host.show_on_gpus({UUIDS[3]: [int(eve.output().split()[0])]})
        eventually(lambda: attacked.gpu(UUIDS[3])["state"] == "foreign", ALLOWED_S, attacked.daemon.story)
        serves_ada(attacked, since, on=UUIDS[3])


def test_processes_whose_environment_and_command_line_have_no_end_delay_no_one(attacked: Attacked) -> None:
    since = attacked.last_event()
    with attacked.host.running("eve", *python(MAPPED)) as eve:
        eventually(lambda: eve.output().count("ready") == 64, 60, eve.output)
        if "prctl" in eve.output():
            return  # this kernel lets no user do so
        pids = [int(line.split()[0]) for line in eve.output().splitlines()]
        attacked.host.show_on_gpus({UUIDS[3]: pids})
        eventually(lambda: attacked.gpu(UUIDS[3])["state"] == "foreign", ALLOWED_S, attacked.daemon.story)
        serves_ada(attacked, since, on=UUIDS[3])


def test_processes_with_many_mappings_delay_no_one(attacked: Attacked) -> None:
    """While a GPU drains, all of them are searched for its device file."""
    since = attacked.last_event()
    with attacked.host.running("eve", *python(MANY_MAPPINGS)) as eve:
        eventually(lambda: eve.output().count("ready") == 6, 60, eve.output)
        serves_ada(attacked, since)


def test_requests_streams_and_connections_of_eve_leave_ada_served(attacked: Attacked) -> None:
    """Only that it goes on, and within what a lease's ttl and a client's patience allow."""
    job = attacked.running_job("ada")
    lease = attacked.lease("ada")
    with attacked.host.running("eve", *python(REQUESTS, str(attacked.host.socket))) as eve:
        eve.wait_for("ready")
        for _ in range(20):
            begun_s = time.monotonic()
            assert attacked.call("ada", "GET", "/v1/gpus").status == 200
            renewed = attacked.call("ada", "POST", f"/v1/leases/{lease['id']}/renew", {"token": lease["token"]})
            assert renewed.status == 200, renewed.content
            assert time.monotonic() - begun_s < 10
        assert eve.alive(), eve.output()
    assert attacked.daemon.job(job["id"])["state"] == "running"
