"""Judges gpulease itself on a host: its units, addresses, certificate, daemon and workers. Pure, as `doctor` is."""

from __future__ import annotations

from gpulease_protocol.model import NodeMode, NodeState
from gpulease_worker.doctor_findings import Finding, HostFacts, fine, unknown, warning, wrong

MIN_FREE_BYTES = 2**30
"""Below this, the ledger and the logs of jobs soon fill the disk."""
DAEMON_UNIT, SOCKET_UNIT, WORKER_UNIT = "gpulease.service", "gpulease.socket", "gpulease-worker.service"
UNITS = (DAEMON_UNIT, SOCKET_UNIT, WORKER_UNIT)
SOON_S = 14 * 86400.0
"""A certificate that expires within this time is mentioned."""


def units(facts: HostFacts) -> Finding:
    """Are the units of daemon and worker there, and do they start with the host?"""
    if facts.units is None:
        return unknown("units", "systemd does not run here.")
    if not facts.units:
        return unknown("units", "None of gpulease's is installed here: `gpulease setup` installs them.")
    is_node_alone = facts.joined is not None or facts.joined_hidden
    needed = (WORKER_UNIT,) if is_node_alone else UNITS
    missing = [unit for unit in needed if unit not in facts.units]
    if missing:
        without = ": the daemon has no GPUs of this host" if WORKER_UNIT in missing else ""
        do = "Install it from deploy/systemd, see docs/many-hosts.md." if is_node_alone else "gpulease setup"
        return wrong("units", f"{' and '.join(missing)} is not installed{without}.", do)
    stopped = [unit for unit in needed if not facts.units[unit][1]]
    if stopped:
        # A socket unit does not start while its daemon runs; with the daemon it does, and the worker too.
        again = SOCKET_UNIT in stopped and DAEMON_UNIT not in stopped
        start = f"systemctl restart {DAEMON_UNIT}" if again else f"systemctl start {' '.join(stopped)}"
        start = f"{start}; journalctl -u {stopped[0]} shows why"
        return wrong("units", f"{' and '.join(stopped)} does not run.", f"{start}.")
    later = [unit for unit in needed if not facts.units[unit][0]]
    if later:
        sentence = f"{' and '.join(later)} does not start with the host."
        return warning("units", sentence, f"systemctl enable {' '.join(later)}")
    who = "The worker runs, and starts" if is_node_alone else "Daemon and worker run, and start"
    return fine("units", f"{who} with the host.")


def socket(facts: HostFacts) -> Finding:
    """Can this user open the daemon's socket? The daemon decides what each user may do."""
    if facts.socket_mode is None:
        return unknown(
            "socket",
            f"There is none at {facts.socket}: no daemon runs with this data directory, or it was given another"
            " --socket.",
        )
    if not facts.socket_opens:
        sentence = f"{facts.socket} does not let this user connect, or no daemon listens on it."
        return wrong("socket", sentence, "Allow this user (gpulease serve --socket-mode), or restart the daemon.")
    return fine("socket", f"{facts.socket} lets this user connect (mode {facts.socket_mode:04o}).")


def port(facts: HostFacts) -> Finding:
    """Does another user listen at the daemon's port? Clients of gpulease send them nothing, but curl does."""
    if facts.port_strangers:
        return warning(
            "port",
            f"Neither the daemon nor you have {' and '.join(facts.port_strangers)}.",
            "End that program: the daemon takes the port when it is free. Until then use the socket.",
        )
    return fine("port", "No other user listens at the daemon's port.")


def certificate(facts: HostFacts) -> Finding:
    """Is the daemon's certificate valid for a while, and for this host?"""
    known = facts.certificate
    if known is None:
        return fine("certificate", "The configuration of `serve` on this host names none.")
    if known.problem is not None:
        return unknown("certificate", f"{known.file}: {known.problem}.")
    left_s = known.expires_s - facts.wall_s
    if left_s <= 0:
        sentence = f"{known.file} has expired {-left_s / 86400:.0f} days ago: clients refuse the daemon."
        return wrong("certificate", sentence, "Renew it; the daemon takes the new files within 10 s.")
    if left_s < SOON_S:
        return warning("certificate", f"{known.file} expires in {left_s / 86400:.0f} days.", "Renew it in time.")
    if not any(_is_for(name, host) for name in known.names for host in known.host_names):
        sentence = f"{known.file} is for {', '.join(known.names) or 'no name'}; this host is {known.host_names[0]}."
        return warning("certificate", sentence, "Clients must call the daemon by a name that it is for.")
    return fine("certificate", f"{known.file} is valid for {left_s / 86400:.0f} days more.")


def _is_for(name: str, host: str) -> bool:
    if name.startswith("*."):
        return host.partition(".")[2] == name[2:]
    return name.lower() == host.lower()


def daemon(facts: HostFacts) -> Finding:
    """Does the daemon answer, and can it grant?"""
    if facts.daemon_problem is not None:
        return wrong("daemon", facts.daemon_problem, facts.daemon_remedy or "See the daemon's log.")
    if facts.stands_by_for is not None:
        return fine("daemon", f"It is a standby; the writer is {facts.stands_by_for}.")
    active = (node for node in facts.nodes or () if node.mode is NodeMode.ACTIVE)
    can_grant = facts.nodes is None or any(node.state is NodeState.READY for node in active)
    return fine("daemon", "It answers and can grant." if can_grant else "It answers.")


def disk(facts: HostFacts) -> Finding:
    """Is there space for the ledger and for logs?"""
    if facts.free_bytes is None:
        return unknown("disk", f"{facts.data_dir} does not exist yet.")
    free = f"{facts.free_bytes / 2**30:.1f} GiB are free in {facts.data_dir}."
    if facts.free_bytes < MIN_FREE_BYTES:
        return wrong("disk", free, "Free some space: without it nothing can be granted or logged.")
    return fine("disk", free)


def workers(facts: HostFacts) -> Finding:
    """Does a worker report for each node, in the daemon's version?"""
    if facts.nodes is None or facts.stands_by_for is not None:
        return unknown("workers", "Only a daemon that answers knows them.")
    silent = [node for node in facts.nodes if node.state is NodeState.UNKNOWN and node.mode is not NodeMode.PAUSED]
    if (facts.without_worker or silent) and facts.free_bytes is not None and facts.free_bytes < MIN_FREE_BYTES:
        return unknown("workers", "On a full disk the daemon records none of their reports.")
    if facts.without_worker is not None:
        what, _, remedy = facts.without_worker.partition(". ")
        here = f"systemctl start {WORKER_UNIT}" if facts.units is not None else remedy
        return wrong("workers", f"{what}.", here)
    if silent:
        sentence = "; ".join(f"{node.name}: {(node.reason or 'unknown').rstrip('.')}" for node in silent[:8])
        look = "see the log of the worker" if facts.units is None else f"systemctl status {WORKER_UNIT}"
        return wrong("workers", f"{sentence}.", f"There: {look}, and gpulease doctor.")
    if paused := [node.name for node in facts.nodes if node.mode is NodeMode.PAUSED]:
        names = f"{', '.join(paused[:8])} {'is' if len(paused) == 1 else 'are'}"
        return fine("workers", f"{names} paused: nothing is granted there until gpulease node resume {paused[0]}.")
    others = [
        f"{node.name} has {node.worker_version}"
        for node in facts.nodes
        if node.worker_version is not None and node.worker_version != facts.daemon_version
    ]
    if others and facts.daemon_version is not None:
        sentence = f"The daemon is of version {facts.daemon_version}, but {', '.join(others[:8])}."
        return warning("workers", sentence, "Install the same version there, and restart the worker.")
    return fine("workers", f"{len(facts.nodes)} report." if len(facts.nodes) != 1 else "1 reports.")


def version(facts: HostFacts) -> Finding:
    """Is the daemon of this program's version?"""
    if facts.daemon_version is None:
        return unknown("version", f"This program is gpulease {facts.program_version}; the daemon's is not known.")
    if facts.daemon_version != facts.program_version:
        sentence = f"This program is gpulease {facts.program_version}, the daemon {facts.daemon_version}."
        return warning("version", sentence, "Nothing if that is one release; else upgrade, and restart the daemon.")
    return fine("version", f"Daemon and program are gpulease {facts.program_version}.")
