"""What is decided, and nothing else: no clock, no randomness, no I/O, no database, no async.

Authority
---------
The `Ledger` in memory is the authority on who holds what, and every change to it reaches the database before anyone is
told (see `gpulease_server.runtime`). The hardware is the authority on whether a GPU is clean; the core knows it only
through node reports. A GPU is given out when both agree: the ledger has it unheld, and a recent reading
(`core.gpu.is_recent`) shows no process on it.

A turn
------
The runtime opens a `Turn` on the ledger with the time of the moment, passes each happening to `decide`, and closes with
`settle`, which goes through the queue once. The functions here change the ledger only through `Turn.put`, which applies
a change in memory and records it, so that the store writes exactly what happened. Many decisions build on each other
within one turn (a report cleans a GPU, which grants a lease, which starts a job); that is why the ledger is changed in
place and not copied. Should the commit fail, this ledger is thrown away and read again from the database.

States
------
A lease is `queued`, then `active`, then `ended`. A request is *undecided* between its arrival and the first `settle`
that could judge it on fresh readings: nothing of it is recorded and its caller is not answered. Most requests pass from
undecided to active in one write.

    request --> undecided --grant--> active --release, expiry--> ended
                    |                  ^                           |
                    +--wait--> queued -+        late renewal <-----+   (only while none of its GPUs was granted again)

A GPU is unheld, held by an active lease, or draining. It is held in the ledger from the commit of the grant; draining
from the end of the lease until a reading *begun after that end* shows it clean. See `core.gpu`.

Does a holder live?
-------------------
A lease has a deadline on the monotonic clock, in memory only. A renewal, and a wait for a queued lease, move it to
`ttl_s` from then. That is all for liveness `heartbeat`. With liveness `process` a worker, on the daemon's host or
another, also watches the owner, queued or active (`core.liveness`). Its report says of each owner that it was told of:

- `gone`: the lease ends at once as `holder_died`, before anything is granted in the same turn. An owner is a pid with
  its start time, so what is gone stays gone: a report cannot be too old to say so, and no lease that was renewed,
  granted or asked for in its name since can be ended wrongly by it.
- `alive`: as good as a renewal of an active lease, but for its row. A deadline is never moved back. In the queue it
  gives no time, nor to a lease that its holder has not asked about since it was granted out of the queue: a process
  that gave up its request lives on, and must not wait behind it.
- `unknown`: the worker cannot watch it. The lease is one by heartbeat from then on, for good; `lease.unwatched` says
  why.
- nothing: the report was begun before the worker was told. It decides nothing.

A pid and a start time name a process in one boot and one pid namespace only
(`gpulease_protocol.host.process_id.realm`). A report from another realm makes its owners unknown, so that no daemon or
worker in a container ends leases of the host.

| what happens | what is decided |
|---|---|
| the owner is killed, exits, or forks and exits (becomes a daemon) | `holder_died` at once; its GPUs drain |
| the owner is stopped, or never lets its renewing thread run | the lease stays for as long as a worker sees the owner |
| the owner calls `execve`; only its main thread ends | it is the same process, and lives |
| the owner dies while no worker watches (worker or daemon down) | the next worker finds it gone |
| the pid is another's by then | the start time differs: gone |
| the worker is silent | time ends no active lease; `core.node_loss` has the bound. One that waits has its client |
| the worker reports again | the lease lasts a full `ttl_s` from then, so that the worker has time to find the owner |
| the worker is out of descriptors, may not look, or watches `MAX_OWNERS` already | unknown, so by heartbeat |
| it watches a quarter of that for the same user | the same |
| the machine restarts, a container does | another realm, so by heartbeat: `expired` at `ttl_s` |
| a request's owner dies before its verdict | refused, nothing is recorded |
| no one waits for a queued request any more, though its owner lives | `holder_died` after `ttl_s` |
| it is granted while its holder waits | recorded as told with the grant, see `runtime.grant_waiters` |
| it is granted in that time | unclaimed: `expired` after `ttl_s`, unless its holder asks about it or renews |
| the client goes away while it waits, or before it is told of a grant at once | the same, after a minute at most |
| the daemon restarts in that time | the same: it is recorded whether the holder has asked |
| the report was overtaken by a newer one | decides nothing; the newer one said it |

What must always hold
---------------------
1. A GPU is held by at most one active lease; the lease names the GPU and the GPU names the lease.
2. A lease has all the GPUs it asked for or none: all on one node, or so many on each of so many nodes (a gang).
3. Tokens rise with every grant. The token last granted on a GPU is remembered by the GPU, which is what tells whether a
   late renewal may revive.
4. The queue is in order of priority, usage and arrival, see `core.order`. A request that can be granted may pass one
   that cannot, often enough and long enough and no more; then free GPUs are held for the one before. See
   `core.backfill`.
5. Ports on one node, of a gang on that of rank 0, are held by at most one lease that is active or drains.

What each failure does
----------------------
- Node silent, or its probe: its GPUs are `unknown`; leases and jobs stay; nothing is granted there. A probe that hangs
  does not keep its worker from telling of owners. A node that stays silent is lost, see `core.node_loss`.
- Daemon restarted: the ledger is read back; every deadline starts again with a full `ttl_s`; GPUs are unknown until
  their node reports; draining GPUs need a reading begun after the start.
- Daemon stopped for a while and continued: deadlines are moved on by as long as no holder could be heard. A slow commit
  is no such time, see `runtime.writer`.
- Worker lost its record of a running job: the job is `lost`, its GPUs drain until nothing of it is seen.
"""
