"""A host that has joined a daemon elsewhere (`gpulease node join`): what it has of that, and whether it still holds."""

from __future__ import annotations

import os
import shlex
import socket
from collections.abc import Mapping
from pathlib import Path

from gpulease.client import Client
from gpulease.sansio.failover import Destination
from gpulease_protocol.errors import GpuleaseError, NotAuthenticated
from gpulease_protocol.host import addresses, certificates, token_file, variables
from gpulease_protocol.tokens import Role
from gpulease_worker.doctor_findings import Finding, HostFacts, Joined, fine, unknown, warning, wrong

ANSWER_S = 5.0
"""How long the daemon may take to answer."""


def read_environment(directory: Path) -> dict[str, str]:
    """What `node join` has written down in a worker's directory; empty where the host has not joined, or this user may
    not read it."""
    try:
        lines = (directory / "environment").read_text().splitlines()
        found = dict(line.split("=", 1) for line in lines)
        return {name: " ".join(shlex.split(value)) for name, value in found.items()}
    except (OSError, ValueError):
        return {}


def is_hidden(directory: Path) -> bool:
    """Whether `node join` has written it down in this worker's directory, and this user may not read it."""
    file = directory / "environment"
    return os.path.exists(file) and not os.access(file, os.R_OK)


def destination(environment: Mapping[str, str]) -> Destination:
    """The daemon that was joined, with the worker's own token. Raises GpuleaseError."""
    bearer = token_file.read(environment.get(variables.TOKEN_FILE, ""), variables.TOKEN_FILE)
    found = addresses.candidates(environment.get(variables.URL))
    trusted = certificates.ca_file(found, environment)
    return Destination(found, True, bearer, ANSWER_S, obeys=True, plain_http=False, ca_file=trusted)


def examine_joined(environment: Mapping[str, str]) -> Joined | None:
    """Ask the daemon that was joined for whom it takes this host. None where the host has not joined one."""
    if not environment.get(variables.URL):
        return None
    node, url = environment.get("GPULEASE_NODE", ""), environment[variables.URL]
    facts = Joined(url=url, node=node, own_host=socket.gethostname())
    again = f"On the daemon's host: gpulease node add {node}; here: the command that it prints."
    try:
        with Client.for_destination(destination(environment), retry_s=0.0) as client:
            me = client.me()
    except NotAuthenticated:
        return facts.failed("The daemon does not take this host's token: it was revoked or has expired.", again)
    except GpuleaseError as error:
        return facts.failed(error.detail, error.remedy or "See docs/many-hosts.md.")
    if me.role is not Role.WORKER or me.node != node:
        return facts.failed(f"The worker's token is for node {me.node}, and this host is to be node {node}.", again)
    return Joined(url=url, node=node, own_host=facts.own_host, worker_host=me.worker_host)


def joined(facts: HostFacts) -> Finding:
    """Does the daemon that this host has joined take its worker, and is that the one that reports?"""
    found = facts.joined
    if found is None and facts.joined_hidden:
        return unknown("node", "This host has joined a daemon elsewhere; root's `gpulease doctor` says more.")
    if found is None:
        return fine("node", "This host has not joined a daemon elsewhere.")
    if found.problem is not None:
        return wrong("node", f"Node {found.node} of {found.url}: {found.problem}", found.remedy)
    if found.worker_host is None:
        sentence = f"No worker reports for node {found.node} of {found.url}."
        return warning("node", sentence, "Start it: systemctl start gpulease-worker; its log says what fails.")
    if found.worker_host != found.own_host:
        sentence = f"A worker on host {found.worker_host} reports for node {found.node}; this is host {found.own_host}."
        return wrong("node", sentence, "Stop that worker, or let this host join under another name (node add).")
    return fine("node", f"It is node {found.node} of {found.url}, and its worker reports.")


def worker_directory() -> Path:
    """Where the worker of this user keeps its files."""
    named = os.environ.get("GPULEASE_WORKER_DIR")
    return Path(named) if named else addresses.default_data_dir() / "worker"
