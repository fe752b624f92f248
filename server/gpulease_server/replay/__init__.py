"""Replays recorded requests under another policy: `gpulease policy replay`.

What decides
------------
The core of the daemon itself. `virtual_daemon` passes it happenings as the runtime does, and plays what is around it:
the clock, the nodes, and the holders, who give their GPUs back after as long as they held them. No rule of the queue is
written here a second time, so a rule that the core gets is replayed from the same day on.

What is played
--------------
- A request arrives when it was recorded. One of a job that waited for others arrives when those have ended in the
  replay; one of an array with a bound, when fewer of its array are asked for or run; a further attempt, when the one
  before has ended.
- A granted request holds its GPUs as long as it did, or until a rule of the core ends it.
- A GPU is clean `DRAIN_S` after the end of its lease. Every node always reports, every reading is recent.
- The nodes and GPUs are those of now, all of one kind of connection, and all in use.
- The limits of users, groups and tokens are set before anything else, and hold to the end.

What follows from that
----------------------
A replay is no forecast. People who wait less ask for more, and a request that was withdrawn while it waited never says
how long it would have run: those are left out, and counted. Usage and windows of GPU-hours begin at nothing, and
budgets of tokens are not known. The recorded waits stand beside those of the replay with the present policy: where the
two differ, the past had something that the replay has not (a node that was away, a policy that was changed).

The same requests, nodes and policy give the same result, on every machine.

| what happens | what follows |
|---|---|
| the daemon writes meanwhile | the replay reads one snapshot, and nothing of it goes back |
| more requests than `MAX_REQUESTS` | an error that says to take a shorter period |
| a request that no node could ever serve, or that a limit refuses | it is refused, as by the daemon, and counted |
| a request that nothing will ever let start | it is counted as never granted; its wait counts up to the end |
| a lease that a rule ends before it was done | all that it held counts as lost: nothing says what it had saved |
"""
