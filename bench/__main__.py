"""`make bench`: every question of this folder, one after the other."""

from __future__ import annotations

from bench import first_call, grants, jobs, metrics, probe, restart, startup

if __name__ == "__main__":
    startup.main()
    first_call.main()
    grants.main()
    jobs.main()
    probe.main()
    metrics.main()
    restart.main()
