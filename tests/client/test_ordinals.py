"""How the mask is read before CUDA is initialised, and which GPUs a container or a cgroup leaves."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gpulease import Gpu, GpuState, UnknownOrdinals
from gpulease.cuda.ordinals import masked_positions, visible_gpus

A, B, C = "GPU-aa11", "GPU-ab22", "GPU-cc33"


@pytest.mark.parametrize(
    ("mask", "visible"),
    [
        (None, [0, 1, 2]),
        ("", []),
        ("-1", []),
        ("none", []),
        ("1", [1]),
        ("2,0", [2, 0]),
        (" 2 , 0 ", [2, 0]),
        ("1gpu,2", [1, 2]),
        ("+1", [1]),
        ("0,3,1", [0]),
        ("0,-1,1", [0]),
        ("0,,1", [0]),
        ("1,0,1", []),
        (C, [2]),
        (f"{C},{A}", [2, 0]),
        ("GPU-c,GPU-aa", [2, 0]),
        (f"{C}, {A}", [2]),
        ("GPU-a", []),
        (f"{B},GPU-a,{C}", [1]),
        (f"{A},GPU-aa", []),
        (C.upper(), []),
        (f"{A},1", [0]),
        (f"1,{A}", [1]),
        ("MIG-1", []),
        pytest.param(f"2,{'9' * 5000},1", [2], id="more digits than Python reads"),
        pytest.param(f"{'0' * 5000}2,1", [2, 1], id="zeros"),
    ],
)
def test_a_mask_selects_what_cuda_would_show(mask: str | None, visible: list[int]) -> None:
    assert masked_positions(mask, [A, B, C]) == visible


def host(*minor_numbers: int | None) -> list[Gpu]:
    """GPUs in PCI order with these minor numbers, which seldom follow it."""
    return [
        Gpu(uuid=f"GPU-{index}", node="a", index=index, minor_number=minor, name="same", state=GpuState.FREE)
        for index, minor in enumerate(minor_numbers)
    ]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "dev").mkdir()
    for name in ("nvidiactl", "nvidia-uvm", "nvidia-caps"):
        (tmp_path / "dev" / name).touch()
    return tmp_path


@pytest.mark.parametrize(
    ("files", "minor_numbers", "mask", "visible"),
    [
        ((0, 1, 2, 3), (3, 2, 1, 0), None, [0, 1, 2, 3]),
        ((0, 1, 2, 3), (3, 2, 1, 0), "3,0", [3, 0]),
        ((1, 3), (3, 2, 1, 0), None, [0, 2]),
        ((1, 3), (3, 2, 1, 0), "1", [2]),
        ((1, 3), (3, 2, 1, 0), "1,2", [2]),
        ((1, 3), (3, 2, 1, 0), "GPU-2,GPU-0", [2, 0]),
        ((), (3, 2, 1, 0), None, [0, 1, 2, 3]),
    ],
)
def test_in_a_container_gpus_with_a_device_file_are_counted(
    root: Path, files: tuple[int, ...], minor_numbers: tuple[int | None, ...], mask: str | None, visible: list[int]
) -> None:
    for number in files:
        (root / f"dev/nvidia{number}").touch()
    environ = {} if mask is None else {"CUDA_VISIBLE_DEVICES": mask}
    shown = visible_gpus(host(*minor_numbers), environ, root=root)
    assert [gpu.index for gpu in shown.gpus] == visible
    assert shown.ordinals(f"GPU-{index}" for index in visible) == list(range(len(visible)))


def test_ambiguous_device_files_are_not_guessed(root: Path) -> None:
    """Of the two GPUs one is here, and the driver tells no minor number. CUDA is asked, and knows neither."""
    (root / "dev/nvidia0").touch()
    with pytest.raises(UnknownOrdinals, match=r"by full UUID|leases none"):
        visible_gpus(host(None, None), {}, root=root)


def test_a_gpu_with_an_inaccessible_device_file_is_not_shown(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As under a cgroup of devices. root may open everything, so the kernel's answer is given here."""
    for number in (0, 1, 2):
        (root / f"dev/nvidia{number}").touch()
    monkeypatch.setattr(os, "access", lambda path, mode: str(path)[-1] != "1" and mode == os.R_OK | os.W_OK)
    assert [gpu.index for gpu in visible_gpus(host(0, 1, 2), {}, root=root).gpus] == [0, 2]


def test_simulated_gpus_need_no_device_file(root: Path) -> None:
    (root / "dev/nvidia0").touch()
    assert len(visible_gpus(host(0, 1, 2), {}, root=root, simulated=True).gpus) == 3
