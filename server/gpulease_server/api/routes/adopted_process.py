"""The process that a request adopts: its identity, user and descendants. `core.adoption` decides the rest.

On the daemon's host the kernel says all of it. On another, the node that reports the process's realm shows whose it is,
and only the process itself counts: what runs below it is not known here.
"""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress

from gpulease_protocol.errors import InvalidRequest, NotAllowed
from gpulease_protocol.host.process_id import Stat, realm, stat
from gpulease_protocol.host.process_tree import descendants
from gpulease_protocol.model import Holder
from gpulease_protocol.node_protocol import LeaseOwner
from gpulease_protocol.requests import LeaseRequest
from gpulease_server.api.auth.callers import Caller
from gpulease_server.api.auth.peer_credentials import PeerCredentials
from gpulease_server.api.auth.user_names import refresh_user_name, user_name
from gpulease_server.api.daemon_state import DaemonState
from gpulease_server.core.records import Adoption, WatchedOwner

MAX_PROCESSES = 4096
"""Processes below an adopted one, at most."""


async def adopted_here(
    daemon: DaemonState, body: LeaseRequest, caller: Caller, peer: PeerCredentials
) -> tuple[Holder, WatchedOwner, Adoption]:
    """The holder that the process of this host will be, with those below it. Raises InvalidRequest, NotAllowed."""
    pid, node, own_realm = body.owner_pid or 0, daemon.node_here(), realm()
    if node is None or own_realm is None:
        raise InvalidRequest(f"adopt: no worker of host {daemon.host} reports.", remedy="Start one there.")
    process = stat(pid) if body.owner_start_ticks is not None or _counts_pids_as_we_do(peer) else None
    if process is None or process.dead or body.owner_start_ticks not in (None, process.start_ticks):
        raise _no_such_process(pid, daemon.host)
    try:
        uid = os.stat(f"/proc/{pid}").st_uid
    except OSError:
        raise _no_such_process(pid, daemon.host) from None
    await refresh_user_name(uid)
    user = user_name(uid)
    if not caller.may_see(Holder(user=user)) and caller.uid != uid:
        detail = f"Process {pid} belongs to user {user}."
        raise NotAllowed(detail, remedy="Its user or an administrator can adopt it.")
    below = await asyncio.to_thread(_below, pid, uid)
    again: Stat | None = stat(pid)
    if again is None or again.start_ticks != process.start_ticks:
        raise _no_such_process(pid, daemon.host)
    if len(below) > MAX_PROCESSES:
        raise InvalidRequest(f"owner_pid: process {pid} has over {MAX_PROCESSES} processes below it.")
    owner = LeaseOwner(pid=pid, start_ticks=process.start_ticks)
    holder = Holder(user=user, host=daemon.host, owner_pid=pid, label=body.label)
    return holder, WatchedOwner(node=node, realm=own_realm, owner=owner), Adoption(pids=below | {pid})


def _below(pid: int, uid: int) -> frozenset[int]:
    """The user's own processes below one: below `init` and `sshd` there are those of others."""
    found = set()
    for process in descendants(pid):
        with suppress(OSError):
            if os.stat(f"/proc/{process.pid}").st_uid == uid:
                found.add(process.pid)
    return frozenset(found)


def adopted_elsewhere(
    daemon: DaemonState, body: LeaseRequest, caller: Caller, watched: WatchedOwner | None
) -> tuple[Holder, WatchedOwner, Adoption]:
    """The same for a process of another host, which its node must show to be the caller's."""
    if watched is None:
        detail = "adopt: needs owner_start_ticks, and owner_realm of a host whose worker reports here."
        raise InvalidRequest(detail, remedy="Ask on the host of the process.")
    pid = watched.owner.pid
    holder = Holder(user=caller.user, host=daemon.ledger.nodes[watched.node].host, owner_pid=pid, label=body.label)
    return holder, watched, Adoption(pids=frozenset({pid}), user=caller.user)


def _counts_pids_as_we_do(peer: PeerCredentials) -> bool:
    """True if a pid means the same process to the peer and to this daemon."""
    try:
        return os.readlink(f"/proc/{peer.pid}/ns/pid") == os.readlink("/proc/self/ns/pid")
    except OSError:
        return False


def _no_such_process(pid: int, host: str) -> InvalidRequest:
    remedy = "Name one that runs; over TCP, and from a container, with its owner_start_ticks."
    return InvalidRequest(f"owner_pid: there is no process {pid} on {host}, or it has ended.", remedy=remedy)
