"""The worker: one per host. It reads the GPUs, reports them, and runs the jobs that the daemon orders.

Who is authoritative
--------------------
- The daemon decides what should run, and on which GPUs. The worker decides nothing: it reports its full view, receives
  the full desired state, and makes the two agree (`exchange`). A message that is lost or comes twice does no harm.
- The hardware says what is on a GPU. NVML is asked in a process of its own (`probe`, `hardware`, `nvml`), because an
  NVML call can hang in the kernel, where no thread can be stopped. Past its deadline a thread of the probe names the
  call and ends the process, or the worker kills it (`occupancy`). It is replaced; until the next one answers the node's
  GPUs are unknown. `simulation` replaces the source of readings and nothing else.
- A job's directory says what has happened to the job (`records`). Memory is a copy: the worker may be killed at any
  instant and started again, and it finds everything there.
- A job's supervisor is the only one who launches it (`supervisor`). The lock of the job's directory says who that is: a
  supervisor holds it from before it launches until it ends. Who does not hold it neither launches nor records an end.
- Whose a process is, and who keeps a draining GPU, the probe finds out from `/proc` (`attribution`, `open_files`); what
  the worker alone can know of a lease, its owner's start time and when it was first seen, is kept in `leases.json`
  (`holders`).
- Whether an owner of leases lives, its pidfd says (`owners`); only what certainly has ended is reported `gone`.
- Compute modes, where the worker sets them: what a GPU's was is on disk before it is changed (`compute_modes`).
- What an ended job lease still has running is ended here if its supervisor could not (`leftovers`); what a user left is
  named, and ended only with `kill_leftovers`.

Processes
---------
```
gpulease worker
├── probe                        ends with the worker, by the kernel's parent-death signal or at the end of its stdin
└── supervisor, one for each job in a session of its own, no pipe to the worker: it outlives the worker
    └── launcher                 torchrun, or the plain command, in a session of its own
        └── ranks ...            with the marker GPULEASE_LEASE_ID in their environment
```

The life of a job
-----------------
1. Ordered. The worker makes the directory under another name, with `order.json` in it, then renames it: it is there
   whole, once. It looks at no path of the user's: he may have one that hangs. Reported `starting`.
2. Supervised. The worker starts a supervisor, with SIGTERM blocked so that no stop is lost before it listens. It takes
   the directory's lock and writes `start.json`, with fsync, *before* it launches. A directory with a `start.json` is
   never launched again, whoever tries: at most once is what a training needs, because twice would be two on one GPU.
   A process that has become the job's user looks for what is in the way (`launch.obstacle`), the job's own interpreter
   is asked whether it has the launcher, and that is started in his directory, with his limits (`entry`): what he may
   not do, root does not do for him. Where his file system hangs, his process hangs, and the supervisor heeds orders on.
   Until it runs its program a process has no marker, so the kernel ends it with the supervisor, as the launcher.
3. Up. `start.json` is written again with the launcher in it, and once more when the first rank is up. The worker sees
   that and reports `running`. torchrun, accelerate, deepspeed and horovodrun start ranks; a rank is told so by its
   environment. What any other launcher starts is rank 0 itself.
4. Ending. The launcher exits by itself, or is told to: SIGTERM to the launcher alone, because torchrun ends its ranks
   in its own order; after the grace SIGKILL to everything.
5. Swept. What is left, inside the job's session or not, gets SIGTERM and then SIGKILL: every descendant of the
   supervisor, which as child subreaper is the parent of all whose parents died, and every process of the node with the
   lease's marker. torchrun's ranks are sessions of their own, and a `setsid` grandchild escapes any process group, so
   neither killpg nor waiting for the launcher would do.
6. Ended. Only now is `exit.json` written. The supervisor ends; its pidfd wakes the worker, which reports `exited` at
   once, in place of a request that the daemon may be holding. Its code, reason and traceback are those of the rank that
   failed first (`failure`).
7. Forgotten. The daemon no longer orders it. The directory stays where it is, because its logs were announced there,
   and is marked `forgotten`; the newest 1000 of those are kept (`--keep-jobs`).

What must always hold
---------------------
- An attempt of a job is launched at most once, whatever is killed when. Each has a directory and a lease of its own.
- A job runs as the user who submitted it, or not at all (`accounts`). His log directory is his: it is read without
  following links (`gpulease.log_files`).
- A job whose lock is held is somebody's: the worker looks for the supervisor and does not clean up (`watch`).
- `exit.json` exists only when no process of the job lives, not even one that hangs in the kernel.
- A signal goes to exactly the process that was meant: by pidfd, checked against pid and start time; never by pid alone.
- A job that the daemon does not order does not run.
- A reading named after a ticket was begun, in all that a grant rests on, after the answer with that ticket had arrived.
- What the driver cannot tell is None, never 0; a process list that cannot be read is not an empty one.

What each failure does
----------------------
- The daemon is away: the jobs go on, and the worker tries again for ever, every 0.1 to 2 s.
- The worker is told to end or is killed: the jobs go on; the next worker finds them by `start.json`.
- A supervisor is killed: nobody knows how the job would have ended. The worker kills everything with the marker and
  reports the job as exited without a code. A worker that starts later does the same.
- The machine restarts: start times count from boot, so the boot's id is in the record and the job is as above.
- The worker is killed between 1 and 2, or right after it started the supervisor: the order is there and `start.json` is
  not, so the next worker that is still ordered to run the job starts a supervisor. Of two the one with the lock runs
  the job; the other ends, which means nothing.
- A record cannot be read: the job is reported as `starting` and looked at again; after 60 s without a supervisor it is
  given up, and what carries its marker is killed.
- A process hangs with the lock of its memory, and with it whoever reads its environment: it is left out (`patience`).
- The driver hangs: the report carries the problem; jobs are started, stopped and reported as ever.
- A job prints without end: its supervisor gives the oldest blocks of its log files back (`log_bound`). The job writes
  them itself, through no pipe, so that a supervisor that hangs or dies neither stalls it nor ends it by SIGPIPE.
- The disk is full: a new job is refused with that reason; what runs goes on. The room for `exit.json` was taken with
  the directory. An order to stop that cannot be written is passed on as SIGTERM alone, which means the default grace,
  and written later.
- A job's processes cannot be killed, because they hang in the kernel or run as another user: 5 s after the first
  SIGKILL they are noted in `stuck.json` and reported, and they are killed on, once a second, until they have ended. A
  process of which the first thread alone has ended is one of them, though the kernel shows it as a zombie.
- An owner cannot be watched (no descriptor left, no right to look): it is `unknown`, and its leases must be renewed.
- The worker is killed while an owner dies: the next one is told of the same owners, and finds it gone.
- A second worker on the same data directory waits 15 s for the lock and gives up.

Deliberately absent: any listening socket, because the worker only ever calls the daemon; and a need for cgroups, which
want root or delegation: where a job can have one (`cgroup`) it is ended through it, and elsewhere the marker and the
subreaper do without.
"""
