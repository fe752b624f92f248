"""The single writer: happenings are decided in turns, committed, and only then answered.

Authority: one `Writer` per database, enforced by a lock (`leadership.lock`) and by fencing (`store.fencing`). It owns
the ledger; nothing else changes it. Readers use `Writer.committed`, a second ledger to which each turn is applied only
after its commit, so that no reader sees what a crash could undo.

A turn
------
1. Take everything that has arrived (at most `MAX_TURN`), read the clock once.
2. `decide` each happening, then `settle` the queue. All in memory, microseconds each.
3. Write the whole turn in one transaction, in a thread (group commit). What arrives meanwhile joins the next turn: many
   requests share one fsync, and the longer a commit takes, the more share the next. A turn that has nothing to store is
   not committed.
4. Apply the turn to `committed`, wake who waits for a lease, answer the callers, wake who waits for a job or a node.

What must always hold: no caller is answered before the commit of the answer; `committed` moves only from one committed
state to the next; a waiter that looks at `committed`, finds no change and waits cannot miss the change, because there
is no `await` between looking and waiting.

A commit that failed
--------------------
The outcome of a failed commit is unknown: the database may have written it and lost the connection before it said so.
So nothing is concluded from the failure; the ledger is loaded again, and what is in the database is what happened.

    normal --commit fails--> outage --load and a commit succeed--> normal
                              |  ^
                              +--+  every 0.1 s, doubling to 2 s (and at most a fifth of the time is spent loading)

Every caller gets 503 with `Retry-After` at once: with `outcome: unknown` if its answer was in that turn, so that it
asks again under its Idempotency-Key, which finds what was recorded; otherwise with "nothing was done", and its request
is dropped. The outage ends with a commit of its own, the event `ledger.recovered`, because a full disk can still be
read. After it every holder has a full `ttl_s`, and waiters look again.

What works during an outage: `/healthz`; everything that is read from memory; **renewals**. A holder relies on its lease
being recorded and lasting `ttl_s` more; it is, and it will, because an outage ends no lease and every lease gets a full
`ttl_s` at its end, as after a restart. So a renewal is answered from memory and recorded with that last commit. Three
exceptions: a lease that the failed turn may have granted, ended or revived; a lease that was granted out of the queue,
if its holder does not know yet, because only what is recorded outlasts a restart; and a database that another daemon
may have taken over meanwhile. Only the lock beside an SQLite file excludes that.

What does not work: requests, releases, jobs, anything an administrator changes, and the exchange with the nodes.
Workers retry every 2 s; their GPUs are `unknown` after `silence_s`, and jobs go on.

What each failure does
----------------------
| what happens | what callers get | what follows |
|---|---|---|
| full disk | new requests 503, all else goes on | commits go on in the reserve (`store.disk_reserve`) |
| reserve used up, I/O error, locked or read-only file | 503; renewals 200 | outage, until a commit succeeds |
| a commit is recorded, its answer lost | 503 `outcome: unknown` | loaded again; the key gets the same lease |
| the file is moved, and commits still succeed | 503 `outcome: unknown` | its inode shows it; outage until it is back |
| its write-ahead log is deleted | 503 | closed and opened again, which saves what is in it |
| it is overwritten in place | 503 | refused until a restart (`store.file_guard`) |
| an older copy is put in its place | 503 | refused until the newer one is back, or a restart |
| PostgreSQL fails over to a replica that lags | 503 | the same, found by `seq` at the next commit |
| the ledger cannot be loaded | 503 | retried; logged once for each reason |
| a decision breaks an invariant | 500 for the request that caused it | loaded again; one turn per request |
| a bug during the commit | the outcome as recorded | loaded again; `seq` tells whether it was recorded |
| a bug in a turn while the database is away | 503 `outcome: unknown` | outage, until it can be loaded |
| a bug after the commit | their answers | loaded again; nothing is decided twice |
| stopped during a commit | the outcome of the commit; the others 503 | the commit is finished first |
| stopped during a commit that hangs | the outcome if in time, else 503 or nothing | the process ends after 30 s |
| SIGKILL in an outage | nothing; they ask again | a restart: a full `ttl_s`, renewed or not |
| `MAX_QUEUED` requests are queued | 503 | a waiter's sign of life is dropped |
| SIGSTOP and SIGCONT | late answers | the next tick gives every holder that time back |
| a slow commit | late answers | those who were heard in it have their time from the answer on, others none |
| the wall clock jumps | nothing | displayed times jump; nothing is measured by them |

An older copy is refused because tokens would repeat; restarting the daemon accepts it. A tick is decided after
everything that had arrived when it was due, so that a renewal in the backlog is decided before its lease expires.

The writer sleeps until something arrives or a tick is due (`core.next_tick`). While a lease has a deadline or a node is
silent it wakes more often than `stall_s`, because only so it can tell that it was stopped.
"""
