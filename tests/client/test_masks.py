"""Which programs get a mask of numbers, and that the numbers are CUDA's own and mean the leased GPUs."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from gpulease.cuda import index_mask, libcuda
from gpulease_protocol import launchers
from gpulease_protocol.errors import UnknownOrdinals
from gpulease_protocol.launchers import choose_mask
from gpulease_protocol.model import Device, Launcher, Mask
from tests.client.stand_in_cuda import Card, Cuda, machine

LOST = Card("aa110000000000000000000000000000", kind="u")
SLOW = Card("bb220000000000000000000000000000", speed=1)
FAST = Card("cc330000000000000000000000000000", speed=9)
SPLIT = Card("dd440000000000000000000000000000", speed=5, kind="m")
ORDINALS = Path(__file__).parents[2] / "docs" / "ordinals.md"


@pytest.mark.parametrize(
    ("launcher", "command", "by_index"),
    [
        ("deepspeed", "t.py", True),
        ("plain", "vllm serve m", True),
        ("plain", "/venv/bin/vllm serve m", True),
        ("plain", "./vllm", True),
        ("plain", "python -m vllm.entrypoints.openai.api_server --model m", True),
        ("plain", "/v/bin/python3.12 -u -X dev -m vllm.entrypoints.cli.main serve", True),
        ("plain", "python3 -um vllm.entrypoints.api_server", True),
        ("plain", "python -mvllm serve", True),
        ("plain", "python3.13t /venv/bin/vllm serve m", True),
        ("plain", "deepspeed t.py", True),
        ("plain", "ds t.py", True),
        ("plain", "python -m deepspeed.launcher.runner t.py", True),
        ("torchrun", "-m vllm.entrypoints.api_server", True),
        ("torchrun", "t.py vllm", False),
        ("torchrun", "-m package.vllm", False),
        ("accelerate", "t.py", False),
        ("lightning", "t.py --vllm", False),
        ("plain", "python t.py vllm", False),
        ("plain", "python -c vllm", False),
        ("plain", "python -c pass -m vllm", False),
        ("plain", "python - -m vllm", False),
        ("plain", "python -W vllm t.py", False),
        ("plain", "python t.py -m vllm", False),
        ("plain", "python", False),
        ("plain", "python -m", False),
        ("plain", "python vllm.py", False),
        ("plain", "vllm-bench", False),
        ("plain", "sh -c vllm", False),
        ("plain", "nvidia-smi -L", False),
    ],
)
def test_only_programs_known_to_read_numbers_get_them_by_default(launcher: str, command: str, by_index: bool) -> None:
    assert (choose_mask(Launcher(launcher), command.split()) is Mask.INDICES) is by_index


@pytest.mark.parametrize("name", launchers.READS_INDICES)
def test_the_page_lists_the_programs_that_get_numbers_by_default(name: str) -> None:
    assert f"`{name}`" in ORDINALS.read_text()


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Cuda:
    return Cuda(tmp_path_factory.mktemp("cuda"))


def devices(*cards: Card) -> list[Device]:
    """The GPUs of a lease; the daemon's indices are not CUDA's."""
    return [Device(uuid=card.uuid, node="a", index=index + 5) for index, card in enumerate(cards)]


def bound(library: Cuda, leased: tuple[Card, ...], *cards: Card, **more: str) -> dict[str, str]:
    """The environment of a program under a lease, by number."""
    environ = library.environment | {"STAND_IN_CUDA": machine(*cards), "CUDA_VISIBLE_DEVICES": "7"} | more
    return index_mask.with_index_mask(environ, devices(*leased), simulated=False)


def shown(environ: Mapping[str, str]) -> list[str]:
    return libcuda.query_devices(environ)


@pytest.mark.parametrize(
    ("cards", "leased", "mask"),
    [
        ((SLOW, FAST), (FAST,), "1"),
        ((SLOW, FAST), (SLOW, FAST), "0,1"),
        ((LOST, SLOW, FAST), (FAST,), "1"),
        ((LOST, SLOW, LOST, FAST), (SLOW, FAST), "0,1"),
        ((SPLIT, SLOW, FAST), (FAST,), "2"),
    ],
)
def test_an_index_is_cudas_whatever_cuda_hides_or_takes_for_fastest(
    library: Cuda, cards: tuple[Card, ...], leased: tuple[Card, ...], mask: str
) -> None:
    environ = bound(library, leased, *cards, CUDA_DEVICE_ORDER="FASTEST_FIRST")
    assert (environ["CUDA_VISIBLE_DEVICES"], environ["CUDA_DEVICE_ORDER"]) == (mask, "PCI_BUS_ID")
    assert shown(environ) == [card.uuid for card in leased]


def test_simulated_gpus_keep_the_daemons_indices() -> None:
    environ = index_mask.with_index_mask({"HOME": "/"}, devices(SLOW, FAST), simulated=True)
    assert environ == {"HOME": "/", "CUDA_VISIBLE_DEVICES": "5,6", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


@pytest.mark.parametrize(
    ("cards", "more", "words"),
    [
        ((SLOW, LOST), {}, f"it does not show {FAST.uuid}, but {SLOW.uuid}"),
        ((LOST,), {}, "but no GPU at all"),
        ((SLOW, FAST), {"STAND_IN_FAILS": "802"}, "cuInit answers with error 802"),
        ((SLOW, FAST), {"STAND_IN_FAILS": "dies"}, "the driver fell over"),
    ],
)
def test_an_unknown_index_is_not_guessed(
    library: Cuda, cards: tuple[Card, ...], more: dict[str, str], words: str
) -> None:
    with pytest.raises(UnknownOrdinals, match="The numbers that CUDA gives these GPUs are not known") as refused:
        bound(library, (FAST,), *cards, **more)
    assert words in str(refused.value)


def test_without_libcuda_there_are_no_indices(tmp_path: Path) -> None:
    library = Cuda(tmp_path)
    library.is_missing()
    with pytest.raises(UnknownOrdinals, match=r"libcuda\.so\.1"):
        bound(library, (SLOW,), SLOW)


def test_a_driver_that_hangs_is_waited_for_so_long_and_no_longer(
    library: Cuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_mask, "QUERY_TIMEOUT_S", 0.5)
    begun = time.monotonic()
    with pytest.raises(UnknownOrdinals, match=r"it did not answer within 0\.5 s"):
        bound(library, (SLOW,), SLOW, STAND_IN_FAILS="hang")
    assert time.monotonic() - begun < 10


def test_a_mask_under_which_cuda_shows_other_gpus_is_not_used() -> None:
    """As with an MPS daemon that renumbers, or a driver that counts otherwise under a mask."""

    def ask(environ: Mapping[str, str]) -> list[str]:
        return [SLOW.uuid] if "CUDA_VISIBLE_DEVICES" in environ else [SLOW.uuid, FAST.uuid]

    with pytest.raises(libcuda.CudaError, match=f"CUDA_VISIBLE_DEVICES=1 it shows {SLOW.uuid} instead of {FAST.uuid}"):
        index_mask.cuda_indices([FAST.uuid], os.environ, ask)
