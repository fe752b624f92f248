"""Is what gpulease takes for granted of drivers true on this machine? One command says so, in under ten minutes.

`python -m bench.hardware [--quick] [--only A,E] [--gpu UUID] [--xid]` prints a Markdown table: what was asked, what was
found, what was expected, and whether gpulease relies on it; below it the tables of times. `checks` lists the steps.

What it does to the machine: it uses one GPU that nobody is on, for seconds at a time, and starts daemons of its own on
temporary directories. It sets and resets nothing. GPUs that somebody is on are left alone, and named.

How it is built. Each step is a process of its own (`step`), in a session of its own, with a deadline; it writes each
row into a file as soon as it is found, so that a step that hangs costs the rows that it still owed. Whatever a step has
started carries a token in its environment, and is ended with it (`run`). The steps have programs do things to the GPU
(`tests.gpu.subject`), and look at them through `gpulease_worker.nvml`, as the probe would.

Exit code: 0 when nothing contradicts what gpulease relies on, though steps may not have been able to run; 1 when a row
does, or when a step hung or broke; 2 when there is no GPU that NVML can read.
"""
