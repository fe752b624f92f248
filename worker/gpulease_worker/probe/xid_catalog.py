"""NVIDIA's catalog of Xid errors: the "immediate action" that each requires.

Source: https://docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html, as of November 2026, for A100 to GB200.
A number missing here is unused or unknown in the catalog, or has no action there.
"""

from __future__ import annotations


def _numbers(*parts: int | range) -> frozenset[int]:
    return frozenset(number for part in parts for number in ((part,) if isinstance(part, int) else part))


ACTIONS = {
    "RESTART_APP": _numbers(
        *(8, 11, 13, 25, 31, 32, 39, 40, 41, 60, 68, 69, 70, 71, 72, 75, 76, 77, 80),
        *(82, 83, 84, 85, 86, 88, 89, 94),
        range(96, 106),
        range(126, 136),
        139,
    ),
    "IGNORE": _numbers(
        *(14, 37, 38, 43, 44, 63, 66, 67, 92, 93, 106, 107, 108, 121, 137, 141, 152, 153, 157, 160, 161)
    ),
    "WORKFLOW_XID_45": _numbers(45),  # a program was taken off the GPU, for whatever reason
    "UPDATE_SWFW": _numbers(78),  # a virtual GPU did not start
    "XID_154": _numbers(154),  # the recovery action has changed, also to none
    "POWER_SMOOTHING": _numbers(162, 163, 164, 165),  # notices; "no GPU reset required"
    "RESET_GPU": _numbers(46, 62, 64, 95, 109, 110, 119, 120, 136, 140, 143, 155, 156, 158),
    "WORKFLOW_XID_48": _numbers(48),  # "a GPU reset or node reboot is needed to clear this error"
    "RESTART_BM": _numbers(79),
    "WORKFLOW_NVLINK": _numbers(74, range(144, 151)),  # some require a reset, by bits that NVML does not show
}
"""Xids by action. RESTART_BM is a restart of the host."""
HARMLESS = frozenset().union(
    *(
        ACTIONS[action]
        for action in ("RESTART_APP", "IGNORE", "WORKFLOW_XID_45", "UPDATE_SWFW", "XID_154", "POWER_SMOOTHING")
    )
)
"""A program's own fault, or a notice: the GPU may still be granted."""
RESETS = ACTIONS["RESET_GPU"] | ACTIONS["WORKFLOW_XID_48"] | ACTIONS["RESTART_BM"]
"""The GPU must be reset, or its host restarted."""
