"""When a job with a fence has ended for certain, although nothing is heard of its node.

Its worker's last contact was the sending of a report that the daemon has taken in. So the job must not run for more
than `fence_s` after the last report that the daemon took in, by its node's clock. Then SIGTERM, SIGKILL and the sleep
of its supervisor take seconds, and two clocks may differ in their rate. See docs/design/0008-fences-of-jobs.md.
"""

from __future__ import annotations

MARGIN_S = 30.0
"""5 s until the supervisor looks, 10 s until SIGKILL, 5 s until all processes are gone, and 10 s to spare."""
DRIFT_RATIO = 0.002
"""How much slower the node's clock may be than the daemon's: 4 times what a crystal and NTP's correction make."""


def certain_after_s(fence_s: float) -> float:
    """After how many seconds of silence the daemon may start the job's next attempt."""
    return fence_s * (1 + DRIFT_RATIO) + MARGIN_S
