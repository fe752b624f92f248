"""What do the daemon's policies do with recorded workloads? Question by question:

- `validation`: are the starts under strict order, and with none, those of models that know nothing of the core? Do
  these models give what queueing theory gives, and what was published for the same files?
- `comparison`: waits, slowdowns, fairness and idle GPUs of each policy, beside strict order and an oracle that knows
  how long everything takes.

`README.md` beside this file has the last results and the commands.
"""
