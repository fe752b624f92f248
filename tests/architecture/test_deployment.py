"""What is deployed starts commands that exist, and installs versions that are pinned."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from compose_spec import PyCompose
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from gpulease_cli.program import PROGRAM

ROOT = Path(__file__).parents[2]
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
DOCKERFILE = (ROOT / "Dockerfile").read_text()


def parses(arguments: list[str]) -> None:
    """Fails unless the command line understands these arguments; runs nothing."""
    context = PROGRAM.make_context("gpulease", list(arguments), resilient_parsing=False)
    with context:
        _, command, rest = PROGRAM.resolve_command(context, [*context._protected_args, *context.args])
        command.make_context(command.name, rest, parent=context)


OWN = [name for name, service in COMPOSE["services"].items() if service["image"].startswith("gpulease")]


@pytest.mark.parametrize("name", OWN)
def test_a_service_runs_a_command_that_exists(name: str) -> None:
    parses(COMPOSE["services"][name]["command"])


def test_a_wrong_option_would_be_seen() -> None:
    with pytest.raises(Exception, match="--no-such-option"):
        parses(["serve", "--no-such-option"])


def test_daemon_and_worker_share_the_socket() -> None:
    services = COMPOSE["services"]
    daemon, worker = services["daemon"], services["worker"]
    socket = daemon["command"][daemon["command"].index("--socket") + 1]

    assert worker["command"][worker["command"].index("--url") + 1] == f"unix://{socket}"
    assert daemon["volumes"] == worker["volumes"]
    assert "--no-worker" in daemon["command"]


def test_the_database_is_on_loopback_only_and_the_daemon_waits_for_it() -> None:
    postgres, daemon = COMPOSE["services"]["postgres"], COMPOSE["services"]["daemon"]

    assert all(port.startswith("127.0.0.1:") for port in postgres["ports"])
    assert postgres["profiles"] == ["postgres"]
    assert daemon["depends_on"] == {"postgres": {"condition": "service_healthy", "required": False}}


def test_the_worker_sees_the_processes_of_the_host_and_its_gpus() -> None:
    worker = COMPOSE["services"]["worker"]

    assert worker["pid"] == "host"
    assert "nvidia" in json.dumps(worker)


def test_compose_understands_its_file() -> None:
    PyCompose.from_yaml(yaml.safe_dump(COMPOSE))  # with its `<<:` resolved
    with pytest.raises(ValueError, match="no-such-word"):
        PyCompose.from_yaml("services: {daemon: {image: x, no-such-word: 1}}")


def test_hadolint_finds_nothing(tmp_path: Path) -> None:
    assert hadolint(ROOT / "Dockerfile") == ""
    wrong = tmp_path / "Dockerfile"
    wrong.write_text("FROM debian\nRUN cd /tmp\n")
    assert "DL3006" in hadolint(wrong)


def hadolint(dockerfile: Path) -> str:
    """What hadolint says of a file."""
    program = shutil.which("hadolint", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    assert program is not None, "hadolint comes with the extra dev"
    return subprocess.run([program, str(dockerfile)], capture_output=True, text=True, timeout=60, check=False).stdout


def test_the_daemon_has_few_rights_and_the_image_none() -> None:
    daemon = COMPOSE["services"]["daemon"]
    (unit,) = re.findall(
        r"^CapabilityBoundingSet=(.*)$", (ROOT / "deploy/systemd/gpulease.service").read_text(), re.MULTILINE
    )

    assert (daemon["cap_drop"], daemon["read_only"]) == (["ALL"], True)
    assert [f"CAP_{name}" for name in daemon["cap_add"]] == unit.split()
    assert re.findall(r"^USER (.*)$", DOCKERFILE, re.MULTILINE) == ["1000"]


@pytest.mark.parametrize("name", sorted(COMPOSE["services"]))
def test_a_service_has_no_capabilities_but_those_it_names_and_gets_no_more(name: str) -> None:
    service = COMPOSE["services"][name]
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert not service.get("privileged", False)


def test_a_worker_has_the_rights_to_run_jobs_as_their_users_and_no_others() -> None:
    """That they are enough is shown by tests/system/test_compose_rights.py."""
    needed = {"CHOWN", "DAC_OVERRIDE", "FOWNER", "KILL", "SETGID", "SETUID", "SYS_PTRACE"}
    for name in ("worker", "simulated-worker"):
        assert set(COMPOSE["services"][name]["cap_add"]) == needed


def test_a_service_that_others_wait_for_shows_its_health() -> None:
    waited_for = {
        name
        for service in COMPOSE["services"].values()
        for name, how in service.get("depends_on", {}).items()
        if how["condition"] == "service_healthy"
    }
    assert waited_for == {"daemon", "postgres"}
    assert "HEALTHCHECK" in DOCKERFILE
    assert "healthcheck" in COMPOSE["services"]["postgres"]


def test_the_simulated_worker_is_all_that_has_to_be_named() -> None:
    """Compose starts what it depends on, and what has a profile only where it is named."""
    simulated = COMPOSE["services"]["simulated-worker"]
    assert (list(simulated["depends_on"]), simulated["profiles"]) == (["daemon"], ["simulated"])
    assert "docker compose up --build simulated-worker " in (ROOT / "docker-compose.yml").read_text()


def test_the_image_is_built_from_all_that_the_wheel_includes() -> None:
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    included = [*wheel["force-include"], *(Path(package).parent.name for package in wheel["packages"])]
    sent = {line.removeprefix("!") for line in (ROOT / ".dockerignore").read_text().split("\n")}
    assert {place for place in included if f"\nCOPY {place} {place}\n" not in DOCKERFILE or place not in sent} == set()


def test_the_image_says_its_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert f'org.opencontainers.image.version="{project["version"]}"' in DOCKERFILE
    assert f'org.opencontainers.image.licenses="{project["license"]}"' in DOCKERFILE
    assert f"image: gpulease:{project['version']}\n" in (ROOT / "docker-compose.yml").read_text()


def test_what_is_watched_is_on_loopback_only() -> None:
    assert "--web.listen-address=127.0.0.1:9090" in COMPOSE["services"]["prometheus"]["command"]
    assert COMPOSE["services"]["grafana"]["environment"]["GF_SERVER_HTTP_ADDR"] == "127.0.0.1"


def test_every_requirement_is_pinned_to_one_version_that_satisfies_it() -> None:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    assert [line for line in lines if not re.fullmatch(r"[\w.-]+==[\w.]+", line)] == [], "exactly one version each"
    pinned = {canonicalize_name(name): version for name, version in (line.split("==") for line in lines)}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [
        *project["dependencies"],
        *(item for extra in project["optional-dependencies"].values() for item in extra),
    ]

    for requirement in (Requirement(item) for item in wanted if not item.startswith("gpulease[")):
        version = pinned.get(canonicalize_name(requirement.name))
        assert version is not None, f"constraints.txt does not pin {requirement.name}"
        assert requirement.specifier.contains(version), f"constraints.txt pins {requirement.name} to {version}"
    assert pinned["torch"] == "2.13.0"
