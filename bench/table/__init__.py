"""The table of `make bench`: each goal for speed, as a question with a target, measured beside its limit or peer.

- `rows`: what a line says, and how it is printed.
- `load`: what other programs use of the machine. Beside more than half a core nothing is printed.
- `machine`: what the figures were measured on.
- `questions`: all questions, by name.
- `run`: each question in a process of its own, which starts its own daemon in a temporary directory.
"""
