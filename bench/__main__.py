"""`make bench`: every question of this folder, one after the other."""

from __future__ import annotations

from bench import decisions, first_call, grants, handover, idle, jobs, metrics, probe, restart, startup

if __name__ == "__main__":
    startup.main()
    first_call.main()
    grants.main()
    handover.main()
    decisions.main()
    jobs.main()
    probe.main()
    metrics.main()
    restart.main()
    idle.main()
