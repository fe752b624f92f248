"""What decides whether a GPU is sound, and the words for it: the values of `GpuReading.health`.

Pure. The facts come from NVML (`hardware`), and a GPU that is sound again is `ok` again, without a restart of anything.
What is no reason to keep a GPU from anybody is a warning: the values of `GpuReading.warnings`.

| the hardware says | health | warning |
|---|---|---|
| recovery action: reset, reboot | `reset_required`, `reboot_required` | |
| recovery action: drain_p2p | | `drain_p2p` |
| an Xid that concerns the GPU, until it is over | `xid:N` | |
| rows or pages wait for the next reset | | `row_remap_pending`, `retired_pages_pending` |
| rows could not be replaced | `row_remap_failed` | |
| its NVLink fabric is not ready, and CUDA does not start or cannot be asked | `fabric_not_ready` | |
| its NVLink fabric is not ready, and CUDA starts | | `fabric_not_ready` |

Source: nvml.h 13.3 (recovery actions, remapped rows, fabric), `xid_catalog`, and for rows NVIDIA's "GPU Memory Error
Management": "new workloads can be launched" while a remapping is pending.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from gpulease_worker.xid_catalog import HARMLESS, RESETS

OK = "ok"
LOST = "lost"
RESET_REQUIRED = "reset_required"
UNREADABLE = "unreadable"
FABRIC = "fabric_not_ready"
ROW_REMAP_PENDING = "row_remap_pending"
WORDS = (
    OK,
    LOST,
    RESET_REQUIRED,
    "reboot_required",
    "row_remap_failed",
    "mig",
    FABRIC,
    "processes_unknown",
    UNREADABLE,
)
"""Every value of `GpuReading.health` but `xid:N`; docs/glossary.md says what each means and what to do."""
WARNINGS = ("drain_p2p", ROW_REMAP_PENDING, "retired_pages_pending", FABRIC)
"""Every value of `GpuReading.warnings`; docs/glossary.md says what each means."""
FABRIC_READY = "completed"
"""The one state of a fabric in which it is ready."""
OF_ACTION = {
    "none": None,
    "drain_p2p": None,  # work on the GPU itself can go on
    "node_reboot": "reboot_required",
    "system_reboot": "reboot_required",
}
"""What a recovery action means for health; every other one is a reset of one kind or another."""
UNTOLD = 10
"""How many times longer an Xid counts where the driver does not say whether the GPU has recovered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What the driver told of one GPU that answers. None where it could not tell."""

    recovery_action: str | None = None
    """The driver's own verdict, see `OF_ACTION`."""
    remap_pending: bool | None = None
    """Memory rows wait to be replaced at the next reset."""
    remap_failed: bool | None = None
    """Memory rows could not be replaced."""
    pages_pending: bool | None = None
    """Memory pages wait to be retired at the next reset, on GPUs that replace no rows."""
    fabric: str | None = None
    """State of the NVLink fabric, as in `GpuReading.fabric`; None where the GPU is on none, or does not tell."""
    cuda_starts: bool | None = None
    """CUDA starts on this GPU all the same; None where nobody could ask, or has not yet."""
    mig: bool | None = None
    """Split by MIG."""
    processes_known: bool = True
    """The compute processes could be listed."""
    xid: int | None = None
    """The last Xid that still counts, see `Xids`."""


def judged(facts: Facts) -> str:
    """The health of a GPU that answers: the gravest that applies."""
    action = facts.recovery_action
    if action is not None and (word := OF_ACTION.get(action, RESET_REQUIRED)) is not None:
        return word
    if facts.xid is not None:
        return f"xid:{facts.xid}"
    if facts.remap_failed:
        return "row_remap_failed"
    if facts.mig:
        return "mig"
    if not _fabric_ready(facts) and not facts.cuda_starts:
        return FABRIC
    return OK if facts.processes_known else "processes_unknown"


def warnings(facts: Facts) -> tuple[str, ...]:
    """What should be known of a GPU that answers, and keeps it from nobody."""
    applies = (
        facts.recovery_action == "drain_p2p",
        facts.remap_pending,
        facts.pages_pending,
        not _fabric_ready(facts) and facts.cuda_starts,
    )
    return tuple(word for word, is_so in zip(WARNINGS, applies, strict=True) if is_so)


def _fabric_ready(facts: Facts) -> bool:
    return facts.fabric in (None, FABRIC_READY)


def cuda_decides(facts: Facts) -> bool:
    """True when it depends on CUDA whether the GPU can be used."""
    return not _fabric_ready(facts) and not facts.mig


def without_harmless_xid(word: str) -> str:
    """`ok` for an Xid that is a program's own fault or a notice, every other health as it is."""
    return OK if xid_of(word) in HARMLESS else word


def xid_of(word: str) -> int | None:
    """N of `xid:N`; None for any other health."""
    found = re.fullmatch(r"xid:(\d+)", word)
    return int(found[1]) if found else None


class Xids:
    """Xids that concern the GPU itself, each until there is reason to think that it has recovered.

    The driver reports an Xid once and never takes it back. Where it tells a recovery action, that decides: at once, and
    after an Xid that asks for a reset only once `settle_s` have passed without another, because the action may come
    later than the Xid. Where it tells none, an Xid counts for ten times that quiet period.

    Args:
        settle_s: Seconds without a further such Xid after which recovery is believed.
    """

    def __init__(self, settle_s: float) -> None:
        self._settle_s = settle_s
        self._seen: dict[str, tuple[int, float]] = {}

    def saw(self, uuid: str, xid: int, at_s: float) -> None:
        """Take note of an Xid of this GPU; a harmless one is passed over."""
        if xid in HARMLESS:
            return
        before, _ = self._seen.get(uuid, (xid, at_s))
        graver = before in RESETS and xid not in RESETS
        self._seen[uuid] = (before if graver else xid, at_s)

    def standing(self, uuid: str, recovery_action: str | None, now_s: float) -> int | None:
        """The Xid that still counts against a GPU that answers, given the driver's last verdict."""
        xid, at_s = self._seen.get(uuid, (None, 0.0))
        if xid is None:
            return None
        patience = UNTOLD if recovery_action is None else 1 if xid in RESETS else 0
        over = now_s - at_s >= self._settle_s * patience
        if over and (recovery_action is None or OF_ACTION.get(recovery_action, RESET_REQUIRED) is None):
            del self._seen[uuid]
            return None
        return xid
