"""How many NVLinks lead from a GPU to each other one, which NVML does not count."""

from __future__ import annotations

from collections import Counter

from gpulease_worker.probe.nvml_binding import GpuFailed, Nvml, normalize_bus_id

MAX_LINKS = 36
"""NVLinks of one GPU, at most, as NVML numbers them."""


def count_nvlinks(nvml: Nvml, index: int) -> Counter[str]:
    """By PCI bus id of what is at the other end: how many NVLinks of a GPU are active. Of GPUs behind an NVSwitch that
    is the switch. Empty where the driver does not tell."""
    found: Counter[str] = Counter()
    try:
        handle = nvml.handle(index)
        for link in range(MAX_LINKS):
            active = nvml.try_call("nvmlDeviceGetNvLinkState", handle, link)
            if active is None:
                break  # it has no more of them
            remote = nvml.try_call("nvmlDeviceGetNvLinkRemotePciInfo", handle, link) if active else None
            if remote is not None:
                text = remote.busId
                found[normalize_bus_id(text.decode(errors="replace") if isinstance(text, bytes) else text)] += 1
    except GpuFailed:
        return Counter()
    return found
