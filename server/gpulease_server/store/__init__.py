"""The ledger on disk: SQLite or PostgreSQL, by the same code (`dialects` has the differences).

Authority: between commits the ledger in memory is ahead of the disk by one turn, which no caller has been told of.
After a commit both are equal. At start, and after a failed commit, memory is loaded from here.

Stored: leases, jobs, GPUs (with their holder, whether they drain, the token of their last grant), nodes, events,
idempotency keys, and the next number, token and seq, which are never used twice. Not stored: readings, deadlines, when
draining began. They are measured on the monotonic clock of the process; after a start every holder gets a full `ttl_s`
and every draining GPU needs a new reading.

What must always hold:
1. One turn is one transaction. It is committed with fsync (SQLite: WAL with `synchronous=FULL`; PostgreSQL:
   `synchronous_commit`) before any caller is answered.
2. A GPU's row names its one holder; no second row can.
3. `lease.token` and `event.seq` are unique in the database too, so that a broken writer cannot commit.
4. Pruning deletes a record with everything that belongs to it, and events only from the oldest end, see `retention`.
5. There is one writer: every transaction checks its fencing term, see `fencing`.

What each failure does
----------------------
- A transaction fails: `StoreFailed`. It has written nothing, unless only the answer to its COMMIT was lost. Its outcome
  is resolved before the ledger is loaded again (`WriterFence.resolve_in_doubt`).
- The database cannot store a value: DataError; nothing was written, and only that value is wrong.
- Another daemon has taken over: `Superseded`; nothing was or will be written, and this daemon ends.
- The server is stopped or cut off: the wait ends after `psycopg_timeout.WAIT_TIMEOUT_S`, as a failed transaction.
- A migration fails, or the process dies in it: the schema is unchanged.
- A database with a newer schema is refused at start.
- Killed while pruning: only whole batches are deleted.
- A second daemon is kept out by a lock (see `runtime.leadership.lock`).
"""
