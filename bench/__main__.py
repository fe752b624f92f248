"""`make bench`: every question of this folder, one after the other."""

from __future__ import annotations

from bench import first_call, grants, jobs, metrics, probe, restart

if __name__ == "__main__":
    first_call.main()
    grants.main()
    jobs.main()
    probe.main()
    metrics.main()
    restart.main()
