"""Connects the supervisors of a job that runs on several nodes, from before its start to its end.

The supervisor on the node of rank 0, the leader, listens on the leased port; each of the others connects to it. So a
node that cannot reach the leader is known, with the reason, before any launcher waits for it, and so is a port that is
taken. The leader stops listening before the launch, because the rendezvous of the ranks has this port from then on. The
connections stay, and tell the end of each part, whether the daemon and the workers live or not:

| what happens | what the others learn |
|---|---|
| a part ends well | `0`: the connection is not missed any more |
| a part fails, is stopped, or its supervisor is killed | `1`, or the end of the connection: it ended |
| its host dies, or its link is cut | the kernel gives the connection up after LOST_S: it cannot be reached |

A part that learns this ends, too (`supervisor`). So what runs on a node that is cut off has ended soon after, without
the daemon; only on that may the job be tried again on other nodes.

A stranger can connect as well, and is dropped without the lease's id. Who knows it can end the job of its user, as one
who can reach the port of the ranks' own rendezvous can.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import time
from contextlib import suppress

from gpulease_protocol.lazy_dataclass import dataclass
from gpulease_protocol.node_protocol import GangPlace

LOST_S = 9
"""A connection without an answer for so long is lost: the kernel asks after KEEPALIVE_S without traffic, and again."""
KEEPALIVE_S = 3
CONNECT_S = 5.0
"""How long one attempt to connect may take."""
RETRY_S = 0.2
"""Pause between two attempts."""
HELLO_S = 5.0
"""How long one who connects may take to say who it is."""
HELLO_BYTES = 256
MAX_STRANGERS = 16
"""How many may be connected at a time who have not said it; the oldest is dropped."""
UNREACHABLE = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ENETDOWN)
"""How a connection ends when its other end is gone."""
READY, ENDED_WELL, FAILED = b"ready\n", b"0\n", b"1\n"


@dataclass(slots=True, eq=False)
class _Peer:
    """A connection to another supervisor."""

    socket: socket.socket
    since_s: float
    received: bytes = b""


@dataclass(frozen=True, slots=True)
class PeerEnd:
    """The part of the job on another node has ended, or is out of reach."""

    sentence: str
    """What is known of it."""
    is_lost: bool
    """True where it cannot be reached; it ends by itself then, if it has not yet."""


class GangLink:
    """This supervisor's connections. Nothing of it waits; the caller sleeps on `descriptors`.

    Args:
        place: This node's part.
        lease_id: The job's lease, by which the supervisors know each other.
        port: The leased port on the leader's node.
    """

    def __init__(self, place: GangPlace, lease_id: str, port: int) -> None:
        self._place, self._port = place, port
        self._hello = f"gpulease {lease_id} ".encode()
        self._listener: socket.socket | None = None
        self._strangers: list[_Peer] = []
        self._peers: dict[int, _Peer] = {}
        """By rank of their node; also of those that have ended."""
        self._done: set[int] = set()
        """Ranks of the nodes with a part that has ended well."""
        self._connecting: _Peer | None = None
        self._retry_at_s = 0.0
        self._end: PeerEnd | None = None
        self.problem: str | None = None
        """Why the leader cannot be reached, as a sentence; None where it can, and on the leader itself."""

    @property
    def is_ready(self) -> bool:
        """True on the leader once it listens, and elsewhere once the leader has answered."""
        return self._listener is not None if self._leads else bool(self._peers)

    @property
    def _leads(self) -> bool:
        return self._place.rank == 0

    def open(self) -> None:
        """Listen, on the leader. Raises OSError."""
        if not self._leads:
            return
        family, _ = _address(self._place.leader, self._port)
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(("", self._port))
            listener.listen(len(self._place.nodes) + MAX_STRANGERS)
        except OSError:
            listener.close()
            raise
        listener.setblocking(False)
        self._listener = listener

    def close_listener(self) -> None:
        """Give the port to the ranks. The connections stay."""
        for stranger in self._strangers:
            stranger.socket.close()
        self._strangers.clear()
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    def close(self, *, ended_well: bool) -> None:
        """Tell the others that this part has ended."""
        self.close_listener()
        for peer in (*self._peers.values(), *([] if self._connecting is None else [self._connecting])):
            with suppress(OSError):
                peer.socket.send(ENDED_WELL if ended_well else FAILED)
            peer.socket.close()
        self._peers.clear()

    def descriptors(self) -> list[int]:
        """What becomes readable when there is something to do."""
        waiting = [*self._strangers, *(peer for rank, peer in self._peers.items() if rank not in self._done)]
        listening = [] if self._listener is None else [self._listener.fileno()]
        return [] if self._end is not None else listening + [peer.socket.fileno() for peer in waiting]

    def advance(self) -> PeerEnd | None:
        """Do what can be done at once. Returns the first end of another part that is known, once there is one."""
        if self._leads:
            self._accept()
        elif not self._peers:
            self._connect()
        for rank in [rank for rank in self._peers if rank not in self._done]:
            self._read(rank, self._peers[rank])
        return self._end

    def _accept(self) -> None:
        if self._listener is not None:
            with suppress(BlockingIOError, ConnectionError):
                while True:
                    accepted, _ = self._listener.accept()
                    accepted.setblocking(False)
                    self._strangers.append(_Peer(accepted, time.monotonic()))
        for stranger in list(self._strangers):
            self._greet(stranger)
        for stranger in self._strangers[:-MAX_STRANGERS]:
            self._drop(stranger)

    def _greet(self, stranger: _Peer) -> None:
        """Learn who has connected: one of the others says its rank and the lease."""
        try:
            is_there = _receive(stranger)
        except OSError:
            is_there = False
        line, found, _ = stranger.received.partition(b"\n")
        if not found:
            late = time.monotonic() - stranger.since_s > HELLO_S
            if not is_there or late or len(stranger.received) > HELLO_BYTES:
                self._drop(stranger)
            return
        rank = line.removeprefix(self._hello)
        if line == rank or not rank.isdigit() or not 0 < int(rank[:9]) < len(self._place.nodes):
            self._drop(stranger)
            return
        self._strangers.remove(stranger)
        stranger.received = b""
        former = self._peers.get(int(rank))
        if former is not None:
            former.socket.close()
        self._peers[int(rank)] = stranger
        _keep_alive(stranger.socket)
        with suppress(OSError):
            stranger.socket.send(READY)

    def _drop(self, stranger: _Peer) -> None:
        stranger.socket.close()
        self._strangers.remove(stranger)

    def _connect(self) -> None:
        """Take the next step towards a connection with the leader."""
        now_s = time.monotonic()
        if self._connecting is None:
            if now_s >= self._retry_at_s:
                self._begin(now_s)
            return
        peer = self._connecting
        writable = select.select([], [peer.socket], [], 0)[1]
        failed = peer.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) if writable else 0
        if not failed and writable:
            try:
                if not peer.received:
                    peer.socket.send(self._hello + b"%d\n" % self._place.rank)
                    peer.received = b" "  # it has been said
                if not _receive(peer):
                    failed = errno.ECONNRESET
            except OSError as error:
                failed = error.errno or errno.EIO
        if peer.received.endswith(READY):
            peer.received, self._connecting, self.problem = b"", None, None
            self._peers[0] = peer
            _keep_alive(peer.socket)
        elif failed or now_s - peer.since_s > CONNECT_S:
            self._fail(OSError(failed or errno.ETIMEDOUT, ""))

    def _begin(self, now_s: float) -> None:
        try:
            family, address = _address(self._place.leader, self._port)
            connecting = socket.socket(family, socket.SOCK_STREAM)
        except OSError as error:
            self._fail(error)
            return
        connecting.setblocking(False)
        self._connecting = _Peer(connecting, now_s)
        failed = connecting.connect_ex(address)
        if failed not in (0, errno.EINPROGRESS):
            self._fail(OSError(failed, ""))

    def _fail(self, error: OSError) -> None:
        if self._connecting is not None:
            self._connecting.socket.close()
            self._connecting = None
        self._retry_at_s = time.monotonic() + RETRY_S
        here, leader = self._place.nodes[self._place.rank], self._place.nodes[0]
        where = f"{self._place.leader}:{self._port}"
        self.problem = f"Node {here} cannot reach node {leader} at {where}: {_words(error)}."

    def _read(self, rank: int, peer: _Peer) -> None:
        name = self._place.nodes[rank]
        try:
            is_there = _receive(peer)
        except OSError as error:
            if error.errno in UNREACHABLE:
                here, address = self._place.nodes[self._place.rank], self._place.addresses[rank]
                sentence = f"Node {name} ({address}) can no longer be reached from node {here}: {_words(error)}."
                self._end = self._end or PeerEnd(sentence, is_lost=True)
                return
            is_there = False
        if peer.received.endswith(ENDED_WELL):
            self._done.add(rank)
        elif not is_there or peer.received.endswith(FAILED):
            self._end = self._end or PeerEnd(f"Its part on node {name} had ended.", is_lost=False)


def _receive(peer: _Peer) -> bool:
    """Take in what has arrived. False once the other end has closed. Raises OSError."""
    try:
        received = peer.socket.recv(HELLO_BYTES)
    except BlockingIOError:
        return True
    peer.received = (peer.received + received)[-2 * HELLO_BYTES :]
    return bool(received)


def _address(address: str, port: int) -> tuple[socket.AddressFamily, tuple[object, ...]]:
    """Family and socket address of an IP address. Raises OSError for a name, which could take long to resolve."""
    found = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)[0]
    return found[0], found[4]


def _keep_alive(connected: socket.socket) -> None:
    """Have the kernel give a connection up that has no answer for LOST_S."""
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_KEEPIDLE, KEEPALIVE_S),
        (socket.TCP_KEEPINTVL, KEEPALIVE_S),
        (socket.TCP_KEEPCNT, LOST_S // KEEPALIVE_S - 1),
        (socket.TCP_USER_TIMEOUT, LOST_S * 1000),
    ):
        connected.setsockopt(socket.IPPROTO_TCP, option, value)


def _words(error: OSError) -> str:
    """What an error means, in lower case: "no route to host"."""
    number = error.errno or 0
    words = {errno.ETIMEDOUT: "no answer", errno.ECONNRESET: "the connection was closed"}.get(number)
    words = words or (os.strerror(number) if number > 0 else str(error.strerror))
    return words[:1].lower() + words[1:]
