"""A whole installation in one thread, under a clock and a chance that a seed decides, and a checker that knows no code.

What is real: the FastAPI application with its bodies, keys and long polls; `Writer`, `Wakeups`, `DesiredStateTickets`,
`GpuMetricsRecorder`; `core.decide` and `settle`; `Store` on an SQLite file. What is played: the event loop's clock
(`loop.py`: time passes only from timer to timer, and nothing sleeps), the threads of the store (they run at a moment
that the seed chooses, so that a crash can come before a commit, after it, and before its answer), the network, the
worker with its hardware, and clients. Not in here: uvicorn, sockets, signals, SQLite's own recovery:
`tests/system/test_crash_rounds.py` has them.

A step is a line of the trace: a message sent, delivered, lost or answered, a commit, a crash, a jump of the wall clock,
something that happens to the hardware. The same seed gives the same trace; a test compares the hashes.

`checker.py` judges. It imports nothing of the product and reads two things: the event log, and what was seen from
outside (answers to clients, events as a client that followed the log saw them, what the nodes reported, and when the
wall clock was set). Its own tests show it a bad log for each of its rules.

`python -m tests.simulation SEED [--steps N] [--mutation NAME]` runs one seed and prints what the checker says;
`mutations.py` lists faults that were put into the daemon by hand, to see whether they are caught.
"""
