"""The single writer: what arrives is decided in turns, committed, and only then answered.

Authority: one `Writer` per database, kept so by the lock on the data directory. It owns the ledger; nobody else changes
it. Readers use `Writer.committed`, a second ledger to which each turn is applied only after its commit, so that nobody
is shown what a crash could undo.

A turn
------
1. Take everything that has arrived (at most `MAX_TURN`), read the clock once.
2. `decide` each, then `settle` the queue. All in memory, microseconds each.
3. Write the whole turn in one transaction, in a thread. What arrives meanwhile joins the next turn: many requests share
   one fsync, and the longer a commit takes, the more share the next. A turn without anything to store is not committed.
4. Apply the turn to `committed`, answer the callers, wake whoever waits for a lease, a job or a node to change.

What must always hold: nobody is answered before the commit of what he is told; `committed` only ever moves from one
committed state to the next; a waiter that looks at `committed`, finds no change and waits, cannot miss the change,
because looking and waiting happen without an `await` between them.

A commit that failed
--------------------
Whether a failed commit was recorded is not known: the database may have written it and lost the connection before it
said so. So nothing is concluded from the failure; the ledger is read again, and what is there is there.

    well --commit fails--> outage --read, and a commit succeeds--> well
                             |  ^
                             +--+  every 0.1 s, doubling to 2 s (and no more than a fifth of the time goes into reading)

At once everybody is answered 503 with `Retry-After`: those whose answers were in that turn with `outcome: unknown`, so
that they ask again under their Idempotency-Key, which finds what was recorded; all others with "nothing was done", and
what they asked for is forgotten. The outage ends with a commit of its own, the event `ledger.recovered`: a disk that is
full can still be read. After it every holder has a full `ttl_s`, and waiters look again.

What works meanwhile: `/healthz`; everything that is read from memory; **renewals**. What a holder relies on is that
its lease is recorded and will last `ttl_s` more; it is, and it will, because the outage ends nobody's lease and gives
everybody a full `ttl_s` at its end, as a restart does. So a renewal is answered from memory, and recorded with that
last commit. Not so for a lease that the failed turn may have granted, ended or revived, nor where another daemon may
have taken over meanwhile: only the lock beside an SQLite file excludes that. What does not work: requests, releases,
jobs, anything an administrator changes, and the nodes' exchange, whose workers try again every 2 s; their GPUs are
`unknown` after `silence_s`, and jobs go on.

What each failure does
----------------------
| what happens | the callers hear | and then |
|---|---|---|
| full disk, I/O error, locked or read-only file | 503; renewals 200 | outage, until a commit succeeds |
| a commit is recorded, its answer lost | 503 `outcome: unknown` | it is read; the key gets the same lease |
| the file is moved, and commits go on to succeed | 503 `outcome: unknown` | its inode shows it; until it is back |
| an older copy is put in its place | 503 | refused until the newer is back, or a restart |
| the ledger cannot be read | 503 | tried again; logged once for each reason |
| a decision breaks an invariant | 500 for the guilty one alone | read again; a turn for each happening |
| the program stumbles at the commit | the truth | read again; `seq` tells if it was recorded |
| it stumbles after the commit | their answers | read again; nothing is decided twice |
| it is stopped during a commit | the truth; others 503 | the commit is finished first |
| SIGKILL in an outage | nothing; they ask again | a restart: a full `ttl_s`, renewed or not |
| `MAX_WAITING` requests wait already | 503 | a waiter's sign of life is passed over |
| stopped and continued; a commit takes long | late answers | the next tick gives everybody that time back |
| the wall clock jumps | nothing | people read another time; nothing is measured by it |

An older copy is refused because tokens would come twice; who restarts the daemon accepts it. A tick comes after all
that had arrived when it was due, so that a renewal which waited is decided before its lease expires.
"""
