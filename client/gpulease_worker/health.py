"""What decides whether a GPU is sound, and the words for it: the values of `GpuReading.health`.

Pure. The facts come from NVML (`hardware`), and a GPU that is sound again is `ok` again, without a restart of anything.

Source: nvml.h 13.3 (recovery actions, remapped rows) and NVIDIA's list of Xid errors.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

OK = "ok"
LOST = "lost"
RESET_REQUIRED = "reset_required"
UNREADABLE = "unreadable"
WORDS = (
    OK,
    LOST,
    RESET_REQUIRED,
    "reboot_required",
    "row_remap_pending",
    "row_remap_failed",
    "mig",
    "processes_unknown",
    UNREADABLE,
)
"""Every value of `GpuReading.health` but `xid:N`; docs/glossary.md says what each means and what to do."""
APPLICATION_XIDS = frozenset({13, 31, 43, 45, 68, 109})
"""Xid errors that a program brings on itself: they say nothing of the GPU."""
OF_ACTION = {
    "none": None,
    "drain_p2p": None,  # work on the GPU itself can go on
    "node_reboot": "reboot_required",
    "system_reboot": "reboot_required",
}
"""What a recovery action means for health; every other one is a reset of one kind or another."""
UNTOLD = 10
"""How many times longer a critical Xid counts where the driver does not say whether the GPU has recovered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What the driver told of one GPU that answers. None where it could not tell."""

    recovery_action: str | None = None
    """The driver's own verdict, see `OF_ACTION`."""
    remap_pending: bool | None = None
    """Memory rows wait to be replaced at the next reset."""
    remap_failed: bool | None = None
    """Memory rows could not be replaced."""
    mig: bool | None = None
    """Split by MIG."""
    processes_known: bool = True
    """The compute processes could be listed."""
    xid: int | None = None
    """The last critical Xid that still counts, see `Xids`."""


def judged(facts: Facts) -> str:
    """The health of a GPU that answers: the gravest that applies."""
    action = facts.recovery_action
    if action is not None and (word := OF_ACTION.get(action, RESET_REQUIRED)) is not None:
        return word
    if facts.xid is not None:
        return f"xid:{facts.xid}"
    if facts.remap_failed:
        return "row_remap_failed"
    if facts.remap_pending:
        return "row_remap_pending"
    if facts.mig:
        return "mig"
    return OK if facts.processes_known else "processes_unknown"


def without_application_xid(word: str) -> str:
    """`ok` for an Xid that an application brings on itself, every other health as it is."""
    return OK if xid_of(word) in APPLICATION_XIDS else word


def xid_of(word: str) -> int | None:
    """N of `xid:N`; None for any other health."""
    found = re.fullmatch(r"xid:(\d+)", word)
    return int(found[1]) if found else None


class Xids:
    """Critical Xids by GPU, each until there is reason to think that the GPU has recovered.

    The driver reports an Xid once and never takes it back. It counts for `settle_s` after the last one; then the
    driver's recovery action decides (no action: over), or, where the driver has none, ten times that quiet period.

    Args:
        settle_s: Seconds without a further critical Xid after which recovery is believed.
    """

    def __init__(self, settle_s: float) -> None:
        self._settle_s = settle_s
        self._seen: dict[str, tuple[int, float]] = {}

    def saw(self, uuid: str, xid: int, at_s: float) -> None:
        """Take note of an Xid of this GPU; one of an application's own is passed over."""
        if xid not in APPLICATION_XIDS:
            self._seen[uuid] = (xid, at_s)

    def standing(self, uuid: str, recovery_action: str | None, now_s: float) -> int | None:
        """The Xid that still counts against a GPU that answers, given the driver's verdict read after `now_s`."""
        xid, at_s = self._seen.get(uuid, (None, 0.0))
        if xid is None:
            return None
        settled = now_s - at_s >= self._settle_s * (UNTOLD if recovery_action is None else 1)
        if settled and (recovery_action is None or OF_ACTION.get(recovery_action, RESET_REQUIRED) is None):
            del self._seen[uuid]
            return None
        return xid
