"""The API answers what its OpenAPI document says, and nothing else, to whatever the document allows and forbids.

schemathesis makes up the requests: valid and invalid ones for each operation, and walks along the links. It fails on
any 500, status, content type or body that is not in the document, on nonsense that is taken, and on a method that is
not refused as it should be.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.api.documents import whole_document
from tests.daemon import DaemonProcess, daemon, eventually

HOOKS = Path(__file__).with_name("openapi_hooks.py")
TOO_MUCH = "positive_data_acceptance,use_after_free"
"""No schema says that a token is the right one or that two fields go together: 412 and 422 are right answers there. And
a lease that was deleted stays on record, as `ended`."""


def walk(running: DaemonProcess, directory: Path, *options: str) -> int:
    """How many requests were made. Fails with schemathesis' own report."""
    command = [sys.executable, "-W", "ignore", "-m", "schemathesis.cli"]
    schema = directory / "openapi.json"
    schema.write_text(json.dumps(whole_document()))
    command += ["--config-file", str(HOOKS.with_name("schemathesis.toml")), "run", str(schema), "--url", running.url]
    command += ["--exclude-checks", TOO_MUCH, "--request-timeout", "60", "--no-color", "--continue-on-failure"]
    environment = os.environ | {"SCHEMATHESIS_HOOKS": str(HOOKS)}
    ended = subprocess.run(
        [*command, *options],
        cwd=directory,
        env=environment,
        check=False,
        capture_output=True,
        text=True,
    )
    report = "\n".join(line[:500] for line in ended.stdout.splitlines())
    assert ended.returncode == 0, f"{report[-12000:]}\n{ended.stderr[-2000:]}\n{running.story()}"
    said = re.search(r"(\d+) generated", ended.stdout)
    assert said is not None, ended.stdout
    print(ended.stdout[-3000:])
    return int(said[1])


def unharmed(running: DaemonProcess) -> None:
    """Whatever was reported in a node's name, drained and cordoned: the daemon is well, and no fault is in its log."""
    assert running.call("POST", "/v1/nodes/n1/resume").status == 200
    eventually(lambda: running.answers("/readyz"), 60, running.story)
    log = running.output.read_text(errors="replace")
    assert "Traceback" not in log, log[-4000:]
    assert "ERROR" not in log, log[-4000:]


@pytest.mark.slow
@pytest.mark.busy
@pytest.mark.timeout(600)
def test_no_answer_is_undocumented(tmp_path: Path) -> None:
    with daemon(tmp_path, "--simulate", "4", "--node", "n1") as running:
        made = walk(running, tmp_path, "--phases", "fuzzing,stateful", "-n", "12", "--generation-deterministic")
        assert made >= 200
        unharmed(running)


@pytest.mark.soak
@pytest.mark.timeout(3000)
def test_no_answer_of_twenty_thousand_is_undocumented(tmp_path: Path) -> None:
    with daemon(tmp_path, "--simulate", "4", "--node", "n1") as running:
        made, seed = 0, 0
        while made < 20_000:
            seed += 1
            made += walk(running, tmp_path, "-n", "100", "--seed", str(seed), "--generation-database", "none")
        print(f"{made} requests")
        unharmed(running)


def test_every_link_leads_somewhere(api: DaemonProcess) -> None:
    document = api.call("GET", "/openapi.json").json
    known = {operation["operationId"] for methods in document["paths"].values() for operation in methods.values()}
    links = [
        link
        for methods in document["paths"].values()
        for operation in methods.values()
        for answer in operation["responses"].values()
        for link in answer.get("links", {}).values()
    ]
    assert len(links) > 20
    assert {link["operationId"] for link in links} <= known
