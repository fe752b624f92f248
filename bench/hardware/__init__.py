"""Checks on this machine what gpulease assumes about drivers, with one command, in under ten minutes.

`python -m bench.hardware [--quick] [--only A,E] [--gpu UUID] [--xid]` prints a Markdown table: what was asked, what was
found, what was expected, and whether gpulease relies on it; below it the tables of times. `checks` lists the steps.

What it does to the machine: it uses 1 unused GPU, for seconds at a time, and starts daemons of its own on
temporary directories. It sets and resets nothing. GPUs in use are listed and left alone.

How it is built. Each step is a process of its own (`step`), in a session of its own, with a deadline; it writes each
row to a file as soon as it is known, so that a step that hangs loses only its remaining rows. Everything that a step
starts carries a token in its environment, and is ended with it (`run`). The steps let programs use the GPU
(`tests.gpu.subject`), and observe them through `gpulease_worker.probe.nvml_binding`, as the probe would.

Exit code: 0 if nothing contradicts what gpulease relies on, even if steps could not run; 1 if one does, or a step hung
or failed; 2 if there is no GPU that NVML can read.
"""
