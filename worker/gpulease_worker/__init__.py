"""The worker: one per host. It reads the GPUs, reports them, and runs the jobs that the daemon orders.

What is authoritative
---------------------
- The daemon decides what runs, and on which GPUs. The worker decides nothing: it reports its full view, receives the
  full desired state, and reconciles the two (`loop`). Losing or repeating a message does no harm.
- The hardware decides what is on a GPU. NVML is called in a process of its own (`probe`), because an NVML call can hang
  in the kernel, where no thread can be stopped. Past its deadline, a thread of the probe names the call and ends the
  process, or the worker kills it (`probe.probe_client`). Until the next probe answers, the node's GPUs are unknown.
  `probe.simulation` replaces the source of readings and nothing else.
- A job's directory records what has happened to the job (`jobs.job_records`). Memory is a copy: the worker may be
  killed at any instant, and after a restart it finds everything there.
- Only a job's supervisor launches it (`jobs.supervisor`). The lock of the job's directory says which process that is: a
  supervisor holds it from before it launches until it ends. No other process launches the job or records its end.
- The probe finds out from `/proc` which lease a process belongs to, and which processes keep a draining GPU
  (`probe.process_attribution`, `probe.open_file_scanner`). What only the worker can know of a lease, its owner's start
  time and when it was first seen, is in `leases.json` (`processes.lease_cache`).
- A pidfd shows whether the owner of a lease is alive (`processes.owner_watch`); only an owner that has certainly ended
  is reported `gone`.
- The compute mode that a GPU had is on disk before the worker changes it (`probe.compute_modes`).
- What an ended job lease has left running is ended here if its supervisor could not (`processes.leftover_cleanup`); the
  leftovers of a user's own lease are reported, and ended only with `kill_leftovers`.

Processes
---------
```
gpulease worker
├── probe                        ends with the worker, by the kernel's parent-death signal or at the end of its stdin
└── fork server                  ends with the worker too, or after 10 minutes without a job
    └── supervisor, one for each job in a session of its own, no pipe to the worker: it outlives both
        └── launcher             torchrun, or the plain command, in a session of its own
            └── ranks ...        with the marker GPULEASE_LEASE_ID in their environment
```
The first job starts the fork server and does not wait for it: its supervisor is a program, below the worker itself. So
is every supervisor while there is no fork server that is ready (`jobs.supervisor_start`).
The supervisors of a job that runs on several nodes are connected (`jobs.gang_link`).
With `--pam-service` each supervisor starts one more process, which keeps its job's PAM session (`jobs.pam_session`).

The life of a job
-----------------
1. Ordered. The worker makes the directory under another name, with `order.json` in it, and renames it: it appears once
   and complete. The worker touches none of the user's paths, because one may hang. Reported `starting`.
2. Supervised. The worker has a supervisor forked (`jobs.fork_server`), with SIGTERM blocked so that no stop is lost
   before it can catch one. The supervisor takes the directory's lock and writes `start.json`, with fsync, *before* it
   launches. A directory with a `start.json` is never launched again. At most once is what a training needs: twice would
   put two on one GPU.
   A process that has become the job's user checks the paths (`jobs.launch_plan.missing_path`), the job's own
   interpreter checks for the launcher, and the launcher starts in the user's directory, with the user's limits
   (`jobs.spawn`): root does nothing for a user that the user may not do. If the user's file system hangs, that
   process hangs, and the supervisor still reacts to a stop. Until a process has executed its program it has no marker,
   so the kernel ends it with the supervisor; the same holds for the launcher.
   A job on several nodes is launched in two steps (`jobs.gang_part`): the supervisor checks everything, meets those of
   the other nodes, and records that its node is `prepared`; it launches when the daemon says that all are (`go`).
3. Running. `start.json` is written again with the launcher in it, and once more when the first rank has started. The
   supervisor wakes the worker (`jobs.record_wakeup`), which reports `running` at once with its last reading.
   torchrun, accelerate, deepspeed and horovodrun start ranks, which have their rank in their environment. What any
   other launcher starts is rank 0 itself.
4. Ending. The launcher exits by itself, or gets SIGTERM alone, because torchrun ends its ranks in its own order; after
   the grace period every process of the job gets SIGKILL.
5. Swept. Every process that is left, inside the job's session or not, gets SIGTERM and then SIGKILL: every descendant
   of the supervisor, which as child subreaper is the parent of all orphans below it, and every process of the node with
   the lease's marker. torchrun's ranks are sessions of their own, and a `setsid` grandchild escapes any process group,
   so neither killpg nor waiting for the launcher would suffice.
6. Ended. Only now is `exit.json` written. The supervisor ends; its pidfd wakes the worker, which reports `exited` at
   once, replacing a request that the daemon may be holding. Exit code, reason and traceback are those of the rank that
   failed first (`jobs.failure_cause`). Whom the job is to notify is told by a process that the supervisor has forked,
   so that nothing waits for it (`jobs.notification`).
7. Forgotten. The daemon no longer orders it. The directory stays, because its logs were announced there, and is marked
   `forgotten`; the newest 1000 of those are kept (`--keep-jobs`).

What must always hold
---------------------
- An attempt of a job is launched at most once, whatever is killed when. Each has its own directory and lease.
- A job runs as the user who submitted it, or not at all (`jobs.user_accounts`), and with nothing that was the worker's
  (`jobs.inherited_state`, `jobs.session_keyring`). That user owns its log directory, so
  the logs are read without following links (`gpulease_protocol.host.log_files`).
- While a job's lock is held, another process has the job: the worker searches for the supervisor and does not clean up
  (`jobs.supervisor_watch`).
- `exit.json` exists only when no process of the job is alive, not even one that hangs in the kernel.
- A signal goes to exactly the intended process: by pidfd, checked against pid and start time; never by pid alone.
- A job that the daemon does not order does not run, unless another database ordered it: an empty one, or a restored
  backup, has not decided that it ends. Then none of its GPUs is offered for leases (`gpu_claims.set_aside`).
- A reading named after a ticket was begun, in all that a grant rests on, after the answer with that ticket had arrived.
- What the driver cannot tell is None, never 0; an unreadable process list is not an empty one.

What each failure does
----------------------
- The daemon is away: the jobs continue, and the worker retries forever, every 0.1 to 2 s.
- The worker ends or is killed: the jobs continue; the next worker finds them by `start.json`.
- The fork server is killed or does not answer: its supervisors go on, the next one is started as a program, and another
  fork server is started. The same after an upgrade of the package, so that every job runs what is installed.
- A supervisor is killed: how the job would have ended is unknown. The worker kills everything with the marker and
  reports the job as exited without a code. A worker that starts later does the same.
- The worker starts again under another node name: it refuses while a job of the former one runs, which it would end.
- It starts with another data directory: it names the jobs of this host that it has no record of, and the daemon refuses
  its reports while one of them is a job of its node (`jobs.jobs_elsewhere`).
- The machine reboots: start times count from boot, so the boot's id is in the record, and the job is treated as above.
- The worker is killed between 1 and 2, or right after it started the supervisor: there is an order and no `start.json`,
  so the next worker that is still ordered to run the job starts a supervisor. Of two supervisors the one with the lock
  runs the job; the end of the other means nothing.
- A record is unreadable: the job is reported as `starting` and read again; after 60 s without a supervisor it is given
  up, and everything with its marker is killed.
- A process hangs with the lock of its memory, and so does every reader of its environment: the process is skipped
  (`processes.bounded_read`).
- PAM hangs: the job is not started, and says so after 30 s. It refuses: so does the job.
- The host has no descriptor, thread or memory left, or a file cannot be written: what fails by it is tried again, and
  the report says so where nothing else can (`host_faults`). The worker ends only where it cannot open its data
  directory at its start.
- The driver hangs: the report says so; jobs are started, stopped and reported as usual.
- A job prints without end: its supervisor returns the oldest blocks of its log files to the file system
  (`jobs.log_size_limit`), and all but the last MiB of each while the disk is nearly full. The job writes the files
  itself, through no pipe, so that a supervisor that hangs or dies neither stalls it nor ends it by SIGPIPE.
- The disk is full: a new job is refused with that reason; running jobs continue. The space for `exit.json` was reserved
  with the directory. An order to stop that cannot be written is passed on as SIGTERM alone, which means the default
  grace period, and is written later.
- Another node's part of a job ends, or cannot be reached for 9 s: this one ends too, with or without a daemon.
- A job's processes survive SIGKILL, because they hang in the kernel or run as another user: 5 s after the first SIGKILL
  they are recorded in `stuck.json` and reported, and SIGKILL is re-sent once a second until they exit. A process whose
  first thread alone has ended is one of them, although the kernel shows it as a zombie.
- An owner cannot be watched (no descriptor left, no permission): it is `unknown`, and its leases must be renewed.
- The worker is killed while an owner dies: the next worker gets the same owners, and finds that one gone.
- A second worker on the same data directory waits 15 s for the lock and gives up.

Deliberately absent: a listening socket, because the worker only ever calls the daemon; and a need for cgroups, which
take root or delegation: where a job can have one (`jobs.cgroup`) it is ended through it, and elsewhere the marker and
the subreaper suffice. Only the limits of a whole job need one; the worker's log says where they have no effect.
"""
