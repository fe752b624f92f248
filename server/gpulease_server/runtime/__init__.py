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

What each failure does
----------------------
- Commit fails: nothing of the turn was written. Its callers, and every undecided request, get 503. The ledger is thrown
  away and read again, as often as it takes; until then every request gets 503 and `/readyz` says why.
- The core breaks an invariant: the ledger is read again, and each happening of the turn is decided in a turn of its
  own, so that one that the core stumbles over is refused alone, with 500 and a traceback in the log.
- The process is stopped and continued: the next tick sees the gap and gives the time back to every holder.
- The wall clock jumps: only what people read changes. Everything is measured on the monotonic clock.
"""
