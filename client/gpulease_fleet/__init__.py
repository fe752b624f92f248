"""Workers that an engine carries: a *pool* of pilots, each a job of Slurm that runs the worker of one node.

A pilot is a worker in an allocation that anyone may ask for. The daemon and its ledger outlive it; only the worker is
carried. This package is a program beside the daemon (`gpulease fleet`), and not a part of it:

- It needs `sbatch` and the home directory of a user of the cluster. The daemon is confined, and runs where neither is.
- No grant rests on it. What it gets wrong costs allocations; a GPU is granted because a worker shows it to be free. It
  uses the API as everyone does, with an administrator's rights.
- It may be down: pilots, leases and jobs go on, and it finds them again.

What it knows is in a file of SQLite, `records.py`. What is authoritative:

| question | authority |
|---|---|
| which pilots were ever submitted? | the records: a row is written before each submission |
| which of them exist? | the scheduler's list, by name: `gpulease:POOL:ORDINAL:GENERATION` |
| has one ended? | the scheduler says so; or it has not listed it for a while (`Carrier.gone_s`) |
| does its node work? | the daemon: a worker reports |

The *generation* is the fence. Each submission has its own, one higher than the last of its ordinal, and none is ever
submitted twice; so a submission of unknown outcome does no harm: if it was accepted, it is adopted by its name, and if
it is found later than a next one, it is cancelled. A pilot's worker has a bearer token of its own, which is revoked
when the pilot has ended: a worker that lives on, because its `slurmstepd` was killed, is not heard any more.

```
            token, row, sbatch                 a worker reports
    (none) --------------------> submitting --> pending --> running --stop--> ending
                                     |             |           |                |
                                     +-------------+-----------+----------------+--> ended --> gone
                                          the scheduler no longer has it            token revoked, node forgotten
```

| what happens | what is done |
|---|---|
| this program is killed at any step | the next one goes on from the row: adopts by name, or gives up the generation |
| the scheduler does not answer | nothing at all is decided in that round |
| a submission fails, or a pilot ends before its worker reports | the next one waits 1 s, 3 s, 7 s, ... a minute |
| 10 submissions in a row fail, or 3 pilots in a row end before a worker reports | the pool pauses, and says why |
| two pilots of one ordinal are listed | the one of the row stays; the others are cancelled |
| a pilot ends without having left | its refused worker ends its jobs; its node is forgotten, and they are retried |
| the records are lost | pilots that are listed are adopted by their names |
| the daemon does not answer | pilots are kept as they are; nothing is submitted, because a worker needs a token |
"""
