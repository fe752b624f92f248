"""A daemon with TLS on this machine, and hosts of a switch whose workers report to it over the network."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.daemon import Answer, DaemonProcess, eventually
from tests.hosts import Host, Switch, switch
from tests.http_as_user import call

READY_S = 120.0


class FleetDaemon(DaemonProcess):
    """A daemon whose port speaks TLS to the hosts; the tests ask it as root, over its socket."""

    def call(self, method: str, path: str, body: Any = None, *, raw: bytes | None = None, **headers: str) -> Answer:
        """One request over the socket."""
        assert raw is None
        return call(self.socket, method, path, body, **headers)

    def get(self, path: str) -> Answer:
        return self.call("GET", path)


class Fleet:
    """The daemon, and what its hosts need to talk to it."""

    def __init__(self, running: FleetDaemon, network: Switch, certificate: Path, place: Path) -> None:
        self.daemon, self.network, self._certificate, self._place = running, network, certificate, place
        self.workers: dict[str, subprocess.Popen[bytes]] = {}
        self.url = f"https://{network.address}:{running.port}"

    def token(self, **fields: Any) -> str:
        """A new bearer token, by default of root."""
        made = self.daemon.call("POST", "/v1/tokens", {"user": "root"} | fields)
        assert made.status == 201, made.content
        return str(made.json["bearer"])

    def client(self, **fields: Any) -> dict[str, str]:
        """Variables for a client on a host, with a token of its own."""
        return self.access() | {"GPULEASE_TOKEN": self.token(**fields)}

    def access(self) -> dict[str, str]:
        """Variables for who has no token."""
        return {"GPULEASE_URL": self.url, "SSL_CERT_FILE": str(self._certificate)}

    def host(self, name: str, **fields: Any) -> Host:
        """A host without a worker."""
        return self.network.boot(name, **fields)

    def start_worker(self, host: Host, node: str, gpus: int = 2, *options: str) -> None:
        """Start the worker of a node on a host, and wait until its GPUs are free."""
        self.launch_worker(host, node, gpus, *options)
        eventually(lambda: self.states(node) == ["free"] * gpus, READY_S, lambda: self.story(node))

    def launch_worker(self, host: Host, node: str, gpus: int = 2, *options: str) -> None:
        """Start the worker of a node on a host."""
        variables = self.access() | {"GPULEASE_TOKEN": self.token(role="worker", node=node)}
        words = ["worker", "--url", self.url, "--node", node, "--data-dir", f"/srv/{node}", "--simulate", str(gpus)]
        program = [sys.executable, "-P", "-m", "gpulease_cli", *words, *options]
        self.workers[node] = host.popen(*program, log=self._log(node), **variables)

    def worker_pid(self, node: str) -> int:
        """The worker's process, as this machine counts: the child of the `nsenter` that has started it."""
        pid = self.workers[node].pid
        text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
        return int(text.split()[0])

    def kill_worker(self, node: str) -> None:
        """SIGKILL to the worker. Its jobs go on."""
        os.kill(self.worker_pid(node), signal.SIGKILL)
        self.workers.pop(node).wait()

    def states(self, node: str) -> list[str]:
        """The state of each GPU of a node."""
        return [gpu["state"] for gpu in self.daemon.gpus() if gpu["node"] == node]

    def story(self, node: str) -> str:
        """What daemon and worker printed."""
        return f"{self.daemon.story()}\nthe worker printed:\n{self._log(node).read_text(errors='replace')[-4000:]}"

    def _log(self, node: str) -> Path:
        return self._place / f"worker-{node}.log"

    def close(self) -> None:
        for process in self.workers.values():
            process.kill()
            process.wait()


@contextmanager
def fleet(place: Path, *options: str) -> Iterator[Fleet]:
    """A daemon without a worker of its own, and a network with no hosts yet."""
    with switch() as network:
        certificate, key = place / "cert.pem", place / "key.pem"
        words = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=gpulease"]
        words += ["-addext", f"subjectAltName=IP:{network.address}", "-keyout", str(key), "-out", str(certificate)]
        subprocess.run(words, check=True, capture_output=True, timeout=60)
        serve = ["--no-worker", "--host", "0.0.0.0", "--tls-cert", str(certificate), "--tls-key", str(key), *options]
        running = FleetDaemon(place / "d", *serve)
        try:
            found = Fleet(running, network, certificate, place)
            running.start(ready=False)
            try:
                yield found
            finally:
                found.close()
        finally:
            running.stop()
