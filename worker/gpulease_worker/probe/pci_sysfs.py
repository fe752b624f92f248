"""Reads what sysfs says about a GPU as a PCI device."""

from __future__ import annotations

import os
from pathlib import Path

DEVICES = "GPULEASE_PCI_DEVICES"
"""Environment variable: the directory of PCI devices, if not /sys/bus/pci/devices."""


def numa_node(pci_bus_id: str | None) -> int | None:
    """The NUMA node that a device is attached to; None if the host has no NUMA nodes or the kernel does not tell.

    NVML cannot answer this: its nvmlDeviceGetNumaNodeId is the node that a GPU's own memory forms (GH200).
    """
    if pci_bus_id is None:
        return None
    domain, _, rest = pci_bus_id.partition(":")
    devices = Path(os.environ.get(DEVICES) or "/sys/bus/pci/devices")
    try:
        name = f"{int(domain, 16):04x}:{rest.lower()}"
        number = int((devices / name / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return number if number >= 0 else None
