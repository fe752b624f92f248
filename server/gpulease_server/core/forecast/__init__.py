"""When a waiting request will start, as far as that can be known.

The queue is played forward (`virtual_queue`) by the functions that decide: `settle` on a copy of the ledger, with a
virtual clock. So order, limits, fair share, backfill, gangs and connections are those of the daemon, and no second set
of rules has to agree with the first. What is not known is when leases end. How that is taken is the basis of what is
said (`expected_start`):

- `declared`: a lease ends when its `time_s`, its job's `timeout_s` or the budget of its token ends it; without one,
  never. What is said is one time: so late a request starts if all keep their GPUs as long as they may.
- `history`, for requests that do not start in that way: a lease lasts as long as earlier ones of its user did that
  lasted longer than it has until now (`lease_history`), and no longer than declared. The queue is played three times,
  with early, middle and late ends. What is said is the range from the first to the last of the three starts. Sooner
  ends may make a later start, so the early ends alone do not say the first one.

Of a request that does not start in each of these plays nothing is said: an end that it needs is unknown. What is said
is no promise: later requests may go first, people cancel, GPUs break. Nothing here is ever used to decide.

What must always hold: the ledger is read, never changed; no turn waits for a forecast; the work is bounded
(`MAX_REQUESTS`, `MAX_OTHERS`, `MAX_TURNS`, `MAX_OPENINGS`) and divided into steps. A step may be a whole turn: most of
a second, where each request of a long queue asks for something else on 10,000 GPUs.

| what happens | what is said |
|---|---|
| a node is silent, a GPU foreign, cordoned or broken | it does not come back: what needs it has no known start |
| a GPU has drained for over `MAX_DRAIN_S` | the same |
| a lease has outlasted its time for over `MAX_LATE_S`, or its job is stuck | the same |
| a node goes | what is there then does not come back, and nothing starts there any more |
| a request is behind `MAX_REQUESTS` others | nothing; the oldest of each kind is played, for it may pass them |
| a job pauses before a retry, in an order that is not that of arrival | it counts as behind all others |
| a job waits for other jobs | nothing |
| a window of a reservation ends, or is too near for a request, by less than leases may be late | nothing from then on |
| others end for a request (`core.preemption`) | its GPUs are held for it; nothing from the first of these ends on |
| GPU-hours leave a window or are used, or a token has a new day | who waits for that alone starts then |
| the fleet and the queue are so large that all the time goes before the first start | nothing |
| few leases have ended here, or a lease has outlasted all but few | by history nothing |
| the daemon restarts | the same as before, once its nodes have reported: all of it follows from the ledger |
"""
