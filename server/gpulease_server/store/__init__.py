"""The ledger on disk.

Authority: between commits the ledger in memory is ahead of the disk by one turn, and nobody has been told of that turn.
After a commit both say the same. At start, and whenever a commit failed, memory is filled from here.

What is stored: leases, jobs, GPUs (with who holds them, whether they drain, the token of their last grant), nodes,
events, idempotency keys, and the next number, token and seq, which are never used twice. What is not stored: readings,
deadlines, when draining began. They are measured on a clock that ends with the process; after a start every holder gets
a full `ttl_s` and every draining GPU needs a new reading.

What must always hold:
1. One turn is one transaction. It is committed with fsync (SQLite: WAL with `synchronous=FULL`) before anybody is told.
2. A GPU's row names its one holder; no second row can.
3. `lease.token` and `event.seq` are unique in the database too, so that a broken writer cannot commit.

What each failure does: a commit that fails raises `StoreFailed`, and has written nothing. A database of a newer schema
is refused at start. A second daemon is kept out by the lock on the data directory (see `runtime.lock`).
"""
