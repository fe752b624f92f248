"""Words for the numbers of NVML, from nvml.h 13.3: an older nvidia-ml-py does not name all of them."""

from __future__ import annotations

RECOVERY_ACTIONS = (
    "none",
    "gpu_reset",
    "node_reboot",
    "drain_p2p",
    "drain_and_reset",
    "recover_imex_domain",
    "bus_reset",
    "system_reboot",
)
"""By number: what a GPU needs to recover. Drivers of 580 say 5 for a bus reset; both need a reset."""
TOPOLOGY_PATHS = {
    0: "same_board",
    10: "one_switch",
    20: "several_switches",
    30: "host_bridge",
    40: "numa_node",
    50: "system",
}
"""By number: how two GPUs are connected over PCIe."""
THROTTLE_REASONS = {
    0x002: "applications_clocks",
    0x004: "sw_power_cap",
    0x008: "hw_slowdown",
    0x010: "sync_boost",
    0x020: "sw_thermal_slowdown",
    0x040: "hw_thermal_slowdown",
    0x080: "hw_power_brake",
    0x100: "display_clocks",
    0x200: "board_limit",
    0x400: "reliability",
}
"""By bit. Bit 0, an idle GPU that lowers its clocks, is left out."""
FABRIC_STATES = {1: "not_started", 2: "in_progress", 3: "completed"}
"""By number: progress of a GPU in joining its NVLink fabric; 0 is a GPU without one, or one that does not tell
(A100)."""
FABRIC_FAILED = "failed"
"""The GPU has completed joining, with an error."""
