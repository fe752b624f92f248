"""The ledger on disk: SQLite or PostgreSQL, by the same code (`dialects` has what differs).

Authority: between commits the ledger in memory is ahead of the disk by one turn, and nobody has been told of that turn.
After a commit both say the same. At start, and whenever a commit failed, memory is filled from here.

What is stored: leases, jobs, GPUs (with who holds them, whether they drain, the token of their last grant), nodes,
events, idempotency keys, and the next number, token and seq, which are never used twice. What is not stored: readings,
deadlines, when draining began. They are measured on a clock that ends with the process; after a start every holder gets
a full `ttl_s` and every draining GPU needs a new reading.

What must always hold:
1. One turn is one transaction. It is committed with fsync (SQLite: WAL with `synchronous=FULL`; PostgreSQL:
   `synchronous_commit`) before anybody is told.
2. A GPU's row names its one holder; no second row can.
3. `lease.token` and `event.seq` are unique in the database too, so that a broken writer cannot commit.

4. What is pruned goes with all that belongs to it, and events only from the oldest end, see `retention`.
5. There is one writer: every transaction proves its term, see `term`.

What each failure does
----------------------
- A transaction fails: `StoreFailed`. It has written nothing, unless only the answer to its COMMIT is missing. Either
  way its outcome is settled before the ledger is read again (`Term.settle`).
- The database cannot keep a value: DataError; nothing was written, and nothing but that value is wrong.
- Another daemon has taken over: `Superseded`; nothing was or will be written, and this daemon ends.
- The server is stopped or cut off: given up after `patience.PATIENCE_S`, and as a transaction that fails.
- A migration fails, or the process dies in it: the schema is as it was.
- A database of a newer schema is refused at start.
- Killed while it prunes: whole batches are gone.
- A second daemon is kept out by a lock (see `runtime.lock`).
"""
