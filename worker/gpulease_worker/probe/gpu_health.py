"""Decides whether a GPU is sound, and names it: the values of `GpuReading.health` and `GpuReading.warnings`.

Pure. The facts come from NVML (`nvml_reader`). A GPU that has recovered is `ok` again without a restart of anything.
What should be known but does not keep a GPU from being granted is a warning.

| the hardware reports | health | warning |
|---|---|---|
| recovery action: reset, reboot | `reset_required`, `reboot_required` | |
| recovery action: drain_p2p | | `drain_p2p` |
| an Xid that concerns the GPU, until it has recovered | `xid:N` | |
| memory rows or pages to be replaced at the next reset | | `row_remap_pending`, `retired_pages_pending` |
| memory rows that could not be replaced | `row_remap_failed` | |
| an NVLink fabric that is not ready, and CUDA does not start or cannot be asked | `fabric_not_ready` | |
| an NVLink fabric that is not ready, but CUDA starts | | `fabric_not_ready` |

Source: nvml.h 13.3 (recovery actions, remapped rows, fabric), `xid_catalog`, and for rows NVIDIA's "GPU Memory Error
Management": "new workloads can be launched" while a remapping is pending.
"""

from __future__ import annotations

import re
from dataclasses import replace

from gpulease_protocol.lazy_dataclass import dataclass
from gpulease_worker.probe.xid_catalog import HARMLESS, RESETS

OK = "ok"
LOST = "lost"
RESET_REQUIRED = "reset_required"
UNREADABLE = "unreadable"
FABRIC_NOT_READY = "fabric_not_ready"
ROW_REMAP_PENDING = "row_remap_pending"
HEALTH_WORDS = (
    OK,
    LOST,
    RESET_REQUIRED,
    "reboot_required",
    "row_remap_failed",
    "mig",
    FABRIC_NOT_READY,
    "processes_unknown",
    UNREADABLE,
)
"""Every value of `GpuReading.health` except `xid:N`; docs/glossary.md explains each and what to do."""
WARNINGS = ("drain_p2p", ROW_REMAP_PENDING, "retired_pages_pending", FABRIC_NOT_READY)
"""Every value of `GpuReading.warnings`; docs/glossary.md explains each."""
FABRIC_READY = "completed"
"""The only state in which a fabric is ready."""
HEALTH_BY_ACTION = {
    "none": None,
    "drain_p2p": None,  # work on the GPU itself can continue
    "node_reboot": "reboot_required",
    "system_reboot": "reboot_required",
}
"""Health by recovery action; every other action is some kind of reset."""
NO_ACTION_FACTOR = 10
"""How much longer an Xid counts if the driver does not report a recovery action."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthFacts:
    """What the driver reports about one GPU that answers. None: it could not tell."""

    recovery_action: str | None = None
    """The driver's own verdict, see `OF_ACTION`."""
    remap_pending: bool | None = None
    """Memory rows will be replaced at the next reset."""
    remap_failed: bool | None = None
    """Memory rows could not be replaced."""
    pages_pending: bool | None = None
    """Memory pages will be retired at the next reset, on GPUs that cannot replace rows."""
    fabric: str | None = None
    """State of the NVLink fabric, as in `GpuReading.fabric`; None if the GPU is on none or does not tell."""
    cuda_starts: bool | None = None
    """CUDA starts on this GPU nevertheless; None if it could not be checked, or not yet."""
    mig: bool | None = None
    """Split by MIG."""
    processes_known: bool = True
    """The compute processes could be listed."""
    xid: int | None = None
    """The last Xid that still counts; see `ActiveXids`."""


def health_of(facts: HealthFacts) -> str:
    """The health of a GPU that answers: the most severe that applies."""
    action = facts.recovery_action
    if action is not None and (word := HEALTH_BY_ACTION.get(action, RESET_REQUIRED)) is not None:
        return word
    if facts.xid is not None:
        return f"xid:{facts.xid}"
    if facts.remap_failed:
        return "row_remap_failed"
    if facts.mig:
        return "mig"
    if not _fabric_ready(facts) and not facts.cuda_starts:
        return FABRIC_NOT_READY
    return OK if facts.processes_known else "processes_unknown"


def with_last_known(facts: HealthFacts, before: HealthFacts) -> HealthFacts:
    """These facts, with what made the GPU unsound before where the driver could not tell it this time: a GPU that needs
    a reset or is split by MIG is not sound because a call failed."""
    action = facts.recovery_action
    if action is None and HEALTH_BY_ACTION.get(before.recovery_action or "none", RESET_REQUIRED) is not None:
        action = before.recovery_action
    return replace(
        facts,
        recovery_action=action,
        remap_failed=before.remap_failed if facts.remap_failed is None else facts.remap_failed,
        mig=before.mig if facts.mig is None else facts.mig,
    )


def warnings_of(facts: HealthFacts) -> tuple[str, ...]:
    """What should be known about a GPU that answers, but does not prevent a grant."""
    applies = (
        facts.recovery_action == "drain_p2p",
        facts.remap_pending,
        facts.pages_pending,
        not _fabric_ready(facts) and facts.cuda_starts,
    )
    return tuple(word for word, is_so in zip(WARNINGS, applies, strict=True) if is_so)


def _fabric_ready(facts: HealthFacts) -> bool:
    return facts.fabric in (None, FABRIC_READY)


def cuda_decides(facts: HealthFacts) -> bool:
    """True if the GPU can be used only if CUDA starts on it."""
    return not _fabric_ready(facts) and not facts.mig


def without_harmless_xid(word: str) -> str:
    """`ok` for an Xid that is a program's own fault or a notice; any other health unchanged."""
    return OK if xid_of(word) in HARMLESS else word


def xid_of(word: str) -> int | None:
    """N of `xid:N`; None for any other health."""
    match = re.fullmatch(r"xid:(\d+)", word)
    return int(match[1]) if match else None


class ActiveXids:
    """Xids that concern the GPU itself, each until the GPU has presumably recovered.

    The driver reports an Xid once and never retracts it. If it reports a recovery action, that decides: immediately, or
    after an Xid that requires a reset only once `settle_s` have passed without another, because the action may follow
    the Xid late. If it reports none, an Xid counts for ten times that quiet period.

    Args:
        settle_s: Seconds without another such Xid after which the GPU counts as recovered.
    """

    def __init__(self, settle_s: float) -> None:
        self._settle_s = settle_s
        self._last: dict[str, tuple[int, float]] = {}

    def record(self, uuid: str, xid: int, at_s: float) -> None:
        """Record an Xid of this GPU; a harmless one is ignored."""
        if xid in HARMLESS:
            return
        before, _ = self._last.get(uuid, (xid, at_s))
        is_more_severe = before in RESETS and xid not in RESETS
        self._last[uuid] = (before if is_more_severe else xid, at_s)

    def active(self, uuid: str, recovery_action: str | None, now_s: float) -> int | None:
        """The Xid that still counts against a GPU that answers, given its recovery action; None if none does."""
        xid, at_s = self._last.get(uuid, (None, 0.0))
        if xid is None:
            return None
        factor = NO_ACTION_FACTOR if recovery_action is None else 1 if xid in RESETS else 0
        has_settled = now_s - at_s >= self._settle_s * factor
        if has_settled and (recovery_action is None or HEALTH_BY_ACTION.get(recovery_action, RESET_REQUIRED) is None):
            del self._last[uuid]
            return None
        return xid
