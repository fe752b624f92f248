"""Clients that live through a daemon's crashes, and write down what they were told.

Run as `python -m tests.system.crash_clients URL CLIENTS DIRECTORY`: so many threads, every second of which uses the
client library and the others plain HTTP with an Idempotency-Key. Each appends lines to a file of its own, as
`tests/simulation/checker.py` reads them, after the answer has arrived. They go on until DIRECTORY has a file `stop`;
then each finishes what it has begun. Exit status 1 when one of them failed.
"""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import random
import sys
import threading
import time
import urllib.parse
from pathlib import Path
from typing import Any

from gpulease import Client
from gpulease_protocol.codec import to_json
from gpulease_protocol.errors import GpuleaseError

TTL_S = 30.0
"""Much longer than a restart takes, because a renewal must come through."""
PATIENCE_S = 240.0
"""How long one tries to get GPUs, crashes or not."""


class CrashClient:
    """One client: asks, renews, gives back, for as long as there is no `stop`."""

    def __init__(self, url: str, number: int, directory: Path) -> None:
        self.url = url
        self.name = f"c{number}"
        self.plain = number % 2 == 0
        self.directory = directory
        self.chance = random.Random(number)
        self.error: BaseException | None = None
        self._log = (directory / f"{self.name}.jsonl").open("a")

    def run(self) -> None:
        """Until `stop`. An error ends it and is kept."""
        try:
            with self._log, contextlib.closing(Client(self.url)) as library:
                for number in itertools.count():
                    if (self.directory / "stop").exists():
                        return
                    key, count = f"{self.name}-{number}", self.chance.choice((1, 1, 2, 3))
                    if self.plain:
                        self._plain(key, count)
                    else:
                        self._library(library, key, count)
        except BaseException as error:
            self.error = error

    def say(self, what: str, sent_s: float, **more: Any) -> None:
        """Write a line down; what is said now was seen now, unless `at_s` says otherwise."""
        line = {"what": what, "sent_s": sent_s, "at_s": time.monotonic(), **more}
        self._log.write(json.dumps(line) + "\n")
        self._log.flush()

    def _http(self, method: str, path: str, body: Any = None, key: str | None = None) -> tuple[int, Any] | None:
        """Status and JSON; None when no answer came."""
        port = urllib.parse.urlsplit(self.url).port
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=15)
        headers = {"Content-Type": "application/json"} | ({"Idempotency-Key": key} if key else {})
        try:
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())
        except (OSError, http.client.HTTPException, ValueError):
            return None
        finally:
            connection.close()

    def _until_answered(self, what: str, path: str, body: Any, **known: Any) -> tuple[int, Any]:
        """Ask again, under the same key, until there is an answer other than 503."""
        while True:
            sent_s = time.monotonic()
            got = self._http("POST", path, body, known.get("key"))
            if got is None:
                self.say(what, sent_s, **known | {"at_s": None})
            else:
                told = {"lease": got[1]} if got[0] < 300 else {"code": got[1]["code"]}
                self.say(what, sent_s, status=got[0], **known, **told)
                if got[0] != 503:
                    return got
            time.sleep(self.chance.uniform(0.05, 0.3))

    def _plain(self, key: str, count: int) -> None:
        body = {"count": count, "ttl_s": TTL_S, "label": key}
        status, lease = self._until_answered("asked", "/v1/leases", body, key=key)
        if status not in (201, 202):
            raise AssertionError(f"{key} was refused: {status} {lease}")
        while lease["state"] == "queued":
            sent_s = time.monotonic()
            got = self._http("GET", f"/v1/leases/{lease['id']}?wait_s=2&wait_while=queued")
            if got is None or got[0] == 503:
                time.sleep(0.05)
                continue
            told = {"lease": got[1]} if got[0] == 200 else {"code": got[1]["code"]}
            self.say("shown", sent_s, status=got[0], lease_id=lease["id"], waited=True, trusted_from=None, **told)
            if got[0] != 200:
                raise AssertionError(f"{key} was told of {lease['id']}, and then {got}")
            lease = got[1]
        if lease["state"] != "active":
            raise AssertionError(f"{key} waited all the time and was ended: {lease}")
        known = {"lease_id": lease["id"], "token": lease["token"]}
        path, proof = f"/v1/leases/{lease['id']}", {"token": lease["token"]}
        for _ in range(self.chance.randrange(4)):
            time.sleep(self.chance.uniform(0.0, 0.05))
            if self._until_answered("renewed", f"{path}/renew", proof, **known)[0] != 200:
                raise AssertionError(f"{key} could not be renewed")
        if self._until_answered("released", f"{path}/release", proof, **known)[0] != 200:
            raise AssertionError(f"{key} could not be released")

    def _library(self, client: Client, key: str, count: int) -> None:
        until_s = time.monotonic() + PATIENCE_S
        sent_s = time.monotonic()
        while True:
            try:
                held = client.lease(count, wait_s=PATIENCE_S, ttl_s=TTL_S, label=key)
                break
            except GpuleaseError:
                # The library has taken back what it could; the request may have been granted, so the key is spent.
                self.say("asked", sent_s, key=key, at_s=None)
                self.say("gave_up", sent_s, key=key)
                if time.monotonic() > until_s:
                    raise
                key, sent_s = f"{key}+", time.monotonic()
        gpus = [to_json(gpu) for gpu in held.gpus]
        lease = {"id": held.id, "state": "active", "token": held.fencing_token, "ttl_s": TTL_S, "gpus": gpus}
        self.say("asked", sent_s, status=201, key=key, lease=lease | {"end_reason": None, "demand": {"count": count}})
        time.sleep(self.chance.uniform(0.0, 0.1))
        sent_s = time.monotonic()
        while True:
            try:
                held.release()
                break
            except GpuleaseError:
                time.sleep(0.05)
        if held.lost.is_set():
            raise AssertionError(f"{key} was lost")
        self.say("released", sent_s, status=200, lease_id=held.id, token=held.fencing_token)


def main() -> int:
    """Start them all, wait for them all."""
    url, clients, directory = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    crowd = [CrashClient(url, number, directory) for number in range(clients)]
    threads = [threading.Thread(target=client.run) for client in crowd]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    failed = [f"{client.name}: {client.error!r}" for client in crowd if client.error is not None]
    print("\n".join(failed), file=sys.stderr)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
